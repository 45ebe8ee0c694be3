//! What `config.json` and `hf_quant_config.json` say about quantization.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::exclude::Exclusion;
use super::{Dialect, Scheme};

/// Version of modelopt whose files are written. Consumers look for the producer's name.
const MODELOPT_VERSION: &str = "0.47.0";

/// How a checkpoint is quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantConfig {
    /// Whose conventions it follows.
    pub dialect: Dialect,
    /// What is quantized.
    pub scheme: Scheme,
    /// Whether keys and values are cached in FP8 under scales of the file.
    pub kv_cache_fp8: bool,
    /// Whether layers may multiply their input by a scale for each feature: ModelOpt's `NVFP4_AWQ`,
    /// which is a W4A4 scheme.
    pub pre_quant: bool,
    /// The modules that are not quantized, as written: names, and patterns of the dialect.
    pub exclude: Vec<String>,
}

impl QuantConfig {
    /// What `config` (config.json) and `hf_quant_config` (hf_quant_config.json, if there) say;
    /// `None` where neither speaks of quantization.
    ///
    /// # Errors
    /// For other formats than NVFP4 in groups of 16, fields that are missing or of the wrong kind,
    /// and files that contradict each other.
    pub fn read(config: &Value, hf_quant_config: Option<&Value>) -> Result<Option<Self>> {
        let inline = match config.get("quantization_config") {
            None | Some(Value::Null) => None,
            Some(inline) => Some(read_inline(inline).context("quantization_config")?),
        };
        let file = hf_quant_config.map(read_hf_quant_config).transpose()?;
        if let (Some(inline), Some(file)) = (&inline, &file) {
            let set = |config: &Self| config.exclude.iter().cloned().collect::<BTreeSet<_>>();
            let scheme = |config: &Self| (config.dialect, config.scheme, config.pre_quant);
            let same = scheme(inline) == scheme(file)
                && inline.kv_cache_fp8 == file.kv_cache_fp8
                && set(inline) == set(file);
            ensure!(
                same,
                "config.json says {inline:?}, but hf_quant_config.json {file:?}: vLLM reads the \
                 one, TensorRT-LLM the other"
            );
        }
        Ok(file.or(inline))
    }

    /// The exclusions with the matching rules of the dialect.
    ///
    /// # Errors
    /// For a regular expression that cannot be read.
    pub fn exclusions(&self) -> Result<Vec<Exclusion>> {
        let read = |text: &String| Exclusion::new(self.dialect, text);
        self.exclude.iter().map(read).collect()
    }

    /// The value of `quantization_config` in config.json.
    pub fn inline(&self) -> Value {
        match self.dialect {
            Dialect::ModelOpt => self.modelopt_inline(),
            Dialect::CompressedTensors => self.compressed_tensors_inline(),
        }
    }

    /// The content of hf_quant_config.json, which only ModelOpt has.
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
        let mut group = json!({"targets": ["Linear"], "weights": args});
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
        // Unknown keys inside the arguments are refused by pydantic: nothing may be added here.
        let args = |dynamic: Value| {
            json!({
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                "symmetric": true, "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
            })
        };
        let mut group = json!({"targets": ["Linear"], "weights": args(json!(false))});
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

/// The names in the list `key`.
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

/// The text of the field `key`.
fn text<'a>(object: &'a Value, key: &str) -> Result<&'a str> {
    let value = object
        .get(key)
        .with_context(|| format!("{key} is missing"))?;
    let text = value.as_str();
    text.with_context(|| format!("{key} is {value}, but it must be text"))
}

/// Fails unless field `key` of the quantization arguments `args` is `expected`.
fn expect(args: &Value, key: &str, expected: &Value) -> Result<()> {
    let found = args.get(key).unwrap_or(&Value::Null);
    ensure!(
        found == expected,
        "{key} is {found}, but NVFP4 has {expected}"
    );
    Ok(())
}

fn read_hf_quant_config(file: &Value) -> Result<QuantConfig> {
    let read = || -> Result<QuantConfig> {
        let quantization = file
            .get("quantization")
            .context("quantization is missing")?;
        let (scheme, pre_quant) = read_quant_algo(text(quantization, "quant_algo")?)?;
        expect(quantization, "group_size", &json!(16))?;
        // vLLM refuses files without it, even where nothing is cached in FP8.
        let kv_cache = quantization
            .get("kv_cache_quant_algo")
            .context("kv_cache_quant_algo is missing: it must be there, null if unused")?;
        let kv_cache_fp8 = match kv_cache {
            Value::Null => false,
            Value::String(name) if name == "FP8" => true,
            other => bail!("kv_cache_quant_algo is {other}, but it may be null or \"FP8\""),
        };
        Ok(QuantConfig {
            dialect: Dialect::ModelOpt,
            scheme,
            kv_cache_fp8,
            pre_quant,
            exclude: strings(quantization, "exclude_modules")?,
        })
    };
    read().context("hf_quant_config.json")
}

/// The scheme, and whether layers may have a `pre_quant_scale`.
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
    let (weights_only, format) = read_groups(inline)?;
    let (scheme, pre_quant) = match dialect {
        Dialect::ModelOpt => match read_quant_algo(text(inline, "quant_algo")?)? {
            (_, true) if weights_only == Some(true) => {
                bail!("quant_algo is NVFP4_AWQ, but config_groups have no input_activations")
            }
            // As vLLM reads it: NVFP4 whose groups have no input_activations is weight-only.
            (Scheme::W4a4, _) if weights_only == Some(true) => (Scheme::W4a16, false),
            (Scheme::W4a16, _) if weights_only == Some(false) => {
                bail!("quant_algo is W4A16_NVFP4, but a group has input_activations")
            }
            scheme => scheme,
        },
        Dialect::CompressedTensors => {
            let format = match format {
                Some(format) => format,
                None => text(inline, "format")?.to_owned(),
            };
            ensure!(
                format == "nvfp4-pack-quantized",
                "format is {format:?}, but it must be nvfp4-pack-quantized"
            );
            let status = inline.get("quantization_status").and_then(Value::as_str);
            ensure!(
                status.is_none_or(|status| status == "compressed"),
                "quantization_status is {}, but it must be compressed",
                status.unwrap_or_default()
            );
            match weights_only.context("config_groups is missing")? {
                true => (Scheme::W4a16, false),
                false => (Scheme::W4a4, false),
            }
        }
    };
    Ok(QuantConfig {
        dialect,
        scheme,
        kv_cache_fp8: read_kv_cache(inline)?,
        pre_quant,
        exclude: strings(inline, "ignore")?,
    })
}

/// Whether no group quantizes activations, if there are groups, and the format that they name.
fn read_groups(inline: &Value) -> Result<(Option<bool>, Option<String>)> {
    let groups: &Map<String, Value> = match inline.get("config_groups") {
        None | Some(Value::Null) => return Ok((None, None)),
        Some(groups) => groups
            .as_object()
            .with_context(|| format!("config_groups is {groups}, but it must be an object"))?,
    };
    let mut schemes = BTreeSet::new();
    let mut formats = BTreeSet::new();
    for (name, group) in groups {
        let read = || -> Result<bool> {
            let weights = group.get("weights").context("weights is missing")?;
            let inputs = group.get("input_activations").unwrap_or(&Value::Null);
            for (args, which) in [(weights, "weights"), (inputs, "input_activations")] {
                if which == "input_activations" && args.is_null() {
                    continue;
                }
                let check = |key: &str, value: Value| {
                    expect(args, key, &value).with_context(|| which.to_owned())
                };
                check("num_bits", json!(4))?;
                check("type", json!("float"))?;
                check("group_size", json!(16))?;
            }
            Ok(inputs.is_null())
        };
        schemes.insert(read().with_context(|| format!("config_groups.{name}"))?);
        if let Some(format) = group.get("format").and_then(Value::as_str) {
            formats.insert(format.to_owned());
        }
    }
    ensure!(
        schemes.len() == 1 && formats.len() <= 1,
        "config_groups has {} groups of different schemes, but one scheme is supported",
        groups.len()
    );
    Ok((schemes.pop_first(), formats.pop_first()))
}

fn read_kv_cache(inline: &Value) -> Result<bool> {
    let scheme = match inline.get("kv_cache_scheme") {
        None | Some(Value::Null) => return Ok(false),
        Some(scheme) => scheme,
    };
    let check = || -> Result<()> {
        expect(scheme, "num_bits", &json!(8))?;
        expect(scheme, "type", &json!("float"))?;
        expect(scheme, "dynamic", &json!(false))
    };
    check().context("kv_cache_scheme, of which FP8 with static scales is supported")?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every() -> Vec<QuantConfig> {
        let mut all = Vec::new();
        for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
            for scheme in [Scheme::W4a16, Scheme::W4a4] {
                for kv_cache_fp8 in [false, true] {
                    let exclude = vec!["lm_head".into(), "model.layers.0.mlp.gate".into()];
                    all.push(QuantConfig {
                        dialect,
                        scheme,
                        kv_cache_fp8,
                        pre_quant: false,
                        exclude,
                    });
                }
            }
        }
        let of_awq = |config: &QuantConfig| {
            config.dialect == Dialect::ModelOpt && config.scheme == Scheme::W4a4
        };
        let awq: Vec<_> = all
            .iter()
            .filter(|config| of_awq(config))
            .cloned()
            .collect();
        all.extend(awq.into_iter().map(|config| QuantConfig {
            pre_quant: true,
            ..config
        }));
        all
    }

    #[test]
    fn what_is_written_reads_back() {
        for config in every() {
            let json = json!({"quantization_config": config.inline()});
            let file = config.hf_quant_config();
            let read = |file| QuantConfig::read(&json, file).unwrap().unwrap();
            assert_eq!(read(None), config);
            assert_eq!(read(file.as_ref()), config);
            assert_eq!(file.is_some(), config.dialect == Dialect::ModelOpt);
            if let Some(file) = file {
                let alone = QuantConfig::read(&json!({}), Some(&file)).unwrap();
                assert_eq!(alone, Some(config));
                let quantization = file["quantization"].as_object().unwrap();
                assert!(quantization.contains_key("kv_cache_quant_algo"));
            }
        }
        assert_eq!(QuantConfig::read(&json!({}), None).unwrap(), None);
    }

    /// Changes one field of a written configuration, and reads it.
    fn refusal(dialect: Dialect, pointer: &str, value: Value) -> String {
        let mut all = every().into_iter();
        let config = all.find(|config| config.dialect == dialect && config.scheme == Scheme::W4a4);
        let config = config.unwrap();
        let mut inline = json!({"quantization_config": config.inline()});
        let mut file = config.hf_quant_config();
        let target = match pointer.strip_prefix("file:") {
            Some(pointer) => file.as_mut().unwrap().pointer_mut(pointer),
            None => inline.pointer_mut(&format!("/quantization_config{pointer}")),
        };
        *target.unwrap() = value;
        format!(
            "{:#}",
            QuantConfig::read(&inline, file.as_ref()).unwrap_err()
        )
    }

    #[test]
    fn other_formats_and_contradictions_are_refused_by_field() {
        use Dialect::{CompressedTensors as Ct, ModelOpt as Mo};
        for (dialect, pointer, value, says) in [
            (Mo, "/quant_method", json!("awq"), "quant_method"),
            (Mo, "/quant_algo", json!("NVFP4_AWQ"), "pre_quant: true"),
            (Mo, "/quant_algo", json!("W4A8_AWQ"), "NVFP4_AWQ"),
            (Mo, "/quant_algo", json!(4), "quant_algo is 4"),
            (Mo, "/ignore", json!("lm_head"), "ignore"),
            (Mo, "/ignore", json!(["other"]), "hf_quant_config.json"),
            (Mo, "file:/quantization/group_size", json!(32), "group_size"),
            (
                Mo,
                "file:/quantization/exclude_modules",
                json!([1]),
                "names",
            ),
            (Mo, "file:/quantization", json!({}), "quant_algo is missing"),
            (Ct, "/format", json!("pack-quantized"), "format"),
            (Ct, "/quantization_status", json!("frozen"), "frozen"),
            (
                Ct,
                "/config_groups/group_0/weights/num_bits",
                json!(8),
                "config_groups.group_0: weights: num_bits is 8",
            ),
            (Ct, "/config_groups", json!([]), "config_groups"),
            (Ct, "/config_groups", json!({}), "config_groups"),
        ] {
            let error = refusal(dialect, pointer, value);
            assert!(error.contains(says), "{pointer}: {error}");
        }
    }
}
