//! Converts text files and rows of JSON to tokenized documents.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::chat::{ChatTemplate, Message};
use super::line::{Line, check_formats, each_row, has_rows};
use super::shard::{Document, ShardWriter};
use crate::data::files;
use crate::hf::Tokenizer;
use crate::progress::{Unit, Work};

/// Result of encoding files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Encoded {
    /// Number of documents added.
    pub documents: usize,
    /// Number of them that are conversations.
    pub conversations: usize,
    /// Number of files skipped because they are empty or not UTF-8 text.
    pub skipped: usize,
}

/// Encodes text as documents. A document ends with the end-of-text token, if there is one.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    chat: Option<ChatTemplate>,
    eos: Option<u32>,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder with a chat template, if any, and the end-of-text token.
    pub fn new(tokenizer: &'a Tokenizer, chat: Option<ChatTemplate>, eos: Option<u32>) -> Self {
        Self {
            tokenizer,
            chat,
            eos,
        }
    }

    /// Encodes a text, all of which counts in the loss.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot represent it.
    pub fn text(&self, text: &str) -> Result<Document> {
        let mut tokens = self.tokenizer.encode_text(text)?;
        if let Some(eos) = self.eos.filter(|eos| tokens.last() != Some(eos)) {
            tokens.push(eos);
        }
        Ok(Document { tokens, mask: None })
    }

    /// Encodes a prompt and its completion. Only the completion and its end token count in the
    /// loss.
    ///
    /// # Errors
    /// Returns an error if the completion is empty, or the tokenizer cannot represent them.
    pub fn completion(&self, prompt: &str, completion: &str) -> Result<Document> {
        ensure!(
            !completion.is_empty(),
            "`completion` is empty, but it is what counts in the loss"
        );
        let text = format!("{prompt}{completion}");
        let (mut tokens, bytes) = self.tokenizer.encode_text_with_bytes(&text)?;
        let counts = bytes
            .iter()
            .map(|bytes| bytes.start < bytes.end && bytes.start >= prompt.len());
        let mut mask: Vec<bool> = counts.collect();
        match self.eos {
            Some(eos) if tokens.last() == Some(&eos) => {
                *mask.last_mut().expect("there is a token") = true;
            }
            Some(eos) => {
                tokens.push(eos);
                mask.push(true);
            }
            None => {}
        }
        Ok(Document {
            tokens,
            mask: Some(mask),
        })
    }

    /// Encodes a conversation. Only the assistant's tokens count in the loss: those that begin in
    /// its answers, including the text that the template appends to them.
    ///
    /// # Errors
    /// Returns an error if there is no template, the template refuses the messages, none is from
    /// the assistant, or the tokenizer cannot represent them.
    pub fn conversation(&self, messages: &[Message]) -> Result<Document> {
        let found = self.chat()?.conversation(messages)?;
        // The template has already written the special tokens.
        let (tokens, bytes) = self.tokenizer.encode_with_bytes(&found.text)?;
        let counts = |begin: usize| found.answers.iter().any(|answer| answer.contains(&begin));
        let mask = bytes.iter().map(|bytes| counts(bytes.start)).collect();
        Ok(Document {
            tokens,
            mask: Some(mask),
        })
    }

    /// Encodes a row. Only the answer to an instruction counts in the loss; its prompt is the chat
    /// template's, or that of Alpaca if there is no template.
    ///
    /// # Errors
    /// Returns the errors of the other functions.
    pub fn line(&self, line: Line) -> Result<Document> {
        match line {
            Line::Text(text) => self.text(&text),
            Line::Completion { prompt, completion } => self.completion(&prompt, &completion),
            Line::Messages(messages) => self.conversation(&messages),
            Line::Instruction(row) => match self.chat {
                Some(_) => self.conversation(&row.messages()),
                None => self.completion(&row.prompt(), &row.output),
            },
        }
    }

    /// Encodes a row as a text in which all tokens count: a prompt with its completion, or a
    /// conversation as the chat template renders it. Adds no end-of-text token.
    ///
    /// # Errors
    /// Returns an error if a conversation has no template, the template refuses the messages, or the
    /// tokenizer cannot represent the text.
    pub fn whole_line(&self, line: Line) -> Result<Vec<u32>> {
        // The template writes special tokens itself.
        let rendered = |messages: &[Message]| {
            let text = self.chat()?.render(messages, false)?;
            self.tokenizer.encode(&text, false)
        };
        match line {
            Line::Text(text) => self.tokenizer.encode_text(&text),
            Line::Completion { prompt, completion } => {
                self.tokenizer.encode_text(&(prompt + &completion))
            }
            Line::Messages(messages) => rendered(&messages),
            Line::Instruction(row) => match self.chat {
                Some(_) => rendered(&row.messages()),
                None => self.tokenizer.encode_text(&(row.prompt() + &row.output)),
            },
        }
    }

    fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().context(
            "the tokenizer has no chat template, which conversations need: chat_template.jinja, or \
             chat_template in tokenizer_config.json",
        )
    }

    /// Adds the documents of `paths`, files and folders, to `writer`. Each row of a `.jsonl` file
    /// or of a list in a `.json` file is one document, and so is every other text file. Files that
    /// are empty or not UTF-8 text are skipped and counted.
    ///
    /// # Errors
    /// Returns an error if a path cannot be read, if a file is a table or JSON without rows, or if a
    /// row is not a document; the error gives the line number or the index of the row.
    pub fn encode_files(&self, paths: &[PathBuf], writer: &mut ShardWriter) -> Result<Encoded> {
        check_formats("data", paths)?;
        let mut found = Encoded::default();
        let files = files(paths)?;
        let mut work = reading("tokenize", &files);
        for path in files {
            let context = || format!("data {}", path.display());
            match text_of(&path)? {
                None => found.skipped += 1,
                Some(text) if has_rows(&path, &text) => {
                    let rows = each_row(&path, &text, &mut work, |row| {
                        found.documents += 1;
                        found.conversations += usize::from(matches!(row, Line::Messages(_)));
                        writer.add(&self.line(row)?)
                    });
                    rows.with_context(context)?;
                }
                Some(text) => {
                    let document = self.text(&text).with_context(context)?;
                    writer.add(&document).with_context(context)?;
                    found.documents += 1;
                    work.add(text.len());
                }
            }
        }
        Ok(found)
    }
}

/// Begins the work `task` on the texts of `files`.
pub(crate) fn reading(task: &'static str, files: &[PathBuf]) -> Work {
    let bytes = |path: &PathBuf| fs::metadata(path).map_or(0, |file| file.len() as usize);
    Work::begin(task, Unit::Bytes, 0, files.iter().map(bytes).sum())
}

/// Reads the file `path` of an option `data`; none if it is empty or not UTF-8 text.
///
/// # Errors
/// Returns an error if the file cannot be read, or if a file of JSON lines is not UTF-8 text.
fn text_of(path: &Path) -> Result<Option<String>> {
    let context = || format!("data {}", path.display());
    let text = String::from_utf8(fs::read(path).with_context(context)?);
    match has_rows(path, "") {
        true => Ok(Some(text.with_context(context)?)),
        false => Ok(text.ok().filter(|text| !text.is_empty())),
    }
}

/// Reads the texts of `paths`, files and folders, for training a tokenizer. No template is
/// applied to rows. Skips files that are empty or not UTF-8 text.
///
/// # Errors
/// Returns an error if a path cannot be read or is a shard of tokens, or if a row is not a document;
/// the error gives the line number or the index of the row.
pub fn texts(paths: &[PathBuf]) -> Result<Vec<String>> {
    check_formats("data", paths)?;
    let mut found = Vec::new();
    let files = files(paths)?;
    let mut work = reading("read", &files);
    for path in files {
        let context = || format!("data {}", path.display());
        ensure!(
            !is_shard(&path),
            "data {} is of tokens, but a tokenizer is trained on text",
            path.display()
        );
        match text_of(&path)? {
            None => {}
            Some(text) if has_rows(&path, &text) => {
                let rows = each_row(&path, &text, &mut work, |row| {
                    found.extend(row_texts(row));
                    Ok(())
                });
                rows.with_context(context)?;
            }
            Some(text) => {
                work.add(text.len());
                found.push(text);
            }
        }
    }
    Ok(found)
}

/// Returns the texts of a row.
fn row_texts(row: Line) -> Vec<String> {
    match row {
        Line::Text(text) => vec![text],
        Line::Completion { prompt, completion } => vec![prompt + &completion],
        Line::Messages(messages) => messages.into_iter().map(|it| it.content).collect(),
        Line::Instruction(row) => vec![row.prompt() + &row.output],
    }
}

/// Returns true if `path` is, by its name, a shard of tokens.
pub fn is_shard(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "tokens")
}

#[cfg(test)]
mod tests {
    use super::super::chat::tests::CHATML;
    use super::super::shard::{Shard, Vocabulary};
    use super::*;
    use nvfp4_test_support::{Scratch, golden};

    #[test]
    fn only_completions_and_answers_count() {
        let tokenizer = Tokenizer::read(&golden("qwen3-tiny"), 288, &[]).unwrap();
        let chat = ChatTemplate::new(CHATML.into(), String::new(), String::new()).unwrap();
        let encoder = Encoder::new(&tokenizer, Some(chat), Some(285));
        // Decodes the tokens that count.
        let counted = |document: &Document| {
            let mask = document.mask.as_ref().unwrap();
            let pairs = document.tokens.iter().zip(mask);
            let ids: Vec<u32> = pairs
                .filter(|(_, counts)| **counts)
                .map(|(id, _)| *id)
                .collect();
            tokenizer.decode(&ids, true).unwrap()
        };
        let eos = tokenizer.decode(&[285], true).unwrap();
        let line = r#"{"prompt": "The quick", "completion": " brown fox", "id": 3}"#;
        let document = encoder.line(Line::parse(line).unwrap()).unwrap();
        assert_eq!(counted(&document), format!(" brown fox{eos}"));
        let text = tokenizer.decode(&document.tokens, true).unwrap();
        assert_eq!(text, format!("The quick brown fox{eos}"));

        let line = r#"{"messages": [{"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Goodbye."}, {"role": "user", "content": "No"}]}"#;
        let of_messages = encoder.line(Line::parse(line).unwrap()).unwrap();
        assert_eq!(counted(&of_messages), "Goodbye.<|im_end|>\n");

        let document = encoder.line(Line::Text("one two".into())).unwrap();
        assert_eq!(
            (document.tokens.last(), &document.mask),
            (Some(&285), &None)
        );

        // ShareGPT's conversations, and Alpaca's instructions with a template and without one.
        let line = r#"{"conversations": [{"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Goodbye."}, {"from": "human", "value": "No"}]}"#;
        assert_eq!(
            encoder.line(Line::parse(line).unwrap()).unwrap(),
            of_messages
        );
        let line = r#"{"instruction": "Add.", "input": "1 2", "output": "It is 3"}"#;
        let document = encoder.line(Line::parse(line).unwrap()).unwrap();
        assert_eq!(counted(&document), "It is 3<|im_end|>\n");
        let text = tokenizer.decode(&document.tokens, true).unwrap();
        assert!(text.contains("user\nAdd.\n\n1 2<|im_end|>"), "{text}");
        let without = Encoder::new(&tokenizer, None, Some(285));
        let document = without.line(Line::parse(line).unwrap()).unwrap();
        assert_eq!(counted(&document), format!("It is 3{eos}"));
        let text = tokenizer.decode(&document.tokens, true).unwrap();
        let end = format!("### Input:\n1 2\n\n### Response:It is 3{eos}");
        assert!(
            text.starts_with("Below is an instruction") && text.ends_with(&end),
            "{text}"
        );
        let error = without.line(Line::Messages(vec![])).unwrap_err();
        assert!(error.to_string().contains("chat template"), "{error}");
    }

    #[test]
    fn files_and_lines_become_documents() {
        let tokenizer = Tokenizer::read(&golden("llama3-tiny"), 288, &[]).unwrap();
        let folder = Scratch::new("encode");
        fs::write(folder.join("a.txt"), "The quick brown fox").unwrap();
        fs::write(folder.join("b.txt"), [0xff, 0xfe]).unwrap();
        let lines = "{\"text\": \"one\"}\n\n{\"prompt\": \"a\", \"completion\": \"b\"}\n";
        fs::write(folder.join("c.jsonl"), lines).unwrap();
        let encoder = Encoder::new(&tokenizer, None, None);
        let vocabulary = Vocabulary {
            size: 288,
            tokenizer: tokenizer.hash(),
        };
        let mut writer = ShardWriter::new(vocabulary).unwrap();
        let found = encoder
            .encode_files(&[folder.to_path_buf()], &mut writer)
            .unwrap();
        assert_eq!((found.documents, found.skipped), (3, 1));
        let path = folder.join("all.tokens");
        writer.finish(&path).unwrap();
        let shard = Shard::open(&path).unwrap();
        shard.verify().unwrap();
        assert_eq!(shard.documents(), 3);
        let mut texts: Vec<String> = (0..3)
            .map(|index| tokenizer.decode(&shard.read(shard.document(index)).unwrap(), false))
            .map(Result::unwrap)
            .collect();
        texts.sort();
        assert_eq!(texts, ["The quick brown fox", "ab", "one"]);

        fs::write(folder.join("c.jsonl"), "{\"text\": \"one\"}\n{\"text\"\n").unwrap();
        let mut writer = ShardWriter::new(vocabulary).unwrap();
        let error = encoder.encode_files(&[folder.join("c.jsonl")], &mut writer);
        let error = format!("{:#}", error.unwrap_err());
        assert!(
            error.contains("c.jsonl") && error.contains("line 2"),
            "{error}"
        );
    }

    #[test]
    fn conversations_are_counted() {
        let tokenizer = Tokenizer::read(&golden("qwen3-tiny"), 288, &[]).unwrap();
        let chat = ChatTemplate::new(CHATML.into(), String::new(), String::new()).unwrap();
        let folder = Scratch::new("encode-conversations");
        let rows = [
            r#"{"text": "one"}"#,
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
            r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}"#,
        ];
        let path = folder.join("rows.jsonl");
        fs::write(&path, rows.join("\n")).unwrap();
        let vocabulary = Vocabulary {
            size: 288,
            tokenizer: tokenizer.hash(),
        };
        let mut writer = ShardWriter::new(vocabulary).unwrap();
        let encoder = Encoder::new(&tokenizer, Some(chat), None);
        let found = encoder.encode_files(&[path], &mut writer).unwrap();
        assert_eq!((found.documents, found.conversations), (3, 2));
    }

    #[test]
    fn a_list_is_read_like_json_lines() {
        let tokenizer = Tokenizer::read(&golden("llama3-tiny"), 288, &[]).unwrap();
        let folder = Scratch::new("encode-list");
        let encoder = Encoder::new(&tokenizer, None, None);
        let vocabulary = Vocabulary {
            size: 288,
            tokenizer: tokenizer.hash(),
        };
        // Returns the shard of one file.
        let encoded = |name: &str, text: &str| -> Result<Shard> {
            let path = folder.join(name);
            fs::write(&path, text).unwrap();
            let mut writer = ShardWriter::new(vocabulary)?;
            encoder.encode_files(&[path], &mut writer)?;
            let out = folder.join("all.tokens");
            writer.finish(&out)?;
            Shard::open(&out)
        };
        let rows = [
            r#"{"instruction": "Add.", "input": "1 2", "output": "3"}"#,
            r#"{"text": "one"}"#,
        ];
        let tokens = |shard: &Shard| -> Vec<Vec<u32>> {
            let all = (0..shard.documents()).map(|index| shard.document(index));
            all.map(|document| shard.read(document).unwrap()).collect()
        };
        let list = format!("\n [{}]", rows.join(",\n"));
        let lines = encoded("rows.jsonl", &rows.join("\n")).unwrap();
        assert_eq!(
            tokens(&encoded("rows.json", &list).unwrap()),
            tokens(&lines)
        );
        assert_eq!(texts(&[folder.join("rows.json")]).unwrap().len(), 2);
        // An object is no list; in a folder it is a text, as any other file.
        let error = encoded("object.json", rows[1]).unwrap_err().to_string();
        assert!(error.contains("no list of rows"), "{error}");
        fs::remove_file(folder.join("all.tokens")).unwrap();
        let mut writer = ShardWriter::new(vocabulary).unwrap();
        let all = encoder.encode_files(&[folder.to_path_buf()], &mut writer);
        assert_eq!(all.unwrap().documents, 5);
        for (list, says) in [
            (
                r#"[{"text": "a"}, {"text": 5}]"#,
                "row 1 of the list: `text` is a number",
            ),
            (
                r#"[{"text": "a"}, {"output": "b"}]"#,
                "row 1 of the list: its keys are `output`",
            ),
            (r#"["a"]"#, "row 0 of the list: it is a text"),
            (r#"[{"text": "a"},]"#, "no list of rows"),
        ] {
            let error = format!("{:#}", encoded("rows.json", list).unwrap_err());
            assert!(
                error.contains("rows.json") && error.contains(says),
                "{error}"
            );
        }
    }
}
