//! `nvfp4 import`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::hf::gguf;

use crate::options::shared::{OutFolder, SaveOption};

#[derive(Args)]
pub(crate) struct Import {
    /// Import this GGUF file: a Llama model with F32, F16, BF16, Q8_0 and Q4_1 tensors
    #[arg(value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    out: OutFolder,
    #[command(flatten)]
    saved: SaveOption,
}

impl Import {
    pub(crate) fn run(self) -> Result<()> {
        let done = gguf::import(&self.file, &self.out, self.saved.save_dtype.into())?;
        println!(
            "{} layers of width {}, {} tokens, written to {}",
            done.config.layers.len(),
            done.config.d_model,
            done.config.vocab,
            self.out.display()
        );
        if let Some(reason) = done.no_tokenizer {
            println!("no tokenizer.json: {reason}");
        }
        Ok(())
    }
}
