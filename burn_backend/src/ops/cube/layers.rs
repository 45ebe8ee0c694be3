//! Launches of the norm and activation kernels.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_formats::reference::{Activation, Norm};
use nvfp4_kernels::activation;
use nvfp4_kernels::norm::{self, NormBackwardRequest, NormRequest};
use nvfp4_kernels::tensor::Groups;

use super::super::layers::{ActivationOps, NormGradients, NormOps, NormResult, NormSpec};
use super::super::tensors::{MaybeTensor, RowGroups};
use super::super::trace_op;
use super::found_amax;
use super::tensors::{Source, device_groups, launched, new_tensor, result};

fn floats(like: &CubeTensor, handle: Handle, len: usize) -> CubeTensor {
    new_tensor(like, handle, Shape::new([len]), DType::F32)
}

impl NormOps for CubeBackend {
    fn nvfp4_norm_forward(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormResult<Self> {
        let x = Source::new(x);
        let residual = residual.into_option().map(Source::new);
        let gain = into_contiguous(gain);
        let bias = bias.into_option().map(into_contiguous);
        let (rows, cols) = x.shape();
        trace_op("norm", "forward", rows, cols);
        let amax = found_amax::request(spec.amax);
        let made = launched(norm::norm(
            &x.tensor.client,
            &NormRequest {
                norm: spec.norm,
                x: &x.matrix,
                residual: residual.as_ref().map(|residual| &residual.matrix),
                gain: &gain.handle,
                bias: bias.as_ref().map(|bias| &bias.handle),
                epsilon: spec.epsilon,
                amax,
            },
        ));
        found_amax::remember((&made.normed, &Groups::One), amax, made.amax);
        let stats = match spec.norm {
            Norm::Rms => rows,
            Norm::Layer => 2 * rows,
        };
        NormResult {
            sum: made.sum.map(|sum| result(&x.tensor, sum)).into(),
            normed: result(&x.tensor, made.normed),
            stats: floats(&x.tensor, made.stats, stats),
        }
    }

    fn nvfp4_norm_backward(
        grad: FloatTensor<Self>,
        sum_grad: MaybeTensor<Self>,
        x: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: bool,
        spec: NormSpec,
    ) -> NormGradients<Self> {
        let [grad, x] = [grad, x].map(Source::new);
        let sum_grad = sum_grad.into_option().map(Source::new);
        let [stats, gain] = [stats, gain].map(into_contiguous);
        let (rows, cols) = x.shape();
        trace_op("norm", "backward", rows, cols);
        let amax = found_amax::request(spec.grad_amax);
        let made = launched(norm::norm_backward(
            &x.tensor.client,
            &NormBackwardRequest {
                norm: spec.norm,
                grad: &grad.matrix,
                sum_grad: sum_grad.as_ref().map(|grad| &grad.matrix),
                x: &x.matrix,
                stats: &stats.handle,
                gain: &gain.handle,
                bias,
                amax,
            },
        ));
        found_amax::remember((&made.x, &Groups::One), amax, made.amax);
        NormGradients {
            x: result(&x.tensor, made.x),
            gain: floats(&x.tensor, made.gain, cols),
            bias: made.bias.map(|bias| floats(&x.tensor, bias, cols)).into(),
        }
    }
}

impl ActivationOps for CubeBackend {
    fn nvfp4_activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let x = Source::new(x);
        let (rows, cols) = x.shape();
        trace_op("activation", "forward", rows, cols);
        let client = &x.tensor.client;
        let made = launched(activation::activation(client, activation, &x.matrix));
        result(&x.tensor, made)
    }

    fn nvfp4_activation_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let [grad, x] = [grad, x].map(Source::new);
        let (rows, cols) = x.shape();
        trace_op("activation", "backward", rows, cols);
        let client = &x.tensor.client;
        let made = activation::activation_backward(client, activation, &grad.matrix, &x.matrix);
        result(&x.tensor, launched(made))
    }
}

/// Implements
/// [`nvfp4_activation_of_groups`](super::super::Nvfp4KernelOps::nvfp4_activation_of_groups).
pub(super) fn activation_of_groups(
    x: CubeTensor,
    grad: Option<CubeTensor>,
    groups: RowGroups<CubeBackend>,
    kind: Activation,
) -> CubeTensor {
    let groups = match groups {
        RowGroups::Window { .. } => device_groups(groups),
        RowGroups::Whole | RowGroups::Batch(_) | RowGroups::Offsets(_) => Groups::One,
    };
    let (x, grad) = (Source::new(x), grad.map(Source::new));
    let direction = if grad.is_some() {
        "backward"
    } else {
        "forward"
    };
    let (rows, cols) = x.shape();
    trace_op("activation", direction, rows, cols);
    let inputs = (&x.matrix, grad.as_ref().map(|grad| &grad.matrix));
    let made = activation::activation_of_groups(&x.tensor.client, kind, inputs, &groups);
    result(&x.tensor, launched(made))
}
