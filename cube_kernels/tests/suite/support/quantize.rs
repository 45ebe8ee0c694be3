//! Requests of quantization that many tests make, and the module of the crate.

use cubecl::{client::Client, server::Handle};
use nvfp4_formats::{
    AmaxGranularity, BlockScaling, Hadamard, Nvfp4Error, QuantParams, RandomStream, Rounding,
    StoredForm, Usage,
};
use nvfp4_kernels::{
    moe::GroupOffsets,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

pub use nvfp4_kernels::quantize::{
    proof::{amax_of_matrix, amaxes, run_prologue_with_amaxes, *},
    *,
};

type Made = Result<DeviceQuantized, Nvfp4Error>;
type MadeBoth = Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error>;
type MadeSome = Result<(Option<DeviceQuantized>, Option<DeviceQuantized>), Nvfp4Error>;

/// Returns a tensor with known amax values.
pub fn target(
    amax: &Handle,
    granularity: AmaxGranularity,
    spec: impl Into<TargetSpec>,
) -> TargetSpec {
    spec.into().amax(amax).granularity(granularity)
}

/// Values that MS-EDEN reads, as a request for no tensor yet.
pub trait EdenSource<'a> {
    fn request(self) -> Quantize<'a>;
}

impl<'a> EdenSource<'a> for &'a Matrix {
    fn request(self) -> Quantize<'a> {
        Quantize::new(self)
    }
}

impl<'a> EdenSource<'a> for (&'a Matrix, &'a Groups) {
    fn request(self) -> Quantize<'a> {
        Quantize::new(self.0).groups(self.1)
    }
}

impl<'a> EdenSource<'a> for &'a DeviceQuantized {
    fn request(self) -> Quantize<'a> {
        Quantize::new(Source::Quantized {
            tensor: self,
            via: FloatKind::F32,
        })
    }
}

impl<'a> EdenSource<'a> for &Quantize<'a> {
    fn request(self) -> Quantize<'a> {
        self.clone()
    }
}

/// Quantizes one tensor; those of groups follow one another.
pub fn quantize(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    target: &TargetSpec,
) -> Made {
    let request = Quantize::new(x).groups(groups).stacked();
    let made = request.along(usage, target.clone()).launch(client)?;
    Ok(made.into_one())
}

/// Quantizes both tensors; those of groups follow one another.
pub fn quantize_both(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    row: &TargetSpec,
    col: &TargetSpec,
) -> MadeBoth {
    let request = Quantize::new(x).groups(groups).stacked();
    let request = request.rowwise(row.clone()).columnwise(col.clone());
    Ok(request.launch(client)?.into_both())
}

/// Quantizes these tensors, each in a form.
pub fn quantize_operands(
    client: &Client,
    x: &Matrix,
    row: Option<(&TargetSpec, StoredForm)>,
    col: Option<(&TargetSpec, StoredForm)>,
) -> MadeSome {
    let [row, col] = [row, col].map(|one| one.map(|(target, form)| target.clone().form(form)));
    let made = Quantize::new(x)
        .rowwise(row)
        .columnwise(col)
        .launch(client)?;
    Ok((made.rowwise, made.columnwise))
}

/// Quantizes the rowwise tensor in both storages: packed, in bf16.
pub fn quantize_in_both_storages(client: &Client, x: &Matrix, target: &TargetSpec) -> MadeBoth {
    let request = Quantize::new(x).rowwise(target.clone()).unscaled(true);
    let made = request.launch(client)?;
    let [packed, unscaled] = [made.rowwise, made.unscaled].map(|one| one.expect("requested"));
    Ok((packed, unscaled))
}

/// Quantizes tensors of groups as operands of the grouped GEMMs.
pub fn quantize_side_by_side(
    client: &Client,
    x: &Matrix,
    groups: &GroupOffsets,
    row: Option<&TargetSpec>,
    col: Option<&TargetSpec>,
) -> MadeSome {
    let groups = Groups::Offsets {
        offsets: groups.offsets.clone(),
        count: groups.count,
    };
    let request = Quantize::new(x).groups(&groups);
    let request = request.rowwise(row.cloned()).columnwise(col.cloned());
    let made = request.launch(client)?;
    Ok((made.rowwise, made.columnwise))
}

/// Quantizes a rowwise tensor with one amax.
pub fn quantize_row(client: &Client, x: &Matrix, amax: &Handle, rounding: Rounding) -> Made {
    let target = TargetSpec::new(rounding).amax(amax);
    Ok(Quantize::new(x).rowwise(target).launch(client)?.into_one())
}

/// Quantizes a columnwise tensor with one amax.
pub fn quantize_col(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
) -> Made {
    let params = QuantParams {
        hadamard,
        ..QuantParams::nvfp4(rounding)
    };
    let request = Quantize::new(x).columnwise(TargetSpec::new(params).amax(amax));
    Ok(request.launch(client)?.into_one())
}

/// Quantizes both tensors in 16x16 tiles.
pub fn quantize_tile(client: &Client, x: &Matrix, amax: &Handle) -> MadeBoth {
    let (scaling, layouts) = (BlockScaling::Standard, [StoredForm::Rows; 2]);
    quantize_tile_with(client, x, &Groups::One, amax, scaling, layouts)
}

/// Quantizes both tensors of each group in 16x16 tiles.
pub fn quantize_tile_with(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    amax: &Handle,
    scaling: BlockScaling,
    layouts: [StoredForm; 2],
) -> MadeBoth {
    let [row, col] = layouts.map(|layout| {
        let target = TargetSpec::new(QuantParams::nvfp4_2d(scaling)).amax(amax);
        target.form(layout)
    });
    quantize_both(client, x, groups, &row, &col)
}

/// Quantizes one tensor in 16x16 tiles.
pub fn quantize_tile_copy(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    amax: &Handle,
    scaling: BlockScaling,
    layout: StoredForm,
) -> Made {
    let target = TargetSpec::new(QuantParams::nvfp4_2d(scaling)).amax(amax);
    let target = target.form(layout);
    quantize(client, x, groups, usage, &target)
}

/// Quantizes each row with its own amax, from one read.
pub fn quantize_per_token(client: &Client, x: &Matrix, target: &TargetSpec) -> Made {
    let target = target.clone().granularity(AmaxGranularity::PerRow);
    Ok(Quantize::new(x).rowwise(target).launch(client)?.into_one())
}

/// Computes the amax of the values that MS-EDEN rotates.
pub fn ms_eden_amax<'a>(
    client: &Client,
    source: impl EdenSource<'a>,
    usage: Usage,
    hadamard: &Hadamard,
) -> Result<Handle, Nvfp4Error> {
    let target = TargetSpec::new(QuantParams::ms_eden(*hadamard, RandomStream::new(0, 0, 0)));
    let found = source.request().along(usage, target).launch_amax(client)?;
    Ok(found.amax.rows.or(found.amax.cols).expect("requested"))
}

/// Computes these amax values along and across the rows of a matrix.
pub fn ms_eden_amax_pair(
    client: &Client,
    x: &Matrix,
    hadamards: [&Hadamard; 2],
) -> Result<[Handle; 2], Nvfp4Error> {
    let stream = RandomStream::new(0, 0, 0);
    let [row, col] =
        hadamards.map(|hadamard| TargetSpec::new(QuantParams::ms_eden(*hadamard, stream)));
    let found = Quantize::new(x).rowwise(row).columnwise(col);
    let found = found.launch_amax(client)?.amax;
    Ok([found.rows, found.cols].map(|amax| amax.expect("requested")))
}

/// Quantizes by MS-EDEN.
pub fn ms_eden<'a>(
    client: &Client,
    source: impl EdenSource<'a>,
    usage: Usage,
    amax: &Handle,
    hadamard: &Hadamard,
    stream: RandomStream,
) -> Made {
    ms_eden_as(
        client,
        source,
        usage,
        amax,
        hadamard,
        stream,
        StoredForm::Rows,
    )
}

/// Quantizes by MS-EDEN, stored in this form.
pub fn ms_eden_as<'a>(
    client: &Client,
    source: impl EdenSource<'a>,
    usage: Usage,
    amax: &Handle,
    hadamard: &Hadamard,
    stream: RandomStream,
    form: StoredForm,
) -> Made {
    let target = TargetSpec::new(QuantParams::ms_eden(*hadamard, stream)).amax(amax);
    let made = source
        .request()
        .along(usage, target.form(form))
        .launch(client)?;
    Ok(made.into_one())
}

/// Quantizes to an MX format.
pub fn mx_quantize(
    client: &Client,
    x: &Matrix,
    usage: Usage,
    target: impl Into<TargetSpec>,
) -> Made {
    mx_quantize_groups(client, x, &Groups::One, usage, target)
}

/// Quantizes each group to an MX format.
pub fn mx_quantize_groups(
    client: &Client,
    x: &Matrix,
    groups: &Groups,
    usage: Usage,
    target: impl Into<TargetSpec>,
) -> Made {
    let request = Quantize::new(x).groups(groups).along(usage, target.into());
    Ok(request.launch(client)?.into_one())
}

/// Quantizes an NVFP4 tensor to an MX format.
pub fn mx_requantize(
    client: &Client,
    tensor: &DeviceQuantized,
    usage: Usage,
    target: impl Into<TargetSpec>,
    via: FloatKind,
) -> Made {
    let request = Quantize::new(Source::Quantized { tensor, via });
    let request = request.along(usage, target.into());
    Ok(request.launch(client)?.into_one())
}

/// Computes the amax of a matrix, or of the columnwise transformed matrix.
pub fn amax(client: &Client, x: &Matrix, hadamard: Option<Hadamard>) -> Result<Handle, Nvfp4Error> {
    if hadamard.is_none() {
        return amax_of_matrix(client, x);
    }
    let values = AmaxRequest::along(Usage::Columnwise, AmaxGranularity::PerTensor, hadamard);
    let found = amaxes(client, x, &Groups::One, &values)?;
    Ok(found.cols.expect("requested"))
}
