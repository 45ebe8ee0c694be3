//! `tokenizer.json`, by the library that wrote it.

use std::collections::BTreeSet;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use anyhow::{Result, anyhow, ensure};

use crate::random::hash;

/// The file's name.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    hash: u64,
}

/// What the library's `work` gives. On some malformed files it panics where it should fail (a decoder
/// of no known type, in 0.23.2): here this is an error.
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
    /// Reads `tokenizer.json` of `folder`, for a model of `vocab` tokens, of which `needed` (the
    /// tokens that start, end and fill texts) must exist.
    ///
    /// # Errors
    /// When the file is absent or malformed, gives two tokens one id, has a token whose id is
    /// `vocab` or more, or lacks one of `needed`.
    pub fn read(folder: &Path, vocab: usize, needed: &[u32]) -> Result<Self> {
        let path = folder.join(TOKENIZER_FILE);
        let error = |error| anyhow!("{}: {error}", path.display());
        // A separate step: the library's own error for an absent file does not name it.
        let text = std::fs::read(&path).map_err(|e| error(e.to_string()))?;
        let inner = guarded(|| tokenizers::Tokenizer::from_bytes(&text)).map_err(error)?;
        let hash = hash(&text);
        let found = Self { inner, hash };
        found
            .check(vocab, needed)
            .map_err(|e| error(e.to_string()))?;
        Ok(found)
    }

    fn check(&self, vocab: usize, needed: &[u32]) -> Result<()> {
        let mut seen = BTreeSet::new();
        for (token, id) in self.inner.get_vocab(true) {
            ensure!(
                (id as usize) < vocab,
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

    /// The tokens of `text`; with `special`, also those that the tokenizer puts around a text.
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode_fast(text, special));
        Ok(encoding
            .map_err(|e| anyhow!("the text cannot be tokenized: {e}"))?
            .get_ids()
            .to_vec())
    }

    /// The tokens of `text` with the bytes of it that each stands for; those that the tokenizer puts
    /// around a text stand for none.
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text.
    pub fn encode_with_bytes(
        &self,
        text: &str,
        special: bool,
    ) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        let encoding = guarded(|| self.inner.encode(text, special));
        let encoding = encoding.map_err(|e| anyhow!("the text cannot be tokenized: {e}"))?;
        let bytes = encoding
            .get_offsets()
            .iter()
            .map(|&(begin, end)| begin..end);
        Ok((encoding.get_ids().to_vec(), bytes.collect()))
    }

    /// FNV-1a of the file: what says that tokens are of this tokenizer.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The text of `tokens`; without those that are special, unless `special`. Bytes that are no
    /// UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the tokenizer's decoder fails.
    pub fn decode(&self, tokens: &[u32], special: bool) -> Result<String> {
        let text = guarded(|| self.inner.decode(tokens, !special));
        text.map_err(|e| anyhow!("the tokens have no text: {e}"))
    }

    /// The id of a token by its content.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, added ones included.
    pub fn len(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether there is no token; [`read`](Self::read) refuses that.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;
    use nvfp4_test_support::{Scratch, golden};

    #[test]
    fn a_panic_of_the_library_is_an_error() {
        let folder = Scratch::new("tokenizer-panic");
        let json = json!({
            "version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
        });
        for decoder in [json!({"type": "None"}), json!(1)] {
            let mut json = json.clone();
            json["decoder"] = decoder;
            fs::write(folder.join(TOKENIZER_FILE), json.to_string()).unwrap();
            let error = Tokenizer::read(&folder, 1, &[]).err().unwrap().to_string();
            assert!(error.contains(TOKENIZER_FILE), "{error}");
        }
        assert!(
            guarded::<()>(|| panic!("why"))
                .unwrap_err()
                .contains("panics: why")
        );
    }

    fn matches_golden(folder: &Path) {
        let tokenizer = Tokenizer::read(folder, 288, &[285, 287]).unwrap();
        let cases = fs::read(folder.join("tokenizer_golden.json")).unwrap();
        let cases: Vec<Value> = serde_json::from_slice(&cases).unwrap();
        assert_eq!(cases.len(), 10);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            for (field, special) in [("ids", true), ("ids_no_special", false)] {
                let ids = tokenizer.encode(text, special).unwrap();
                assert_eq!(json!(ids), case[field], "{field} of {text:?}");
            }
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded"]);
        }
    }

    #[test]
    fn llama_tokens_are_those_of_the_python_library() {
        matches_golden(&golden("llama3-tiny"));
    }

    #[test]
    fn qwen_tokens_are_those_of_the_python_library() {
        matches_golden(&golden("qwen3-tiny"));
    }

    #[test]
    fn tokenizers_that_do_not_fit_are_errors() {
        let folder = Scratch::new("tokenizer");
        let error = |text: &str, needed: &[u32]| {
            fs::write(folder.join(TOKENIZER_FILE), text).unwrap();
            let Err(error) = Tokenizer::read(&folder, 3, needed) else {
                panic!("{text} was accepted");
            };
            let error = format!("{error:#}");
            assert!(error.contains(TOKENIZER_FILE), "{error}");
            error
        };
        let words = |vocab: &str| {
            format!(r#"{{"model":{{"type":"WordLevel","vocab":{vocab},"unk_token":"a"}}}}"#)
        };
        assert!(error("{", &[]).contains("tokenizer.json"));
        let found = error(&words(r#"{"a":0,"b":3}"#), &[]);
        assert!(
            found.contains("token `b` has id 3") && found.contains("3 ids"),
            "{found}"
        );
        let found = error(&words(r#"{"a":0,"b":0}"#), &[]);
        assert!(
            found.contains("has id 0, which another token has"),
            "{found}"
        );
        let found = error(&words(r#"{"a":0,"b":2}"#), &[0, 1]);
        assert!(found.contains("no token of id 1"), "{found}");
        assert!(error(&words("{}"), &[]).contains("no tokens"));
        fs::remove_file(folder.join(TOKENIZER_FILE)).unwrap();
        let Err(found) = Tokenizer::read(&folder, 3, &[]) else {
            panic!("there is no file");
        };
        assert!(found.to_string().contains(TOKENIZER_FILE), "{found}");
    }
}
