//! Grouped GEMMs: a loop over groups, whose offsets are in host memory.

use std::ops::Range;

use burn_core::backend::{Flex, ops::FloatTensorOps, ops::IntTensorOps};
use burn_core::tensor::{DType, FloatDType, Shape, Slice};
use burn_flex::FlexTensor;
use nvfp4_formats::{AmaxGranularity, Layout, Usage};

use super::super::tensors::{Operand, QuantizedData, QuantizedMatrix};
use super::gemm::{Addend, dense};
use super::tensors::{matrix, narrow, ranges, side_by_side};

/// Computes the M-grouped GEMM.
pub(super) fn m_grouped(
    a: &Operand<Flex>,
    b: &Operand<Flex>,
    bias: Option<&FlexTensor>,
    offsets: &FlexTensor,
    dtype: FloatDType,
) -> FlexTensor {
    let tokens = stored_outer(a);
    let groups = ranges(offsets, tokens);
    let columns = match b {
        // Stacked along the K dimension.
        Operand::Float(_, Usage::Columnwise) | Operand::QuantizedMnMajor(_) => stored_outer(b),
        Operand::Float(_, Usage::Rowwise) | Operand::Quantized(_) => stored_outer(b) / groups.len(),
    };
    let parts = groups.iter().enumerate().map(|(group, rows)| {
        let bias = bias.map(|bias| row(bias.clone(), group, columns));
        let a = stored_rows(a, rows.clone(), group);
        let b = weight(b, groups.len(), group);
        dense(a, b, Addend::of_bias(bias), dtype)
    });
    with_rest(parts.collect(), tokens, columns, dtype)
}

/// Computes the K-grouped GEMM.
pub(super) fn k_grouped(
    a: &Operand<Flex>,
    b: &Operand<Flex>,
    offsets: &FlexTensor,
    tokens: usize,
    dtype: FloatDType,
) -> FlexTensor {
    let (m, n) = (stored_outer(a), stored_outer(b));
    let groups = ranges(offsets, tokens);
    let places = match a {
        // Groups are not padded.
        Operand::Float(..) | Operand::QuantizedMnMajor(_) => groups,
        Operand::Quantized(quantized) => side_by_side(&groups, quantized.layout.unit()),
    };
    let parts = places.iter().enumerate().map(|(group, place)| {
        let [a, b] = [a, b].map(|operand| stored_columns(operand, place, group));
        dense(a, b, Addend::None, dtype)
    });
    let stacked = Flex::float_cat(parts.collect(), 0);
    Flex::float_reshape(stacked, Shape::new([places.len(), m, n]))
}

/// Sums the rows of each group.
pub(super) fn segment_sum(x: FlexTensor, offsets: &FlexTensor) -> FlexTensor {
    let (tokens, _) = matrix(&x);
    let x = Flex::float_cast(x, FloatDType::F32);
    let sums = ranges(offsets, tokens).into_iter();
    let sums = sums.map(|rows| sum_of(rows_of(x.clone(), rows)));
    Flex::float_cat(sums.collect(), 0)
}

/// Sums the columns of `x`.
pub(super) fn column_sums(x: FlexTensor) -> FlexTensor {
    let (_, cols) = matrix(&x);
    let sums = sum_of(Flex::float_cast(x, FloatDType::F32));
    Flex::float_reshape(sums, Shape::new([cols]))
}

/// Sums the rows of `x` to one.
fn sum_of(x: FlexTensor) -> FlexTensor {
    match matrix(&x) {
        (0, cols) => FlexTensor::zeros(Shape::new([1, cols]), DType::F32),
        _ => Flex::float_sum_dim(x, 0),
    }
}

/// Returns the number of output rows or columns of an operand.
fn stored_outer(operand: &Operand<Flex>) -> usize {
    match operand {
        Operand::Quantized(quantized) => quantized.layout.outer(),
        Operand::QuantizedMnMajor(quantized) => quantized.layout.inner(),
        Operand::Float(x, usage) => {
            let (rows, cols) = matrix(x);
            usage.stored_shape(rows, cols).0
        }
    }
}

/// Returns the weight of group `group` from a stack of `groups`.
fn weight(stack: &Operand<Flex>, groups: usize, group: usize) -> Operand<Flex> {
    let rows = match stack {
        Operand::Quantized(quantized) | Operand::QuantizedMnMajor(quantized) => {
            quantized.layout.outer()
        }
        Operand::Float(x, _) => matrix(x).0,
    };
    let each = rows / groups;
    stored_rows(stack, group * each..(group + 1) * each, group)
}

/// Returns some rows of an operand, those of group `group`; of a quantized operand, stored rows.
fn stored_rows(operand: &Operand<Flex>, rows: Range<usize>, group: usize) -> Operand<Flex> {
    match operand {
        Operand::Quantized(quantized) => {
            Operand::Quantized(Part::of_rows(quantized.layout, rows, group).of(quantized))
        }
        Operand::QuantizedMnMajor(quantized) => {
            Operand::QuantizedMnMajor(Part::of_rows(quantized.layout, rows, group).of(quantized))
        }
        Operand::Float(x, usage) => Operand::Float(rows_of(x.clone(), rows), *usage),
    }
}

/// Returns, of every stored row of a column-wise operand, the elements `place` of the K dimension,
/// which belong to group `group`.
fn stored_columns(operand: &Operand<Flex>, place: &Range<usize>, group: usize) -> Operand<Flex> {
    match operand {
        Operand::Quantized(quantized) => {
            let layout = quantized.layout;
            let (outer, block) = (layout.outer(), layout.format.block());
            let part = Part {
                layout: Layout {
                    rows: place.len(),
                    ..layout
                },
                rows: 0..outer,
                blocks: place.start / block..place.end / block,
                amax: match layout.amax {
                    AmaxGranularity::PerRow => group * outer..(group + 1) * outer,
                    AmaxGranularity::PerTensor => group..group + 1,
                },
            };
            Operand::Quantized(part.of(quantized))
        }
        Operand::QuantizedMnMajor(_) => {
            panic!(
                "`b` is packed and MN-major, with groups along K: expected one along K, or a float"
            )
        }
        Operand::Float(x, usage) => Operand::Float(rows_of(x.clone(), place.clone()), *usage),
    }
}

/// Part of a quantized matrix.
struct Part {
    layout: Layout,
    /// Stored rows.
    rows: Range<usize>,
    /// Blocks of each stored row.
    blocks: Range<usize>,
    amax: Range<usize>,
}

impl Part {
    /// Selects some stored rows, those of group `group`.
    fn of_rows(layout: Layout, rows: Range<usize>, group: usize) -> Self {
        Self {
            layout: Layout {
                rows: rows.len(),
                ..layout
            },
            amax: match layout.amax {
                AmaxGranularity::PerRow => rows.clone(),
                AmaxGranularity::PerTensor => group..group + 1,
            },
            rows,
            blocks: 0..layout.blocks(),
        }
    }

    fn of(self, whole: &QuantizedMatrix<Flex>) -> QuantizedMatrix<Flex> {
        let QuantizedData::Packed { codes, scales } = &whole.data else {
            unreachable!("an operand in groups is packed, or a float");
        };
        let part = |tensor: &FlexTensor| {
            let (_, width) = matrix(tensor);
            // Number of tensor elements per block.
            let each = width / whole.layout.blocks().max(1);
            let columns = self.blocks.start * each..self.blocks.end * each;
            let slices = [Slice::from(self.rows.clone()), Slice::from(columns)];
            Flex::int_slice(tensor.clone(), &slices).to_contiguous()
        };
        let amax = |amax| {
            let slices = [Slice::from(self.amax.clone())];
            Flex::float_slice(amax, &slices).to_contiguous()
        };
        QuantizedMatrix {
            data: QuantizedData::Packed {
                codes: part(codes),
                scales: part(scales),
            },
            amax: whole.amax.clone().map(amax),
            layout: self.layout,
        }
    }
}

/// Returns some rows of a matrix.
fn rows_of(x: FlexTensor, rows: Range<usize>) -> FlexTensor {
    let (_, cols) = matrix(&x);
    Flex::float_slice(x, &[Slice::from(rows), Slice::from(0..cols)])
}

/// Returns row `index` of a matrix of `columns` columns, as a vector.
fn row(x: FlexTensor, index: usize, columns: usize) -> FlexTensor {
    Flex::float_reshape(rows_of(x, index..index + 1), Shape::new([columns]))
}

/// Concatenates the rows of the groups, and pads with zeros to `tokens`.
fn with_rest(
    mut parts: Vec<FlexTensor>,
    tokens: usize,
    columns: usize,
    dtype: FloatDType,
) -> FlexTensor {
    let found: usize = parts.iter().map(|part| matrix(part).0).sum();
    let zeros = FlexTensor::zeros(Shape::new([tokens - found, columns]), DType::F32);
    parts.push(narrow(zeros, dtype));
    Flex::float_cat(parts, 0)
}
