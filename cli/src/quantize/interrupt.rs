//! Ctrl-C during a quantization.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::progress::INTERRUPTED;
use crate::shell::{program, quoted};

/// Watches for Ctrl-C, which ends the process at once: its journal can be resumed at any time.
pub(super) struct Interrupt {
    is_finished: Arc<AtomicBool>,
}

impl Interrupt {
    /// Makes Ctrl-C print how to resume the quantization to the folder `out`.
    pub(super) fn watch(out: &Path) -> Result<Self> {
        let is_finished: Arc<AtomicBool> = Arc::default();
        let (flag, out, command) = (is_finished.clone(), out.to_owned(), resumes());
        ctrlc::set_handler(move || {
            match flag.load(Ordering::Relaxed) {
                true => eprintln!("\nstopped; the model in {} is complete", out.display()),
                false => eprintln!("\nstopped; to resume: {command}"),
            }
            std::process::exit(INTERRUPTED.into());
        })
        .context("cannot watch for Ctrl-C")?;
        Ok(Self { is_finished })
    }

    /// From here on, the quantization is finished.
    pub(super) fn finished(&self) {
        self.is_finished.store(true, Ordering::Relaxed);
    }
}

/// Returns this process's command with `--resume`.
fn resumes() -> String {
    let mut words: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| quoted(&word.to_string_lossy()))
        .collect();
    if !words.iter().any(|word| word == "--resume") {
        words.push("--resume".into());
    }
    format!("{} {}", program(), words.join(" "))
}
