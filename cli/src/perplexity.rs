//! Perplexity of texts: computation and report.

use std::path::PathBuf;

use anyhow::Result;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::eval::{CrossEntropy, Estimate, WindowLoss, Windows, window_losses};
use nvfp4_lm::hf::DecoderConfig;
use nvfp4_lm::tokens::Texts;
use serde::Serialize;

use crate::table::table;

/// Default number of tokens per window, unless the model's maximum context is shorter.
const WINDOW: usize = 2048;

/// Returns the evaluation windows of a model: the length that the option `name` gives, and `stride`
/// or half the length.
pub(crate) fn windows(
    name: &str,
    length: Option<usize>,
    stride: Option<usize>,
    config: &DecoderConfig,
) -> Result<Windows> {
    config.check_length(name, length.unwrap_or(0))?;
    let length = length.unwrap_or(WINDOW.min(config.longest()));
    let windows = Windows {
        length,
        stride: stride.unwrap_or(length.div_ceil(2)),
    };
    windows.check()?;
    Ok(windows)
}

/// A standard error; none from a single window or question.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(transparent)]
pub(crate) struct Error(Option<f64>);

impl From<f64> for Error {
    fn from(error: f64) -> Self {
        Self(error.is_finite().then_some(error))
    }
}

impl Error {
    pub(crate) fn times(self, factor: f64) -> Self {
        Self(self.0.map(|error| factor * error))
    }

    /// Formats the error after its value; empty without one.
    pub(crate) fn text(self, digits: usize) -> String {
        self.0
            .map_or_else(String::new, |error| format!(" ± {error:.digits$}"))
    }
}

/// Perplexity of some texts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Perplexity {
    perplexity: f64,
    perplexity_error: Error,
    nats_per_token: f64,
    nats_error: Error,
    /// Number of counted tokens.
    tokens: usize,
}

impl From<CrossEntropy> for Perplexity {
    fn from(found: CrossEntropy) -> Self {
        Self {
            perplexity: found.perplexity(),
            perplexity_error: found.perplexity_error().into(),
            nats_per_token: found.mean,
            nats_error: found.error.into(),
            tokens: found.tokens,
        }
    }
}

impl Perplexity {
    /// Formats perplexity and loss.
    pub(crate) fn text(&self) -> String {
        format!(
            "perplexity {:.4}{}; {:.5}{} nats a token{}",
            self.perplexity,
            self.perplexity_error.text(4),
            self.nats_per_token,
            self.nats_error.text(5),
            match self.nats_error {
                Error(None) => " (one window: no error is known)",
                Error(Some(_)) => "",
            }
        )
    }
}

/// An estimate in nats per token.
#[derive(Serialize)]
pub(crate) struct Difference {
    nats_per_token: f64,
    error: Error,
}

impl From<Estimate> for Difference {
    fn from(found: Estimate) -> Self {
        Self {
            nats_per_token: found.mean,
            error: found.error.into(),
        }
    }
}

impl Difference {
    /// Formats the estimate; with `sign`, also the plus.
    pub(crate) fn text(&self, sign: bool) -> String {
        let mean = self.nats_per_token;
        let mean = match sign {
            true => format!("{mean:+.5}"),
            false => format!("{mean:.5}"),
        };
        format!("{mean}{} nats a token", self.error.text(5))
    }
}

/// Perplexity of the texts of an option.
#[derive(Serialize)]
pub(crate) struct TextsPerplexity {
    #[serde(flatten)]
    all: Perplexity,
    /// Tokens per window.
    length: usize,
    /// Distance between windows.
    stride: usize,
    files: Vec<FilePerplexity>,
    /// Files and documents that are not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<String>,
    #[serde(skip)]
    losses: Vec<WindowLoss>,
}

/// Perplexity of one file.
#[derive(Serialize)]
struct FilePerplexity {
    path: PathBuf,
    documents: usize,
    #[serde(flatten)]
    found: Perplexity,
}

impl TextsPerplexity {
    /// Summarizes `losses`, those of the windows over the documents of `texts`.
    pub(crate) fn new(texts: &Texts, windows: Windows, losses: Vec<WindowLoss>) -> Self {
        let mut files = Vec::new();
        let mut begin = 0;
        for file in &texts.files {
            let end = begin + file.documents.len();
            let own = losses.iter().filter(|it| (begin..end).contains(&it.text));
            let own: Vec<WindowLoss> = own.copied().collect();
            files.push(FilePerplexity {
                path: file.path.clone(),
                documents: file.documents.len(),
                found: CrossEntropy::over(&own).into(),
            });
            begin = end;
        }
        Self {
            all: CrossEntropy::over(&losses).into(),
            length: windows.length,
            stride: windows.stride,
            files,
            left_out: texts.left_out(),
            losses,
        }
    }

    /// Returns the losses of the windows.
    pub(crate) fn losses(&self) -> &[WindowLoss] {
        &self.losses
    }

    /// Formats the perplexity of all texts.
    pub(crate) fn line(&self) -> String {
        format!(
            "{}, {} tokens in windows of {} by {}",
            self.all.text(),
            self.all.tokens,
            self.length,
            self.stride
        )
    }

    /// Formats the perplexity of all texts and, if there are several, of each file.
    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.line()];
        if self.files.len() > 1 {
            let head = ["file", "documents", "tokens", "perplexity", "nats a token"];
            let mut rows = vec![head.map(String::from).to_vec()];
            rows.extend(self.files.iter().map(|file| {
                let FilePerplexity {
                    path,
                    documents,
                    found,
                } = file;
                vec![
                    path.display().to_string(),
                    documents.to_string(),
                    found.tokens.to_string(),
                    format!("{:.4}{}", found.perplexity, found.perplexity_error.text(4)),
                    format!("{:.5}{}", found.nats_per_token, found.nats_error.text(5)),
                ]
            }));
            lines.extend(table("lrrrr", &rows));
        }
        lines.extend(self.left_out.clone());
        lines
    }
}

/// Returns the documents of `texts`.
pub(crate) fn documents(texts: &Texts) -> Vec<Vec<u32>> {
    let files = texts.files.iter();
    files
        .flat_map(|file| file.documents.iter().cloned())
        .collect()
}

/// Computes the perplexity of `texts`.
pub(crate) fn perplexity(
    model: &Decoder,
    texts: &Texts,
    windows: Windows,
) -> Result<TextsPerplexity> {
    let losses = window_losses(model, &documents(texts), windows)?;
    Ok(TextsPerplexity::new(texts, windows, losses))
}
