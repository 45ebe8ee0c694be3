//! Loads files of text or tokens as rows for training and validation.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, ensure};

use super::config::FinetuneConfig;
use crate::hf::{DecoderConfig, GenerationConfig, Tokenizer};
use crate::random::hash_all;
use crate::tokens::encode::{is_shard, reading};
use crate::tokens::rows::{places, split};
use crate::tokens::whole::may_have_rows;
use crate::tokens::{
    ChatTemplate, Encoded, Encoder, Rows, Shard, ShardWriter, Texts, Vocabulary, whole,
};

/// Tokenizer of a model folder, with the settings needed to read texts.
pub struct TextReader {
    folder: PathBuf,
    tokenizer: Tokenizer,
    eos: Option<u32>,
    vocabulary: Vocabulary,
    longest: usize,
}

impl TextReader {
    /// Reads the tokenizer of the model in `folder`.
    ///
    /// # Errors
    /// Returns an error if a file is absent or malformed.
    pub fn read(folder: &Path) -> Result<Self> {
        let config = DecoderConfig::read(folder)?;
        let settings = GenerationConfig::read(folder, &config)?;
        let tokenizer = Tokenizer::read(folder, config.vocab, &settings.eos)?;
        let vocabulary = Vocabulary {
            size: config.vocab,
            tokenizer: tokenizer.hash(),
        };
        Ok(Self {
            folder: folder.to_owned(),
            tokenizer,
            eos: settings.eos.first().copied(),
            vocabulary,
            longest: config.longest(),
        })
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the vocabulary that shards of these tokens record.
    pub fn vocabulary(&self) -> Vocabulary {
        self.vocabulary
    }

    /// Returns the model's maximum context.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Tokenizes the documents of `paths` into the shard `out`.
    ///
    /// # Errors
    /// Returns an error if a path cannot be read, a line is not a document, or there is no
    /// document.
    pub fn write_shard(&self, paths: &[PathBuf], out: &Path) -> Result<Encoded> {
        let chat = ChatTemplate::read(&self.folder)?;
        let encoder = Encoder::new(&self.tokenizer, chat, self.eos);
        let mut writer = ShardWriter::new(self.vocabulary)?;
        let found = encoder.encode_files(paths, &mut writer)?;
        ensure!(
            found.documents > 0,
            "data has no document ({} files left out because they are empty or not UTF-8)",
            found.skipped
        );
        writer.finish(out)?;
        Ok(found)
    }

    /// Tokenizes the texts of `paths`, files and folders of the option `option`, for calibration
    /// and evaluation: each row of a `.jsonl` file or of a list in a `.json` file and every other
    /// file is one document, without an end-of-text token. In a folder, files that end in .txt, .md
    /// and .jsonl and lists in `.json` files are read, also in its subfolders.
    ///
    /// # Errors
    /// Returns an error that names the file if it cannot be read, is not UTF-8 text, or has no
    /// token of its own, or if one of its rows is not a document.
    pub fn texts(&self, option: &str, paths: &[PathBuf]) -> Result<Texts> {
        let (files, other_files) = whole::list(option, paths)?;
        // Plain text needs no template, so a template that cannot be read does not matter.
        let chat = match files.iter().any(|path| may_have_rows(path)) {
            true => ChatTemplate::read(&self.folder)?,
            false => None,
        };
        let encoder = Encoder::new(&self.tokenizer, chat, None);
        let mut work = reading("tokenize", &files);
        let files = files.into_iter();
        let files =
            files.map(|path| whole::read(option, path, &encoder, &self.tokenizer, &mut work));
        Ok(Texts {
            files: files.collect::<Result<_>>()?,
            other_files,
        })
    }

    /// Returns the shards among `paths`, and a new one at `out` with all other files, if any.
    ///
    /// # Errors
    /// Returns the errors of [`write_shard`](Self::write_shard).
    pub fn shards(&self, paths: &[PathBuf], out: &Path) -> Result<(Vec<PathBuf>, Encoded)> {
        let (mut shards, texts): (Vec<_>, Vec<_>) =
            paths.iter().cloned().partition(|path| is_shard(path));
        let mut found = Encoded::default();
        if !texts.is_empty() {
            found = self.write_shard(&texts, out)?;
            shards.push(out.to_owned());
        }
        Ok((shards, found))
    }
}

/// The rows of a run.
#[derive(Debug)]
pub struct TrainingData {
    /// Training rows.
    pub train: Rows,
    /// Validation rows.
    pub valid: Rows,
    /// Fingerprint of the tokens, to detect changes.
    pub fingerprint: String,
    /// True if there is only one document, whose end is the validation data.
    pub is_one: bool,
}

impl TrainingData {
    /// Opens the shards that `config` names, with tokens of `vocabulary`.
    ///
    /// # Errors
    /// Returns an error if a shard is corrupt or has another vocabulary or tokenizer, or if the
    /// training or validation data has no target.
    pub fn open(config: &FinetuneConfig, vocabulary: Vocabulary) -> Result<Self> {
        let open = |paths: &[PathBuf]| -> Result<Vec<Arc<Shard>>> {
            paths.iter().map(|path| shard(path, vocabulary)).collect()
        };
        let (data, valid) = (open(&config.data)?, open(&config.valid)?);
        let checksums = data.iter().chain(&valid).map(|shard| shard.checksum());
        let checksums: Vec<[u8; 8]> = checksums.map(u64::to_le_bytes).collect();
        let parts: Vec<&[u8]> = checksums.iter().map(|part| &part[..]).collect();
        let (pack, all) = (
            |s: &[_], p: &[_]| Rows::pack(s, p, config.context),
            places(&data),
        );
        let is_one = valid.is_empty() && all.len() == 1;
        let (train, valid) = match valid.is_empty() {
            true if is_one => {
                let rows = Rows::pack_one(&data, all[0], config.valid_share, config.context)?;
                let [train, valid] = rows;
                (train, valid)
            }
            true => {
                let [train, valid] = split(&data, &all, config.valid_share)?;
                (pack(&data, &train)?, pack(&data, &valid)?)
            }
            false => (pack(&data, &all)?, pack(&valid, &places(&valid))?),
        };
        Ok(Self {
            train,
            valid,
            fingerprint: format!("{:016x}", hash_all(&parts)),
            is_one,
        })
    }
}

fn shard(path: &Path, expected: Vocabulary) -> Result<Arc<Shard>> {
    let shard = Shard::open(path)?;
    let found = shard.vocabulary();
    ensure!(
        found.size == expected.size,
        "tokens {}: the vocabulary has {} ids, but that of the model has {}",
        path.display(),
        found.size,
        expected.size
    );
    ensure!(
        found.tokenizer == expected.tokenizer,
        "tokens {}: they are of another tokenizer than the model's: its hash is {:016x}, not \
         {:016x}",
        path.display(),
        found.tokenizer,
        expected.tokenizer
    );
    Ok(Arc::new(shard))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::tokens::TextFile;
    use crate::tokens::chat::tests::CHATML;
    use nvfp4_test_support::{Scratch, golden_with_tokenizer};

    #[test]
    fn texts_of_files_and_folders_are_read_whole() {
        let model = golden_with_tokenizer("qwen3-tiny");
        fs::write(model.join("chat_template.jinja"), CHATML).unwrap();
        let reader = TextReader::read(&model).unwrap();
        let folder = Scratch::new("texts");
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            path
        };
        let first = write("b.txt", "The quick brown fox");
        write("a.md", "jumps over the lazy dog");
        write("other.rs", "fn main() {}");
        write(".hidden.txt", "not read");
        let lines = [
            r#"{"text": "one two three"}"#,
            "",
            r#"{"prompt": "The quick", "completion": " brown fox"}"#,
            r#"{"text": ""}"#,
            r#"{"messages": [{"role": "user", "content": "Hello"}]}"#,
        ];
        let jsonl = write("sub/c.jsonl", &lines.join("\n"));
        let texts = reader
            .texts("data", &[first.clone(), folder.to_path_buf()])
            .unwrap();
        let paths: Vec<&Path> = texts.files.iter().map(|file| &*file.path).collect();
        assert_eq!(paths, [&*first, &*folder.join("a.md"), &*jsonl]);
        let text = |text: &str| reader.tokenizer().encode_text(text).unwrap();
        assert_eq!(texts.files[0].documents, [text("The quick brown fox")]);
        let [one, two, three] = &texts.files[2].documents[..] else {
            panic!("{:?}", texts.files[2]);
        };
        assert_eq!(one, &text("one two three"));
        let tokens = one.len() + two.len() + three.len();
        assert_eq!(texts.files[2].tokens(), tokens);
        // Without an end-of-text token, unlike a training document.
        assert_eq!(two, &text("The quick brown fox"));
        let conversation = reader.tokenizer().decode(three, true).unwrap();
        assert!(
            conversation.contains("user\nHello<|im_end|>"),
            "{conversation}"
        );
        assert_eq!((texts.files[2].short, texts.other_files), (1, 1));
        // A list is read like JSON lines, a JSON object in a folder is not.
        let list = lines.iter().filter(|line| !line.is_empty()).copied();
        let list = format!("[{}]", list.collect::<Vec<_>>().join(","));
        let list = write("lists/c.json", &list);
        write("lists/info.json", "{}");
        let of_list = reader.texts("data", &[folder.join("lists")]).unwrap();
        assert_eq!(of_list.files[0].documents, texts.files[2].documents);
        assert_eq!((&of_list.files[0].path, of_list.other_files), (&list, 1));
        let left_out = texts.left_out().unwrap();
        assert!(left_out.starts_with("1 documents") && left_out.contains("; 1 files"));
        let counts = texts.files.iter().map(TextFile::tokens);
        assert_eq!(texts.tokens(), counts.sum::<usize>());

        let refused = |path: PathBuf, says: &str| {
            let error = format!("{:#}", reader.texts("data", &[path]).unwrap_err());
            assert!(
                error.starts_with("data ") && error.contains(says),
                "{error}"
            );
        };
        refused(folder.join("absent"), "does not exist");
        write("none/other.rs", "fn main() {}");
        refused(folder.join("none"), "has no text");
        refused(write("empty.txt", ""), "no token of its own");
        refused(write("a.tokens", "x"), "is of tokens");
        refused(write("bad.jsonl", "{\"text\": \"one\"}\n[]"), "line 2");
        refused(
            write("bad.json", r#"[{"text": "one"}, {"text": 1}]"#),
            "row 1 of the list: `text` is",
        );
        let binary = folder.join("binary.txt");
        fs::write(&binary, [0xff, 0xfe]).unwrap();
        refused(binary, "not UTF-8");

        // Plain text needs no template.
        fs::write(model.join("chat_template.jinja"), "{% if %}").unwrap();
        let reader = TextReader::read(&model).unwrap();
        assert_eq!(reader.texts("data", &[first]).unwrap().files.len(), 1);
        assert!(reader.texts("data", &[jsonl]).is_err());
    }
}
