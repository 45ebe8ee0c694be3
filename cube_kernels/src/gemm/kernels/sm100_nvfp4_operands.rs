//! Stages of the `sm100_nvfp4` kernel: how codes and block
//! scales of both operands lie in shared memory and in tensor memory, and the operands of each
//! instruction. Nothing here is specific to CUDA: a test takes the operands from these functions.

use cubecl::prelude::*;

use super::sm100_nvfp4_commands::has_fault;
use crate::{
    cube::ptx::{
        BlockScaled, MmaOperands, SharedLayout, instruction_descriptor, tcgen05_descriptor,
    },
    gemm::tiles::{Fault, SM100_TILE_M, SM100_TILE_N, TensorCore},
};

/// Columns of both operands in a stage: the 128 bytes that the swizzle spans.
pub const TILE_K: usize = 256;
/// Columns of an instruction.
pub const STEP_K: usize = 64;
/// Instructions of a stage.
pub const STEPS: usize = TILE_K / STEP_K;
/// Stages of the ring.
pub const STAGES: usize = 4;
/// Bytes of codes of `a` in a stage.
pub const A_CODES: usize = SM100_TILE_M * TILE_K / 2;
/// Bytes of codes of `b` in a stage.
pub const B_CODES: usize = SM100_TILE_N * TILE_K / 2;
/// Bytes of the scales of 128 rows and 64 columns.
pub const ATOM: usize = 512;
/// Bytes of scales of `a` in a stage.
pub const A_SCALES: usize = STEPS * ATOM;
/// Bytes of scales of `b` in a stage.
pub const B_SCALES: usize = 2 * A_SCALES;
/// Where the codes of `b` begin, behind those of `a` of all stages.
pub const B_CODES_AT: usize = STAGES * A_CODES;
/// Where the scales of `a` begin.
pub const A_SCALES_AT: usize = B_CODES_AT + STAGES * B_CODES;
/// Where the scales of `b` begin.
pub const B_SCALES_AT: usize = A_SCALES_AT + STAGES * A_SCALES;
/// Bytes of all parts.
pub const OPERANDS: usize = B_SCALES_AT + STAGES * B_SCALES;

/// Columns of tensor memory of a step's scales of `a`.
pub const A_STEP_COLUMNS: usize = 4;
/// Columns of a step's scales of `b`.
pub const B_STEP_COLUMNS: usize = 8;
/// Columns of a stage's scales of both.
pub const SCALE_COLUMNS: usize = STEPS * (A_STEP_COLUMNS + B_STEP_COLUMNS);

/// The instruction descriptor of a whole tile. What lies outside of the output is multiplied too:
/// its sums are not written.
const IDESC: u32 =
    instruction_descriptor(BlockScaled::Nvfp4, SM100_TILE_M as u32, SM100_TILE_N as u32);

/// The descriptor of codes, or a wrong one.
const fn codes_layout(core: TensorCore) -> SharedLayout {
    match has_fault(core, Fault::WrongStride) {
        true => SharedLayout {
            stride: 512,
            ..SharedLayout::CODES
        },
        false => SharedLayout::CODES,
    }
}

/// The instruction descriptor, or a wrong one.
const fn idesc(core: TensorCore) -> u32 {
    match has_fault(core, Fault::WrongInstructionDescriptor) {
        true => IDESC | 1 << 23,
        false => IDESC,
    }
}

/// Columns of tensor memory between the scales of one stage and of the next.
const fn stage_columns(core: TensorCore) -> u32 {
    match has_fault(core, Fault::SharedScaleColumns) {
        true => 0,
        false => SCALE_COLUMNS as u32,
    }
}

/// How much further than they were copied to the scales of `b` are read.
const fn column_error(core: TensorCore) -> u32 {
    match has_fault(core, Fault::WrongScaleColumn) {
        true => 4,
        false => 0,
    }
}

/// Instructions of K tile `k_tile` of `k` columns: fewer than [`STEPS`] in the last one. Scales end
/// with the last instruction of the contraction.
#[cube]
pub fn steps_of(k_tile: u32, k: u32) -> u32 {
    let left = k.div_ceil(comptime!(STEP_K as u32)) - k_tile * comptime!(STEPS as u32);
    min(left, comptime!(STEPS as u32))
}

/// A stage, by where shared and tensor memory of the CTA begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct StageAt {
    /// The address of the stages in shared memory.
    pub operands: u32,
    /// The address of the accumulators in tensor memory; the scales are behind them.
    pub tmem: u32,
    /// Which stage.
    pub stage: u32,
}

/// The operands of `tcgen05.cp`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct ScaleCopy {
    /// Four columns of tensor memory.
    pub target: u32,
    /// The descriptor of 512 bytes of scales in shared memory.
    pub source: u64,
}

/// Where the scales of a stage begin in tensor memory: those of `a` for all steps, then those of
/// `b`.
#[cube]
fn scale_columns(at: StageAt, #[comptime] core: TensorCore) -> u32 {
    at.tmem + comptime!(SM100_TILE_N as u32) + at.stage * comptime!(stage_columns(core))
}

/// The copy of the scales of step `step`: of part 0, the rows of `a`, or part 1 or 2, the first or
/// second 128 rows of `b`.
#[cube]
pub fn scale_copy(
    at: StageAt,
    #[comptime] step: usize,
    #[comptime] part: usize,
    #[comptime] core: TensorCore,
) -> ScaleCopy {
    let columns = scale_columns(at, core);
    if comptime!(part == 0) {
        let from = at.operands
            + comptime!((A_SCALES_AT + step * ATOM) as u32)
            + at.stage * comptime!(A_SCALES as u32);
        ScaleCopy {
            target: columns + comptime!((step * A_STEP_COLUMNS) as u32),
            source: tcgen05_descriptor(from, SharedLayout::SCALES),
        }
    } else {
        let from = at.operands
            + comptime!((B_SCALES_AT + (part - 1) * A_SCALES + step * ATOM) as u32)
            + at.stage * comptime!(B_SCALES as u32);
        let first = comptime!(STEPS * A_STEP_COLUMNS + step * B_STEP_COLUMNS + (part - 1) * 4);
        ScaleCopy {
            target: columns + comptime!(first as u32),
            source: tcgen05_descriptor(from, SharedLayout::SCALES),
        }
    }
}

/// The operands of step `step`, which is in K tile `k_tile`.
#[cube]
pub fn mma_operands(
    at: StageAt,
    k_tile: u32,
    #[comptime] step: usize,
    #[comptime] core: TensorCore,
) -> MmaOperands {
    let columns = scale_columns(at, core);
    let layout = comptime!(codes_layout(core));
    // The codes of a step are 32 bytes of each row.
    let codes = at.operands + comptime!((step * STEP_K / 2) as u32);
    let a = codes + at.stage * comptime!(A_CODES as u32);
    let b = codes + comptime!(B_CODES_AT as u32) + at.stage * comptime!(B_CODES as u32);
    let b_first = comptime!(STEPS * A_STEP_COLUMNS + step * B_STEP_COLUMNS);
    MmaOperands {
        d: at.tmem,
        a: tcgen05_descriptor(a, layout),
        b: tcgen05_descriptor(b, layout),
        idesc: comptime!(idesc(core)).runtime(),
        a_scales: columns + comptime!((step * A_STEP_COLUMNS) as u32),
        b_scales: columns + comptime!(b_first as u32 + column_error(core)),
        accumulate: if comptime!(step == 0) {
            u32::cast_from(k_tile > 0u32)
        } else {
            1u32.runtime()
        },
    }
}
