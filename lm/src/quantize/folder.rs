//! A model folder to a quantized one, one group of layers at a time.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use regex::Regex;
use serde_json::{Map, Value, json};

use super::block::ScaleChoice;
use super::plan::{Kept, Plan};
use super::rules::block_amax;
use super::stats::InputStats;
use super::{Method, quantize_weight, sqnr};
use crate::checkpoint::{read_json, write_json};
use crate::hf::config::{CONFIG_FILE, refuse_quantized};
use crate::hf::{TensorFolder, TensorWriter};
use crate::interchange::convert::{copy_companions, create_empty, exclusions, write_configs};
use crate::interchange::names::expert_projection;
use crate::interchange::{Checkpoint, Dialect, GlobalScale, QuantConfig, Scheme};

/// The file that says how a folder was quantized. No reader of checkpoints looks at it.
pub const PROVENANCE: &str = "nvfp4_quantize.json";

/// What calibration knows of the inputs of each module.
pub type Calibration = BTreeMap<String, Arc<InputStats>>;

/// How to quantize a model.
#[derive(Debug, Clone)]
pub struct QuantizeOptions {
    /// Whose conventions the folder follows.
    pub dialect: Dialect,
    /// What is quantized.
    pub scheme: Scheme,
    /// How weights are quantized.
    pub method: Method,
    /// Modules to leave as they are, beside routers and the head.
    pub exclude: Vec<Regex>,
    /// The factor by which every quantized input is dequantized, in place of amax / 2688 of the
    /// calibration.
    pub input_scale: Option<f32>,
}

/// A linear layer that was quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// Its name.
    pub module: String,
    /// Output and input features.
    pub shape: [usize; 2],
    /// Bytes of the weight before.
    pub bytes_before: usize,
    /// Bytes of codes, block scales and global scales.
    pub bytes: usize,
    /// Signal-to-quantization-noise ratio of the weight, in dB.
    pub sqnr: f64,
}

/// What was and what was not quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized {
    /// The layers that were.
    pub layers: Vec<LayerReport>,
    /// The linear layers that were not: name, why, and bytes.
    pub kept: Vec<(String, Kept, usize)>,
    /// Bytes of the tensors that are in no linear layer.
    pub other_bytes: usize,
    /// Modules to whose input no token of the calibration came: they have the statistics of the
    /// group's other experts, or count all inputs equally.
    pub unseen: Vec<String>,
}

/// Quantize the model in the folder `model` to the folder `out`, with what `calibration` knows of
/// its inputs. `progress` is told of every layer, of how many. Memory holds one group of layers
/// at a time.
///
/// # Errors
/// When a file cannot be read, `out` is not empty, nothing is left to quantize, activations are to
/// be quantized and neither calibration nor an input scale is there, and for GPTQ without
/// calibration. The folder that was written is checked as [`Checkpoint::open`] does.
pub fn quantize_folder(
    model: &Path,
    out: &Path,
    options: &QuantizeOptions,
    calibration: &Calibration,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Quantized> {
    let tensors = TensorFolder::open(model)?;
    let mut json = read_config(model)?;
    let plan = Plan::new(&tensors, &options.exclude)?;
    ensure!(
        options.scheme == Scheme::W4a16 || options.input_scale.is_some() || !calibration.is_empty(),
        "scheme is w4a4, which needs the largest magnitude of every layer's input: calibrate on \
         text, or give an input scale"
    );
    ensure!(
        options.method != Method::Gptq || !calibration.is_empty(),
        "method is gptq, which needs the second moments of every layer's input: calibrate on \
         text, or choose rtn, 4over6 or search"
    );
    create_empty(out)?;
    let mut writer = TensorWriter::create(out, TensorWriter::SHARD_BYTES)?;
    let mut done = Quantized {
        layers: Vec::new(),
        kept: Vec::new(),
        other_bytes: 0,
        unseen: Vec::new(),
    };
    for name in &plan.copied {
        let tensor = tensors.get(name)?;
        writer.add(name, tensor.dtype, tensor.shape, tensor.bytes)?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        match plan.kept.get(module) {
            Some(&kept) => done.kept.push((module.into(), kept, tensor.bytes.len())),
            None => done.other_bytes += tensor.bytes.len(),
        }
    }
    let inputs = Inputs::new(calibration);
    let total = plan.groups.iter().map(Vec::len).sum();
    for group in &plan.groups {
        let mut weights = Vec::new();
        for module in group {
            let tensor = tensors.get(&format!("{module}.weight"))?;
            weights.push((module, tensor, tensor.to_f32()?));
        }
        let amax =
            (weights.iter()).fold(0.0f32, |amax, (_, _, values)| amax.max(block_amax(values)));
        let input_global = inputs.global(group, options)?;
        for (module, tensor, values) in weights {
            progress(done.layers.len(), total, module);
            let shape = [tensor.shape[0], tensor.shape[1]];
            let stats = inputs.of(module);
            if !calibration.is_empty() && stats.is_none() {
                done.unseen.push(module.clone());
            }
            // Without the moments of its input, a layer that no token reached is searched.
            let method = match (options.method, stats) {
                (Method::Gptq, None) => Method::Search,
                (method, _) => method,
            };
            let kind = (options.dialect, method);
            let weight = quantize_weight(&values, shape, amax, kind, stats)
                .and_then(|weight| weight.with_input_global(input_global))
                .with_context(|| tensor.to_string())?;
            options.dialect.write(&mut writer, module, &weight)?;
            done.layers.push(LayerReport {
                module: module.clone(),
                shape,
                bytes_before: tensor.bytes.len(),
                bytes: weight.bytes(),
                sqnr: sqnr(&values, &weight.dequantize(options.dialect.arithmetic())),
            });
        }
    }
    writer.finish()?;
    let config = quant_config(options, &plan);
    json.insert("quantization_config".into(), config.inline());
    copy_companions(model, out)?;
    write_provenance(out, options, calibration)?;
    write_configs(out, &json, &config)?;
    // By the rules of those who read it: what they would choke on is an error here.
    Checkpoint::open(out).context("the folder that was written is not valid")?;
    Ok(done)
}

/// config.json of a model that is not quantized.
fn read_config(model: &Path) -> Result<Map<String, Value>> {
    let path = model.join(CONFIG_FILE);
    let json = read_json(&path)?;
    refuse_quantized(&json).with_context(|| path.display().to_string())?;
    Ok(json)
}

fn quant_config(options: &QuantizeOptions, plan: &Plan) -> QuantConfig {
    let kept = plan.kept.keys().map(String::as_str);
    QuantConfig {
        dialect: options.dialect,
        scheme: options.scheme,
        kv_cache_fp8: false,
        exclude: exclusions(kept, options.dialect),
    }
}

fn write_provenance(
    out: &Path,
    options: &QuantizeOptions,
    calibration: &Calibration,
) -> Result<()> {
    let tokens = calibration.values().map(|stats| stats.tokens()).max();
    let exclude: Vec<&str> = options.exclude.iter().map(Regex::as_str).collect();
    let json = json!({
        "producer": {"name": "nvfp4", "version": env!("CARGO_PKG_VERSION")},
        "dialect": options.dialect.name(),
        "scheme": options.scheme.name(),
        "method": options.method.name(),
        "block_scales": match options.method.choice() {
            ScaleChoice::Max => "max",
            ScaleChoice::FourOverSix => "4over6",
            ScaleChoice::Search => "search",
        },
        "exclude": exclude,
        "input_scale": options.input_scale,
        "calibration_tokens": tokens,
    });
    write_json(&out.join(PROVENANCE), &json)
}

/// The calibration, and what experts that no token reached take from their layer's others.
struct Inputs<'a> {
    calibration: &'a Calibration,
    /// The largest magnitude of the inputs of each projection over all experts of its layer.
    experts: BTreeMap<String, f32>,
}

impl<'a> Inputs<'a> {
    fn new(calibration: &'a Calibration) -> Self {
        let mut experts: BTreeMap<String, f32> = BTreeMap::new();
        for (module, stats) in calibration {
            if let Some(projection) = expert_projection(module) {
                let amax = experts.entry(projection).or_default();
                *amax = amax.max(stats.amax());
            }
        }
        Self {
            calibration,
            experts,
        }
    }

    /// What is known of the input of `module`, if a token came to it.
    fn of(&self, module: &str) -> Option<&'a InputStats> {
        let stats = self.calibration.get(module)?;
        (stats.tokens() > 0).then_some(stats.as_ref())
    }

    /// The static global scale of the input of `group`, of whose members one scale is written:
    /// the largest of theirs, or, where no token came to any, of all experts of the layer.
    fn global(&self, group: &[String], options: &QuantizeOptions) -> Result<Option<GlobalScale>> {
        if options.scheme == Scheme::W4a16 {
            return Ok(None);
        }
        if let Some(scale) = options.input_scale {
            return Ok(Some(GlobalScale::Multiply(scale)));
        }
        let largest = |amax: f32, other: f32| amax.max(other);
        let own = group
            .iter()
            .filter_map(|module| Some(self.of(module)?.amax()));
        let mut amax = own.fold(0.0, largest);
        if amax == 0.0 {
            let experts = group.iter().filter_map(|module| expert_projection(module));
            let all = experts.filter_map(|projection| self.experts.get(&projection).copied());
            amax = all.fold(0.0, largest);
        }
        ensure!(
            amax > 0.0 && amax.is_finite(),
            "{}: the largest input that calibration saw is {amax}, from which no scale follows",
            group[0]
        );
        Ok(Some(super::rules::Rule::of(options.dialect).global(amax)))
    }
}
