//! Choice, operands and launch of the [`sm100_block_scaled`](super) kernel.

use std::fmt;

use cubecl::{prelude::*, server::Handle};

use super::{
    commands::SoftwareTensorCoreLaunch,
    cta::{sm100_block_scaled_kernel, units},
    engine::{TMEM_WORDS, VIOLATIONS},
    operands::{ATOM, Sm100Plan},
    stage::{ScaleMapsLaunch, SwizzledScalesLaunch},
    tile::{Fault, SM100_SWAP_AB_N, SM100_TILE_M, SM100_TILE_N, Sm100Form, Sm100Tile, TensorCore},
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::GemmBackend,
    cube::ptx::BlockScaled,
    format::{padding::padded_bound, swizzle::row_group_tiles},
    gemm::{
        arguments::{GroupedProblemLaunch, ProblemShapeLaunch},
        epilogue::Factor,
        materialize::Materialized,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, UNALIGNED, sms},
        scheduler::GroupedDim,
    },
    memory::{address_type, allocate, download},
    zeroed::zeros,
};

/// Tiles along the rows of `a` that run at the same time, for L2 reuse. Not measured.
const BAND: u32 = 8;

/// The block-scaled GEMM of sm_100.
pub(crate) struct Sm100BlockScaled;

impl GemmKernel for Sm100BlockScaled {
    fn name(&self) -> &'static str {
        "sm100_block_scaled"
    }

    fn backend(&self, _device: &Device, _problem: &Problem) -> GemmBackend {
        GemmBackend::Sm100Tcgen05
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        let GemmShape { n, k, .. } = problem.shape;
        match device.capabilities.gemm {
            GemmBackend::Sm100Tcgen05 => {}
            GemmBackend::CublasLt if is_asked_for(problem) || is_default_for(problem) => {}
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
        if problem.block_scaled().is_none() {
            return Err(Refusal::Operands(
                "block-scaled instructions take packed operands of one format",
            ));
        }
        // Groups along K are aligned to multiples of an instruction.
        let is_k_bad = problem.grouped != GroupedDim::K && !k.is_multiple_of(32);
        if !n.is_multiple_of(8) || k == 0 || is_k_bad {
            return Err(Refusal::Operands(
                "n is no multiple of 8, or k is zero or no multiple of 32",
            ));
        }
        if !problem.aligned {
            return Err(Refusal::Operands(UNALIGNED));
        }
        checked_tile(device, problem)
            .map(|_| ())
            .map_err(Refusal::SelfCheck)
    }

    fn plan(&self, device: &Device, problem: &Problem) -> Candidate {
        // `supports` has passed; if a check failed since then, a warning was logged.
        let tile = checked_tile(device, problem).unwrap_or_else(|_| tile_of(device, problem));
        Tcgen05(tile).into()
    }

    fn takes_mxfp8(&self) -> bool {
        true
    }

    fn multiplies_codes_on(&self, compute_capability: Option<u32>) -> bool {
        compute_capability < Some(120)
    }
}

/// Plan: `tcgen05.mma` on codes and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tcgen05(pub Sm100Tile);

impl fmt::Display for Tcgen05 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tile = self.0;
        let by = match tile.core {
            TensorCore::Instruction => "tcgen05.mma",
            TensorCore::Software(_) => "tcgen05.mma in software",
        };
        let format = tile.format.suffix();
        let ctas = match tile.form {
            Sm100Form::TwoCta => " of two CTAs",
            Sm100Form::OneCta | Sm100Form::SwapAb => "",
        };
        let (m, n) = (tile.tile_m(), tile.tile_n());
        write!(f, "{by}{format}, {m} x {n} tiles{ctas}")
    }
}

impl GemmPlan for Tcgen05 {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &Sm100BlockScaled
    }

    fn reads(&self) -> StoredForm {
        StoredForm::Tiles
    }

    fn k_alignment(&self) -> usize {
        self.0.format.step_k()
    }

    fn reads_codes_directly(&self) -> bool {
        true
    }

    fn emulated_backend(&self) -> Option<GemmBackend> {
        (self.0.core != TensorCore::Instruction).then_some(GemmBackend::Sm100Tcgen05)
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        match takes(self.0, launch) {
            true => queue(launch, self.0),
            false => Err(launch.misfit(self)),
        }
    }
}

/// Returns true if `tile` supports the operands' format and groups.
fn takes(tile: Sm100Tile, launch: &Launch) -> bool {
    let layout = match tile.format {
        BlockScaled::Nvfp4 => OperandLayout::Packed,
        BlockScaled::Mxfp8 => OperandLayout::Mxfp8,
    };
    let is_swapped_k = tile.form.swaps_ab() && launch.groups.grouping == GroupedDim::K;
    [launch.a.layout, launch.b.layout] == [layout; 2] && !is_swapped_k
}

/// Returns the tile of a problem: swapped operands for up to 64 rows of `a`, on average over the
/// groups along M; two CTAs if the [model](is_of_two_ctas) recommends them. Not measured, because
/// no such GPU was available.
fn tile_of(device: &Device, problem: &Problem) -> Sm100Tile {
    let format = problem.block_scaled().unwrap_or(BlockScaled::Nvfp4);
    let of = |form| Sm100Tile::instruction(format, form);
    match problem.grouped {
        GroupedDim::K => of(Sm100Form::OneCta),
        _ if problem.shape.m <= SM100_SWAP_AB_N * problem.groups => of(Sm100Form::SwapAb),
        _ if is_of_two_ctas(device.sms, problem) => of(Sm100Form::TwoCta),
        _ => of(Sm100Form::OneCta),
    }
}

/// Returns true if two CTAs should share the tiles of the `tcgen05` kernel, for a dense GEMM or one
/// with groups along M. This is a model; no such GPU was available.
///
/// In a wave each SM multiplies at most 128 x 256 and applies the epilogue to them, either as a
/// whole tile or as half of one of 256 x 256. Each CTA of a pair loads half as much of `b`, 38,912
/// bytes per stage instead of 55,296, so a wave of pairs takes no longer. CTAs share tiles if that
/// takes no more waves and the odd CTA has rows: only an odd number of tiles along M leaves CTAs of
/// pairs idle. Groups are assumed to have the average number of rows.
fn is_of_two_ctas(sms: usize, problem: &Problem) -> bool {
    let GemmShape { m, n, .. } = problem.shape;
    let rows = m.div_ceil(problem.groups);
    let tiles = |tile_m| problem.groups * rows.div_ceil(tile_m) * n.div_ceil(SM100_TILE_N);
    let waves_of_pairs = tiles(2 * SM100_TILE_M).div_ceil((sms / 2).max(1));
    rows > SM100_TILE_M && waves_of_pairs <= tiles(SM100_TILE_M).div_ceil(sms)
}

/// Returns the tile of a problem whose self-check passes, if one is required. If the check of
/// another form fails, falls back to one CTA without swapped operands.
///
/// # Errors
/// Returns the result of the last failed check.
fn checked_tile(device: &Device, problem: &Problem) -> Result<Sm100Tile, String> {
    let tile = tile_of(device, problem);
    if device.capabilities.gemm == GemmBackend::Sm100Tcgen05 || is_asked_for(problem) {
        return Ok(tile);
    }
    let check = |tile| (device.tcgen05)(tile).map(|()| tile);
    check(tile).or_else(|error| match tile.form {
        Sm100Form::OneCta => Err(error),
        Sm100Form::TwoCta | Sm100Form::SwapAb => check(Sm100Tile {
            form: Sm100Form::OneCta,
            ..tile
        }),
    })
}

/// Returns true if the request names the kernel's backend.
fn is_asked_for(problem: &Problem) -> bool {
    problem.backend == Some(GemmBackend::Sm100Tcgen05)
}

/// Returns true if the kernel is used without being requested: cuBLASLt here supports neither
/// groups, per-row factors nor MXFP8, and the kernels that do dequantize to bf16.
fn is_default_for(problem: &Problem) -> bool {
    let factors = [problem.epilogue.a, problem.epilogue.b];
    problem.grouped != GroupedDim::None
        || factors.contains(&Factor::PerRow)
        || problem.block_scaled() == Some(BlockScaled::Mxfp8)
}

/// Returns the tensor map of the codes of `operand`, of `k` columns, in boxes of `rows` rows.
fn codes_map(
    operand: &Materialized,
    k: usize,
    rows: usize,
    tile: Sm100Tile,
) -> TensorMapArg<Tiled> {
    let bits = tile.format.format().code_bits();
    let words = k * bits / 32;
    // SAFETY: the caller checked that the memory holds these words of codes.
    let tensor = unsafe {
        TensorArg::from_raw_parts(
            operand.elements.clone(),
            [words, 1].into(),
            [operand.rows, words].into(),
        )
    };
    let swizzle = match tile.core.has_fault(Fault::WrongSwizzle) {
        true => TensorMapSwizzle::None,
        false => TensorMapSwizzle::B128,
    };
    TensorMapArg::new(
        TiledArgs {
            tile_size: [rows, tile.format.tile_k() * bits / 32].into(),
        },
        tensor,
        u32::elem_type_native(),
    )
    .with_swizzle(swizzle)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// Returns the tensor map of the block scales at `scales` for two CTAs: a row is one of `atoms`
/// 128x4 tiles, and a box has the tiles of a stage.
fn scales_map(scales: &Handle, atoms: usize, plan: Sm100Plan) -> TensorMapArg<Tiled> {
    let words = ATOM / 4;
    // SAFETY: the caller checked that the memory holds this many tiles.
    let tensor = unsafe {
        TensorArg::from_raw_parts(scales.clone(), [words, 1].into(), [atoms, words].into())
    };
    TensorMapArg::new(
        TiledArgs {
            tile_size: [plan.atoms(), words].into(),
        },
        tensor,
        u32::elem_type_native(),
    )
}

/// Queues the GEMM: `m` rows of `n`, dense or with groups along M, or as many for each group along
/// K.
///
/// # Errors
/// Returns an error if the software model finds a command that violates the PTX ISA.
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
    let plan = Sm100Plan::new(tile, groups.grouping);
    // Tiles of 128 rows of scales of both operands.
    let (whole_a, whole_b) = (m.div_ceil(128), n.div_ceil(128));
    let (m_tiles, n_tiles) = match groups.grouping {
        // Each group ends in a partial tile.
        GroupedDim::M => (row_group_tiles(m, groups.groups), whole_b * groups.groups),
        GroupedDim::K | GroupedDim::None => (whole_a, whole_b),
    };
    // Upper bound of the rows of tiles of the output.
    let tiles = match groups.grouping {
        GroupedDim::M => padded_bound(m, groups.groups, tile.tile_m()) / tile.tile_m(),
        GroupedDim::K => m.div_ceil(tile.tile_m()) * groups.groups,
        GroupedDim::None => m.div_ceil(tile.tile_m()),
    };
    // Rows of the factors of `b`.
    let b_rows = match groups.grouping {
        GroupedDim::K => groups.groups * n,
        GroupedDim::None | GroupedDim::M => b.rows,
    };
    let ctas = plan.ctas();
    let cubes = (tiles * n.div_ceil(tile.tile_n())).min((sms(client) / ctas).max(1)) * ctas;
    let memory = |handle: &Handle, len: usize| {
        // SAFETY: the caller checked the operands against their shapes, and that the memory
        // holds what `epilogue.kind` reads of it.
        unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
    };
    let atoms = |tiles: usize| tiles * k.div_ceil(tile.format.atom_k());
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
    // Operands of the instruction.
    let (first, second) = match tile.form.swaps_ab() {
        true => ((b, n_tiles), (a, m_tiles)),
        false => ((a, m_tiles), (b, n_tiles)),
    };
    let scales =
        |(operand, tiles): (&Materialized, usize)| memory(&operand.scales, atoms(tiles) * ATOM / 4);
    let map =
        |(operand, tiles): (&Materialized, usize)| scales_map(&operand.scales, atoms(tiles), plan);
    let maps: Option<ScaleMapsLaunch> =
        (ctas > 1).then(|| ScaleMapsLaunch::new(map(first), map(second)));
    // SAFETY: the kernel masks what it writes by rows and columns, clamps which scales it
    // reads, and reads codes through maps.
    unsafe {
        sm100_block_scaled_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(units(tile.core)),
            address_type(rows * n),
            codes_map(first.0, k, SM100_TILE_M, tile),
            codes_map(second.0, k, plan.b_rows_of_cta(), tile),
            SwizzledScalesLaunch::new(scales(first), scales(second), m_tiles as u32, maps.into()),
            GroupedProblemLaunch::new(
                ProblemShapeLaunch::of((m, n, k), groups.groups),
                memory(&groups.offsets, groups.groups + 1),
                BAND,
            ),
            epilogue.launch([rows, b_rows], groups.groups, (out, bytes / 4), 1.0),
            model,
            memory(out, bytes / 16),
            plan,
        );
    }
    match software {
        Some((_, violations)) => check_violations(&download(client, &violations, 4 * VIOLATIONS)?),
        None => Ok(()),
    }
}

/// # Errors
/// Returns an error if the software model counted a violation.
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
