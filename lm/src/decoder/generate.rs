//! Generates continuations for a batch of prompts.

use anyhow::{Result, ensure};
use burn::tensor::{Int, Tensor, TensorData};

use super::cache::KvPrecision;
use super::steps::{DecodeSteps, RING, read};
use super::{Decoder, KvCache};
use crate::hf::Tokenizer;
use crate::sampling::{Sampler, SamplingConfig};
use crate::text::StopStrings;

/// Options of text generation.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Maximum number of new tokens per text.
    pub most: usize,
    /// Tokens that end a text; they are not part of it.
    pub eos: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingConfig,
    /// Number of prompt tokens processed at a time.
    pub chunk: usize,
    /// True to replay steps as a CUDA graph if all steps of the model are alike. Requires a device
    /// with graphs. The texts do not change.
    pub graph: bool,
    /// Storage format of keys and values; `None` uses that of the model's folder.
    pub kv: Option<KvPrecision>,
}

impl Generation {
    /// Greedy generation of up to `most` tokens, without end tokens.
    pub fn greedy(most: usize) -> Self {
        Self {
            most,
            eos: Vec::new(),
            sampling: SamplingConfig::default(),
            chunk: 512,
            graph: false,
            kv: None,
        }
    }

    /// Sets the number of prompt tokens processed at a time to `chunk`.
    pub fn with_chunk(self, chunk: usize) -> Self {
        Self { chunk, ..self }
    }
}

impl Decoder {
    /// Continues all of `prompts` as one batch and returns the new tokens of each. `emit` receives
    /// the index of a text and its next token as soon as it is known, and returns true to continue
    /// the text.
    ///
    /// # Errors
    /// Returns an error if there is no prompt, a prompt is empty or has a token outside the
    /// vocabulary, a text exceeds the model's maximum context, the sampling is out of range, a
    /// logit is not a number, or `emit` fails.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        generation: &Generation,
        mut emit: impl FnMut(usize, u32) -> Result<bool>,
    ) -> Result<Vec<Vec<u32>>> {
        self.check_prompts(prompts)?;
        ensure!(generation.chunk > 0, "`chunk` is 0, but must be positive");
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let capacity = longest + generation.most;
        (self.config()).check_length(
            "the length of the longest prompt and what is added",
            capacity,
        )?;
        let mut cache = self.cache_as(prompts.len(), capacity, generation.kv)?;
        let samplers = prompts.iter().enumerate();
        let samplers = samplers.map(|(i, p)| Sampler::new(&generation.sampling, i as u64, p));
        let mut samplers = samplers.collect::<Result<Vec<Sampler>>>()?;
        if generation.most == 0 {
            return Ok(vec![Vec::new(); prompts.len()]);
        }
        let logits = self.prefill(prompts, generation.chunk, &mut cache)?;
        let mut texts = Texts {
            generation,
            added: vec![Vec::new(); prompts.len()],
            next: vec![0; prompts.len()],
            goes_on: vec![true; prompts.len()],
        };
        for (index, logits) in logits.iter().enumerate() {
            texts.add(index, samplers[index].next(logits)?, &mut emit)?;
        }
        if !texts.goes_on.contains(&true) {
            return Ok(texts.added);
        }
        let graph = generation.graph && self.steps_are_alike(cache.capacity());
        let mut steps = DecodeSteps::new(self, cache, &texts.next, &texts.goes_on, graph)?;
        let sampling = &generation.sampling;
        let is_greedy = sampling.temperature == 0.0 && sampling.repetition_penalty == 1.0;
        let vocab = self.config().vocab;
        while texts.goes_on.contains(&true) {
            // Tokens chosen on the device are read after several replays. Those after the end of a
            // text are dropped.
            let left = generation.most - texts.added.iter().map(Vec::len).max().unwrap_or(0);
            let burst = match is_greedy && steps.is_captured() {
                true => RING.min(left),
                false => 1,
            };
            for _ in 0..burst {
                steps.step()?;
            }
            let before = texts.goes_on.clone();
            if is_greedy {
                for row in steps.chosen(burst)? {
                    for (index, token) in row.into_iter().enumerate() {
                        texts.add(index, token, &mut emit)?;
                    }
                }
            } else {
                for (index, logits) in steps.logits()?.chunks(vocab).enumerate() {
                    if texts.goes_on[index] {
                        texts.add(index, samplers[index].next(logits)?, &mut emit)?;
                    }
                }
            }
            if !is_greedy || texts.goes_on != before {
                steps.set(&texts.next, &texts.goes_on)?;
            }
        }
        Ok(texts.added)
    }

    fn check_prompts(&self, prompts: &[Vec<u32>]) -> Result<()> {
        ensure!(
            !prompts.is_empty(),
            "`prompts` is empty, but must have at least one"
        );
        let vocab = self.config().vocab;
        for (index, prompt) in prompts.iter().enumerate() {
            ensure!(
                !prompt.is_empty(),
                "prompt {index} has no tokens, but must have at least one"
            );
            if let Some(token) = prompt.iter().find(|token| **token as usize >= vocab) {
                anyhow::bail!(
                    "prompt {index} has token {token}, but the model's vocabulary has {vocab}"
                );
            }
        }
        Ok(())
    }

    /// Writes the prompts to the cache, at most `chunk` tokens of each at a time. Returns the
    /// logits after the last token of each.
    fn prefill(
        &self,
        prompts: &[Vec<u32>],
        chunk: usize,
        cache: &mut KvCache,
    ) -> Result<Vec<Vec<f32>>> {
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut logits = vec![Vec::new(); prompts.len()];
        for first in (0..longest).step_by(chunk) {
            let time = chunk.min(longest - first);
            let rows = prompts.iter().map(|prompt| {
                let row = &prompt[first.min(prompt.len())..(first + time).min(prompt.len())];
                (row, first < prompt.len() && prompt.len() <= first + time)
            });
            let rows: Vec<(&[u32], bool)> = rows.collect();
            let counts: Vec<usize> = rows.iter().map(|(row, _)| row.len()).collect();
            let padded = rows.iter().flat_map(|(row, _)| {
                let padding = std::iter::repeat_n(0, time - row.len());
                row.iter().map(|token| *token as i32).chain(padding)
            });
            let tokens = self.tokens(padded.collect(), rows.len());
            let features = self.features_cached(tokens, &counts, cache)?;
            for (index, (row, is_last)) in rows.iter().enumerate() {
                if *is_last {
                    let last = features
                        .clone()
                        .narrow(0, index, 1)
                        .narrow(1, row.len() - 1, 1);
                    let [_, _, d_model] = last.dims();
                    logits[index] = read(self.next_logits(last.reshape([1, d_model]))?)?;
                }
            }
        }
        Ok(logits)
    }

    fn tokens(&self, tokens: Vec<i32>, batch: usize) -> Tensor<2, Int> {
        let time = tokens.len() / batch;
        Tensor::from_data(TensorData::new(tokens, [batch, time]), &self.device())
    }
}

/// The texts of one call.
struct Texts<'a> {
    generation: &'a Generation,
    /// New tokens of each text.
    added: Vec<Vec<u32>>,
    /// Last token of each text.
    next: Vec<u32>,
    goes_on: Vec<bool>,
}

impl Texts<'_> {
    /// Adds a token to a text, unless the text has ended.
    fn add(
        &mut self,
        index: usize,
        token: u32,
        emit: &mut impl FnMut(usize, u32) -> Result<bool>,
    ) -> Result<()> {
        if !self.goes_on[index] {
            return Ok(());
        }
        self.next[index] = token;
        if self.generation.eos.contains(&token) {
            self.goes_on[index] = false;
            return Ok(());
        }
        let text = &mut self.added[index];
        text.push(token);
        self.goes_on[index] = emit(index, token)? && text.len() < self.generation.most;
        Ok(())
    }
}

/// Decodes a stream of tokens to text. Emits each piece as soon as no later token can change it,
/// and nothing from the first of `stops` on.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    stops: StopStrings,
    /// All tokens, and the index of the first one to decode again with the next token.
    tokens: Vec<u32>,
    first: usize,
    /// Length of the text of the tokens from `first` on that was emitted or is withheld.
    decoded: usize,
}

impl<'a> TextStream<'a> {
    /// Creates an empty text, which ends before any of `stops`.
    ///
    /// # Errors
    /// Returns an error if one of `stops` is empty.
    pub fn new(tokenizer: &'a Tokenizer, stops: &[String]) -> Result<Self> {
        Ok(Self {
            tokenizer,
            stops: StopStrings::new(stops)?,
            tokens: Vec::new(),
            first: 0,
            decoded: 0,
        })
    }

    /// Returns true if a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.stops.is_stopped()
    }

    /// Takes the next token and returns the text that is now certain, often none.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if self.is_stopped() {
            return Ok(String::new());
        }
        self.tokens.push(token);
        let text = self.tokenizer.decode(&self.tokens[self.first..], false)?;
        // Incomplete character.
        if text.ends_with('\u{FFFD}') {
            return Ok(String::new());
        }
        let new = text.get(self.decoded..).unwrap_or_default().to_owned();
        // The decoder needs preceding tokens, because it may treat the first token of a text
        // differently.
        self.first = self.tokens.len().saturating_sub(4).max(self.first);
        self.decoded = self
            .tokenizer
            .decode(&self.tokens[self.first..], false)?
            .len();
        Ok(self.stops.push(&new))
    }

    /// Returns the text that was withheld.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot decode.
    pub fn finish(self) -> Result<String> {
        if self.is_stopped() {
            return Ok(String::new());
        }
        let text = self.tokenizer.decode(&self.tokens[self.first..], false)?;
        let new = text.get(self.decoded..).unwrap_or_default().to_owned();
        Ok(self.stops.finish(&new))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_test_support::golden;

    /// Streams the tokens of `text`. Returns one piece per token, and whether a stop string was
    /// found.
    fn streamed(tokenizer: &Tokenizer, text: &str, stops: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::new(tokenizer, &stops).unwrap();
        let mut pieces = Vec::new();
        for token in tokenizer.encode(text, false).unwrap() {
            pieces.push(stream.push(token).unwrap());
            if stream.is_stopped() {
                break;
            }
        }
        let is_stopped = stream.is_stopped();
        pieces.push(stream.finish().unwrap());
        (pieces, is_stopped)
    }

    #[test]
    fn streamed_text_is_the_whole_text() {
        let folder = golden("llama3-tiny");
        let tokenizer = Tokenizer::read(&folder, 288, &[]).unwrap();
        for text in [
            "Hello, world!",
            "na\u{ef}ve \u{6771}\u{4eac} \u{1f642}\n\n\tx",
            "  a  b",
            "",
        ] {
            let (pieces, is_stopped) = streamed(&tokenizer, text, &[]);
            assert_eq!(pieces.concat(), text);
            assert!(!is_stopped);
            assert!(
                pieces.iter().all(|piece| !piece.contains('\u{FFFD}')),
                "{pieces:?}"
            );
        }
        // Emitted as it comes.
        let (pieces, _) = streamed(&tokenizer, "The quick brown fox", &[]);
        assert!(
            pieces.iter().filter(|piece| !piece.is_empty()).count() > 8,
            "{pieces:?}"
        );
    }

    #[test]
    fn stop_strings_end_the_text() {
        let folder = golden("llama3-tiny");
        let tokenizer = Tokenizer::read(&folder, 288, &[]).unwrap();
        for (stops, expected, expected_stop) in [
            (&["brown"][..], "The quick ", true),
            (&["fox", "quick"], "The ", true),
            (&["x", "brown cat"], "The quick brown fo", true),
            (&["fox jumps"], "The quick brown fox", false),
            (&["The"], "", true),
        ] {
            let (pieces, is_stopped) = streamed(&tokenizer, "The quick brown fox", stops);
            assert_eq!(pieces.concat(), expected, "{stops:?}");
            assert_eq!(is_stopped, expected_stop, "{stops:?}");
        }
        assert!(TextStream::new(&tokenizer, &[String::new()]).is_err());
    }
}
