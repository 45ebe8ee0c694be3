//! `telemetry.csv`: statistics of quantization over the steps of a run.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn_nvfp4::telemetry::{CSV_HEADER, OperandSample};

use crate::checkpoint;
use crate::metrics::{read_lossy, whole_lines};

/// File with one line per sampled operand; see [`burn_nvfp4::telemetry`].
pub const TELEMETRY: &str = "telemetry.csv";

/// The file of a run, on the rank that writes it.
pub(super) struct TelemetryLog {
    path: PathBuf,
}

impl TelemetryLog {
    /// Refers to the file of the run in `folder`, which need not exist.
    pub fn new(folder: &Path) -> Self {
        Self {
            path: folder.join(TELEMETRY),
        }
    }

    /// Removes the samples of step `step` and later.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or written.
    pub fn resume(&self, step: u64) -> Result<()> {
        if !self.path.exists() {
            return Ok(());
        }
        let text = read_lossy(&self.path)?;
        let mut lines = whole_lines(&text);
        let mut kept = String::new();
        let header = lines.next();
        for line in header.into_iter().chain(lines.take_while(|line| {
            let sampled = line.split(',').next().and_then(|field| field.parse().ok());
            sampled.is_some_and(|sampled: u64| sampled < step)
        })) {
            let _ = writeln!(kept, "{line}");
        }
        checkpoint::replace(&self.path, kept.as_bytes())
    }

    /// Adds the samples of step `step`. The first step starts the file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record(&self, step: u64, samples: &[OperandSample]) -> Result<()> {
        let mut text = String::new();
        if step == 0 || !self.path.exists() {
            let _ = writeln!(text, "step,{CSV_HEADER}");
        }
        for sample in samples {
            let _ = writeln!(text, "{step},{}", sample.csv());
        }
        let mut options = fs::OpenOptions::new();
        let file = if step == 0 {
            options.write(true).truncate(true).create(true)
        } else {
            options.append(true).create(true)
        };
        file.open(&self.path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| self.context())
    }

    /// Writes the samples to the disk.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn sync(&self) -> Result<()> {
        if !self.path.exists() {
            return Ok(());
        }
        let open = fs::OpenOptions::new().append(true).open(&self.path);
        open.and_then(|file| file.sync_all())
            .with_context(|| self.context())
    }

    fn context(&self) -> String {
        format!("cannot write {}", self.path.display())
    }
}
