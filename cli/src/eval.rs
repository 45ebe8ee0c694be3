//! `nvfp4 eval`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::eval::{Answers, ComparedWindow, Comparison, Question, choose, compare};
use nvfp4_lm::finetune::data::TextReader;
use nvfp4_lm::hf::{DecoderConfig, Tokenizer};
use serde::Serialize;

use crate::adapter;
use crate::options::shared::{InferenceOptions, JsonOption};
use crate::perplexity::{
    Difference, Error, Perplexity, TextsPerplexity, documents, perplexity, windows,
};

#[derive(Args)]
pub(crate) struct Eval {
    /// Evaluate the model in this folder, in high precision or quantized to NVFP4
    ///
    /// NVFP4 weights stay packed; GEMMs read the codes.
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Apply the LoRA adapters in this folder, in PEFT's format
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Report the perplexity of the texts in these files and folders
    ///
    /// Each row of a .jsonl file or of a list in a .json file and every other file is a separate
    /// text. A row is {"text": TEXT}, {"prompt": TEXT, "completion": TEXT} or {"messages":
    /// [{"role": ROLE, "content": TEXT}, ..]}, which the model's chat template renders, or a row of
    /// ShareGPT or Alpaca. All tokens count, also those of prompts. In a folder, files that end in
    /// .txt, .md and .jsonl and such .json files are read.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Compare with the model in this folder, which must have the same tokenizer, on the texts of
    /// --data
    ///
    /// Reports the perplexity of both models, the difference of their losses with its paired
    /// standard error, and the KL divergence of MODEL from the baseline. Holds both models in
    /// memory. --scheme applies to MODEL only, and only MODEL answers --choices.
    #[arg(long, value_name = "DIR", requires = "data")]
    baseline: Option<PathBuf>,
    /// Report the accuracy on the questions in this file
    ///
    /// Each line is JSON: {"context": TEXT, "choices": [TEXT, ..], "answer": NUMBER FROM 0}. White
    /// space between the context and a choice belongs to the choice.
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,
    /// Evaluate in windows of this many tokens [default: 2048, or the model's maximum context]
    #[arg(long, value_name = "N", requires = "data")]
    length: Option<usize>,
    /// Advance the window by this many tokens; each token counts once, in the first window that
    /// contains it [default: half a window]
    #[arg(long, value_name = "N", requires = "data")]
    stride: Option<usize>,
    #[command(flatten)]
    inference: InferenceOptions,
    #[command(flatten)]
    json: JsonOption,
}

impl Eval {
    pub(crate) fn run(self) -> Result<()> {
        ensure!(
            !self.data.is_empty() || self.choices.is_some(),
            "--data and --choices are not given, but one of them says what to evaluate"
        );
        let questions = self.choices.as_deref().map(Question::read).transpose()?;
        let config = DecoderConfig::read(&self.model)?;
        let windows = windows("length", self.length, self.stride, &config)?;
        let reader = TextReader::read(&self.model)?;
        let texts = match self.data.is_empty() {
            true => None,
            false => Some(reader.texts("data", &self.data)?),
        };
        if let Some(folder) = &self.baseline {
            ensure!(
                TextReader::read(folder)?.vocabulary() == reader.vocabulary(),
                "baseline {} has another tokenizer than {}: losses per token can only be compared \
                 for the same tokens",
                folder.display(),
                self.model.display()
            );
            let of_baseline = DecoderConfig::read(folder)?;
            of_baseline
                .check_length("the length of a window", windows.length)
                .with_context(|| format!("baseline {}: give --length", folder.display()))?;
        }
        let InferenceOptions { scheme, compute } = self.inference;
        let (_, device, dtype) = compute.open()?;
        let load =
            |folder: &Path, scheme| Decoder::load_for_inference(folder, &device, dtype, scheme);
        let model = load(&self.model, scheme)?;
        let model = adapter::applied(model, &self.model, self.adapter.as_deref())?;
        let mut found = Evaluation {
            model: self.model.clone(),
            perplexity: None,
            baseline: None,
            choices: None,
        };
        match (&texts, &self.baseline) {
            (None, _) => {}
            (Some(texts), None) => {
                found.perplexity = Some(perplexity(&model, texts, windows)?);
            }
            (Some(texts), Some(folder)) => {
                let baseline = load(folder, None)?;
                let compared = compare(&model, &baseline, &documents(texts), windows)?;
                let losses = compared.iter().map(ComparedWindow::model).collect();
                found.perplexity = Some(TextsPerplexity::new(texts, windows, losses));
                found.baseline = Some(Baseline::new(folder.clone(), &compared));
            }
        }
        if let Some(questions) = questions {
            found.choices = Some(answers(&model, reader.tokenizer(), &questions)?);
        }
        self.json.print(&found, Evaluation::lines)
    }
}

/// Result of the command.
#[derive(Serialize)]
struct Evaluation {
    model: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<TextsPerplexity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline: Option<Baseline>,
    #[serde(skip_serializing_if = "Option::is_none")]
    choices: Option<Choices>,
}

/// Comparison with the baseline.
#[derive(Serialize)]
struct Baseline {
    model: PathBuf,
    perplexity: Perplexity,
    difference: Difference,
    kl_divergence: Difference,
    windows: usize,
}

/// Shares of right answers, from 0 to 1.
#[derive(Serialize)]
struct Choices {
    questions: usize,
    share: f64,
    share_error: Error,
    share_by_byte: f64,
    share_by_byte_error: Error,
    /// Number of questions beyond the model's maximum context.
    beyond_context: usize,
    context: usize,
}

impl Baseline {
    fn new(model: PathBuf, compared: &[ComparedWindow]) -> Self {
        let Comparison {
            baseline,
            difference,
            divergence,
            ..
        } = Comparison::over(compared);
        Self {
            model,
            perplexity: baseline.into(),
            difference: difference.into(),
            kl_divergence: divergence.into(),
            windows: compared.len(),
        }
    }
}

impl Evaluation {
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(found) = &self.perplexity {
            lines.extend(found.lines());
        }
        if let Some(found) = &self.baseline {
            let Baseline {
                model,
                perplexity,
                difference,
                kl_divergence,
                windows,
            } = found;
            lines.push(format!(
                "baseline {}: {}",
                model.display(),
                perplexity.text()
            ));
            lines.push(format!(
                "difference {}, over {windows} window(s) that both models read; KL divergence {}",
                difference.text(true),
                kl_divergence.text(false)
            ));
        }
        if let Some(found) = &self.choices {
            let percent = |share: f64, error: &Error| {
                format!("{:.2}{} %", 1e2 * share, error.times(1e2).text(2))
            };
            lines.push(format!(
                "right answers {}, by mean of bytes {}; {} questions",
                percent(found.share, &found.share_error),
                percent(found.share_by_byte, &found.share_by_byte_error),
                found.questions
            ));
            if found.beyond_context > 0 {
                lines.push(format!(
                    "{} questions are longer than the {} positions that the model is meant for",
                    found.beyond_context, found.context
                ));
            }
        }
        lines
    }
}

fn answers(model: &Decoder, tokenizer: &Tokenizer, questions: &[Question]) -> Result<Choices> {
    let Answers {
        plain,
        normalized,
        beyond,
    } = choose(model, tokenizer, questions)?;
    Ok(Choices {
        questions: questions.len(),
        share: plain.share,
        share_error: plain.error.into(),
        share_by_byte: normalized.share,
        share_by_byte_error: normalized.error.into(),
        beyond_context: beyond,
        context: model.config().max_positions,
    })
}
