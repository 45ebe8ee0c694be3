//! Packed matrices as values of the extension trait.

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType,
    tensor::{FloatTensor, IntTensor},
};
#[cfg(feature = "cubecl-backend")]
use nvfp4_kernels::{AmaxGranularity, Storage};
use nvfp4_kernels::{BLOCK, BlockScaling, Hadamard, MX_BLOCK, Usage};

/// What the buffers of a packed matrix mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedLayout {
    /// Rows of the source matrix.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which blocks of 16 lie.
    pub usage: Usage,
    /// The transform that was applied along that axis, which is padded to a multiple of its size.
    pub hadamard: Option<Hadamard>,
    /// How block scales were found, which decides how an amax decodes.
    pub scaling: BlockScaling,
    /// What one amax stands for.
    pub global: AmaxGranularity,
}

impl PackedLayout {
    /// The layout of a copy with one amax, standard block scales and no transform.
    pub const fn plain(rows: usize, cols: usize, usage: Usage) -> Self {
        Self {
            rows,
            cols,
            usage,
            hadamard: None,
            scaling: BlockScaling::Standard,
            global: AmaxGranularity::PerTensor,
        }
    }

    /// The layout of one copy of a stack of matrices, `[count, rows, cols]`: row-wise copies one
    /// below the other, those of the transposed matrices for [`Usage::Columnwise`].
    pub fn stack([count, rows, cols]: [usize; 3], usage: Usage, scaling: BlockScaling) -> Self {
        let (outer, inner) = usage.stored_shape(rows, cols);
        Self {
            scaling,
            ..Self::plain(count * outer, inner, Usage::Rowwise)
        }
    }

    /// Stored rows: the rows of a row-wise copy, the columns of a column-wise one.
    pub fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Elements to whose multiple the packed axis is padded: those of a block, or of a transform.
    pub fn unit(&self) -> usize {
        unit_of(self.hadamard)
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        let unit = self.unit();
        self.inner().div_ceil(unit) * (unit / BLOCK)
    }

    /// Number of maxima.
    pub fn amax_len(&self) -> usize {
        match self.global {
            AmaxGranularity::PerTensor => 1,
            AmaxGranularity::PerRow => self.outer(),
        }
    }
}

/// Elements to whose multiple a copy with this transform is padded along its blocks.
pub(super) fn unit_of(hadamard: Option<Hadamard>) -> usize {
    hadamard.map_or(BLOCK, |hadamard| hadamard.size().elements())
}

/// A packed matrix on a backend.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct Packed<B: Backend> {
    /// Codes, `u32[outer, blocks * 2]`: eight to a word, the first in the lowest four bits.
    pub codes: IntTensor<B>,
    /// Block scales, `u8[outer, blocks]`: E4M3 bytes, row-major.
    pub scales: IntTensor<B>,
    /// Largest magnitude of the source (after the transform, if there is one), or of each stored row
    /// of it: `f32[amax_len]`.
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

/// What an NVFP4 matrix stands for but for its global scales: code times block scale, which is exact in
/// bf16. Products of a GPU without FP4 instructions multiply these; a copy that is multiplied once need
/// not be packed before.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct Decoded<B: Backend> {
    /// The values in stored orientation, `bf16[outer, blocks * 16]`.
    pub values: FloatTensor<B>,
    /// The maxima, as those of [`Packed`].
    pub amax: FloatTensor<B>,
    /// What the packed matrix would be.
    pub layout: PackedLayout,
}

/// What the buffers of an MXFP8 matrix mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MxLayout {
    /// Rows of the source matrix.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which blocks of 32 lie.
    pub usage: Usage,
}

impl MxLayout {
    /// Stored rows: the rows of a row-wise copy, the columns of a column-wise one.
    pub fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        self.inner().div_ceil(MX_BLOCK)
    }
}

/// A matrix in MXFP8 on a backend.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct MxPacked<B: Backend> {
    /// E4M3 codes, `u8[outer, blocks * 32]`.
    pub codes: IntTensor<B>,
    /// Block scales, `u8[outer, blocks]`: UE8M0 bytes.
    pub scales: IntTensor<B>,
    /// What the buffers mean.
    pub layout: MxLayout,
}

/// One side of a product, in whatever format: `outer` rows, each as long as the contraction.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum Operand<B: Backend> {
    /// 4-bit codes.
    Nvfp4(#[extension_type] Packed<B>),
    /// What they stand for; in dense products only.
    Decoded(#[extension_type] Decoded<B>),
    /// 8-bit codes.
    Mxfp8(#[extension_type] MxPacked<B>),
    /// The matrix itself, contracted along this axis of it.
    Float(FloatTensor<B>, Usage),
}

/// The two copies of one matrix, each in the form that was asked for.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct OperandPair<B: Backend> {
    /// The row-wise copy.
    #[extension_type]
    pub row: Operand<B>,
    /// The column-wise copy, stored transposed.
    #[extension_type]
    pub col: Operand<B>,
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
pub(super) use meta::{
    decoded_meta, dequantize_meta, eden_meta, eden_packed_meta, forms_meta, matmul_meta,
    mx_dequantize_meta, mx_meta, mx_packed_meta, mx_with, packed_meta, pair_meta, product_meta,
    stored_rows, tiles_meta,
};

/// Shapes and types of the results, for Fusion, which needs them before anything runs.
#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, FloatDType, Shape};

    use super::super::{CopySpec, EdenSpec, PairSpec, QuantizeSpec};
    use super::{
        BLOCK, BiasMetadata, BlockScaling, DecodedMetadata, MX_BLOCK, MxLayout, MxPackedMetadata,
        OperandMetadata, OperandPairMetadata, PackedLayout, PackedMetadata, PackedPairMetadata,
        Storage, Usage,
    };

    pub(in crate::ops) fn packed_meta(x: &TensorSpec, spec: &QuantizeSpec) -> PackedMetadata {
        packed(spec.copy.layout(x.shape[0], x.shape[1], spec.usage))
    }

    pub(in crate::ops) fn pair_meta(x: &TensorSpec, spec: &PairSpec) -> PackedPairMetadata {
        let [row, col] = spec.copies();
        let copy = |copy: CopySpec, usage| packed(copy.layout(x.shape[0], x.shape[1], usage));
        PackedPairMetadata {
            row: copy(row, Usage::Rowwise),
            col: copy(col, Usage::Columnwise),
        }
    }

    pub(in crate::ops) fn tiles_meta(
        x: &TensorSpec,
        usage: &Usage,
        scaling: &BlockScaling,
    ) -> PackedMetadata {
        packed(CopySpec::of_tiles(*scaling).layout(x.shape[0], x.shape[1], *usage))
    }

    pub(in crate::ops) fn decoded_meta(x: &TensorSpec, spec: &QuantizeSpec) -> DecodedMetadata {
        decoded(spec.copy.layout(x.shape[0], x.shape[1], spec.usage))
    }

    pub(in crate::ops) fn forms_meta(
        x: &TensorSpec,
        row: &(CopySpec, Storage),
        col: &(CopySpec, Storage),
    ) -> OperandPairMetadata {
        let operand = |(copy, form): &(CopySpec, Storage), usage| {
            let layout = copy.layout(x.shape[0], x.shape[1], usage);
            match form {
                Storage::Packed => OperandMetadata::Nvfp4(packed(layout)),
                Storage::Bf16Unscaled => OperandMetadata::Decoded(decoded(layout)),
            }
        };
        OperandPairMetadata {
            row: operand(row, Usage::Rowwise),
            col: operand(col, Usage::Columnwise),
        }
    }

    pub(in crate::ops) fn eden_meta(x: &TensorSpec, spec: &EdenSpec) -> PackedMetadata {
        packed(spec.layout(x.shape[0], x.shape[1]))
    }

    pub(in crate::ops) fn eden_packed_meta(
        source: &PackedMetadata,
        spec: &EdenSpec,
    ) -> PackedMetadata {
        packed(spec.layout(source.layout.rows, source.layout.cols))
    }

    pub(in crate::ops) fn mx_meta(x: &TensorSpec, usage: &Usage) -> MxPackedMetadata {
        mx_with(MxLayout {
            rows: x.shape[0],
            cols: x.shape[1],
            usage: *usage,
        })
    }

    pub(in crate::ops) fn mx_packed_meta(
        packed: &PackedMetadata,
        usage: &Usage,
        _via: &FloatDType,
    ) -> MxPackedMetadata {
        mx_with(MxLayout {
            rows: packed.layout.rows,
            cols: packed.layout.cols,
            usage: *usage,
        })
    }

    pub(in crate::ops) fn dequantize_meta(
        packed: &PackedMetadata,
        dtype: &FloatDType,
    ) -> TensorSpec {
        let layout = packed.layout;
        TensorSpec::new(Shape::new([layout.rows, layout.cols]), (*dtype).into())
    }

    pub(in crate::ops) fn mx_dequantize_meta(
        packed: &MxPackedMetadata,
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

    pub(in crate::ops) fn product_meta(
        a: &OperandMetadata,
        b: &OperandMetadata,
        _bias: &BiasMetadata,
        dtype: &FloatDType,
    ) -> TensorSpec {
        TensorSpec::new(
            Shape::new([stored_rows(a), stored_rows(b)]),
            (*dtype).into(),
        )
    }

    /// Rows of an operand as it is stored, along the contraction.
    pub(in crate::ops) fn stored_rows(operand: &OperandMetadata) -> usize {
        match operand {
            OperandMetadata::Nvfp4(packed) => packed.layout.outer(),
            OperandMetadata::Decoded(decoded) => decoded.layout.outer(),
            OperandMetadata::Mxfp8(packed) => packed.layout.outer(),
            OperandMetadata::Float(tensor, usage) => {
                usage.stored_shape(tensor.shape[0], tensor.shape[1]).0
            }
        }
    }

    /// A matrix in MXFP8 of this layout.
    pub(in crate::ops) fn mx_with(layout: MxLayout) -> MxPackedMetadata {
        let (outer, blocks) = (layout.outer(), layout.blocks());
        MxPackedMetadata {
            codes: TensorSpec::new(Shape::new([outer, blocks * MX_BLOCK]), DType::U8),
            scales: TensorSpec::new(Shape::new([outer, blocks]), DType::U8),
            layout,
        }
    }

    fn packed(layout: PackedLayout) -> PackedMetadata {
        let (outer, blocks) = (layout.outer(), layout.blocks());
        PackedMetadata {
            codes: TensorSpec::new(Shape::new([outer, blocks * 2]), DType::U32),
            scales: TensorSpec::new(Shape::new([outer, blocks]), DType::U8),
            amax: TensorSpec::new(Shape::new([layout.amax_len()]), DType::F32),
            layout,
        }
    }

    fn decoded(layout: PackedLayout) -> DecodedMetadata {
        let values = Shape::new([layout.outer(), layout.blocks() * BLOCK]);
        DecodedMetadata {
            values: TensorSpec::new(values, DType::BF16),
            amax: TensorSpec::new(Shape::new([layout.amax_len()]), DType::F32),
            layout,
        }
    }
}
