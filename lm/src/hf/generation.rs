//! `generation_config.json`: recommended sampling parameters of a model.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};

use super::config::{CONFIG_FILE, DecoderConfig};
use super::fields::{Fields, is_neutral};
use crate::checkpoint::read_json;

/// Name of the file.
pub const GENERATION_FILE: &str = "generation_config.json";

/// Fields of transformers 4 and 5 that change no token of a text: outputs besides the tokens, caches
/// and compilation, parameters of beams and of assistant models, which other fields enable, and of
/// encoders. Neither do fields that begin with `_`, `output_` or `return_`.
const IGNORED: &[&str] = &[
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prefill_chunk_size",
    // Subtracts one number from all logits, after every other change of them.
    "renormalize_logits",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];

/// Beginnings of such fields.
const IGNORED_BEGINNINGS: [&str; 3] = ["_", "output_", "return_"];

/// Values of `cache_implementation` that keep keys and values in the model's precision.
const CACHES: [&str; 10] = [
    "dynamic",
    "dynamic_full",
    "hybrid",
    "hybrid_chunked",
    "offloaded",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "offloaded_static",
    "sliding_window",
    "static",
];

/// Fields of transformers 4 and 5 that change its choice of tokens and are not supported here, with
/// the number that is neutral, if there is one. Null, false and empty are always neutral.
const UNSUPPORTED: &[(&str, Option<f64>)] = &[
    ("assistant_early_exit", Some(0.0)),
    ("assistant_ensemble_weight", Some(0.0)),
    ("bad_words_ids", None),
    ("begin_suppress_tokens", None),
    ("constraints", None),
    ("dola_layers", None),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("exponential_decay_length_penalty", None),
    ("force_words_ids", None),
    ("forced_bos_token_id", None),
    ("forced_decoder_ids", None),
    ("forced_eos_token_id", None),
    ("guidance_scale", Some(1.0)),
    ("max_time", None),
    ("min_length", Some(0.0)),
    ("min_new_tokens", Some(0.0)),
    ("no_repeat_ngram_size", Some(0.0)),
    ("num_beam_groups", Some(1.0)),
    ("num_beams", Some(1.0)),
    ("num_return_sequences", Some(1.0)),
    ("penalty_alpha", Some(0.0)),
    ("prompt_lookup_num_tokens", Some(0.0)),
    ("remove_invalid_values", None),
    ("sequence_bias", None),
    ("speculation_type", None),
    ("stop_strings", None),
    ("suppress_tokens", None),
    ("token_healing", None),
    ("use_mtp", None),
    ("watermarking_config", None),
];

/// Unsupported fields that matter only when sampling.
const UNSUPPORTED_DRAWING: &[(&str, Option<f64>)] = &[
    ("epsilon_cutoff", Some(0.0)),
    ("eta_cutoff", Some(0.0)),
    ("min_p", Some(0.0)),
    ("top_h", Some(0.0)),
    ("typical_p", Some(1.0)),
];

/// Value of `max_length` that transformers treats as unset.
const NO_LENGTH: usize = 20;

/// Contents of `generation_config.json`. Absent fields are `None`, without defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Start-of-text token.
    pub bos: Option<u32>,
    /// End-of-text tokens.
    pub eos: Vec<u32>,
    /// Padding token.
    pub pad: Option<u32>,
    /// True to sample tokens, false to take the most probable one.
    pub sample: Option<bool>,
    /// Temperature that divides the logits.
    pub temperature: Option<f64>,
    /// Number of most probable tokens to sample from.
    pub top_k: Option<usize>,
    /// Cumulative probability of the most probable tokens to sample from.
    pub top_p: Option<f64>,
    /// Divides positive logits of tokens that already occur in the text, and multiplies negative
    /// ones.
    pub repetition_penalty: Option<f64>,
    /// Maximum number of tokens added to a prompt.
    pub max_new_tokens: Option<usize>,
    /// Maximum number of tokens of a text, including its prompt.
    pub max_length: Option<usize>,
    /// Unsupported and unknown fields that are set, with their values; those of the second list
    /// matter only when sampling.
    unsupported: [Vec<String>; 2],
}

impl GenerationConfig {
    /// Reads the file of `folder`. Without the file, reads the fields of transformers from its
    /// `config.json`, as transformers does. Tokens that are not named are taken from `config`.
    ///
    /// # Errors
    /// Returns an error if the file is not a JSON object, a field has another type or range, or a
    /// token is not in the vocabulary of `config`.
    pub fn read(folder: &Path, config: &DecoderConfig) -> Result<Self> {
        let files = [GENERATION_FILE, CONFIG_FILE];
        let file = files.into_iter().find(|file| folder.join(file).exists());
        let mut found = match file {
            Some(file) => {
                let path = folder.join(file);
                let json = read_json(&path)?;
                Self::from_json(&json, file == GENERATION_FILE)
                    .with_context(|| path.display().to_string())?
            }
            None => Self::default(),
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

    /// Checks that the file requests only supported behaviour; `drawn` is true when sampling. A
    /// field that is neither supported nor known to change no token must have a neutral value:
    /// null, false, empty or the default of transformers.
    ///
    /// # Errors
    /// Returns an error that names the fields with their values.
    pub fn check_supported(&self, drawn: bool) -> Result<()> {
        let [always, drawing] = &self.unsupported;
        let drawing = drawing.iter().filter(|_| drawn);
        let all: Vec<&str> = always.iter().chain(drawing).map(String::as_str).collect();
        ensure!(
            all.is_empty(),
            "{GENERATION_FILE} has fields that generation does not obey: {}; delete these fields to \
             go on without",
            all.join(", ")
        );
        Ok(())
    }

    /// `is_own_file` is true for [`GENERATION_FILE`], which has no fields of other kinds.
    fn from_json(json: &Map<String, Value>, is_own_file: bool) -> Result<Self> {
        let fields = Fields::new(json);
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
        // transformers writes 0 for all tokens.
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
        let mut found = Self {
            bos: fields.token("bos_token_id")?,
            eos: fields.tokens("eos_token_id")?,
            pad: fields.token("pad_token_id")?,
            sample: fields.optional_bool("do_sample")?,
            temperature,
            top_k,
            top_p,
            repetition_penalty: positive("repetition_penalty")?,
            max_new_tokens: fields.optional_positive("max_new_tokens")?,
            max_length: fields
                .optional_positive("max_length")?
                .filter(|length| *length != NO_LENGTH),
            unsupported: Default::default(),
        };
        let cache = fields.optional_string("cache_implementation")?;
        let [always, drawing] = &mut found.unsupported;
        if let Some(cache) = cache.filter(|cache| !CACHES.contains(cache)) {
            always.push(format!("`cache_implementation` (\"{cache}\")"));
        }
        for (name, value) in fields.unread() {
            let of = |list: &'static [(&'static str, Option<f64>)]| {
                let mut entries = list.iter();
                entries.find(|(field, _)| field == name)
            };
            let (list, neutral) = match (of(UNSUPPORTED), of(UNSUPPORTED_DRAWING)) {
                (Some((_, neutral)), _) => (&mut *always, *neutral),
                (_, Some((_, neutral))) => (&mut *drawing, *neutral),
                _ if is_own_file && !is_ignored(name) => (&mut *always, Some(0.0)),
                _ => continue,
            };
            let is_set = match value.as_f64() {
                Some(number) => Some(number) != neutral,
                None => !is_neutral("", value),
            };
            if is_set {
                list.push(format!("`{name}` ({value})"));
            }
        }
        Ok(found)
    }
}

/// Returns true if the field changes no token.
fn is_ignored(field: &str) -> bool {
    let mut beginnings = IGNORED_BEGINNINGS.iter();
    IGNORED.contains(&field) || beginnings.any(|beginning| field.starts_with(beginning))
}

/// Returns an error if the token `name` has an ID outside a vocabulary of `vocab` tokens.
pub(crate) fn check_token(name: &str, id: Option<u32>, vocab: usize) -> Result<()> {
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

    fn read(json: Value) -> Result<GenerationConfig> {
        let config = json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 288,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 287,
        });
        let config = DecoderConfig::from_json(config.as_object().unwrap()).unwrap();
        let folder = Scratch::new(&format!("generation-{:?}", std::thread::current().id()));
        std::fs::write(folder.join(GENERATION_FILE), json.to_string()).unwrap();
        GenerationConfig::read(&folder, &config)
    }

    /// Covers every default written out, as transformers 4 does.
    #[test]
    fn fields_that_change_no_token_are_accepted() {
        let defaults = json!({
            "max_length": 20, "max_new_tokens": null, "min_length": 0, "num_beams": 1,
            "num_beam_groups": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "min_p": null,
            "encoder_repetition_penalty": 1.0, "guidance_scale": null, "suppress_tokens": [],
            "bad_words_ids": null, "length_penalty": 1.0, "early_stopping": false,
            "forced_eos_token_id": null, "remove_invalid_values": false, "penalty_alpha": null,
            "num_return_sequences": 1, "diversity_penalty": 0.0, "num_assistant_tokens": 20,
            "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4,
            "assistant_lookbehind": 10, "target_lookbehind": 10, "generation_kwargs": {},
            "token_healing": false, "max_time": null, "stop_strings": null,
        });
        let set = json!({
            "cache_implementation": "hybrid", "_from_model_config": true, "use_cache": false,
            "transformers_version": "4.57.1", "output_attentions": true, "output_scores": true,
            "return_dict_in_generate": true, "renormalize_logits": true, "low_memory": true,
            "prefill_chunk_size": 512, "disable_compile": true, "compile_config": {"mode": "x"},
            "early_stopping": "never", "length_penalty": 0.6, "unknown": null, "other": [],
        });
        for json in [defaults, set] {
            let found = read(json).unwrap();
            found.check_supported(true).unwrap();
            assert_eq!((found.max_length, found.max_new_tokens), (None, None));
        }
        let found = read(json!({"max_length": 64, "max_new_tokens": 8})).unwrap();
        assert_eq!(
            (found.max_length, found.max_new_tokens),
            (Some(64), Some(8))
        );
    }

    #[test]
    fn other_choices_of_tokens_are_refused_by_name() {
        for (json, field, always) in [
            (json!({"num_beams": 4}), "`num_beams` (4)", true),
            (json!({"suppress_tokens": [3]}), "`suppress_tokens`", true),
            (json!({"min_new_tokens": 5}), "`min_new_tokens`", true),
            (json!({"max_time": 0}), "`max_time` (0)", true),
            (
                json!({"token_healing": true}),
                "`token_healing` (true)",
                true,
            ),
            (
                json!({"num_return_sequences": 2}),
                "`num_return_sequences`",
                true,
            ),
            (
                json!({"cache_implementation": "quantized"}),
                "`cache_implementation` (\"quantized\")",
                true,
            ),
            (
                json!({"forced_bos_token_id": 0}),
                "`forced_bos_token_id`",
                true,
            ),
            (json!({"min_p": 0.1}), "`min_p` (0.1)", false),
            (json!({"typical_p": 0.9}), "`typical_p`", false),
            // No field of transformers.
            (json!({"mirostat": 2}), "`mirostat` (2)", true),
            (json!({"logit_bias": {"3": -1}}), "`logit_bias`", true),
            (json!({"chat_format": "chatml"}), "`chat_format`", true),
        ] {
            let found = read(json).unwrap();
            let error = found.check_supported(true).unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
            assert_eq!(found.check_supported(false).is_err(), always, "{field}");
        }
    }

    /// Without the file, transformers reads the fields of config.json.
    #[test]
    fn older_folders_have_the_fields_in_their_configuration() {
        let json = json!({
            "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 288,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "eos_token_id": 2,
            "do_sample": true, "temperature": 0.5, "num_beams": 2,
        });
        let config = DecoderConfig::from_json(json.as_object().unwrap()).unwrap();
        let folder = Scratch::new("generation-older");
        std::fs::write(folder.join(CONFIG_FILE), json.to_string()).unwrap();
        let found = GenerationConfig::read(&folder, &config).unwrap();
        assert_eq!((found.sample, found.temperature), (Some(true), Some(0.5)));
        let error = found.check_supported(false).unwrap_err().to_string();
        assert!(error.contains("obey: `num_beams` (2);"), "{error}");
        std::fs::write(folder.join(GENERATION_FILE), "{}").unwrap();
        let found = GenerationConfig::read(&folder, &config).unwrap();
        assert_eq!((found.sample, &found.eos[..]), (None, &[2][..]));
        found.check_supported(true).unwrap();
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
