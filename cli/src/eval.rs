//! `nvfp4 eval`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_lm::decoder::Decoder;
use nvfp4_lm::eval::{CrossEntropy, Question, Windows, choose, cross_entropy};
use nvfp4_lm::hf::{DecoderConfig, GenerationConfig, Tokenizer};

use crate::adapter;
use crate::layers::LayerBar;
use crate::options::shared::InferenceOptions;

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
    /// Report the perplexity of these text files, each evaluated separately
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Report the accuracy on the questions in this file
    ///
    /// Each line is JSON: {"context": TEXT, "choices": [TEXT, ..], "answer": NUMBER FROM 0}. White
    /// space between the context and a choice belongs to the choice.
    #[arg(long, value_name = "FILE")]
    choices: Option<PathBuf>,
    /// Evaluate in windows of this many tokens [default: 2048, or the model's maximum context]
    #[arg(long, value_name = "N")]
    length: Option<usize>,
    /// Advance the window by this many tokens; each token counts once, in the first window that
    /// contains it [default: half a window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    #[command(flatten)]
    inference: InferenceOptions,
}

impl Eval {
    pub(crate) fn run(self) -> Result<()> {
        ensure!(
            !self.data.is_empty() || self.choices.is_some(),
            "data and choices are not given, but one of them says what to evaluate"
        );
        let questions = self.choices.as_deref().map(Question::read).transpose()?;
        let texts = read_texts(&self.data)?;
        let config = DecoderConfig::read(&self.model)?;
        let windows = windows("length", self.length, self.stride, &config)?;
        let InferenceOptions { scheme, compute } = self.inference;
        let (_, device, dtype) = compute.open()?;
        let model = Decoder::load_for_inference(&self.model, &device, dtype, scheme)?;
        let model = adapter::applied(model, &self.model, self.adapter.as_deref())?;
        let tokenizer = tokenizer(&self.model, &model)?;
        if !texts.is_empty() {
            let found = perplexity(&model, &tokenizer, &texts, windows)?;
            println!("{}", describe(&found, windows));
        }
        if let Some(questions) = questions {
            answers(&model, &tokenizer, &questions)?;
        }
        Ok(())
    }
}

/// Reads the contents of `files`.
pub(crate) fn read_texts(files: &[PathBuf]) -> Result<Vec<String>> {
    let texts = files
        .iter()
        .map(|file| fs::read_to_string(file).with_context(|| file.display().to_string()));
    texts.collect()
}

/// Loads the tokenizer in `folder`, the folder of `model`.
pub(crate) fn tokenizer(folder: &Path, model: &Decoder) -> Result<Tokenizer> {
    let settings = GenerationConfig::read(folder, model.config())?;
    Tokenizer::read(folder, model.config().vocab, &settings.eos)
}

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

/// Computes the cross entropy of `texts` and shows a progress bar.
pub(crate) fn perplexity(
    model: &Decoder,
    tokenizer: &Tokenizer,
    texts: &[String],
    windows: Windows,
) -> Result<CrossEntropy> {
    let tokens = texts.iter().map(|text| tokenizer.encode_text(text));
    let tokens: Vec<Vec<u32>> = tokens.collect::<Result<_>>()?;
    let mut bar = LayerBar::new("perplexity");
    let show = &mut |done, total| bar.show(done, total, "tokens");
    let found = cross_entropy(model, &tokens, windows, show)?;
    bar.finish();
    Ok(found)
}

/// Formats `found` as one line.
pub(crate) fn describe(found: &CrossEntropy, windows: Windows) -> String {
    let (perplexity, error) = (found.perplexity(), found.perplexity_error());
    let values = match found.error.is_finite() {
        true => format!(
            "perplexity {perplexity:.4} ± {error:.4}; {:.5} ± {:.5} nats a token",
            found.mean, found.error
        ),
        // A single window.
        false => format!(
            "perplexity {perplexity:.4}; {:.5} nats a token (one window: no error is known)",
            found.mean
        ),
    };
    format!(
        "{values}, {} tokens in windows of {} by {}",
        found.tokens, windows.length, windows.stride
    )
}

fn answers(model: &Decoder, tokenizer: &Tokenizer, questions: &[Question]) -> Result<()> {
    let mut bar = LayerBar::new("choices");
    let show = &mut |done, total| bar.show(done, total, "questions");
    let found = choose(model, tokenizer, questions, show)?;
    bar.finish();
    println!(
        "right answers {:.2} ± {:.2} %, by mean of bytes {:.2} ± {:.2} %; {} questions",
        1e2 * found.plain.share,
        1e2 * found.plain.error,
        1e2 * found.normalized.share,
        1e2 * found.normalized.error,
        questions.len()
    );
    if found.beyond > 0 {
        println!(
            "{} questions are longer than the {} positions that the model is meant for",
            found.beyond,
            model.config().max_positions
        );
    }
    Ok(())
}
