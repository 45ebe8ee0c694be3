//! Sums up the output of libtest.
//!
//! A test that cannot run here prints a line of [`nvfp4_test_support::Skip`] and returns; one that
//! runs only on another device prints a line of [`nvfp4_test_support::Elsewhere`]. libtest counts
//! both as passed; this project does not. The runs use `--show-output`, so these lines appear in
//! the section of the test that printed them:
//!
//! ```text
//! running 3 tests
//! test gpu::gemm ... ok
//! test codec::e2m1 ... ok
//! test tools::values ... ignored, cargo xtask test --interop runs it
//!
//! successes:
//!
//! ---- gpu::gemm stdout ----
//! SKIPPED: gpu::gemm: no CUDA device: needs 8 GB
//!
//! successes:
//!     codec::e2m1
//!     gpu::gemm
//!
//! test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
//! ```
//!
//! A line has the form `SKIPPED: <test>: <reason>`, optionally followed by `: <detail>`. The test
//! is that of the section, by its name or a suffix of it. The reason of an ignored test is
//! `ignored: ` followed by the text of its attribute.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Prefix of the line of a skipped test, before its name and the reason.
const SKIPPED: &str = "SKIPPED";
/// Prefix of the line of a test that runs on another device.
const ELSEWHERE: &str = "ELSEWHERE";

/// Sums over all test binaries of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that ran and passed.
    pub passed: usize,
    /// Number of failed tests; a test binary that died before its report counts as one.
    pub failed: usize,
    /// Ignored tests and tests that reported themselves as skipped.
    pub skipped: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// Results printed by a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Sums.
    pub counts: Counts,
    /// Line of each skipped test, as printed; for an ignored test, the equivalent line.
    pub skips: Vec<String>,
    /// Number of skipped tests by reason.
    pub reasons: BTreeMap<String, usize>,
    /// Names of failed tests, and other failures.
    pub failures: Vec<String>,
    /// Output of the failed tests.
    pub printed: Vec<String>,
    /// Number of tests that run on another device.
    pub elsewhere: usize,
    /// Tests among these that passed on no device.
    pub nowhere: Vec<String>,
}

/// Returns true for the line that [`Counts`] prints.
pub fn is_counts_line(line: &str) -> bool {
    let mut parts = line.split(", ");
    let mut part = |word: &str| {
        parts
            .next()
            .and_then(|text| text.strip_suffix(word))
            .is_some_and(|number| number.parse::<usize>().is_ok())
    };
    part(" passed") && part(" failed") && part(" skipped") && parts.next().is_none()
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Section {
    /// List of tests with their verdicts, or irrelevant output.
    Verdicts,
    /// Output of passed tests; `test` is the current one.
    Successes { test: String },
    /// Output of failed tests.
    Failures,
}

/// Reads the output of a `cargo test` run line by line.
pub struct Reader {
    outcome: Outcome,
    section: Section,
    /// True after `running N tests` until the binary reports its result.
    open: bool,
    /// Tests of this binary that libtest counts as passed.
    passed: BTreeSet<String>,
    /// Tests among these that reported being skipped, or running elsewhere.
    skipped: BTreeSet<String>,
    elsewhere: BTreeSet<String>,
    /// Tests of all previous binaries: those that ran and passed, and those that run on another
    /// device.
    all_ran: BTreeSet<String>,
    all_elsewhere: BTreeSet<String>,
}

impl Reader {
    /// Creates a reader at the beginning of the output.
    pub fn new() -> Self {
        Self {
            outcome: Outcome::default(),
            section: Section::Verdicts,
            open: false,
            passed: BTreeSet::new(),
            skipped: BTreeSet::new(),
            elsewhere: BTreeSet::new(),
            all_ran: BTreeSet::new(),
            all_elsewhere: BTreeSet::new(),
        }
    }

    /// Processes the next line, without its line end.
    pub fn line(&mut self, line: &str) {
        if starts_binary(line) {
            self.close_dead_binary();
            self.open = true;
            self.section = Section::Verdicts;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            if let Some([passed, failed, ignored]) = parse_result(result) {
                let counts = &mut self.outcome.counts;
                // libtest counts tests that did not run as passed.
                let idle = self.skipped.len() + self.elsewhere.len();
                counts.passed += passed.saturating_sub(idle);
                counts.failed += failed;
                counts.skipped += ignored + self.skipped.len();
                self.open = false;
                self.close_binary();
            }
        } else if line == "successes:" {
            self.section = Section::Successes {
                test: String::new(),
            };
        } else if line == "failures:" {
            self.section = Section::Failures;
        } else if self.section == Section::Failures {
            self.outcome.printed.push(line.to_owned());
        } else if let Section::Successes { test } = &mut self.section {
            let heading = line.strip_prefix("---- ");
            if let Some(name) = heading.and_then(|line| line.strip_suffix(" stdout ----")) {
                name.clone_into(test);
            } else if !test.is_empty() {
                let test = test.clone();
                self.output(&test, line);
            }
        } else if self.section == Section::Verdicts
            && let Some((name, verdict)) = line
                .strip_prefix("test ")
                .and_then(|line| line.split_once(" ... "))
        {
            self.verdict(name, verdict);
        }
    }

    /// Returns the results after the run has ended.
    pub fn finish(mut self) -> Outcome {
        self.close_dead_binary();
        self.outcome.elsewhere = self.all_elsewhere.len();
        let nowhere = self.all_elsewhere.difference(&self.all_ran);
        self.outcome.nowhere = nowhere.cloned().collect();
        self.outcome
    }

    fn verdict(&mut self, name: &str, verdict: &str) {
        let outcome = &mut self.outcome;
        if verdict.ends_with("FAILED") {
            outcome.failures.push(name.to_owned());
        } else if verdict == "ok" {
            self.passed.insert(name.to_owned());
        } else if let Some(words) = verdict.strip_prefix("ignored") {
            let words = words.strip_prefix(", ").unwrap_or("without a reason");
            let reason = format!("ignored: {words}");
            outcome.skips.push(format!("{SKIPPED}: {name}: {reason}"));
            *outcome.reasons.entry(reason).or_default() += 1;
        }
    }

    /// Processes a line printed by `test`, which passed.
    fn output(&mut self, test: &str, line: &str) {
        let outcome = &mut self.outcome;
        let Some((kind, name, reason)) = parse_skip(line) else {
            if is_like_a_skip(line) {
                let what = "not of the form `SKIPPED: <test>: <reason>`";
                outcome.failures.push(format!("{test}: {what}: {line}"));
            }
            return;
        };
        let is_it = name == test || test.ends_with(&format!("::{name}"));
        if !is_it {
            let what = "a line with the name of another test";
            outcome.failures.push(format!("{test}: {what}: {line}"));
        } else if kind == ELSEWHERE {
            self.elsewhere.insert(test.to_owned());
        } else if self.skipped.insert(test.to_owned()) {
            outcome.skips.push(line.to_owned());
            *outcome.reasons.entry(reason.to_owned()).or_default() += 1;
        }
    }

    fn close_binary(&mut self) {
        self.section = Section::Verdicts;
        let idle = |test: &String| self.skipped.contains(test) || self.elsewhere.contains(test);
        let passed = std::mem::take(&mut self.passed).into_iter();
        self.all_ran.extend(passed.filter(|test| !idle(test)));
        self.all_elsewhere.append(&mut self.elsewhere);
        self.skipped.clear();
    }

    /// A binary that was killed or aborted prints no result, so its passed tests are unknown.
    fn close_dead_binary(&mut self) {
        if self.open {
            self.outcome.counts.failed += 1;
            let failures = &mut self.outcome.failures;
            failures.push("(a test binary died before it reported its results)".to_owned());
            self.open = false;
            self.passed.clear();
            self.close_binary();
        }
    }
}

/// Parses kind, test and reason of a line that reports a test as not run.
fn parse_skip(line: &str) -> Option<(&str, &str, &str)> {
    let (kind, rest) = line.split_once(": ")?;
    let (test, rest) = rest.split_once(": ")?;
    let reason = rest.split_once(": ").map_or(rest, |(reason, _)| reason);
    let is_complete = !test.is_empty() && !reason.is_empty();
    ([SKIPPED, ELSEWHERE].contains(&kind) && is_complete).then_some((kind, test, reason))
}

/// Returns true for a line that looks like the report of a skipped test.
fn is_like_a_skip(line: &str) -> bool {
    let line = line.trim_start().to_ascii_lowercase();
    ["skipped:", "skipping", "skip:", "elsewhere:"]
        .iter()
        .any(|start| line.starts_with(start))
}

/// Matches `running 12 tests` or `running 1 test`.
fn starts_binary(line: &str) -> bool {
    line.strip_prefix("running ")
        .and_then(|rest| {
            rest.strip_suffix(" tests")
                .or_else(|| rest.strip_suffix(" test"))
        })
        .is_some_and(|number| number.parse::<usize>().is_ok())
}

/// Parses the passed, failed and ignored counts of `ok. 5 passed; 0 failed; 1 ignored; ...`.
fn parse_result(result: &str) -> Option<[usize; 3]> {
    let (_, numbers) = result.split_once(". ")?;
    let mut parts = numbers.split("; ");
    let mut part = |word: &str| parts.next()?.strip_suffix(word)?.parse().ok();
    Some([part(" passed")?, part(" failed")?, part(" ignored")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> Outcome {
        let mut reader = Reader::new();
        output.lines().for_each(|line| reader.line(line));
        reader.finish()
    }

    fn counts(passed: usize, failed: usize, skipped: usize) -> Counts {
        Counts {
            passed,
            failed,
            skipped,
        }
    }

    const TWO_BINARIES: &str = "\
running 3 tests
test a ... ok
test b ... ignored, slow
test gpu::gemm ... ok

successes:

---- gpu::gemm stdout ----
SKIPPED: gpu::gemm: no CUDA device: of 80 GB: or more
SKIPPED: gemm: said twice


successes:
    a
    gpu::gemm

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s


running 1 test
test src/lib.rs - f (line 3) ... ok

successes:

successes:
    src/lib.rs - f (line 3)

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.51s
";

    #[test]
    fn sums_binaries_and_takes_skipped_tests_out_of_the_passed_ones() {
        let outcome = read(TWO_BINARIES);
        assert_eq!(outcome.counts, counts(2, 0, 2));
        assert_eq!(
            outcome.skips,
            [
                "SKIPPED: b: ignored: slow",
                "SKIPPED: gpu::gemm: no CUDA device: of 80 GB: or more"
            ]
        );
        let reasons: Vec<(&str, usize)> = outcome
            .reasons
            .iter()
            .map(|(reason, count)| (reason.as_str(), *count))
            .collect();
        assert_eq!(reasons, [("ignored: slow", 1), ("no CUDA device", 1)]);
        assert!(outcome.failures.is_empty());
        assert_eq!(outcome.counts.to_string(), "2 passed, 0 failed, 2 skipped");
    }

    /// Returns the output of a binary with one test, `a::b`, that passes and prints `output`.
    fn binary(output: &str) -> String {
        format!(
            "running 1 test\ntest a::b ... ok\n\nsuccesses:\n\n---- a::b stdout ----\n{output}\n\n\
             successes:\n    a::b\n\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; \
             0 filtered out; finished in 0.00s\n"
        )
    }

    #[test]
    fn a_test_that_runs_on_another_device_is_counted_there() {
        let (flex, cube) = (binary("ELSEWHERE: a::b: Cube"), binary("output"));
        for runs in [[&*flex, &*cube], [&*cube, &*flex]] {
            let outcome = read(&runs.concat());
            assert_eq!(outcome.counts, counts(1, 0, 0));
            assert_eq!((outcome.elsewhere, outcome.nowhere.len()), (1, 0));
        }
    }

    #[test]
    fn a_test_that_runs_on_no_device_is_found() {
        for other in ["ELSEWHERE: a::b: Flex", "SKIPPED: a::b: no CUDA device"] {
            let outcome = read(&[binary("ELSEWHERE: a::b: Cube"), binary(other)].concat());
            assert_eq!(outcome.counts.passed, 0);
            assert_eq!(outcome.nowhere, ["a::b"], "{other}");
        }
        let failed = binary("").replace("... ok", "... FAILED");
        let outcome = read(&[binary("ELSEWHERE: a::b: Cube"), failed].concat());
        assert_eq!(outcome.nowhere, ["a::b"]);
    }

    #[test]
    fn lines_that_do_not_name_test_and_reason_are_failures() {
        for line in [
            "SKIPPED: no CUDA device",
            "SKIPPED",
            "skipped: a::b: no CUDA device",
            "  SKIPPED: a::b: no CUDA device",
            "SKIPPED: a::b: ",
            "Skipping: no GPU",
            "SKIPPED: other::b: no CUDA device",
        ] {
            let outcome = read(&binary(line));
            // Any line may start with `SKIPPED` alone.
            let expected = usize::from(line != "SKIPPED");
            assert_eq!(outcome.failures.len(), expected, "{line}");
            assert!(outcome.skips.is_empty(), "{line}");
        }
    }

    #[test]
    fn an_ignored_test_needs_words() {
        let output = "running 1 test\ntest a ... ignored\n\ntest result: ok. 0 passed; 0 failed; \
                      1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let outcome = read(output);
        assert_eq!(outcome.counts, counts(0, 0, 1));
        assert_eq!(outcome.reasons["ignored: without a reason"], 1);
    }

    #[test]
    fn a_failed_test_that_printed_skipped_stays_failed() {
        let outcome = read(
            "\
running 2 tests
test ok_one ... ok
test bad ... FAILED

successes:

---- ok_one stdout ----
SKIPPED is not at the start of a report


successes:
    ok_one

failures:

---- bad stdout ----
SKIPPED: bad: then it panicked


failures:
    bad

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
",
        );
        assert_eq!(outcome.counts, counts(1, 1, 0));
        assert!(outcome.skips.is_empty());
        assert_eq!(outcome.failures, ["bad"]);
    }

    #[test]
    fn a_binary_that_dies_is_a_failure() {
        let dead = "running 2 tests\ntest a ... ok\n";
        assert_eq!(read(dead).counts, counts(0, 1, 0));
        let followed = format!("{dead}{TWO_BINARIES}");
        assert_eq!(read(&followed).counts, counts(2, 1, 2));
    }

    #[test]
    fn nothing_ran() {
        assert_eq!(read("error: could not compile"), Outcome::default());
    }

    #[test]
    fn knows_its_own_line() {
        assert!(is_counts_line("12 passed, 0 failed, 3 skipped"));
        for other in [
            "12 passed, 0 failed",
            "x passed, 0 failed, 3 skipped",
            "12 passed; 0 failed",
            "12 passed, 0 failed, 3 skipped, 1 lost",
        ] {
            assert!(!is_counts_line(other), "{other}");
        }
    }
}
