//! Lines by which a test reports that it does not run here, for `cargo xtask test` to count.

use std::fmt::{self, Display};

/// Reason for which a test may skip itself. `cargo xtask test` fails on any other reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Skip {
    /// The device under test is not a CUDA GPU.
    NoGpu,
    /// The machine has fewer CUDA GPUs than the test has ranks.
    NoSecondGpu,
    /// The test requires another compute capability than that of the CUDA GPU under test.
    OtherGpu,
    /// The machine with the CUDA GPU has no cuBLASLt.
    NoCublasLt,
    /// `cargo xtask setup` could not install NVIDIA's compiler.
    NoCudaTools,
    /// Python has no pip, which `cargo xtask setup` needs.
    NoPip,
    /// The processor rounds sums otherwise than the one that wrote the expected values.
    OtherProcessor,
    /// The test takes minutes without a GPU; `cargo xtask test --full` runs it.
    OnlyFull,
}

/// True in a run of `cargo xtask test --full`.
pub fn is_full() -> bool {
    std::env::var_os("NVFP4_TEST_FULL").is_some()
}

impl Skip {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::NoGpu,
        Self::NoSecondGpu,
        Self::OtherGpu,
        Self::NoCublasLt,
        Self::NoCudaTools,
        Self::NoPip,
        Self::OtherProcessor,
        Self::OnlyFull,
    ];

    /// Returns the reason as it is printed.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::NoGpu => "no CUDA device",
            Self::NoSecondGpu => "no second CUDA device",
            Self::OtherGpu => "no CUDA device of this compute capability",
            Self::NoCublasLt => "no cuBLASLt",
            Self::NoCudaTools => "no CUDA tools",
            Self::NoPip => "no pip",
            Self::OtherProcessor => "no expected values for this processor",
            Self::OnlyFull => "only with --full",
        }
    }

    /// Prints that `test` is skipped: `SKIPPED: <test>: <reason>`, and `: <detail>` after it if
    /// `detail` is not empty.
    pub fn print(self, test: &str, detail: impl Display) {
        println!("{}", line("SKIPPED", test, self.reason(), detail));
    }
}

impl Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())
    }
}

/// The only device on which a test runs. The test is not counted as skipped: `cargo xtask test`
/// runs the suite on both devices, and fails if the test passed on neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// Burn's Flex backend.
    Flex,
    /// A device of CubeCL.
    Cube,
}

impl Elsewhere {
    /// Prints that `test` runs on another device: `ELSEWHERE: <test>: <device>`.
    pub fn print(self, test: &str) {
        println!("{}", line("ELSEWHERE", test, &format!("{self:?}"), ""));
    }
}

fn line(what: &str, test: &str, reason: &str, detail: impl Display) -> String {
    let detail = detail.to_string().replace('\n', " ");
    match detail.is_empty() {
        true => format!("{what}: {test}: {reason}"),
        false => format!("{what}: {test}: {reason}: {detail}"),
    }
}

/// Returns the name of the running test, which is the name of its thread in libtest.
///
/// # Panics
/// If another thread calls it.
pub fn test_name() -> String {
    let thread = std::thread::current();
    thread.name().expect("the thread of a test").to_owned()
}

/// Returns from a test with a [`Skip`](crate::Skip) and prints its line: `skip!(NoGpu)`, or
/// `skip!(NoGpu, "format {}", string)` with a detail.
#[macro_export]
macro_rules! skip {
    ($reason:ident) => {
        $crate::skip!($reason, "")
    };
    ($reason:ident, $($detail:tt)+) => {{
        $crate::Skip::$reason.print(&$crate::test_name(), format_args!($($detail)+));
        return;
    }};
}

/// Returns from a test that runs only on another device, and prints its line: `elsewhere!(Flex)`.
#[macro_export]
macro_rules! elsewhere {
    ($device:ident) => {{
        $crate::Elsewhere::$device.print(&$crate::test_name());
        return;
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_has_the_name_of_the_test() {
        assert_eq!(
            test_name(),
            "skip::tests::the_thread_has_the_name_of_the_test"
        );
    }

    #[test]
    fn lines() {
        let reason = Skip::NoGpu.reason();
        assert_eq!(
            line("SKIPPED", "a::b", reason, ""),
            "SKIPPED: a::b: no CUDA device"
        );
        assert_eq!(
            line("SKIPPED", "a::b", reason, "of two\nlines"),
            "SKIPPED: a::b: no CUDA device: of two lines"
        );
    }

    /// A reader splits a line at ": ".
    #[test]
    fn reasons_are_told_apart() {
        for (i, skip) in Skip::ALL.into_iter().enumerate() {
            assert!(!skip.reason().contains(": "), "{skip}");
            let others = &Skip::ALL[i + 1..];
            assert!(others.iter().all(|other| other.reason() != skip.reason()));
        }
    }
}
