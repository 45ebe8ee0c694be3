//! `nvfp4 oracle all`: the checks of `tcgen05`, then the test suite and the benchmarks of the
//! sources.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};

use super::{arguments::All, checks::finish, report::Report, subprocess};

/// The time that the test suite or a benchmark may take.
const LIMIT: Duration = Duration::from_secs(3 * 3600);
/// Lines of their output in the report.
const LINES: usize = 120;

/// A command of cargo that a report has the outcome of.
struct Stage {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Variables of its environment.
    variables: Vec<(&'static str, String)>,
    /// Whether it needs a GPU.
    needs_gpu: bool,
}

impl All {
    pub(super) fn run(self) -> Result<()> {
        let mut report = self.options.run()?;
        let is_gpu = report.is_gpu();
        for stage in stages(is_gpu) {
            self.run_stage(&mut report, &stage, is_gpu)?;
        }
        finish(&report)
    }

    fn run_stage(&self, report: &mut Report, stage: &Stage, is_gpu: bool) -> Result<()> {
        if let Some(why) = left_out(&self.source, stage, is_gpu) {
            let outcome = outcome("left-out", &why, "nothing", Vec::new());
            return report.add(stage.name, outcome, Duration::ZERO);
        }
        println!("{}: cargo {}", stage.name, stage.arguments.join(" "));
        let mut command = Command::new("cargo");
        command.args(stage.arguments).current_dir(&self.source);
        command.envs(stage.variables.iter().map(|(name, value)| (name, value)));
        let ended = match subprocess::run(&mut command, LIMIT) {
            Ok(ended) => ended,
            Err(error) => {
                let outcome = outcome("left-out", &format!("{error:#}"), "nothing", Vec::new());
                return report.add(stage.name, outcome, Duration::ZERO);
            }
        };
        let on = format!("cargo {}", stage.arguments.join(" "));
        let (result, detail) = match ended.status {
            Some(status) if status.success() => ("passed", String::new()),
            Some(status) => ("failed", format!("ended with {status}")),
            None => ("failed", "did not end in time".into()),
        };
        let outcome = outcome(result, &detail, &on, ended.tail(LINES));
        report.add(stage.name, outcome, ended.took)
    }
}

/// An outcome in the form of those of the checks.
fn outcome(result: &str, detail: &str, on: &str, notes: Vec<String>) -> Value {
    let mut outcome = json!({ "result": result, "on": on, "notes": notes });
    if !detail.is_empty() {
        outcome["detail"] = detail.into();
    }
    outcome
}

/// What runs behind the checks.
fn stages(is_gpu: bool) -> Vec<Stage> {
    let device = if is_gpu { "cuda" } else { "cpu" };
    let bench = |name, variables| Stage {
        name,
        arguments: &[
            "bench",
            "-p",
            "nvfp4-kernels",
            "--features",
            "cuda",
            "--bench",
            "gemm",
        ],
        variables,
        needs_gpu: true,
    };
    let file = |name: &str| ("NVFP4_BENCH_JSON", name.to_owned());
    let tcgen05 = ("NVFP4_GEMM", "tcgen05".to_owned());
    vec![
        Stage {
            name: "test-suite",
            arguments: &["xtask", "test"],
            variables: vec![("NVFP4_TEST_DEVICE", device.to_owned())],
            needs_gpu: false,
        },
        bench("benchmark-gemm", vec![file("nvfp4-oracle-gemm.json")]),
        bench(
            "benchmark-gemm-tcgen05",
            vec![file("nvfp4-oracle-gemm-tcgen05.json"), tcgen05],
        ),
    ]
}

/// Why a stage does not run.
fn left_out(source: &Path, stage: &Stage, is_gpu: bool) -> Option<String> {
    if !source.join("cube_kernels/Cargo.toml").exists() {
        let folder = source.display();
        return Some(format!("{folder} does not hold the sources: give --source"));
    }
    (stage.needs_gpu && !is_gpu).then(|| "benchmarks need a GPU".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_say_why_they_are_left_out() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let why = |source: &Path, is_gpu| -> Vec<Option<String>> {
            let stages = stages(is_gpu);
            stages
                .iter()
                .map(|it| left_out(source, it, is_gpu))
                .collect()
        };
        assert!(why(root, true).iter().all(Option::is_none));
        let on_cpu = why(root, false);
        assert!(on_cpu[0].is_none() && on_cpu[1..].iter().all(Option::is_some));
        let elsewhere = why(Path::new("/nowhere"), true);
        let names_option = |why: &Option<String>| why.as_ref().unwrap().contains("--source");
        assert!(elsewhere.iter().all(names_option));
    }
}
