//! Reads `tokenizer.json` with the `tokenizers` library.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::TokenizerConfig;
use crate::random::{hash, hash_all};

/// Name of the file.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Encodes text to tokens, and decodes them.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    around: Around,
    hash: u64,
    /// Vocabulary size of the model.
    vocab: usize,
}

/// Special tokens around a text.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Around {
    /// The library adds them, in a way that is not of the simple form.
    Library,
    /// These tokens before and after the text.
    Tokens { before: Vec<u32>, after: Vec<u32> },
}

/// Returns the result of `work`, a call of the library. On some malformed files the library panics
/// instead of failing (a decoder of unknown type, in 0.23.2); the panic becomes an error.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!(
                "the library panics: {}",
                text.unwrap_or("it does not say why")
            ))
        }
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` of `folder`, for a model of `vocab` tokens. The tokens in `needed`
    /// (start-of-text, end-of-text and padding tokens) must exist. From `tokenizer_config.json` it
    /// takes the settings that affect tokens: added and special tokens, and whether texts get start
    /// and end tokens.
    ///
    /// Truncation and padding settings of the file apply to the batches of a training script. They
    /// are disabled, as in transformers by default.
    ///
    /// # Errors
    /// Returns an error if the file is absent or malformed, assigns one ID to two tokens, has a
    /// token whose ID is `vocab` or more and which is not special, or lacks one of `needed`. Returns
    /// an error that names the field if a field that affects tokens is unknown, or if
    /// `tokenizer_config.json` contradicts `tokenizer.json`.
    pub fn read(folder: &Path, vocab: usize, needed: &[u32]) -> Result<Self> {
        let path = folder.join(TOKENIZER_FILE);
        let error = |error| anyhow!("{}: {error}", path.display());
        // A separate step, because the library's error for an absent file does not name it.
        let text = std::fs::read(&path).map_err(|e| error(e.to_string()))?;
        let json: serde_json::Result<Map<String, Value>> = serde_json::from_slice(&text);
        let json = json.map_err(|e| error(format!("it holds no JSON object: {e}")))?;
        rules::refuse_unknown(&json).map_err(|e| error(e.to_string()))?;
        // The library fails on unknown fields, even neutral ones.
        let is_known = |name: &String| rules::FILE.contains(&name.as_str());
        let known = match json.keys().all(is_known) {
            true => text.clone(),
            false => {
                let known = json.iter().filter(|(name, _)| is_known(name));
                serde_json::to_vec(&known.collect::<BTreeMap<_, _>>())?
            }
        };
        let mut inner = guarded(|| tokenizers::Tokenizer::from_bytes(&known)).map_err(error)?;
        inner.with_padding(None);
        let off = guarded(|| inner.with_truncation(None).map(drop));
        off.map_err(error)?;
        let found = Self {
            inner,
            around: Around::Library,
            hash: hash(&text),
            vocab,
        };
        let found = TokenizerConfig::read(folder)
            .and_then(|config| found.obeying(&json, &config))
            .map_err(|e| error(format!("{e:#}")))?;
        found.check(needed).map_err(|e| error(e.to_string()))?;
        Ok(found)
    }

    /// Applies the settings in `json` and `config` that the library does not read.
    fn obeying(mut self, json: &Map<String, Value>, config: &TokenizerConfig) -> Result<Self> {
        let mut changes = Vec::new();
        for entry in json
            .get("added_tokens")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let (content, id) = (entry["content"].as_str(), entry["id"].as_u64());
            let found = content.and_then(|content| self.id(content));
            ensure!(
                found.map(u64::from) == id,
                "`added_tokens` says that {} is {}, but {}",
                entry["content"],
                entry["id"],
                its_id(found)
            );
        }
        let known = self.inner.get_added_tokens_decoder();
        for (&id, token) in &config.added {
            let content = token.content.clone();
            if known.get(&id) != Some(token) {
                changes.push(format!("{id} {token:?}"));
                self.add(token.clone())?;
            }
            let found = self.id(&content);
            ensure!(
                found == Some(id),
                "`added_tokens_decoder` of tokenizer_config.json says that `{content}` is {id}, but \
                 {}",
                its_id(found)
            );
        }
        let added = self.inner.get_added_tokens_decoder();
        let added: BTreeSet<String> = added.into_values().map(|token| token.content).collect();
        for content in config.special().filter(|token| !added.contains(*token)) {
            // A token without an ID never occurs in the model's texts: a tool added its name for
            // batches.
            if self.id(content).is_some() {
                changes.push(format!("special {content}"));
                self.add(AddedToken::from(content, true))?;
            } else {
                ensure!(
                    !config.extra.iter().any(|token| token == content),
                    "tokenizer_config.json has the special token `{content}`, which has no id"
                );
            }
        }
        if config.split_special {
            changes.push("split_special_tokens".into());
            self.inner.set_encode_special_tokens(true);
        }
        rules::check_text_rules(json, config)?;
        self.around = self.probe()?;
        let obeyed = self.around_of(config)?;
        if obeyed != self.around {
            changes.push(format!("{obeyed:?}"));
            self.around = obeyed;
        }
        if !changes.is_empty() {
            let own = self.hash.to_le_bytes();
            self.hash = hash_all(&[&own, changes.join("\n").as_bytes()]);
        }
        Ok(self)
    }

    fn add(&mut self, token: AddedToken) -> Result<()> {
        let content = token.content.clone();
        let added = guarded(|| self.inner.add_tokens([token]).map(drop));
        added.map_err(|e| anyhow!("`{content}` cannot be added: {e}"))
    }

    /// Determines the special tokens that the library adds around a text.
    fn probe(&self) -> Result<Around> {
        for text in ["a", "1", ""] {
            let encode = |special| -> Option<Vec<u32>> {
                let found = guarded(|| self.inner.encode_fast(text, special));
                Some(found.ok()?.get_ids().to_vec())
            };
            let (Some(bare), Some(whole)) = (encode(false), encode(true)) else {
                continue;
            };
            if bare.is_empty() && !text.is_empty() {
                continue;
            }
            let at = (0..=whole.len().saturating_sub(bare.len()))
                .find(|&at| whole[at..].starts_with(&bare));
            if let Some(at) = at {
                return Ok(Around::Tokens {
                    before: whole[..at].to_vec(),
                    after: whole[at + bare.len()..].to_vec(),
                });
            }
        }
        Ok(Around::Library)
    }

    /// Returns the special tokens that `config` requests around a text, with transformers'
    /// interpretation of `add_bos_token` and `add_eos_token`.
    fn around_of(&self, config: &TokenizerConfig) -> Result<Around> {
        let Around::Tokens { before, after } = &self.around else {
            for (field, value) in [
                ("add_bos_token", config.add_bos),
                ("add_eos_token", config.add_eos),
            ] {
                ensure!(
                    value != Some(true),
                    "`{field}` of tokenizer_config.json is true, which cannot be brought together \
                     with the post_processor of tokenizer.json"
                );
            }
            return Ok(self.around.clone());
        };
        let obey = |add: Option<bool>,
                    own: &[u32],
                    (field, name): (&str, &str),
                    token: Option<&str>| {
            let id = token.and_then(|token| self.id(token));
            match (add, id) {
                (Some(true), None) if own.is_empty() => bail!(
                    "`{field}` of tokenizer_config.json is true, but `{name}` is {token:?}, no token"
                ),
                (Some(true), Some(id)) if own.is_empty() => Ok(vec![id]),
                (Some(false), Some(id)) if own == [id] => Ok(Vec::new()),
                _ => Ok(own.to_vec()),
            }
        };
        Ok(Around::Tokens {
            before: obey(
                config.add_bos,
                before,
                ("add_bos_token", "bos_token"),
                config.bos(),
            )?,
            after: obey(
                config.add_eos,
                after,
                ("add_eos_token", "eos_token"),
                config.eos(),
            )?,
        })
    }

    fn check(&self, needed: &[u32]) -> Result<()> {
        let mut seen = BTreeSet::new();
        let (vocab, added) = (self.vocab, self.inner.get_added_tokens_decoder());
        for (token, id) in self.inner.get_vocab(true) {
            // The text models of Gemma 3 have the tokenizer of those with images, whose token of
            // images they lack.
            let is_special = || added.get(&id).is_some_and(|token| token.special);
            ensure!(
                (id as usize) < vocab || is_special(),
                "token `{token}` has id {id}, but the model's vocabulary has {vocab} ids"
            );
            ensure!(
                seen.insert(id),
                "token `{token}` has id {id}, which another token has, too"
            );
        }
        ensure!(!seen.is_empty(), "it has no tokens");
        for id in needed {
            ensure!(
                seen.contains(id),
                "there is no token of id {id}, which the model's configuration names"
            );
        }
        Ok(())
    }

    /// Encodes `text`; with `special`, includes the tokens that the tokenizer adds around a text.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let by_library = special && self.around == Around::Library;
        let encoding = guarded(|| self.inner.encode_fast(text, by_library));
        let encoding = encoding.map_err(|e| anyhow!("the text cannot be tokenized: {e}"))?;
        let bare = encoding.get_ids();
        self.check_ids(bare)?;
        Ok(match &self.around {
            Around::Tokens { before, after } if special => [&before[..], bare, &after[..]].concat(),
            _ => bare.to_vec(),
        })
    }

    /// Encodes a whole text, including the tokens that the tokenizer adds around it, unless the
    /// text already contains them, as the output of a chat template does.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot represent the text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_text_with_bytes(text)?.0)
    }

    /// Encodes a whole text like [`encode_text`](Self::encode_text), with the byte range of each
    /// token; tokens added around the text have empty ranges.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot represent the text.
    pub fn encode_text_with_bytes(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let Around::Tokens { before, after } = &self.around else {
            return self.by_library(text, true);
        };
        let (mut tokens, mut bytes) = self.by_library(text, false)?;
        if !tokens.starts_with(before) {
            tokens.splice(0..0, before.iter().copied());
            bytes.splice(0..0, before.iter().map(|_| 0..0));
        }
        if !tokens.ends_with(after) {
            tokens.extend(after);
            bytes.extend(after.iter().map(|_| 0..0));
        }
        Ok((tokens, bytes))
    }

    /// Encodes `text` without tokens around it, with the byte range of each token.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot represent the text.
    pub fn encode_with_bytes(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        self.by_library(text, false)
    }

    fn by_library(&self, text: &str, special: bool) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let encoding = guarded(|| self.inner.encode(text, special));
        let encoding = encoding.map_err(|e| anyhow!("the text cannot be tokenized: {e}"))?;
        let bytes = encoding
            .get_offsets()
            .iter()
            .map(|&(begin, end)| begin..end);
        self.check_ids(encoding.get_ids())?;
        Ok((encoding.get_ids().to_vec(), bytes.collect()))
    }

    /// Returns an error if the model lacks one of `tokens`.
    fn check_ids(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.vocab;
        if let Some(&id) = tokens.iter().find(|id| **id as usize >= vocab) {
            let token = self.inner.id_to_token(id).unwrap_or_default();
            bail!("the text has the token `{token}` of id {id}, but the model has {vocab} ids");
        }
        Ok(())
    }

    /// Returns the FNV-1a hash of the file and of the settings taken from `tokenizer_config.json`.
    /// It identifies the tokenizer of a token file.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Decodes `tokens`, without special ones unless `special`. Invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// Returns an error if the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32], special: bool) -> Result<String> {
        let text = guarded(|| self.inner.decode(tokens, !special));
        text.map_err(|e| anyhow!("the tokens have no text: {e}"))
    }

    /// Returns the ID of a token by its text.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the number of tokens, including added ones.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Returns true if there are no tokens; [`read`](Self::read) refuses such a file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Says which ID a token has.
fn its_id(id: Option<u32>) -> String {
    id.map_or("it has no id".into(), |id| format!("its id is {id}"))
}

mod rules;
#[cfg(test)]
mod tests;
