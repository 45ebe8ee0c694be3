//! Prints a result as text or as JSON.

use anyhow::Result;
use serde::Serialize;

/// Prints `result` on standard output: as one JSON document if `json`, else as the lines that
/// `lines` returns.
pub(crate) fn print<T: Serialize>(
    json: bool,
    result: &T,
    lines: impl FnOnce(&T) -> Vec<String>,
) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string_pretty(result)?),
        false => lines(result).iter().for_each(|line| println!("{line}")),
    }
    Ok(())
}
