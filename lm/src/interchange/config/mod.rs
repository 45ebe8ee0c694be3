//! Reads and writes the quantization settings in `config.json` and `hf_quant_config.json`.
//!
//! A field is supported, known not to affect the computation of a layer, or refused by name. A
//! neutral value (null, false, empty) is accepted for every field.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::exclude::{Exclusion, LINEAR, Target};
use super::{Dialect, Scheme};
use crate::hf::config::is_mxfp4;
use crate::hf::fp8::is_fp8;
use crate::hf::is_neutral;

/// modelopt version of the written files. Consumers check the producer's name.
const MODELOPT_VERSION: &str = "0.47.0";

/// Quantization of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantConfig {
    /// Dialect.
    pub dialect: Dialect,
    /// Scheme.
    pub scheme: Scheme,
    /// True if keys and values are cached in FP8, with scales from the file.
    pub kv_cache_fp8: bool,
    /// True if layers may multiply their input by a scale per feature: ModelOpt's `NVFP4_AWQ`, a
    /// W4A4 scheme.
    pub pre_quant: bool,
    /// Modules that are quantized unless excluded, as written: the class `Linear`, names, and
    /// patterns of the dialect.
    pub targets: Vec<String>,
    /// Modules that are not quantized, as written: names, and patterns of the dialect.
    pub exclude: Vec<String>,
}

/// Informational fields: calibration method, version of the writer, statistics.
const HARMLESS: &[&str] = &[
    "format",
    "global_compression_ratio",
    "observer",
    "observer_kwargs",
    "producer",
    "quant_method",
    "quantization_status",
    "run_compressed",
    "version",
];

impl QuantConfig {
    /// Reads `config` (config.json) and `hf_quant_config` (hf_quant_config.json, if present);
    /// returns `None` if neither describes a quantization, or if weights are in FP8 with scales of
    /// blocks.
    ///
    /// # Errors
    /// Returns an error for formats other than NVFP4 in groups of 16, for missing or mistyped
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
            // hf_quant_config.json has no targets.
            file.targets.clone_from(&inline.targets);
        }
        Ok(file.or(inline))
    }

    /// Returns the exclusions with the matching rules of the dialect.
    ///
    /// # Errors
    /// Returns an error for an invalid regular expression.
    pub fn exclusions(&self) -> Result<Vec<Exclusion>> {
        let read = |text: &String| Exclusion::new(self.dialect, text);
        self.exclude.iter().map(read).collect()
    }

    /// Returns the targets with the matching rules of the dialect.
    ///
    /// # Errors
    /// Returns an error for an invalid regular expression.
    pub fn targets(&self) -> Result<Vec<Target>> {
        let read = |text: &String| Target::new(self.dialect, text);
        self.targets.iter().map(read).collect()
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
                "group_size": 16,
                "exclude_modules": self.exclude,
            });
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

    fn quant_algo(&self) -> &'static str {
        match (self.scheme, self.pre_quant) {
            (_, true) => "NVFP4_AWQ",
            (Scheme::W4a16, false) => "W4A16_NVFP4",
            (Scheme::W4a4, false) => "NVFP4",
        }
    }

    fn modelopt_inline(&self) -> Value {
        let args = json!({"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16});
        let mut group = json!({"targets": self.targets, "weights": args});
        if self.scheme == Scheme::W4a4 {
            group["input_activations"] = args;
        }
        let mut config = json!({
            "quant_method": "modelopt",
            "quant_algo": self.quant_algo(),
            "producer": {"name": "modelopt", "version": MODELOPT_VERSION},
            "config_groups": {"group_0": group},
            "ignore": self.exclude,
        });
        if self.kv_cache_fp8 {
            config["kv_cache_scheme"] = json!({"dynamic": false, "num_bits": 8, "type": "float"});
        }
        config
    }

    fn compressed_tensors_inline(&self) -> Value {
        // pydantic rejects unknown keys inside the arguments: nothing may be added here.
        let args = |dynamic: Value| {
            json!({
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "symmetric": true, "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
            })
        };
        let mut group = json!({"targets": self.targets, "weights": args(json!(false))});
        if self.scheme == Scheme::W4a4 {
            group["input_activations"] = args(json!("local"));
        }
        let mut config = json!({
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "ignore": self.exclude,
            "config_groups": {"group_0": group},
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

/// Returns the names in the list `key`.
fn strings(object: &Value, key: &str) -> Result<Vec<String>> {
    let list = object
        .get(key)
        .with_context(|| format!("{key} is missing"))?;
    let list = list
        .as_array()
        .with_context(|| format!("{key} is {list}, but it must be a list of names"))?;
    let name = |value: &Value| {
        let name = value.as_str().map(String::from);
        name.with_context(|| format!("{key} holds {value}, but it must hold names"))
    };
    list.iter().map(name).collect()
}

/// Returns the text of the field `key`.
fn text<'a>(object: &'a Value, key: &str) -> Result<&'a str> {
    let value = object
        .get(key)
        .with_context(|| format!("{key} is missing"))?;
    let text = value.as_str();
    text.with_context(|| format!("{key} is {value}, but it must be text"))
}

/// Returns an error unless field `key` of the quantization arguments `args` is `expected`.
fn expect(args: &Value, key: &str, expected: &Value) -> Result<()> {
    let found = args.get(key).unwrap_or(&Value::Null);
    ensure!(
        found == expected,
        "{key} is {found}, but NVFP4 has {expected}"
    );
    Ok(())
}

/// Returns an error unless field `key` of `args` is absent, null, or one of `allowed`.
fn expect_if_given(args: &Value, key: &str, allowed: &[Value]) -> Result<()> {
    let found = args.get(key).unwrap_or(&Value::Null);
    let list = || -> Vec<String> { allowed.iter().map(Value::to_string).collect() };
    ensure!(
        found.is_null() || allowed.contains(found),
        "{key} is {found}, which is not supported: it may be {} or null",
        list().join(", ")
    );
    Ok(())
}

/// Returns an error if `object` has a field that is neither `known` nor harmless and whose value is
/// not neutral.
fn refuse_unknown(object: &Value, known: &[&str]) -> Result<()> {
    let fields = object
        .as_object()
        .with_context(|| format!("it is {object}, but must be an object"))?;
    for (name, value) in fields {
        let is_known = known.contains(&name.as_str()) || HARMLESS.contains(&name.as_str());
        ensure!(
            is_known || is_neutral(name, value),
            "{name} is {value}, which may change what layers compute and is not supported"
        );
    }
    Ok(())
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
        ];
        refuse_unknown(quantization, &known).context("quantization")?;
        let (scheme, pre_quant) = read_quant_algo(text(quantization, "quant_algo")?)?;
        check_pre_quant(quantization, pre_quant)?;
        expect(quantization, "group_size", &json!(16))?;
        // vLLM refuses files without this field, even if the cache is not FP8.
        ensure!(
            quantization.get("kv_cache_quant_algo").is_some(),
            "kv_cache_quant_algo is missing: it must be there, null if unused"
        );
        Ok(QuantConfig {
            dialect: Dialect::ModelOpt,
            scheme,
            kv_cache_fp8: read_kv_cache_algo(quantization)?.unwrap_or(false),
            pre_quant,
            targets: vec![LINEAR.into()],
            exclude: strings(quantization, "exclude_modules")?,
        })
    };
    read().context("hf_quant_config.json")
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
            ("scheme", config.scheme.name().to_owned()),
            ("FP8 cache", yes(config.kv_cache_fp8)),
            ("scale of input features", yes(config.pre_quant)),
            ("excluded modules", exclude.join(", ")),
        ]
    };
    let pairs = texts(inline).into_iter().zip(texts(file));
    pairs
        .filter(|(own, other)| own != other)
        .map(|((what, own), (_, other))| format!("{what}: `{own}` and `{other}`"))
        .collect()
}

/// Returns the scheme, and whether layers may have a `pre_quant_scale`.
fn read_quant_algo(name: &str) -> Result<(Scheme, bool)> {
    match name {
        "NVFP4" => Ok((Scheme::W4a4, false)),
        "W4A16_NVFP4" => Ok((Scheme::W4a16, false)),
        "NVFP4_AWQ" => Ok((Scheme::W4a4, true)),
        other => bail!("quant_algo is {other:?}, but it may be NVFP4, NVFP4_AWQ or W4A16_NVFP4"),
    }
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
    let Groups {
        weights_only,
        format,
        targets,
    } = read_groups(inline, dialect)?;
    let (scheme, pre_quant) = match dialect {
        Dialect::ModelOpt => match read_quant_algo(text(inline, "quant_algo")?)? {
            (_, true) if weights_only == Some(true) => {
                bail!("quant_algo is NVFP4_AWQ, but config_groups have no input_activations")
            }
            // Same interpretation as vLLM: NVFP4 whose groups lack input_activations is
            // weight-only.
            (Scheme::W4a4, _) if weights_only == Some(true) => (Scheme::W4a16, false),
            (Scheme::W4a16, _) if weights_only == Some(false) => {
                bail!("quant_algo is W4A16_NVFP4, but a group has input_activations")
            }
            scheme => scheme,
        },
        Dialect::CompressedTensors => {
            let format = match format {
                Some(format) => {
                    // A file with several formats has the format name `mixed-precision`.
                    let allowed = [json!(format), json!("mixed-precision")];
                    expect_if_given(inline, "format", &allowed)?;
                    format
                }
                None => text(inline, "format")?.to_owned(),
            };
            ensure!(
                format == "nvfp4-pack-quantized",
                "format is {format:?}, but it must be nvfp4-pack-quantized"
            );
            expect_if_given(inline, "quantization_status", &[json!("compressed")])?;
            match weights_only.context("config_groups is missing")? {
                true => (Scheme::W4a16, false),
                false => (Scheme::W4a4, false),
            }
        }
    };
    check_pre_quant(inline, pre_quant)?;
    expect_if_given(inline, "group_size", &[json!(16)])?;
    let kv_cache_fp8 = read_kv_cache(inline)?;
    ensure!(
        read_kv_cache_algo(inline)?.is_none_or(|algo| algo == kv_cache_fp8),
        "kv_cache_quant_algo and kv_cache_scheme do not say the same"
    );
    Ok(QuantConfig {
        dialect,
        scheme,
        kv_cache_fp8,
        pre_quant,
        targets,
        exclude: strings(inline, "ignore")?,
    })
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

/// Combined settings of the groups.
#[derive(Default)]
struct Groups {
    /// True if no group quantizes activations; `None` if there are no groups.
    weights_only: Option<bool>,
    /// Format name.
    format: Option<String>,
    /// Targets of the groups.
    targets: Vec<String>,
}

fn read_groups(inline: &Value, dialect: Dialect) -> Result<Groups> {
    let groups: &Map<String, Value> = match inline.get("config_groups") {
        None | Some(Value::Null) => {
            return Ok(Groups {
                targets: vec![LINEAR.into()],
                ..Groups::default()
            });
        }
        Some(groups) => groups
            .as_object()
            .with_context(|| format!("config_groups is {groups}, but it must be an object"))?,
    };
    let mut found = Groups::default();
    let mut schemes = BTreeSet::new();
    let mut formats = BTreeSet::new();
    for (name, group) in groups {
        let read = || -> Result<(bool, Vec<String>)> {
            refuse_unknown(group, &["weights", "input_activations", "targets"])?;
            let weights = group.get("weights").context("weights is missing")?;
            read_args(weights, dialect, false).context("weights")?;
            let inputs = group.get("input_activations").unwrap_or(&Value::Null);
            if !inputs.is_null() {
                read_args(inputs, dialect, true).context("input_activations")?;
            }
            let targets = match group.get("targets") {
                None => vec![LINEAR.into()],
                Some(_) => strings(group, "targets")?,
            };
            Ok((inputs.is_null(), targets))
        };
        let (weights_only, targets) = read().with_context(|| format!("config_groups.{name}"))?;
        schemes.insert(weights_only);
        found.targets.extend(targets);
        if let Some(format) = group.get("format").and_then(Value::as_str) {
            formats.insert(format.to_owned());
        }
    }
    ensure!(
        schemes.len() == 1 && formats.len() <= 1,
        "config_groups has {} groups of different schemes, but one scheme is supported",
        groups.len()
    );
    found.targets.dedup();
    found.weights_only = schemes.pop_first();
    found.format = formats.pop_first();
    Ok(found)
}

/// Returns an error unless the quantization arguments `args`, of weights or of inputs, describe
/// NVFP4 with a static global scale.
fn read_args(args: &Value, dialect: Dialect, is_input: bool) -> Result<()> {
    let known = [
        "num_bits",
        "type",
        "group_size",
        "symmetric",
        "strategy",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
    ];
    refuse_unknown(args, &known)?;
    expect(args, "num_bits", &json!(4))?;
    expect(args, "type", &json!("float"))?;
    expect(args, "group_size", &json!(16))?;
    expect_if_given(args, "symmetric", &[json!(true)])?;
    expect_if_given(args, "strategy", &[json!("tensor_group")])?;
    // Block scales of inputs are computed at run time; the global scale comes from the file.
    let dynamic = match (is_input, dialect) {
        (false, _) => vec![json!(false)],
        (true, Dialect::ModelOpt) => vec![json!(false), json!("local")],
        (true, Dialect::CompressedTensors) => vec![json!("local")],
    };
    expect_if_given(args, "dynamic", &dynamic)?;
    // Other values permute the input features.
    let order = [json!(false), json!("weight"), json!("static")];
    expect_if_given(args, "actorder", &order)?;
    let scale = ["torch.float8_e4m3fn", "float8_e4m3fn"].map(Value::from);
    expect_if_given(args, "scale_dtype", &scale)
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
