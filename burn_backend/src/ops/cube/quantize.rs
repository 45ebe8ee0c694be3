//! Quantization: converts a request of Burn's tensors to one of the kernels, and its results back.

use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_formats::{QuantParams, StoredForm, Usage, reference::Activation};
use nvfp4_kernels::moe::EarlierGroups;
use nvfp4_kernels::quantize::{Operation, Quantize, Source as KernelSource, TargetSpec};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Groups};

use super::super::dtype::float_kind;
use super::super::graph::cube::offset_beside;
use super::super::layout::GroupCount;
use super::super::tensors::{
    ComputedAmax, GivenAmax, MaybeTensor, QuantizeRequest, QuantizeSource, QuantizedMatrix,
    QuantizedPair,
};
use super::super::trace_op;
use super::found_amax;
use super::tensors::{
    Source, device_groups, earlier_groups, launched, like_quantized, new_tensor, result, to_burn,
    to_device,
};

/// Implements [`nvfp4_quantize`](super::super::Nvfp4KernelOps::nvfp4_quantize).
pub(super) fn quantize(request: QuantizeRequest<CubeBackend>) -> QuantizedPair<CubeBackend> {
    let inputs = Inputs::new(request);
    let made = launched(inputs.request().launch(&inputs.like.client));
    trace(&made.operations);
    let row = inputs.made(made.rowwise, Usage::Rowwise);
    let Some(unscaled) = made.unscaled else {
        return QuantizedPair::new(row, inputs.made(made.columnwise, Usage::Columnwise));
    };
    let (params, _) = inputs.targets[0].expect("requested in both storages");
    QuantizedPair::BothStorages {
        packed: row.expect("requested in both storages"),
        unscaled: inputs.to_burn(unscaled, &params, Usage::Rowwise, StoredForm::Bf16Unscaled),
    }
}

/// Implements [`nvfp4_amax`](super::super::Nvfp4KernelOps::nvfp4_amax).
pub(super) fn amax(request: QuantizeRequest<CubeBackend>) -> ComputedAmax<CubeBackend> {
    let inputs = Inputs::new(request);
    let found = launched(inputs.request().launch_amax(&inputs.like.client));
    trace(&found.operations);
    let amax = |amax: Option<Handle>, made: Option<(QuantParams, StoredForm)>, usage| {
        let (amax, (params, _)) = amax.zip(made)?;
        let layout = (inputs.count).layout(inputs.shape, usage, &params, StoredForm::Rows);
        let shape = Shape::new([inputs.count.amax_len(&layout)]);
        Some(new_tensor(&inputs.like, amax, shape, DType::F32))
    };
    let [rowwise, columnwise] = inputs.targets;
    ComputedAmax {
        values: (found.values.map(|values| result(&inputs.like, values))).into(),
        rowwise: amax(found.amax.rows, rowwise, Usage::Rowwise).into(),
        columnwise: amax(found.amax.cols, columnwise, Usage::Columnwise).into(),
    }
}

/// Values of a request, on the device.
#[allow(clippy::large_enum_variant, reason = "one for each operation")]
enum Values {
    Matrix(Source),
    Activation(Activation, Source, Option<Source>),
    Quantized(DeviceQuantized, FloatKind),
}

/// Inputs of a request in the kernels' form.
struct Inputs {
    values: Values,
    /// Rows and columns of the values.
    shape: (usize, usize),
    /// Tensor on the device of the results.
    like: CubeTensor,
    groups: Groups,
    count: GroupCount,
    /// Groups before these in the tensor of all groups.
    earlier: Option<EarlierGroups>,
    /// Known amax values: row-wise, column-wise.
    amax: [Option<Handle>; 2],
    /// Row-wise and column-wise tensor.
    targets: [Option<(QuantParams, StoredForm)>; 2],
    unscaled: bool,
}

impl Inputs {
    fn new(request: QuantizeRequest<CubeBackend>) -> Self {
        let (count, earlier) = (request.groups.count(), earlier_groups(&request.groups));
        let groups = device_groups(request.groups);
        let (like, values) = match request.source {
            QuantizeSource::Matrix(x) => {
                let x = Source::new(x);
                (x.tensor.clone(), Values::Matrix(x))
            }
            QuantizeSource::Activation {
                x,
                grad,
                activation,
            } => {
                let (x, grad) = (Source::new(x), grad.into_option().map(Source::new));
                (x.tensor.clone(), Values::Activation(activation, x, grad))
            }
            QuantizeSource::Quantized { tensor, via } => {
                let like = like_quantized(&tensor);
                let tensor = to_device(tensor, groups.clone());
                (like, Values::Quantized(tensor, float_kind(via)))
            }
        };
        Self {
            shape: source_of(&values).shape(),
            values,
            like,
            groups,
            count,
            earlier,
            amax: given(request.amax),
            targets: [request.rowwise, request.columnwise],
            unscaled: request.unscaled,
        }
    }

    /// Returns the request to the kernels, with the known amax values and those that the kernel
    /// before it found.
    fn request(&self) -> Quantize<'_> {
        let [rowwise, columnwise] = self.targets;
        let [row_amax, col_amax] = self.amax.clone();
        let mut request = Quantize::new(source_of(&self.values))
            .groups(&self.groups)
            .rowwise(rowwise.map(|made| self.target(made, row_amax)))
            .columnwise(columnwise.map(|made| self.target(made, col_amax)))
            .unscaled(self.unscaled);
        if let Values::Matrix(x) = &self.values
            && let Some(found) =
                found_amax::take((&x.matrix, &self.groups), &request.missing_amax())
        {
            request.set_amax(&found);
        }
        request
    }

    /// Returns a tensor of the request to the kernels.
    fn target(
        &self,
        (params, form): (QuantParams, StoredForm),
        amax: Option<Handle>,
    ) -> TargetSpec {
        TargetSpec {
            params,
            form,
            amax,
            offset: params.offset_in_memory.then(|| offset_beside(&self.like)),
            earlier: self.earlier.clone(),
        }
    }

    /// Returns a tensor of the request, if it was made.
    fn made(
        &self,
        made: Option<DeviceQuantized>,
        usage: Usage,
    ) -> Option<QuantizedMatrix<CubeBackend>> {
        let [rowwise, columnwise] = self.targets;
        let asked = match usage {
            Usage::Rowwise => rowwise,
            Usage::Columnwise => columnwise,
        };
        let (made, (params, form)) = made.zip(asked)?;
        Some(self.to_burn(made, &params, usage, form))
    }

    fn to_burn(
        &self,
        made: DeviceQuantized,
        params: &QuantParams,
        usage: Usage,
        form: StoredForm,
    ) -> QuantizedMatrix<CubeBackend> {
        let layout = self.count.layout(self.shape, usage, params, form);
        to_burn(&self.like, made, self.count, layout)
    }
}

/// Reports an event for each operation of the kernels.
fn trace(operations: &[Operation]) {
    for &Operation { name, of, shape } in operations {
        trace_op(name, of, shape.0, shape.1);
    }
}

/// Returns the source of a request to the kernels.
fn source_of(values: &Values) -> KernelSource<'_> {
    match values {
        Values::Matrix(x) => KernelSource::Matrix(&x.matrix),
        Values::Activation(kind, x, grad) => KernelSource::Activation {
            kind: *kind,
            x: &x.matrix,
            grad: grad.as_ref().map(|grad| &grad.matrix),
        },
        Values::Quantized(tensor, via) => KernelSource::Quantized { tensor, via: *via },
    }
}

/// Returns the known amax values: row-wise, column-wise. One amax of an untransformed matrix serves
/// both usages.
fn given(amax: GivenAmax<CubeBackend>) -> [Option<Handle>; 2] {
    match amax {
        GivenAmax::Absent => [None, None],
        GivenAmax::Each {
            rowwise,
            columnwise,
        } => {
            let handle = |amax: MaybeTensor<CubeBackend>| {
                let amax = amax.into_option();
                amax.map(|amax| into_contiguous(amax).handle)
            };
            let [row, col] = [rowwise, columnwise].map(handle);
            [row.clone().or_else(|| col.clone()), col.or(row)]
        }
        // Read in place, not from a copy: a captured step would make the copy only once.
        GivenAmax::Entry(maxima, entry) => {
            let behind = maxima.meta.shape().num_elements() - entry - 1;
            let amax = maxima.handle.clone().offset_start(4 * entry as u64);
            let amax = Some(amax.offset_end(4 * behind as u64));
            [amax.clone(), amax]
        }
    }
}
