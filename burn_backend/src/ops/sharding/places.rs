//! Positions of a rank's parts in the operand of one device, which determine the random bits of
//! their blocks; and the concatenation of parts that one kernel cannot quantize together.

use burn_core::backend::Backend;
use nvfp4_formats::{AmaxGranularity, BlockPosition, Gap, Gaps, Usage};

use super::super::spec::QuantParams;
use super::super::tensors::{QuantizedData, QuantizedMatrix, QuantizedPair};

/// Stored dimension of an operand along which the parts of ranks are concatenated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Axis {
    /// Stored rows.
    Outer,
    /// The K dimension.
    Inner,
    /// Stored rows of whole matrices of a stack, which are quantized separately.
    Stack,
}

/// Position of a segment of a rank's part: its first row or column in the part and in the whole,
/// and its length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) own: usize,
    pub(super) whole: usize,
    pub(super) len: usize,
}

/// Gaps between a rank's segments along one dimension of the whole.
pub(super) struct GapsBetween {
    /// 0 for segments of rows, 1 for segments of columns.
    dim: usize,
    /// First row or column after each gap, and size of the gap.
    gaps: [(usize, usize); 2],
}

impl GapsBetween {
    pub(super) fn none(dim: usize) -> Self {
        Self {
            dim,
            gaps: [(0, 0); 2],
        }
    }

    /// Returns the gaps between `segments`, unless there are more than a kernel supports.
    pub(super) fn of(dim: usize, segments: &[Segment]) -> Option<Self> {
        let mut between = Self::none(dim);
        if segments.len() > 1 + between.gaps.len() {
            return None;
        }
        for (gap, pair) in between.gaps.iter_mut().zip(segments.windows(2)) {
            *gap = (pair[1].own, pair[1].whole - pair[0].whole - pair[0].len);
        }
        Some(between)
    }

    /// Converts the gaps to stored rows, or to blocks of a stored row, of the tensor along `usage`.
    fn stored(&self, usage: Usage, block: usize) -> Gaps {
        let of_rows = (self.dim == 0) == (usage == Usage::Rowwise);
        let unit = if of_rows { 1 } else { block };
        let number = |len: usize| u32::try_from(len / unit).expect("fewer than 2^32 of a tensor");
        let gaps = self.gaps.map(|(at, len)| match len {
            0 => Gap::default(),
            len => Gap {
                at: number(at),
                len: number(len),
            },
        });
        match (gaps == [Gap::default(); 2], of_rows) {
            (true, _) => Gaps::None,
            (false, true) => Gaps::Rows(gaps),
            (false, false) => Gaps::Blocks(gaps),
        }
    }
}

/// Sets the position of a tensor in `params`: at row and column `start` of a matrix of the shape
/// `whole`, with `gaps` between its parts.
pub(super) fn positioned(
    params: QuantParams,
    usage: Usage,
    (start, whole): ((usize, usize), (usize, usize)),
    gaps: &GapsBetween,
) -> QuantParams {
    let block = params.format.block();
    let (row, element) = usage.stored_shape(start.0, start.1);
    let (_, inner) = usage.stored_shape(whole.0, whole.1);
    let row_blocks = inner.next_multiple_of(params.unit()) / block;
    params.at(BlockPosition {
        first: (row * row_blocks + element / block) as u64,
        row_blocks: Some(
            row_blocks
                .try_into()
                .expect("a row of fewer than 2^36 elements"),
        ),
        gaps: gaps.stored(usage, block),
    })
}

/// Concatenates the quantized segments of a matrix along axis `dim`.
pub(super) fn concatenated<B: Backend>(
    parts: Vec<QuantizedPair<B>>,
    dim: usize,
) -> QuantizedPair<B> {
    let (rows, cols): (Vec<_>, Vec<_>) = parts.into_iter().map(QuantizedPair::into_options).unzip();
    QuantizedPair::new(joined(rows, dim), joined(cols, dim))
}

fn joined<B: Backend>(
    parts: Vec<Option<QuantizedMatrix<B>>>,
    dim: usize,
) -> Option<QuantizedMatrix<B>> {
    let parts: Vec<_> = parts.into_iter().collect::<Option<_>>()?;
    let mut layout = parts[0].layout;
    let lens = parts
        .iter()
        .map(|part| [part.layout.rows, part.layout.cols][dim]);
    match dim {
        0 => layout.rows = lens.sum(),
        _ => layout.cols = lens.sum(),
    }
    let axis = match (layout.usage, dim) {
        (Usage::Rowwise, 0) | (Usage::Columnwise, 1) => Axis::Outer,
        _ => Axis::Inner,
    };
    let stored = if axis == Axis::Outer { 0 } else { 1 };
    // An amax per stored row is concatenated too; any other amax is the same for all segments.
    let per_row = layout.amax == AmaxGranularity::PerRow && axis == Axis::Outer;
    let mut amaxes: Vec<_> = (parts.iter())
        .filter_map(|part| part.amax.clone().into_option())
        .collect();
    let amax = match per_row && !amaxes.is_empty() {
        true => Some(B::float_cat(amaxes, 0)),
        false => amaxes.pop(),
    };
    let (codes, scales) = parts.into_iter().map(QuantizedMatrix::into_packed).unzip();
    Some(QuantizedMatrix {
        data: QuantizedData::Packed {
            codes: B::int_cat(codes, stored),
            scales: B::int_cat(scales, stored),
        },
        amax: amax.into(),
        layout,
    })
}
