//! Weight gradient of a call, which replaces the one that Burn computed.

use burn_core::backend::ops::FloatTensorOps;
use burn_core::tensor::DType;
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

use super::call::{Call, lock};
use super::counters::count;
use crate::ops::{QuantizeSource, float_dtype};

/// Computes the gradient of the weight of a call whose input needs none. Returns `false` if the
/// forward was missed.
pub(super) fn compute_weight_grad(call: &Call, dy: CubeTensor) -> bool {
    let Some(mut saved) = call.state().saved.take() else {
        return false;
    };
    saved.w = None;
    let grads = saved.backward(QuantizeSource::Matrix(dy));
    let mut state = call.state();
    state.weight_grad = grads.w;
    state.bias_grad = grads.bias;
    true
}

/// Returns the NVFP4 gradient of the weight of `call`, for which Burn computed `grad`.
///
/// # Errors
/// Returns the reason why the gradient is not available.
pub(super) fn weight_grad(call: &Call, grad: &CubeTensor) -> Result<CubeTensor, String> {
    let (gemm, dy) = {
        let mut state = call.state();
        (state.grad.take(), state.dy)
    };
    let Some(gemm) = gemm else {
        return Err("the gradient of its weight does not come from one GEMM of its input".into());
    };
    if let Some(dy) = lock(&gemm.dy).take()
        && call.state().weight_grad.is_none()
    {
        if compute_weight_grad(call, dy) {
            count(&call.layer.counters.wgrad_wasted);
        }
    } else if dy != Some(gemm.rhs) {
        return Err(
            "the gradient of its weight comes from another gradient than that of its output".into(),
        );
    }
    let own = call.state().weight_grad.take();
    let Some(own) = own else {
        return Err(
            "the gradient of its weight was not computed in NVFP4, because the forward or the \
             input gradient was not"
                .into(),
        );
    };
    debug_assert_eq!(own.meta.shape(), grad.meta.shape());
    Ok(cast(own, grad.dtype))
}

fn cast(tensor: CubeTensor, dtype: DType) -> CubeTensor {
    if tensor.dtype == dtype {
        tensor
    } else {
        CubeBackend::float_cast(tensor, float_dtype(dtype))
    }
}
