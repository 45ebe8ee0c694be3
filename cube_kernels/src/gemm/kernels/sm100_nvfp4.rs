//! The NVFP4 GEMM of data-center Blackwell (sm_100, sm_103): `tcgen05.mma` on codes and block
//! scales as they are stored, `kind::mxf4nvf4` with an E4M3 scale for each 16 elements.
//!
//! A CTA has six warps. Four apply the epilogue, a lane of tensor memory for each of their threads;
//! one thread of the fifth issues the instructions, one of the sixth lets TMA fill a ring of
//! stages. A stage has 256 columns of 128 rows of `a` and 256 of `b`, with their scales in 128x4
//! tiles, 512 bytes for each 128 rows and 64 columns.
//!
//! | barrier | arrivals of a phase | completes when |
//! |---|---|---|
//! | full, for each stage | TMA's thread, and the bytes | the stage has arrived |
//! | empty, for each stage | `tcgen05.commit` | its instructions have completed |
//! | accumulators full | `tcgen05.commit` | the tile has been multiplied |
//! | accumulators empty | 128 | the epilogue has read them |
//!
//! Each stage has its own columns of tensor memory for scales: the PTX ISA orders `tcgen05.cp`
//! before a later `tcgen05.mma`, but not behind an earlier one.
//!
//! Rows of a tile that belong to another group are multiplied and not written, so that one tensor
//! map serves all groups. Scales start anew at each group.
//!
//! Groups along K begin at multiples of 64 columns, so that the scales of all groups are one matrix
//! of tiles. The last stage of a group may hold columns of the next group, which no instruction
//! multiplies. The epilogue writes zeros for an empty group, which has no stage.
//!
//! This kernel has never run with the instructions: no such GPU was at hand. Its machine code was
//! inspected; with [`TensorCore::Software`] the same kernel runs on Hopper, with the bits of the
//! scalar one.

use cubecl::{prelude::*, server::Handle};

use super::{
    sm100_nvfp4_commands::{SoftwareTensorCoreLaunch, has_fault},
    sm100_nvfp4_cta::{sm100_nvfp4_kernel, units},
    sm100_nvfp4_engine::{TMEM_WORDS, VIOLATIONS},
    sm100_nvfp4_operands::{ATOM, STEP_K, TILE_K},
    sm100_nvfp4_stage::{Sm100Plan, SwizzledScalesLaunch},
};
use crate::{
    Nvfp4Error,
    capabilities::GemmBackend,
    format::swizzle::row_group_tiles,
    gemm::{
        arguments::{GroupedProblemLaunch, ProblemShapeLaunch},
        epilogue::Factor,
        materialize::{Materialized, PackedReads, Reads},
        problem::{
            Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, UNALIGNED,
            misfit, sms,
        },
        scheduler::GroupedDim,
        tiles::{Fault, SM100_TILE_M, SM100_TILE_N, Sm100Tile, TensorCore},
    },
    memory::{address_type, allocate, download},
    zeroed::zeros,
};

/// Tiles along the rows of `a` that run at the same time, for the L2 cache. Not measured.
const BAND: u32 = 8;

/// The NVFP4 GEMM of sm_100.
pub(crate) struct Sm100Nvfp4;

impl Kernel for Sm100Nvfp4 {
    fn name(&self) -> &'static str {
        "sm100_nvfp4"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm100Tcgen05
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        let GemmShape { n, k, .. } = problem.shape;
        let asked = problem.backend == Some(GemmBackend::Sm100Tcgen05);
        let mut checks = false;
        match device.capabilities.gemm {
            GemmBackend::Sm100Tcgen05 => {}
            GemmBackend::CublasLt if asked => {}
            GemmBackend::CublasLt if is_default_for(problem) => checks = true,
            GemmBackend::CublasLt => {
                return Err(Refusal::Device(
                    "it has never run on hardware, and NVFP4_GEMM=tcgen05 does not ask for it",
                ));
            }
            _ => {
                return Err(Refusal::Device(
                    "the device is not of compute capability 10.0 or 10.3",
                ));
            }
        }
        if problem.is_packed() != [true; 2] {
            return Err(Refusal::Operands(
                "block-scaled instructions take packed operands",
            ));
        }
        // Groups along K are brought to multiples of 64.
        let is_k_bad = problem.grouped != GroupedDim::K && !k.is_multiple_of(32);
        if !n.is_multiple_of(8) || k == 0 || is_k_bad {
            return Err(Refusal::Operands(
                "n is no multiple of 8, or k is zero or no multiple of 32",
            ));
        }
        if !problem.aligned {
            return Err(Refusal::Operands(UNALIGNED));
        }
        match checks {
            true => (device.tcgen05)().map_err(Refusal::SelfCheck),
            false => Ok(()),
        }
    }

    fn plan(&self, _device: &Device, _problem: &Problem) -> Candidate {
        Plan::Tcgen05(Sm100Tile::INSTRUCTION).into()
    }

    fn reads(&self, _plan: Plan) -> Reads {
        Reads {
            packed: PackedReads::Swizzled,
            mn_major: false,
        }
    }

    fn k_alignment(&self) -> usize {
        STEP_K
    }

    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error> {
        match plan {
            Plan::Tcgen05(tile) if launch.a.is_packed() && launch.b.is_packed() => {
                queue(launch, tile)
            }
            plan => Err(misfit(plan, launch)),
        }
    }
}

/// Whether the kernel need not be asked for: cuBLASLt takes neither groups nor per-row factors
/// here, and the portable kernel dequantizes to bf16.
fn is_default_for(problem: &Problem) -> bool {
    let factors = [problem.epilogue.a, problem.epilogue.b];
    problem.grouped != GroupedDim::None || factors.contains(&Factor::PerRow)
}

/// How TMA reads the codes of `operand`, of `k` columns, in boxes of `rows` rows.
fn codes_map(
    operand: &Materialized,
    k: usize,
    rows: usize,
    tile: Sm100Tile,
) -> TensorMapArg<Tiled> {
    // SAFETY: the caller checked that the memory holds these words of eight codes.
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            operand.codes.clone(),
            [k / 8, 1].into(),
            [operand.rows, k / 8].into(),
        )
    };
    let swizzle = match has_fault(tile.core, Fault::WrongSwizzle) {
        true => TensorMapSwizzle::None,
        false => TensorMapSwizzle::B128,
    };
    TensorMapArg::new(
        TiledArgs {
            tile_size: [rows, TILE_K / 8].into(),
        },
        tensor,
        u32::elem_type_native(),
    )
    .with_swizzle(swizzle)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// Queues the GEMM: `m` rows of `n`, dense or with groups along M, or as many for each group along
/// K.
///
/// # Errors
/// In software, when a command is not what the PTX ISA asks for.
fn queue(launch: &Launch, tile: Sm100Tile) -> Result<(), Nvfp4Error> {
    let Launch {
        client,
        a,
        b,
        groups,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let (out, rows) = (&output.matrix().handle, output.matrix().rows);
    let (whole_a, whole_b) = (m.div_ceil(SM100_TILE_M), n.div_ceil(SM100_TILE_M));
    // Tiles of scales of both operands, and rows of tiles of the output.
    let (a_tiles, b_tiles, tiles) = match groups.grouping {
        // Each group ends in a tile of its own.
        GroupedDim::M => {
            let a_tiles = row_group_tiles(m, groups.groups);
            (a_tiles, whole_b * groups.groups, a_tiles)
        }
        GroupedDim::K => (whole_a, whole_b, whole_a * groups.groups),
        GroupedDim::None => (whole_a, whole_b, whole_a),
    };
    // Rows of the factors of `b`.
    let b_rows = match groups.grouping {
        GroupedDim::K => groups.groups * n,
        GroupedDim::None | GroupedDim::M => b.rows,
    };
    let cubes = (tiles * n.div_ceil(SM100_TILE_N)).min(sms(client));
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked the operands against their shapes, and that the memory
        // holds what `epilogue.kind` reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let words = |tiles: usize| tiles * k.div_ceil(STEP_K) * ATOM / 4;
    let bytes = rows * n * epilogue.kind.out.size();
    let software = match tile.core {
        TensorCore::Instruction => None,
        TensorCore::Software(_) => {
            let tmem = allocate(client, 4 * cubes * TMEM_WORDS);
            Some((tmem, zeros(client, VIOLATIONS)))
        }
    };
    let model = match &software {
        Some((tmem, violations)) => SoftwareTensorCoreLaunch::new(
            memory(tmem, cubes * TMEM_WORDS),
            memory(violations, VIOLATIONS),
            tile.seed,
        ),
        // Neither read nor written.
        None => {
            let any = allocate(client, 16);
            SoftwareTensorCoreLaunch::new(memory(&any, 1), memory(&any, 1), 0)
        }
    };
    // SAFETY: the kernel masks what it writes by rows and columns, clamps which scales it
    // reads, and reads codes through maps.
    unsafe {
        sm100_nvfp4_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(units(tile.core)),
            address_type(rows * n),
            codes_map(a, k, SM100_TILE_M, tile),
            codes_map(b, k, SM100_TILE_N, tile),
            SwizzledScalesLaunch::new(
                memory(&a.scales, words(a_tiles)),
                memory(&b.scales, words(b_tiles)),
                a_tiles as u32,
            ),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                BAND,
            ),
            epilogue.launch([rows, b_rows], groups.groups, (out, bytes / 4), 1.0),
            model,
            memory(out, bytes / 16),
            Sm100Plan {
                grouped: groups.grouping,
                core: tile.core,
            },
        );
    }
    match software {
        Some((_, violations)) => check_violations(&download(client, &violations, 4 * VIOLATIONS)?),
        None => Ok(()),
    }
}

/// # Errors
/// When the software model counted a violation.
fn check_violations(bytes: &[u8]) -> Result<(), Nvfp4Error> {
    let names = [
        "shared-memory descriptors",
        "instruction descriptors",
        "tensor-memory addresses",
        "shared-memory addresses",
    ];
    let counts = bytes
        .chunks_exact(4)
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    let found: Vec<String> = names
        .into_iter()
        .zip(counts)
        .filter(|(_, count)| *count > 0)
        .map(|(name, count)| format!("{count} wrong {name}"))
        .collect();
    match found.is_empty() {
        true => Ok(()),
        false => Err(Nvfp4Error::Launch(format!(
            "the software model of tcgen05 found {}",
            found.join(", ")
        ))),
    }
}
