//! Options that the benchmarks share.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use nvfp4_lm::checkpoint::write_json;
use serde::Serialize;

#[derive(Args)]
#[group(skip)]
pub(super) struct MeasureOptions {
    /// Measure this many rounds and report the median
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(super) rounds: usize,
    /// Print this many of the costliest kernels
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) kernels: usize,
    /// Write the output to this file: all measurements, as JSON [default: none]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl MeasureOptions {
    /// Writes `figures` to the file given by `--out`, if any.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub(super) fn write(&self, figures: &impl Serialize) -> Result<()> {
        match &self.out {
            Some(path) => write_json(path, figures),
            None => Ok(()),
        }
    }
}
