//! Checks of hardware that the kernels have not run on, for `nvfp4 dev oracle`: from single
//! instructions to whole GEMMs of the `tcgen05` kernel, so that the first check that fails is
//! closest to the cause, and the order of random bits in `cvt.rs`.
//!
//! On other devices, checks use the software model of the instructions or the device's own kernels.
//! Checks without either are left out.

#[cfg(feature = "proof")]
pub(crate) mod instances;
mod probes;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod random_bits;

pub use random_bits::{answer_random_bits, has_stochastic_instruction, match_random_bits};

use cubecl::client::Client;
use serde::{Deserialize, Serialize};

use crate::{
    Format, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    cube::ptx::BlockScaled,
    gemm::{
        Gemm, Plan,
        exact::{ExactGemm, inexact},
        gemm,
        kernels::sm100::{Sm100Form, Sm100Tile, Tcgen05},
    },
    memory::download,
    reference::{RandomBits, compare_random_bits, read_random_bits},
    tensor::{FloatKind, Matrix},
};
use probes::Executor;

/// Verdict of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "result", content = "detail")]
pub enum Verdict {
    /// The check passed.
    Passed,
    /// The check failed: the first difference, or the device error.
    Failed(String),
    /// The check did not run, for this reason.
    LeftOut(String),
}

/// Outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Executor: the instructions, the software model, or a kernel of the device.
    pub on: String,
    /// Additional remarks.
    pub notes: Vec<String>,
}

impl Outcome {
    /// Creates the outcome of a check that ran on `on`.
    pub fn new(on: impl Into<String>, found: Result<(), String>) -> Self {
        Self {
            verdict: match found {
                Ok(()) => Verdict::Passed,
                Err(error) => Verdict::Failed(error),
            },
            on: on.into(),
            notes: Vec::new(),
        }
    }

    /// Creates the outcome of a check that did not run.
    pub fn left_out(why: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::LeftOut(why.into()),
            on: "nothing".into(),
            notes: Vec::new(),
        }
    }

    /// Adds notes.
    pub fn notes(self, notes: Vec<String>) -> Self {
        Self { notes, ..self }
    }
}

/// A check. Variants are in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Writes and reads tensor memory.
    TmemRoundTrip,
    /// Copies block scales to tensor memory and dumps it.
    ScaleCopy,
    /// Single NVFP4 multiplication in which each sum is one product.
    OneHotMma,
    /// Single MXFP8 multiplication in which each sum is one product.
    OneHotMxfp8,
    /// Dense GEMMs with exact sums.
    IntegerDense,
    /// Dense GEMMs with exact sums and factors per row and column.
    IntegerPerToken,
    /// M-grouped GEMMs with exact sums.
    IntegerMGrouped,
    /// K-grouped GEMMs with exact sums.
    IntegerKGrouped,
    /// MXFP8 GEMMs with exact sums, dense and grouped.
    IntegerMxfp8,
    /// Two-CTA GEMMs with exact sums, dense and M-grouped, in both formats.
    IntegerTwoCta,
    /// GEMMs with swapped operands and exact sums, dense and M-grouped, in both formats.
    IntegerSwapAb,
    /// Comparison of the kernel with cuBLASLt on the same operands.
    CublasLt,
    /// Order of random bits in `cvt.rs`.
    CvtRs,
}

impl Check {
    /// All checks in order.
    pub const ALL: [Self; 13] = [
        Self::TmemRoundTrip,
        Self::ScaleCopy,
        Self::OneHotMma,
        Self::OneHotMxfp8,
        Self::IntegerDense,
        Self::IntegerPerToken,
        Self::IntegerMGrouped,
        Self::IntegerKGrouped,
        Self::IntegerMxfp8,
        Self::IntegerTwoCta,
        Self::IntegerSwapAb,
        Self::CublasLt,
        Self::CvtRs,
    ];

    /// Returns the name in reports and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::TmemRoundTrip => "tmem-round-trip",
            Self::ScaleCopy => "scale-copy-dump",
            Self::OneHotMma => "one-hot-mma",
            Self::OneHotMxfp8 => "one-hot-mma-mxfp8",
            Self::IntegerDense => "integer-gemm-dense",
            Self::IntegerPerToken => "integer-gemm-per-token",
            Self::IntegerMGrouped => "integer-gemm-m-grouped",
            Self::IntegerKGrouped => "integer-gemm-k-grouped",
            Self::IntegerMxfp8 => "integer-gemm-mxfp8",
            Self::IntegerTwoCta => "integer-gemm-two-cta",
            Self::IntegerSwapAb => "integer-gemm-swap-ab",
            Self::CublasLt => "equal-to-cublaslt",
            Self::CvtRs => "cvt-rs-order",
        }
    }

    /// Returns the check with this name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|check| check.name() == name)
    }

    /// Runs the check on the device of `client` and waits for it.
    pub fn run(self, client: &Client) -> Outcome {
        let device = TestDevice::of(client);
        match self {
            Self::TmemRoundTrip => match device {
                TestDevice::Sm100 => Outcome::new(device.probes(), probes::tmem_round_trip(client)),
                _ => Outcome::left_out(NO_TMEM),
            },
            Self::ScaleCopy => Outcome::new(
                device.probes(),
                probes::scale_copy(client, device.executor()),
            ),
            Self::OneHotMma => device.one_hot(client, BlockScaled::Nvfp4),
            Self::OneHotMxfp8 => device.one_hot(client, BlockScaled::Mxfp8),
            Self::IntegerDense => {
                let shapes = [
                    (1, 8, 32),
                    (128, 256, 64),
                    (128, 256, 1024),
                    (257, 264, 352),
                    (300, 520, 2048),
                ];
                let cases = shapes.map(|shape| ExactGemm::dense(client, NVFP4, shape, false));
                device.integers(client, Sm100Form::OneCta, cases)
            }
            Self::IntegerPerToken => {
                let shapes = [(130, 264, 352), (64, 128, 1024)];
                let cases = shapes.map(|shape| ExactGemm::dense(client, NVFP4, shape, true));
                device.integers(client, Sm100Form::OneCta, cases)
            }
            Self::IntegerMGrouped => {
                let groups: [&[usize]; 3] = [&[0, 1, 127, 129, 0, 65], &[300], &[5, 0]];
                let case = |sizes: &[usize]| ExactGemm::m_grouped(client, NVFP4, sizes, (264, 224));
                device.integers(client, Sm100Form::OneCta, groups.map(case))
            }
            Self::IntegerKGrouped => {
                let groups: [&[usize]; 3] = [&[64, 0, 320, 128], &[1024, 64, 0], &[16, 0, 80, 304]];
                let case = |sizes: &[usize]| ExactGemm::k_grouped(client, NVFP4, sizes, (130, 264));
                device.integers(client, Sm100Form::OneCta, groups.map(case))
            }
            Self::IntegerMxfp8 => {
                let cases = [
                    ExactGemm::dense(client, MXFP8, (128, 256, 128), false),
                    ExactGemm::dense(client, MXFP8, (129, 264, 1056), false),
                    ExactGemm::m_grouped(client, MXFP8, &[0, 1, 129, 65], (264, 224)),
                    ExactGemm::k_grouped(client, MXFP8, &[32, 0, 320, 96], (130, 264)),
                ];
                device.integers(client, Sm100Form::OneCta, cases)
            }
            Self::IntegerTwoCta => {
                let cases = [
                    ExactGemm::dense(client, NVFP4, (256, 256, 256), false),
                    ExactGemm::dense(client, NVFP4, (389, 520, 1376), true),
                    ExactGemm::m_grouped(client, NVFP4, &[0, 1, 257, 129, 300], (264, 224)),
                    ExactGemm::dense(client, MXFP8, (389, 264, 736), false),
                    ExactGemm::m_grouped(client, MXFP8, &[0, 1, 257, 129], (264, 224)),
                ];
                device.integers(client, Sm100Form::TwoCta, cases)
            }
            Self::IntegerSwapAb => {
                let cases = [
                    ExactGemm::dense(client, NVFP4, (8, 128, 256), false),
                    ExactGemm::dense(client, NVFP4, (130, 264, 352), true),
                    ExactGemm::m_grouped(client, NVFP4, &[0, 1, 65, 17, 130], (264, 224)),
                    ExactGemm::dense(client, MXFP8, (9, 136, 352), false),
                    ExactGemm::m_grouped(client, MXFP8, &[0, 1, 65, 17, 130], (264, 224)),
                ];
                device.integers(client, Sm100Form::SwapAb, cases)
            }
            Self::CublasLt => match device {
                TestDevice::Sm100 => equal_to_cublaslt(client),
                _ => {
                    Outcome::left_out("cuBLASLt has FP4 GEMMs on compute capability 10.0 and 10.3")
                }
            },
            Self::CvtRs => cvt_rs(client),
        }
    }
}

/// Operand formats.
const NVFP4: Format = Format::Nvfp4;
const MXFP8: Format = Format::Mxfp8;

/// Reason for leaving out checks of tensor memory.
const NO_TMEM: &str = "the device has no tensor memory: compute capability 10.0 or 10.3";

/// Class of device, which determines the checks that can run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum TestDevice {
    /// Compute capability 10.0 or 10.3: runs the instructions.
    Sm100,
    /// Compute capability 9.0: runs the kernel with the software model, on hardware TMA and
    /// barriers.
    Sm90,
    /// Any other device: runs its own kernels, and single commands of the model.
    Other,
}

impl TestDevice {
    fn of(client: &Client) -> Self {
        match Capabilities::of(client).gemm {
            GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05 => Self::Sm100,
            GemmBackend::Sm90Wgmma => Self::Sm90,
            _ => Self::Other,
        }
    }

    fn executor(self) -> Executor {
        match self {
            Self::Sm100 => Executor::Instruction,
            Self::Sm90 | Self::Other => Executor::Model,
        }
    }

    /// Returns the description of the probes' executor.
    fn probes(self) -> &'static str {
        match self.executor() {
            Executor::Instruction => "tcgen05 instructions",
            Executor::Model => "software model of single commands",
        }
    }

    /// Multiplies one-hot rows in `format`.
    fn one_hot(self, client: &Client, format: BlockScaled) -> Outcome {
        let found = probes::one_hot_mma(client, format, self.executor());
        Outcome::new(self.probes(), found)
    }

    /// Computes each of `cases` in `form` and compares the results.
    fn integers<const N: usize>(
        self,
        client: &Client,
        form: Sm100Form,
        cases: [Result<ExactGemm, Nvfp4Error>; N],
    ) -> Outcome {
        let on = match self {
            Self::Sm100 => "tcgen05 kernel",
            Self::Sm90 => "tcgen05 kernel with the software model",
            Self::Other => "the device's own kernel",
        };
        let mut notes = Vec::new();
        let mut found = Ok(());
        for case in cases {
            found = case.map_err(|error| error.to_string()).and_then(|case| {
                notes.push(case.what.clone());
                let output = self.multiply(client, &case, form);
                let output = output.map_err(|error| format!("{}: {error}", case.what))?;
                case.compare(client, &output)
            });
            if found.is_err() {
                break;
            }
        }
        Outcome::new(on, found).notes(notes)
    }

    /// Computes the GEMM of `case` with a kernel that the device supports.
    fn multiply(
        self,
        client: &Client,
        case: &ExactGemm,
        form: Sm100Form,
    ) -> Result<Matrix, Nvfp4Error> {
        let request = Gemm::of_exact(case);
        let format = match case.a.layout.format {
            Format::Mxfp8 => BlockScaled::Mxfp8,
            Format::Nvfp4 | Format::Mxfp4 => BlockScaled::Nvfp4,
        };
        let tile = Sm100Tile::instruction(format, form);
        let request = match self {
            Self::Sm100 => request
                .backend(GemmBackend::Sm100Tcgen05)
                .plan(Plan::from(Tcgen05(tile))),
            Self::Sm90 => request.plan(Plan::from(Tcgen05(tile.in_software(1)))),
            Self::Other => request,
        };
        gemm(client, &request).map(|output| output.matrix)
    }
}

/// Compares the kernel with cuBLASLt: exact sums must be equal. For other sums the share of equal
/// elements is noted, since the library has its own order of additions.
fn equal_to_cublaslt(client: &Client) -> Outcome {
    let mut notes = Vec::new();
    let found = compare_with_cublaslt(client, &mut notes);
    Outcome::new("tcgen05 kernel and cuBLASLt", found).notes(notes)
}

fn compare_with_cublaslt(client: &Client, notes: &mut Vec<String>) -> Result<(), String> {
    let said = |error: Nvfp4Error| error.to_string();
    for shape in [(256, 512, 1024), (300, 520, 2048)] {
        let case = ExactGemm::dense(client, NVFP4, shape, false).map_err(said)?;
        let request = Gemm::of_exact(&case).backend(GemmBackend::CublasLt);
        let output = gemm(client, &request).map_err(said)?;
        case.compare(client, &output.matrix)
            .map_err(|error| format!("cuBLASLt, {error}"))?;
        let request = request.backend(GemmBackend::Sm100Tcgen05);
        let output = gemm(client, &request).map_err(said)?;
        case.compare(client, &output.matrix)?;
        notes.push(format!("{}: equal", case.what));
    }
    for (m, n, k) in [(256, 512, 256), (512, 512, 4096)] {
        let (a, b) = inexact(client, (m, n, k)).map_err(said)?;
        let sums = |backend| -> Result<Vec<f32>, String> {
            let request = Gemm::new(&a, &b).out(FloatKind::F32).backend(backend);
            let matrix = gemm(client, &request).map_err(said)?.matrix;
            let bytes = download(client, &matrix.handle, 4 * m * n).map_err(said)?;
            let words = bytes.chunks_exact(4);
            Ok(words
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect())
        };
        let own = sums(GemmBackend::Sm100Tcgen05)?;
        let library = sums(GemmBackend::CublasLt)?;
        let pairs = || own.iter().zip(&library);
        let equal = pairs().filter(|(x, y)| x.to_bits() == y.to_bits()).count();
        let largest = pairs().fold(0f32, |most, (x, y)| most.max((x - y).abs()));
        let magnitude = library.iter().fold(0f32, |most, x| most.max(x.abs()));
        notes.push(format!(
            "random operands, {m} x {n} x {k}: {equal} of {} bits equal, the largest difference \
             {largest:e}, the largest output {magnitude:e}",
            m * n
        ));
        // Reordering these `f32` sums stays far below the bound; a wrong layout exceeds it by far.
        let bound = 1e-3 * magnitude;
        // NaN fails this comparison.
        let is_near = pairs().all(|(x, y)| (x - y).abs() <= bound);
        if !is_near {
            return Err(format!(
                "{m} x {n} x {k}: sums differ by up to {largest:e}, more than {bound:e}"
            ));
        }
    }
    Ok(())
}

/// Reports the order of random bits, and checks the device's results against the oracle in that
/// order.
fn cvt_rs(client: &Client) -> Outcome {
    let on = match has_stochastic_instruction(client) {
        true => "cvt.rs.satfinite.e2m1x4.f32",
        false => "the software form",
    };
    let mut notes = Vec::new();
    let found = answer_cvt_rs(client, &mut notes);
    Outcome::new(on, found).notes(notes)
}

fn answer_cvt_rs(client: &Client, notes: &mut Vec<String>) -> Result<(), String> {
    let said = |error: Nvfp4Error| error.to_string();
    let ask = |questions: &[crate::reference::Question]| answer_random_bits(client, questions);
    let bits = read_random_bits(ask).map_err(said)?;
    for (element, positions) in bits.positions.iter().enumerate() {
        notes.push(format!(
            "element {element}: random bits {positions:?}, the least significant first"
        ));
    }
    notes.push(match bits == RandomBits::software() {
        true => "the order of the software form".into(),
        false => "another order than that of the software form".into(),
    });
    let compared = compare_random_bits(&bits, 1 << 16, ask).map_err(said)?;
    match compared.first {
        None => Ok(()),
        Some(((values, word), answer, expected)) => Err(format!(
            "{values:?} by {word:#010x} gave {answer:#06x}, and the oracle {expected:#06x} ({} of \
             {} differ)",
            compared.different, compared.questions
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_have_names() {
        for check in Check::ALL {
            assert_eq!(Check::of(check.name()), Some(check));
        }
        assert_eq!(Check::of("all"), None);
    }

    /// On CubeCL's CPU runtime every check passes that needs neither tensor memory nor the library.
    #[cfg(feature = "cpu")]
    #[test]
    fn checks_run_on_any_device() {
        let client = crate::cpu_client();
        for check in Check::ALL {
            let outcome = check.run(&client);
            let is_left_out = matches!(outcome.verdict, Verdict::LeftOut(_));
            let needs_hardware = [Check::TmemRoundTrip, Check::CublasLt].contains(&check);
            assert_eq!(is_left_out, needs_hardware, "{check:?}: {outcome:?}");
            if !needs_hardware {
                assert_eq!(outcome.verdict, Verdict::Passed, "{check:?}: {outcome:?}");
            }
        }
    }

    #[test]
    fn outcomes_have_a_result_and_a_detail() {
        let outcome = Outcome::new("it", Err("row 3".into()));
        let json = serde_json::to_string(&outcome).unwrap();
        assert_eq!(
            json,
            r#"{"result":"failed","detail":"row 3","on":"it","notes":[]}"#
        );
        assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap(), outcome);
        let left_out = serde_json::to_string(&Outcome::left_out("no GPU")).unwrap();
        assert!(left_out.contains(r#""result":"left-out""#), "{left_out}");
    }
}
