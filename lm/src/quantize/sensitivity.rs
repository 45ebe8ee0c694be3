//! Measures what quantizing each group of layers costs, on text.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::budget::{Choices, Cost, Sensitivity, check_budget, choose};
use super::folder::{casts, copied_spec};
use super::fp8;
use super::inputs::Inputs;
use super::options::QuantizeOptions;
use super::quantize_weight;
use super::rules::amax_of;
use super::source::Source;
use super::stats::Calibration;
use super::weight_format::WeightFormat;
use crate::decoder::Decoder;
use crate::decoder::replace::Weights;
use crate::eval::{Windows, compare};
use crate::hf::{StoredTensor, TensorSpec};
use crate::interchange::names::expert_layer;
use crate::interchange::{Fp8Format, Fp8Inputs, Fp8Weight};
use crate::progress::{Unit, Work};

/// Maximum number of sequences over which the KL divergences are measured.
pub const SEQUENCES: usize = 16;

/// Checks that the linear layers of the model in the folder `folder` can have `bits` bits per
/// weight, from their shapes.
///
/// # Errors
/// Returns an error that names the possible range if `bits` is outside of it, if the options do not
/// allow layers in FP8, or if the model cannot be opened.
pub fn check_bits(folder: &Path, options: &QuantizeOptions, bits: f64) -> Result<()> {
    options.refuse_smoothing()?;
    let source = Source::open(folder, options)?;
    let units = units(&source.plan.groups);
    let groups = units.iter().map(|unit| unmeasured(&source, unit, options));
    check_budget(&groups.collect::<Result<Vec<_>>>()?, bits)
}

/// Chooses the formats of the layers of the model in the folder `folder` for `bits` bits per
/// weight, which [`check_bits`] accepts. `model` is the same model, loaded in f32. The KL
/// divergences are measured over the first [`SEQUENCES`] sequences of `length` of `tokens`;
/// `calibration` is of the same text.
///
/// # Errors
/// Returns the errors of [`check_bits`]. Also returns an error if there are fewer than two tokens,
/// or if a weight cannot be quantized.
pub fn choose_formats(
    folder: &Path,
    model: &Decoder,
    options: &QuantizeOptions,
    calibration: &Calibration,
    (tokens, length): (&[u32], usize),
    bits: f64,
) -> Result<Choices> {
    options.refuse_smoothing()?;
    let source = Source::open(folder, options)?;
    let inputs = Inputs::new(calibration);
    let length = length.min(tokens.len());
    ensure!(
        length > 1,
        "bits is given, but the calibration has sequences of {length} tokens: at least 2 are needed \
         to measure a divergence"
    );
    let texts = tokens.chunks_exact(length).take(SEQUENCES);
    let texts: Vec<Vec<u32>> = texts.map(<[u32]>::to_vec).collect();
    let units = units(&source.plan.groups);
    let mut work = Work::begin("measure", Unit::Layers, 0, units.len());
    let mut groups = Vec::new();
    for unit in units {
        let mut measured = unmeasured(&source, &unit, options)?;
        let name = measured.modules[0].clone();
        work.part(&name);
        let mut weights: BTreeMap<WeightFormat, Weights> = BTreeMap::new();
        for group in unit {
            for weight in quantized(&source, group, options, &inputs)? {
                let of_format = weights.entry(weight.format).or_default();
                of_format.insert(weight.module, weight.values);
            }
        }
        for cost in &mut measured.formats {
            if let Some(weights) = weights.get(&cost.format) {
                let changed = model.clone().with_weights(weights)?;
                let kl = divergence(&changed, model, &texts, length);
                cost.kl = kl.with_context(|| format!("{name} in {}", cost.format.name()))?;
            }
        }
        groups.push(measured);
        work.add(1);
    }
    choose(&groups, bits, texts.iter().map(Vec::len).sum())
}

/// Returns the modules of `unit` with the bits of each format, and KL divergences of 0.
fn unmeasured(
    source: &Source,
    unit: &[&Vec<String>],
    options: &QuantizeOptions,
) -> Result<Sensitivity> {
    let dialect = options.dialect;
    let fp8 = Fp8Format {
        inputs: Fp8Inputs::HighPrecision,
        ..fp8::format_for(dialect, options.scheme)
    };
    let (mut weights, mut bits) = (0, [0; 3]);
    for module in unit.iter().copied().flatten() {
        let tensor = source.tensors.get(&format!("{module}.weight"))?;
        let shape = [tensor.shape[0], tensor.shape[1]];
        weights += shape[0] * shape[1];
        for (bits, specs) in bits.iter_mut().zip([
            dialect.specs(module, shape, false),
            Fp8Weight::specs(dialect, module, shape, fp8),
            vec![copied_spec(&tensor)],
        ]) {
            let of_spec =
                |spec: &TensorSpec| spec.shape.iter().product::<usize>() * spec.dtype.bitsize();
            *bits += specs.iter().map(of_spec).sum::<usize>();
        }
    }
    let formats = [WeightFormat::Nvfp4, WeightFormat::Fp8, WeightFormat::High];
    let costs = formats.into_iter().zip(bits);
    Ok(Sensitivity {
        modules: unit.iter().copied().flatten().cloned().collect(),
        weights,
        formats: costs
            .map(|(format, bits)| Cost {
                format,
                bits,
                kl: 0.0,
            })
            .collect(),
    })
}

/// Joins groups that must have one format: those of the experts of a layer.
fn units(groups: &[Vec<String>]) -> Vec<Vec<&Vec<String>>> {
    let mut units: Vec<Vec<&Vec<String>>> = Vec::new();
    let mut experts: BTreeMap<&str, usize> = BTreeMap::new();
    for group in groups {
        match expert_layer(&group[0]) {
            None => units.push(vec![group]),
            Some(layer) => {
                let at = *experts.entry(layer).or_insert(units.len());
                if at == units.len() {
                    units.push(Vec::new());
                }
                units[at].push(group);
            }
        }
    }
    units
}

/// Weight of a module in one format.
struct Weight {
    format: WeightFormat,
    module: String,
    /// Dequantized values.
    values: Vec<f32>,
}

/// Returns the weights of the modules of `group` in NVFP4 and FP8, as they would be written.
fn quantized(
    source: &Source,
    group: &[String],
    options: &QuantizeOptions,
    inputs: &Inputs<'_>,
) -> Result<Vec<Weight>> {
    let dialect = options.dialect;
    let mut weights: Vec<(&String, StoredTensor<'_>, Vec<f32>)> = Vec::new();
    for module in group {
        let tensor = source.tensors.get(&format!("{module}.weight"))?;
        weights.push((module, tensor, tensor.to_f32()?));
    }
    let amax = amax_of(weights.iter().map(|(_, _, values)| &values[..]));
    let mut casts = casts(&weights, dialect)?.into_iter();
    let mut found = Vec::new();
    for (module, tensor, values) in &weights {
        let shape = [tensor.shape[0], tensor.shape[1]];
        let stats = inputs.of(module);
        let method = options.method.with(stats);
        let weight = match casts.next() {
            Some((weight, _)) => Ok(weight),
            None => quantize_weight(values, shape, amax, (dialect, method), stats),
        };
        let weight = weight.with_context(|| tensor.to_string())?;
        let nvfp4 = weight.dequantize(dialect.arithmetic());
        found.push(Weight {
            format: WeightFormat::Nvfp4,
            module: (*module).clone(),
            values: nvfp4,
        });
        let format = fp8::format_for(dialect, options.scheme);
        let weight = fp8::quantize(values, shape, amax, format);
        let weight = weight.with_context(|| tensor.to_string())?;
        found.push(Weight {
            format: WeightFormat::Fp8,
            module: (*module).clone(),
            values: weight.dequantize(),
        });
    }
    Ok(found)
}

/// Returns the KL divergence of `changed` from `model` in nats per token.
fn divergence(
    changed: &Decoder,
    model: &Decoder,
    texts: &[Vec<u32>],
    length: usize,
) -> Result<f64> {
    let windows = Windows {
        length,
        stride: length - 1,
    };
    let found = compare(changed, model, texts, windows)?;
    let nats: f64 = found.iter().map(|window| window.divergence).sum();
    let tokens: usize = found.iter().map(|window| window.tokens).sum();
    // Rounding may make the divergence of an exact weight negative.
    Ok((nats / tokens as f64).max(0.0))
}
