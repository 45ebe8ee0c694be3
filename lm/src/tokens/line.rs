//! Rows of JSON in training data, one per line or in one list: the forms of a document.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::chat::Message;
use crate::hf::tensors::list;
use crate::progress::Work;

/// Extension of files with one row per line.
pub(crate) const JSON_LINES: &str = "jsonl";
/// Extension of files that may hold a list of rows.
pub(crate) const JSON: &str = "json";

/// Extensions of tables, whose rows are not read.
const TABLES: [&str; 6] = ["arrow", "csv", "feather", "parquet", "tsv", "xlsx"];

/// Keys that select the form of a row.
const FORMS: [&str; 5] = ["text", "prompt", "messages", "conversations", "instruction"];

/// A document of a row of JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// `{"text"}`.
    Text(String),
    /// `{"prompt", "completion"}`.
    Completion {
        /// Text before the completion.
        prompt: String,
        /// Text that counts in the loss.
        completion: String,
    },
    /// `{"messages": [{"role", "content"}]}`, or ShareGPT's `{"conversations": [{"from", "value"}]}`.
    Messages(Vec<Message>),
    /// Alpaca's `{"instruction", "input", "output"}`.
    Instruction(Instruction),
}

/// An instruction and its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Task.
    pub instruction: String,
    /// Context of the task; may be empty.
    pub input: String,
    /// Answer, which counts in the loss.
    pub output: String,
}

impl Instruction {
    /// Returns the prompt in the published format of Alpaca, whose answer follows immediately.
    pub fn prompt(&self) -> String {
        let Self {
            instruction, input, ..
        } = self;
        match input.is_empty() {
            true => format!(
                "Below is an instruction that describes a task. Write a response that \
                 appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### \
                 Response:"
            ),
            false => format!(
                "Below is an instruction that describes a task, paired with an input that provides \
                 further context. Write a response that appropriately completes the \
                 request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### \
                 Response:"
            ),
        }
    }

    /// Returns the conversation for a chat template: instruction and input, separated by an empty
    /// line, and the answer.
    pub fn messages(&self) -> [Message; 2] {
        let user = match self.input.is_empty() {
            true => self.instruction.clone(),
            false => format!("{}\n\n{}", self.instruction, self.input),
        };
        [
            Message::new("user", user),
            Message::new("assistant", &*self.output),
        ]
    }
}

impl Line {
    /// Parses a line of JSON lines.
    ///
    /// # Errors
    /// Returns an error that names the key if the line has none of the forms.
    pub fn parse(line: &str) -> Result<Self> {
        Self::from_json(serde_json::from_str(line).context("it is no JSON object")?)
    }

    /// Reads a row. Keys that belong to no form are ignored, except those that would change the
    /// document: `tools`, which templates would render, and `system` and `history` of an
    /// instruction.
    ///
    /// # Errors
    /// Returns an error that names the key if the row has none of the forms.
    fn from_json(row: Value) -> Result<Self> {
        let Value::Object(fields) = row else {
            bail!("it is {}, but must be a JSON object", kind(&row));
        };
        ensure!(
            fields.get("tools").is_none_or(Value::is_null),
            "`tools` are given, but conversations with tools are not supported"
        );
        let found: Vec<&str> = FORMS
            .into_iter()
            .filter(|form| fields.contains_key(*form))
            .collect();
        match found[..] {
            ["text"] => Ok(Self::Text(text(&fields, "text")?)),
            ["prompt"] => Ok(Self::Completion {
                prompt: text(&fields, "prompt")?,
                completion: answer(&fields, "completion")?,
            }),
            ["messages"] => messages(&fields, "messages", ["role", "content"]).map(Self::Messages),
            ["conversations"] => share_gpt(&fields).map(Self::Messages),
            // The published file of Alpaca has prompt and answer as `text`, too.
            ["instruction"] | ["text", "instruction"] => {
                instruction(&fields).map(Self::Instruction)
            }
            _ => {
                let keys: Vec<String> = fields.keys().map(|key| format!("`{key}`")).collect();
                bail!(
                    "its keys are {}, but it must have one of `text`, `prompt` (with `completion`), \
                     `messages`, `conversations` and `instruction` (with `output`)",
                    match keys.is_empty() {
                        true => "none".into(),
                        false => list(&keys),
                    }
                )
            }
        }
    }
}

/// Checks that the files among `paths`, those of the option `option`, are in a format that is read:
/// no tables, and no `.json` files without a list of rows. Files in folders are not checked.
///
/// # Errors
/// Returns an error that names the file and the formats.
pub(crate) fn check_formats(option: &str, paths: &[PathBuf]) -> Result<()> {
    for path in paths.iter().filter(|path| path.is_file()) {
        let end = path.extension().and_then(|end| end.to_str());
        let end = end.unwrap_or_default().to_ascii_lowercase();
        let problem = match &*end {
            JSON if !begins_a_list(path) => "is JSON, but no list of rows",
            table if TABLES.contains(&table) => "is a table",
            _ => continue,
        };
        bail!(
            "{option} {} {problem}, and would be read as plain text: give one row of JSON per line \
             (.jsonl), a list of them (.json), or text in a file with another ending, such as .txt",
            path.display()
        );
    }
    Ok(())
}

/// Returns true if the file `path` begins with `[`, after at most 63 bytes of white space.
pub(crate) fn begins_a_list(path: &Path) -> bool {
    let mut begin = Vec::new();
    let read = File::open(path).and_then(|file| file.take(64).read_to_end(&mut begin));
    read.is_ok() && has_rows(path, &String::from_utf8_lossy(&begin))
}

/// Returns true if the file `path`, which contains `text`, holds rows: JSON lines, or a `.json`
/// file with a list. Any other `.json` file is a text.
pub(crate) fn has_rows(path: &Path, text: &str) -> bool {
    let ends = |extension: &str| path.extension().is_some_and(|end| end == extension);
    ends(JSON_LINES) || (ends(JSON) && text.trim_start().starts_with('['))
}

/// Calls `each` with the rows of the file `path`, which [holds rows](has_rows) and contains `text`.
/// Empty lines are skipped. Adds the bytes of `text` to `work`.
///
/// # Errors
/// Returns an error if a row is not a document, and the errors of `each`. The error gives the line
/// number, or the index of a row in its list.
pub(crate) fn each_row(
    path: &Path,
    text: &str,
    work: &mut Work,
    mut each: impl FnMut(Line) -> Result<()>,
) -> Result<()> {
    if path.extension().is_some_and(|end| end == JSON) {
        let rows: Vec<Value> =
            serde_json::from_str(text).context("it begins with `[`, but is no list of rows")?;
        let bytes = text.len() / rows.len().max(1);
        for (index, row) in rows.into_iter().enumerate() {
            let row = Line::from_json(row).and_then(&mut each);
            row.with_context(|| format!("row {index} of the list"))?;
            work.add(bytes);
        }
        return Ok(());
    }
    let lines = text.lines().zip(1..);
    for (line, number) in lines.filter(|(line, _)| !line.trim().is_empty()) {
        let row = Line::parse(line).and_then(&mut each);
        row.with_context(|| format!("line {number}"))?;
        work.add(line.len() + 1);
    }
    Ok(())
}

fn instruction(fields: &Map<String, Value>) -> Result<Instruction> {
    for key in ["system", "history"] {
        let value = fields.get(key).unwrap_or(&Value::Null);
        ensure!(
            value.is_null() || *value == "" || *value == Value::Array(vec![]),
            "`{key}` is given, but not supported with `instruction`: give the conversation as \
             `messages`"
        );
    }
    let has_input = fields.get("input").is_some_and(|input| !input.is_null());
    Ok(Instruction {
        instruction: text(fields, "instruction")?,
        input: match has_input {
            true => text(fields, "input")?,
            false => String::new(),
        },
        output: answer(fields, "output")?,
    })
}

/// Reads a conversation of ShareGPT.
fn share_gpt(fields: &Map<String, Value>) -> Result<Vec<Message>> {
    let key = "conversations";
    let mut messages = messages(fields, key, ["from", "value"])?;
    for (index, message) in messages.iter_mut().enumerate() {
        message.role = match &*message.role {
            "human" => "user",
            "gpt" => "assistant",
            "system" => "system",
            other => {
                bail!("`{key}[{index}]`: `from` is {other:?}, but must be human, gpt or system")
            }
        }
        .into();
    }
    Ok(messages)
}

/// Reads the list `key` of messages, objects with the keys `names` of role and content.
fn messages(fields: &Map<String, Value>, key: &str, names: [&str; 2]) -> Result<Vec<Message>> {
    let Value::Array(items) = &fields[key] else {
        bail!("`{key}` is {}, but must be a list", kind(&fields[key]));
    };
    let message = |item: &Value| {
        let Value::Object(fields) = item else {
            bail!("it is {}, but must be an object", kind(item));
        };
        let [role, content] = names;
        if let Some(other) = fields.keys().find(|name| !names.contains(&&***name)) {
            bail!("it has `{other}`, but must have only `{role}` and `{content}`");
        }
        Ok(Message {
            role: text(fields, role)?,
            content: text(fields, content)?,
        })
    };
    let items = items.iter().enumerate();
    items
        .map(|(index, item)| message(item).with_context(|| format!("`{key}[{index}]`")))
        .collect()
}

/// Reads the text `key`.
fn text(fields: &Map<String, Value>, key: &str) -> Result<String> {
    match fields.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => bail!("`{key}` is {}, but must be a text", kind(other)),
        None => bail!("`{key}` is missing"),
    }
}

/// Reads the text `key`, which counts in the loss.
fn answer(fields: &Map<String, Value>, key: &str) -> Result<String> {
    let text = text(fields, key)?;
    ensure!(
        !text.is_empty(),
        "`{key}` is empty, but it is what counts in the loss"
    );
    Ok(text)
}

/// Returns the kind of a value.
const fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nvfp4_test_support::Scratch;

    use super::*;

    #[test]
    fn tables_and_json_without_rows_are_refused() {
        let folder = Scratch::new("formats");
        let path = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let object = "{\n  \"text\": \"one\"\n}\n";
        for (name, text, says) in [
            ("a.csv", "prompt,completion\na,b\n", "is a table"),
            ("a.TSV", "a\tb\n", "is a table"),
            ("a.parquet", "PAR1", "is a table"),
            ("a.json", object, "is JSON, but no list of rows"),
        ] {
            let path = path(name, text);
            let error = check_formats("data", std::slice::from_ref(&path)).unwrap_err();
            let error = error.to_string();
            assert!(
                error.starts_with(&format!("data {} {says}", path.display()))
                    && error.contains(".jsonl"),
                "{error}"
            );
        }
        let read = [
            path("b.json", " [{\"text\": \"one\"}]"),
            path("b.jsonl", "{\"text\": \"one\"}"),
            path("b.txt", object),
            path("b", "text"),
            // A folder of programs has such files, too.
            folder.to_path_buf(),
        ];
        check_formats("data", &read).unwrap();
    }

    #[test]
    fn lines_have_five_forms() {
        let talk = || {
            vec![
                Message::new("system", "Be brief."),
                Message::new("user", "One?"),
                Message::new("assistant", "1"),
            ]
        };
        let instruction = |input: &str| {
            Line::Instruction(Instruction {
                instruction: "Add.".into(),
                input: input.into(),
                output: "3".into(),
            })
        };
        for (line, expected) in [
            (r#"{"text": "a", "id": 1}"#, Line::Text("a".into())),
            (
                r#"{"prompt": "a", "completion": "b"}"#,
                Line::Completion {
                    prompt: "a".into(),
                    completion: "b".into(),
                },
            ),
            (
                r#"{"messages": [{"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "One?"}, {"content": "1", "role": "assistant"}]}"#,
                Line::Messages(talk()),
            ),
            (
                r#"{"id": "x", "conversations": [{"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]}"#,
                Line::Messages(talk()),
            ),
            (
                r#"{"instruction": "Add.", "input": "1 2", "output": "3", "text": "all"}"#,
                instruction("1 2"),
            ),
            (
                r#"{"instruction": "Add.", "input": null, "output": "3", "history": []}"#,
                instruction(""),
            ),
            (r#"{"instruction": "Add.", "output": "3"}"#, instruction("")),
        ] {
            assert_eq!(Line::parse(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said_by_its_key() {
        for (line, says) in [
            ("[", "no JSON object"),
            ("[]", "it is a list, but must be a JSON object"),
            (r#"{"words": "a"}"#, "`text`"),
            (r#"{"text": "a", "prompt": "b"}"#, "prompt"),
            (r#"{"text": 5}"#, "`text` is a number"),
            (r#"{"prompt": "a"}"#, "`completion` is missing"),
            (
                r#"{"prompt": ["a"], "completion": "b"}"#,
                "`prompt` is a list",
            ),
            (
                r#"{"prompt": "a", "completion": ""}"#,
                "`completion` is empty",
            ),
            (r#"{"messages": "a"}"#, "`messages` is a text"),
            (r#"{"messages": ["a"]}"#, "`messages[0]`: it is a text"),
            (
                r#"{"messages": [{"role": "user"}]}"#,
                "`messages[0]`: `content` is missing",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a", "weight": 0}]}"#,
                "`messages[0]`: it has `weight`",
            ),
            (r#"{"messages": [], "tools": [1]}"#, "tools"),
            (
                r#"{"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]}"#,
                "`conversations[1]`: `from` is \"bot\"",
            ),
            (
                r#"{"conversations": [{"from": "human", "value": null}]}"#,
                "`conversations[0]`: `value` is null",
            ),
            (
                r#"{"conversations": [{"role": "user", "content": "a"}]}"#,
                "`conversations[0]`: it has",
            ),
            (r#"{"instruction": "a"}"#, "`output` is missing"),
            (r#"{"instruction": "a", "output": ""}"#, "`output` is empty"),
            (
                r#"{"instruction": "a", "input": 5, "output": "b"}"#,
                "`input` is a number",
            ),
            (
                r#"{"instruction": "a", "output": "b", "history": [["c", "d"]]}"#,
                "`history` is given",
            ),
            (
                r#"{"instruction": "a", "output": "b", "system": "c"}"#,
                "`system` is given",
            ),
            (
                r#"{"instruction": "a", "output": "b", "messages": []}"#,
                "its keys are `instruction`, `messages`, `output`",
            ),
        ] {
            let error = format!("{:#}", Line::parse(line).unwrap_err());
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    /// The formats of Stanford's `train.py`.
    #[test]
    fn instructions_have_the_prompt_of_alpaca() {
        let mut row = Instruction {
            instruction: "Add the numbers.".into(),
            input: "1 2".into(),
            output: "3".into(),
        };
        assert_eq!(
            row.prompt(),
            "Below is an instruction that describes a task, paired with an input that provides \
             further context. Write a response that appropriately completes the request.\n\n### \
             Instruction:\nAdd the numbers.\n\n### Input:\n1 2\n\n### Response:"
        );
        assert_eq!(row.messages()[0].content, "Add the numbers.\n\n1 2");
        row.input.clear();
        assert_eq!(
            row.prompt(),
            "Below is an instruction that describes a task. Write a response that appropriately \
             completes the request.\n\n### Instruction:\nAdd the numbers.\n\n### Response:"
        );
        assert_eq!(
            row.messages(),
            [
                Message::new("user", "Add the numbers."),
                Message::new("assistant", "3")
            ]
        );
    }
}
