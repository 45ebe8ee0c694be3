//! Checks of what `tokenizer.json` and `tokenizer_config.json` say and the library does not read.

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value};

use super::super::TokenizerConfig;
use super::super::fields::is_neutral;

/// Fields of `tokenizer.json` that the library reads.
pub(super) const FILE: &[&str] = &[
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
];

/// Fields of a model that the library reads, by its type.
const BPE: &[&str] = &[
    "type",
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
    "vocab",
    "merges",
];
const UNIGRAM: &[&str] = &["type", "unk_id", "vocab", "byte_fallback"];
const WORD_PIECE: &[&str] = &[
    "type",
    "unk_token",
    "continuing_subword_prefix",
    "max_input_chars_per_word",
    "vocab",
];
const WORD_LEVEL: &[&str] = &["type", "vocab", "unk_token"];

/// Pattern by which transformers splits words if `fix_mistral_regex` is true.
const MISTRAL_WORDS: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Returns an error for fields that the library ignores although they may affect tokens, and for a
/// model with BPE dropout.
pub(super) fn refuse_unknown(json: &Map<String, Value>) -> Result<()> {
    let empty = Map::new();
    let model = json
        .get("model")
        .and_then(Value::as_object)
        .unwrap_or(&empty);
    for (fields, known, path) in [(json, FILE, ""), (model, fields_of(model), "model.")] {
        let mut unknown = fields
            .iter()
            .filter(|(name, value)| !known.contains(&name.as_str()) && !is_neutral(name, value));
        if let Some((name, _)) = unknown.next() {
            bail!("it has a field `{path}{name}`, which is not known");
        }
    }
    let dropout = model.get("dropout").unwrap_or(&Value::Null);
    ensure!(
        is_neutral("dropout", dropout),
        "`model.dropout` is {dropout}: tokens would depend on chance; set it to null"
    );
    Ok(())
}

/// Returns the fields of a model. Without a type it is the first one that the library finds: BPE
/// needs `merges`, WordPiece `max_input_chars_per_word`, and the vocabulary of Unigram is a list.
fn fields_of(model: &Map<String, Value>) -> &'static [&'static str] {
    match model.get("type").and_then(Value::as_str) {
        Some("Unigram") => UNIGRAM,
        Some("WordPiece") => WORD_PIECE,
        Some("WordLevel") => WORD_LEVEL,
        Some(_) => BPE,
        None if model.contains_key("merges") => BPE,
        None if model.contains_key("max_input_chars_per_word") => WORD_PIECE,
        None if model.get("vocab").is_some_and(Value::is_array) => UNIGRAM,
        None => WORD_LEVEL,
    }
}

/// Rules of `tokenizer.json` that `tokenizer_config.json` also states.
#[derive(Default)]
struct TextRules {
    /// True if a text gets a space before it.
    adds_space: bool,
    /// True if texts are converted to lower case.
    lowers: bool,
    /// True if letters lose their accents.
    strips_accents: bool,
    /// True if several spaces become one.
    joins_spaces: bool,
    /// True if each Chinese character is a word; only BERT's normalizer says so.
    splits_chinese: Option<bool>,
    /// True if words are split by [`MISTRAL_WORDS`].
    has_mistral_words: bool,
    /// True if the model is BPE, whose texts transformers does not clean up.
    is_bpe: bool,
}

impl TextRules {
    fn of(json: &Map<String, Value>) -> Self {
        let model = json.get("model").and_then(Value::as_object);
        let mut rules = Self {
            is_bpe: model.is_some_and(|model| fields_of(model) == BPE),
            ..Self::default()
        };
        let parts = [json.get("normalizer"), json.get("pre_tokenizer")];
        let mut parts: Vec<&Value> = parts.into_iter().flatten().collect();
        while let Some(part) = parts.pop() {
            rules.add(part);
            for list in ["normalizers", "pretokenizers"] {
                parts.extend(part[list].as_array().into_iter().flatten());
            }
        }
        rules
    }

    /// Adds the rules of a normalizer or pre-tokenizer.
    fn add(&mut self, part: &Value) {
        let regex = part["pattern"]["Regex"].as_str();
        match part["type"].as_str() {
            Some("ByteLevel") => self.adds_space |= part["add_prefix_space"] == true,
            Some("Metaspace") => {
                self.adds_space |= match part["prepend_scheme"].as_str() {
                    Some(scheme) => scheme != "never",
                    None => part["add_prefix_space"] != false,
                }
            }
            Some("Prepend") => self.adds_space = true,
            Some("Lowercase") => self.lowers = true,
            Some("StripAccents") => self.strips_accents = true,
            Some("BertNormalizer") => {
                let lowers = part["lowercase"] == true;
                self.lowers |= lowers;
                self.strips_accents |= part["strip_accents"].as_bool().unwrap_or(lowers);
                self.splits_chinese = part["handle_chinese_chars"].as_bool();
            }
            Some("Replace") => self.joins_spaces |= regex == Some(" {2,}"),
            Some("Split") => self.has_mistral_words |= regex == Some(MISTRAL_WORDS),
            _ => {}
        }
    }

    /// Returns true if texts and tokens are those of `field` of `tokenizer_config.json`.
    fn agree(&self, field: &str, value: bool, config: &TokenizerConfig) -> bool {
        match field {
            "add_prefix_space" => value == self.adds_space,
            "do_lower_case" => value == self.lowers,
            "strip_accents" => value == self.strips_accents,
            "keep_accents" => !value || !self.strips_accents,
            "remove_space" => !value || self.joins_spaces,
            "tokenize_chinese_chars" => self.splits_chinese.is_none_or(|splits| splits == value),
            "fix_mistral_regex" => !value || self.has_mistral_words,
            "clean_up_tokenization_spaces" => !value || (self.is_bpe && !config.cleans_bpe),
            _ => true,
        }
    }
}

/// Returns an error if a rule of `config` is another one in `json`.
pub(super) fn check_text_rules(json: &Map<String, Value>, config: &TokenizerConfig) -> Result<()> {
    let rules = TextRules::of(json);
    for (field, value) in &config.rules {
        ensure!(
            rules.agree(field, *value, config),
            "`{field}` of tokenizer_config.json is {value}, which is not what tokenizer.json does: \
             delete it to go on as tokenizer.json says"
        );
    }
    Ok(())
}
