//! `cargo xtask sanitize`: runs the kernel tests under compute-sanitizer.

use std::collections::VecDeque;
use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{self, FEATURES};

/// Package whose tests run.
const PACKAGE: &str = "nvfp4-kernels";

/// Substrings of the names of tests that are left out, because they would take hours and find
/// nothing more: large matrices, and many launches.
const LEFT_OUT: [&str; 6] = [
    "beyond_two",
    "more_elements",
    "large",
    "shapes_of",
    "shapes_per",
    "hundred",
];

/// Name of the package's test binary.
const SUITE: &str = "suite";

/// Modules of tests that launch no kernel, or launch each one a hundred times.
const NOT_RUN: [&str; 5] = [
    "registry_source",
    "dequantize",
    "gemm_source",
    "repeated",
    "shapes",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
enum Tool {
    /// Out-of-bounds accesses and leaks
    Memcheck,
    /// Races in shared memory
    Racecheck,
    /// Reads of uninitialized memory
    Initcheck,
}

impl Tool {
    fn name(self) -> &'static str {
        match self {
            Self::Memcheck => "memcheck",
            Self::Racecheck => "racecheck",
            Self::Initcheck => "initcheck",
        }
    }
}

/// Options of `cargo xtask sanitize`.
#[derive(clap::Args)]
pub struct Args {
    /// Run these tools, separated by commas [default: all three]
    #[arg(long, value_delimiter = ',')]
    tool: Vec<Tool>,
    /// Run this test module, such as `quantize`; may be given several times [default: all that
    /// launch kernels]
    #[arg(long, short, value_name = "NAME")]
    test: Vec<String>,
    /// Use this test binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Run this many processes at a time, all on one GPU
    #[arg(long, short, default_value_t = 4, value_name = "N")]
    jobs: usize,
    /// Pass these arguments to the test binary, for example a part of a test's name
    #[arg(last = true, value_name = "ARGUMENTS")]
    rest: Vec<String>,
}

/// Result of one tool in one test module.
struct Finding {
    test: String,
    tool: Tool,
    summary: Summary,
    seconds: f64,
    output: String,
}

/// Summary of the output of compute-sanitizer and of the test binary that it runs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    /// Number of errors; `None` if the tool did not finish.
    errors: Option<usize>,
    /// Number of passed tests; `None` if one failed, or there is no result.
    passed: Option<usize>,
}

impl Summary {
    fn read(output: &str) -> Self {
        let mut summary = Self::default();
        for line in output.lines() {
            if let Some(rest) = line.strip_prefix("test result: ok. ") {
                summary.passed = first_number(rest);
            } else if let Some((_, rest)) = line.split_once("ERROR SUMMARY: ") {
                summary.errors = first_number(rest);
            } else if let Some((_, rest)) = line.split_once("RACECHECK SUMMARY: ") {
                // Hazards of all severities.
                summary.errors = first_number(rest);
            }
        }
        summary
    }

    fn is_good(&self) -> bool {
        self.errors == Some(0) && self.passed.is_some()
    }
}

fn first_number(text: &str) -> Option<usize> {
    text.split_whitespace().next()?.parse().ok()
}

/// Runs the tests under each tool and prints a table of errors.
///
/// Fails if a tool found an error or did not finish, or if a test failed. Without a GPU or
/// compute-sanitizer, prints a message and succeeds.
pub fn run(args: &Args) -> Result<ExitCode> {
    let Some(sanitizer) = sanitizer() else {
        println!("SKIPPED: no compute-sanitizer on PATH, in CUDA_PATH or in /usr/local/cuda");
        return Ok(ExitCode::SUCCESS);
    };
    if !has_gpu() {
        println!("SKIPPED: nvidia-smi lists no GPU");
        return Ok(ExitCode::SUCCESS);
    }
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => build()?,
    };
    let modules = modules(&binary, &args.test, &args.rest)?;
    ensure!(
        !modules.is_empty(),
        "no module of tests of {PACKAGE} is called one of {:?}, or has tests named {:?}",
        args.test,
        args.rest
    );
    let tools = match args.tool.as_slice() {
        [] => &[Tool::Memcheck, Tool::Racecheck, Tool::Initcheck],
        tools => tools,
    };
    let queue: VecDeque<(&Module, Tool)> = tools
        .iter()
        .flat_map(|&tool| modules.iter().map(move |module| (module, tool)))
        .collect();
    let queue = Mutex::new(queue);
    let findings = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().expect("not poisoned").pop_front();
                    let Some((module, tool)) = next else {
                        return;
                    };
                    let finding = check(&sanitizer, &binary, module, tool);
                    findings.lock().expect("not poisoned").push(finding);
                }
            });
        }
    });
    let findings = findings.into_inner().expect("not poisoned").into_iter();
    let mut findings: Vec<Finding> = findings.collect::<Result<_>>()?;
    findings.sort_by(|a, b| (a.tool, &a.test).cmp(&(b.tool, &b.test)));
    Ok(report(&findings))
}

fn check(sanitizer: &Path, binary: &Path, module: &Module, tool: Tool) -> Result<Finding> {
    let Module { name, tests } = module;
    let start = Instant::now();
    let mut command = Command::new(sanitizer);
    command.args(["--tool", tool.name(), "--print-limit", "20"]);
    if tool == Tool::Initcheck {
        // Tests copy whole buffers to the host, including unwritten parts; only reads by kernels
        // matter.
        command.args(["--check-api-memory-access", "no"]);
    }
    command
        .arg(binary)
        .args(["--test-threads=1", "--exact"])
        .args(tests)
        .env("NVFP4_TEST_DEVICE", "cuda")
        // Tests that need a separate process have one here.
        .env("NVFP4_TEST_CHILD", name);
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", sanitizer.display()))?;
    let output = [output.stdout, output.stderr].concat();
    let output = String::from_utf8_lossy(&output).into_owned();
    let finding = Finding {
        test: name.clone(),
        tool,
        summary: Summary::read(&output),
        seconds: start.elapsed().as_secs_f64(),
        output,
    };
    println!("{name}, {}: {:.0} s", tool.name(), finding.seconds);
    Ok(finding)
}

/// Prints the output of failed runs, then the table.
fn report(findings: &[Finding]) -> ExitCode {
    for finding in findings.iter().filter(|finding| !finding.summary.is_good()) {
        println!("\n=== {} under {}", finding.test, finding.tool.name());
        println!("{}", finding.output);
    }
    let shown = |number: Option<usize>| number.map_or("-".into(), |number| number.to_string());
    println!("\n| tests | tool | errors | tests passed | seconds |\n|---|---|---|---|---|");
    for finding in findings {
        let Summary { errors, passed } = &finding.summary;
        println!(
            "| {} | {} | {} | {} | {:.0} |",
            finding.test,
            finding.tool.name(),
            shown(*errors),
            shown(*passed),
            finding.seconds
        );
    }
    let bad = findings
        .iter()
        .filter(|finding| !finding.summary.is_good())
        .count();
    println!("{} runs, {bad} with errors", findings.len());
    if bad == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Builds the test binary of the kernels and returns its path.
fn build() -> Result<PathBuf> {
    let mut command = workspace::cargo();
    command
        .args(["test", "--no-run", "--package", PACKAGE, "--test", SUITE])
        .args(["--features", FEATURES, "--message-format=json"]);
    println!("$ {}", workspace::shown(&command));
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(
        output.status.success(),
        "cargo test ended with {}",
        output.status
    );
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's messages")?;
        if message["target"]["name"] == SUITE
            && let Some(path) = message["executable"].as_str()
        {
            return Ok(PathBuf::from(path));
        }
    }
    bail!("cargo built no test binary {SUITE}")
}

/// Tests of one module, by their full names.
#[derive(Debug, PartialEq, Eq)]
struct Module {
    name: String,
    tests: Vec<String>,
}

/// Returns the tests of `binary` to run: those that `rest` selects in the modules `wanted`, by
/// default in all modules that launch kernels.
fn modules(binary: &Path, wanted: &[String], rest: &[String]) -> Result<Vec<Module>> {
    let output = Command::new(binary)
        .arg("--list")
        .args(LEFT_OUT.iter().flat_map(|name| ["--skip", name]))
        .args(rest)
        .output()
        .with_context(|| format!("cannot start {}", binary.display()))?;
    ensure!(output.status.success(), "--list: {}", output.status);
    let mut modules = by_module(&String::from_utf8_lossy(&output.stdout));
    modules.retain(|module| match wanted {
        [] => !NOT_RUN.contains(&module.name.as_str()),
        wanted => wanted.contains(&module.name),
    });
    Ok(modules)
}

/// Groups the tests that libtest lists by module.
fn by_module(list: &str) -> Vec<Module> {
    let mut modules: Vec<Module> = Vec::new();
    for test in list.lines().filter_map(|line| line.strip_suffix(": test")) {
        let name = test.split_once("::").map_or("", |(module, _)| module);
        match modules.iter_mut().find(|module| module.name == name) {
            Some(module) => module.tests.push(test.into()),
            None => modules.push(Module {
                name: name.into(),
                tests: vec![test.into()],
            }),
        }
    }
    modules
}

fn sanitizer() -> Option<PathBuf> {
    const NAME: &str = "compute-sanitizer";
    let path = env::var_os("PATH").unwrap_or_default();
    let toolkit = env::var_os("CUDA_PATH").map(|path| PathBuf::from(path).join("bin"));
    env::split_paths(&path)
        .chain(toolkit)
        .chain([PathBuf::from("/usr/local/cuda/bin")])
        .map(|folder| folder.join(NAME))
        .find(|file| file.is_file())
}

fn has_gpu() -> bool {
    let output = Command::new("nvidia-smi").arg("-L").output();
    output.is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_all_tools() {
        let of = |tail: &str| {
            let head = "========= COMPUTE-SANITIZER\nrunning 3 tests\n\
                        test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n";
            Summary::read(&format!("{head}{tail}"))
        };
        let clean = of("========= ERROR SUMMARY: 0 errors\n");
        assert_eq!((clean.errors, clean.passed), (Some(0), Some(3)));
        assert!(clean.is_good());
        assert!(!of("========= ERROR SUMMARY: 2 errors\n").is_good());
        let races = of("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n");
        assert_eq!(races.errors, Some(1));
        let none = of("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n");
        assert!(none.is_good());
        assert!(!of("").is_good(), "the tool died");
        let failed = "test result: FAILED. 1 passed; 1 failed\n========= ERROR SUMMARY: 0 errors";
        assert!(!Summary::read(failed).is_good());
    }

    #[test]
    fn tests_are_listed_by_module() {
        let found =
            by_module("gemm::a: test\ngraph::x: test\ngemm::b: test\n\n3 tests, 0 benchmarks\n");
        let module = |name: &str, tests: &[&str]| Module {
            name: name.into(),
            tests: tests.iter().map(|&test| test.into()).collect(),
        };
        let expected = [
            module("gemm", &["gemm::a", "gemm::b"]),
            module("graph", &["graph::x"]),
        ];
        assert_eq!(found, expected);
    }
}
