//! Work that overlaps with exchanges, forward and backward: the order of a rank's operations.
//!
//! Runs in a separate process, because the reporting of events depends on other listeners.

use std::sync::{Arc, Mutex};

use burn_nvfp4::nn::{ExpertDispatch, expert_parameters};
use burn_nvfp4::parallel::{ExpertGroups, ProcessGroup, RankLoss, average_replicated_in_backward};
use tracing::field::{Field, Visit};
use tracing::span;

use super::overlap::cases;
use super::{Case, on_ranks};
use crate::support::flex_only;
use crate::support::own_process::own_process;

/// An event of `tracing`.
#[derive(Default)]
struct Event {
    step: String,
    forks: bool,
    op: String,
    usage: String,
    sizes: Vec<u64>,
}

impl Visit for Event {
    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "step" => self.step = value.into(),
            "op" => self.op = value.into(),
            "usage" => self.usage = value.into(),
            _ => {}
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "forks" {
            self.forks = value;
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if matches!(field.name(), "rows" | "cols") {
            self.sizes.push(value);
        }
    }
}

impl Event {
    /// Returns the text of the event, if it is relevant here. A backend reports no GEMM in high
    /// precision.
    fn line(&self) -> Option<String> {
        // Gate and up of the shared expert have 128 columns, those of the others 96.
        let has = |sizes: [u64; 2]| self.sizes.iter().any(|size| sizes.contains(size));
        match &*self.op {
            "" if self.forks => Some(format!("begin {}", self.step)),
            "" => Some(self.step.clone()),
            "router" => Some(format!("router {}", self.usage)),
            "quantize" | "gemm" if has([48, 96]) => Some("experts".into()),
            "quantize" | "gemm" if has([64, 128]) => Some("shared".into()),
            _ => None,
        }
    }
}

/// Records the operations of its thread, without repetitions.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn add(&self, line: String) {
        let mut lines = self.0.lock().unwrap();
        let is_kernel = line == "shared" || line == "experts";
        if !(is_kernel && lines.last() == Some(&line)) {
            lines.push(line);
        }
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        matches!(
            metadata.target(),
            "burn_nvfp4::collective" | "burn_nvfp4::ops"
        )
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut found = Event::default();
        event.record(&mut found);
        if let Some(line) = found.line() {
            self.add(line);
        }
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// Returns the operations of each rank in a forward and a backward by the output and both losses.
/// The gradients of the router and of the shared expert are averaged as soon as they are ready.
fn steps(case: &Case) -> Vec<Vec<String>> {
    // A listener must exist before the first event: otherwise tracing disables the events.
    let _listener = tracing::Dispatch::new(Log::default());
    on_ranks(2, |group| {
        let device = case.device();
        let moe = case.part_of_moe(&device, &group);
        let experts = expert_parameters(&moe);
        let groups = ExpertGroups {
            batch: &group,
            experts: &experts,
            data: &ProcessGroup::single(),
            loss: RankLoss::Mean,
        };
        let moe = average_replicated_in_backward(moe, groups, 1);
        let x = case
            .rows(case.part(group.rank()), 5, &device)
            .require_grad();
        let log = Log::default();
        tracing::subscriber::with_default(log.clone(), || {
            let out = moe.forward(x);
            log.add("backward".into());
            let loss = out.output.square().sum() + out.balance_loss.sum() + out.z_loss.sum();
            loss.backward();
        });
        let lines = log.0.lock().unwrap();
        lines.clone()
    })
}

/// Returns the expected operations of a rank.
fn expected(dispatch: ExpertDispatch, overlap: bool) -> Vec<&'static str> {
    // Gradients of the router, and of gate and up and down of the shared expert.
    let averaged = ["begin all_reduce"; 3];
    let [forward, backward]: [&[&str]; 2] = match (dispatch, overlap) {
        (ExpertDispatch::AllToAll, false) => [
            &[
                "router forward",
                "all_gather",
                "all_to_all",
                "experts",
                "all_to_all",
                "shared",
                "all_reduce",
            ],
            &[
                "all_to_all",
                "all_reduce",
                "router backward",
                "experts",
                "shared",
                "all_to_all",
            ],
        ],
        (ExpertDispatch::AllToAll, true) => [
            &[
                "router forward",
                "all_gather",
                "begin all_to_all",
                "join",
                "experts",
                "begin all_to_all",
                "shared",
                "join",
                "all_reduce",
            ],
            &[
                "begin all_to_all",
                "shared",
                "join",
                "experts",
                "all_reduce",
                "router backward",
                "begin all_to_all",
                "join",
            ],
        ],
        (ExpertDispatch::AllGather, false) => [
            &[
                "all_gather",
                "router forward",
                "all_gather",
                "all_gather",
                "experts",
                "reduce_scatter",
                "shared",
                "all_reduce",
            ],
            &[
                "all_gather",
                "reduce_scatter",
                "all_reduce",
                "router backward",
                "experts",
                "shared",
                "reduce_scatter",
            ],
        ],
        (ExpertDispatch::AllGather, true) => [
            &[
                "begin all_gather",
                "router forward",
                "join",
                "all_gather",
                "all_gather",
                "experts",
                "begin reduce_scatter",
                "shared",
                "join",
                "all_reduce",
            ],
            &[
                "begin all_gather",
                "shared",
                "join",
                "reduce_scatter",
                "experts",
                "all_reduce",
                "router backward",
                "begin reduce_scatter",
                "join",
            ],
        ],
    };
    [forward, &["backward"], backward, &averaged].concat()
}

/// Each exchange of a gradient occurs exactly once, and all ranks have the same order.
#[test]
fn layers_run_beside_exchanges() {
    own_process!("parallel::experts::order");
    flex_only!();
    for (what, case) in cases() {
        for overlap in [true, false] {
            let case = Case {
                overlap,
                ..case.clone()
            };
            for (rank, found) in steps(&case).into_iter().enumerate() {
                let expected = expected(case.dispatch, overlap);
                assert_eq!(found, expected, "{what}, {overlap}, rank {rank}");
            }
        }
    }
}
