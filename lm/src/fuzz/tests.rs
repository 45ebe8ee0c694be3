//! Runs the parsers on mutated seeds with a stable toolchain: flipped bits, replaced numbers,
//! truncation, splices of two seeds. `cargo xtask fuzz` sets the duration.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::PathBuf;
use std::sync::Once;
use std::time::{Duration, Instant};

use super::*;

/// Allocator that counts the current and the peak memory of this thread.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

fn count(bytes: isize) {
    // The counters of a thread are gone when it ends.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system's allocator; counters of the thread are never allocated.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Memory bound for any input: a constant, and a factor per input byte. A half-byte code becomes a
/// 4-byte value in two copies; a byte of JSON becomes a map node.
const BOUND: (usize, usize) = (16 << 20, 512);

/// SplitMix64 generator: the same seed gives the same inputs.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count.max(1) as u64) as usize
    }
}

/// Replacements for a number or a word in JSON.
const WORDS: [&str; 14] = [
    "0",
    "-1",
    "1.5",
    "1e400",
    "2147483647",
    "4294967296",
    "18446744073709551615",
    "9223372036854775808",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"\\ud800\"",
];

/// Returns one of `seeds` with one to four mutations.
fn change(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut data = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(data.len());
        match random.below(8) {
            _ if data.is_empty() => data.push(random.next() as u8),
            0 => data[at] ^= 1 << random.below(8),
            1 => data[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => data.truncate(at),
            3 => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                data.truncate(at);
                data.extend(&other[from..]);
            }
            4 => {
                // Overwrites eight bytes, the width of sizes.
                let value = [0, 1, u64::from(u32::MAX), 1 << 40, 1 << 62, u64::MAX];
                let bytes = value[random.below(6)].to_le_bytes();
                let end = data.len().min(at + 8);
                data[at..end].copy_from_slice(&bytes[..end - at]);
            }
            5 => {
                let end = data.len().min(at + 1 + random.below(64));
                let part = data[at..end].to_vec();
                data.splice(at..at, part);
            }
            6 => {
                let end = data.len().min(at + 1 + random.below(16));
                data.drain(at..end);
            }
            _ => {
                let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || b"-.".contains(byte);
                let word = data[at..].iter().take_while(|byte| is_word(byte)).count();
                let new = WORDS[random.below(WORDS.len())].bytes();
                data.splice(at..at + word, new);
            }
        }
    }
    data
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = repository().join("fuzz/seeds").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|_| panic!("no seeds for {target}"));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Suppresses the backtraces of panics in a thread that is [`QUIET`], because their memory would
/// count for the parser. A parser may catch panics of a library.
fn without_traces() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |info| match QUIET.get() {
            true => eprintln!("{info}"),
            false => before(info),
        }));
    });
}

/// Runs `target` on `data`; returns a description of the fault, if any.
fn fault(target: &Target, data: &[u8]) -> Option<String> {
    let live = LIVE.get();
    PEAK.set(live);
    without_traces();
    QUIET.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    QUIET.set(false);
    let taken = (PEAK.get() - live).max(0) as usize;
    let bound = BOUND.0 + BOUND.1 * data.len();
    match outcome {
        Err(_) => Some("panicked".into()),
        Ok(()) if taken > bound => Some(format!("took {taken} bytes, more than {bound}")),
        Ok(()) => None,
    }
}

/// Reads a number passed by `cargo xtask fuzz`.
fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is {text:?}, no number")),
    )
}

/// Without `NVFP4_FUZZ_SECONDS`, runs so few inputs per target that the time is negligible.
#[test]
fn parsers_survive_changed_seeds() {
    let seconds = variable("NVFP4_FUZZ_SECONDS");
    let first = variable("NVFP4_FUZZ_SEED").unwrap_or(0);
    let only = std::env::var("NVFP4_FUZZ_TARGET").ok();
    let chosen = |target: &&Target| only.as_deref().is_none_or(|only| only == target.name);
    let targets: Vec<&Target> = TARGETS.iter().filter(chosen).collect();
    assert!(
        !targets.is_empty(),
        "NVFP4_FUZZ_TARGET is {only:?}, no target"
    );
    let share = seconds.map(|all| Duration::from_secs(all) / targets.len() as u32);
    let mut faults = Vec::new();
    for target in targets {
        let seeds = seeds(target.name);
        assert!(!seeds.is_empty(), "{} has no seed", target.name);
        let mut random = Random(first);
        let (start, mut inputs) = (Instant::now(), 0);
        let is_over = |inputs: usize| match share {
            Some(share) => start.elapsed() >= share,
            None => inputs >= 50 + seeds.len(),
        };
        while !is_over(inputs) {
            let data = match seeds.get(inputs) {
                Some(seed) => seed.clone(),
                None => change(&mut random, &seeds),
            };
            inputs += 1;
            // If the process aborts, this file is the only trace.
            let name = format!("nvfp4-fuzz-{}", target.name);
            let path = std::env::temp_dir().join(name);
            if seconds.is_some() {
                write(&path, &data);
            }
            if let Some(what) = fault(target, &data) {
                write(&path, &data);
                faults.push(format!("{} {what}: {}", target.name, path.display()));
                break;
            }
        }
        println!("fuzz {}: {inputs} inputs", target.name);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Each seed is accepted by its parser, so that mutations reach the code after the first checks.
#[test]
fn every_target_has_seeds_and_a_binary() {
    let folder = repository().join("fuzz");
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
    let names: BTreeSet<String> = TARGETS
        .iter()
        .map(|target| target.name.to_owned())
        .collect();
    let stems = |path: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(folder.join(path)).unwrap();
        let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
        entries.map(|entry| stem(entry.unwrap().path())).collect()
    };
    assert_eq!(stems("fuzz_targets"), names);
    assert_eq!(stems("seeds"), names);
    for name in &names {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
}

/// Seeds of parsers that read several files reach all of the files.
#[test]
fn seeds_of_folders_are_read() {
    let seed = |name: &str| fs::read(repository().join("fuzz/seeds").join(name)).unwrap();
    checkpoint(&seed("checkpoint/modelopt-awq.safetensors"));
    let awq = Checkpoint::open(&folder("awq")).unwrap();
    assert_eq!(awq.layers().values().filter(|l| l.pre_quant).count(), 4);
    let resume = || Journal::resume(&folder("journal"), &MadeFrom::new()).unwrap();
    journal(&seed("journal/calibration"));
    let calibration = resume().calibration().unwrap().unwrap();
    assert_eq!((calibration.inputs.len(), calibration.caches.len()), (3, 1));
    journal(&seed("journal/part"));
    assert!(resume().part(0).unwrap().is_some());
}

/// Seeds of the two targets that read many forms are accepted, so that mutations reach each form.
#[test]
fn seeds_of_all_forms_are_accepted() {
    for seed in seeds("config") {
        let json = serde_json::from_slice(&seed).unwrap();
        DecoderConfig::from_json(&json).unwrap();
    }
    for seed in seeds("quantization_config") {
        let json: Value = serde_json::from_slice(&seed).unwrap();
        let config = &json["config"];
        QuantConfig::read(config, json.get("hf_quant_config")).unwrap();
        if is_fp8(config.as_object().unwrap()) {
            block_size(config.as_object().unwrap()).unwrap();
        }
    }
    let open = |name: &str| {
        let path = repository().join("fuzz/seeds").join(name);
        TensorFolder::open_file(&path).unwrap()
    };
    for (name, tensor) in [("mxfp4", "gate_proj"), ("down", "down_proj")] {
        let tensors = open(&format!("experts/{name}.safetensors"));
        let tensors = split(tensors, &small_config("gpt_oss")).unwrap();
        let name = format!("model.layers.0.mlp.experts.1.{tensor}.weight");
        assert!(tensors.get(&name).unwrap().to_f32().is_ok());
    }
    let json = serde_json::json!({"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [32, 32],
    }});
    let tensors = open("fp8/blocks.safetensors");
    let tensors = tensors.with_fp8_scales(json.as_object().unwrap()).unwrap();
    assert!(tensors.scales_of("a.weight").is_some());
}

#[test]
fn the_bound_is_one() {
    fn greedy(data: &[u8]) {
        let taken = vec![1u8; (BOUND.0 + BOUND.1 * data.len()) * data.len()];
        assert!(!taken.is_empty());
    }
    let target = Target {
        name: "greedy",
        run: greedy,
    };
    assert!(fault(&target, &[1, 2]).unwrap().contains("took"));
    assert_eq!(fault(&target, &[]), Some("panicked".into()));
}
