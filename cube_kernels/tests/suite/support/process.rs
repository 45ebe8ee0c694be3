//! Tests that require a separate process: the test binary runs itself, with the tests of one
//! module.

use std::{
    collections::HashMap,
    env,
    process::{Command, Stdio},
    sync::{Arc, Mutex, OnceLock},
};

/// Variable that names, in a child process, the module whose tests it runs.
const CHILD: &str = "NVFP4_TEST_CHILD";

/// Additional environment variables of a child process.
type Environment = [(&'static str, &'static str)];

/// Output of a child process: each test's verdict and its output.
type Outcome = HashMap<String, (String, String)>;

/// Runs the test `test` of the module `module` in a separate process, which runs all tests of that
/// module that were selected for this process. Returns true after that, and false in the child
/// process itself. The `environment` must be the same for all tests of a module.
///
/// # Panics
/// Panics with the test's output if the test failed there.
pub fn ran_in_own_process(module: &str, test: &str, environment: &Environment) -> bool {
    if let Ok(child) = env::var(CHILD) {
        return child != module;
    }
    let name = format!("{module}::{test}");
    let outcome = outcome(module, environment);
    let (verdict, output) = outcome
        .get(&name)
        .unwrap_or_else(|| panic!("{name}: no verdict from its process"));
    print!("{output}");
    assert_eq!(verdict, "ok", "{name}, in a process of its own");
    true
}

/// Returns the outcome of the tests of `module`; the first caller runs them.
fn outcome(module: &str, environment: &Environment) -> Arc<Outcome> {
    type Once = Arc<OnceLock<Arc<Outcome>>>;
    static OUTCOMES: Mutex<Option<HashMap<String, Once>>> = Mutex::new(None);
    let once = {
        let mut outcomes = OUTCOMES.lock().unwrap_or_else(|error| error.into_inner());
        let outcomes = outcomes.get_or_insert_default();
        outcomes.entry(module.to_owned()).or_default().clone()
    };
    once.get_or_init(|| Arc::new(run(module, environment)))
        .clone()
}

/// Runs the tests of `module` that were selected for this process.
fn run(module: &str, environment: &Environment) -> Outcome {
    let prefix = format!("{module}::");
    let listed = child(
        module,
        environment,
        env::args().skip(1).chain(["--list".into()]),
    );
    let names = (listed.lines())
        .filter_map(|line| line.strip_suffix(": test"))
        .filter(|name| name.starts_with(&prefix))
        .map(str::to_owned);
    let options = ["--exact", "--include-ignored", "--show-output"].map(str::to_owned);
    let threads = env::args().skip_while(|argument| argument != "--test-threads");
    let joined = env::args().filter(|argument| argument.starts_with("--test-threads="));
    let options = options.into_iter().chain(threads.take(2)).chain(joined);
    parse(&child(module, environment, options.chain(names)))
}

/// Returns the output of this test binary with `arguments`.
fn child(
    module: &str,
    environment: &Environment,
    arguments: impl Iterator<Item = String>,
) -> String {
    let output = Command::new(env::current_exe().expect("this binary has a path"))
        .args(arguments)
        .env(CHILD, module)
        .envs(environment.iter().copied())
        .stderr(Stdio::inherit())
        .output()
        .expect("this binary can be run");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Parses verdicts and sections of output, as libtest prints them.
fn parse(text: &str) -> Outcome {
    let mut outcome = Outcome::new();
    let mut section = None;
    for line in text.lines() {
        let verdict = (line.strip_prefix("test ")).and_then(|line| line.rsplit_once(" ... "));
        let heading = line
            .strip_prefix("---- ")
            .and_then(|line| line.strip_suffix(" stdout ----"));
        if let Some(name) = heading {
            section = Some(name.to_owned());
        } else if ["successes:", "failures:"].contains(&line) {
            section = None;
        } else if let Some((_, output)) = (section.as_ref()).and_then(|name| outcome.get_mut(name))
        {
            output.push_str(line);
            output.push('\n');
        } else if let Some((name, verdict)) = verdict {
            outcome.insert(name.to_owned(), (verdict.to_owned(), String::new()));
        }
    }
    outcome
}
