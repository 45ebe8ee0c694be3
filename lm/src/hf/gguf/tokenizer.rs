//! Converts the tokenizer of a GGUF file to `tokenizer.json`.
//!
//! Supports only byte-level BPE: a list of tokens in ID order, merges in rank order, and the name
//! of the pre-tokenizer that splits a text into words.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value as Json, json};

use super::read::{GgufFile, Value};

/// `tokenizer.ggml.token_type` of tokens that text cannot produce.
const CONTROL: i128 = 3;
/// `tokenizer.ggml.token_type` of tokens that are matched whole in a text.
const USER_DEFINED: i128 = 4;

/// Returns the contents of `tokenizer.json`, or the reason why it cannot be made.
///
/// # Errors
/// Returns an error if the tokenizer contradicts itself.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<Result<Json, String>> {
    let text = |key: &str| match file.value(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(other) => bail!("`{key}` is {other}, but must be a string"),
    };
    let model = text("tokenizer.ggml.model")?;
    if model != Some("gpt2") {
        return Ok(Err(format!(
            "`tokenizer.ggml.model` is `{}`, and only `gpt2`, byte-level BPE, is read",
            model.unwrap_or("none")
        )));
    }
    let cut = text("tokenizer.ggml.pre")?;
    let spaced = flag(file, "tokenizer.ggml.add_space_prefix")?;
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": spaced,
        "trim_offsets": true,
        "use_regex": true,
    });
    let pre_tokenizer = match cut {
        Some("gpt-2") => byte_level.clone(),
        Some("smollm") => json!({
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": true}, byte_level],
        }),
        other => {
            return Ok(Err(format!(
                "`tokenizer.ggml.pre` is `{}`, and only `gpt-2` and `smollm` are read",
                other.unwrap_or("none")
            )));
        }
    };
    let tokens = strings(file, "tokenizer.ggml.tokens")?;
    let mut vocab = BTreeMap::new();
    for (id, token) in tokens.iter().enumerate() {
        ensure!(
            vocab.insert(token.as_str(), id).is_none(),
            "`tokenizer.ggml.tokens` has {token:?} twice"
        );
    }
    let merges = strings(file, "tokenizer.ggml.merges")?;
    let merges = merges.iter().map(|merge| {
        let pair = merge.split_once(' ');
        let pair = pair.filter(|(a, b)| vocab.contains_key(a) && vocab.contains_key(b));
        pair.with_context(|| {
            format!("`tokenizer.ggml.merges` has {merge:?}, which is no pair of tokens")
        })
    });
    let merges = merges.collect::<Result<Vec<_>>>()?;
    Ok(Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added(file, tokens)?,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": around(file, tokens)?,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocab,
            "merges": merges,
        },
    })))
}

/// Returns the tokens that are not split.
fn added(file: &GgufFile, tokens: &[String]) -> Result<Vec<Json>> {
    let key = "tokenizer.ggml.token_type";
    let types = match file.value(key) {
        None => return Ok(Vec::new()),
        Some(Value::Integers(types)) => types,
        Some(other) => bail!("`{key}` is {other}, but must be an array of numbers"),
    };
    ensure!(
        types.len() == tokens.len(),
        "`{key}` has {} entries for {} tokens",
        types.len(),
        tokens.len()
    );
    let whole = tokens.iter().zip(types).enumerate();
    let whole = whole.filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
    let entries = whole.map(|(id, (token, kind))| {
        json!({
            "id": id,
            "content": token,
            "single_word": false,
            "lstrip": false,
            "rstrip": false,
            "normalized": false,
            "special": *kind == CONTROL,
        })
    });
    Ok(entries.collect())
}

/// Returns a post-processor that adds the start-of-text and end-of-text tokens, if the file
/// requests them.
fn around(file: &GgufFile, tokens: &[String]) -> Result<Json> {
    let mut special = serde_json::Map::new();
    let mut asked = |flag_name: &str, key: &str| -> Result<Option<Json>> {
        if !flag(file, &format!("tokenizer.ggml.{flag_name}"))? {
            return Ok(None);
        }
        let (id, token) = named(file, tokens, key)?;
        let token = token.with_context(|| {
            format!(
                "`tokenizer.ggml.{key}` is {}, but `{flag_name}` asks for one of {} tokens",
                id.map_or("none".into(), |id| id.to_string()),
                tokens.len()
            )
        })?;
        let entry = json!({"id": token, "ids": [id], "tokens": [token]});
        special.insert(token.to_owned(), entry);
        Ok(Some(json!({"SpecialToken": {"id": token, "type_id": 0}})))
    };
    let begin = asked("add_bos_token", "bos_token_id")?;
    let end = asked("add_eos_token", "eos_token_id")?;
    if begin.is_none() && end.is_none() {
        return Ok(Json::Null);
    }
    let text = |name: &str| {
        let sequence = json!({"Sequence": {"id": name, "type_id": 0}});
        let parts = begin.iter().chain([&sequence]).chain(&end);
        parts.cloned().collect::<Vec<Json>>()
    };
    let pair = [text("A"), text("B")].concat();
    Ok(json!({
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": pair,
        "special_tokens": special,
    }))
}

/// Returns the ID of a special token, and its text if a token with that ID exists.
fn named<'a>(
    file: &GgufFile,
    tokens: &'a [String],
    key: &str,
) -> Result<(Option<usize>, Option<&'a str>)> {
    let id = file.optional_count(&format!("tokenizer.ggml.{key}"))?;
    let token = id.and_then(|id| tokens.get(id)).map(String::as_str);
    Ok((id, token))
}

/// Returns the contents of `tokenizer_config.json`: special tokens and the chat template.
///
/// # Errors
/// Returns an error if a key has another type.
pub(super) fn tokenizer_config(file: &GgufFile) -> Result<Json> {
    let tokens = strings(file, "tokenizer.ggml.tokens")?;
    let mut json = json!({"tokenizer_class": "PreTrainedTokenizerFast"});
    for (field, key) in [
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("pad_token", "padding_token_id"),
        ("unk_token", "unknown_token_id"),
    ] {
        if let (_, Some(token)) = named(file, tokens, key)? {
            json[field] = token.into();
        }
    }
    match file.value("tokenizer.chat_template") {
        None => {}
        Some(Value::String(template)) => json["chat_template"] = template.as_str().into(),
        Some(other) => bail!("`tokenizer.chat_template` is {other}, but must be a string"),
    }
    Ok(json)
}

fn flag(file: &GgufFile, key: &str) -> Result<bool> {
    match file.value(key) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => bail!("`{key}` is {other}, but must be true or false"),
    }
}

fn strings<'a>(file: &'a GgufFile, key: &str) -> Result<&'a [String]> {
    match file.value(key) {
        Some(Value::Strings(strings)) => Ok(strings),
        Some(other) => bail!("`{key}` is {other}, but must be an array of strings"),
        None => bail!("`{key}` is absent"),
    }
}
