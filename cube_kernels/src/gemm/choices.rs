//! Choices that were made, by device and problem: a GEMM whose problem was planned, or computed
//! before, runs the same kernel without asking all kernels again.

use std::{
    any::TypeId,
    collections::{HashMap, HashSet},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use cubecl::{client::Client, device::DeviceId, dry_run::launch_mode};

use super::{
    dispatch::Choice,
    operand::OperandLayout,
    problem::{GemmShape, Problem},
};
use crate::StoredForm;

/// Maximum number of cached choices. Beyond it the cache is cleared, since an unbounded variety of
/// shapes (numbers of tokens) would fill the memory.
const MOST_CHOICES: usize = 4096;

/// Runtime and device.
type Service = (TypeId, DeviceId);

type Choices = HashMap<(Service, Problem), Arc<Choice>>;

static CHOICES: LazyLock<Mutex<Choices>> = LazyLock::new(Mutex::default);

fn choices() -> MutexGuard<'static, Choices> {
    CHOICES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn service_of(client: &Client) -> Service {
    let id = client.service_id();
    (id.service, id.device)
}

/// Returns the choice for `problem` on the device of `client`, if it was made.
pub(super) fn known(client: &Client, problem: &Problem) -> Option<Arc<Choice>> {
    let key = (service_of(client), *problem);
    choices().get(&key).cloned()
}

/// Keeps `choice` for `problem` on the device of `client`.
pub(super) fn keep(client: &Client, problem: &Problem, choice: Choice) -> Arc<Choice> {
    let (device, choice) = (service_of(client), Arc::new(choice));
    let mut choices = choices();
    if choices.len() >= MOST_CHOICES {
        choices.clear();
    }
    // A run that only compiles skips self-checks, so a later run chooses again.
    if launch_mode().is_skipped() {
        return choice;
    }
    choices.insert((device, *problem), choice.clone());
    for written in as_written(problem, choice.packed_reads(problem)) {
        let known = choices.entry((device, written));
        known.or_insert_with(|| choice.clone());
    }
    choice
}

/// Returns the problems of the same GEMM if one or both operands were written in the form that the
/// chosen kernel reads instead of being dequantized before it. The choice is the same, because the
/// time to dequantize an operand is that of no kernel.
pub(super) fn as_written(problem: &Problem, reads: StoredForm) -> Vec<Problem> {
    if reads != StoredForm::Bf16Unscaled {
        return Vec::new();
    }
    let written = |layout| match layout {
        OperandLayout::Packed => OperandLayout::KMajor,
        layout => layout,
    };
    let (a, b) = (written(problem.a), written(problem.b));
    let layouts = [(a, problem.b), (problem.a, b), (a, b)];
    layouts.map(|(a, b)| Problem { a, b, ..*problem }).into()
}

/// Returns the number of selected kernels for GEMMs of this shape in this process. For tests of
/// other crates, too, which are compiled without the feature `proof`.
pub fn selections(shape: impl Into<GemmShape>) -> usize {
    let shape = shape.into();
    let choices = choices();
    let of_shape = choices.iter().filter(|((_, it), _)| it.shape == shape);
    // Problems that only differ in the form of written operands share one selection.
    let distinct: HashSet<*const Choice> = of_shape.map(|(_, it)| Arc::as_ptr(it)).collect();
    distinct.len()
}
