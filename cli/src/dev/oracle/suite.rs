//! `nvfp4 dev oracle all`: the checks of `tcgen05`, then the test suite and the benchmarks of the
//! sources.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    arguments::All,
    checks::finish,
    report::{AboutDevice, Report},
    subprocess,
};

/// Time limit of the test suite and of each benchmark.
const LIMIT: Duration = Duration::from_secs(3 * 3600);
/// Number of output lines kept in the report.
const LINES: usize = 120;

/// A cargo command whose outcome goes into the report.
struct Stage {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Environment variables.
    variables: Vec<(&'static str, String)>,
    needs: Needs,
}

/// Device required by a stage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Gpu,
    /// A GPU with sm_100 or sm_103.
    Tcgen05,
}

impl All {
    pub(super) fn run(self) -> Result<()> {
        let mut report = self.options.run()?;
        for stage in stages(report.about()) {
            self.run_stage(&mut report, &stage)?;
        }
        finish(&report)
    }

    fn run_stage(&self, report: &mut Report, stage: &Stage) -> Result<()> {
        if let Some(why) = left_out(&self.source, stage, report.about()) {
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

/// Returns an outcome in the same form as that of a check.
fn outcome(result: &str, detail: &str, on: &str, notes: Vec<String>) -> Value {
    let mut outcome = json!({ "result": result, "on": on, "notes": notes });
    if !detail.is_empty() {
        outcome["detail"] = detail.into();
    }
    outcome
}

/// Returns the stages that run after the checks on this device.
fn stages(device: &AboutDevice) -> Vec<Stage> {
    let device = if device.is_gpu() { "cuda" } else { "cpu" };
    let bench = |name, variables, needs| Stage {
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
        needs,
    };
    let file = |name: &str| ("NVFP4_BENCH_JSON", name.to_owned());
    let tcgen05 = ("NVFP4_GEMM", "tcgen05".to_owned());
    vec![
        Stage {
            name: "test-suite",
            arguments: &["xtask", "test"],
            variables: vec![("NVFP4_TEST_DEVICE", device.to_owned())],
            needs: Needs::Nothing,
        },
        bench(
            "benchmark-gemm",
            vec![file("nvfp4-oracle-gemm.json")],
            Needs::Gpu,
        ),
        bench(
            "benchmark-gemm-tcgen05",
            vec![file("nvfp4-oracle-gemm-tcgen05.json"), tcgen05],
            Needs::Tcgen05,
        ),
    ]
}

/// Returns the reason why a stage is skipped, if any.
fn left_out(source: &Path, stage: &Stage, device: &AboutDevice) -> Option<String> {
    if !source.join("cube_kernels/Cargo.toml").exists() {
        let folder = source.display();
        return Some(format!("{folder} does not hold the sources: give --source"));
    }
    let has_tcgen05 = matches!(device.compute_capability, Some(100 | 103));
    match stage.needs {
        Needs::Gpu | Needs::Tcgen05 if !device.is_gpu() => Some("benchmarks need a GPU".into()),
        Needs::Tcgen05 if !has_tcgen05 => Some("tcgen05 needs sm_100 or sm_103".into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(runtime: &str, compute_capability: Option<u32>) -> AboutDevice {
        AboutDevice {
            device: runtime.into(),
            hardware: runtime.into(),
            runtime: runtime.into(),
            compute_capability,
            nvidia_smi: None,
        }
    }

    #[test]
    fn stages_say_why_they_are_left_out() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let why = |source: &Path, device: &AboutDevice| -> Vec<Option<String>> {
            let stages = stages(device);
            let why = stages.iter().map(|it| left_out(source, it, device));
            why.collect()
        };
        let blackwell = device("cuda", Some(103));
        assert!(why(root, &blackwell).iter().all(Option::is_none));
        let on_hopper = why(root, &device("cuda", Some(90)));
        assert!(on_hopper[..2].iter().all(Option::is_none));
        assert!(on_hopper[2].as_ref().unwrap().contains("sm_100"));
        let on_cpu = why(root, &device("cpu", None));
        assert!(on_cpu[0].is_none() && on_cpu[1..].iter().all(Option::is_some));
        let elsewhere = why(Path::new("/nowhere"), &blackwell);
        let names_option = |why: &Option<String>| why.as_ref().unwrap().contains("--source");
        assert!(elsewhere.iter().all(names_option));
    }
}
