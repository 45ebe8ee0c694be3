//! Linear layer with a weight that is stored only in NVFP4, and its input gradient.

use burn_core as burn;
use nvfp4_formats::{Rounding, StoredForm, Usage};

use burn_core::backend::{
    Autodiff, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn_core::tensor::FloatDType;

use super::dtype::cast;
use super::float_dtype;
use super::gradients::register;
use super::inference::{InferenceOps, STATIC};
use super::kernels::{Nvfp4KernelOps, inner, inner_groups};
use super::spec::{OperandSpec, QuantParams};
use super::tensors::{MaybeTensor, Operand, QuantizeRequest, QuantizedMatrix, RowGroups};

/// Activation quantization of a layer with packed weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// W4A16: no quantization.
    HighPrecision,
    /// W4A4: quantized by these parameters, with a global scale from the amax of the input.
    Dynamic(QuantParams),
    /// W4A4: quantized in 1x16 blocks, rounded to nearest, with the static global scale of the
    /// layer.
    Static,
}

impl std::fmt::Display for Activations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::HighPrecision => "activations in high precision",
            Self::Dynamic(_) => "dynamic activations",
            Self::Static => "static activations",
        })
    }
}

impl Activations {
    /// 1x16 blocks, rounded to nearest, with a global scale from the amax of the input.
    pub const DYNAMIC: Self = Self::Dynamic(QuantParams::nvfp4(Rounding::Nearest));

    /// Returns the representation of the input.
    pub(crate) fn spec(&self) -> OperandSpec {
        match self {
            Self::HighPrecision => OperandSpec::HighPrecision,
            Self::Dynamic(params) => OperandSpec::Quantized(*params),
            Self::Static => OperandSpec::Quantized(STATIC),
        }
    }
}

/// Input of a layer with packed weights.
#[derive(Debug, Clone, Copy)]
pub struct PackedInput {
    /// Activation quantization.
    pub activations: Activations,
    /// Form in which the GEMM reads the input.
    pub form: StoredForm,
}

impl PackedInput {
    /// Converts `x` (`[rows, d_in]`, in `groups`) to the left operand of a GEMM. `global` is the
    /// static global scale, present if needed.
    fn operand<B: PackedOps>(
        self,
        x: FloatTensor<B>,
        global: MaybeTensor<B>,
        groups: &RowGroups<B>,
    ) -> Operand<B> {
        let Self { activations, form } = self;
        match activations {
            Activations::HighPrecision => Operand::Float(x, Usage::Rowwise),
            Activations::Dynamic(params) => {
                let request = QuantizeRequest::of_matrix(x).groups(groups.clone());
                let request = request.along(Usage::Rowwise, params, form);
                Operand::Quantized(B::nvfp4_quantize(request).into_one())
            }
            Activations::Static => {
                let global = global.into_option();
                let global = global.expect("checked when the layer was made");
                let made = B::nvfp4_quantize_static(x, global, groups.clone(), form);
                Operand::Quantized(made)
            }
        }
    }
}

/// Layers with packed weights. [`nn`](crate::nn) checks the arguments before anything is queued.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait PackedOps: Nvfp4KernelOps + InferenceOps {
    /// Computes `y = x wᵀ + bias` in the dtype of `x`, for `x` (`[rows, d_in]`), the row-wise
    /// tensor `w` of `[d_out, d_in]` and `bias` (`[d_out]`). `global` is the static global scale of
    /// `x`, required for [`Activations::Static`].
    ///
    /// With [`RowGroups::Offsets`] `w` is a stack of matrices, one per group of rows, and `bias`
    /// and `global` have one row per group.
    ///
    /// `Autodiff` overrides it: `x` has the gradient `dx = dy w`, straight through the rounding of
    /// activations; everything else is constant. The backward keeps the packed weight and
    /// multiplies it like the forward: codes and block scales, which are exact in bf16, and the
    /// global scale on the sums, in `f32`. If `x` is bf16, no GPU dequantizes the weight for it.
    #[fusion(default)]
    fn nvfp4_packed_linear(
        x: FloatTensor<Self>,
        input: PackedInput,
        #[extension_type] w: QuantizedMatrix<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        #[extension_type] global: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(x.dtype());
        let x = input.operand::<Self>(x, global, &groups);
        Self::nvfp4_gemm(x, Operand::Quantized(w), bias, groups.of_rows(), dtype)
    }
}

/// State saved for the input gradient.
#[derive(Clone, Debug)]
struct SavedPacked<B: Backend> {
    w: QuantizedMatrix<B>,
    groups: RowGroups<B>,
    /// Dtype of the input.
    dtype: FloatDType,
}

/// Backward of a layer with packed weights: parents `[x]`.
#[derive(Debug)]
struct PackedLinear;

impl<B: PackedOps> Backward<B, 1> for PackedLinear {
    type State = SavedPacked<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedPacked { w, groups, dtype } = ops.state;
        let dy = cast::<B>(grads.consume::<B>(&ops.node), dtype);
        // Codes are packed along the K dimension of fprop, across that of dgrad.
        let dx = B::nvfp4_gemm(
            Operand::Float(dy, Usage::Rowwise),
            Operand::QuantizedMnMajor(w),
            MaybeTensor::Absent,
            groups.of_rows(),
            dtype,
        );
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 1>(nodes, [Some(dx)], grads);
    }
}

impl<B: PackedOps, C: CheckpointStrategy> PackedOps for Autodiff<B, C> {
    fn nvfp4_packed_linear(
        x: FloatTensor<Self>,
        input: PackedInput,
        w: QuantizedMatrix<Self>,
        bias: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        global: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let (w, groups) = (inner(w), inner_groups(groups));
        let [bias, global] = [bias, global].map(|tensor| tensor.map(|x| x.into_primitive()));
        let saved = SavedPacked {
            w: w.clone(),
            groups: groups.clone(),
            dtype: float_dtype(x.dtype()),
        };
        let y = || B::nvfp4_packed_linear(x, input, w, bias, groups, global);
        match PackedLinear.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved, y()),
            OpsKind::UnTracked(prep) => prep.finish(y()),
        }
    }
}
