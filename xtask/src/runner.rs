//! Runs the test binaries in parallel.
//!
//! `cargo test` runs one binary after another, and the tests of one process share its devices, so
//! that one slow test leaves the other cores idle. Here each module of a binary runs in a separate
//! process with one test thread, and one process runs per core. On a GPU only one process runs at a
//! time, because CubeCL captures graphs in CUDA's global mode.
//!
//! Where each core has a process, the processes are pinned to their cores. CubeCL's CPU runtime
//! starts one worker per core that it may use, and a worker whose task waits for the task of another
//! worker polls without pause: with two workers and one core's time, half of the time and more goes
//! there (module `decorate` on two busy cores: 51 seconds of CPU time pinned, 173 not).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::counts::Reader;
use crate::workspace;

/// Modules with fewer tests than this share a process with others.
const SMALL_MODULE: usize = 4;

/// A test binary built by cargo.
#[derive(Clone, Debug)]
pub struct Binary {
    /// Name of the package.
    pub package: String,
    /// Name of the target: `suite`, or the library's for unit tests.
    pub target: String,
    program: PathBuf,
    /// Working directory of its tests, as under `cargo test`.
    folder: PathBuf,
}

/// Test binaries and their environment.
#[derive(Debug, Default)]
pub struct Build {
    /// Binaries in the order in which cargo reported them.
    pub binaries: Vec<Binary>,
    /// Folders of shared libraries, from build scripts.
    libraries: Vec<PathBuf>,
    variables: Vec<(&'static str, &'static str)>,
}

/// One process: tests of one binary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Index of the binary in [`Build::binaries`].
    binary: usize,
    /// Value of `NVFP4_TEST_DEVICE`, if the job sets it.
    device: Option<&'static str>,
    /// Modules, for the report.
    name: String,
    /// Names of the tests.
    tests: Vec<String>,
}

/// Where one process at a time runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// On any core.
    Anywhere,
    /// Pinned to the core with this number.
    Core(usize),
}

impl Slot {
    /// Returns one slot per core. Without `taskset`, or if a quota grants less than the cores that
    /// this process may use, no slot is pinned.
    pub fn of_cores() -> Vec<Self> {
        let count = thread::available_parallelism().map_or(1, usize::from);
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let list = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let cores = list.and_then(numbers).unwrap_or_default();
        let taskset = Command::new("taskset").arg("--version").output();
        if cores.len() == count && taskset.is_ok_and(|output| output.status.success()) {
            cores.into_iter().map(Self::Core).collect()
        } else {
            vec![Self::Anywhere; count]
        }
    }
}

/// Returns the numbers of a list such as `0-3,8`.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

/// Time of one job.
pub struct Timing {
    /// Binary, device and modules.
    pub name: String,
    /// Number of tests.
    pub tests: usize,
    /// Wall-clock time of the process.
    pub took: Duration,
}

/// Seconds of each job in its last run, stored in a file of the target folder.
pub struct Times {
    file: PathBuf,
    seconds: BTreeMap<String, f64>,
}

impl Times {
    /// Reads `file`; empty if there is no such file, or another version wrote it.
    pub fn of(file: PathBuf) -> Self {
        let text = fs::read_to_string(&file).unwrap_or_default();
        Self {
            seconds: serde_json::from_str(&text).unwrap_or_default(),
            file,
        }
    }

    /// Updates the file with `timings`.
    pub fn write(mut self, timings: &[Timing]) -> Result<()> {
        let seconds = timings
            .iter()
            .map(|timing| (timing.name.clone(), timing.took.as_secs_f64()));
        self.seconds.extend(seconds);
        fs::write(
            &self.file,
            serde_json::to_string_pretty(&self.seconds)? + "\n",
        )
        .with_context(|| format!("cannot write {}", self.file.display()))
    }
}

/// Builds the tests with `command`, a `cargo test --no-run` without a message format.
///
/// # Errors
/// Returns an error if something does not compile.
pub fn build(command: &mut Command) -> Result<Build> {
    let mut build = Build::default();
    for message in messages(command)? {
        build.add(&message)?;
    }
    Ok(build)
}

/// Runs `command`, a cargo build; returns name and path of each program that it makes.
///
/// # Errors
/// Returns an error if something does not compile.
pub fn executables(command: &mut Command) -> Result<Vec<(String, PathBuf)>> {
    Ok(messages(command)?
        .iter()
        .filter_map(|message| {
            let name = message["target"]["name"].as_str()?;
            let path = message["executable"].as_str()?;
            Some((name.to_owned(), path.into()))
        })
        .collect())
}

/// Runs `command`, a cargo build, and returns cargo's messages.
fn messages(command: &mut Command) -> Result<Vec<Value>> {
    command.arg("--message-format=json-render-diagnostics");
    println!("$ {}", workspace::shown(command));
    let output = workspace::output(command)?;
    let output = String::from_utf8_lossy(&output);
    let messages = output.lines().map(serde_json::from_str);
    messages
        .collect::<Result<_, _>>()
        .context("cargo's messages")
}

impl Build {
    /// Sets an environment variable of all jobs.
    pub fn set(&mut self, name: &'static str, value: &'static str) {
        self.variables.push((name, value));
    }

    /// Processes one of cargo's messages.
    fn add(&mut self, message: &Value) -> Result<()> {
        match message["reason"].as_str() {
            Some("build-script-executed") => {
                let paths = message["linked_paths"].as_array();
                for path in paths.into_iter().flatten().filter_map(Value::as_str) {
                    let (kind, folder) = path.split_once('=').unwrap_or(("all", path));
                    let folder = PathBuf::from(folder);
                    if ["native", "all", "dependency"].contains(&kind)
                        && !self.libraries.contains(&folder)
                    {
                        self.libraries.push(folder);
                    }
                }
            }
            Some("compiler-artifact") if message["profile"]["test"] == true => {
                let Some(program) = message["executable"].as_str() else {
                    return Ok(());
                };
                let manifest = message["manifest_path"]
                    .as_str()
                    .context("no manifest_path")?;
                let folder = PathBuf::from(manifest)
                    .parent()
                    .context("no folder")?
                    .to_owned();
                let id = message["package_id"].as_str().context("no package_id")?;
                self.binaries.push(Binary {
                    package: package_name(id).to_owned(),
                    target: message["target"]["name"]
                        .as_str()
                        .context("no target name")?
                        .to_owned(),
                    program: program.into(),
                    folder,
                });
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns a command that runs `binary`, on one core if `slot` names it.
    fn command(&self, binary: usize, slot: Slot) -> Result<Command> {
        let Binary {
            program, folder, ..
        } = &self.binaries[binary];
        let mut command = match slot {
            Slot::Anywhere => Command::new(program),
            Slot::Core(core) => {
                let mut command = Command::new("taskset");
                command.args(["--cpu-list", &core.to_string()]).arg(program);
                // Still splits the work of Flex and of the oracle.
                command.env("RAYON_NUM_THREADS", "2");
                command
            }
        };
        let mut paths = self.libraries.clone();
        let variable = if cfg!(target_os = "macos") {
            "DYLD_FALLBACK_LIBRARY_PATH"
        } else {
            "LD_LIBRARY_PATH"
        };
        paths.extend(env::split_paths(&env::var_os(variable).unwrap_or_default()));
        let paths: OsString = env::join_paths(paths)?;
        command
            .current_dir(folder)
            .env(variable, paths)
            .envs(self.variables.iter().copied())
            .env("CARGO_MANIFEST_DIR", folder);
        Ok(command)
    }

    /// Returns the names of the tests of `binary`, including ignored ones.
    fn tests(&self, binary: usize) -> Result<Vec<String>> {
        let mut command = self.command(binary, Slot::Anywhere)?;
        command.args(["--list", "--format", "terse"]);
        let output = workspace::output(&mut command)?;
        let text = String::from_utf8_lossy(&output);
        Ok(text
            .lines()
            .filter_map(|line| Some(line.strip_suffix(": test")?.to_owned()))
            .collect())
    }

    /// Returns the jobs of every binary that `is_chosen` accepts, each on `device`; `is_run`
    /// selects tests by name.
    pub fn jobs(
        &self,
        device: Option<&'static str>,
        is_chosen: impl Fn(&Binary) -> bool,
        is_run: impl Fn(&str) -> bool,
    ) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        for (index, binary) in self.binaries.iter().enumerate() {
            if !is_chosen(binary) {
                continue;
            }
            for (name, tests) in groups(self.tests(index)?) {
                let tests: Vec<String> = tests.into_iter().filter(|test| is_run(test)).collect();
                if !tests.is_empty() {
                    jobs.push(Job {
                        binary: index,
                        device,
                        name,
                        tests,
                    });
                }
            }
        }
        Ok(jobs)
    }

    /// Sorts `jobs` so that no long one starts last: first those not measured yet, in their order,
    /// then the others, longest first.
    pub fn longest_first(&self, jobs: &mut [Job], times: &Times) {
        let seconds = |job: &Job| times.seconds.get(&self.shown(job)).copied();
        jobs.sort_by(|a, b| {
            let [a, b] = [a, b].map(|job| seconds(job).unwrap_or(f64::INFINITY));
            b.total_cmp(&a)
        });
    }

    /// Runs `jobs`, one process at a time in each of `slots`; output goes to standard output and
    /// `reader`.
    ///
    /// Returns the time of each job, longest first.
    pub fn run(&self, jobs: &[Job], slots: &[Slot], reader: &mut Reader) -> Result<Vec<Timing>> {
        let next = AtomicUsize::new(0);
        let state = Mutex::new((reader, Vec::new()));
        let work = |slot: Slot| -> Result<()> {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let start = Instant::now();
                let output = self.output(job, slot)?;
                let took = start.elapsed();
                let mut state = state
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                let (reader, timings) = &mut *state;
                let name = self.shown(job);
                println!("\n--- {name}: {:.1} s", took.as_secs_f64());
                for line in output.lines() {
                    println!("{line}");
                    reader.line(line);
                }
                timings.push(Timing {
                    name,
                    tests: job.tests.len(),
                    took,
                });
            }
            Ok(())
        };
        thread::scope(|scope| {
            let work = &work;
            let workers = slots.iter().map(|&slot| scope.spawn(move || work(slot)));
            let workers: Vec<_> = workers.collect();
            workers
                .into_iter()
                .try_for_each(|worker| match worker.join() {
                    Ok(outcome) => outcome,
                    Err(_) => bail!("a thread that runs tests panicked"),
                })
        })?;
        let (_, mut timings) = state
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        timings.sort_by_key(|timing| std::cmp::Reverse(timing.took));
        Ok(timings)
    }

    /// Returns the output of one job, with an additional line if the process was killed.
    fn output(&self, job: &Job, slot: Slot) -> Result<String> {
        let mut command = self.command(job.binary, slot)?;
        command
            .args(["--show-output", "--test-threads", "1", "--exact"])
            .args(&job.tests)
            .stdin(Stdio::null());
        if let Some(device) = job.device {
            command.env("NVFP4_TEST_DEVICE", device);
        }
        let output = command
            .output()
            .with_context(|| format!("cannot start {}", self.shown(job)))?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        // libtest exits with 101 if a test failed; a signal leaves no code.
        let expected = output.status.success() || output.status.code() == Some(101);
        if !expected {
            text += &String::from_utf8_lossy(&output.stderr);
            text += &format!("\nthe test binary ended with {}\n", output.status);
        }
        ensure!(
            text.contains("running "),
            "{}: no test ran:\n{text}",
            self.shown(job)
        );
        Ok(text)
    }

    fn shown(&self, job: &Job) -> String {
        let Binary {
            package, target, ..
        } = &self.binaries[job.binary];
        let device = job
            .device
            .map_or(String::new(), |device| format!(" on {device}"));
        format!("{package} {target}{device} {}", job.name)
    }
}

/// Returns the package name in an ID such as `path+file:///folder#name@0.1.0` or `...folder#0.1.0`.
fn package_name(id: &str) -> &str {
    let (path, rest) = id.rsplit_once('#').unwrap_or(("", id));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(path),
    }
}

/// Returns the first component of the path of a test.
pub fn module(test: &str) -> &str {
    test.split("::").next().unwrap_or(test)
}

/// Groups the tests by module; small modules are combined.
fn groups(tests: Vec<String>) -> Vec<(String, Vec<String>)> {
    let mut modules: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for test in tests {
        modules
            .entry(module(&test).to_owned())
            .or_default()
            .push(test);
    }
    let mut groups = Vec::new();
    let mut small: Vec<String> = Vec::new();
    for (name, tests) in modules {
        if tests.len() < SMALL_MODULE {
            small.extend(tests);
        } else {
            groups.push((name, tests));
        }
    }
    // Largest first, so that no large group starts last.
    groups.sort_by_key(|(_, tests)| std::cmp::Reverse(tests.len()));
    if !small.is_empty() {
        groups.push(("small modules".to_owned(), small));
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_packages() {
        for (id, name) in [
            (
                "path+file:///a/cube_kernels#nvfp4-kernels@0.1.0",
                "nvfp4-kernels",
            ),
            ("path+file:///a/xtask#0.1.0", "xtask"),
        ] {
            assert_eq!(package_name(id), name);
        }
    }

    #[test]
    fn lists_of_cores() {
        assert_eq!(numbers("\t0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(numbers("5"), Some(vec![5]));
        assert_eq!(numbers(""), None);
        let slots = Slot::of_cores();
        let count = thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(slots.len(), count);
        let is_pinned = |slot: &Slot| matches!(slot, Slot::Core(_));
        let pinned = slots.iter().filter(|slot| is_pinned(slot)).count();
        assert!([0, count].contains(&pinned), "{slots:?}");
    }

    /// A pinned process sees one core.
    #[test]
    fn processes_are_pinned() {
        let build = Build {
            binaries: vec![Binary {
                package: "p".into(),
                target: "t".into(),
                program: "cat".into(),
                folder: PathBuf::from("/"),
            }],
            ..Build::default()
        };
        for slot in Slot::of_cores() {
            let Slot::Core(core) = slot else { continue };
            let mut command = build.command(0, slot).unwrap();
            let output = command.arg("/proc/self/status").output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let expected = format!("Cpus_allowed_list:\t{core}");
            assert!(text.lines().any(|line| line == expected), "{text}");
        }
    }

    #[test]
    fn every_test_is_in_one_group() {
        let tests: Vec<String> = ["a::x", "b::1", "b::2", "b::3", "b::c::4", "top"]
            .map(String::from)
            .to_vec();
        let groups = groups(tests.clone());
        assert_eq!(groups[0].0, "b");
        let mut all: Vec<String> = groups.into_iter().flat_map(|(_, tests)| tests).collect();
        all.sort();
        assert_eq!(all, tests);
    }

    #[test]
    fn the_longest_begin_first_after_those_not_measured() {
        let build = Build {
            binaries: vec![Binary {
                package: "p".into(),
                target: "t".into(),
                program: PathBuf::new(),
                folder: PathBuf::new(),
            }],
            ..Build::default()
        };
        let job = |name: &str| Job {
            binary: 0,
            device: None,
            name: name.into(),
            tests: Vec::new(),
        };
        let mut jobs = ["short", "new", "long", "newer"].map(job);
        let times = Times {
            file: PathBuf::new(),
            seconds: BTreeMap::from([("p t short".into(), 1.0), ("p t long".into(), 9.0)]),
        };
        build.longest_first(&mut jobs, &times);
        let names = jobs.map(|job| job.name);
        assert_eq!(names, ["new", "newer", "long", "short"]);
    }

    #[test]
    fn binaries_and_libraries_of_messages() {
        let mut build = Build::default();
        for message in [
            r#"{"reason":"compiler-artifact","package_id":"path+file:///w/lm#nvfp4-lm@0.1.0",
                "manifest_path":"/w/lm/Cargo.toml","target":{"name":"nvfp4_lm"},
                "profile":{"test":true},"executable":"/t/nvfp4_lm-1"}"#,
            r#"{"reason":"compiler-artifact","package_id":"path+file:///w/lm#nvfp4-lm@0.1.0",
                "manifest_path":"/w/lm/Cargo.toml","target":{"name":"nvfp4_lm"},
                "profile":{"test":false},"executable":null}"#,
            r#"{"reason":"build-script-executed","linked_paths":["native=/llvm/lib","/x"]}"#,
            r#"{"reason":"build-finished","success":true}"#,
        ] {
            build.add(&serde_json::from_str(message).unwrap()).unwrap();
        }
        assert_eq!(build.binaries.len(), 1);
        let binary = &build.binaries[0];
        assert_eq!(
            (&*binary.package, &*binary.target),
            ("nvfp4-lm", "nvfp4_lm")
        );
        assert_eq!(binary.folder, PathBuf::from("/w/lm"));
        assert_eq!(
            build.libraries,
            [PathBuf::from("/llvm/lib"), PathBuf::from("/x")]
        );
    }
}
