//! Findings of a soak.

use std::path::PathBuf;

use serde::Serialize;

/// Exit code if a launch hung.
const HUNG: u8 = 3;
/// Exit code if a launch failed without a kill.
const FAILED: u8 = 4;
/// Exit code if the bytes of a run differ.
const DIFFERS: u8 = 5;

/// All runs of a soak.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Command of each rank.
    pub(super) command: Vec<String>,
    pub(super) gpus: usize,
    pub(super) steps: u64,
    pub(super) seed: u64,
    /// Time limit of a launch, in seconds.
    pub(super) limit: u64,
    /// Seconds within which all processes must end after a rank was killed.
    pub(super) end_limit: u64,
    pub(super) runs: Vec<UndisturbedRun>,
    pub(super) kills: Vec<KilledRun>,
}

/// A launch without a kill.
#[derive(Debug, Serialize)]
pub(super) struct UndisturbedRun {
    pub(super) outcome: Outcome,
    pub(super) seconds: f64,
    /// Folder with the run's files; none if they match the first run and were removed.
    pub(super) folder: Option<PathBuf>,
}

/// A launch in which a rank was killed, and the launch that resumed it.
#[derive(Debug, Serialize)]
pub(super) struct KilledRun {
    pub(super) rank: usize,
    /// Last step recorded before the kill.
    pub(super) step: u64,
    /// Seconds from the kill until all processes had ended.
    pub(super) end_seconds: f64,
    /// True if some process had not ended in time.
    pub(super) late: bool,
    /// Exit code of the launcher, if it exited before being killed.
    pub(super) code: Option<i32>,
    /// Errors of rank 0 and the launcher.
    pub(super) problem: String,
    /// The resumed run; none if `late`.
    pub(super) resumed: Option<UndisturbedRun>,
}

/// Outcome of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// The bytes match the first run.
    Same,
    /// These files differ.
    Differs(Vec<String>),
    /// The run failed with this error.
    Failed(String),
    /// The run did not end in time.
    Hung,
}

impl Report {
    fn resumed(&self) -> impl Iterator<Item = &UndisturbedRun> + Clone {
        self.kills.iter().filter_map(|kill| kill.resumed.as_ref())
    }

    /// Returns the exit code; 0 if there are no findings.
    pub(super) fn code(&self) -> u8 {
        let mut outcomes = (self.runs.iter().chain(self.resumed())).map(|run| &run.outcome);
        let mut code = 0;
        if self.kills.iter().any(|kill| kill.late) {
            return HUNG;
        }
        // Report the most severe outcome.
        for outcome in &mut outcomes {
            code = match (outcome, code) {
                (Outcome::Hung, _) => return HUNG,
                (Outcome::Failed(_), _) => FAILED,
                (Outcome::Differs(_), 0) => DIFFERS,
                _ => code,
            };
        }
        code
    }

    /// Returns one line per kind of run.
    pub(super) fn lines(&self) -> Vec<String> {
        let head = ["", "runs", "hung", "failed", "other bytes", "slowest"];
        let row = |name: &str, runs: Vec<&UndisturbedRun>| {
            let count = |is: fn(&Outcome) -> bool| {
                let those = runs.iter().filter(|run| is(&run.outcome));
                those.count().to_string()
            };
            vec![
                name.to_owned(),
                runs.len().to_string(),
                count(|outcome| *outcome == Outcome::Hung),
                count(|outcome| matches!(outcome, Outcome::Failed(_))),
                count(|outcome| matches!(outcome, Outcome::Differs(_))),
                slowest(runs.iter().map(|run| run.seconds)),
            ]
        };
        let late = self.kills.iter().filter(|kill| kill.late).count();
        let ends = self.kills.iter().map(|kill| kill.end_seconds);
        let rows = [
            head.map(String::from).to_vec(),
            row("undisturbed", self.runs.iter().collect()),
            vec![
                "until all had ended after a SIGKILL".into(),
                self.kills.len().to_string(),
                late.to_string(),
                "-".into(),
                "-".into(),
                slowest(ends),
            ],
            row("resumed after it", self.resumed().collect()),
        ];
        let line = |row: &Vec<String>| {
            let numbers = row[1..].iter().map(|cell| format!("  {cell:>11}"));
            format!("{:<36}{}", row[0], numbers.collect::<String>())
        };
        rows.iter().map(line).collect()
    }
}

fn slowest(seconds: impl Iterator<Item = f64>) -> String {
    match seconds.reduce(f64::max) {
        Some(seconds) => format!("{seconds:.1} s"),
        None => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(outcome: Outcome) -> UndisturbedRun {
        UndisturbedRun {
            outcome,
            seconds: 1.5,
            folder: None,
        }
    }

    fn report(runs: Vec<Outcome>, late: bool, resumed: Outcome) -> Report {
        Report {
            command: Vec::new(),
            gpus: 2,
            steps: 50,
            seed: 0,
            limit: 600,
            end_limit: 30,
            runs: runs.into_iter().map(run).collect(),
            kills: vec![KilledRun {
                rank: 1,
                step: 3,
                end_seconds: 0.25,
                late,
                code: Some(137),
                problem: String::new(),
                resumed: (!late).then(|| run(resumed)),
            }],
        }
    }

    #[test]
    fn the_worst_decides() {
        let differs = || Outcome::Differs(vec!["model.bpk".into()]);
        let failed = || Outcome::Failed("rank 1 failed".into());
        use Outcome::{Hung, Same};
        let code = |runs, late, resumed| report(runs, late, resumed).code();
        assert_eq!(code(vec![Same, Same], false, Same), 0);
        assert_eq!(code(vec![Same, differs()], false, Same), DIFFERS);
        assert_eq!(code(vec![Same], false, differs()), DIFFERS);
        assert_eq!(code(vec![failed(), differs()], false, Same), FAILED);
        assert_eq!(code(vec![Same], false, failed()), FAILED);
        assert_eq!(code(vec![failed(), Hung], false, differs()), HUNG);
        assert_eq!(code(vec![Same], true, Same), HUNG);
    }

    #[test]
    fn a_line_for_each_kind() {
        let lines = report(vec![Outcome::Same, Outcome::Hung], false, Outcome::Same).lines();
        let fields = |line: &str| -> Vec<String> {
            let cut = line.split("  ").map(str::trim);
            let cut = cut.filter(|field| !field.is_empty());
            cut.map(String::from).collect()
        };
        assert_eq!(
            fields(&lines[1]),
            ["undisturbed", "2", "1", "0", "0", "1.5 s"]
        );
        assert_eq!(fields(&lines[2])[1..], ["1", "0", "-", "-", "0.2 s"]);
        assert_eq!(fields(&lines[3])[1..], ["1", "0", "0", "0", "1.5 s"]);
    }
}
