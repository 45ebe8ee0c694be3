//! Reads and writes the quantization settings in `config.json` and `hf_quant_config.json`.
//!
//! A field is supported, known not to affect the computation of a layer, or refused by name. A
//! neutral value (null, false, empty) is accepted for every field.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::exclude::{Exclusion, LINEAR, exclusions};
use super::format::{Fp8Format, Group, LayerFormat, Targets};
use super::{Dialect, Scheme};
use crate::hf::config::is_mxfp4;
use crate::hf::fp8::is_fp8;
use crate::hf::is_neutral;

mod fields;
mod groups;

use fields::{NVFP4_NAMES, expect, expect_if_given, refuse_unknown, strings_if_given, text};
use groups::{
    by_format, check_layers, format_of, groups_json, layers_json, read_groups, read_layers,
};

/// modelopt version of the written files. Consumers check the producer's name.
const MODELOPT_VERSION: &str = "0.47.0";

/// Quantization of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantConfig {
    /// Dialect.
    pub dialect: Dialect,
    /// Formats of the quantized layers, and the layers of each.
    pub groups: Vec<Group>,
    /// True if keys and values are cached in FP8, with scales from the file.
    pub kv_cache_fp8: bool,
    /// True if layers may multiply their input by a scale per feature: ModelOpt's `NVFP4_AWQ`, a
    /// W4A4 scheme.
    pub pre_quant: bool,
    /// Modules that are not quantized, as written: names, and patterns of the dialect.
    pub exclude: Vec<String>,
}

/// ModelOpt's algorithm name of files with several formats.
const MIXED: &str = "MIXED_PRECISION";

impl QuantConfig {
    /// Reads `config` (config.json) and `hf_quant_config` (hf_quant_config.json, if present);
    /// returns `None` if neither describes a quantization, or if weights are in FP8 with scales of
    /// blocks.
    ///
    /// # Errors
    /// Returns an error for formats other than NVFP4 in groups of 16 and FP8, for missing or mistyped
    /// fields, and for files that contradict each other.
    pub fn read(config: &Value, hf_quant_config: Option<&Value>) -> Result<Option<Self>> {
        let inline = match config.get("quantization_config") {
            None | Some(Value::Null) => None,
            // Not NVFP4: a form of high precision.
            Some(_) if config.as_object().is_some_and(is_fp8) => {
                ensure!(
                    hf_quant_config.is_none(),
                    "config.json says that weights are in FP8, but hf_quant_config.json is there"
                );
                None
            }
            Some(inline) if is_mxfp4(config.get("model_type"), inline)? => None,
            Some(inline) => Some(read_inline(inline).context("quantization_config")?),
        };
        let mut file = hf_quant_config.map(read_hf_quant_config).transpose()?;
        if let (Some(inline), Some(file)) = (&inline, &mut file) {
            let differences = differences(inline, file);
            ensure!(
                differences.is_empty(),
                "config.json, which vLLM reads, and hf_quant_config.json, which TensorRT-LLM reads, \
                 differ in: {}",
                differences.join("; ")
            );
            // hf_quant_config.json has no targets, except the layers of a mixed one.
            file.groups.clone_from(&inline.groups);
        }
        Ok(file.or(inline))
    }

    /// Returns the configuration of a folder in `dialect` whose quantized layers have these names
    /// and `formats`, and whose other linear layers are `unquantized`.
    pub fn of_layers<'a>(
        dialect: Dialect,
        formats: impl IntoIterator<Item = (String, LayerFormat)>,
        unquantized: impl IntoIterator<Item = &'a str>,
        kv_cache_fp8: bool,
    ) -> Self {
        let mut groups = by_format(&formats.into_iter().collect());
        if let [group] = &mut groups[..] {
            *group = Group::linear(group.format);
        }
        Self {
            dialect,
            kv_cache_fp8,
            pre_quant: false,
            exclude: match (dialect, groups.len()) {
                // A mixed file of ModelOpt lists the layers that are quantized.
                (Dialect::ModelOpt, 2..) => vec![],
                _ => exclusions(unquantized, dialect),
            },
            groups,
        }
    }

    /// Returns the exclusions with the matching rules of the dialect.
    ///
    /// # Errors
    /// Returns an error for an invalid regular expression.
    pub fn exclusions(&self) -> Result<Vec<Exclusion>> {
        let read = |text: &String| Exclusion::new(self.dialect, text);
        self.exclude.iter().map(read).collect()
    }

    /// Returns the targets of all groups with the matching rules of the dialect.
    ///
    /// # Errors
    /// Returns the errors of [`Targets::new`].
    pub fn targets(&self) -> Result<Targets> {
        Targets::new(self.dialect, &self.groups)
    }

    /// Returns the scheme of the layers in NVFP4: W4A4 if it is that of any of them, `None` if no
    /// layer is in NVFP4.
    pub fn scheme(&self) -> Option<Scheme> {
        let schemes = self.groups.iter().filter_map(|group| match group.format {
            LayerFormat::Nvfp4(scheme) => Some(scheme),
            LayerFormat::Fp8(_) => None,
        });
        schemes.max()
    }

    /// Describes the formats of the layers: `w4a4` if all are in NVFP4.
    pub fn formats(&self) -> String {
        if let [group] = &self.groups[..]
            && let LayerFormat::Nvfp4(scheme) = group.format
        {
            return scheme.name().into();
        }
        let formats: Vec<String> = self.groups.iter().map(|it| it.format.to_string()).collect();
        formats.join("; ")
    }

    /// Returns the value of `quantization_config` in config.json.
    pub fn inline(&self) -> Value {
        match self.dialect {
            Dialect::ModelOpt => self.modelopt_inline(),
            Dialect::CompressedTensors => self.compressed_tensors_inline(),
        }
    }

    /// Returns the contents of hf_quant_config.json, which only ModelOpt has.
    pub fn hf_quant_config(&self) -> Option<Value> {
        (self.dialect == Dialect::ModelOpt).then(|| {
            let mut quantization = json!({
                "quant_algo": self.quant_algo(),
                "kv_cache_quant_algo": self.kv_cache_fp8.then_some("FP8"),
            });
            if self.is_mixed() {
                quantization["quantized_layers"] = layers_json(&self.groups);
            }
            if !self.is_mixed() || !self.exclude.is_empty() {
                quantization["exclude_modules"] = json!(self.exclude);
            }
            if !self.is_mixed() && self.scheme().is_some() {
                quantization["group_size"] = json!(16);
            }
            if self.pre_quant {
                quantization["has_zero_point"] = json!(false);
                quantization["pre_quant_scale"] = json!(true);
            }
            json!({
                "producer": {"name": "modelopt", "version": MODELOPT_VERSION},
                "quantization": quantization,
            })
        })
    }

    /// Returns true if layers have several formats. ModelOpt then lists each layer.
    fn is_mixed(&self) -> bool {
        self.groups.len() > 1
    }

    fn quant_algo(&self) -> &'static str {
        match (&self.groups[..], self.pre_quant) {
            (_, true) => "NVFP4_AWQ",
            ([group], false) => match group.format {
                LayerFormat::Nvfp4(scheme) => NVFP4_NAMES[scheme as usize],
                LayerFormat::Fp8(fp8) => fp8.modelopt_algo(),
            },
            (_, false) => MIXED,
        }
    }

    fn modelopt_inline(&self) -> Value {
        let mut config = json!({
            "quant_method": "modelopt",
            "quant_algo": self.quant_algo(),
            "producer": {"name": "modelopt", "version": MODELOPT_VERSION},
            "config_groups": groups_json(&self.groups, self.dialect),
            "ignore": self.exclude,
        });
        if self.is_mixed() {
            config["quantized_layers"] = layers_json(&self.groups);
        }
        if self.kv_cache_fp8 {
            config["kv_cache_scheme"] = json!({"dynamic": false, "num_bits": 8, "type": "float"});
        }
        config
    }

    fn compressed_tensors_inline(&self) -> Value {
        let mut config = json!({
            "quant_method": "compressed-tensors",
            "format": format_of(&self.groups),
            "quantization_status": "compressed",
            "ignore": self.exclude,
            "config_groups": groups_json(&self.groups, self.dialect),
        });
        if self.kv_cache_fp8 {
            config["kv_cache_scheme"] = json!({
                "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true,
                "dynamic": false,
            });
        }
        config
    }
}

fn read_hf_quant_config(file: &Value) -> Result<QuantConfig> {
    let read = || -> Result<QuantConfig> {
        refuse_unknown(file, &["quantization"])?;
        let quantization = file
            .get("quantization")
            .context("quantization is missing")?;
        let known = [
            "quant_algo",
            "kv_cache_quant_algo",
            "group_size",
            "exclude_modules",
            "pre_quant_scale",
            "quantized_layers",
        ];
        refuse_unknown(quantization, &known).context("quantization")?;
        let algo = read_quant_algo(text(quantization, "quant_algo")?)?;
        check_pre_quant(quantization, algo == Algo::Awq)?;
        let groups = match algo {
            Algo::Mixed => by_format(&read_layers(quantization)?),
            Algo::Fp8(fp8) => vec![Group::linear(LayerFormat::Fp8(fp8))],
            Algo::Awq => vec![Group::linear(LayerFormat::Nvfp4(Scheme::W4a4))],
            Algo::Nvfp4(scheme) => vec![Group::linear(LayerFormat::Nvfp4(scheme))],
        };
        match algo {
            Algo::Awq | Algo::Nvfp4(_) => expect(quantization, "group_size", &json!(16))?,
            Algo::Mixed | Algo::Fp8(_) => {
                expect_if_given(quantization, "group_size", &[json!(16)])?
            }
        }
        check_unlisted(quantization, algo)?;
        // vLLM refuses files without this field, even if the cache is not FP8.
        ensure!(
            quantization.get("kv_cache_quant_algo").is_some(),
            "kv_cache_quant_algo is missing: it must be there, null if unused"
        );
        Ok(QuantConfig {
            dialect: Dialect::ModelOpt,
            groups,
            kv_cache_fp8: read_kv_cache_algo(quantization)?.unwrap_or(false),
            pre_quant: algo == Algo::Awq,
            exclude: strings_if_given(quantization, "exclude_modules")?,
        })
    };
    read().context("hf_quant_config.json")
}

/// Returns an error if layers are listed, but `algo` is not of a mixed file.
fn check_unlisted(object: &Value, algo: Algo) -> Result<()> {
    let layers = object.get("quantized_layers").unwrap_or(&Value::Null);
    ensure!(
        algo == Algo::Mixed || is_neutral("quantized_layers", layers),
        "quantized_layers is {layers}, but quant_algo is not {MIXED}"
    );
    Ok(())
}

/// Returns true if `kv_cache_quant_algo` is FP8, false if it is null, and `None` if it is absent.
fn read_kv_cache_algo(object: &Value) -> Result<Option<bool>> {
    match object.get("kv_cache_quant_algo") {
        None => Ok(None),
        Some(Value::Null) => Ok(Some(false)),
        Some(Value::String(name)) if name == "FP8" => Ok(Some(true)),
        Some(other) => bail!("kv_cache_quant_algo is {other}, but it may be null or \"FP8\""),
    }
}

/// Returns an error if `pre_quant_scale` is given and contradicts the algorithm.
fn check_pre_quant(object: &Value, pre_quant: bool) -> Result<()> {
    expect_if_given(object, "pre_quant_scale", &[json!(pre_quant)])
}

/// Describes the differences of `inline`, from config.json, and `file`, from hf_quant_config.json.
fn differences(inline: &QuantConfig, file: &QuantConfig) -> Vec<String> {
    let texts = |config: &QuantConfig| {
        let exclude: BTreeSet<&str> = config.exclude.iter().map(String::as_str).collect();
        let exclude: Vec<&str> = exclude.into_iter().collect();
        let yes = |is_so: bool| if is_so { "yes" } else { "no" }.to_owned();
        [
            ("dialect", config.dialect.name().to_owned()),
            ("formats", config.formats()),
            ("FP8 cache", yes(config.kv_cache_fp8)),
            ("scale of input features", yes(config.pre_quant)),
            ("excluded modules", exclude.join(", ")),
        ]
    };
    let pairs = texts(inline).into_iter().zip(texts(file));
    let mut found: Vec<String> = pairs
        .filter(|(own, other)| own != other)
        .map(|((what, own), (_, other))| format!("{what}: `{own}` and `{other}`"))
        .collect();
    // Only a mixed file lists layers.
    let lists = file.groups.iter().any(|group| group.targets != [LINEAR]);
    if found.is_empty() && lists && layers(inline) != layers(file) {
        found.push(format!(
            "layers of each format: {}",
            layer_difference(inline, file)
        ));
    }
    found
}

/// Returns the format of each target.
fn layers(config: &QuantConfig) -> BTreeMap<&str, LayerFormat> {
    let groups = config.groups.iter();
    let targets = groups.flat_map(|group| {
        let targets = group.targets.iter();
        targets.map(|target| (&**target, group.format))
    });
    targets.collect()
}

/// Describes the first layer whose format differs.
fn layer_difference(inline: &QuantConfig, file: &QuantConfig) -> String {
    let [inline, file] = [inline, file].map(layers);
    let names: BTreeSet<&str> = inline.keys().chain(file.keys()).copied().collect();
    let first = names
        .into_iter()
        .find(|name| inline.get(name) != file.get(name));
    let name = first.unwrap_or_default();
    let text = |of: &BTreeMap<&str, LayerFormat>| {
        of.get(name)
            .map_or("not quantized".into(), LayerFormat::to_string)
    };
    format!("{name} is `{}` and `{}`", text(&inline), text(&file))
}

/// ModelOpt's algorithms.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Algo {
    Nvfp4(Scheme),
    /// NVFP4 W4A4, where layers may have a `pre_quant_scale`.
    Awq,
    Fp8(Fp8Format),
    /// Each layer has its own.
    Mixed,
}

fn read_quant_algo(name: &str) -> Result<Algo> {
    Ok(match name {
        "NVFP4" => Algo::Nvfp4(Scheme::W4a4),
        "W4A16_NVFP4" => Algo::Nvfp4(Scheme::W4a16),
        "NVFP4_AWQ" => Algo::Awq,
        MIXED => Algo::Mixed,
        name => Algo::Fp8(Fp8Format::of_modelopt(name).with_context(|| {
            format!(
                "quant_algo is {name:?}, but it may be NVFP4, NVFP4_AWQ, W4A16_NVFP4, FP8, \
                 FP8_PER_CHANNEL_PER_TOKEN, fp8_pb_wo or {MIXED}"
            )
        })?),
    })
}

fn read_inline(inline: &Value) -> Result<QuantConfig> {
    let dialect = match text(inline, "quant_method")? {
        "modelopt" | "modelopt_fp4" => Dialect::ModelOpt,
        "compressed-tensors" => Dialect::CompressedTensors,
        other => bail!("quant_method is {other:?}, but it may be modelopt or compressed-tensors"),
    };
    let known: &[&str] = match dialect {
        Dialect::ModelOpt => &[
            "quant_algo",
            "config_groups",
            "ignore",
            "kv_cache_scheme",
            "kv_cache_quant_algo",
            "group_size",
            "pre_quant_scale",
            "quantized_layers",
        ],
        Dialect::CompressedTensors => &[
            "config_groups",
            "ignore",
            "kv_cache_scheme",
            "sparsity_config",
            "transform_config",
        ],
    };
    refuse_transforms(inline)?;
    refuse_unknown(inline, known)?;
    let groups = read_groups(inline, dialect)?;
    let (groups, pre_quant) = match dialect {
        Dialect::ModelOpt => {
            let algo = read_quant_algo(text(inline, "quant_algo")?)?;
            check_unlisted(inline, algo)?;
            (modelopt_groups(inline, algo, groups)?, algo == Algo::Awq)
        }
        Dialect::CompressedTensors => {
            expect_if_given(inline, "quantization_status", &[json!("compressed")])?;
            (groups.context("config_groups is missing")?, false)
        }
    };
    check_pre_quant(inline, pre_quant)?;
    expect_if_given(inline, "group_size", &[json!(16)])?;
    let kv_cache_fp8 = read_kv_cache(inline)?;
    ensure!(
        read_kv_cache_algo(inline)?.is_none_or(|algo| algo == kv_cache_fp8),
        "kv_cache_quant_algo and kv_cache_scheme do not say the same"
    );
    let config = QuantConfig {
        dialect,
        groups,
        kv_cache_fp8,
        pre_quant,
        exclude: strings_if_given(inline, "ignore")?,
    };
    // Two groups of all linear layers contradict each other.
    if config.is_mixed() {
        config.targets().context("config_groups")?;
    }
    Ok(config)
}

/// Returns the groups of ModelOpt's algorithm `algo`; `groups` are those of config_groups.
fn modelopt_groups(inline: &Value, algo: Algo, groups: Option<Vec<Group>>) -> Result<Vec<Group>> {
    let expected = match algo {
        Algo::Mixed => {
            let layers = read_layers(inline)?;
            if let Some(groups) = groups {
                check_layers(&groups, &layers)?;
            }
            return Ok(by_format(&layers));
        }
        Algo::Nvfp4(scheme) => LayerFormat::Nvfp4(scheme),
        Algo::Awq => LayerFormat::Nvfp4(Scheme::W4a4),
        Algo::Fp8(fp8) => LayerFormat::Fp8(fp8),
    };
    let Some(groups) = groups else {
        return Ok(vec![Group::linear(expected)]);
    };
    let [group] = &groups[..] else {
        bail!(
            "config_groups has {} groups of different formats, but quant_algo is not {MIXED}",
            groups.len()
        );
    };
    match (algo, group.format) {
        (_, found) if found == expected => {}
        // Same interpretation as vLLM: NVFP4 whose groups lack input_activations is weight-only.
        (Algo::Nvfp4(Scheme::W4a4), LayerFormat::Nvfp4(Scheme::W4a16)) => {}
        (Algo::Awq, LayerFormat::Nvfp4(Scheme::W4a16)) => {
            bail!("quant_algo is NVFP4_AWQ, but config_groups have no input_activations")
        }
        (Algo::Nvfp4(Scheme::W4a16), LayerFormat::Nvfp4(Scheme::W4a4)) => {
            bail!("quant_algo is W4A16_NVFP4, but a group has input_activations")
        }
        (_, found) => bail!("quant_algo says {expected}, but config_groups say {found}"),
    }
    Ok(groups)
}

/// Returns an error for rotations applied at run time, and for sparse weights.
fn refuse_transforms(inline: &Value) -> Result<()> {
    let is_set = |value: &&Value| !is_neutral("", value);
    let groups = |config: &Value| config.get("config_groups").filter(is_set).cloned();
    if let Some(config) = inline.get("transform_config").filter(is_set) {
        let others = config.as_object().into_iter().flatten();
        let others = others.filter(|(name, value)| *name != "config_groups" && is_set(value));
        let mut names: Vec<String> = others
            .map(|(name, value)| format!("{name} is {value}"))
            .collect();
        let groups = groups(config);
        for (name, group) in groups.iter().filter_map(Value::as_object).flatten() {
            let kind = group["type"].as_str().unwrap_or("unknown");
            let apply = group["apply"].as_array().into_iter().flatten();
            let places: Vec<String> = apply
                .map(|place| format!("{} of {}", place["location"], place["targets"]))
                .collect();
            names.push(format!("{name} ({kind}): {}", places.join(", ")));
        }
        ensure!(
            names.is_empty() && config.is_object(),
            "transform_config has transforms that are applied as the model runs, which is not \
             supported: {}",
            match names.is_empty() {
                true => config.to_string(),
                false => names.join("; "),
            }
        );
    }
    if let Some(config) = inline.get("sparsity_config").filter(is_set) {
        let is_dense = config["format"] == "dense";
        ensure!(
            is_dense,
            "sparsity_config is {config}, but sparse weights are not supported"
        );
    }
    Ok(())
}

fn read_kv_cache(inline: &Value) -> Result<bool> {
    let scheme = match inline.get("kv_cache_scheme") {
        None | Some(Value::Null) => return Ok(false),
        Some(scheme) => scheme,
    };
    let check = || -> Result<()> {
        let known = [
            "num_bits",
            "type",
            "dynamic",
            "strategy",
            "symmetric",
            "scale_dtype",
            "zp_dtype",
        ];
        refuse_unknown(scheme, &known)?;
        expect(scheme, "num_bits", &json!(8))?;
        expect(scheme, "type", &json!("float"))?;
        expect(scheme, "dynamic", &json!(false))?;
        expect_if_given(scheme, "strategy", &[json!("tensor")])?;
        expect_if_given(scheme, "symmetric", &[json!(true)])
    };
    check().context("kv_cache_scheme, of which FP8 with static scales is supported")?;
    Ok(true)
}

#[cfg(test)]
mod tests;
