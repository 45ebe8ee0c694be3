//! `nvfp4 completions` and `nvfp4 man`.

use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

#[derive(Args)]
pub(crate) struct Completions {
    /// Print the script for this shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

impl Completions {
    /// Prints the script. `C` is the parser of command lines.
    pub(crate) fn run<C: CommandFactory>(self) -> Result<()> {
        let mut command = C::command();
        let name = command.get_name().to_owned();
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut script);
        Ok(stdout().write_all(&script)?)
    }
}

#[derive(Args)]
pub(crate) struct Man {
    /// Write the output to this folder: one page per command
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Man {
    /// Writes the pages. `C` is the parser of command lines.
    pub(crate) fn run<C: CommandFactory>(self) -> Result<()> {
        let out = self.out.display();
        fs::create_dir_all(&self.out).with_context(|| format!("out {out} cannot be made"))?;
        clap_mangen::generate_to(C::command(), &self.out)
            .with_context(|| format!("the pages cannot be written to out {out}"))?;
        println!("man pages written to {out}");
        Ok(())
    }
}
