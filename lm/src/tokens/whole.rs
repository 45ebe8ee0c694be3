//! Reads texts whole, for calibration and evaluation: every token counts.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::encode::{Encoder, is_shard};
use super::line::{JSON, JSON_LINES, begins_a_list, check_formats, each_row, has_rows};
use crate::data::wanted_files;
use crate::hf::Tokenizer;
use crate::progress::Work;

/// Extensions of the files that are read in a folder, besides `.json` files with a list of rows.
const EXTENSIONS: [&str; 3] = ["txt", "md", JSON_LINES];
/// Fewest tokens of a document: the first has nothing before it.
const FEWEST: usize = 2;

/// The texts of an option.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    /// Files in the order of the option; those of a folder are sorted by path.
    pub files: Vec<TextFile>,
    /// Number of files in folders that are not read, because they do not end in .txt, .md or .jsonl
    /// and are no lists of rows.
    pub other_files: usize,
}

/// The documents of a file: its rows, or the text of a file without rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextFile {
    /// Path of the file.
    pub path: PathBuf,
    /// Tokens of each document.
    pub documents: Vec<Vec<u32>>,
    /// Number of documents left out because they have fewer than two tokens.
    pub short: usize,
}

impl Texts {
    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.files.iter().map(TextFile::tokens).sum()
    }

    /// Describes files and documents that are not read, if any.
    pub fn left_out(&self) -> Option<String> {
        let short: usize = self.files.iter().map(|file| file.short).sum();
        let parts = [
            (
                short,
                "documents are left out because they have fewer than two tokens",
            ),
            (
                self.other_files,
                "files in folders are left out because they do not end in .txt, .md or .jsonl, and \
                 are no .json files with a list of rows",
            ),
        ];
        let parts = parts.into_iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

impl TextFile {
    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.documents.iter().map(Vec::len).sum()
    }
}

/// Lists the files of `paths`, which are those of `option`; also returns the number of files in
/// folders that are not read.
pub(crate) fn list(option: &str, paths: &[PathBuf]) -> Result<(Vec<PathBuf>, usize)> {
    check_formats(option, paths)?;
    wanted_files(option, paths, |path| {
        let end = path.extension();
        let is_listed = |end: &OsStr| EXTENSIONS.iter().any(|extension| end == *extension);
        end.is_some_and(|end| is_listed(end) || (end == JSON && begins_a_list(path)))
    })
}

/// Returns true if `path` may hold rows, for which the chat template is needed.
pub(crate) fn may_have_rows(path: &Path) -> bool {
    has_rows(path, "[")
}

/// Reads the documents of `path`, a file of `option`, and adds its bytes to `work`.
///
/// # Errors
/// Returns an error if the file cannot be read, is not UTF-8 text, or has no token besides special
/// ones, or if a row is not a document; the error gives the line number or the index of the row.
pub(crate) fn read(
    option: &str,
    path: PathBuf,
    encoder: &Encoder<'_>,
    tokenizer: &Tokenizer,
    work: &mut Work,
) -> Result<TextFile> {
    let name = || format!("{option} {}", path.display());
    ensure!(
        !is_shard(&path),
        "{} is of tokens, but must be text: .txt, .md, .jsonl, .json",
        name()
    );
    let bytes = fs::read(&path).with_context(name)?;
    let text = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", name()))?;
    let all = match has_rows(&path, &text) {
        false => {
            let one = tokenizer.encode_text(&text).with_context(name)?;
            work.add(text.len());
            vec![one]
        }
        true => {
            let mut all = Vec::new();
            let rows = each_row(&path, &text, work, |row| {
                all.push(encoder.whole_line(row)?);
                Ok(())
            });
            rows.with_context(name)?;
            all
        }
    };
    let count = all.len();
    let documents: Vec<Vec<u32>> = (all.into_iter())
        .filter(|tokens| tokens.len() >= FEWEST)
        .collect();
    let mut has_text = false;
    for tokens in &documents {
        if !tokenizer.decode(tokens, false)?.is_empty() {
            has_text = true;
            break;
        }
    }
    ensure!(
        has_text,
        "{} has no token of its own, or only one: give a file with text",
        name()
    );
    Ok(TextFile {
        short: count - documents.len(),
        documents,
        path,
    })
}
