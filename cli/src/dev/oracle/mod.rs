//! `nvfp4 dev oracle`: compares device behaviour with the reference.

mod arguments;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod checks;
mod cvt_rs;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod device;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod report;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod subprocess;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod suite;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args)]
pub(crate) struct Oracle {
    #[command(subcommand)]
    question: Question,
}

#[derive(Subcommand)]
enum Question {
    /// Find the order of random bits in cvt.rs.satfinite.e2m1x4, and compare its results
    ///
    /// B200 and B300 have the instruction; other devices run its software form.
    CvtRs(cvt_rs::CvtRs),
    /// Check the tensor-core kernel for B200 and B300 step by step, and write a report
    ///
    /// Covers tensor memory, single instructions and whole GEMMs, each check in a separate process.
    /// Other devices run what they can: the software model of the instructions, or their own
    /// kernels.
    Tcgen05(arguments::Tcgen05),
    /// Run the checks of `tcgen05`, then the test suite and the benchmarks, and write a report
    ///
    /// Needs a folder with the sources of nvfp4. The kernel has never run on hardware: please send
    /// the report of a B200 or B300 to the project.
    All(arguments::All),
    /// Run one check and print its result as JSON
    #[command(hide = true)]
    Check(arguments::OneCheck),
}

impl Oracle {
    pub(crate) fn run(self) -> Result<()> {
        match self.question {
            Question::CvtRs(question) => question.run(),
            Question::Tcgen05(question) => question.run(),
            Question::All(question) => question.run(),
            Question::Check(question) => question.run(),
        }
    }
}
