//! `generation_config.json`: how a model is meant to be sampled.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::config::DecoderConfig;
use super::fields::Fields;
use crate::checkpoint::read_json;

/// The file's name.
pub const GENERATION_FILE: &str = "generation_config.json";

/// What `generation_config.json` says. What it does not say is `None`, and no value of its own is
/// put in its place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Token that starts a text.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// Token that fills batches.
    pub pad: Option<u32>,
    /// Whether tokens are drawn; the most probable one is taken otherwise.
    pub sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f64>,
    /// Only so many most probable tokens are drawn from.
    pub top_k: Option<usize>,
    /// Only the most probable tokens that have this probability together are drawn from.
    pub top_p: Option<f64>,
    /// Logits of tokens that the text has are divided by it where positive, multiplied otherwise.
    pub repetition_penalty: Option<f64>,
}

impl GenerationConfig {
    /// Reads the file of `folder`; where there is none, or it names no token, those of `config`
    /// stand in.
    ///
    /// # Errors
    /// When the file is no JSON object, or a field of another type or range, and when a token is not
    /// in the vocabulary of `config`.
    pub fn read(folder: &Path, config: &DecoderConfig) -> Result<Self> {
        let path = folder.join(GENERATION_FILE);
        let mut found = match path.exists() {
            true => Self::from_file(&path).with_context(|| path.display().to_string())?,
            false => Self::default(),
        };
        if found.eos.is_empty() {
            found.eos.clone_from(&config.eos);
        }
        found.bos = found.bos.or(config.bos);
        found.pad = found.pad.or(config.pad);
        let ids = [("bos", found.bos), ("pad", found.pad)].into_iter();
        let ids = ids.chain(found.eos.iter().map(|id| ("eos", Some(*id))));
        for (name, id) in ids {
            check_token(name, id, config.vocab)?;
        }
        Ok(found)
    }

    fn from_file(path: &Path) -> Result<Self> {
        let json = read_json(path)?;
        let fields = Fields::new(&json);
        let positive = |field: &'static str| -> Result<Option<f64>> {
            let value = fields.optional_number(field)?;
            if let Some(value) = value {
                ensure!(
                    value.is_finite() && value > 0.0,
                    "`{field}` is {value}, but must be positive"
                );
            }
            Ok(value)
        };
        // Transformers writes 0 for all tokens.
        let top_k = fields.optional_count("top_k")?.filter(|k| *k > 0);
        let top_p = positive("top_p")?;
        ensure!(
            top_p.is_none_or(|p| p <= 1.0),
            "`top_p` is {top_p:?}, but must be at most 1"
        );
        let temperature = fields.optional_number("temperature")?;
        ensure!(
            temperature.is_none_or(|t| t.is_finite() && t >= 0.0),
            "`temperature` is {temperature:?}, but must be zero or positive"
        );
        Ok(Self {
            bos: fields.token("bos_token_id")?,
            eos: fields.tokens("eos_token_id")?,
            pad: fields.token("pad_token_id")?,
            sample: fields.optional_bool("do_sample")?,
            temperature,
            top_k,
            top_p,
            repetition_penalty: positive("repetition_penalty")?,
        })
    }
}

/// Fail if the token `name` has an id that a model of `vocab` tokens does not have.
pub(super) fn check_token(name: &str, id: Option<u32>, vocab: usize) -> Result<()> {
    ensure!(
        id.is_none_or(|id| (id as usize) < vocab),
        "`{name}_token_id` is {}, but the model has {vocab} tokens",
        id.unwrap_or_default()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use nvfp4_test_support::Scratch;

    fn read(json: serde_json::Value) -> Result<GenerationConfig> {
        let config = json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 288,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 287,
        });
        let config = DecoderConfig::from_json(config.as_object().unwrap()).unwrap();
        let folder = Scratch::new("generation");
        std::fs::write(folder.join(GENERATION_FILE), json.to_string()).unwrap();
        GenerationConfig::read(&folder, &config)
    }

    #[test]
    fn fields_are_read_or_refused() {
        let found = read(json!({"top_k": 20, "eos_token_id": [0, 287], "pad_token_id": -1}));
        let found = found.unwrap();
        assert_eq!(
            (found.top_k, found.bos, found.pad),
            (Some(20), Some(287), None)
        );
        assert_eq!(found.eos, [0, 287]);
        assert_eq!(read(json!({"top_k": 0})).unwrap().top_k, None);
        for (json, expected) in [
            (json!({"top_k": 1.5}), "`top_k` is 1.5"),
            (json!({"top_k": -1}), "`top_k` is -1"),
            (json!({"eos_token_id": [2, 288]}), "`eos_token_id` is 288"),
            (json!({"pad_token_id": 288}), "`pad_token_id` is 288"),
            (json!({"bos_token_id": 300}), "but the model has 288 tokens"),
        ] {
            let error = format!("{:#}", read(json).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
