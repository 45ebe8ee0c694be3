//! Evaluates a model: perplexity of texts, and accuracy on multiple-choice questions.
//!
//! Both use [`log_probabilities`], the log-probability of each token given the tokens before it.
//! [`compare`](mod@compare) evaluates two models on the same windows.

pub mod compare;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{Int, Tensor, TensorData, activation::log_softmax};
use serde::Deserialize;

use crate::decoder::Decoder;
use crate::hf::Tokenizer;
use crate::progress::{Unit, Work};
use crate::sampling::first_best;

pub use compare::{ComparedWindow, Comparison, Estimate, compare};

/// Number of tokens whose logits are in memory at a time.
const CHUNK: usize = 256;

/// Returns the natural logarithm of the probability of each token in `tokens` except the first,
/// given the tokens before it.
///
/// # Errors
/// Returns an error if there are fewer than two tokens, or if the model fails.
pub fn log_probabilities(model: &Decoder, tokens: &[u32]) -> Result<Vec<f32>> {
    ensure!(
        tokens.len() > 1,
        "tokens are {}, but must be at least two: the first has nothing before it",
        tokens.len()
    );
    let features = features(model, tokens)?;
    let [count, _] = features.dims();
    let mut found = Vec::with_capacity(count);
    for begin in (0..count).step_by(CHUNK) {
        let rows = CHUNK.min(count - begin);
        let logits = model.logits(features.clone().narrow(0, begin, rows));
        let targets = targets(model, &tokens[begin + 1..][..rows]);
        let own = log_softmax(logits, 1).gather(1, targets).into_data();
        found.extend(own.iter::<f32>());
    }
    Ok(found)
}

/// Returns the features, `[tokens - 1, width]`, of all tokens except the last, each given the
/// tokens before it.
fn features(model: &Decoder, tokens: &[u32]) -> Result<Tensor<2>> {
    let count = tokens.len() - 1;
    let inputs = TensorData::new(ids(&tokens[..count]), [1, count]);
    let inputs = Tensor::<2, Int>::from_data(inputs, &model.device());
    let features = model.features(inputs)?;
    let width = features.dims()[2];
    Ok(features.reshape([count, width]))
}

/// Returns the indices, `[tokens, 1]`, of `tokens` on the device of `model`.
fn targets(model: &Decoder, tokens: &[u32]) -> Tensor<2, Int> {
    let data = TensorData::new(ids(tokens), [tokens.len(), 1]);
    Tensor::from_data(data, &model.device())
}

fn ids(tokens: &[u32]) -> Vec<i32> {
    tokens.iter().map(|&id| id as i32).collect()
}

/// Overlapping windows over a text that is longer than the model's context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens per window.
    pub length: usize,
    /// Distance between the starts of consecutive windows, in tokens. A window counts the tokens
    /// that the previous windows have not counted. Except in the first window, each counted token
    /// has at least `length - stride` tokens of context.
    pub stride: usize,
}

impl Windows {
    /// Returns the start and end of each window over `tokens`, and the first token of the window
    /// that counts.
    fn over(self, tokens: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut counted = 1;
        let begins = (0..tokens).step_by(self.stride);
        begins.map_while(move |begin| {
            let end = (begin + self.length).min(tokens);
            let first = counted;
            counted = end;
            (first < end).then_some((begin, end, first))
        })
    }

    /// # Errors
    /// Returns an error if a window has fewer than two tokens, or if the stride is not from 1 to
    /// `length - 1`.
    pub fn check(self) -> Result<()> {
        let Self { length, stride } = self;
        ensure!(
            length > 1,
            "length is {length}, but it must be at least 2 tokens"
        );
        ensure!(
            (1..length).contains(&stride),
            "stride is {stride}, but it must be from 1 to {}, less than the window of {length} tokens: \
             the first token of a window has nothing before it",
            length - 1
        );
        Ok(())
    }
}

/// Cross entropy of texts, in nats per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Number of counted tokens.
    pub tokens: usize,
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean, with windows as clusters, because the tokens of one text are not
    /// independent. Infinite for a single window.
    pub error: f64,
}

impl CrossEntropy {
    /// Computes the cross entropy of `windows`, one or more.
    pub fn over(windows: &[WindowLoss]) -> Self {
        let windows: Vec<(usize, f64)> = windows.iter().map(|it| (it.tokens, it.nats)).collect();
        Self::of(&windows)
    }

    /// Computes the cross entropy from the token count and the nats of each window.
    fn of(windows: &[(usize, f64)]) -> Self {
        let tokens: usize = windows.iter().map(|window| window.0).sum();
        let count = tokens as f64;
        let mean = windows.iter().map(|window| window.1).sum::<f64>() / count;
        // Variance of a ratio of sums over clusters of different sizes.
        let off = |&(tokens, nats): &(usize, f64)| (nats - mean * tokens as f64).powi(2);
        let squares: f64 = windows.iter().map(off).sum();
        let clusters = windows.len() as f64;
        let error = match windows.len() {
            1 => f64::INFINITY,
            _ => (squares * clusters / (clusters - 1.0)).sqrt() / count,
        };
        Self {
            tokens,
            mean,
            error,
        }
    }

    /// Returns `exp(mean)`.
    pub fn perplexity(&self) -> f64 {
        self.mean.exp()
    }

    /// Returns the standard error of the perplexity, to first order.
    pub fn perplexity_error(&self) -> f64 {
        self.perplexity() * self.error
    }
}

/// Loss of the tokens that a window counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowLoss {
    /// Index of the text.
    pub text: usize,
    /// Number of counted tokens.
    pub tokens: usize,
    /// Sum of their losses, in nats.
    pub nats: f64,
}

/// Computes the loss of each window over `texts`, each read separately. The first token of a text
/// does not count.
///
/// # Errors
/// Returns an error if the windows are invalid or longer than the model's maximum context, if a
/// text has fewer than two tokens, or if the model fails or its result is not a number.
pub fn window_losses(
    model: &Decoder,
    texts: &[Vec<u32>],
    windows: Windows,
) -> Result<Vec<WindowLoss>> {
    over_windows(&[model], texts, windows, |text, tokens, first| {
        let found = log_probabilities(model, tokens)?;
        let own = &found[first - 1..];
        Ok(WindowLoss {
            text,
            tokens: own.len(),
            nats: nats(own)?,
        })
    })
}

/// Computes the [`CrossEntropy`] of `texts` from [`window_losses`].
///
/// # Errors
/// Returns the errors of [`window_losses`].
pub fn cross_entropy(
    model: &Decoder,
    texts: &[Vec<u32>],
    windows: Windows,
) -> Result<CrossEntropy> {
    let losses = window_losses(model, texts, windows)?;
    Ok(CrossEntropy::over(&losses))
}

/// Calls `window` for each window over `texts`, with the index of the text, the tokens of the
/// window, and the first of them that counts.
fn over_windows<T>(
    models: &[&Decoder],
    texts: &[Vec<u32>],
    windows: Windows,
    mut window: impl FnMut(usize, &[u32], usize) -> Result<T>,
) -> Result<Vec<T>> {
    windows.check()?;
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let length = windows.length.min(longest);
    for model in models {
        model
            .config()
            .check_length("the length of a window", length)?;
    }
    ensure!(
        !texts.is_empty(),
        "texts are none, but must be at least one"
    );
    if let Some(short) = texts.iter().position(|text| text.len() < 2) {
        bail!(
            "text {short} has {} token(s), but must have at least two",
            texts[short].len()
        );
    }
    let total = texts.iter().map(|text| text.len() - 1).sum();
    let mut results = Vec::new();
    let mut work = Work::begin("evaluate", Unit::Tokens, 0, total);
    for (index, text) in texts.iter().enumerate() {
        for (begin, end, first) in windows.over(text.len()) {
            let found = window(index, &text[begin..end], first - begin);
            results
                .push(found.with_context(|| format!("tokens {first} to {end} of text {index}"))?);
            work.add(end - first);
        }
    }
    Ok(results)
}

/// Returns the sum of the losses of tokens with these log-probabilities, in nats.
fn nats(log_probabilities: &[f32]) -> Result<f64> {
    let nats: f64 = log_probabilities.iter().map(|it| -f64::from(*it)).sum();
    ensure!(
        nats.is_finite(),
        "the loss is {nats}: the model does not compute in this type"
    );
    Ok(nats)
}

/// Multiple-choice question with one right answer; one line of a file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Text before the answers.
    pub context: String,
    /// Answers, including the white space between the context and each answer.
    pub choices: Vec<String>,
    /// Index of the right answer, from 0.
    pub answer: usize,
}

impl Question {
    /// Reads the questions of the JSON-lines file `path`. Skips empty lines.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or has no question, or if a line is not a
    /// question; the error gives the line number.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let lines = text.lines().zip(1..);
        let lines = lines.filter(|(line, _)| !line.trim().is_empty());
        let questions = lines.map(|(line, number)| {
            let question = serde_json::from_str(line).context("no question");
            let question = question.and_then(|question: Self| question.check().map(|()| question));
            question.with_context(|| format!("line {number}"))
        });
        let questions: Result<Vec<Self>> = questions.collect();
        let questions = questions.with_context(|| path.display().to_string())?;
        ensure!(!questions.is_empty(), "{} has no question", path.display());
        Ok(questions)
    }

    fn check(&self) -> Result<()> {
        let count = self.choices.len();
        ensure!(count > 1, "choices are {count}, but must be at least two");
        ensure!(
            self.answer < count,
            "answer is {}, but it must be one of 0 to {}",
            self.answer,
            count - 1
        );
        ensure!(
            self.choices.iter().all(|choice| !choice.is_empty()),
            "a choice is empty"
        );
        Ok(())
    }
}

/// Share of right answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accuracy {
    /// Share, from 0 to 1.
    pub share: f64,
    /// Standard error of the share; infinite for one question.
    pub error: f64,
}

impl Accuracy {
    fn of(right: usize, questions: usize) -> Self {
        let share = right as f64 / questions as f64;
        let error = match questions {
            1 => f64::INFINITY,
            _ => (share * (1.0 - share) / (questions - 1) as f64).sqrt(),
        };
        Self { share, error }
    }
}

/// Accuracy of a model on questions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answers {
    /// Accuracy by the most probable choice.
    pub plain: Accuracy,
    /// Accuracy by the choice with the highest mean log-probability per byte, which does not
    /// penalize long choices.
    pub normalized: Accuracy,
    /// Number of questions that, with one of their choices, exceed the model's maximum context.
    pub beyond: usize,
}

/// Answers `questions` with `model`, which picks the most probable choice after the context.
///
/// # Errors
/// Returns an error if there are no questions, if a context has no token and the tokenizer adds
/// none before it, or if the model fails or its result is not a number.
pub fn choose(model: &Decoder, tokenizer: &Tokenizer, questions: &[Question]) -> Result<Answers> {
    ensure!(!questions.is_empty(), "questions are none");
    let (mut plain, mut normalized, mut beyond) = (0, 0, 0);
    let mut work = Work::begin("evaluate", Unit::Questions, 0, questions.len());
    for (index, question) in questions.iter().enumerate() {
        let scores: Result<Vec<(f64, usize)>> = question
            .choices
            .iter()
            .map(|choice| score(model, tokenizer, &question.context, choice))
            .collect();
        let scores = scores.with_context(|| format!("question {}", index + 1))?;
        let longest = scores.iter().map(|(_, tokens)| *tokens).max();
        beyond += usize::from(longest > Some(model.config().longest()));
        let scores: Vec<f64> = scores.into_iter().map(|(score, _)| score).collect();
        let lengths = question.choices.iter().map(|choice| choice.len() as f64);
        let by_byte: Vec<f64> = scores.iter().zip(lengths).map(|(s, n)| s / n).collect();
        plain += usize::from(first_best(&scores) == question.answer);
        normalized += usize::from(first_best(&by_byte) == question.answer);
        work.add(1);
    }
    Ok(Answers {
        plain: Accuracy::of(plain, questions.len()),
        normalized: Accuracy::of(normalized, questions.len()),
        beyond,
    })
}

/// Returns the log-probability of `choice` after `context`, and the number of tokens of both. The
/// sum starts at the first token at which the encoding of both together differs from that of the
/// context.
fn score(
    model: &Decoder,
    tokenizer: &Tokenizer,
    context: &str,
    choice: &str,
) -> Result<(f64, usize)> {
    let before = tokenizer.encode_text(context)?;
    let whole = tokenizer.encode_text(&format!("{context}{choice}"))?;
    let common = before.iter().zip(&whole).take_while(|(a, b)| a == b);
    let first = common.count();
    ensure!(
        first > 0,
        "the context {context:?} gives no token before the choice {choice:?}"
    );
    ensure!(
        first < whole.len(),
        "the choice {choice:?} adds no token to the context"
    );
    let found = log_probabilities(model, &whole)?;
    let sum: f64 = found[first - 1..].iter().map(|nats| f64::from(*nats)).sum();
    ensure!(
        sum.is_finite(),
        "the log-probability of {choice:?} is {sum}"
    );
    Ok((sum, whole.len()))
}

#[cfg(all(test, feature = "flex"))]
mod compare_tests;
#[cfg(test)]
mod tests;
