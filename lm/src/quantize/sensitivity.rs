//! Measures what quantizing each group of layers costs, on text.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::budget::{Choices, Cost, Sensitivity, choose};
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
use crate::hf::StoredTensor;
use crate::interchange::names::expert_layer;
use crate::progress::{Unit, Work, listen, listener};

/// Maximum number of sequences over which the KL divergences are measured.
pub const SEQUENCES: usize = 16;

/// Chooses the formats of the layers of the model in the folder `folder` for `bits` bits per
/// weight. `model` is the same model, loaded in f32. The KL divergences are measured over the first
/// [`SEQUENCES`] sequences of `length` of `tokens`; `calibration` is of the same text.
///
/// # Errors
/// Returns an error if the budget is out of range, if there are fewer than two tokens, or if a
/// weight cannot be quantized.
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
        let modules: Vec<String> = unit
            .iter()
            .flat_map(|group| group.iter().cloned())
            .collect();
        work.part(&modules[0]);
        let mut weights: BTreeMap<WeightFormat, (Weights, usize)> = BTreeMap::new();
        let (mut count, mut high) = (0, 0);
        for group in unit {
            for weight in quantized(&source, group, options, &inputs)? {
                let (all, bits) = weights.entry(weight.format).or_default();
                all.insert(weight.module, weight.values);
                *bits += 8 * weight.bytes;
            }
            for module in group {
                let tensor = source.tensors.get(&format!("{module}.weight"))?;
                let elements = tensor.shape.iter().product::<usize>();
                count += elements;
                high += elements * copied_spec(&tensor).dtype.bitsize();
            }
        }
        let mut formats = Vec::new();
        for (format, (weights, bits)) in weights {
            let changed = model.clone().with_weights(&weights)?;
            let kl = divergence(&changed, model, &texts, length);
            let kl = kl.with_context(|| format!("{} in {}", modules[0], format.name()))?;
            formats.push(Cost { format, bits, kl });
        }
        formats.push(Cost {
            format: WeightFormat::High,
            bits: high,
            kl: 0.0,
        });
        groups.push(Sensitivity {
            modules,
            weights: count,
            formats,
        });
        work.add(1);
    }
    choose(&groups, bits, texts.iter().map(Vec::len).sum())
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
    /// Bytes of codes and scales.
    bytes: usize,
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
            bytes: weight.bytes(),
        });
        let format = fp8::format_for(dialect, options.scheme);
        let weight = fp8::quantize(values, shape, amax, format);
        let weight = weight.with_context(|| tensor.to_string())?;
        found.push(Weight {
            format: WeightFormat::Fp8,
            module: (*module).clone(),
            values: weight.dequantize(),
            bytes: weight.bytes(),
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
    // The groups are the progress, not the texts of each.
    let progress = listener();
    listen(None);
    let found = compare(changed, model, texts, windows);
    listen(progress);
    let found = found?;
    let nats: f64 = found.iter().map(|window| window.divergence).sum();
    let tokens: usize = found.iter().map(|window| window.tokens).sum();
    // Rounding may make the divergence of an exact weight negative.
    Ok((nats / tokens as f64).max(0.0))
}
