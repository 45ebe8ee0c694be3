//! Trains a byte-level BPE tokenizer with the `tokenizers` library.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper, TokenizerBuilder};

use super::encode::texts;
use crate::checkpoint::write_json;
use crate::hf::NewFolder;
use crate::hf::tokenizer::TOKENIZER_FILE;

/// End-of-text token.
pub const END_OF_TEXT: &str = "<|endoftext|>";
/// ID of the end-of-text token; special tokens come first.
pub const END_OF_TEXT_ID: u32 = 0;
/// Pairs rarer than this do not become a token.
const LEAST_FREQUENCY: u64 = 2;
/// Minimum vocabulary: one token per byte, and the end-of-text token.
const LEAST_TOKENS: usize = 257;

/// Trains a tokenizer of at most `vocab` tokens on the texts of `paths`, and writes
/// `tokenizer.json` and `tokenizer_config.json` to the new folder `out`. Words are split as in
/// GPT-2.
///
/// # Errors
/// Returns an error if `vocab` is too small for all bytes, a path cannot be read or has no text, or
/// `out` has files.
pub fn train(paths: &[PathBuf], vocab: usize, out: &Path) -> Result<()> {
    ensure!(
        vocab >= LEAST_TOKENS,
        "the vocabulary has {vocab} ids, but a byte-level tokenizer needs at least {LEAST_TOKENS}: \
         all bytes, and the end of a text"
    );
    let texts = texts(paths)?;
    ensure!(
        !texts.is_empty(),
        "data has no text to train a tokenizer on"
    );
    let error = |error| anyhow!("the tokenizer cannot be trained: {error}");
    let mut trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab)
        .min_frequency(LEAST_FREQUENCY)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let bytes = || Some(ByteLevel::default().add_prefix_space(false));
    let mut tokenizer = TokenizerBuilder::<BPE, NormalizerWrapper, _, _, _>::new()
        .with_model(BPE::default())
        .with_normalizer(None)
        .with_pre_tokenizer(bytes())
        .with_post_processor(bytes())
        .with_decoder(bytes())
        .build()
        .map_err(error)?;
    tokenizer.train(&mut trainer, texts.iter()).map_err(error)?;
    let json = tokenizer.to_string(true).map_err(error)?;
    let new = NewFolder::create(out)?;
    let path = new.path().join(TOKENIZER_FILE);
    std::fs::write(&path, json).with_context(|| path.display().to_string())?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
    });
    write_json(&new.path().join("tokenizer_config.json"), &config)?;
    new.finish()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::hf::Tokenizer;
    use nvfp4_test_support::Scratch;

    #[test]
    fn words_that_come_often_become_tokens() {
        let folder = Scratch::new("bpe");
        fs::write(
            folder.join("a.txt"),
            "the lazy dog, the lazy fox. ".repeat(20),
        )
        .unwrap();
        fs::write(folder.join("b.jsonl"), "{\"text\": \"the quick fox\"}\n").unwrap();
        let out = folder.join("tokenizer");
        let paths = [folder.join("a.txt"), folder.join("b.jsonl")];
        train(&paths, 300, &out).unwrap();
        let tokenizer = Tokenizer::read(&out, 300, &[END_OF_TEXT_ID]).unwrap();
        assert_eq!(tokenizer.id(END_OF_TEXT), Some(END_OF_TEXT_ID));
        assert_eq!(tokenizer.encode(" the lazy fox", true).unwrap().len(), 3);
        let text = "Ünknown\u{1f980} bytes";
        let ids = tokenizer.encode(text, true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        let again = folder.join("again");
        train(&paths, 300, &again).unwrap();
        assert_eq!(
            Tokenizer::read(&again, 300, &[]).unwrap().hash(),
            tokenizer.hash()
        );
        train(&paths, LEAST_TOKENS, &folder.join("bytes")).unwrap();
        let error = train(&paths, 256, &folder.join("small")).unwrap_err();
        assert!(error.to_string().contains("256 ids"), "{error}");
    }
}
