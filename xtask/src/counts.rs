//! Sums up what libtest prints.
//!
//! A test that cannot run here (no GPU, no CUDA compiler) prints `SKIPPED: <test name>: <reason>`
//! and returns. libtest calls that a pass; this project does not. The runs are started with
//! `--show-output`, so those lines stand in the section of the test that printed them:
//!
//! ```text
//! running 2 tests
//! test gpu::gemm ... ok
//! test codec::e2m1 ... ok
//!
//! successes:
//!
//! ---- gpu::gemm stdout ----
//! SKIPPED: gpu::gemm: no CUDA device
//!
//! successes:
//!     codec::e2m1
//!     gpu::gemm
//!
//! test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
//! ```

use std::fmt;

/// What a skipped test prints, before its name and the reason.
const SKIPPED: &str = "SKIPPED:";

/// Sums over all test binaries of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that ran and passed.
    pub passed: usize,
    /// Tests that failed; a test binary that died before it could report counts as one.
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

/// True for the line that [`Counts`] prints.
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    /// The list of tests with their verdicts, or nothing of interest.
    Verdicts,
    /// The output of tests that passed; `counted` once the current test was found to be skipped.
    Successes { counted: bool },
    /// The output of tests that failed.
    Failures,
}

/// Reads the output of a `cargo test` run line by line.
pub struct Reader {
    counts: Counts,
    section: Section,
    /// A binary said `running N tests` and has not reported a result yet.
    open: bool,
    skipped_in_binary: usize,
    /// The `SKIPPED:` lines, as printed.
    pub skips: Vec<String>,
    /// Names of the tests that failed, and of what else went wrong.
    pub failures: Vec<String>,
}

impl Reader {
    /// A reader that has seen nothing yet.
    pub fn new() -> Self {
        Self {
            counts: Counts::default(),
            section: Section::Verdicts,
            open: false,
            skipped_in_binary: 0,
            skips: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Takes the next line, without its line end.
    pub fn line(&mut self, line: &str) {
        if starts_binary(line) {
            self.close_dead_binary();
            self.open = true;
            self.section = Section::Verdicts;
            self.skipped_in_binary = 0;
        } else if let Some(result) = line.strip_prefix("test result: ") {
            if let Some([passed, failed, ignored]) = parse_result(result) {
                // A skipped test is one of the passed ones in libtest's eyes.
                self.counts.passed += passed.saturating_sub(self.skipped_in_binary);
                self.counts.failed += failed;
                self.counts.skipped += ignored + self.skipped_in_binary;
                self.open = false;
                self.section = Section::Verdicts;
            }
        } else if line == "successes:" {
            self.section = Section::Successes { counted: true };
        } else if line == "failures:" {
            self.section = Section::Failures;
        } else if line.starts_with("---- ") && line.ends_with(" stdout ----") {
            if let Section::Successes { counted } = &mut self.section {
                *counted = false;
            }
        } else if line.starts_with(SKIPPED) {
            if let Section::Successes { counted } = &mut self.section
                && !*counted
            {
                *counted = true;
                self.skipped_in_binary += 1;
                self.skips.push(line.to_owned());
            }
        } else if self.section == Section::Verdicts
            && let Some(name) = line
                .strip_prefix("test ")
                .and_then(|s| s.strip_suffix("FAILED"))
        {
            self.failures
                .push(name.trim_end_matches([' ', '.']).to_owned());
        }
    }

    /// The sums, once the run has ended.
    pub fn finish(mut self) -> (Counts, Vec<String>, Vec<String>) {
        self.close_dead_binary();
        (self.counts, self.skips, self.failures)
    }

    /// A binary that was killed or aborted prints no result; what it had passed is unknown.
    fn close_dead_binary(&mut self) {
        if self.open {
            self.counts.failed += 1;
            self.failures
                .push("(a test binary died before it reported its results)".to_owned());
            self.open = false;
        }
    }
}

/// `running 12 tests` or `running 1 test`.
fn starts_binary(line: &str) -> bool {
    line.strip_prefix("running ")
        .and_then(|rest| {
            rest.strip_suffix(" tests")
                .or_else(|| rest.strip_suffix(" test"))
        })
        .is_some_and(|number| number.parse::<usize>().is_ok())
}

/// Passed, failed and ignored of `ok. 5 passed; 0 failed; 1 ignored; ...`.
fn parse_result(result: &str) -> Option<[usize; 3]> {
    let (_, numbers) = result.split_once(". ")?;
    let mut parts = numbers.split("; ");
    let mut part = |word: &str| parts.next()?.strip_suffix(word)?.parse().ok();
    Some([part(" passed")?, part(" failed")?, part(" ignored")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(output: &str) -> (Counts, Vec<String>, Vec<String>) {
        let mut reader = Reader::new();
        output.lines().for_each(|line| reader.line(line));
        reader.finish()
    }

    const TWO_BINARIES: &str = "\
running 3 tests
test a ... ok
test b ... ignored, slow
test gpu::gemm ... ok

successes:

---- gpu::gemm stdout ----
SKIPPED: gpu::gemm: no CUDA device
SKIPPED: gpu::gemm: said twice


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
        let (counts, skips, failures) = read(TWO_BINARIES);
        assert_eq!(
            counts,
            Counts {
                passed: 2,
                failed: 0,
                skipped: 2
            }
        );
        assert_eq!(skips, ["SKIPPED: gpu::gemm: no CUDA device"]);
        assert!(failures.is_empty());
        assert_eq!(counts.to_string(), "2 passed, 0 failed, 2 skipped");
    }

    #[test]
    fn a_failed_test_that_printed_skipped_stays_failed() {
        let (counts, skips, failures) = read(
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
        assert_eq!(
            counts,
            Counts {
                passed: 1,
                failed: 1,
                skipped: 0
            }
        );
        assert!(skips.is_empty());
        assert_eq!(failures, ["bad"]);
    }

    #[test]
    fn a_binary_that_dies_is_a_failure() {
        let dead = "running 2 tests\ntest a ... ok\n";
        assert_eq!(
            read(dead).0,
            Counts {
                passed: 0,
                failed: 1,
                skipped: 0
            }
        );
        let followed = format!("{dead}{TWO_BINARIES}");
        assert_eq!(
            read(&followed).0,
            Counts {
                passed: 2,
                failed: 1,
                skipped: 2
            }
        );
    }

    #[test]
    fn nothing_ran() {
        assert_eq!(read("error: could not compile").0, Counts::default());
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
