//! Checks the number of skipped tests, by reason.
//!
//! A test may skip itself for a missing GPU, for a tool that setup could not install, or without
//! `--full`: only for the reasons of [`Skip`]. The reason of an ignored test must be listed.
//! `xtask/skips.json` lists all reasons, each with the number of tests that CI skips for it.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use nvfp4_test_support::Skip;

use crate::setup::{cuda_tools, wheels};
use crate::workspace;

/// File of the committed numbers, in the workspace.
const FILE: &str = "xtask/skips.json";

/// Number of skipped tests by reason.
type Numbers = BTreeMap<String, usize>;

/// Expected numbers of skipped tests.
pub struct Expected(Numbers);

impl Expected {
    /// Reads the committed numbers.
    pub fn read() -> Result<Self> {
        let text = fs::read_to_string(workspace::root().join(FILE)).context(FILE)?;
        Self::parse(&text).context(FILE)
    }

    fn parse(text: &str) -> Result<Self> {
        Ok(Self(serde_json::from_str(text)?))
    }

    /// Returns a problem for each reason that is not listed.
    pub fn unlisted(&self, found: &Numbers) -> Vec<String> {
        let unlisted = |(reason, count): (&String, &usize)| {
            let problem =
                format!("{count} skipped for a reason that {FILE} does not list: {reason}");
            (!self.0.contains_key(reason)).then_some(problem)
        };
        found.iter().filter_map(unlisted).collect()
    }

    /// Returns a problem for each reason with a larger number than expected, and a note for each
    /// with a smaller one. No test may be skipped for a tool that `is_installed`.
    pub fn changed(
        &self,
        found: &Numbers,
        is_installed: impl Fn(Skip) -> bool,
    ) -> (Vec<String>, Vec<String>) {
        let (mut problems, mut notes) = (Vec::new(), Vec::new());
        for (reason, &committed) in &self.0 {
            let skip = Skip::ALL.into_iter().find(|skip| skip.reason() == reason);
            let expected = match skip {
                Some(tool) if is_installed(tool) => 0,
                _ => committed,
            };
            let found = found.get(reason).copied().unwrap_or(0);
            if found > expected {
                problems.push(format!(
                    "{found} skipped, more than the {expected} of {FILE}: {reason}"
                ));
            } else if found < expected {
                notes.push(format!(
                    "{found} skipped, fewer than the {expected} of {FILE}, which can be lowered: \
                     {reason}"
                ));
            }
        }
        (problems, notes)
    }
}

/// Returns true if this machine has the tool whose absence the reason states.
pub fn is_installed(tool: Skip) -> bool {
    match tool {
        Skip::NoCudaTools => cuda_tools::is_installed(),
        Skip::NoPip => wheels::require_pip().is_ok(),
        _ => false,
    }
}

/// Formats the numbers as a table.
pub fn table(found: &Numbers) -> String {
    let line = |(reason, count): (&String, &usize)| format!("{count:>6} skipped: {reason}\n");
    found.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(list: &[(&str, usize)]) -> Numbers {
        let owned = |&(reason, count): &(&str, usize)| (reason.to_owned(), count);
        list.iter().map(owned).collect()
    }

    fn expected() -> Expected {
        Expected::parse(r#"{"no CUDA device": 2, "no CUDA tools": 3, "ignored: slow": 1}"#).unwrap()
    }

    #[test]
    fn the_committed_file_lists_all_reasons() {
        let expected = Expected::read().unwrap();
        let reasons = expected.0.into_keys();
        let (ignored, skips): (Vec<String>, Vec<String>) =
            reasons.partition(|reason| reason.starts_with("ignored: "));
        let mut all = Skip::ALL.map(Skip::reason);
        all.sort_unstable();
        assert_eq!(skips, all);
        assert!(ignored.iter().all(|reason| !reason.ends_with(": ")));
    }

    #[test]
    fn other_reasons_are_problems() {
        let listed = numbers(&[("no CUDA device", 9), ("ignored: slow", 9)]);
        assert!(expected().unlisted(&listed).is_empty());
        for reason in ["no CUDA devices", "ignored: without a reason", "", "cpu"] {
            let problems = expected().unlisted(&numbers(&[(reason, 1)]));
            assert_eq!(problems.len(), 1, "{reason}");
        }
    }

    #[test]
    fn other_numbers_are_problems() {
        let changed = |list: &[(&str, usize)], installed: bool| {
            expected().changed(&numbers(list), |tool| {
                installed && tool == Skip::NoCudaTools
            })
        };
        let (gpu, slow) = (("no CUDA device", 2), ("ignored: slow", 1));
        let none = (Vec::new(), Vec::new());
        assert_eq!(changed(&[gpu, slow], true), none);
        assert_eq!(changed(&[gpu, slow, ("no CUDA tools", 3)], false), none);
        for (list, installed, expected) in [
            (
                &[("no CUDA device", 3), slow][..],
                true,
                "3 skipped, more than the 2",
            ),
            (
                &[("no CUDA device", 1), slow],
                true,
                "1 skipped, fewer than the 2",
            ),
            (&[slow], true, "0 skipped, fewer than the 2"),
            (
                &[gpu, slow, ("no CUDA tools", 3)],
                true,
                "3 skipped, more than the 0",
            ),
            (&[gpu, slow], false, "0 skipped, fewer than the 3"),
            (
                &[gpu, slow, ("no CUDA tools", 4)],
                false,
                "4 skipped, more than the 3",
            ),
        ] {
            let (problems, notes) = changed(list, installed);
            let [more, fewer] = match expected.contains("more") {
                true => [&problems, &notes],
                false => [&notes, &problems],
            };
            assert_eq!(more.len(), 1, "{list:?}: {more:?}");
            assert!(more[0].starts_with(expected), "{more:?}");
            assert!(fewer.is_empty(), "{list:?}: {fewer:?}");
        }
    }

    #[test]
    fn tables() {
        let found = numbers(&[("no CUDA device", 12), ("ignored: slow", 1)]);
        let expected = "     1 skipped: ignored: slow\n    12 skipped: no CUDA device\n";
        assert_eq!(table(&found), expected);
    }
}
