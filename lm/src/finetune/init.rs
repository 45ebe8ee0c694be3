//! Writes a model folder with random weights.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

use crate::checkpoint::{read_json, write_json};
use crate::decoder::names::{SINKS, expected};
use crate::hf::config::{CONFIG_FILE, refuse_quantized};
use crate::hf::{DecoderConfig, Dtype, NewFolder, TensorWriter, copy_file};
use crate::random::normal;

/// Default standard deviation of weights if the configuration has no `initializer_range`, as in
/// transformers.
const DEVIATION: f64 = 0.02;

/// Files of a tokenizer's folder that are copied.
const TOKENIZER: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// Writes the model of the configuration file `config` to the new folder `out`, in `f32`. Norms
/// multiply by 1, biases and sinks are 0, and matrices are normal with standard deviation
/// `initializer_range` of the configuration. The weights depend only on `seed` and their names. The
/// tokenizer is copied from the folder `tokenizer`; `eos`, if given, is the only special token of
/// the model, and ends texts.
///
/// # Errors
/// Returns an error if the configuration is refused, the tokenizer's file is absent, `out` has
/// files, or a file cannot be written.
pub fn write_random(
    config: &Path,
    tokenizer: &Path,
    eos: Option<u32>,
    out: &Path,
    seed: u64,
) -> Result<()> {
    let mut json: Map<String, Value> = read_json(config)?;
    if let Some(eos) = eos {
        json.insert("eos_token_id".into(), eos.into());
        json.insert("bos_token_id".into(), Value::Null);
        json.insert("pad_token_id".into(), Value::Null);
    }
    let parsed = refuse_quantized(&json).and_then(|()| DecoderConfig::from_json(&json));
    let parsed = parsed.with_context(|| config.display().to_string())?;
    let deviation = match json.get("initializer_range") {
        None | Some(Value::Null) => DEVIATION,
        Some(value) => value
            .as_f64()
            .filter(|value| *value > 0.0)
            .with_context(|| {
                let path = config.display();
                format!("{path}: `initializer_range` is {value}, but must be a positive number")
            })?,
    };
    ensure!(
        tokenizer.join(TOKENIZER[0]).exists(),
        "tokenizer {} has no {}",
        tokenizer.display(),
        TOKENIZER[0]
    );
    let new = NewFolder::create(out)?;
    json.insert("torch_dtype".into(), "float32".into());
    json.remove("dtype");
    json.remove("quantization_config");
    write_json(&new.path().join(CONFIG_FILE), &json)?;
    for file in TOKENIZER {
        let from = tokenizer.join(file);
        if from.exists() {
            copy_file(&from, &new.path().join(file))?;
        }
    }
    let mut writer = TensorWriter::create(new.path(), TensorWriter::SHARD_BYTES)?;
    for tensor in expected(&parsed) {
        let count = tensor.shape.iter().product();
        let values = match tensor.shape.len() {
            1 if tensor.name.ends_with("bias") || tensor.name.ends_with(SINKS) => vec![0.0; count],
            1 if parsed.block.norm_plus_one => vec![0.0; count],
            1 => vec![1.0; count],
            _ => normal(seed, &tensor.name, count, deviation),
        };
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        writer.add(&tensor.name, Dtype::F32, &tensor.shape, &bytes)?;
    }
    writer.finish()?;
    new.finish()
}
