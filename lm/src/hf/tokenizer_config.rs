//! `tokenizer_config.json`, as far as it changes tokens.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::fields::Fields;
use crate::checkpoint::read_json;

/// The file's name.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Where older folders name special tokens.
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
/// Where older folders have tokens that were added to the vocabulary.
const ADDED_TOKENS: &str = "added_tokens.json";

/// Fields that name one special token each.
const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What `tokenizer_config.json` says beside the chat template.
#[derive(Debug, Clone, Default)]
pub(crate) struct TokenizerConfig {
    /// True if a text begins with the token that starts texts, false if it does not; `None` where
    /// `tokenizer.json` decides.
    pub add_bos: Option<bool>,
    /// The same of the token that ends texts.
    pub add_eos: Option<bool>,
    /// Special tokens in a text are cut as other text.
    pub split_special: bool,
    /// A space is put before a text.
    pub prefix_space: Option<bool>,
    /// Texts are turned to lower case.
    pub lower_case: bool,
    /// Added tokens by id.
    pub added: BTreeMap<u32, AddedToken>,
    /// Special tokens by the field that names them.
    named: BTreeMap<&'static str, String>,
    /// Further special tokens.
    pub extra: Vec<String>,
}

impl TokenizerConfig {
    /// Reads the file of `folder`; without one nothing is said.
    ///
    /// # Errors
    /// When a file is no JSON object, or a field of another type.
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
        // Transformers reads this file where the other has no list of added tokens.
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
            prefix_space: fields.optional_bool("add_prefix_space")?,
            lower_case: fields.bool_or("do_lower_case", false)?,
            ..Self::default()
        };
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

    /// The token that starts texts.
    pub fn bos(&self) -> Option<&str> {
        self.named.get("bos_token").map(String::as_str)
    }

    /// The token that ends texts.
    pub fn eos(&self) -> Option<&str> {
        self.named.get("eos_token").map(String::as_str)
    }

    /// All special tokens that are named.
    pub fn special(&self) -> impl Iterator<Item = &str> {
        self.named.values().chain(&self.extra).map(String::as_str)
    }

    fn is_special(&self, token: &str) -> bool {
        self.special().any(|special| special == token)
    }
}

/// The text of a token: a string, or an object with its content.
fn content(field: &str, value: Option<&Value>) -> Result<Option<String>> {
    let text = match value {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => Some(text.clone()),
        Some(value) => value.get("content").and_then(Value::as_str).map(Into::into),
    };
    text.map(Some)
        .with_context(|| format!("`{field}` names no token"))
}
