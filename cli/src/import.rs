//! `nvfp4 import`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::gguf;

use crate::options::shared::{OutFolder, SaveOption};

#[derive(Args)]
pub(crate) struct Import {
    /// Import this GGUF file, or the split file that it is a part of: a Llama model with F32, F16,
    /// BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, MXFP4 and NVFP4 tensors; layers in NVFP4
    /// keep their codes
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
        if done.nvfp4_layers > 0 {
            println!("{} layers keep their NVFP4 codes", done.nvfp4_layers);
        }
        if !done.unused_scales.is_empty() {
            println!(
                "not used, because these are not written in NVFP4: {}",
                done.unused_scales.join(", ")
            );
        }
        if let Some(reason) = done.no_tokenizer {
            println!("no tokenizer.json: {reason}");
        }
        Ok(())
    }
}
