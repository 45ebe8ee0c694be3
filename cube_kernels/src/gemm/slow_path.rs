//! Tracing events for GEMMs that dequantize operands which the device's tensor cores could multiply
//! directly.

use std::{
    collections::HashSet,
    sync::{LazyLock, Mutex},
};

use super::{
    dispatch::{Choice, multiplies_codes},
    problem::{GemmShape, Problem, Refusal},
};
use crate::capabilities::{Capabilities, GemmBackend};

/// Returns the reasons why a GEMM takes a slower kernel than the device has for its operands, one
/// per faster kernel; empty if it does not.
fn reasons<'a>(
    capabilities: &Capabilities,
    problem: &Problem,
    choice: &'a Choice,
) -> Vec<(&'static str, &'a Refusal)> {
    let has_units = matches!(
        capabilities.gemm,
        GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05 | GemmBackend::Sm120BlockScaled
    );
    let is_fast = choice.plan.object().reads_codes_directly();
    // The caller requested this backend.
    if !has_units || is_fast || problem.backend.is_some() || problem.block_scaled().is_none() {
        return Vec::new();
    }
    let capability = capabilities.compute_capability;
    (choice.refusals.iter())
        .filter(|(kernel, _)| multiplies_codes(kernel, capability))
        .map(|(kernel, refusal)| (*kernel, refusal))
        .collect()
}

/// Returns the key of a reason, independent of the GEMM's shape.
fn kind(kernel: &'static str, refusal: &Refusal) -> String {
    let why = match refusal {
        Refusal::Device(why) | Refusal::Operands(why) => why,
        Refusal::Slower { .. } => "slower",
        Refusal::Library(_) => "refused by the library",
        Refusal::SelfCheck(_) => "self-check",
    };
    format!("{kernel}: {why}")
}

/// Reasons already reported in this process.
#[derive(Default)]
struct Reported(Mutex<HashSet<String>>);

impl Reported {
    /// Returns true the first time that `reasons` are given.
    fn is_first(&self, reasons: &[(&'static str, &Refusal)]) -> bool {
        let kinds = reasons
            .iter()
            .map(|(kernel, refusal)| kind(kernel, refusal));
        let kinds: Vec<_> = kinds.collect();
        let mut reported = self.0.lock().unwrap_or_else(|held| held.into_inner());
        reported.insert(kinds.join("; "))
    }
}

static REPORTED: LazyLock<Reported> = LazyLock::new(Reported::default);

/// Reports a GEMM that takes a slower kernel: the first one in the process as a warning with its
/// reasons, all others as debug events, so that `RUST_LOG=nvfp4_kernels=debug` shows each.
pub(super) fn report(capabilities: &Capabilities, problem: &Problem, choice: &Choice) {
    let reasons = reasons(capabilities, problem, choice);
    if reasons.is_empty() {
        return;
    }
    let GemmShape { m, n, k } = problem.shape;
    let (grouped, kernel) = (problem.grouped, &choice.plan);
    let why: Vec<_> = (reasons.iter())
        .map(|(kernel, refusal)| format!("{kernel}: {refusal}"))
        .collect();
    let why = why.join("; ");
    match REPORTED.is_first(&reasons) {
        true => tracing::warn!(
            m, n, k, ?grouped, %kernel, why,
            "gemm without FP4 or FP8 tensor cores; others for the same reason are debug events"
        ),
        false => tracing::debug!(
            m, n, k, ?grouped, %kernel, why,
            "gemm without FP4 or FP8 tensor cores"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{OperandLayout, dispatch::plan, problem::Device};
    use crate::{Nvfp4Error, cube::codec::Conversion};

    fn found(gemm: GemmBackend, capability: u32, problem: &Problem) -> Vec<String> {
        let capabilities = Capabilities {
            device: "a GPU".into(),
            runtime: "cuda",
            compute_capability: Some(capability),
            conversion: Conversion::Sm80,
            gemm,
        };
        let device = Device {
            capabilities: &capabilities,
            sms: 132,
            cublaslt: &|problem| Err(Nvfp4Error::value("k", format!("{}", problem.k), "another")),
            tcgen05: &|_| Ok(()),
        };
        let choice = plan(&device, problem).unwrap();
        let reasons = reasons(&capabilities, problem, &choice);
        let kinds = reasons
            .iter()
            .map(|(kernel, refusal)| kind(kernel, refusal));
        kinds.collect()
    }

    #[test]
    fn only_slower_kernels_are_reported() {
        let packed = |m, n, k| Problem::new([OperandLayout::Packed; 2], (m, n, k));
        let bf16 = Problem::new([OperandLayout::KMajor; 2], (256, 256, 256));
        let dense = packed(256, 256, 256);
        assert!(found(GemmBackend::Sm90Wgmma, 90, &dense).is_empty());
        assert!(found(GemmBackend::Sm120BlockScaled, 120, &dense).is_empty());
        assert!(found(GemmBackend::Sm100Tcgen05, 100, &dense).is_empty());
        assert!(found(GemmBackend::CublasLt, 100, &bf16).is_empty());
        let refused = found(GemmBackend::CublasLt, 100, &dense);
        assert_eq!(refused.len(), 2, "{refused:?}");
        // The library's answer for another shape does not matter.
        assert_eq!(
            refused,
            found(GemmBackend::CublasLt, 100, &packed(256, 256, 512))
        );
        let odd = found(GemmBackend::CublasLt, 100, &packed(256, 256, 272));
        assert!(odd.len() == 2 && odd != refused, "{odd:?}");
        let narrow = found(GemmBackend::Sm120BlockScaled, 120, &packed(256, 260, 256));
        assert_eq!(narrow.len(), 1, "{narrow:?}");
        // The backend was requested.
        let asked = Problem {
            backend: Some(GemmBackend::Cmma),
            ..packed(256, 260, 256)
        };
        assert!(found(GemmBackend::Sm120BlockScaled, 120, &asked).is_empty());
    }

    #[test]
    fn each_reason_is_reported_once() {
        let (reported, one) = (Reported::default(), Refusal::Operands("one"));
        let library = |k: usize| Refusal::Library(Nvfp4Error::value("k", format!("{k}"), "64"));
        assert!(reported.is_first(&[("cublaslt", &one)]));
        assert!(!reported.is_first(&[("cublaslt", &one)]));
        assert!(reported.is_first(&[("cublaslt", &library(48))]));
        assert!(!reported.is_first(&[("cublaslt", &library(80))]));
        assert!(reported.is_first(&[("sm100_block_scaled", &one)]));
    }
}
