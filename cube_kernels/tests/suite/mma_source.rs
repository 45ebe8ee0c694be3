//! The CUDA source of the products with warp-level matrix instructions, and of the kernels that serve
//! products everywhere, compiled on a machine without a GPU, and their machine code read: the block-scaled
//! instructions of consumer Blackwell, one for each 16 x 8 x 64, the bf16 ones of the portable kernel, and
//! no memory traffic for spilled registers.

use std::sync::Arc;

use crate::support::nvrtc::CudaTools;
use crate::support::sources::{
    Fake, architectures, count, cuda_source, disassembled, is_full, spills,
};
use cubecl::{
    ir::{
        DeviceProperties, ElemType, FloatKind as CubeFloat, TargetProperties, features::MmaConfig,
    },
    prelude::*,
};
use cubecl_server::runtime::Runtime;
use nvfp4_kernels::{
    gemm::{
        OutputAmax,
        kernels::{
            CMMA_UNITS, CmmaPlan, CmmaTile, EpilogueKind, EpilogueLaunch, Factor, GroupedDim,
            GroupedProblemLaunch, MixedMatrixLaunch, Multiply, PackedMatrixLaunch, Pieces,
            ProblemShapeLaunch, ScalarPlan, Sm120Plan, Sm120Tile, SmallMLeft, SmallMShape,
            cmma_kernel, dequantize_unscaled_kernel, scalar_grouped_kernel, sm120_nvfp4_kernel,
            small_m_kernel, transpose_kernel,
        },
    },
    tensor::FloatKind,
};

/// `mma.sync.m16n8k64` with E2M1 operands and E4M3 scales for 16 elements, in SASS.
const BLOCK_SCALED: &str = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X";

/// Where kernels that are not Hopper's alone must compile: the architectures that the project names.
const NAMED: [&str; 4] = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"];

const PLAIN: EpilogueKind = EpilogueKind {
    a: Factor::Tensor,
    b: Factor::Tensor,
    bias: false,
    accumulate: false,
    out: FloatKind::Bf16,
    amax: None,
};

const ALL: EpilogueKind = EpilogueKind {
    a: Factor::PerRow,
    b: Factor::PerRow,
    bias: true,
    accumulate: true,
    out: FloatKind::F32,
    amax: Some(OutputAmax::Whole),
};

/// The device that kernels are asked of, and its kernels.
struct Kernels {
    fake: Fake,
    properties: Arc<DeviceProperties>,
    target: Arc<TargetProperties>,
}

impl Kernels {
    fn new() -> Self {
        let fake = Fake::new();
        let mut properties = fake.properties.clone();
        properties.features.matmul.cmma.insert(MmaConfig {
            a_type: ElemType::Float(CubeFloat::BF16),
            b_type: ElemType::Float(CubeFloat::BF16),
            cd_type: ElemType::Float(CubeFloat::F32),
            m: 16,
            n: 16,
            k: 16,
        });
        Self {
            fake,
            properties: Arc::new(properties),
            target: Arc::new(cubecl::cuda::CudaRuntime::target_properties()),
        }
    }

    fn buffer(&self, len: usize) -> BufferArg {
        self.fake.buffer(len)
    }

    fn problem(&self, groups: u32) -> GroupedProblemLaunch {
        let shape = ProblemShapeLaunch::new(64, 64, 64, groups);
        GroupedProblemLaunch::new(shape, self.buffer(groups as usize + 1), 8)
    }

    fn epilogue(&self, kind: EpilogueKind) -> EpilogueLaunch {
        EpilogueLaunch::new(
            self.buffer(64),
            self.buffer(64),
            self.buffer(64),
            self.buffer(1024),
            self.buffer(2),
            2688.0,
            2688.0,
            256.0,
            kind,
        )
    }

    fn sm120(
        &self,
        grouping: GroupedDim,
        shape: Sm120Tile,
        pieces: Pieces,
        kind: EpilogueKind,
    ) -> String {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            sm120_nvfp4_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U32,
                PackedMatrixLaunch::new(self.buffer(1024), self.buffer(512)),
                PackedMatrixLaunch::new(self.buffer(1024), self.buffer(512)),
                self.problem(1),
                self.epilogue(kind),
                self.buffer(256),
                Sm120Plan {
                    grouped: grouping,
                    tile: shape,
                    pieces,
                },
            )
        };
        cuda_source("sm120", &kernel)
    }

    fn matrix(
        &self,
        address: AddressType,
        width: usize,
        grouping: GroupedDim,
        shape: CmmaTile,
        packed: [bool; 2],
        kind: EpilogueKind,
    ) -> String {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            cmma_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(CMMA_UNITS as u32),
                address,
                width,
                MixedMatrixLaunch::new(self.buffer(512), self.buffer(512), self.buffer(512)),
                MixedMatrixLaunch::new(self.buffer(512), self.buffer(512), self.buffer(512)),
                self.problem(1),
                self.epilogue(kind),
                self.buffer(1024),
                CmmaPlan {
                    grouped: grouping,
                    tile: shape,
                    packed,
                    ordered_add: true,
                },
                kind.out.storage_type(),
            )
        };
        cuda_source("matrix", &kernel)
    }

    fn grouped(&self, grouping: GroupedDim, packed: [bool; 2], kind: EpilogueKind) -> String {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            scalar_grouped_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U64,
                MixedMatrixLaunch::new(self.buffer(512), self.buffer(512), self.buffer(512)),
                MixedMatrixLaunch::new(self.buffer(512), self.buffer(512), self.buffer(512)),
                self.problem(2),
                self.epilogue(kind),
                self.buffer(1024),
                ScalarPlan {
                    grouped: grouping,
                    packed,
                    ordered_add: true,
                },
                kind.out.storage_type(),
            )
        };
        cuda_source("grouped", &kernel)
    }

    fn decode(&self) -> String {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            dequantize_unscaled_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U32,
                self.buffer(2048),
                self.buffer(1024),
                self.buffer(2048),
                2048,
            )
        };
        cuda_source("decode", &kernel)
    }

    /// Reads `read` and writes `written` elements at a time.
    fn transpose(&self, read: usize, written: usize) -> String {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            transpose_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U32,
                read,
                written,
                self.buffer(1024),
                self.buffer(1024),
                128,
                64,
            )
        };
        cuda_source("transpose", &kernel)
    }

    fn few_rows(&self, kind: EpilogueKind, converts: bool) -> String {
        let shape = SmallMShape {
            warps: 8,
            strips: 2,
            columns: 2,
            ahead: 2,
            tail: true,
            halves: false,
            left: SmallMLeft::Packed,
            converts,
        };
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            small_m_kernel::create_dummy_kernel(
                self.properties.clone(),
                self.target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U32,
                MixedMatrixLaunch::new(self.buffer(512), self.buffer(512), self.buffer(512)),
                PackedMatrixLaunch::new(self.buffer(512), self.buffer(512)),
                ProblemShapeLaunch::new(8, 64, 256, 1),
                self.epilogue(kind),
                self.buffer(64),
                shape,
            )
        };
        cuda_source("few_rows", &kernel)
    }
}

/// The machine code of `text`, which must not spill.
fn compile(tools: &CudaTools, name: &str, text: &str, arch: &str) -> String {
    compile_with(tools, name, text, arch, 0)
}

/// The machine code of `text`, in which at most `most` instructions may keep registers in memory.
fn compile_with(tools: &CudaTools, name: &str, text: &str, arch: &str, most: usize) -> String {
    let sass = disassembled(tools, name, text, arch);
    let spilled = spills(&sass);
    assert!(spilled <= most, "{name} for {arch} spills {spilled}");
    println!(
        "{name} for {arch}: {} OMMA, {} HMMA, {} LDSM, {} LDGSTS, {spilled} LDL and STL, {} lines",
        count(&sass, "OMMA"),
        count(&sass, "HMMA"),
        count(&sass, "LDSM"),
        count(&sass, "LDGSTS"),
        sass.lines().count()
    );
    sass
}

#[test]
fn block_scaled_instructions() {
    let tools = tools!("block_scaled_instructions");
    let kernels = Kernels::new();
    for (strips, k, grouping, kind) in [
        (2, 128, GroupedDim::None, PLAIN),
        (1, 128, GroupedDim::None, PLAIN),
        (2, 64, GroupedDim::M, PLAIN),
        (2, 128, GroupedDim::None, ALL),
        (1, 16, GroupedDim::M, ALL),
        (2, 32, GroupedDim::None, ALL),
    ] {
        let multiply = Multiply::Instruction;
        let shape = Sm120Tile { strips, multiply };
        let name = format!("sm120-{strips}-{k}-{grouping:?}-{:?}", kind.out);
        let text = kernels.sm120(grouping, shape, Pieces::of(k), kind);
        // No other architecture has them: one of the two is compiled for in every run.
        let archs: &[&str] = match is_full() {
            true => &["sm_120a", "sm_121a"],
            false => &["sm_120a"],
        };
        for &arch in archs {
            let sass = compile(&tools, &name, &text, arch);
            // Two instructions along the contraction of a stage, for each strip and each of eight
            // columns; the compiler may have unrolled the loop over stages.
            let (found, stage) = (count(&sass, BLOCK_SCALED), 2 * strips * 8);
            let stages = found / stage;
            assert!(stages > 0 && found == stages * stage, "{name}: {found}");
            for (other, expected) in [("OMMA", found), ("HMMA", 0), ("QMMA", 0), ("IMMA", 0)] {
                assert_eq!(count(&sass, other), expected, "{name}: {other}");
            }
            // Fragments of two columns of `b`, and of one strip of `a`, by one load each.
            let loads = stages * 2 * (4 + strips);
            assert_eq!(count(&sass, "LDSM.16.M88.4"), loads, "{name}");
        }
        // No other architecture has it.
        for arch in ["sm_90a", "sm_100a"] {
            assert!(tools.compile(&text, arch).is_err(), "{name}: {arch}");
        }
        let multiply = Multiply::Software;
        let shape = Sm120Tile { strips, multiply };
        let text = kernels.sm120(grouping, shape, Pieces::of(k), kind);
        let sass = disassembled(&tools, &format!("{name}-software"), &text, "sm_90a");
        assert_eq!(count(&sass, "OMMA"), 0, "{name}");
    }
}

/// Few rows: the instructions of the kernel of Hopper all exist from sm_89 on, and on sm_80 all but the conversion
/// of scales.
#[test]
fn few_rows_on_other_devices() {
    let tools = tools!("few_rows_on_other_devices");
    let kernels = Kernels::new();
    for (kind, converts, targets) in [
        (PLAIN, true, &["sm_89", "sm_100a", "sm_103a", "sm_120a"][..]),
        (
            ALL,
            true,
            &["sm_90", "sm_100a", "sm_103a", "sm_120a", "sm_121a"],
        ),
        (PLAIN, false, &["sm_80"]),
        (ALL, false, &["sm_86"]),
    ] {
        let name = format!("few_rows-{:?}-{converts}", kind.out);
        let text = kernels.few_rows(kind, converts);
        for arch in architectures(targets) {
            let sass = compile(&tools, &name, &text, arch);
            // Eight for each strip, group of columns and chunk ahead.
            assert_eq!(count(&sass, "HMMA"), 8 * 2 * 2 * 2, "{name} for {arch}");
        }
        if converts {
            assert!(tools.compile(&text, "sm_86").is_err(), "{name}");
        }
    }
}

#[test]
fn portable_matrix_instructions() {
    let tools = tools!("portable_matrix_instructions");
    let kernels = Kernels::new();
    let out = |out, kind: EpilogueKind| EpilogueKind { out, ..kind };
    let (short, long) = (AddressType::U32, AddressType::U64);
    let all = EpilogueKind {
        amax: Some(OutputAmax::PerGroup),
        ..ALL
    };
    for (address, width, grouping, shape, packed, kind) in [
        (
            short,
            8,
            GroupedDim::None,
            CmmaTile::M128,
            [true, true],
            PLAIN,
        ),
        (
            long,
            8,
            GroupedDim::None,
            CmmaTile::M128,
            [true, true],
            PLAIN,
        ),
        (
            short,
            8,
            GroupedDim::None,
            CmmaTile::M128,
            [true, true],
            all,
        ),
        (
            short,
            8,
            GroupedDim::None,
            CmmaTile::M32,
            [false, true],
            out(FloatKind::F16, PLAIN),
        ),
        (
            short,
            1,
            GroupedDim::None,
            CmmaTile::M128,
            [false, false],
            PLAIN,
        ),
        (short, 8, GroupedDim::M, CmmaTile::M32, [true, true], all),
        (
            short,
            4,
            GroupedDim::M,
            CmmaTile::M128,
            [false, true],
            out(FloatKind::Bf16, all),
        ),
        (short, 8, GroupedDim::K, CmmaTile::M128, [true, true], all),
    ] {
        let name = format!(
            "matrix-{address:?}-{width}-{grouping:?}-{shape:?}-{packed:?}-{:?}-{}",
            kind.out, kind.accumulate
        );
        let text = kernels.matrix(address, width, grouping, shape, packed, kind);
        for arch in architectures(&[&["sm_80", "sm_89"][..], &NAMED].concat()) {
            // For matrices of more than 2^31 elements: one register, stored and loaded once.
            let most = match (address, arch) {
                (AddressType::U64, "sm_100a" | "sm_103a") => 2,
                _ => 0,
            };
            let sass = compile_with(&tools, &name, &text, arch, most);
            // A step of 16 takes two instructions for 16 x 16, and 32 columns are decoded at a time.
            let instructions = match shape {
                CmmaTile::M128 => 4 * 2,
                CmmaTile::M32 => 2,
            };
            let found = count(&sass, "HMMA.16816.F32.BF16");
            assert_eq!(found, 2 * 2 * instructions, "{name} for {arch}");
        }
    }
}

/// What prepares operands, and the product of one unit for an element, on every architecture.
#[test]
fn kernels_around_products() {
    let tools = tools!("kernels_around_products");
    let kernels = Kernels::new();
    let mut sources = vec![
        ("decode".to_owned(), kernels.decode()),
        ("transpose-8".to_owned(), kernels.transpose(8, 8)),
        ("transpose-1".to_owned(), kernels.transpose(1, 1)),
    ];
    let whole = EpilogueKind {
        amax: Some(OutputAmax::PerGroup),
        ..ALL
    };
    for (grouping, packed, kind) in [
        (GroupedDim::None, [true, false], ALL),
        (GroupedDim::M, [true, true], whole),
        (GroupedDim::K, [false, true], PLAIN),
    ] {
        sources.push((
            format!("grouped-{grouping:?}-{packed:?}"),
            kernels.grouped(grouping, packed, kind),
        ));
    }
    for (name, text) in sources {
        for arch in architectures(&NAMED) {
            let sass = compile(&tools, &name, &text, arch);
            assert_eq!(count(&sass, "HMMA"), 0, "{name} for {arch}");
            // Vectors of eight bf16 are stored whole.
            if matches!(name.as_str(), "decode" | "transpose-8") {
                assert!(count(&sass, "STG.E.128") > 0, "{name} for {arch}");
            }
        }
    }
}
