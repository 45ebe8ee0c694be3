//! `nvfp4 convert`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::interchange::{Checkpoint, Dialect, convert};

use crate::options::shared::OutFolder;
use crate::terminal::{warn, without_tokenizer};

#[derive(Args)]
pub(crate) struct Convert {
    /// Convert the quantized model in this folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Write the model in this dialect
    #[arg(long, value_name = "DIALECT")]
    dialect: Dialect,
    #[command(flatten)]
    out: OutFolder,
}

impl Convert {
    pub(crate) fn run(self) -> Result<()> {
        let checkpoint = Checkpoint::open(&self.model)?;
        without_tokenizer(&self.model).into_iter().for_each(warn);
        let done = convert(&checkpoint, self.dialect, &self.out)?;
        println!(
            "{} quantized layers written to {}, their codes and block scales unchanged",
            done.layers,
            self.out.display()
        );
        match done.moved {
            0 => println!(
                "all {} global scales dequantize by the same factor",
                done.globals
            ),
            moved => println!(
                "{moved} of {} global scales dequantize by a factor one unit in the last place \
                 away: {} cannot hold the old one, and greedy decoding may differ",
                done.globals,
                self.dialect.name()
            ),
        }
        if done.renamed > 0 {
            println!(
                "{} experts have the names that transformers gives them",
                done.renamed
            );
        }
        Ok(())
    }
}
