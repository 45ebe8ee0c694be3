//! Packed weights of layers that multiply by themselves, such as `burn_nn::Linear`, in a model that
//! [`quantize`](crate::quantize()) returns. The value of such a weight is a mark, and the fuser
//! multiplies by the codes.

use std::sync::Arc;

use burn_core::backend::ops::FloatTensorOps;
use burn_core::backend::{Dispatch, DispatchDevice};
use burn_core::tensor::{Device, Tensor};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use futures_lite::future::block_on;
use nvfp4_formats::{Nvfp4Error, Usage};

use super::call::{Call, CallRef, Group, Layer, Mode, PackedCall};
use super::check::check_device;
use super::counters::Counters;
use super::fill::equal_offsets;
use super::mark::is_bypassed;
use super::ops::MarkOps;
use super::tracker::tracker;
use crate::nn::Observer;
use crate::ops::inference::PackedShape;
use crate::ops::packed::{Activations, PackedInput, PackedOps};
use crate::ops::{MaybeTensor, Nvfp4KernelOps, Operand, QuantizedMatrix, RowGroups, float_dtype};

/// Route of the GEMMs of a layer to the kernels that read its packed weight.
#[derive(Clone, Debug)]
pub(crate) struct Route(Arc<Layer>);

impl Route {
    /// Creates the route of the layer at `path`, with weights `[d_in, d_out]`, a stack of `experts`
    /// of these if given, on `device`. The fuser must be installed.
    ///
    /// # Errors
    /// Returns an error if the device has no fusion over CubeCL.
    pub(crate) fn new(
        device: &Device,
        path: &str,
        dims: [usize; 2],
        experts: Option<usize>,
    ) -> Result<Self, Nvfp4Error> {
        check_device("model", device)?;
        Ok(Self(Arc::new(Layer {
            path: path.to_owned(),
            dims,
            experts,
            group: Arc::new(Group::new(Mode::Strict, Vec::new())),
            counters: Counters::default(),
        })))
    }

    /// Returns false if the value of the weight is the dequantized weight: in `undecorate`, or on
    /// another device, to which the model was moved.
    ///
    /// # Panics
    /// Panics if `activations` cannot be quantized on `device`.
    pub(crate) fn is_open(&self, device: &Device, activations: Activations) -> bool {
        if is_bypassed() {
            return false;
        }
        match check_device("model", device) {
            Ok(()) => true,
            Err(_) if activations == Activations::HighPrecision => false,
            Err(error) => panic!("nvfp4 quantize: layer `{}`: {error}", self.0.path),
        }
    }

    /// Returns the mark of the weight `w`, which has the dtype and device of `base`, for the next
    /// GEMM. `input` is the quantization of the GEMM's input, with its static scale.
    pub(crate) fn mark<const D: usize>(
        &self,
        base: Tensor<D>,
        w: QuantizedMatrix<Dispatch>,
        (activations, scale, observer): (Activations, Option<Tensor<1>>, &Observer),
    ) -> Tensor<D> {
        let layer = &self.0;
        if let Some(message) = layer.group.failure_message() {
            panic!("nvfp4 quantize: {message}");
        }
        let is_observed = observer.is_active();
        let (activations, scale) = match is_observed {
            true => (Activations::HighPrecision, None),
            false => (activations, scale),
        };
        let packed = PackedCall {
            activations,
            observer: is_observed.then(|| observer.clone()),
        };
        let call = Arc::new(Call::of_packed(layer.clone(), packed));
        let (id, call) = (call.id, CallRef(call));
        tracker().announce(&call);
        let [d_in, d_out] = layer.dims;
        let place = match layer.experts {
            None => base.expand([d_in, d_out]).into_dispatch(),
            Some(experts) => base.expand([experts, d_in, d_out]).into_dispatch(),
        };
        let scale = scale.map(Tensor::into_dispatch).into();
        Tensor::from_dispatch(Dispatch::nvfp4_mark_packed(place, call, id, w, scale))
    }
}

/// Returns the groups of the rows of `x`, one per expert.
fn groups(call: &Call, x: &CubeTensor) -> RowGroups<CubeBackend> {
    match call.layer.experts {
        None => RowGroups::Whole,
        Some(experts) => RowGroups::Offsets(equal_offsets(x, experts)),
    }
}

/// Runs the forward GEMM of a call with a packed weight. Returns `None` if the weight is missing.
pub(super) fn forward(call: &Call, input: &PackedCall, x: CubeTensor) -> Option<CubeTensor> {
    let mut state = call.state();
    let (w, scale) = state.packed.clone()?;
    if let Some(observer) = &input.observer
        && x.meta.shape().num_elements() > 0
    {
        let amax = CubeBackend::float_max(CubeBackend::float_abs(x.clone()));
        let amax = block_on(CubeBackend::float_into_data(amax)).ok()?;
        observer.add(amax.iter::<f32>().next()?);
    }
    let [d_in, d_out] = call.layer.dims;
    let shape = PackedShape {
        matrix: (d_out, d_in),
        stack: call.layer.experts,
    };
    let activations = input.activations;
    let device = Device::new(DispatchDevice::Cube(x.device.clone()));
    let form = shape.form(&device, &activations.spec(), x.meta.shape()[0]);
    let groups = groups(call, &x);
    let input = PackedInput { activations, form };
    let bias = MaybeTensor::Absent;
    let y = CubeBackend::nvfp4_packed_linear(x, input, w, bias, groups, scale);
    state.forward = true;
    let operands = [call.spec.fprop_x, call.spec.fprop_w];
    call.layer.counters.forward.routed(operands);
    Some(y)
}

/// Computes the input gradient of a call with a packed weight: `dx = dy w`. Returns `None` if the
/// weight is missing.
pub(super) fn input_grad(call: &Call, dy: CubeTensor) -> Option<CubeTensor> {
    let (w, _) = call.state().packed.clone()?;
    let (dtype, groups) = (float_dtype(dy.dtype), groups(call, &dy));
    Some(CubeBackend::nvfp4_gemm(
        Operand::Float(dy, Usage::Rowwise),
        Operand::QuantizedMnMajor(w),
        MaybeTensor::Absent,
        groups.of_rows(),
        dtype,
    ))
}
