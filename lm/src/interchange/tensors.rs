//! Reads and writes the tensors of one quantized layer; shared by both dialects.

use anyhow::{Context, Result, bail, ensure};
use nvfp4_formats::BLOCK;
use safetensors::Dtype;

use super::GlobalScale;
use super::packed::{PackedWeight, check_scales};
use super::{Leaves, PreQuantScale};
use crate::hf::{TensorFolder, TensorSink, TensorSpec};

/// Description of a quantized layer, without its codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerInfo {
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// Global scale of the weight.
    pub global: GlobalScale,
    /// Global scale of the input.
    pub input_global: Option<GlobalScale>,
    /// True if the input is multiplied by a scale per feature.
    pub pre_quant: bool,
    /// Bytes of the layer's tensors.
    pub bytes: usize,
}

/// Reads the single F32 or BF16 number of the tensor `name`, of shape `[]` or `[1]`.
///
/// # Errors
/// Returns an error if there is no such tensor, or if it has another type or shape.
pub fn read_scalar(tensors: &TensorFolder, name: &str) -> Result<f32> {
    let tensor = tensors.get(name)?;
    ensure!(
        matches!(tensor.shape, [] | [1]) && matches!(tensor.dtype, Dtype::F32 | Dtype::BF16),
        "{tensor} is {:?}{:?}, but it must be one number, F32 or BF16 of shape [] or [1]",
        tensor.dtype,
        tensor.shape
    );
    Ok(tensor.to_f32()?[0])
}

/// Reads and checks all tensors of `module` except its codes, whose type and shape are checked.
pub(super) fn read_info(
    tensors: &TensorFolder,
    (module, leaves): (&str, Leaves),
    form: impl Fn(f32) -> GlobalScale,
) -> Result<LayerInfo> {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let codes = tensors.get(&name(leaves.codes))?;
    ensure!(
        codes.dtype == Dtype::U8 && codes.shape.len() == 2,
        "{codes} is {:?}{:?}, but codes are U8 [n, k / 2]",
        codes.dtype,
        codes.shape
    );
    // A tensor without rows may claim any number of columns.
    let (n, k) = (codes.shape[0], codes.shape[1].saturating_mul(2));
    ensure!(
        k.is_multiple_of(BLOCK) && n > 0 && k > 0,
        "{codes} has {n} rows of {k} codes, but blocks need a multiple of {BLOCK}"
    );
    let scales = tensors.get(&name(leaves.scales))?;
    ensure!(
        scales.dtype == Dtype::F8_E4M3 && *scales.shape == [n, k / BLOCK],
        "{scales} is {:?}{:?}, but the codes {n} x {k} need F8_E4M3{:?}",
        scales.dtype,
        scales.shape,
        [n, k / BLOCK]
    );
    check_scales(&scales.bytes(), k / BLOCK).with_context(|| scales.to_string())?;
    let scalar = |leaf: &str| -> Result<GlobalScale> {
        let name = name(leaf);
        let scale = form(read_scalar(tensors, &name)?);
        scale.check().with_context(|| name)?;
        Ok(scale)
    };
    let input_global = match tensors.contains(&name(leaves.input)) {
        true => Some(scalar(leaves.input)?),
        false => None,
    };
    let pre_quant = read_pre_quant(tensors, (module, leaves), k)?;
    let features = pre_quant.as_ref().map_or(0, |scale| scale.bytes().len());
    let globals = 1 + usize::from(input_global.is_some());
    Ok(LayerInfo {
        n,
        k,
        global: scalar(leaves.global)?,
        input_global,
        pre_quant: pre_quant.is_some(),
        bytes: codes.stored_bytes() + scales.stored_bytes() + 4 * globals + features,
    })
}

/// Reads the scales of the `k` input features of `module`, if the dialect has them and they are
/// present.
pub(super) fn read_pre_quant(
    tensors: &TensorFolder,
    (module, leaves): (&str, Leaves),
    k: usize,
) -> Result<Option<PreQuantScale>> {
    let name = leaves.pre_quant.map(|leaf| format!("{module}.{leaf}"));
    match name.and_then(|name| tensors.find(&name)) {
        Some(tensor) => PreQuantScale::read(&tensor, k).map(Some),
        None => Ok(None),
    }
}

/// Reads the weight of `module`, whose scalars follow the convention `form`.
pub(super) fn read(
    tensors: &TensorFolder,
    (module, leaves): (&str, Leaves),
    form: impl Fn(f32) -> GlobalScale,
) -> Result<PackedWeight> {
    let info = read_info(tensors, (module, leaves), form)?;
    let bytes = |leaf: &str| -> Result<Vec<u8>> {
        Ok(tensors.get(&format!("{module}.{leaf}"))?.bytes().to_vec())
    };
    let (codes, scales) = (bytes(leaves.codes)?, bytes(leaves.scales)?);
    let shape = [info.n, info.k];
    let pre_quant = read_pre_quant(tensors, (module, leaves), info.k)?;
    PackedWeight::new(shape, codes, scales, info.global, info.input_global)
        .and_then(|weight| weight.with_pre_quant(pre_quant))
        .with_context(|| module.to_owned())
}

/// Returns the tensors of `module` with scalars of shape `scalar`, for a weight of shape `[n, k]`
/// without input feature scales.
pub(super) fn specs(
    (module, leaves, scalar): (&str, Leaves, &[usize]),
    [n, k]: [usize; 2],
    has_input: bool,
) -> Vec<TensorSpec> {
    let spec = |leaf: &str, dtype: Dtype, shape: &[usize]| {
        TensorSpec::new(format!("{module}.{leaf}"), dtype, shape)
    };
    let mut specs = vec![
        spec(leaves.codes, Dtype::U8, &[n, k / 2]),
        spec(leaves.scales, Dtype::F8_E4M3, &[n, k / BLOCK]),
        spec(leaves.global, Dtype::F32, scalar),
    ];
    specs.extend(has_input.then(|| spec(leaves.input, Dtype::F32, scalar)));
    specs
}

/// Adds the tensors of `module` with scalars of shape `scalar`. `convert` converts a global scale
/// and returns the change of its factor in units in the last place. Returns the number of changed
/// scales.
pub(super) fn write(
    writer: &mut dyn TensorSink,
    (module, leaves, scalar): (&str, Leaves, &[usize]),
    weight: &PackedWeight,
    convert: impl Fn(GlobalScale) -> (GlobalScale, u32),
) -> Result<u32> {
    let name = |leaf: &str| format!("{module}.{leaf}");
    match (weight.pre_quant(), leaves.pre_quant) {
        (None, _) => {}
        (Some(scale), Some(leaf)) => scale.write(writer, &name(leaf))?,
        (Some(_), None) => bail!(
            "{module} multiplies its input by a scale for each feature (pre_quant_scale), for \
             which this dialect has no tensor: only modelopt has"
        ),
    }
    // If the scale is 0, codes must be 0 too, because readers may raise the scale.
    let mut weight = weight.clone();
    weight.clear_zero_blocks();
    let shape = [weight.n(), weight.k()];
    let has_input = weight.input_global().is_some();
    let mut specs = specs((module, leaves, scalar), shape, has_input).into_iter();
    let mut add = |bytes: &[u8]| {
        let spec = specs.next().expect("one for each of the tensors below");
        writer.add(&spec.name, spec.dtype, &spec.shape, bytes)
    };
    add(weight.codes())?;
    add(weight.scales())?;
    let mut moved = 0;
    for (leaf, scale) in [
        (leaves.global, Some(weight.global())),
        (leaves.input, weight.input_global()),
    ] {
        let Some(own) = scale else { continue };
        let (scale, ulps) = convert(own);
        ensure!(
            ulps <= 1,
            "{}: the global scale dequantizes by {:e}, whose divisor f32 does not hold: quantize the \
             model for this dialect, or leave the layer as it is (--exclude)",
            name(leaf),
            own.decode()
        );
        scale.check().with_context(|| name(leaf))?;
        moved += u32::from(ulps > 0);
        add(&scale.value().to_le_bytes())?;
    }
    Ok(moved)
}
