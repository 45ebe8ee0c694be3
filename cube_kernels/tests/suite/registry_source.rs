//! The CUDA source of every kernel of the registry, compiled on a machine without a GPU; the conversion
//! instructions and spilled registers are looked for in the machine code.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::gemm_source;
use crate::support::{
    nvrtc::CudaTools,
    sources::{self, disassembled, is_full, is_left_out, spills},
};
use cubecl_server::runtime::Runtime;
use nvfp4_kernels::{
    cube::codec::Conversion,
    gemm::{GemmInstance, kernels::Multiply},
    registry::{self, DummyDevice, Expected, Instance},
};

/// `cvt.rn.satfinite.e2m1x2`, `cvt.rs.satfinite.e2m1x4` and `cvt.rn.satfinite.e4m3x2` in SASS.
const E2M1_RN: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C";
const E2M1_RS: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS";
const E4M3: &str = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C";

/// Architectures that only `cargo xtask test --full` compiles for, with how they convert, and the
/// kernels that are compiled for them: all, or those with matrix instructions of every GPU.
const OTHER_ARCHITECTURES: [(&str, Conversion, fn(&Instance) -> bool); 7] = [
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
    matches!(instance.gemm, Some(Cmma(..) | SmallM(_)))
}

fn is_block_scaled(instance: &Instance) -> bool {
    matches!(instance.gemm, Some(GemmInstance::Sm120Nvfp4(_)))
}

fn is_not_block_scaled(instance: &Instance) -> bool {
    !is_block_scaled(instance)
}

fn instances(conversion: Conversion) -> Vec<Instance> {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let target = cubecl::cuda::CudaRuntime::target_properties();
    registry::instances(&DummyDevice::new(client, target, conversion))
}

/// `found` is what was expected, or nothing was.
fn assert_found(expected: Option<bool>, found: bool, what: &str) {
    if let Some(expected) = expected {
        assert_eq!(found, expected, "{what}");
    }
}

fn check_instance(tools: &CudaTools, instance: &Instance, arch: &str) {
    let name = &instance.name;
    let text = sources::cuda_source(name, &*instance.kernel);
    let sass = disassembled(tools, name, &text, arch);
    let Expected {
        e2m1_rn,
        e2m1_rs,
        e4m3,
        spills: spilled,
    } = instance.expected;
    let nearest = |line: &str| line.contains(E2M1_RN) && !line.contains(E2M1_RS);
    let what = |which: &str| format!("{which} in {name} for {arch}");
    assert_found(
        e2m1_rn,
        sass.lines().any(nearest),
        &what("e2m1, to nearest"),
    );
    assert_found(e2m1_rs, sass.contains(E2M1_RS), &what("e2m1, stochastic"));
    assert_found(e4m3, sass.contains(E4M3), &what("e4m3"));
    assert_found(spilled, spills(&sass) > 0, &what("spills"));
    if let Some(gemm) = instance.gemm {
        gemm_source::check(name, gemm, &sass, arch);
    }
}

/// Compiles the chosen kernels of a device with `conversion` for `arch`.
fn check(test: &str, arch: &str, conversion: Conversion, is_chosen: fn(&Instance) -> bool) {
    let tools = tools!(test);
    let mut instances = instances(conversion);
    instances.retain(|instance| {
        is_chosen(instance) && instance.architectures.contains(arch) && !is_left_out(&instance.name)
    });
    println!("{arch}: {} instances", instances.len());
    for instance in &instances {
        check_instance(&tools, instance, arch);
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

#[test]
fn compiles_for_sm_100a() {
    let test = "registry_source::compiles_for_sm_100a";
    check(test, "sm_100a", Conversion::Hardware, |_| true);
}

/// With the instructions of Blackwell emulated its kernels compile for a Hopper: those that convert, with
/// one type of element.
#[test]
fn emulated_compiles_for_sm_90a() {
    let test = "registry_source::emulated_compiles_for_sm_90a";
    check(test, "sm_90a", Conversion::Emulated, |instance| {
        instance.expected.converts() && instance.name.contains("Bf16-U32")
    });
}

/// The architectures that a run leaves out by default.
#[test]
fn other_architectures() {
    let test = "registry_source::other_architectures";
    if !is_full() {
        let count = instances(Conversion::Hardware).len();
        let archs = OTHER_ARCHITECTURES.map(|(arch, ..)| arch).join(", ");
        println!("SKIPPED: {test}: {count} instances for {archs}: `cargo xtask test --full`");
        return;
    }
    for (arch, conversion, is_chosen) in OTHER_ARCHITECTURES {
        check(test, arch, conversion, is_chosen);
    }
}

/// The compilation can fail: the block-scaled instruction exists on sm_120a and sm_121a alone, and
/// the conversion of E4M3 from sm_89 on.
#[test]
fn instructions_are_refused_where_they_do_not_exist() {
    let tools = tools!("registry_source::instructions_are_refused_where_they_do_not_exist");
    for instance in instances(Conversion::Hardware) {
        let refused: &[&str] = match instance.gemm {
            Some(GemmInstance::Sm120Nvfp4(plan)) if plan.tile.multiply == Multiply::Instruction => {
                &["sm_90a", "sm_100a"]
            }
            Some(GemmInstance::SmallM(_)) => &["sm_86"],
            _ => continue,
        };
        let text = sources::cuda_source(&instance.name, &*instance.kernel);
        for arch in refused {
            let what = format!("{} for {arch}", instance.name);
            assert!(tools.compile(&text, arch).is_err(), "{what}");
        }
    }
}

/// The compilation can fail: the stochastic conversion does not exist for sm_120a.
#[test]
fn stochastic_conversion_is_refused_where_it_does_not_exist() {
    let tools = tools!("registry_source::stochastic_conversion_is_refused_where_it_does_not_exist");
    let instances = instances(Conversion::Hardware);
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
    for (start, _) in text.match_indices("#[cube(launch") {
        let (_, rest) = text[start..].split_once("fn ").unwrap();
        let name = rest.split(['<', '(']).next().unwrap();
        names.push(name.trim().to_owned());
    }
    names
}

/// No kernel is forgotten: the registry has those that the crate defines, by the names of their types.
#[test]
fn the_registry_has_every_kernel() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let defined: BTreeSet<String> = (files(&source).into_iter())
        .flat_map(|path| launched(&fs::read_to_string(path).unwrap()))
        .collect();
    assert!(defined.len() > 40, "only {defined:?}");
    let mut registered = BTreeSet::new();
    for instance in instances(Conversion::Hardware) {
        let function = instance.function().to_owned();
        assert!(instance.name.starts_with(&function), "{}", instance.name);
        registered.insert(function);
    }
    let forgotten: Vec<&String> = defined.difference(&registered).collect();
    assert!(forgotten.is_empty(), "not in the registry: {forgotten:?}");
    let gone: Vec<&String> = registered.difference(&defined).collect();
    assert!(gone.is_empty(), "no longer in the crate: {gone:?}");
}
