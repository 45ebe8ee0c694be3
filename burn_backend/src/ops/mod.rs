//! The extension trait, and the values that cross it.
//!
//! Arguments are trusted here: [`functions`](crate::functions) checks them before anything is
//! queued, because an implementation may run later, on another thread, where it can only panic.

mod autodiff;
mod context;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;
mod grouped;
pub(crate) mod linear;
mod operands;
mod packed;
mod probe;
mod spec;

use burn_core as burn;

use burn_core::backend::{Backend, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn_core::tensor::{DType, FloatDType};
use nvfp4_kernels::{BlockScaling, Storage, Usage};

pub use context::LinearContext;
pub(crate) use context::{CachedWeight, WeightCache, WeightIdentity};
pub use grouped::{GroupPairSpec, Nvfp4GroupedOps, RowGradients, RowGroups};
#[cfg(feature = "cubecl-backend")]
pub use grouped::{RowGradientsMetadata, RowGroupsMetadata};
pub use nvfp4_kernels::AmaxGranularity;
pub use packed::{
    Bias, Decoded, MxLayout, MxPacked, Operand, OperandPair, Packed, PackedLayout, PackedPair,
};
#[cfg(feature = "cubecl-backend")]
pub use packed::{
    BiasMetadata, DecodedMetadata, MxPackedMetadata, OperandMetadata, OperandPairMetadata,
    PackedMetadata, PackedPairMetadata,
};
#[cfg(feature = "cubecl-backend")]
use packed::{
    decoded_meta, dequantize_meta, eden_meta, eden_packed_meta, forms_meta, matmul_meta,
    mx_dequantize_meta, mx_meta, mx_packed_meta, packed_meta, pair_meta, product_meta, tiles_meta,
};
pub(crate) use probe::{Probe, SampledOperand};
pub use spec::{
    BackwardSource, CopySpec, EdenSpec, LinearSpec, OperandSpec, PairSpec, QuantizeSpec,
};

/// NVFP4 operations on the primitives of a backend.
///
/// Matrices are 2-D floats of type `f32`, `bf16` or `f16`. Of the operations only
/// [`nvfp4_linear`](Self::nvfp4_linear) is differentiable; under `Autodiff` the results of the
/// others are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4Ops: Backend {
    /// Pack `x` (`[rows, cols]`), with the global scale, or scales, of its own maxima.
    ///
    /// `cols` must be a multiple of 16 for [`Usage::Rowwise`]; a column-wise copy pads its last
    /// block with zeros.
    #[fusion(meta = packed_meta)]
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self>;

    /// Both copies of `x` (`[rows, cols]`) in one pass.
    ///
    /// `cols` must be a multiple of 16; for tiles, `rows` as well.
    #[fusion(meta = pair_meta)]
    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self>;

    /// One of the two copies of `x` (`[rows, cols]`, both multiples of 16) in 16x16 tiles, without the other.
    #[fusion(meta = tiles_meta)]
    fn nvfp4_quantize_tiles(
        x: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self>;

    /// [`nvfp4_quantize`](Self::nvfp4_quantize), but for what the codes stand for instead of them: the
    /// operand of one product, and of nothing else.
    #[fusion(meta = decoded_meta)]
    fn nvfp4_quantize_decoded(x: FloatTensor<Self>, spec: QuantizeSpec) -> Decoded<Self>;

    /// Both copies of `x` (`[rows, cols]`) in 1x16 blocks in one pass, each in its form, row-wise and
    /// column-wise.
    ///
    /// `cols` must be a multiple of 16.
    #[fusion(meta = forms_meta)]
    fn nvfp4_quantize_forms(
        x: FloatTensor<Self>,
        row: (CopySpec, Storage),
        col: (CopySpec, Storage),
    ) -> OperandPair<Self>;

    /// `x` (`[rows, cols]`) by MS-EDEN: the transformed matrix, its contraction padded to a multiple
    /// of 128.
    #[fusion(meta = eden_meta)]
    fn nvfp4_eden(x: FloatTensor<Self>, spec: EdenSpec) -> Packed<Self>;

    /// The values of `packed`, which is not transformed, by MS-EDEN, along its own axis or the other one.
    #[fusion(meta = eden_packed_meta)]
    fn nvfp4_eden_packed(#[extension_type] packed: Packed<Self>, spec: EdenSpec) -> Packed<Self>;

    /// `x` (`[rows, cols]`) in MXFP8 with blocks along `usage`.
    #[fusion(meta = mx_meta)]
    fn nvfp4_mx_quantize(x: FloatTensor<Self>, usage: Usage) -> MxPacked<Self>;

    /// The values of `packed` rounded to `via`, in MXFP8 with blocks along `usage`.
    #[fusion(meta = mx_packed_meta)]
    fn nvfp4_mx_requantize(
        #[extension_type] packed: Packed<Self>,
        usage: Usage,
        via: FloatDType,
    ) -> MxPacked<Self>;

    /// The values of `packed` in the orientation of its source, `[rows, cols]`. A copy made with a
    /// transform stays transformed.
    #[fusion(meta = dequantize_meta)]
    fn nvfp4_dequantize(
        #[extension_type] packed: Packed<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The values of `packed` in the orientation of its source, `[rows, cols]`.
    #[fusion(meta = mx_dequantize_meta)]
    fn nvfp4_mx_dequantize(
        #[extension_type] packed: MxPacked<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// `out[m, n] = alpha · Σₖ a[m, k] · b[n, k] + bias[n]` over the stored rows of both operands,
    /// accumulated in `f32` and rounded once to `dtype`. `alpha` is the product of the operands'
    /// global scales, one of each or one for each stored row.
    ///
    /// Two float operands have one type, and none is mixed with a packed one whose contraction is
    /// padded.
    #[fusion(meta = product_meta)]
    fn nvfp4_product(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        #[extension_type] bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// [`nvfp4_product`](Self::nvfp4_product) of two NVFP4 matrices.
    #[fusion(meta = matmul_meta)]
    fn nvfp4_matmul(
        #[extension_type] a: Packed<Self>,
        #[extension_type] b: Packed<Self>,
        #[extension_type] bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::nvfp4_product(Operand::Nvfp4(a), Operand::Nvfp4(b), bias, dtype)
    }

    /// `y = x w + bias` for `x` (`[m, d_in]`), `w` (`[d_in, d_out]`) and `bias` (`[d_out]`), with the
    /// operands that `spec` asks for, in the type of `x`. `Autodiff` overrides it with its own
    /// backward.
    #[fusion(default)]
    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] bias: Bias<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(x.dtype());
        let shape = (x.shape()[0], w.shape()[1], x.shape()[1]);
        let (device, specs) = (x.device(), [&spec.fprop_x, &spec.fprop_w]);
        let storage = context.storage(|| operands::storage_of::<Self>(&device, specs, shape));
        let x = operands::quantize::<Self>(x, &spec.fprop_x, Usage::Rowwise, dtype, storage);
        let w =
            operands::quantize::<Self>(w, &spec.fprop_w, Usage::Columnwise, dtype, Storage::Packed);
        Self::nvfp4_product(x, w, bias, dtype)
    }
}

/// The float type of a tensor that is known to hold one of the three supported types.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::BF16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Report work to `tracing`: one event for each copy or product that a backend computes.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn trace_op(op: &'static str, copy: &'static str, rows: usize, cols: usize) {
    tracing::trace!(target: "burn_nvfp4::ops", op, copy, rows, cols);
}

/// The name of a copy in traces.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn copy_name(usage: Usage) -> &'static str {
    match usage {
        Usage::Rowwise => "row",
        Usage::Columnwise => "col",
    }
}
