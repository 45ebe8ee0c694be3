//! CUDA source of every kernel of the registry, on a machine without a GPU: generated if an input
//! changed, compared with the lock files of [`lock`], compiled if it changed, and checked for
//! conversion instructions, matrix instructions and spilled registers.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, btree_map::Entry},
    fs,
    panic::{self, AssertUnwindSafe},
    path::{Path, PathBuf},
    sync::{
        LazyLock, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};

use crate::gemm_source::{self, Resources};
use crate::support::{
    lock::{self, Cost, Lock, Locked},
    nvrtc::CudaTools,
    sources::{self, is_left_out, machine_code},
};
use cubecl::{hash::StableHash, prelude::KernelId};
use cubecl_server::runtime::Runtime;
use nvfp4_kernels::{
    gemm::proof::{Fault, GemmInstance, GroupedDim, Multiply, Sm100Form, Sm100Plan, TensorCore},
    graph::WAITING,
    proof::{codec::Conversion, ptx::BlockScaled},
    registry::{self, DummyDevice, Expected, Instance},
};
use nvfp4_test_support::{Skip, is_full};

/// SASS of `cvt.rn.satfinite.e2m1x2`, `cvt.rs.satfinite.e2m1x4` and `cvt.rn.satfinite.e4m3x2`.
const E2M1_RN: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C";
const E2M1_RS: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS";
const E4M3: &str = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C";

/// Selects the instances that are compiled.
type IsChosen = fn(&Instance) -> bool;

/// Instances that spill a few registers, by architecture; the lock files have the bytes.
const SPILLING: [(&str, &str); 12] = [
    ("decode_run_kernel-128-8-Bf16-E4m3-U32", "sm_90a"),
    ("ms_eden_amax_kernel-F32-U32-false", "sm_90a"),
    ("moe_unpermute_kernel-F32-U32-4-true", "sm_100a"),
    ("ms_eden_kernel-packed-U64-true-batch", "sm_100a"),
    ("ms_eden_kernel-packed-U64-true-groups", "sm_100a"),
    ("rope_kernel-F16-U32-8", "sm_100a"),
    ("adamw_kernel-Bf16-Bf16-Some(Bf16)-8-1-U32", "sm_120a"),
    ("ms_eden_amax_kernel-Bf16-U32-false", "sm_120a"),
    ("ms_eden_amax_kernel-F16-U32-false", "sm_120a"),
    ("ms_eden_amax_kernel-F32-U32-true-batch", "sm_120a"),
    ("ms_eden_kernel-packed-U64-true-batch", "sm_120a"),
    ("rope_kernel-F16-U32-8", "sm_120a"),
];

/// Compilation target: an architecture, the conversion method of its devices, and the kernels.
struct Target {
    /// Name of the lock file.
    name: &'static str,
    arch: &'static str,
    conversion: Conversion,
    is_chosen: IsChosen,
}

/// Targets, with one lock file each. Architectures without dedicated kernels have those with the
/// matrix instructions of every GPU. The emulated conversions of Blackwell are compiled for Hopper
/// with one element type.
const TARGETS: [Target; 10] = [
    target("sm_90a", Conversion::Sm89, |_| true),
    target("sm_100a", Conversion::Hardware, |_| true),
    target("sm_103a", Conversion::Hardware, is_tcgen05),
    target("sm_120a", Conversion::HardwareNearest, |_| true),
    target("sm_121a", Conversion::HardwareNearest, is_block_scaled),
    target("sm_80", Conversion::Sm80, is_portable),
    target("sm_86", Conversion::Sm80, is_portable),
    target("sm_89", Conversion::Sm89, is_portable),
    target("sm_90", Conversion::Sm89, is_portable),
    Target {
        name: "sm_90a-emulated",
        ..target("sm_90a", Conversion::Emulated, |instance| {
            instance.expected.converts() && instance.name.contains("Bf16-U32")
        })
    },
];

const fn target(arch: &'static str, conversion: Conversion, is_chosen: IsChosen) -> Target {
    Target {
        name: arch,
        arch,
        conversion,
        is_chosen,
    }
}

fn is_portable(instance: &Instance) -> bool {
    use GemmInstance::{Cmma, SmallM};
    matches!(instance.gemm, Some(Cmma(..) | SmallM(_))) || instance.function().starts_with("fp8_")
}

fn is_block_scaled(instance: &Instance) -> bool {
    matches!(instance.gemm, Some(GemmInstance::Sm120BlockScaled(_)))
}

fn is_tcgen05(instance: &Instance) -> bool {
    use GemmInstance::{Sm100BlockScaled, Sm100Probe};
    matches!(instance.gemm, Some(Sm100BlockScaled(_) | Sm100Probe { .. }))
}

fn instances(conversion: Conversion, arch: &str) -> Vec<Instance> {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let target = cubecl::cuda::CudaRuntime::target_properties();
    let overlaps = !arch.starts_with("sm_8");
    registry::instances(&DummyDevice::new(client, target, conversion, overlaps))
}

/// Asserts that `found` equals `expected`, if that is given.
fn assert_found(expected: Option<bool>, found: bool, what: &str) {
    if let Some(expected) = expected {
        assert_eq!(found, expected, "{what}");
    }
}

/// A mutable variable reaches an asm block as a pointer, which some instructions accept silently: a
/// 32-bit store from a 64-bit register, and an address in shared memory. Instructions that
/// legitimately take 64 bits are named here.
fn assert_no_pointers(name: &str, source: &str) {
    let takes_64 = [
        "cvta.to.",
        "atom.",
        "tcgen05.cp.",
        "tcgen05.mma.",
        "cp.async.bulk.",
    ];
    let statements = source.lines().filter(|line| line.contains("asm"));
    for line in statements.filter(|line| line.contains("\"l\"(")) {
        let is_right = takes_64
            .iter()
            .any(|instruction| line.contains(instruction));
        assert!(is_right, "{name} passes a pointer: {line}");
    }
}

/// Compiles one instance and checks its machine code.
fn check_instance(tools: &CudaTools, instance: &Instance, source: &Source, arch: &str) -> Cost {
    let name = &instance.name;
    let Source { text, shared } = source;
    if is_tcgen05(instance) {
        assert_no_pointers(name, text);
    }
    let compiled = machine_code(tools, name, text, arch);
    let Expected {
        e2m1_rn,
        e2m1_rs,
        e4m3,
        spills,
    } = instance.expected;
    let what = |which: &str| format!("{which} in {name} for {arch}");
    let spills = spills.map(|spills| spills || SPILLING.contains(&(&**name, arch)));
    assert_found(spills, compiled.stack > 0, &what("spills"));
    let sass = tools.disassemble(&compiled.code, &format!("{name}-{arch}"));
    let nearest = |line: &str| line.contains(E2M1_RN) && !line.contains(E2M1_RS);
    assert_found(
        e2m1_rn,
        sass.lines().any(nearest),
        &what("e2m1, to nearest"),
    );
    assert_found(e2m1_rs, sass.contains(E2M1_RS), &what("e2m1, stochastic"));
    assert_found(e4m3, sass.contains(E4M3), &what("e4m3"));
    if let Some(gemm) = instance.gemm {
        let takes = Resources {
            registers: compiled.registers,
            shared: *shared,
        };
        gemm_source::check(name, gemm, takes, &sass, arch);
    }
    if arch == "sm_90a" && WAITING.contains(&instance.function()) {
        assert_waits(name, instance.function(), &sass);
    }
    Cost {
        registers: compiled.registers,
        stack: compiled.stack,
        instructions: lock::instructions(&sass),
    }
}

/// The CUDA source of an instance.
struct Source {
    text: String,
    /// Bytes of shared memory at its launch.
    shared: usize,
}

impl Source {
    fn of(instance: &Instance) -> Self {
        let (text, shared) = sources::cuda_kernel(&instance.name, &*instance.kernel);
        Self { text, shared }
    }
}

/// The hash of the source of a kernel, and the source if it was generated just now.
struct Generated {
    hash: u64,
    source: Option<Source>,
}

impl Generated {
    /// Generates the source of `instance`, unless this process has generated it for another target:
    /// the source depends on the id of the kernel alone.
    fn of(instance: &Instance) -> Self {
        static HASHES: LazyLock<Mutex<HashMap<KernelId, u64>>> = LazyLock::new(Mutex::default);
        let id = instance.kernel.id();
        if let Some(&hash) = HASHES.lock().unwrap().get(&id) {
            return Self { hash, source: None };
        }
        let source = Source::of(instance);
        let hash = lock::hash(&source.text);
        HASHES.lock().unwrap().insert(id, hash);
        Self {
            hash,
            source: Some(source),
        }
    }
}

/// Hash of the source of an instance, and its machine code if that is known.
type Found = BTreeMap<String, (u64, Option<Cost>)>;

/// Compares the kernels of a target with its lock file. Generates the sources if an input changed,
/// otherwise a sample; compiles those that changed. With `--full`, generates and compiles all.
fn check(target: &str) {
    let target = TARGETS.iter().find(|it| it.name == target).unwrap();
    let mut lock = Lock::read(target.name);
    let tools = CudaTools::find();
    let (found, failures) = target.compile(&lock, tools.as_ref().ok());
    let which = match lock.is_of_these_inputs() {
        true => "no input changed",
        false => "all sources generated",
    };
    println!("{}: {} instances, {which}", target.name, found.len());
    if lock::writes() {
        if let Err(reason) = tools {
            panic!("no lock file can be written: {reason}");
        }
        if !sources::is_selection() {
            lock.entries.clear();
        }
        for (name, (hash, cost)) in found {
            if let Some(cost) = cost {
                lock.entries.insert(name, Locked { hash, cost });
            }
        }
        lock.write();
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        return;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let stale = differences(&lock, &found);
    assert!(
        stale.is_empty(),
        "tests/machine_code/{}.tsv is not up to date, `cargo xtask machine-code` writes it:\n{}",
        target.name,
        stale.join("\n")
    );
    if let Err(reason) = tools {
        let test = format!("registry_source::{}", target.name.replace('-', "_"));
        Skip::NoCudaTools.print(&test, reason);
    }
}

impl Target {
    fn instances(&self) -> Vec<Instance> {
        let mut instances = instances(self.conversion, self.arch);
        instances.retain(|instance| {
            (self.is_chosen)(instance)
                && instance.architectures.contains(self.arch)
                && !is_left_out(&instance.name)
        });
        instances
    }

    /// Generates the sources, and compiles and checks those that differ from `lock`, on all cores.
    /// Returns the results and the messages of failed checks.
    fn compile(&self, lock: &Lock, tools: Option<&CudaTools>) -> (Found, Vec<String>) {
        let instances = self.instances();
        let next = AtomicUsize::new(0);
        let found = Mutex::new(Found::new());
        let failures = Mutex::new(Vec::new());
        let work = || {
            while let Some(instance) = instances.get(next.fetch_add(1, Ordering::Relaxed)) {
                let checked = panic::catch_unwind(AssertUnwindSafe(|| {
                    self.compile_instance(instance, lock, tools)
                }));
                match checked {
                    Ok(one) => {
                        let before = found.lock().unwrap().insert(instance.name.clone(), one);
                        assert!(before.is_none(), "two instances are {}", instance.name);
                    }
                    Err(payload) => {
                        let text = (payload.downcast_ref::<String>().map(String::as_str))
                            .or(payload.downcast_ref::<&str>().copied());
                        let text = text.unwrap_or("a panic without a message").to_owned();
                        failures.lock().unwrap().push(text);
                    }
                }
            }
        };
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..cores {
                scope.spawn(work);
            }
        });
        (found.into_inner().unwrap(), failures.into_inner().unwrap())
    }

    fn compile_instance(
        &self,
        instance: &Instance,
        lock: &Lock,
        tools: Option<&CudaTools>,
    ) -> (u64, Option<Cost>) {
        let start = Instant::now();
        if let Some(entry) = lock.entries.get(&instance.name)
            && lock.is_of_these_inputs()
            && !is_full()
            && !lock::writes()
            && !entry.hash.is_multiple_of(lock::SAMPLE)
        {
            return (entry.hash, Some(entry.cost));
        }
        let Generated { hash, source } = Generated::of(instance);
        let locked = lock.entries.get(&instance.name);
        let locked = locked.filter(|entry| entry.hash == hash);
        let cost = match (tools, locked) {
            (_, Some(entry)) if !is_full() && !hash.is_multiple_of(lock::SAMPLE) => {
                Some(entry.cost)
            }
            (None, _) => locked.map(|entry| entry.cost),
            (Some(tools), _) => {
                let source = source.unwrap_or_else(|| Source::of(instance));
                let cost = check_instance(tools, instance, &source, self.arch);
                println!(
                    "{} {}: {cost}, {:.1?}",
                    instance.name,
                    self.arch,
                    start.elapsed()
                );
                Some(cost)
            }
        };
        (hash, cost)
    }
}

/// Returns one line per instance that differs from the lock file.
fn differences(lock: &Lock, found: &Found) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, &(hash, cost)) in found {
        let shown = cost.map_or("not compiled".to_owned(), |cost| cost.to_string());
        match lock.entries.get(name) {
            None => lines.push(format!("{name} is new: {shown}")),
            Some(entry) if cost != Some(entry.cost) => {
                lines.push(format!("{name}: {shown}, was {}", entry.cost));
            }
            Some(entry) if entry.hash != hash => {
                lines.push(format!("{name}: another source, the same {shown}"));
            }
            Some(_) => {}
        }
    }
    let gone = lock
        .entries
        .keys()
        .filter(|name| !found.contains_key(*name));
    if !sources::is_selection() {
        lines.extend(gone.map(|name| format!("{name} is gone")));
    }
    lines
}

/// Every kernel that waits is in the list of kernels that are made to overlap.
#[test]
fn kernels_that_wait_are_known() {
    let mut functions = BTreeSet::new();
    for instance in instances(Conversion::Sm89, "sm_90a") {
        let function = instance.function();
        if functions.insert(function) {
            let (text, _) = sources::cuda_kernel(&instance.name, &*instance.kernel);
            let waits = text.contains("griddepcontrol.wait");
            assert_eq!(waits, WAITING.contains(&function), "{}", instance.name);
        }
    }
}

/// Checks which loads an overlapping kernel issues before it waits for the previous kernel.
/// Compilers may move loads; only data named in the contract of `graph::overlap_kernels` may be
/// loaded early.
fn assert_waits(name: &str, function: &str, sass: &str) {
    let wait = sass.find("ACQBULK");
    let wait = wait.unwrap_or_else(|| panic!("{name} does not wait"));
    assert!(sass.contains("PREEXIT"), "{name} lets no kernel begin");
    let before = sass[..wait].lines().filter(|line| line.contains("LDG."));
    let (constant, other): (Vec<_>, Vec<_>) = before.partition(|line| line.contains("CONSTANT"));
    match function {
        // Gains are constant.
        "norm_kernel" => assert!(other.is_empty(), "{name}: {other:?}"),
        // Starts and counts are constant; the cache is loaded asynchronously.
        "decode_run_kernel" | "decode_mma_kernel" => {
            assert!(constant.len() <= 2, "{name}: {constant:?}");
        }
        // Weights are loaded asynchronously.
        "small_m_kernel" => {
            assert!(
                constant.is_empty() && !other.is_empty(),
                "{name}: {constant:?}"
            );
        }
        // Codes, and the scale of a row.
        "fp8_linear_mma_kernel" => {
            assert!(constant.len() <= 1, "{name}: {constant:?}");
            assert!(
                other.iter().all(|line| line.contains(".NA")),
                "{name}: {other:?}"
            );
            assert!(!other.is_empty(), "{name}");
        }
        // Weights are loaded early, and gains, which are constant, may be.
        "small_m_norm_kernel" => {
            assert!(!other.is_empty(), "{name}");
            // Vectors of weights bypass L1, those of activations do not.
            let is_weight = |line: &&str| line.contains(".NA") || !line.contains(".128");
            assert!(other.iter().all(is_weight), "{name}: {other:?}");
        }
        _ => assert!(
            constant.is_empty() && other.is_empty(),
            "{name}: {constant:?} {other:?}"
        ),
    }
}

/// CubeCL generates the same source for a kernel each time, except for the numbers of its
/// variables: lock files rely on it.
#[test]
fn sources_are_reproducible() {
    let sources = || -> BTreeMap<String, u64> {
        (instances(Conversion::Hardware, "sm_100a").iter())
            .step_by(64)
            .map(|Instance { name, kernel, .. }| {
                (
                    name.clone(),
                    lock::hash(&sources::cuda_source(name, &**kernel)),
                )
            })
            .collect()
    };
    assert_eq!(sources(), sources());
}

macro_rules! targets {
    ($($name:ident $target:literal),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                check($target);
            }
        )*

        #[test]
        fn every_target_is_checked() {
            assert_eq!([$($target),*], TARGETS.map(|target| target.name));
        }
    };
}

targets! {
    sm_90a "sm_90a",
    sm_100a "sm_100a",
    sm_103a "sm_103a",
    sm_120a "sm_120a",
    sm_121a "sm_121a",
    sm_80 "sm_80",
    sm_86 "sm_86",
    sm_89 "sm_89",
    sm_90 "sm_90",
    sm_90a_emulated "sm_90a-emulated",
}

/// Compilation can fail: the block-scaled instruction exists only on sm_120a and sm_121a, `tcgen05`
/// on sm_100a and sm_103a, and the conversion of E4M3 from sm_89 on.
#[test]
fn instructions_are_refused_where_they_do_not_exist() {
    let tools = tools!("registry_source::instructions_are_refused_where_they_do_not_exist");
    let instances = instances(Conversion::Hardware, "sm_100a");
    let is_small_m = |instance: &Instance| matches!(instance.gemm, Some(GemmInstance::SmallM(_)));
    let has_instruction = |instance: &Instance| match instance.gemm {
        Some(GemmInstance::Sm120BlockScaled(plan)) => plan.tile.multiply == Multiply::Instruction,
        _ => false,
    };
    let has_tcgen05 = |instance: &Instance| match instance.gemm {
        Some(GemmInstance::Sm100BlockScaled(plan)) => plan.core == TensorCore::Instruction,
        _ => false,
    };
    for (Instance { name, kernel, .. }, refused) in [
        (
            instances.iter().find(|instance| has_instruction(instance)),
            &["sm_90a", "sm_100a"][..],
        ),
        (
            instances.iter().find(|instance| has_tcgen05(instance)),
            &["sm_90a", "sm_120a"][..],
        ),
        (
            instances.iter().find(|instance| is_small_m(instance)),
            &["sm_86"][..],
        ),
    ]
    .map(|(instance, refused)| (instance.unwrap(), refused))
    {
        let text = sources::cuda_source(name, &**kernel);
        for arch in refused {
            assert!(tools.compile(&text, arch).is_err(), "{name} for {arch}");
        }
    }
}

/// Compilation can fail: the stochastic conversion does not exist on sm_120a.
#[test]
fn stochastic_conversion_is_refused_where_it_does_not_exist() {
    let tools = tools!("registry_source::stochastic_conversion_is_refused_where_it_does_not_exist");
    let instances = instances(Conversion::Hardware, "sm_100a");
    let is_stochastic = |instance: &&Instance| {
        (instance.expected.e2m1_rn, instance.expected.e2m1_rs) == (Some(false), Some(true))
    };
    let Instance { name, kernel, .. } = instances.iter().find(is_stochastic).unwrap();
    let text = sources::cuda_source(name, &**kernel);
    assert!(tools.compile(&text, "sm_100a").is_ok());
    for arch in ["sm_90a", "sm_120a"] {
        assert!(tools.compile(&text, arch).is_err(), "{arch}");
    }
}

/// Returns the statements of a source in a canonical order, without the numbers in names: CubeCL
/// numbers variables differently each time, and the name of a function ends in a hash of its
/// arguments.
fn statements(source: &str) -> Vec<String> {
    let mut all: Vec<String> = source
        .lines()
        .map(|line| {
            let mut kept = String::new();
            let mut in_name = false;
            for c in line.chars() {
                // A digit or letter after a letter belongs to a name.
                in_name = c.is_alphabetic() || c == '_' || in_name && c.is_ascii_digit();
                if !(in_name && c.is_ascii_digit()) {
                    kept.push(c);
                }
            }
            match kept.split_once("sm_block_scaled_kernel_") {
                Some((before, rest)) => format!("{before}{}", rest.split_once('(').unwrap().1),
                None => kept,
            }
        })
        .collect();
    all.sort_unstable();
    all
}

/// A fault that a test injects into the `tcgen05` kernel changes its code, and no two faults give
/// the same code: all sources differ, except that of the swizzle, which is part of the tensor maps.
/// Only for NVFP4: in MXFP8 a wrong position of scales only changes the order of statements.
#[test]
fn injected_faults_are_in_the_source() {
    let instances = instances(Conversion::Hardware, "sm_100a");
    for form in [Sm100Form::OneCta, Sm100Form::TwoCta] {
        let source = |fault: Fault| {
            let plan = Sm100Plan {
                format: BlockScaled::Nvfp4,
                form,
                grouped: GroupedDim::None,
                core: TensorCore::Software(fault),
            };
            let is_it = |instance: &&Instance| {
                instance.gemm == Some(GemmInstance::Sm100BlockScaled(plan))
                    && instance.name.contains("-Bf16-false-")
            };
            let Instance { name, kernel, .. } = instances.iter().find(is_it).unwrap();
            statements(&sources::cuda_source(name, &**kernel))
        };
        let plain = source(Fault::None);
        assert_eq!(source(Fault::WrongSwizzle), plain);
        let mut all = BTreeSet::from([plain]);
        let of_pairs = match form.ctas() {
            1 => &[][..],
            _ => &Fault::OF_PAIRS[..],
        };
        let faults = || Fault::INJECTED.iter().chain(of_pairs);
        for fault in faults().filter(|fault| **fault != Fault::WrongSwizzle) {
            assert!(all.insert(source(*fault)), "{form}: {fault:?}");
        }
        assert_eq!(all.len(), faults().count(), "{form}");
    }
}

/// Returns all files with Rust source in `folder` and below.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the names of the functions after `#[cube(launch…)]`.
fn launched(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for attribute in text.split("#[cube(").skip(1) {
        // A long attribute has one line per argument.
        if !attribute.trim_start().starts_with("launch") {
            continue;
        }
        let (_, rest) = attribute.split_once("fn ").unwrap();
        let name = rest.split(['<', '(']).next().unwrap();
        names.push(name.trim().to_owned());
    }
    names
}

/// No kernel is missing: the registry has all kernels that the crate defines, by the names of their
/// types.
#[test]
fn the_registry_has_every_kernel() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let defined: BTreeSet<String> = (files(&source).into_iter())
        .flat_map(|path| launched(&fs::read_to_string(path).unwrap()))
        .collect();
    assert!(defined.len() > 40, "only {defined:?}");
    let mut registered = BTreeSet::new();
    for instance in instances(Conversion::Hardware, "sm_100a") {
        let function = instance.function().to_owned();
        assert!(instance.name.starts_with(&function), "{}", instance.name);
        registered.insert(function);
    }
    let forgotten: Vec<&String> = defined.difference(&registered).collect();
    assert!(forgotten.is_empty(), "not in the registry: {forgotten:?}");
    let gone: Vec<&String> = registered.difference(&defined).collect();
    assert!(gone.is_empty(), "no longer in the crate: {gone:?}");
}

/// Kernels cached across processes are looked up by a hash of their arguments, which may be equal
/// for two variants of an enum: a comptime argument must distinguish them.
#[test]
fn hashes_of_kernels_are_their_own() {
    let mut found: BTreeMap<StableHash, (KernelId, String)> = BTreeMap::new();
    let mut alike = Vec::new();
    for conversion in [Conversion::Hardware, Conversion::Sm89] {
        for Instance { name, kernel, .. } in instances(conversion, "sm_90a") {
            let id = kernel.id();
            match found.entry(id.stable_hash()) {
                Entry::Vacant(entry) => {
                    entry.insert((id, name));
                }
                Entry::Occupied(entry) => {
                    let (other, before) = entry.get();
                    if *other != id {
                        alike.push(format!("{before} and {name}"));
                    }
                }
            }
        }
    }
    assert!(found.len() > 100, "only {} kernels", found.len());
    assert!(alike.is_empty(), "one hash for {}", alike.join(", "));
}
