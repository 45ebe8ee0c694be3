//! Packed matrices as values of the extension trait.

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_kernels::{BLOCK, Hadamard, PackedAxis};

/// What the buffers of a packed matrix mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLayout {
    /// Rows of the source matrix.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which blocks of 16 lie.
    pub axis: PackedAxis,
    /// The transform that was applied along that axis.
    pub hadamard: Option<Hadamard>,
}

impl PackedLayout {
    /// The layout of one copy of a stack of matrices, `[count, rows, cols]`: row-wise copies one
    /// below the other, those of the transposed matrices for [`PackedAxis::Rows`].
    pub fn stack([count, rows, cols]: [usize; 3], axis: PackedAxis) -> Self {
        let (outer, inner) = axis.stored_shape(rows, cols);
        Self {
            rows: count * outer,
            cols: inner,
            axis: PackedAxis::Cols,
            hadamard: None,
        }
    }

    /// Stored rows: the rows of a row-wise copy, the columns of a column-wise one.
    pub fn outer(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        self.inner().div_ceil(BLOCK)
    }
}

/// A packed matrix on a backend.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct Packed<B: Backend> {
    /// Codes, `u32[outer, blocks * 2]`: eight to a word, the first in the lowest four bits.
    pub codes: IntTensor<B>,
    /// Block scales, `u8[outer, blocks]`: E4M3 bytes, row-major.
    pub scales: IntTensor<B>,
    /// Largest magnitude of the source (after the transform, if there is one), `f32[1]`.
    pub amax: FloatTensor<B>,
    /// What the buffers mean.
    pub layout: PackedLayout,
}

/// The two copies of one matrix.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct PackedPair<B: Backend> {
    /// The row-wise copy.
    #[extension_type]
    pub row: Packed<B>,
    /// The column-wise copy, stored transposed.
    #[extension_type]
    pub col: Packed<B>,
}

/// A bias, or none.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum Bias<B: Backend> {
    /// Nothing is added.
    Absent,
    /// A vector, one value for each output feature; added in `f32`.
    Vector(FloatTensor<B>),
}

#[cfg(feature = "cubecl-backend")]
pub(super) use meta::{dequantize_meta, matmul_meta, packed_meta, pair_meta};

/// Shapes and types of the results, for Fusion, which needs them before anything runs.
#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, FloatDType, Shape};

    use super::super::{PairSpec, QuantizeSpec};
    use super::{
        BiasMetadata, Hadamard, PackedAxis, PackedLayout, PackedMetadata, PackedPairMetadata,
    };

    pub(in crate::ops) fn packed_meta(x: &TensorSpec, spec: &QuantizeSpec) -> PackedMetadata {
        packed(x, spec.axis, spec.hadamard)
    }

    pub(in crate::ops) fn pair_meta(x: &TensorSpec, spec: &PairSpec) -> PackedPairMetadata {
        let hadamard = match spec {
            PairSpec::Tile => None,
            PairSpec::Blocks { hadamard, .. } => *hadamard,
        };
        PackedPairMetadata {
            row: packed(x, PackedAxis::Cols, None),
            col: packed(x, PackedAxis::Rows, hadamard),
        }
    }

    pub(in crate::ops) fn dequantize_meta(
        packed: &PackedMetadata,
        dtype: &FloatDType,
    ) -> TensorSpec {
        let layout = packed.layout;
        TensorSpec::new(Shape::new([layout.rows, layout.cols]), (*dtype).into())
    }

    pub(in crate::ops) fn matmul_meta(
        a: &PackedMetadata,
        b: &PackedMetadata,
        _bias: &BiasMetadata,
        dtype: &FloatDType,
    ) -> TensorSpec {
        let shape = Shape::new([a.layout.outer(), b.layout.outer()]);
        TensorSpec::new(shape, (*dtype).into())
    }

    fn packed(x: &TensorSpec, axis: PackedAxis, hadamard: Option<Hadamard>) -> PackedMetadata {
        let layout = PackedLayout {
            rows: x.shape[0],
            cols: x.shape[1],
            axis,
            hadamard,
        };
        let (outer, blocks) = (layout.outer(), layout.blocks());
        PackedMetadata {
            codes: TensorSpec::new(Shape::new([outer, blocks * 2]), DType::U32),
            scales: TensorSpec::new(Shape::new([outer, blocks]), DType::U8),
            amax: TensorSpec::new(Shape::new([1]), DType::F32),
            layout,
        }
    }
}
