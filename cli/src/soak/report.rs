//! What a soak has found.

use std::path::PathBuf;

use serde::Serialize;

use crate::table::table;

/// Exit code where a launch did not end in time.
const HUNG: u8 = 3;
/// Exit code where a launch ended with an error that nobody caused.
const FAILED: u8 = 4;
/// Exit code where a run ended with other bytes.
const DIFFERS: u8 = 5;

/// Everything that was run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The command of each rank.
    pub(super) command: Vec<String>,
    pub(super) gpus: usize,
    pub(super) steps: u64,
    pub(super) seed: u64,
    /// Seconds that a launch may take.
    pub(super) limit: u64,
    /// Seconds in which all processes must end once a rank was killed.
    pub(super) end_limit: u64,
    pub(super) runs: Vec<UndisturbedRun>,
    pub(super) kills: Vec<KilledRun>,
}

/// A launch that nobody disturbed.
#[derive(Debug, Serialize)]
pub(super) struct UndisturbedRun {
    pub(super) outcome: Outcome,
    pub(super) seconds: f64,
    /// Where its files were left, unless it has the bytes of the first run.
    pub(super) folder: Option<PathBuf>,
}

/// A launch of which a rank was killed, and the one that resumed it.
#[derive(Debug, Serialize)]
pub(super) struct KilledRun {
    pub(super) rank: usize,
    /// The last step that was recorded before.
    pub(super) step: u64,
    /// Seconds from the kill until all processes had ended.
    pub(super) end_seconds: f64,
    /// Whether they had not in time.
    pub(super) late: bool,
    /// The exit code of the launcher, if it ended by itself.
    pub(super) code: Option<i32>,
    /// What rank 0 and the launcher said.
    pub(super) problem: String,
    /// Of the run that went on; none after one that was late.
    pub(super) resumed: Option<UndisturbedRun>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Outcome {
    /// With the bytes of the first run.
    Same,
    /// With others: in these files.
    Differs(Vec<String>),
    /// With an error.
    Failed(String),
    /// It did not.
    Hung,
}

impl Report {
    fn resumed(&self) -> impl Iterator<Item = &UndisturbedRun> + Clone {
        self.kills.iter().filter_map(|kill| kill.resumed.as_ref())
    }

    /// 0 if nothing was found.
    pub(super) fn code(&self) -> u8 {
        let mut outcomes = (self.runs.iter().chain(self.resumed())).map(|run| &run.outcome);
        let mut code = 0;
        if self.kills.iter().any(|kill| kill.late) {
            return HUNG;
        }
        // The worst of them.
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

    /// A line for each kind of run.
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
        table("lrrrrr", &rows)
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
