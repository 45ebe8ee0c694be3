//! Standard error: notes and progress bars, which `--quiet` suppresses, and colors.

use std::env;
use std::fmt::Display;
use std::io::{IsTerminal, stderr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use nvfp4_lm::hf::tokenizer::TOKENIZER_FILE;
use nvfp4_lm::interchange::checkpoint::remark;

/// True if `--quiet` is given.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Suppresses notes and progress bars if `quiet` is true.
pub(crate) fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// Returns true if notes and progress bars are suppressed.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Returns true if progress is shown by bars: standard error is a terminal.
pub(crate) fn has_bars() -> bool {
    !is_quiet() && stderr().is_terminal()
}

/// Returns true if errors, warnings and log lines have colors: standard error is a terminal, and
/// `NO_COLOR` is unset or empty. The bars of indicatif and the help texts of clap follow the same
/// rule.
pub(crate) fn has_colors() -> bool {
    stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Prints an error to standard error.
pub(crate) fn error(text: impl Display) {
    eprintln!("{} {text}", label("error:", "1;31"));
}

/// Prints a warning to standard error, also with `--quiet`.
pub(crate) fn warn(text: impl Display) {
    eprintln!("{} {text}", label("warning:", "1;33"));
}

/// Warns of the quantization of the model in `model` that is not computed when it runs, if any.
///
/// # Errors
/// Returns an error if the configuration of the model cannot be read.
pub(crate) fn warn_of(model: &Path) -> Result<()> {
    if let Some(remark) = remark(model)? {
        warn(format!("{}: {remark}", model.display()));
    }
    Ok(())
}

/// Returns the warning that a model written from the one in `model` has no tokenizer, if it has none.
pub(crate) fn without_tokenizer(model: &Path) -> Option<String> {
    (!model.join(TOKENIZER_FILE).exists()).then(|| {
        format!(
            "{} has no {TOKENIZER_FILE}, so the output has none either, and commands and engines \
             that read texts need it: add it before they run",
            model.display()
        )
    })
}

/// Returns `text` in the color of the escape code `code`, if there are colors.
fn label(text: &str, code: &str) -> String {
    match has_colors() {
        true => format!("\x1b[{code}m{text}\x1b[0m"),
        false => text.into(),
    }
}

/// Prints a note to standard error, as `eprintln` does, unless `--quiet` is given. Warnings and
/// errors are not notes.
macro_rules! note {
    ($($text:tt)*) => {
        if !$crate::terminal::is_quiet() {
            eprintln!($($text)*);
        }
    };
}
pub(crate) use note;
