//! Quantization, by one kernel per usage, or one kernel for both.

use burn_core::tensor::{DType, FloatDType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_formats::reference::Activation;
use nvfp4_formats::{AmaxGranularity, BlockShape, Layout, Rounding, Storage, StoredForm, Usage};
use nvfp4_formats::{AmaxGranularity, BlockShape, Layout, Rounding, Storage, Usage};
use nvfp4_kernels::activation::{activation_of_groups, activation_with_amaxes};
use nvfp4_kernels::moe::{EarlierGroups, GroupOffsets};
use nvfp4_kernels::quantize::{
    self, AmaxRequest, Amaxes, EdenForm, EdenRandom, EdenSource, EdenTransform, MxForm,
    QuantRequest, RedrawnSigns,
};
use nvfp4_kernels::tensor::{DeviceNvfp4Params, DeviceQuantized, DeviceRounding, Groups};

use super::super::graph::cube::offset_beside;
use super::super::layout::GroupCount;
use super::super::spec::{QuantParams, QuantRounding};
use super::super::tensors::{
    ActivationAmaxes, AmaxPair, BothStorages, QuantUsages, QuantizedMatrix, QuantizedPair,
    RowGroups,
};
use super::super::{trace_op, usage_name};
use super::found_amax;
use super::tensors::{
    Source, device_groups, earlier_groups, float_kind, launched, like_quantized, new_tensor,
    result, to_burn, to_device,
};

/// Implements [`nvfp4_quantize`](super::super::Nvfp4KernelOps::nvfp4_quantize).
pub(super) fn quantize(
    x: CubeTensor,
    groups: RowGroups<CubeBackend>,
    usages: QuantUsages,
) -> QuantizedPair<CubeBackend> {
    let source = GroupedSource {
        x: Source::new(x),
        count: groups.count(),
        earlier: earlier_groups(&groups),
        groups: device_groups(groups),
        found: None,
    };
    source.quantize(usages)
}

/// Implements [`nvfp4_amax`](super::super::Nvfp4KernelOps::nvfp4_amax).
pub(super) fn amax(x: CubeTensor, params: &QuantParams, usage: Usage) -> CubeTensor {
    let layout = GroupCount::Whole.layout(
        (x.meta.shape()[0], x.meta.shape()[1]),
        usage,
        params,
        StoredForm::ROWS,
    );
    let source = GroupedSource::whole(Source::new(x), None);
    let like = &source.x.tensor;
    let found = match params.rounding {
        QuantRounding::MsEden(_) => {
            let matrix = EdenSource::Matrix(&source.x.matrix);
            let transform = eden_transform(like, params);
            launched(quantize::ms_eden_amax(
                &like.client,
                matrix,
                usage,
                transform,
            ))
        }
        QuantRounding::Elements(_) => source.amax(params, usage),
    };
    let shape = Shape::new([GroupCount::Whole.amax_len(&layout)]);
    new_tensor(like, found, shape, DType::F32)
}

/// Implements [`nvfp4_amax_pair`](super::super::Nvfp4KernelOps::nvfp4_amax_pair).
pub(super) fn amax_pair(
    x: CubeTensor,
    row: &QuantParams,
    col: &QuantParams,
) -> AmaxPair<CubeBackend> {
    let x = Source::new(x);
    let source = GroupedSource::whole(x, None);
    let (rows, cols) = source.pair_amax(row, col);
    pair_of(&source.x.tensor, rows, cols)
}

fn pair_of(like: &CubeTensor, rows: Handle, cols: Handle) -> AmaxPair<CubeBackend> {
    let [rowwise, columnwise] =
        [rows, cols].map(|amax| new_tensor(like, amax, Shape::new([1]), DType::F32));
    AmaxPair {
        rowwise,
        columnwise,
    }
}

/// Implements [`nvfp4_activation_amaxes`](super::super::Nvfp4KernelOps::nvfp4_activation_amaxes).
pub(super) fn activation_amaxes(
    (x, grad): (CubeTensor, Option<CubeTensor>),
    kind: Activation,
    row: &QuantParams,
    col: &QuantParams,
) -> ActivationAmaxes<CubeBackend> {
    let request = Some(pair_request(row, col));
    let (values, found) = activated((x, grad), kind, &Groups::One, request);
    let Amaxes { rows, cols } = found.expect("requested");
    let rows = rows.expect("requested");
    // One amax serves both usages if there is no other.
    let cols = cols.unwrap_or_else(|| rows.clone());
    ActivationAmaxes {
        amax: pair_of(&values, rows, cols),
        values,
    }
}

/// Computes the activation of `x`, or its gradient if `grad` is given, and the requested amax
/// values in the same pass.
fn activated(
    (x, grad): (CubeTensor, Option<CubeTensor>),
    kind: Activation,
    groups: &Groups,
    request: Option<AmaxRequest>,
) -> (CubeTensor, Option<Amaxes>) {
    let (x, grad) = (Source::new(x), grad.map(Source::new));
    let direction = match grad {
        None => "forward",
        Some(_) => "backward",
    };
    trace_op("activation", direction, x.matrix.rows, x.matrix.cols);
    let grad = grad.as_ref().map(|grad| &grad.matrix);
    let (client, matrix) = (&x.tensor.client, &x.matrix);
    let (made, found) = match (request, grad) {
        (Some(request), _) => {
            let made = activation_with_amaxes(client, kind, (matrix, grad), groups, &request);
            let (made, found) = launched(made);
            (made, Some(found))
        }
        (None, grad) => {
            let made = activation_of_groups(client, kind, (matrix, grad), groups);
            (launched(made), None)
        }
    };
    (result(&x.tensor, made), found)
}

/// Implements
/// [`nvfp4_activation_of_groups`](super::super::Nvfp4KernelOps::nvfp4_activation_of_groups).
pub(super) fn activation_of_rows(
    x: CubeTensor,
    grad: Option<CubeTensor>,
    groups: RowGroups<CubeBackend>,
    kind: Activation,
) -> CubeTensor {
    let groups = match groups {
        RowGroups::Window { .. } => device_groups(groups),
        RowGroups::Whole | RowGroups::Batch(_) | RowGroups::Offsets(_) => Groups::One,
    };
    activated((x, grad), kind, &groups, None).0
}

/// Implements [`nvfp4_quantize_with_amax`](super::super::Nvfp4KernelOps::nvfp4_quantize_with_amax).
pub(super) fn quantize_from_amax(
    x: CubeTensor,
    amax: [Option<CubeTensor>; 2],
    usages: QuantUsages,
) -> QuantizedPair<CubeBackend> {
    let [row, col] = amax.map(|amax| amax.map(|amax| into_contiguous(amax).handle));
    quantize_from(x, [row, col], usages)
}

/// Implements
/// [`nvfp4_quantize_with_entry`](super::super::Nvfp4KernelOps::nvfp4_quantize_with_entry). Reads
/// the entry in place, not from a copy: a captured step would make the copy only once.
pub(super) fn quantize_from_entry(
    x: CubeTensor,
    maxima: &CubeTensor,
    entry: usize,
    usages: QuantUsages,
) -> QuantizedPair<CubeBackend> {
    let behind = maxima.meta.shape().num_elements() - entry - 1;
    let amax = maxima.handle.clone().offset_start(4 * entry as u64);
    let amax = amax.offset_end(4 * behind as u64);
    quantize_from(x, [Some(amax), None], usages)
}

fn quantize_from(
    x: CubeTensor,
    [row, col]: [Option<Handle>; 2],
    usages: QuantUsages,
) -> QuantizedPair<CubeBackend> {
    let source = GroupedSource::whole(
        Source::new(x),
        Some(Amaxes {
            // One amax of an untransformed matrix serves both usages.
            rows: row.clone().or_else(|| col.clone()),
            cols: col.or(row),
        }),
    );
    source.quantize(usages)
}

/// Matrix and its groups.
struct GroupedSource {
    x: Source,
    count: GroupCount,
    groups: Groups,
    /// Groups before these in the tensor of all groups.
    earlier: Option<EarlierGroups>,
    /// Amax values for the [request](amax_request) of all usages, if they were computed together
    /// with the matrix.
    found: Option<Amaxes>,
}

/// Returns the amax values that the quantized tensors of one matrix need from a separate amax pass.
fn amax_request(usages: &QuantUsages) -> Option<AmaxRequest> {
    let needs_pass =
        |params: &QuantParams| !params.is_made_from_codes() && params.block == BlockShape::Block1d;
    let params = |one: Option<(QuantParams, StoredForm)>| one.map(|(params, _)| params);
    match (params(usages.rowwise), params(usages.columnwise)) {
        (Some(row), Some(col)) if needs_pass(&row) && needs_pass(&col) => {
            Some(pair_request(&row, &col))
        }
        // A per-row amax is computed in the pass that quantizes the row.
        (Some(row), None) if needs_pass(&row) && row.amax == AmaxGranularity::PerTensor => {
            Some(AmaxRequest::along(Usage::Rowwise, row.amax, None))
        }
        (None, Some(col)) if needs_pass(&col) => {
            let usage = Usage::Columnwise;
            Some(AmaxRequest::along(usage, col.amax, col.hadamard))
        }
        _ => None,
    }
}

/// Returns the request for a row-wise and a column-wise tensor: one amax for both, if it serves
/// both.
fn pair_request(row: &QuantParams, col: &QuantParams) -> AmaxRequest {
    let shared = row.shares_amax() && col.shares_amax();
    AmaxRequest {
        rows: Some(row.amax),
        cols: (!shared).then_some((col.amax, col.hadamard)),
    }
}

/// Implements
/// [`nvfp4_quantize_activation`](super::super::Nvfp4KernelOps::nvfp4_quantize_activation).
pub(super) fn quantize_activation(
    x: CubeTensor,
    grad: Option<CubeTensor>,
    groups: RowGroups<CubeBackend>,
    kind: Activation,
    usages: QuantUsages,
) -> QuantizedPair<CubeBackend> {
    let (count, earlier) = (groups.count(), earlier_groups(&groups));
    let groups = device_groups(groups);
    let (values, found) = activated((x, grad), kind, &groups, amax_request(&usages));
    let source = GroupedSource {
        x: Source::new(values),
        count,
        groups,
        earlier,
        found,
    };
    source.quantize(usages)
}

/// Implements
/// [`nvfp4_quantize_in_both_storages`](super::super::Nvfp4KernelOps::nvfp4_quantize_in_both_storages).
pub(super) fn quantize_in_both_storages(
    x: CubeTensor,
    activation: Option<Activation>,
    params: &QuantParams,
) -> BothStorages<CubeBackend> {
    let (usage, form) = (Usage::Rowwise, StoredForm::ROWS);
    let (values, found) = match activation {
        None => (x, None),
        Some(kind) => {
            let request = amax_request(&QuantUsages::one(usage, *params, form));
            activated((x, None), kind, &Groups::One, request)
        }
    };
    let source = GroupedSource::whole(Source::new(values), found);
    source.trace("quantize", usage_name(usage));
    let amax = source.amax(params, usage);
    let request = source.request((params, form), &amax);
    let (client, matrix) = (&source.x.tensor.client, &source.x.matrix);
    let made = quantize::quantize_in_both_storages(client, matrix, &request);
    let (packed, unscaled) = launched(made);
    BothStorages {
        packed: source.made(packed, params, usage, form),
        unscaled: source.made(unscaled, params, usage, StoredForm::Bf16Unscaled),
    }
}

impl GroupedSource {
    /// Creates a source without groups.
    fn whole(x: Source, found: Option<Amaxes>) -> Self {
        Self {
            x,
            count: GroupCount::Whole,
            groups: Groups::One,
            earlier: None,
            found,
        }
    }

    /// Returns the quantized tensors with these usages.
    fn quantize(&self, usages: QuantUsages) -> QuantizedPair<CubeBackend> {
        let QuantUsages {
            rowwise,
            columnwise,
        } = usages;
        if let (Some((row, row_form)), Some((col, col_form))) = (rowwise, columnwise) {
            let (row, col) = self.both([row, col], [row_form, col_form]);
            return QuantizedPair::Both(row, col);
        }
        QuantizedPair::new(
            rowwise.map(|(params, form)| self.one(&params, Usage::Rowwise, form)),
            columnwise.map(|(params, form)| self.one(&params, Usage::Columnwise, form)),
        )
    }

    /// Returns the quantized tensor with this usage.
    fn one(
        &self,
        params: &QuantParams,
        usage: Usage,
        form: StoredForm,
    ) -> QuantizedMatrix<CubeBackend> {
        let storage = form.storage();
        let (client, matrix, groups) = (&self.x.tensor.client, &self.x.matrix, &self.groups);
        if params.format.is_mx() {
            self.trace("mx_quantize", usage_name(usage));
            let form_of_kernel = mx_form(params, form);
            let made = quantize::mx_quantize_groups(client, matrix, groups, usage, form_of_kernel);
            let made = launched(made);
            return self.made(made, params, usage, form);
        }
        if params.is_ms_eden() {
            let amax = self.found.is_some().then(|| self.amax(params, usage));
            return self.eden(params, usage, form, amax);
        }
        self.trace("quantize", usage_name(usage));
        if params.block == BlockShape::Block2d {
            let amax = self.amax(params, Usage::Rowwise);
            let (scaling, order) = (params.scaling, form.scale_layout());
            let made = launched(quantize::quantize_tile_copy(
                client, matrix, groups, usage, &amax, scaling, order,
            ));
            return self.made(made, params, usage, form);
        }
        let is_one_read = matches!(groups, Groups::One)
            && usage == Usage::Rowwise
            && params.amax == AmaxGranularity::PerRow
            && params.hadamard.is_none()
            && self.found.is_none()
            && storage == Storage::Packed;
        if is_one_read {
            let params_on_device = self.device_params(params, form);
            let made = launched(quantize::quantize_per_token(
                client,
                matrix,
                &params_on_device,
            ));
            return self.made(made, params, usage, form);
        }
        let amax = self.amax(params, usage);
        let request = self.request((params, form), &amax);
        let made = match (groups, storage) {
            (Groups::Offsets { .. }, _) => {
                let (row, col) = match usage {
                    Usage::Rowwise => (Some(&request), None),
                    Usage::Columnwise => (None, Some(&request)),
                };
                let (row, col) = self.side_by_side(row, col);
                row.or(col).expect("one usage was requested")
            }
            (_, Storage::Packed) => {
                launched(quantize::quantize(client, matrix, groups, usage, &request))
            }
            (_, Storage::Bf16Unscaled) => {
                let asked = Some((&request, storage));
                let (row, col) = match usage {
                    Usage::Rowwise => (asked, None),
                    Usage::Columnwise => (None, asked),
                };
                let (row, col) = launched(quantize::quantize_operands(client, matrix, row, col));
                row.or(col).expect("one usage was requested")
            }
        };
        self.made(made, params, usage, form)
    }

    /// Quantizes by MS-EDEN, with a known `amax` if given.
    fn eden(
        &self,
        params: &QuantParams,
        usage: Usage,
        form: StoredForm,
        amax: Option<Handle>,
    ) -> QuantizedMatrix<CubeBackend> {
        self.trace("ms_eden", usage_name(usage));
        let source = match &self.groups {
            Groups::One => EdenSource::Matrix(&self.x.matrix),
            groups => EdenSource::Grouped(&self.x.matrix, groups),
        };
        let source = (source, self.earlier.clone());
        let made = ms_eden(&self.x.tensor, source, usage, params, form, amax);
        self.made(made, params, usage, form)
    }

    /// Returns the row-wise and the column-wise tensor, with one read if one kernel writes both.
    fn both(
        &self,
        [row, col]: [QuantParams; 2],
        forms: [StoredForm; 2],
    ) -> (QuantizedMatrix<CubeBackend>, QuantizedMatrix<CubeBackend>) {
        let (client, matrix, groups) = (&self.x.tensor.client, &self.x.matrix, &self.groups);
        let is_2d = [row, col].map(|params| params.block == BlockShape::Block2d);
        let [row_form, col_form] = forms;
        if let (Groups::One, None) = (groups, &self.found)
            && row.is_ms_eden()
            && col.is_ms_eden()
        {
            let transforms = [&row, &col].map(|params| eden_transform(&self.x.tensor, params));
            let found = quantize::ms_eden_amax_pair(client, matrix, transforms);
            let [row_amax, col_amax] = launched(found).map(Some);
            return (
                self.eden(&row, Usage::Rowwise, row_form, row_amax),
                self.eden(&col, Usage::Columnwise, col_form, col_amax),
            );
        }
        let storages = forms.map(StoredForm::storage);
        if row.is_made_from_codes()
            || col.is_made_from_codes()
            || is_2d == [true, false]
            || is_2d == [false, true]
        {
            return (
                self.one(&row, Usage::Rowwise, row_form),
                self.one(&col, Usage::Columnwise, col_form),
            );
        }
        self.trace("quantize", "pair");
        let made = if is_2d == [true; 2] {
            let amax = self.amax(&row, Usage::Rowwise);
            let (scaling, orders) = (row.scaling, forms.map(StoredForm::scale_layout));
            launched(quantize::quantize_tile_with(
                client, matrix, groups, &amax, scaling, orders,
            ))
        } else {
            let (row_amax, col_amax) = self.pair_amax(&row, &col);
            let for_row = self.request((&row, row_form), &row_amax);
            let for_col = self.request((&col, col_form), &col_amax);
            match groups {
                Groups::Offsets { .. } => {
                    let (row, col) = self.side_by_side(Some(&for_row), Some(&for_col));
                    (row.expect("requested"), col.expect("requested"))
                }
                _ if storages == [Storage::Packed; 2] => launched(quantize::quantize_both(
                    client, matrix, groups, &for_row, &for_col,
                )),
                _ => {
                    let for_row = Some((&for_row, row_form.storage()));
                    let for_col = Some((&for_col, col_form.storage()));
                    let made = quantize::quantize_operands(client, matrix, for_row, for_col);
                    let (row, col) = launched(made);
                    (row.expect("requested"), col.expect("requested"))
                }
            }
        };
        (
            self.made(made.0, &row, Usage::Rowwise, row_form),
            self.made(made.1, &col, Usage::Columnwise, col_form),
        )
    }

    /// Returns the quantized tensors of tokens in groups.
    fn side_by_side(
        &self,
        row: Option<&QuantRequest<'_>>,
        col: Option<&QuantRequest<'_>>,
    ) -> (Option<DeviceQuantized>, Option<DeviceQuantized>) {
        let Groups::Offsets { offsets, count } = &self.groups else {
            unreachable!("tokens in groups");
        };
        let groups = GroupOffsets {
            offsets: offsets.clone(),
            count: *count,
        };
        let (client, matrix) = (&self.x.tensor.client, &self.x.matrix);
        launched(quantize::quantize_side_by_side(
            client, matrix, &groups, row, col,
        ))
    }

    /// Returns the amax values of the tensor with this usage.
    fn amax(&self, params: &QuantParams, usage: Usage) -> Handle {
        let of_usage = |Amaxes { rows, cols }: Amaxes| {
            let amax = match usage {
                Usage::Rowwise => rows,
                Usage::Columnwise => cols,
            };
            amax.expect("requested")
        };
        if let Some(found) = self.found.clone() {
            return of_usage(found);
        }
        let (client, matrix) = (&self.x.tensor.client, &self.x.matrix);
        if matches!(self.groups, Groups::One) && params.amax == AmaxGranularity::PerTensor {
            let request = AmaxRequest::along(usage, params.amax, params.hadamard);
            if let Some(found) = found_amax::take(matrix, &request) {
                return of_usage(found);
            }
            let hadamard = match usage {
                Usage::Rowwise => None,
                Usage::Columnwise => params.hadamard,
            };
            return launched(quantize::amax(client, matrix, hadamard));
        }
        // One amax per matrix of a stack serves both usages.
        let usage = match self.groups {
            Groups::Batch(_) => Usage::Rowwise,
            _ => usage,
        };
        let request = AmaxRequest::along(usage, params.amax, params.hadamard);
        let found = launched(quantize::amaxes(client, matrix, &self.groups, &request));
        found.rows.or(found.cols).expect("requested")
    }

    /// Returns the amax values of both tensors, with one read. They are the same values if both
    /// tensors have one amax per group and no transform.
    fn pair_amax(&self, row: &QuantParams, col: &QuantParams) -> (Handle, Handle) {
        if row.shares_amax() && col.shares_amax() {
            let amax = self.amax(row, Usage::Rowwise);
            return (amax.clone(), amax);
        }
        let found = self.found.clone().unwrap_or_else(|| {
            let request = pair_request(row, col);
            let (client, matrix) = (&self.x.tensor.client, &self.x.matrix);
            let found = match self.groups {
                Groups::One => found_amax::take(matrix, &request),
                _ => None,
            };
            found.unwrap_or_else(|| {
                launched(quantize::amaxes(client, matrix, &self.groups, &request))
            })
        });
        let [row, col] = [found.rows, found.cols].map(|amax| amax.expect("requested"));
        (row, col)
    }

    /// Converts the parameters to those of the kernels.
    fn device_params(&self, params: &QuantParams, form: StoredForm) -> DeviceNvfp4Params {
        let rounding = match params.rounding {
            QuantRounding::Elements(Rounding::Stochastic(stream)) => {
                match params.offset_in_memory {
                    true => DeviceRounding::StochasticAt(stream, offset_beside(&self.x.tensor)),
                    false => DeviceRounding::Stochastic(stream),
                }
            }
            QuantRounding::Elements(Rounding::Nearest) | QuantRounding::MsEden(_) => {
                DeviceRounding::Nearest
            }
        };
        DeviceNvfp4Params {
            hadamard: params.hadamard,
            scaling: params.scaling,
            layout: form.scale_layout(),
            whole_tiles: form == StoredForm::WholeTiles,
            earlier: self.earlier.clone(),
            ..DeviceNvfp4Params::new(rounding)
        }
    }

    fn request<'a>(
        &self,
        (params, form): (&QuantParams, StoredForm),
        amax: &'a Handle,
    ) -> QuantRequest<'a> {
        QuantRequest {
            amax,
            scope: params.amax,
            copy: self.device_params(params, form),
        }
    }

    fn made(
        &self,
        made: DeviceQuantized,
        params: &QuantParams,
        usage: Usage,
        form: StoredForm,
    ) -> QuantizedMatrix<CubeBackend> {
        let layout = self.count.layout(self.x.shape(), usage, params, form);
        to_burn(&self.x.tensor, made, self.count, layout)
    }

    fn trace(&self, op: &'static str, usage: &'static str) {
        trace_op(op, usage, self.x.matrix.rows, self.x.matrix.cols);
    }
}

/// Returns the transform of MS-EDEN.
fn eden_transform(like: &CubeTensor, params: &QuantParams) -> EdenTransform {
    let (QuantRounding::MsEden(draw), Some(hadamard)) = (params.rounding, params.hadamard) else {
        unreachable!("parameters of MS-EDEN");
    };
    let offset = params.offset_in_memory.then(|| offset_beside(like));
    let redrawn = offset.zip(draw.signs);
    EdenTransform {
        hadamard,
        redrawn: redrawn.map(|(offset, seed)| RedrawnSigns { seed, offset }),
    }
}

/// Quantizes by MS-EDEN, with a known `amax` if given.
fn ms_eden(
    like: &CubeTensor,
    (source, earlier): (EdenSource<'_>, Option<EarlierGroups>),
    usage: Usage,
    params: &QuantParams,
    form: StoredForm,
    amax: Option<Handle>,
) -> DeviceQuantized {
    let form = match form.storage() {
        // RHT groups are whole tiles of scales.
        Storage::Packed => EdenForm::Packed(form.scale_layout()),
        Storage::Bf16Unscaled => EdenForm::Bf16Unscaled,
    };
    let QuantRounding::MsEden(draw) = params.rounding else {
        unreachable!("parameters of MS-EDEN");
    };
    let offset = params.offset_in_memory.then(|| offset_beside(like));
    let transform = eden_transform(like, params);
    let random = EdenRandom {
        stream: draw.stream,
        offset,
        earlier,
    };
    let client = &like.client;
    let amax = amax.unwrap_or_else(|| {
        let found = quantize::ms_eden_amax(client, source, usage, transform.clone());
        launched(found)
    });
    launched(quantize::ms_eden_as(
        client, source, usage, &amax, transform, random, form,
    ))
}

/// Converts the parameters of an MX format to those of the kernels.
fn mx_form(params: &QuantParams, form: StoredForm) -> MxForm {
    MxForm {
        format: params.format,
        layout: form.scale_layout(),
    }
}

/// Implements [`nvfp4_requantize`](super::super::Nvfp4KernelOps::nvfp4_requantize).
pub(super) fn requantize(
    source: QuantizedMatrix<CubeBackend>,
    groups: RowGroups<CubeBackend>,
    usage: Usage,
    (params, form): (&QuantParams, StoredForm),
    via: FloatDType,
) -> QuantizedMatrix<CubeBackend> {
    let Layout { rows, cols, .. } = source.layout;
    let (like, count) = (like_quantized(&source), groups.count());
    let earlier = earlier_groups(&groups);
    let source = to_device(source, device_groups(groups));
    let made = if params.format.is_mx() {
        trace_op("mx_requantize", usage_name(usage), rows, cols);
        let (client, via) = (&like.client, float_kind(via));
        let form = mx_form(params, form);
        launched(quantize::mx_requantize(client, &source, usage, form, via))
    } else {
        trace_op("ms_eden", usage_name(usage), rows, cols);
        ms_eden(
            &like,
            (EdenSource::Packed(&source), earlier),
            usage,
            params,
            form,
            None,
        )
    };
    let layout = count.layout((rows, cols), usage, params, form);
    to_burn(&like, made, count, layout)
}
