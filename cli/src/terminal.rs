//! Standard error: notes and progress bars, which `--quiet` suppresses, and colors.

use std::env;
use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Returns true if log lines have colors: standard error is a terminal, and `NO_COLOR` is unset or
/// empty. The bars of indicatif and the help texts of clap follow the same rule.
pub(crate) fn has_colors() -> bool {
    stderr().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
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
