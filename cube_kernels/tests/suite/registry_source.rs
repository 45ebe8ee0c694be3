//! The CUDA source of every kernel of the registry, compiled on a machine without a GPU; the
//! conversion instructions and spilled registers are looked for in the machine code.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use crate::gemm_source::{self, Resources};
use crate::support::{
    is_full,
    nvrtc::CudaTools,
    sources::{self, is_left_out, machine_code},
};
use cubecl::{hash::StableHash, prelude::KernelId};
use cubecl_server::runtime::Runtime;
use nvfp4_kernels::{
    cube::{codec::Conversion, ptx::BlockScaled},
    gemm::{
        GemmInstance,
        kernels::{Fault, GroupedDim, Multiply, Sm100Form, Sm100Plan, TensorCore},
    },
    graph::WAITING,
    registry::{self, DummyDevice, Expected, Instance},
};
use nvfp4_test_support::Skip;

/// `cvt.rn.satfinite.e2m1x2`, `cvt.rs.satfinite.e2m1x4` and `cvt.rn.satfinite.e4m3x2` in SASS.
const E2M1_RN: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C";
const E2M1_RS: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS";
const E4M3: &str = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C";

/// Which instances are compiled.
type IsChosen = fn(&Instance) -> bool;

/// Architectures that only `cargo xtask test --full` compiles for, with how they convert, and the
/// kernels that are compiled for them: all, or those with matrix instructions of every GPU.
const OTHER_ARCHITECTURES: [(&str, Conversion, IsChosen); 7] = [
    ("sm_80", Conversion::Sm80, is_portable),
    ("sm_86", Conversion::Sm80, is_portable),
    ("sm_89", Conversion::Sm89, is_portable),
    ("sm_90", Conversion::Sm89, is_portable),
    ("sm_103a", Conversion::Hardware, |_| true),
    ("sm_120a", Conversion::HardwareNearest, is_not_block_scaled),
    ("sm_121a", Conversion::HardwareNearest, is_block_scaled),
];

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

fn is_not_block_scaled(instance: &Instance) -> bool {
    !is_block_scaled(instance)
}

fn instances(conversion: Conversion, arch: &str) -> Vec<Instance> {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let target = cubecl::cuda::CudaRuntime::target_properties();
    let overlaps = !arch.starts_with("sm_8");
    registry::instances(&DummyDevice::new(client, target, conversion, overlaps))
}

/// `found` is what was expected, or nothing was.
fn assert_found(expected: Option<bool>, found: bool, what: &str) {
    if let Some(expected) = expected {
        assert_eq!(found, expected, "{what}");
    }
}

/// A mutable variable reaches an asm block as a pointer, which some instructions take silently: a
/// store of 32 bits from a register of 64, and an address in shared memory. What takes 64 bits
/// rightly is named here.
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

fn check_instance(tools: &CudaTools, instance: &Instance, arch: &str) {
    let name = &instance.name;
    let (text, shared) = sources::cuda_kernel(name, &*instance.kernel);
    if is_tcgen05(instance) {
        assert_no_pointers(name, &text);
    }
    let compiled = machine_code(tools, name, &text, arch);
    let Expected {
        e2m1_rn,
        e2m1_rs,
        e4m3,
        spills,
    } = instance.expected;
    let what = |which: &str| format!("{which} in {name} for {arch}");
    assert_found(spills, compiled.stack > 0, &what("spills"));
    // Disassembling takes as long as compiling: what the source does not mention is not there.
    let mentions = |expected: Option<bool>, names: &[&str]| {
        expected == Some(true) || expected.is_some() && names.iter().any(|name| text.contains(name))
    };
    let converts =
        mentions(e2m1_rn.or(e2m1_rs), &["e2m1", "fp4"]) || mentions(e4m3, &["e4m3", "fp8"]);
    if !converts && instance.gemm.is_none() {
        return;
    }
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
            shared,
        };
        gemm_source::check(name, gemm, takes, &sass, arch);
    }
}

/// Compiles the chosen kernels of a device with `conversion` for `arch`, on all cores.
fn check(test: &str, arch: &str, conversion: Conversion, is_chosen: IsChosen) {
    let tools = tools!(test);
    let mut instances = instances(conversion, arch);
    if !is_full() && ["sm_90a", "sm_100a"].contains(&arch) {
        keep_those_of_ci(&mut instances, arch);
    }
    instances.retain(|instance| {
        is_chosen(instance) && instance.architectures.contains(arch) && !is_left_out(&instance.name)
    });
    println!("{arch}: {} instances", instances.len());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(instance) = instances.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            check_instance(&tools, instance, arch);
            println!("{} {arch}: {:.1?}", instance.name, start.elapsed());
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
}

/// Those of `instances` that a run without `--full` compiles for `arch`, which is sm_90a or
/// sm_100a.
///
/// The first instance of each kernel is compiled for both, each other one that most launches take
/// for one of the two. Of the instances that differ from one of those in the type of elements or in
/// the width of addresses alone, every fourth one of each kernel is compiled, for one of the two.
/// Of the GEMMs, see [`gemm_source::is_in_ci`].
fn keep_those_of_ci(instances: &mut Vec<Instance>, arch: &str) {
    let archs = ["sm_90a", "sm_100a"];
    let names: BTreeSet<String> = (instances.iter())
        .map(|instance| instance.name.clone())
        .collect();
    let mut variants: BTreeMap<&'static str, usize> = BTreeMap::new();
    let mut usuals: BTreeMap<&'static str, usize> = BTreeMap::new();
    instances.retain(|instance| {
        let mut usual = instance.name.replace("-U64", "-U32");
        for kind in ["-F32-", "-F16-"] {
            usual = usual.replace(kind, "-Bf16-");
        }
        let is_variant = usual != instance.name && names.contains(&usual);
        match instance.gemm {
            Some(gemm) => gemm_source::is_in_ci(gemm),
            None if is_variant => {
                let count = variants.entry(instance.function()).or_default();
                *count += 1;
                (*count - 1).is_multiple_of(4) && arch == archs[(*count - 1) / 4 % 2]
            }
            None => {
                let count = usuals.entry(instance.function()).or_default();
                *count += 1;
                *count == 1 || arch == archs[*count % 2]
            }
        }
    });
}

/// No kernel that waits is left out where kernels are made to overlap.
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

/// What overlapping kernels load before they wait for those in front of them: by compilers that may
/// move loads, nothing but what the contract of `graph::overlap_kernels` names.
#[test]
fn overlapping_kernels_wait_before_they_read() {
    let tools = tools!("registry_source::overlapping_kernels_wait_before_they_read");
    let all = instances(Conversion::Sm89, "sm_90a");
    for function in WAITING {
        let mut count = 0;
        let of_function = all.iter().filter(|it| it.function() == function).take(3);
        for Instance { name, kernel, .. } in of_function {
            let (text, _) = sources::cuda_kernel(name, &**kernel);
            let compiled = machine_code(&tools, name, &text, "sm_90a");
            let sass = tools.disassemble(&compiled.code, &format!("{name}-overlap"));
            let wait = sass.find("ACQBULK");
            let wait = wait.unwrap_or_else(|| panic!("{name} does not wait"));
            assert!(sass.contains("PREEXIT"), "{name} lets no kernel begin");
            let before = sass[..wait].lines().filter(|line| line.contains("LDG."));
            let (constant, other): (Vec<_>, Vec<_>) =
                before.partition(|line| line.contains("CONSTANT"));
            match function {
                // Gains are constant.
                "norm_kernel" => assert!(other.is_empty(), "{name}: {other:?}"),
                // Starts and counts are; what is in the cache is on its way.
                "decode_run_kernel" | "decode_mma_kernel" => {
                    assert!(constant.len() <= 2, "{name}: {constant:?}");
                }
                // Weights are on their way.
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
                // Weights are, and gains, which are constant, may be.
                "small_m_norm_kernel" => {
                    assert!(!other.is_empty(), "{name}");
                    // Vectors of weights are not kept in L1, those of activations are.
                    let is_weight = |line: &&str| line.contains(".NA") || !line.contains(".128");
                    assert!(other.iter().all(is_weight), "{name}: {other:?}");
                }
                _ => assert!(
                    constant.is_empty() && other.is_empty(),
                    "{name}: {constant:?} {other:?}"
                ),
            }
            count += 1;
        }
        assert!(count > 0, "no {function}");
    }
}

#[test]
fn compiles_for_sm_90a() {
    let test = "registry_source::compiles_for_sm_90a";
    check(test, "sm_90a", Conversion::Sm89, |instance| {
        instance.gemm.is_none()
    });
}

#[test]
fn gemms_compile_for_sm_90a() {
    let test = "registry_source::gemms_compile_for_sm_90a";
    check(test, "sm_90a", Conversion::Sm89, |instance| {
        instance.gemm.is_some()
    });
}

/// Of the kernels for consumer Blackwell alone: no other architecture has their instruction.
#[test]
fn block_scaled_gemms_compile_for_sm_120a() {
    let test = "registry_source::block_scaled_gemms_compile_for_sm_120a";
    check(
        test,
        "sm_120a",
        Conversion::HardwareNearest,
        is_block_scaled,
    );
}

/// Of the kernel for `tcgen05` alone; that of sm_100a is among all kernels.
#[test]
fn tcgen05_gemms_compile_for_sm_103a() {
    let test = "registry_source::tcgen05_gemms_compile_for_sm_103a";
    check(test, "sm_103a", Conversion::Hardware, is_tcgen05);
}

#[test]
fn compiles_for_sm_100a() {
    let test = "registry_source::compiles_for_sm_100a";
    check(test, "sm_100a", Conversion::Hardware, |_| true);
}

/// With the instructions of Blackwell emulated its kernels compile for a Hopper: those that
/// convert, with one type of element.
#[test]
fn emulated_compiles_for_sm_90a() {
    let test = "registry_source::emulated_compiles_for_sm_90a";
    if !is_full() {
        Skip::OnlyFull.print(test, "");
        return;
    }
    check(test, "sm_90a", Conversion::Emulated, |instance| {
        instance.expected.converts() && instance.name.contains("Bf16-U32")
    });
}

/// The architectures that a run leaves out by default.
#[test]
fn other_architectures() {
    let test = "registry_source::other_architectures";
    if !is_full() {
        let count = instances(Conversion::Hardware, "sm_100a").len();
        let archs = OTHER_ARCHITECTURES.map(|(arch, ..)| arch).join(", ");
        Skip::OnlyFull.print(test, format_args!("{count} instances for {archs}"));
        return;
    }
    for (arch, conversion, is_chosen) in OTHER_ARCHITECTURES {
        check(test, arch, conversion, is_chosen);
    }
}

/// The compilation can fail: the block-scaled instruction exists on sm_120a and sm_121a alone,
/// `tcgen05` on sm_100a and sm_103a, and the conversion of E4M3 from sm_89 on.
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

/// The compilation can fail: the stochastic conversion does not exist for sm_120a.
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

/// The statements of a source in any order, without the numbers in names: CubeCL numbers variables
/// anew each time, and the name of a function ends in a hash of its arguments.
fn statements(source: &str) -> Vec<String> {
    let mut all: Vec<String> = source
        .lines()
        .map(|line| {
            let mut kept = String::new();
            let mut in_name = false;
            for c in line.chars() {
                // A digit or letter behind a letter belongs to a name.
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

/// A fault that a test injects into the kernel for `tcgen05` is in its code, and in no other's: the
/// sources are all different, but for the swizzle, which is one of the tensor maps. Of NVFP4 alone:
/// in MXFP8 a wrong place of scales only changes the order of statements.
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

/// All files with Rust source in `folder` and below.
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

/// Names of the functions behind `#[cube(launch…)]`.
fn launched(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for attribute in text.split("#[cube(").skip(1) {
        // A long attribute has a line for each of its arguments.
        if !attribute.trim_start().starts_with("launch") {
            continue;
        }
        let (_, rest) = attribute.split_once("fn ").unwrap();
        let name = rest.split(['<', '(']).next().unwrap();
        names.push(name.trim().to_owned());
    }
    names
}

/// A run without `--full` compiles each kernel for each architecture that it is for.
#[test]
fn a_run_without_full_compiles_every_kernel() {
    for arch in ["sm_90a", "sm_100a"] {
        let functions = |instances: &[Instance]| -> BTreeSet<&str> {
            (instances.iter())
                .filter(|instance| instance.architectures.contains(arch))
                .map(Instance::function)
                .collect()
        };
        let mut instances = instances(Conversion::Hardware, "sm_100a");
        let all = functions(&instances);
        keep_those_of_ci(&mut instances, arch);
        assert_eq!(functions(&instances), all, "{arch}");
    }
}

/// No kernel is forgotten: the registry has those that the crate defines, by the names of their
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

/// Kernels that are kept across processes are found by a hash of their arguments, in which two
/// variants of an enum may be equal: a comptime argument has to tell them apart.
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
