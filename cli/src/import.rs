//! `nvfp4 import`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use nvfp4_lm::hf::{Dtype, gguf};

#[derive(Args)]
pub(crate) struct Import {
    /// Import this GGUF file: a Llama model with F32, F16, BF16, Q8_0 and Q4_1 tensors
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write it to this folder, which must be empty or absent
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Write tensors in this type
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: StoredType,
}

/// Type of the tensors in a folder.
#[derive(Clone, Copy, ValueEnum)]
enum StoredType {
    F32,
    Bf16,
    F16,
}

impl Import {
    pub(crate) fn run(self) -> Result<()> {
        let dtype = match self.dtype {
            StoredType::F32 => Dtype::F32,
            StoredType::Bf16 => Dtype::BF16,
            StoredType::F16 => Dtype::F16,
        };
        let done = gguf::import(&self.file, &self.out, dtype)?;
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
