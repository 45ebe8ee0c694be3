//! Groups the tensors of a folder into modules, and reports everything that its readers would
//! reject.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use safetensors::Dtype;
use serde_json::Value;

use super::GlobalScale;
use super::fp8::{INPUT, SCALES};
use super::names::{canonical, is_linear, is_router, may_be_linear};
pub use super::tensors::LayerInfo;
use super::tensors::{read_info, read_scalar};
use super::{
    Dialect, Fp8Layer, Fp8Weight, LayerFormat, PackedWeight, QuantConfig, Scheme, Targets,
};
use crate::checkpoint::read_json;
use crate::decoder::fused::open_tensors;
use crate::decoder::names::differences;
use crate::hf::config::CONFIG_FILE;
use crate::hf::folder::check_folder;
use crate::hf::tensors::check_each;
use crate::hf::{DecoderConfig, Family, StoredTensor, TensorFolder};

mod fused;

/// ModelOpt's description of the quantization, which TensorRT-LLM reads first.
pub const HF_QUANT_CONFIG: &str = "hf_quant_config.json";

/// Reason for which a checkpoint is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Tensor or module.
    pub name: String,
    /// Description of the problem.
    pub what: String,
}

/// FP8 scales of one attention layer: keys, values.
pub type KvScales = [Option<f32>; 2];

/// Returns true if the model in `folder` is quantized according to its configuration.
///
/// # Errors
/// Returns an error if config.json or hf_quant_config.json cannot be read.
pub fn is_quantized(folder: &Path) -> Result<bool> {
    Ok(read_configs(folder)?.1.is_some())
}

/// Says which quantization of the model in `folder` is not computed when it runs, if any.
///
/// # Errors
/// Returns an error if config.json or hf_quant_config.json cannot be read.
pub fn remark(folder: &Path) -> Result<Option<String>> {
    let groups = read_configs(folder)?.1.map(|config| config.groups);
    let formats = groups.iter().flatten().map(|group| group.format);
    let formats =
        formats.filter(|it| matches!(it, LayerFormat::Fp8(fp8) if fp8.quantizes_inputs()));
    let formats: Vec<String> = formats.map(|format| format.to_string()).collect();
    Ok((!formats.is_empty()).then(|| {
        format!(
            "weights in FP8 are dequantized, and the inputs of their layers are not quantized, \
             unlike in engines ({})",
            formats.join("; ")
        )
    }))
}

/// Reads config.json of `folder`, and the quantization described by it and hf_quant_config.json.
fn read_configs(folder: &Path) -> Result<(Value, Option<QuantConfig>)> {
    check_folder(folder)?;
    let json: Value = read_json(&folder.join(CONFIG_FILE))?;
    ensure!(
        json.is_object(),
        "{} holds no JSON object",
        folder.join(CONFIG_FILE).display()
    );
    let path = folder.join(HF_QUANT_CONFIG);
    let file = path.exists().then(|| read_json(&path)).transpose()?;
    let config = QuantConfig::read(&json, file.as_ref());
    let config = config.with_context(|| folder.display().to_string())?;
    Ok((json, config))
}

/// A checkpoint: the tensors of a folder, grouped into modules.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    json: Value,
    tensors: TensorFolder,
    config: Option<QuantConfig>,
    layers: BTreeMap<String, LayerInfo>,
    fp8: BTreeMap<String, Fp8Layer>,
    kv_scales: BTreeMap<String, KvScales>,
    plain: Vec<String>,
    /// All modules in NVFP4, including those with problems.
    modules: BTreeSet<String>,
    /// Targets of the configuration, if they can be read.
    targets: Option<Targets>,
    /// Tensors without a meaning, with the reason.
    unused: Vec<(String, &'static str)>,
    problems: Vec<Problem>,
}

impl Checkpoint {
    /// Scans the folder `folder`, quantized or not; problems of its layers go to
    /// [`problems`](Self::problems).
    ///
    /// # Errors
    /// Returns an error if config.json, hf_quant_config.json or a safetensors file cannot be read
    /// at all.
    pub fn scan(folder: &Path) -> Result<Self> {
        let (json, config) = read_configs(folder)?;
        let mut tensors = match json.as_object().map(DecoderConfig::from_json) {
            Some(Ok(known)) => open_tensors(folder, &known)?,
            _ => TensorFolder::open(folder)?,
        };
        if let Some(json) = json.as_object() {
            tensors = tensors.with_fp8_scales(json)?;
        }
        let mut checkpoint = Self {
            folder: folder.to_owned(),
            json,
            tensors,
            config,
            layers: BTreeMap::new(),
            fp8: BTreeMap::new(),
            kv_scales: BTreeMap::new(),
            plain: Vec::new(),
            modules: BTreeSet::new(),
            targets: None,
            unused: Vec::new(),
            problems: Vec::new(),
        };
        checkpoint.sort_tensors();
        checkpoint.check_groups();
        checkpoint.check_exclusions();
        checkpoint.check_model();
        checkpoint.check_values();
        Ok(checkpoint)
    }

    /// Opens the quantized checkpoint `folder` and checks everything.
    ///
    /// # Errors
    /// Returns the errors of [`Self::scan`]. Also returns an error if the folder is not quantized,
    /// or if there is any problem.
    pub fn open(folder: &Path) -> Result<Self> {
        let checkpoint = Self::scan(folder)?;
        ensure!(
            checkpoint.config.is_some(),
            "{} is not quantized: {CONFIG_FILE} has no quantization_config",
            folder.display()
        );
        if let Some(Problem { name, what }) = checkpoint.problems.first() {
            let more = match checkpoint.problems.len() - 1 {
                0 => String::new(),
                more => format!(" (and {more} more: `nvfp4 inspect` lists them)"),
            };
            anyhow::bail!("{}: {name}: {what}{more}", folder.display());
        }
        Ok(checkpoint)
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the contents of config.json.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// Returns all tensors.
    pub fn tensors(&self) -> &TensorFolder {
        &self.tensors
    }

    /// Returns the quantization of the checkpoint; `None` if it is not quantized.
    pub fn config(&self) -> Option<&QuantConfig> {
        self.config.as_ref()
    }

    /// Returns the layers in NVFP4 without problems, by module.
    pub fn layers(&self) -> &BTreeMap<String, LayerInfo> {
        &self.layers
    }

    /// Returns the layers in FP8 without problems, by module. Their weights are among the
    /// [`plain`](Self::plain) tensors, joined with their scales.
    pub fn fp8_layers(&self) -> &BTreeMap<String, Fp8Layer> {
        &self.fp8
    }

    /// Returns the format of the layer `module`, if it is quantized.
    pub fn format(&self, module: &str) -> Option<LayerFormat> {
        let scheme = |layer: &LayerInfo| match layer.input_global {
            None => Scheme::W4a16,
            Some(_) => Scheme::W4a4,
        };
        let nvfp4 = self.layers.get(module);
        let nvfp4 = nvfp4.map(|layer| LayerFormat::Nvfp4(scheme(layer)));
        nvfp4.or_else(|| Some(LayerFormat::Fp8(self.fp8.get(module)?.format)))
    }

    /// Returns all quantized layers without problems.
    pub fn quantized(&self) -> impl Iterator<Item = &str> {
        self.layers
            .keys()
            .chain(self.fp8.keys())
            .map(String::as_str)
    }

    /// Returns the FP8 scales, by attention module.
    pub fn kv_scales(&self) -> &BTreeMap<String, KvScales> {
        &self.kv_scales
    }

    /// Returns the names of the tensors that are neither part of a layer in NVFP4 nor a scale in
    /// FP8.
    pub fn plain(&self) -> &[String] {
        &self.plain
    }

    /// Returns the names of tensors that are known to have no meaning, with the reason.
    pub fn unused(&self) -> &[(String, &'static str)] {
        &self.unused
    }

    /// Returns true if the architecture in config.json is known, so that the tensors were compared
    /// with it.
    pub fn is_known(&self) -> bool {
        let found = self.json.get("model_type").and_then(Value::as_str);
        found.is_some_and(|found| Family::of(found).is_some())
    }

    /// Returns the linear layers that are not quantized; for an unknown architecture, all modules
    /// that may be linear layers.
    pub fn unquantized(&self) -> impl Iterator<Item = &str> {
        let is_known = self.is_known();
        self.plain.iter().filter_map(move |name| {
            let module = name.strip_suffix(".weight")?;
            if self.fp8.contains_key(module) {
                return None;
            }
            let is_matrix = || {
                let tensor = self.tensors.find(name);
                tensor.is_some_and(|tensor| tensor.shape.len() == 2)
            };
            let is_linear = match is_known {
                true => is_linear(module),
                false => is_linear(module) || may_be_linear(module) && is_matrix(),
            };
            is_linear.then_some(module)
        })
    }

    /// Returns the problems found.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns the weight of the quantized layer `module`.
    ///
    /// # Errors
    /// Returns an error if there is no such layer, or if it has a problem.
    pub fn weight(&self, module: &str) -> Result<PackedWeight> {
        let config = self.config.as_ref();
        let config = config.with_context(|| format!("{module} is not quantized"))?;
        config.dialect.read(&self.tensors, module)
    }

    /// Returns the weight of the layer `module` in FP8.
    ///
    /// # Errors
    /// Returns an error if there is no such layer, or if it has a problem.
    pub fn fp8_weight(&self, module: &str) -> Result<Fp8Weight> {
        let layer = self.fp8.get(module);
        let layer = layer.with_context(|| format!("{module} is not in FP8"))?;
        let weight = self.tensors.get(&format!("{module}.weight"))?;
        let scales = weight.scales.map(|scales| scales.values());
        Ok(Fp8Weight {
            shape: layer.shape,
            format: layer.format,
            codes: weight.bytes().to_vec(),
            scales: scales.with_context(|| format!("{weight} has no scales"))?,
            input_scale: layer.input_scale,
        })
    }

    fn problem(&mut self, name: &str, what: impl Into<String>) {
        let (name, what) = (name.to_owned(), what.into());
        self.problems.push(Problem { name, what });
    }

    /// Assigns every tensor to a quantized layer, to the FP8 scales, or to the plain tensors.
    fn sort_tensors(&mut self) {
        let names: Vec<String> = self.tensors.names().map(String::from).collect();
        let Some(config) = self.config.clone() else {
            for name in &names {
                if name.ends_with(".weight_scale") {
                    self.problem(
                        name,
                        format!("{CONFIG_FILE} has no quantization_config for it"),
                    );
                }
            }
            self.plain = names;
            return;
        };
        let leaves = config.dialect.leaves();
        let is_fp8 = |name: &str| {
            let tensor = self.tensors.find(name);
            tensor.is_some_and(|tensor| tensor.dtype == Dtype::F8_E4M3)
        };
        let (fp8, modules): (BTreeSet<&str>, BTreeSet<&str>) = names
            .iter()
            .filter_map(|name| name.strip_suffix(leaves.scales)?.strip_suffix('.'))
            .partition(|module| is_fp8(&format!("{module}.weight")));
        for name in &names {
            let (module, leaf) = name.rsplit_once('.').unwrap_or(("", name));
            if let Some((attention, which)) = kv_scale_of(config.dialect, module, leaf) {
                self.read_kv_scale(name, attention, which);
            } else if fp8.contains(module) {
                match leaf {
                    "weight" | "bias" => self.plain.push(name.clone()),
                    SCALES | INPUT => {}
                    _ => self.problem(
                        name,
                        "layers in FP8 have no such tensor: it would be ignored",
                    ),
                }
            } else if !modules.contains(module) {
                let is_code = self
                    .tensors
                    .find(name)
                    .is_some_and(|t| matches!(t.dtype, Dtype::U8 | Dtype::F8_E4M3));
                let is_pre_quant = leaves.pre_quant == Some(leaf);
                let is_part = is_code || is_pre_quant || leaves.all()[1..].contains(&leaf);
                if is_part || config.dialect.other().leaves().all()[2..].contains(&leaf) {
                    let scales = leaves.scales;
                    self.problem(name, format!("there is no {module}.{scales} for it"));
                }
                self.plain.push(name.clone());
            } else if leaf == "bias" {
                self.plain.push(name.clone());
            } else if config.pre_quant && leaves.pre_quant == Some(leaf) {
                // These tensors are read with their layer.
            } else if !leaves.all().contains(&leaf) {
                let except = match leaves.pre_quant == Some(leaf) {
                    true => " but where quant_algo is NVFP4_AWQ",
                    false => "",
                };
                let what = format!(
                    "quantized layers of {} have no such tensor{except}: it would be ignored",
                    config.dialect.name()
                );
                self.problem(name, what);
            }
        }
        let targets = match config.targets() {
            Ok(targets) => Some(targets),
            Err(error) => {
                self.problem("targets", format!("{error:#}"));
                None
            }
        };
        for module in &modules {
            self.read_layer(&config, targets.as_ref(), module);
        }
        for module in &fp8 {
            self.read_fp8(&config, targets.as_ref(), module);
        }
        self.modules = modules.into_iter().map(String::from).collect();
        self.targets = targets;
        self.check_kv_scales(&names, config.kv_cache_fp8);
    }

    /// Checks that every attention layer has both cache scales, or that none has any.
    fn check_kv_scales(&mut self, names: &[String], is_fp8: bool) {
        if is_fp8 && self.kv_scales.is_empty() {
            self.problem("kv_cache_scheme", "FP8, but no attention layer has scales");
            return;
        }
        if !is_fp8 && !self.kv_scales.is_empty() {
            let what = "not FP8, but attention layers have scales, which would be ignored";
            self.problem("kv_cache_scheme", what);
            return;
        }
        let keys = names
            .iter()
            .filter_map(|name| name.split_once(".k_proj.").map(|(attention, _)| attention));
        let attentions: BTreeSet<&str> = match is_fp8 {
            true => keys.collect(),
            false => BTreeSet::new(),
        };
        for attention in attentions {
            let scales = self.kv_scales.get(attention).copied().unwrap_or_default();
            for (scale, which) in scales.into_iter().zip(["keys", "values"]) {
                if scale.is_none() {
                    self.problem(attention, format!("there is no scale for its {which}"));
                }
            }
        }
    }

    fn read_kv_scale(&mut self, name: &str, attention: &str, which: usize) {
        match read_scalar(&self.tensors, name) {
            Ok(scale) if scale.is_finite() && scale > 0.0 => {
                self.kv_scales.entry(attention.to_owned()).or_default()[which] = Some(scale);
            }
            Ok(scale) => {
                let what = format!("the scale is {scale}, but it must be positive and finite");
                self.problem(name, what);
            }
            Err(error) => self.problem(name, format!("{error:#}")),
        }
    }

    /// Returns the format of `module` by the configuration; reports two formats.
    fn configured(&mut self, targets: Option<&Targets>, module: &str) -> Option<LayerFormat> {
        match targets?.format(module) {
            Ok(format) => format,
            Err(error) => {
                self.problem(module, error.to_string());
                None
            }
        }
    }

    /// Reads a layer in FP8, and joins its weight with its scales.
    fn read_fp8(&mut self, config: &QuantConfig, targets: Option<&Targets>, module: &str) {
        let format = match self.configured(targets, module) {
            Some(LayerFormat::Fp8(format)) => format,
            other => {
                let other = other.map_or("not quantized".into(), |other| other.to_string());
                let what = format!("is stored in FP8, but the configuration makes it {other}");
                return self.problem(module, what);
            }
        };
        match Fp8Layer::read(&self.tensors, config.dialect, module, format) {
            Ok(layer) => {
                let [weight, scales] = ["weight", SCALES].map(|leaf| format!("{module}.{leaf}"));
                let block = format.block(layer.shape);
                self.tensors.join_scales(&weight, &scales, block);
                self.fp8.insert(module.to_owned(), layer);
            }
            Err(error) => self.problem(module, format!("{error:#}")),
        }
    }

    fn read_layer(&mut self, config: &QuantConfig, targets: Option<&Targets>, module: &str) {
        let leaves = config.dialect.leaves();
        let form = match config.dialect {
            Dialect::ModelOpt => GlobalScale::Multiply,
            Dialect::CompressedTensors => GlobalScale::Divide,
        };
        let info = match read_info(&self.tensors, (module, leaves), form) {
            Ok(info) => info,
            Err(error) => return self.problem(module, format!("{error:#}")),
        };
        let input = format!("{module}.{}", leaves.input);
        let scheme = match self.configured(targets, module) {
            Some(LayerFormat::Nvfp4(scheme)) => Some(scheme),
            Some(LayerFormat::Fp8(fp8)) => {
                let what = format!("is stored in NVFP4, but the configuration makes it {fp8}");
                return self.problem(module, what);
            }
            None => config.scheme(),
        };
        match (scheme.unwrap_or(Scheme::W4a16), info.input_global) {
            (Scheme::W4a4, None) => self.problem(
                &input,
                "is missing, but activations are quantized (w4a4): readers divide by zero",
            ),
            (Scheme::W4a16, Some(_)) => {
                self.problem(
                    &input,
                    "is there, but activations are not quantized (w4a16)",
                );
            }
            _ => {}
        }
        self.layers.insert(module.to_owned(), info);
    }

    /// Checks that every unquantized linear layer is excluded, and no quantized one.
    fn check_exclusions(&mut self) {
        let Some(config) = &self.config else { return };
        let exclusions = match config.exclusions() {
            Ok(exclusions) => exclusions,
            Err(error) => return self.problem("ignore", format!("{error:#}")),
        };
        let Some(targets) = &self.targets else { return };
        // A layer in two groups is reported where it is read.
        let is_target = |module: &str| !matches!(targets.format(module), Ok(None));
        let excluded = |module: &str| exclusions.iter().find(|entry| entry.matches(module));
        let mut found = Vec::new();
        for module in self.quantized() {
            if is_router(module) {
                found.push((
                    module.to_owned(),
                    "is a router, but it is quantized".to_owned(),
                ));
            }
            if !is_target(module) {
                let targets: Vec<&String> = config
                    .groups
                    .iter()
                    .flat_map(|group| &group.targets)
                    .collect();
                let what = format!("is quantized, but none of targets {targets:?} is it");
                found.push((module.to_owned(), what));
            }
            if let Some(entry) = excluded(module) {
                let what = format!(
                    "is quantized, but the exclusion {:?} matches it",
                    entry.text()
                );
                found.push((module.to_owned(), what));
            }
        }
        for module in self
            .unquantized()
            .filter(|module| is_target(module) && excluded(module).is_none())
        {
            let what = match is_router(module) {
                true => "is a router and not quantized, but no exclusion names it",
                false => "is not quantized, but no exclusion names it",
            };
            found.push((module.to_owned(), what.to_owned()));
        }
        let modules = self.modules.iter().map(String::as_str);
        let modules = modules.chain(
            self.plain
                .iter()
                .filter_map(|it| it.strip_suffix(".weight")),
        );
        for target in targets.unmatched(modules) {
            found.push((
                target.to_owned(),
                "is a target, but no layer is it".to_owned(),
            ));
        }
        for (name, what) in found {
            self.problem(&name, what);
        }
    }
}

/// Checks that depend on the architecture.
impl Checkpoint {
    /// Compares the tensors with config.json, if the architecture is known.
    fn check_model(&mut self) {
        if !self.is_known() {
            return;
        }
        let mut json = self.json.as_object().cloned().unwrap_or_default();
        json.remove("quantization_config");
        let config = match DecoderConfig::from_json(&json) {
            Ok(config) => config,
            Err(error) => return self.problem(CONFIG_FILE, format!("{error:#}")),
        };
        let shape = |module: &String| self.layers.get(module).map(|layer| [layer.n, layer.k]);
        let modules = self.modules.iter();
        let packed = modules.map(|module| (canonical(module), shape(module)));
        let packed: BTreeMap<String, Option<[usize; 2]>> = packed.collect();
        let plain = self.plain.iter().map(String::as_str);
        let found = differences(&config, &self.tensors, plain, &packed);
        for what in found.problems() {
            self.problem(CONFIG_FILE, what);
        }
        self.unused = found.unused;
    }

    /// Checks that every value that readers use directly is finite.
    fn check_values(&mut self) {
        let plain = self
            .plain
            .iter()
            .filter_map(|name| self.tensors.get(name).ok());
        let plain: Vec<StoredTensor<'_>> = plain.collect();
        let names = plain.iter().map(|tensor| tensor.name.to_owned());
        let found: Vec<(String, Result<()>)> = names.zip(check_each(&plain)).collect();
        for (name, result) in found {
            if let Err(error) = result {
                self.problem(&name, error.to_string());
            }
        }
    }
}

/// Returns the attention module of an FP8 scale, and 0 for keys or 1 for values.
fn kv_scale_of<'a>(dialect: Dialect, module: &'a str, leaf: &str) -> Option<(&'a str, usize)> {
    let which = ["k_scale", "v_scale"]
        .iter()
        .position(|&name| name == leaf)?;
    let attention = match dialect {
        Dialect::ModelOpt => module.strip_suffix([".k_proj", ".v_proj"][which])?,
        Dialect::CompressedTensors => module,
    };
    Some((attention, which))
}
