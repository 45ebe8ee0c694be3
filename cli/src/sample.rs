//! `nvfp4 sample`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::Args;
use nvfp4_lm::checkpoint::{Checkpoint, resolve};
use nvfp4_lm::encoder::EncoderModel;
use nvfp4_lm::model::{LanguageModel, Transformer};
use nvfp4_lm::sample::{generate, load};

use crate::device::{DeviceName, install_decorator};

#[derive(Args)]
pub(crate) struct Sample {
    /// Load the model from this folder: that of a run, of one of its recipes, or of a checkpoint
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Continue this text
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Generate at most this many bytes
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: usize,
    /// Scale the logits: 0 takes the most probable byte, 1 the model's distribution
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.8,
        allow_negative_numbers = true
    )]
    temperature: f64,
    /// Seed the choices
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Run on this device: flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
}

impl Sample {
    pub(crate) fn run(self) -> Result<()> {
        let path = resolve(&self.checkpoint)?;
        let device = DeviceName::or_best(self.device)?.open()?;
        let checkpoint = Checkpoint::load(&path)?;
        let wrong = || format!("cannot use checkpoint {}", path.display());
        if checkpoint.state.config.decorate.is_some() {
            install_decorator()?;
            let model: EncoderModel = load(checkpoint, &device).with_context(wrong)?;
            self.print(&model, &device)
        } else {
            let model: Transformer = load(checkpoint, &device).with_context(wrong)?;
            self.print(&model, &device)
        }
    }

    fn print(self, model: &impl LanguageModel, device: &Device) -> Result<()> {
        let mut out = Characters {
            out: std::io::stdout().lock(),
            pending: Vec::new(),
        };
        out.write(self.prompt.as_bytes())?;
        let Self {
            tokens,
            temperature,
            seed,
            ..
        } = self;
        generate(
            model,
            device,
            self.prompt.as_bytes(),
            tokens,
            temperature,
            seed,
            |byte| out.write(&[byte]),
        )?;
        out.finish()
    }
}

/// Prints bytes as soon as they complete a character. What is not UTF-8 becomes U+FFFD.
struct Characters<W: Write> {
    out: W,
    pending: Vec<u8>,
}

impl<W: Write> Characters<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(bytes);
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.out.write_all(text.as_bytes())?;
                    rest = &[];
                }
                Err(error) => {
                    let (text, tail) = rest.split_at(error.valid_up_to());
                    self.out.write_all(text)?;
                    rest = tail;
                    if let Some(length) = error.error_len() {
                        self.out.write_all("\u{fffd}".as_bytes())?;
                        rest = &rest[length..];
                        continue;
                    }
                }
            }
            break;
        }
        self.pending = rest.to_vec();
        Ok(self.out.flush()?)
    }

    fn finish(mut self) -> Result<()> {
        if !self.pending.is_empty() {
            self.out.write_all("\u{fffd}".as_bytes())?;
        }
        self.out.write_all(b"\n")?;
        Ok(self.out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_characters() {
        let mut printed = Vec::new();
        let mut out = Characters {
            out: &mut printed,
            pending: Vec::new(),
        };
        for byte in b"a\xc3\xa4\xff\xe2\x82b\xe2\x82\xac\xe2" {
            out.write(&[*byte]).unwrap();
        }
        out.finish().unwrap();
        assert_eq!(
            String::from_utf8(printed).unwrap(),
            "aä\u{fffd}\u{fffd}b€\u{fffd}\n"
        );
    }
}
