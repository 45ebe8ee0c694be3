//! What of groups of rows is known before anything runs, and the matrix that their copies make.

use burn_core::backend::{Backend, TensorMetadata};
use nvfp4_kernels::reference::{EDEN_GROUP, padding::padded_bound};
use nvfp4_kernels::{MX_BLOCK, PackedAxis};

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

    /// The matrix that holds the copies along `axis` of the groups of a `rows` x `cols` matrix, each padded to a
    /// multiple of `unit` along its rows: its rows, its columns, and the axis along which it is packed.
    fn holder(
        self,
        (rows, cols): (usize, usize),
        axis: PackedAxis,
        unit: usize,
    ) -> (usize, usize, PackedAxis) {
        match (axis, self) {
            (PackedAxis::Cols, _) => (rows, cols, axis),
            // Row-wise copies of the transposed matrices.
            (PackedAxis::Rows, Self::Batch(count)) => {
                (count * cols, rows / count, PackedAxis::Cols)
            }
            (PackedAxis::Rows, Self::Offsets(count)) => {
                (padded_bound(rows, count, unit), cols, axis)
            }
        }
    }

    /// The layout of copies in 1x16 blocks.
    pub(super) fn copy(
        self,
        shape: (usize, usize),
        axis: PackedAxis,
        copy: &CopySpec,
    ) -> PackedLayout {
        let (rows, cols, axis) = self.holder(shape, axis, unit_of(copy.hadamard));
        copy.layout(rows, cols, axis)
    }

    /// The layout of copies by MS-EDEN.
    pub(super) fn eden(self, shape: (usize, usize), spec: &EdenSpec) -> PackedLayout {
        let (rows, cols, axis) = self.holder(shape, spec.axis, EDEN_GROUP);
        EdenSpec { axis, ..*spec }.layout(rows, cols)
    }

    /// The layout of copies in MXFP8.
    pub(super) fn mx(self, shape: (usize, usize), axis: PackedAxis) -> MxLayout {
        let (rows, cols, axis) = self.holder(shape, axis, MX_BLOCK);
        MxLayout { rows, cols, axis }
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
