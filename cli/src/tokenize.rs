//! `nvfp4 tokenize`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use nvfp4_lm::finetune::data::TextReader;
use nvfp4_lm::tokens::Shard;
use nvfp4_lm::tokens::encode::is_shard;

#[derive(Args)]
pub(crate) struct Tokenize {
    /// Use the tokenizer of the model in this folder
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Read these files and folders: each row of a .jsonl file or of a list in a .json file and
    /// every other text file is one document
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    data: Vec<PathBuf>,
    /// Write the output to this file; it must be new and end in .tokens
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

impl Tokenize {
    pub(crate) fn run(self) -> Result<()> {
        let Self { model, data, out } = self;
        ensure!(
            is_shard(&out) && !out.exists(),
            "out is {}, but must be a new file that ends in .tokens",
            out.display()
        );
        let reader = TextReader::read(&model)?;
        let found = reader.write_shard(&data, &out)?;
        let shard = Shard::open(&out)?;
        let targets = (0..shard.len()).filter(|&index| shard.counts(index));
        println!(
            "{} documents of {} tokens, {} of which count in the loss, written to {}; {} files left \
             out because they are empty or not UTF-8",
            found.documents,
            shard.len(),
            targets.count(),
            out.display(),
            found.skipped
        );
        Ok(())
    }
}
