//! Cube: one fused kernel if the sizes permit, otherwise separate kernels.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::DType;
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use nvfp4_kernels::gemm::{self, FusedLinear, FusedNorm, Operand};
use nvfp4_kernels::tensor::{DeviceQuantized, Groups, Matrix};

use super::super::cube::gemm::bias_matrix;
use super::super::cube::tensors::{Source, launched, result, to_device};
use super::super::tensors::{MaybeTensor, QuantizedMatrix};
use super::super::trace_op;
use super::{NormLinearOps, NormLinearResult, NormLinearSpec, linear, norm, separate};

impl NormLinearOps for CubeBackend {
    fn nvfp4_norm_linear(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        w: QuantizedMatrix<Self>,
        bias: MaybeTensor<Self>,
        spec: NormLinearSpec,
    ) -> NormLinearResult<Self> {
        // The fused kernel for small M supports only bf16.
        if x.dtype != DType::BF16 {
            return separate::<Self>(x, residual, gain, w, bias, spec);
        }
        let (x, gain) = (Source::new(x), into_contiguous(gain));
        let residual = residual.into_option().map(Source::new);
        let layer = Layer {
            weight: to_device(w.clone(), Groups::One),
            bias: bias.clone().into_option().map(bias_matrix),
            swiglu: spec.swiglu,
        };
        let in_front = FusedNorm {
            residual: residual.as_ref().map(|residual| &residual.matrix),
            gain: &gain.handle,
            epsilon: spec.epsilon,
        };
        if let Some(made) = layer.fused(&x, Some(in_front)) {
            return made;
        }
        let residual = residual.map(|residual| residual.tensor).into();
        let (sum, normed) = norm::<Self>(x.tensor, residual, gain, spec);
        let normed = Source::new(normed);
        let fused = match spec.swiglu {
            true => layer.fused(&normed, None),
            false => None,
        };
        let y = match fused {
            Some(made) => made.y,
            None => linear::<Self>(normed.tensor, w, bias, spec),
        };
        NormLinearResult { sum, y }
    }
}

/// Linear layer for the kernels.
struct Layer {
    weight: DeviceQuantized,
    bias: Option<Matrix>,
    swiglu: bool,
}

impl Layer {
    /// Computes the layer of `x`, with or without a preceding norm, if one kernel can.
    fn fused(
        &self,
        x: &Source,
        norm: Option<FusedNorm<'_>>,
    ) -> Option<NormLinearResult<CubeBackend>> {
        let request = FusedLinear {
            x: &x.matrix,
            norm,
            weight: Operand::from(&self.weight),
            bias: self.bias.as_ref(),
            swiglu: self.swiglu,
        };
        let client = &x.tensor.client;
        if launched(request.refusal(client)).is_some() {
            return None;
        }
        trace_op("norm_linear", "", x.matrix.rows, self.weight.outer());
        let made = launched(gemm::fused_linear(client, &request));
        Some(NormLinearResult {
            sum: made.sum.map(|sum| result(&x.tensor, sum)).into(),
            y: result(&x.tensor, made.matrix),
        })
    }
}
