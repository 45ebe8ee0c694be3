//! `metrics.csv`: losses and speed over the steps of a run.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn_nvfp4::recipe::RecipeSchedule;

use crate::checkpoint::replace;

/// Header of `metrics.csv`.
pub const METRICS_HEADER: &str = "step,tokens,train_loss,valid_loss,lr,tokens_per_s";
/// Last column of `metrics.csv` in runs with several phases: the number of the step's phase, from 1.
const PHASE: &str = ",phase";
/// Name of the file with one [`Row`] per line.
pub const METRICS: &str = "metrics.csv";

/// One line of `metrics.csv`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Number of finished steps.
    pub step: u64,
    /// Bytes of text trained on so far.
    pub tokens: u64,
    /// Mean loss of the steps since the last row, in nats per byte; none at step 0.
    pub train_loss: Option<f64>,
    /// Loss on the validation text, if this step has an evaluation.
    pub valid_loss: Option<f64>,
    /// Learning rate of the step.
    pub lr: f64,
    /// Bytes per second since the last row, excluding evaluations and checkpoints.
    pub tokens_per_s: Option<f64>,
}

impl Row {
    pub(crate) fn to_line(self, phase: Option<usize>) -> String {
        let Self {
            step,
            tokens,
            train_loss,
            valid_loss,
            lr,
            tokens_per_s,
        } = self;
        let field = |value: Option<f64>, digits: usize| {
            value
                .map(|value| format!("{value:.digits$}"))
                .unwrap_or_default()
        };
        let [train, valid] = [train_loss, valid_loss].map(|loss| field(loss, 6));
        let speed = field(tokens_per_s, 1);
        let phase = phase.map(|phase| format!(",{phase}")).unwrap_or_default();
        format!("{step},{tokens},{train},{valid},{lr:e},{speed}{phase}\n")
    }

    /// Returns the row as a `metrics.csv` holds it.
    pub(crate) fn rounded(self) -> Self {
        Self::parse(self.to_line(None).trim_end()).unwrap_or(self)
    }

    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(',').collect();
        let [step, tokens, train, valid, lr, speed, ref phase @ ..] = fields[..] else {
            return None;
        };
        // The schedule of the run has the phases, too.
        if !matches!(phase, [] | [_]) {
            return None;
        }
        let optional = |text: &str| match text {
            "" => Some(None),
            text => text.parse().ok().map(Some),
        };
        Some(Self {
            step: step.parse().ok()?,
            tokens: tokens.parse().ok()?,
            train_loss: optional(train)?,
            valid_loss: optional(valid)?,
            lr: lr.parse().ok()?,
            tokens_per_s: optional(speed)?,
        })
    }
}

/// Reads the rows of a `metrics.csv` up to the first invalid line. Rows are appended, so a power
/// failure may leave a partial last row.
///
/// # Errors
/// Returns an error if the file cannot be read or has another header.
pub fn read_metrics(path: &Path) -> Result<Vec<Row>> {
    let text = read_lossy(path)?;
    let mut lines = whole_lines(&text);
    let header = lines.next();
    ensure!(
        header.is_some_and(|line| line.strip_suffix(PHASE).unwrap_or(line) == METRICS_HEADER),
        "{} does not start with the line {METRICS_HEADER}",
        path.display()
    );
    Ok(lines.map_while(Row::parse).collect())
}

/// Rows of a run, and their file.
pub(crate) struct MetricsLog {
    path: PathBuf,
    rows: Vec<Row>,
    /// True on the rank that writes the file (rank 0).
    writes: bool,
    /// Recipes over the steps, and their number, if there are several phases.
    phases: Option<(RecipeSchedule, u64)>,
}

impl MetricsLog {
    /// Creates an empty log for the run in `folder`; writes nothing.
    pub fn new(folder: &Path) -> Self {
        Self {
            path: folder.join(METRICS),
            rows: Vec::new(),
            writes: true,
            phases: None,
        }
    }

    /// Adds the column of the phase, if `recipes` has several in a run of `steps` steps.
    pub fn with_phases(self, recipes: &RecipeSchedule, steps: u64) -> Self {
        let has_phases = recipes.phases().len() > 1;
        Self {
            phases: has_phases.then(|| (recipes.clone(), steps)),
            ..self
        }
    }

    /// Returns the line of `row` in the file.
    fn line(&self, row: Row) -> String {
        let phases = self.phases.as_ref();
        // A row follows its step.
        let last = row.step.saturating_sub(1);
        row.to_line(phases.map(|(recipes, steps)| recipes.index_at(last, *steps) + 1))
    }

    /// Creates an empty log for `rank` of a run; only rank 0 writes.
    pub fn of_rank(rank: usize, folder: &Path) -> Self {
        Self {
            writes: rank == 0,
            ..Self::new(folder)
        }
    }

    /// Returns the recorded rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Loads the rows of the file up to step `step`; rows after it belong to steps lost in a crash.
    /// `has_row` tells which steps must have a row. An extended run also has that of its former
    /// end.
    ///
    /// # Errors
    /// Returns an error if such a row is missing, or if the file cannot be read or written.
    pub fn resume(&mut self, step: u64, has_row: impl Fn(u64) -> bool) -> Result<()> {
        let mut rows = read_metrics(&self.path)?;
        rows.retain(|row| row.step <= step);
        let mut found = rows.iter().map(|row| row.step);
        for expected in (0..=step).filter(|step| has_row(*step)) {
            ensure!(
                found.any(|step| step == expected),
                "{} is damaged: the row of step {expected} is not where it should be",
                self.path.display()
            );
        }
        self.rows = rows;
        self.write()
    }

    /// Writes all rows at once.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self) -> Result<()> {
        if !self.writes {
            return Ok(());
        }
        let phase = self.phases.as_ref().map_or("", |_| PHASE);
        let mut text = format!("{METRICS_HEADER}{phase}\n");
        for row in &self.rows {
            let _ = write!(text, "{}", self.line(*row));
        }
        replace(&self.path, text.as_bytes())
    }

    /// Adds a row.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn record(&mut self, row: Row) -> Result<()> {
        use std::io::Write as _;
        self.rows.push(row);
        if !self.writes {
            return Ok(());
        }
        let append = || fs::OpenOptions::new().append(true).open(&self.path);
        append()
            .and_then(|mut file| file.write_all(self.line(row).as_bytes()))
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// Measures the time spent on steps since the last row.
pub(crate) struct Clock {
    running: Option<Instant>,
    seconds: f64,
    /// Number of steps in this time.
    pub steps: u64,
}

impl Clock {
    pub fn start() -> Self {
        Self {
            running: Some(Instant::now()),
            seconds: 0.0,
            steps: 0,
        }
    }

    pub fn pause(&mut self) {
        if let Some(since) = self.running.take() {
            self.seconds += since.elapsed().as_secs_f64();
        }
    }

    pub fn resume(&mut self) {
        self.running = Some(Instant::now());
    }

    pub fn speed(&mut self, tokens_per_step: u64) -> f64 {
        self.pause();
        (self.steps * tokens_per_step) as f64 / self.seconds.max(1e-9)
    }
}

/// Reads a file as text, even if its end is corrupt.
pub(crate) fn read_lossy(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the lines that end in a line break.
pub(crate) fn whole_lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n')
        .map_while(|line| line.strip_suffix('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_their_file() {
        let first = Row {
            step: 0,
            tokens: 0,
            train_loss: None,
            valid_loss: Some(5.5),
            lr: 1e-4,
            tokens_per_s: None,
        };
        let second = Row {
            step: 10,
            tokens: 20480,
            train_loss: Some(3.25),
            valid_loss: None,
            lr: 0.0029,
            tokens_per_s: Some(1234.5),
        };
        assert_eq!(first.to_line(None), "0,0,,5.500000,1e-4,\n");
        assert_eq!(first.to_line(Some(1)), "0,0,,5.500000,1e-4,,1\n");
        for (row, phase) in [(first, None), (second, None), (second, Some(2))] {
            assert_eq!(Row::parse(row.to_line(phase).trim_end()), Some(row));
        }
        assert_eq!(Row::parse("1,2,3"), None);
        assert_eq!(Row::parse("1,2,x,,0.1,"), None);
    }
}
