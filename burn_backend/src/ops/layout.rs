//! Layout of a quantized matrix whose rows are in groups.

use burn_core::backend::{Backend, TensorMetadata};
use burn_core::tensor::DType;
use nvfp4_formats::reference::padding::padded_bound;
use nvfp4_formats::{AmaxGranularity, Layout, StoredForm, Usage};

use super::spec::QuantParams;
use super::tensors::RowGroups;
#[cfg(feature = "cubecl-backend")]
use super::tensors::RowGroupsMetadata;

/// Returns the width of a stored row of codes in elements, and their dtype: words of eight 4-bit
/// codes, or bytes.
pub(super) fn code_words(layout: &Layout) -> (usize, DType) {
    let elements = layout.padded_inner();
    match layout.format.code_bits() {
        4 => (elements / 8, DType::U32),
        _ => (elements, DType::U8),
    }
}

/// Groups of a matrix's rows, as known before anything runs.
#[derive(Debug, Clone, Copy)]
pub(super) enum GroupCount {
    /// One group of all rows.
    Whole,
    /// This number of groups with equal numbers of rows.
    Batch(usize),
    /// This number of groups of any sizes.
    Offsets(usize),
}

impl GroupCount {
    /// Number of groups.
    pub(super) fn get(self) -> usize {
        match self {
            Self::Whole => 1,
            Self::Batch(count) | Self::Offsets(count) => count,
        }
    }

    /// Returns the layout of the quantized groups of a `rows` x `cols` matrix, as one quantized
    /// matrix.
    pub(super) fn layout(
        self,
        (rows, cols): (usize, usize),
        usage: Usage,
        params: &QuantParams,
        form: StoredForm,
    ) -> Layout {
        let (shape, usage) = match (usage, self) {
            (Usage::Rowwise, _) => ((rows, cols), usage),
            (Usage::Columnwise, Self::Whole) => {
                ((rows.next_multiple_of(form.unit(1)), cols), usage)
            }
            // The row-wise quantized tensors of the transposed matrices, stacked along the rows.
            (Usage::Columnwise, Self::Batch(count)) => {
                ((count * cols, rows / count), Usage::Rowwise)
            }
            // Concatenated along the columns, each group padded to whole blocks, or transforms.
            (Usage::Columnwise, Self::Offsets(count)) => {
                let unit = form.unit(params.unit());
                ((padded_bound(rows, count, unit), cols), usage)
            }
        };
        params.layout(shape, usage, form)
    }

    /// Returns rows and columns of the block scales of the quantized groups with this layout.
    #[cfg(feature = "cubecl-backend")]
    pub(super) fn scale_shape(self, layout: &Layout) -> [usize; 2] {
        use nvfp4_formats::reference::swizzle::row_group_tiles;
        let (outer, blocks) = (layout.outer(), layout.blocks());
        let rows = match (layout.form.has_tiles(), layout.usage, self) {
            (false, ..) => return [outer, blocks],
            (_, Usage::Rowwise, Self::Batch(count)) => {
                count * (outer / count).next_multiple_of(128)
            }
            (_, Usage::Rowwise, Self::Offsets(count)) => 128 * row_group_tiles(outer, count),
            (_, Usage::Rowwise, Self::Whole) | (_, Usage::Columnwise, _) => {
                outer.next_multiple_of(128)
            }
        };
        [rows, blocks.next_multiple_of(4)]
    }

    /// Number of amax values of the quantized groups with this layout.
    pub(super) fn amax_len(self, layout: &Layout) -> usize {
        match (layout.amax, layout.usage) {
            _ if !layout.format.has_global_scale() => 0,
            (AmaxGranularity::PerTensor, _) => self.get(),
            (AmaxGranularity::PerRow, Usage::Rowwise) => layout.rows,
            (AmaxGranularity::PerRow, Usage::Columnwise) => self.get() * layout.cols,
        }
    }
}

impl<B: Backend> RowGroups<B> {
    pub(super) fn count(&self) -> GroupCount {
        match self {
            Self::Whole => GroupCount::Whole,
            Self::Batch(count) => GroupCount::Batch(*count),
            Self::Offsets(offsets) | Self::Window { offsets, .. } => {
                GroupCount::Offsets(offsets.shape()[0] - 1)
            }
        }
    }
}

#[cfg(feature = "cubecl-backend")]
impl RowGroupsMetadata {
    pub(super) fn count(&self) -> GroupCount {
        match self {
            Self::Whole => GroupCount::Whole,
            Self::Batch(count) => GroupCount::Batch(*count),
            Self::Offsets(offsets) | Self::Window { offsets, .. } => {
                GroupCount::Offsets(offsets.shape[0] - 1)
            }
        }
    }
}
