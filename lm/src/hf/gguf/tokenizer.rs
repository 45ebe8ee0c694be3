//! The tokenizer in a GGUF file, as `tokenizer.json` has it.
//!
//! Only byte-level BPE: a list of tokens in the order of their ids, merges in the order of their rank,
//! and the name of what cuts a text into words.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value as Json, json};

use super::read::{GgufFile, Value};

/// `tokenizer.ggml.token_type` of tokens that no text gives.
const CONTROL: i128 = 3;
/// Of those that are taken whole from a text.
const USER_DEFINED: i128 = 4;

/// The content of `tokenizer.json`, or why there is none.
///
/// # Errors
/// When the file has a tokenizer that contradicts itself.
pub(super) fn tokenizer_json(file: &GgufFile) -> Result<Result<Json, String>> {
    let text = |key: &str| match file.value(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(other) => bail!("`{key}` is {other:?}, but must be a string"),
    };
    let model = text("tokenizer.ggml.model")?;
    if model != Some("gpt2") {
        return Ok(Err(format!(
            "`tokenizer.ggml.model` is {model:?}, and only `gpt2`, byte-level BPE, is read"
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
                "`tokenizer.ggml.pre` is {other:?}, and only `gpt-2` and `smollm` are read"
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
        "post_processor": begin(file, tokens)?,
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

/// The tokens that are not cut.
fn added(file: &GgufFile, tokens: &[String]) -> Result<Vec<Json>> {
    let key = "tokenizer.ggml.token_type";
    let types = match file.value(key) {
        None => return Ok(Vec::new()),
        Some(Value::Integers(types)) => types,
        Some(other) => bail!("`{key}` is {other:?}, but must be an array of numbers"),
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

/// What puts the first token before a text, if the file asks for it.
fn begin(file: &GgufFile, tokens: &[String]) -> Result<Json> {
    if !flag(file, "tokenizer.ggml.add_bos_token")? {
        return Ok(Json::Null);
    }
    let key = "tokenizer.ggml.bos_token_id";
    let id = file.optional_count(key)?;
    let token = id.and_then(|id| tokens.get(id));
    let token = token.with_context(|| {
        format!(
            "`{key}` is {id:?}, but `add_bos_token` asks for one of {} tokens",
            tokens.len()
        )
    })?;
    let special = json!({"SpecialToken": {"id": token, "type_id": 0}});
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            special,
            {"Sequence": {"id": "A", "type_id": 0}},
            special,
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }))
}

fn flag(file: &GgufFile, key: &str) -> Result<bool> {
    match file.value(key) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => bail!("`{key}` is {other:?}, but must be true or false"),
    }
}

fn strings<'a>(file: &'a GgufFile, key: &str) -> Result<&'a [String]> {
    match file.value(key) {
        Some(Value::Strings(strings)) => Ok(strings),
        Some(other) => bail!("`{key}` is {other:?}, but must be an array of strings"),
        None => bail!("`{key}` is absent"),
    }
}
