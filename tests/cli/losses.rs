//! Losses and parameters of short runs on the CPU, to the byte.
//!
//! [`FILE`] has the loss of the last step and a checksum of the trained parameters of each run. A
//! change of arithmetic under `train` or `finetune` changes them; [`WRITE`] then writes the file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::fs;
use std::hash::Hasher as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use burn_pack::Reader;
use fnv::FnvHasher;

use crate::finetune::{lines, saved};
use crate::support::*;

/// Expected values.
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cli/losses.tsv");

/// Environment variable that makes the test write [`FILE`], as it does for the lock files of
/// machine code.
const WRITE: &str = "NVFP4_LOCK";

/// Command that writes [`FILE`].
const WRITE_COMMAND: &str =
    "NVFP4_LOCK=1 cargo test -p nvfp4-cli --features cpu,cuda --test cli -- losses::";

const HEADER: &str = "case\trecipe\tloss\tloss bits\tparameters";

/// Steps of each run.
const STEPS: usize = 20;

/// The schedule is longer than [`STEPS`], and no step before its end writes a row or a checkpoint:
/// the checkpoint of the last step has the losses of all steps.
const SCHEDULE: &str = "--steps 24 --warmup 2 --log-every 100 --eval-every 100 \
                        --checkpoint-every 100";

/// Contractions have at most 512 elements, which Flex adds up in one order for any size of caches.
const SIZES: &str = "--no-compare --width 64 --layers 2 --heads 4 --hidden 128 --context 32 \
                     --batch 4 --lr 4e-3 --eval-batches 1";

/// Sizes of decorated models, which train on CubeCL's CPU runtime.
#[cfg(feature = "cpu")]
const DECORATED_SIZES: &str = "--decorate --device cpu --no-compare --width 16 --layers 1 --heads 1 \
                               --hidden 32 --context 8 --batch 2 --eval-batches 1";

/// Cases of decorated models, with their steps: of every run, and of `--full`.
#[cfg(feature = "cpu")]
const DECORATED: [(&str, usize); 2] = [("decorated-2", 2), ("decorated", STEPS)];

const FINETUNE: &str = "--device flex --batch 2 --context 32 --lr 3e-3 --valid-share 0.2 \
                        --eval-rows 2";

/// A kind of run, and its recipe or the form of its frozen weights.
type Name = (String, String);

/// A run of [`STEPS`] steps.
struct Run {
    case: &'static str,
    recipe: &'static str,
    /// Command and flags, without paths.
    arguments: String,
}

impl Run {
    fn train(case: &'static str, recipe: &'static str, more: &str) -> Self {
        let arguments = format!("train --recipe {recipe} {SCHEDULE} {more}");
        Self {
            case,
            recipe,
            arguments,
        }
    }

    fn finetune(case: &'static str, recipe: &'static str, more: &str) -> Self {
        let arguments = format!("finetune {SCHEDULE} {FINETUNE} {more}");
        Self {
            case,
            recipe,
            arguments,
        }
    }

    fn name(&self) -> Name {
        (self.case.into(), self.recipe.into())
    }

    fn is_training(&self) -> bool {
        self.arguments.starts_with("train")
    }

    /// Trains to step `step` in `out`.
    fn start(&self, out: &Path, data: &str, step: usize) {
        let arguments = format!("{} --stop-at {step}", self.arguments);
        let model = golden("llama3-tiny");
        let out = out.to_str().unwrap();
        let paths = match self.is_training() {
            true => vec!["--data", text(), "--out", out],
            false => vec![&*model, "--data", data, "--out", out],
        };
        succeeds(nvfp4(&arguments, &paths));
    }

    fn checkpoint(&self, out: &Path) -> PathBuf {
        match self.is_training() {
            true => checkpoint(&out.join(self.recipe)),
            false => saved(out),
        }
    }

    /// Returns the folder of the run after `steps` steps.
    fn run(&self, data: &str, steps: usize) -> PathBuf {
        let out = folder(&format!("losses-{}-{}", self.case, self.recipe));
        self.start(&out, data, steps);
        out
    }

    /// Asserts that a run that stops and resumes equals the run in `whole` to the byte.
    fn assert_resumes(&self, whole: &Path, data: &str) {
        let out = folder(&format!("losses-{}-{}-resumed", self.case, self.recipe));
        self.start(&out, data, 9);
        let command = self.arguments.split(' ').next().unwrap();
        let resume = format!("{command} --stop-at {STEPS} --resume");
        succeeds(nvfp4(&resume, &[out.to_str().unwrap()]));
        let [whole, resumed] = [whole, &out].map(|out| self.checkpoint(out));
        for file in ["model.bpk", "optimizer.bpk"] {
            let [whole, resumed] = [&whole, &resumed].map(|folder| fs::read(folder.join(file)));
            assert!(
                whole.unwrap() == resumed.unwrap(),
                "{} {}: {file} differs after resuming",
                self.case,
                self.recipe
            );
        }
        assert_eq!(losses(&whole, STEPS), losses(&resumed, STEPS));
    }
}

/// All runs on Flex.
fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for recipe in ["nvidia", "quartet2"] {
        let flex = format!("--device flex {SIZES}");
        let mixture = format!("{flex} --model moe --experts 4 --top-k 2");
        let lora = format!("--recipe {recipe} --lora 4 --frozen high");
        let distill = format!("--recipe {recipe} --distill");
        runs.push(Run::train("dense", recipe, &flex));
        runs.push(Run::train("mixture", recipe, &mixture));
        runs.push(Run::finetune("lora", recipe, &lora));
        runs.push(Run::finetune("distilled", recipe, &distill));
    }
    // Packed weights have no recipe: their form says how they are multiplied.
    for form in ["w4a16", "w4a4"] {
        let lora = format!("--lora 4 --frozen {form}");
        let distill = format!("--qat {form} --distill");
        runs.push(Run::finetune("lora-packed", form, &lora));
        runs.push(Run::finetune("distilled-qat", form, &distill));
    }
    runs
}

/// Result of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Outcome {
    /// Loss of the last step.
    loss: f32,
    /// FNV-1a of the names and bytes of the trained parameters, in the order of their names.
    parameters: u64,
}

impl Outcome {
    /// Reads a checkpoint of `steps` steps.
    fn read(checkpoint: &Path, steps: usize) -> Self {
        let reader = Reader::from_file(checkpoint.join("model.bpk")).unwrap();
        let mut tensors = reader.into_tensors().unwrap();
        tensors.sort_by(|left, right| left.name.cmp(&right.name));
        let mut hash = FnvHasher::default();
        for tensor in tensors {
            hash.write(tensor.name.as_bytes());
            hash.write(&tensor.into_bytes().unwrap());
        }
        Self {
            loss: losses(checkpoint, steps)[steps - 1],
            parameters: hash.finish(),
        }
    }

    fn parse([loss, bits, parameters]: [&str; 3]) -> Option<Self> {
        let bits = u32::from_str_radix(bits, 16).ok()?;
        let found = Self {
            loss: f32::from_bits(bits),
            parameters: u64::from_str_radix(parameters, 16).ok()?,
        };
        (loss.parse::<f32>() == Ok(found.loss)).then_some(found)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, parameters } = self;
        write!(f, "{loss}\t{:08x}\t{parameters:016x}", loss.to_bits())
    }
}

/// Losses of all `steps` steps of a checkpoint.
fn losses(checkpoint: &Path, steps: usize) -> Vec<f32> {
    let state = json(&checkpoint.join("state.json"));
    let losses = state["losses"].as_array().unwrap().iter();
    let losses: Vec<f32> = losses.map(|loss| loss.as_f64().unwrap() as f32).collect();
    assert_eq!(losses.len(), steps);
    losses
}

/// Returns true if the processor has fused multiply-adds, and if it has AVX-512. On Flex the mixture
/// also differs between AVX2 and AVX-512, of which [`FILE`] has the values. CubeCL's CPU runtime has
/// equal bits with both.
#[cfg(target_arch = "x86_64")]
fn processor() -> [bool; 2] {
    [
        std::is_x86_feature_detected!("fma"),
        std::is_x86_feature_detected!("avx512f"),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn processor() -> [bool; 2] {
    [false; 2]
}

/// Values of [`FILE`] by run.
type Values = BTreeMap<Name, Outcome>;

fn read() -> Values {
    let text = fs::read_to_string(FILE).unwrap_or_default();
    let entry = |line: &str| {
        let mut fields = line.split('\t');
        let mut next = || Some(fields.next()?.to_owned());
        let name = (next()?, next()?);
        let outcome = Outcome::parse([&next()?, &next()?, &next()?])?;
        Some((name, outcome))
    };
    let entries = text
        .lines()
        .skip(1)
        .map(|line| entry(line).unwrap_or_else(|| panic!("{FILE}: not an entry: {line}")));
    entries.collect()
}

fn write(values: &Values) {
    let mut text = format!("{HEADER}\n");
    for ((case, recipe), outcome) in values {
        writeln!(text, "{case}\t{recipe}\t{outcome}").unwrap();
    }
    fs::write(FILE, text).unwrap();
}

/// Returns one line for each run whose values differ, and for each value without a run.
fn differences(expected: &Values, found: &Values) -> Vec<String> {
    let names: BTreeSet<&Name> = expected.keys().chain(found.keys()).collect();
    let differing = (names.into_iter()).filter(|&name| expected.get(name) != found.get(name));
    let line = |name: &Name| {
        let [expected, found] = [expected, found].map(|values| match values.get(name) {
            Some(outcome) => outcome.to_string().replace('\t', " "),
            None => "none".into(),
        });
        let (case, recipe) = name;
        format!("{case:<14} {recipe:<9} {expected:<38} {found}")
    };
    differing.map(line).collect()
}

/// Compares `found` with the values of [`FILE`] whose case is one of a test, or writes them.
fn compare(found: Values, is_of_test: impl Fn(&str) -> bool) {
    // Tests of this binary run at the same time.
    static LOCK: Mutex<()> = Mutex::new(());
    let _guard = LOCK.lock().unwrap();
    let mut values = read();
    let expected: Values = values
        .extract_if(.., |(case, _), _| is_of_test(case))
        .collect();
    if std::env::var_os(WRITE).is_some() {
        values.extend(found);
        return write(&values);
    }
    let differences = differences(&expected, &found);
    assert!(
        differences.is_empty(),
        "{} of {} runs differ from {FILE}:\n{:<14} {:<9} {:<38} found\n{}\n\
         After an intended change of arithmetic, write the file: {WRITE_COMMAND}",
        differences.len(),
        found.len(),
        "case",
        "recipe",
        "expected",
        differences.join("\n")
    );
}

/// Trains every kind of run for [`STEPS`] steps and compares it with [`FILE`]. Dense and distilled
/// runs also stop and resume.
#[test]
fn losses_and_parameters_are_those_of_the_file() {
    let data = lines(&folder("losses-data"));
    let mut found = Values::new();
    for run in runs() {
        let out = run.run(&data, STEPS);
        found.insert(run.name(), Outcome::read(&run.checkpoint(&out), STEPS));
        if ["dense", "distilled"].contains(&run.case) {
            run.assert_resumes(&out, &data);
        }
    }
    let [_, has_avx512] = processor();
    if !has_avx512 {
        nvfp4_test_support::skip!(OtherProcessor);
    }
    compare(found, |case| !case.starts_with("decorated"));
}

/// Trains a model of Burn's own layers for 2 steps, with `--full` also for [`STEPS`], and compares it
/// with [`FILE`].
#[cfg(feature = "cpu")]
#[test]
fn decorated_losses_and_parameters_are_those_of_the_file() {
    let [has_fma, _] = processor();
    if !has_fma {
        nvfp4_test_support::skip!(OtherProcessor);
    }
    let cases = match nvfp4_test_support::is_full() || std::env::var_os(WRITE).is_some() {
        true => &DECORATED[..],
        false => &DECORATED[..1],
    };
    for &(case, steps) in cases {
        let mut found = Values::new();
        for recipe in ["nvidia", "quartet2"] {
            let run = Run::train(case, recipe, DECORATED_SIZES);
            let out = run.run("", steps);
            found.insert(run.name(), Outcome::read(&run.checkpoint(&out), steps));
        }
        compare(found, |name| name == case);
    }
}
