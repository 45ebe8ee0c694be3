//! What of groups of rows is known before anything runs, and the matrix that their copies make.

use burn_core::backend::{Backend, TensorMetadata};
use nvfp4_kernels::reference::{EDEN_GROUP, padding::padded_bound};
use nvfp4_kernels::{MX_BLOCK, Usage};

use super::super::packed::unit_of;
use super::super::{CopySpec, EdenSpec, MxLayout, PackedLayout};
use super::RowGroups;
#[cfg(feature = "cubecl-backend")]
use super::RowGroupsMetadata;

/// Groups of rows of which the number is known.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arrangement {
    /// This many, of equally many rows.
    Batch(usize),
    /// This many, of any sizes.
    Offsets(usize),
}

impl Arrangement {
    /// Number of groups.
    #[cfg(feature = "cubecl-backend")]
    pub(super) fn count(self) -> usize {
        match self {
            Self::Batch(count) | Self::Offsets(count) => count,
        }
    }

    /// The matrix that holds the copies along `usage` of the groups of a `rows` x `cols` matrix, each padded to a
    /// multiple of `unit` along its rows: its rows, its columns, and the axis along which it is packed.
    fn holder(
        self,
        (rows, cols): (usize, usize),
        usage: Usage,
        unit: usize,
    ) -> (usize, usize, Usage) {
        match (usage, self) {
            (Usage::Rowwise, _) => (rows, cols, usage),
            // Row-wise copies of the transposed matrices.
            (Usage::Columnwise, Self::Batch(count)) => (count * cols, rows / count, Usage::Rowwise),
            (Usage::Columnwise, Self::Offsets(count)) => {
                (padded_bound(rows, count, unit), cols, usage)
            }
        }
    }

    /// The layout of copies in 1x16 blocks.
    pub(super) fn copy(self, shape: (usize, usize), usage: Usage, copy: &CopySpec) -> PackedLayout {
        let (rows, cols, usage) = self.holder(shape, usage, unit_of(copy.hadamard));
        copy.layout(rows, cols, usage)
    }

    /// The layout of copies by MS-EDEN.
    pub(super) fn eden(self, shape: (usize, usize), spec: &EdenSpec) -> PackedLayout {
        let (rows, cols, usage) = self.holder(shape, spec.usage, EDEN_GROUP);
        EdenSpec { usage, ..*spec }.layout(rows, cols)
    }

    /// The layout of copies in MXFP8.
    pub(super) fn mx(self, shape: (usize, usize), usage: Usage) -> MxLayout {
        let (rows, cols, usage) = self.holder(shape, usage, MX_BLOCK);
        MxLayout { rows, cols, usage }
    }
}

impl<B: Backend> RowGroups<B> {
    pub(super) fn arrangement(&self) -> Arrangement {
        match self {
            Self::Batch(count) => Arrangement::Batch(*count),
            Self::Offsets(offsets) => Arrangement::Offsets(offsets.shape()[0] - 1),
        }
    }
}

#[cfg(feature = "cubecl-backend")]
impl RowGroupsMetadata {
    pub(super) fn arrangement(&self) -> Arrangement {
        match self {
            Self::Batch(count) => Arrangement::Batch(*count),
            Self::Offsets(offsets) => Arrangement::Offsets(offsets.shape[0] - 1),
        }
    }
}
