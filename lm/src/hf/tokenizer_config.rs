//! Reads the settings of `tokenizer_config.json` that affect tokens or decoded text.
//!
//! In transformers a tokenizer is `tokenizer.json` with the settings of this file. A field is
//!
//! - obeyed: tokens, `add_bos_token`, `add_eos_token`, `split_special_tokens`;
//! - refused if `tokenizer.json` does otherwise: [`RULES`], which transformers writes into the
//!   tokenizer when it loads one;
//! - refused unless its value is neutral: [`UNSUPPORTED`];
//! - accepted otherwise. transformers keeps a field that it does not know as an attribute of the
//!   tokenizer, which nothing reads. It reads others in batches (`padding_side`, `model_max_length`),
//!   in chat templates, or only where it converts a SentencePiece model, for which there is no
//!   `tokenizer.json` (`legacy`, `from_slow`, `spaces_between_special_tokens`, `errors`).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::fields::{Fields, is_neutral};
use crate::checkpoint::read_json;

/// Name of the file.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// File with the special tokens in older folders.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// File with the added tokens in older folders.
const ADDED_TOKENS: &str = "added_tokens.json";

/// Fields that each name one special token.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Fields that state rules of `tokenizer.json`.
const RULES: [&str; 8] = [
    "add_prefix_space",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "fix_mistral_regex",
    "keep_accents",
    "remove_space",
    "strip_accents",
    "tokenize_chinese_chars",
];

/// Fields that change tokens and have no counterpart in `tokenizer.json`.
const UNSUPPORTED: [&str; 8] = [
    "do_lowercase",
    "do_lowercase_and_remove_accent",
    "do_upper_case",
    "normalization",
    "sp_model_kwargs",
    "src_lang",
    "target_lang",
    "tgt_lang",
];

/// Makes transformers clean up the texts of BPE too, together with `clean_up_tokenization_spaces`.
const CLEAN_UP_BPE: &str =
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output";

/// Contents of `tokenizer_config.json`, apart from the chat template.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerConfig {
    /// True if texts get a start-of-text token, false if not; `None` if `tokenizer.json` decides.
    pub add_bos: Option<bool>,
    /// True if texts get an end-of-text token, false if not; `None` if `tokenizer.json` decides.
    pub add_eos: Option<bool>,
    /// True if special tokens within a text are split like other text.
    pub split_special: bool,
    /// Values of [`RULES`].
    pub rules: BTreeMap<&'static str, bool>,
    /// True if `clean_up_tokenization_spaces` is also for BPE.
    pub cleans_bpe: bool,
    /// Added tokens, by ID.
    pub added: BTreeMap<u32, AddedToken>,
    /// Special tokens, by the field that names them.
    named: BTreeMap<&'static str, String>,
    /// Further special tokens.
    pub extra: Vec<String>,
}

impl TokenizerConfig {
    /// Reads the file of `folder`; returns defaults if there is none.
    ///
    /// # Errors
    /// Returns an error if a file is not a JSON object, a field has another type, or one of
    /// [`UNSUPPORTED`] is set.
    pub fn read(folder: &Path) -> Result<Self> {
        let object = |file: &str| -> Result<Option<Map<String, Value>>> {
            let path = folder.join(file);
            path.exists().then(|| read_json(&path)).transpose()
        };
        let mut found = match object(TOKENIZER_CONFIG)? {
            None => Self::default(),
            Some(json) => {
                let path = || folder.join(TOKENIZER_CONFIG).display().to_string();
                Self::from_json(&json).with_context(path)?
            }
        };
        for field in NAMED {
            if !found.named.contains_key(field)
                && let Some(json) = object(SPECIAL_TOKENS_MAP)?
                && let Some(token) = content(field, json.get(field))?
            {
                found.named.insert(field, token);
            }
        }
        // transformers reads this file if the other has no list of added tokens.
        if found.added.is_empty()
            && let Some(json) = object(ADDED_TOKENS)?
        {
            for (token, id) in json {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
                let id = id.with_context(|| {
                    let path = folder.join(ADDED_TOKENS);
                    format!("{}: `{token}` has no id of a token", path.display())
                })?;
                let special = found.is_special(&token);
                found.added.insert(id, AddedToken::from(token, special));
            }
        }
        Ok(found)
    }

    fn from_json(json: &Map<String, Value>) -> Result<Self> {
        let fields = Fields::new(json);
        let mut found = Self {
            add_bos: fields.optional_bool("add_bos_token")?,
            add_eos: fields.optional_bool("add_eos_token")?,
            split_special: fields.bool_or("split_special_tokens", false)?,
            cleans_bpe: fields.bool_or(CLEAN_UP_BPE, false)?,
            ..Self::default()
        };
        for field in RULES {
            if let Some(value) = fields.optional_bool(field)? {
                found.rules.insert(field, value);
            }
        }
        for field in UNSUPPORTED {
            let value = json.get(field).unwrap_or(&Value::Null);
            ensure!(
                is_neutral("", value),
                "`{field}` is {value}, which is not supported"
            );
        }
        for field in NAMED {
            if let Some(token) = content(field, json.get(field))? {
                found.named.insert(field, token);
            }
        }
        for field in ["additional_special_tokens", "extra_special_tokens"] {
            let tokens: Vec<&Value> = match json.get(field) {
                None | Some(Value::Null) => continue,
                Some(Value::Array(tokens)) => tokens.iter().collect(),
                Some(Value::Object(tokens)) => tokens.values().collect(),
                Some(other) => bail!("`{field}` is {other}, but must be a list of tokens"),
            };
            for token in tokens {
                found.extra.extend(content(field, Some(token))?);
            }
        }
        let added = match json.get("added_tokens_decoder") {
            None | Some(Value::Null) => return Ok(found),
            Some(added) => added.as_object().with_context(|| {
                format!("`added_tokens_decoder` is {added}, but must be an object")
            })?,
        };
        for (id, entry) in added {
            let name = format!("`added_tokens_decoder.{id}`");
            let number: u32 = id
                .parse()
                .with_context(|| format!("{name} has no id of a token for its name"))?;
            let content = entry.get("content").and_then(Value::as_str);
            let content = content.with_context(|| format!("{name} has no `content`"))?;
            let flag = |key: &str, default: bool| match entry.get(key) {
                None | Some(Value::Null) => Ok(default),
                Some(Value::Bool(flag)) => Ok(*flag),
                Some(other) => bail!("{name}.{key} is {other}, but must be true or false"),
            };
            let special = flag("special", false)? || found.is_special(content);
            let token = AddedToken::from(content, special)
                .single_word(flag("single_word", false)?)
                .lstrip(flag("lstrip", false)?)
                .rstrip(flag("rstrip", false)?)
                .normalized(flag("normalized", !special)?);
            ensure!(
                found.added.insert(number, token).is_none(),
                "{name} comes twice"
            );
        }
        Ok(found)
    }

    /// Returns the start-of-text token.
    pub fn bos(&self) -> Option<&str> {
        self.named.get("bos_token").map(String::as_str)
    }

    /// Returns the end-of-text token.
    pub fn eos(&self) -> Option<&str> {
        self.named.get("eos_token").map(String::as_str)
    }

    /// Returns all named special tokens.
    pub fn special(&self) -> impl Iterator<Item = &str> {
        self.named.values().chain(&self.extra).map(String::as_str)
    }

    fn is_special(&self, token: &str) -> bool {
        self.special().any(|special| special == token)
    }
}

/// Returns the text of a token: a string, or an object with its content.
fn content(field: &str, value: Option<&Value>) -> Result<Option<String>> {
    let text = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => Some(text.clone()),
        Some(value) => value.get("content").and_then(Value::as_str).map(Into::into),
    };
    text.map(Some)
        .with_context(|| format!("`{field}` names no token"))
}
