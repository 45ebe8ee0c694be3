//! Compares the descriptors of the `tcgen05` kernel, and the number of instructions per stage, with
//! those of CUTLASS's block-scaled kernel, which NVIDIA's compiler compiles without a GPU.
//! `NVFP4_CUTLASS_PTX` names the folder that `tests/cutlass/compile.py` fills.

use std::{env, fs, path::Path};

use nvfp4_kernels::{
    gemm::proof::{GroupedDim, Sm100Form, Sm100Plan, Sm100Tile},
    proof::ptx::{BlockScaled, SharedLayout, instruction_descriptor, with_scale_ids},
};

/// Asserts that the PTX of CUTLASS's kernel with the tiles of `plan` contains what ours does.
fn check(ptx: &str, plan: Sm100Plan) {
    let (kind, ctas) = (plan.format, plan.ctas());
    let (m, n) = (128 * ctas as u32, plan.b_rows() as u32);
    let what = format!("{kind:?}, {m} x {n}");
    let constants: Vec<&str> = ptx.split(|c: char| !c.is_ascii_digit()).collect();
    let ids = with_scale_ids(0, 3);
    let (a_ids, b_ids) = (ids & !0xff, ids & 0xff);
    for (name, constant) in [
        (
            "the instruction descriptor",
            instruction_descriptor(kind, m, n).into(),
        ),
        ("the places of scales of `a` in it", a_ids.into()),
        ("the places of scales of `b` in it", b_ids.into()),
        ("the descriptor of codes", SharedLayout::CODES.bits()),
        ("the descriptor of scales", SharedLayout::SCALES.bits()),
    ] {
        let found = constants.contains(&constant.to_string().as_str());
        assert!(found, "{what}: {name}, {constant:#x}");
    }
    let multiply = match kind {
        BlockScaled::Nvfp4 => "kind::mxf4nvf4.block_scale.block16",
        BlockScaled::Mxfp8 => "kind::mxf8f6f4.block_scale.block32",
    };
    let count = |instruction: &str| ptx.matches(instruction).count();
    let multiply = format!("tcgen05.mma.cta_group::{ctas}.{multiply}");
    assert_eq!(count(&multiply), 4, "{what}");
    let copies = plan.atoms() * (1 + plan.b_tiles());
    let copy = format!("tcgen05.cp.cta_group::{ctas}.32x128b.warpx4");
    assert_eq!(count(&copy), copies, "{what}");
    if ctas == 2 {
        // Bytes of both CTAs, and a commit that arrives in both.
        let bytes = ctas * plan.stage_bytes();
        assert!(
            constants.contains(&bytes.to_string().as_str()),
            "{what}: {bytes} bytes"
        );
        assert!(count("multicast::cluster.b64") > 0, "{what}");
    }
}

#[test]
#[ignore = "tests/cutlass/compile.py makes its input"]
fn descriptors_are_those_of_cutlass() {
    let folder = env::var_os("NVFP4_CUTLASS_PTX").expect("NVFP4_CUTLASS_PTX names a folder");
    for (kind, name) in [(BlockScaled::Nvfp4, "nvfp4"), (BlockScaled::Mxfp8, "mxfp8")] {
        for form in Sm100Form::ALL {
            let plan = Sm100Plan::new(Sm100Tile::instruction(kind, form), GroupedDim::None);
            let (m, n) = (128 * plan.ctas(), plan.b_rows());
            let file = Path::new(&folder).join(format!("{name}-{m}x{n}.ptx"));
            let ptx = fs::read_to_string(&file);
            let ptx = ptx.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            check(&ptx, plan);
        }
    }
}
