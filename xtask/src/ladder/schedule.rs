//! Selects the next runs, and estimates their time.

use anyhow::Result;

use super::corpus::Corpus;
use super::plan::{Plan, Run};
use super::record::Record;

/// Seconds of a run in addition to its steps: start, kernel compilation, evaluations.
const START_SECONDS: f64 = 60.0;

/// Estimates the seconds of `run` on a GPU, from the speed of recorded runs of the same shape and
/// recipe, else of the shape, else from the plan.
pub fn seconds(run: &Run, records: &[Record]) -> f64 {
    let speed = |same: &dyn Fn(&&Record) -> bool| {
        let own = records.iter().filter(|record| record.shape == run.shape);
        let speeds = own.filter(same).filter_map(|record| record.tokens_per_s);
        speeds.reduce(f64::min)
    };
    let speed = speed(&|record| record.recipe == run.recipe)
        .or_else(|| speed(&|_| true))
        .unwrap_or(run.tokens_per_s);
    START_SECONDS + run.tokens as f64 / speed
}

/// Returns the first runs of `plan` without a record that fit into `minutes`: at least one and at
/// most `most`.
///
/// # Errors
/// Returns an error if a run needs more shards than `corpus` has, or more than four epochs.
pub fn next(
    plan: &Plan,
    records: &[Record],
    corpus: &Corpus,
    minutes: f64,
    most: usize,
) -> Result<Vec<Run>> {
    let mut left = minutes * 60.0;
    let mut next = Vec::new();
    let is_done = |run: &Run| records.iter().any(|record| record.name == run.name);
    for run in plan.runs()?.into_iter().filter(|run| !is_done(run)) {
        left -= seconds(&run, records);
        if next.len() == most || (left < 0.0 && !next.is_empty()) {
            break;
        }
        corpus.check_run(&run)?;
        next.push(run);
    }
    Ok(next)
}
