//! Stages of the `sm100_block_scaled` kernel: the layout of codes and block scales of both operands
//! in shared memory and tensor memory, and the operands of each instruction. Nothing here is
//! specific to CUDA: a test takes the operands from these functions.
//!
//! `a` and `b` are the operands of the instruction: those of the GEMM, possibly swapped
//! ([`Sm100Form::SwapAb`]). The formats differ in the columns per 128 bytes of codes, and in the
//! instructions per 128x4 tile of scales: a tile covers one instruction in NVFP4, and all four of a
//! stage in MXFP8, which use the bytes of a word one after another.
//!
//! In a pair of CTAs ([`Sm100Form::TwoCta`]) each has its own stages at the same addresses: its 128
//! rows of `a` with their scales, half of the rows of `b`, and the scales of all rows of `b`,
//! because its accumulators cover its rows of `a` and all of `b`. The operands of an instruction
//! are valid for both.

use cubecl::prelude::*;

use super::tile::{
    Fault, SM100_SWAP_AB_N, SM100_TILE_M, SM100_TILE_N, Sm100Form, Sm100Tile, TensorCore,
};
use crate::{
    cube::ptx::{
        BlockScaled, MmaOperands, SharedLayout, instruction_descriptor, tcgen05_descriptor,
        tcgen05_instruction_descriptor, with_scale_ids,
    },
    gemm::scheduler::GroupedDim,
};

/// Bytes of codes per row of a stage: the span of the swizzle.
const ROW: usize = 128;
/// Bytes of codes per row that an instruction reads.
const STEP: usize = 32;
/// Instructions per stage.
pub const STEPS: usize = ROW / STEP;
/// Bytes of a 128x4 tile of scales.
pub const ATOM: usize = 512;
/// Bytes of codes of `a` per stage.
pub const A_CODES: usize = SM100_TILE_M * ROW;
/// Tensor memory columns of a 128x4 tile of scales.
const ATOM_COLUMNS: usize = 4;

/// Comptime configuration of `sm100_block_scaled_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm100Plan {
    /// Format of both operands.
    pub format: BlockScaled,
    /// Mapping of a tile to instructions and CTAs.
    pub form: Sm100Form,
    /// Grouped dimension.
    pub grouped: GroupedDim,
    /// Executor of the instructions.
    pub core: TensorCore,
}

impl Sm100Plan {
    /// Returns the plan of `tile`.
    pub const fn new(tile: Sm100Tile, grouped: GroupedDim) -> Self {
        Self {
            format: tile.format,
            form: tile.form,
            grouped,
            core: tile.core,
        }
    }

    /// Returns the tile, without the seed.
    pub const fn tile(self) -> Sm100Tile {
        Sm100Tile {
            format: self.format,
            form: self.form,
            core: self.core,
            seed: 0,
        }
    }

    /// Returns the number of CTAs that share a tile.
    pub const fn ctas(self) -> usize {
        self.form.ctas()
    }

    /// Returns true if the instruction's `a` is the GEMM's `b`.
    pub const fn swaps_ab(self) -> bool {
        self.form.swaps_ab()
    }

    /// Returns the rows of the instruction's `b`: the columns of the accumulators.
    pub const fn b_rows(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => SM100_TILE_N,
            Sm100Form::SwapAb => SM100_SWAP_AB_N,
        }
    }

    /// Returns the rows of `b` whose codes a CTA holds.
    pub const fn b_rows_of_cta(self) -> usize {
        self.b_rows() / self.ctas()
    }

    /// Returns the number of stages: as many as fit into shared memory besides the command ring.
    pub const fn stages(self) -> usize {
        match self.form {
            Sm100Form::OneCta => 4,
            Sm100Form::TwoCta => 5,
            Sm100Form::SwapAb => 7,
        }
    }

    /// Returns the number of 128x4 tiles of scales of 128 rows per stage.
    pub const fn atoms(self) -> usize {
        self.format.tile_k() / self.format.atom_k()
    }

    /// Returns the maximum number of 128-row tiles of `b` that have scales.
    pub const fn b_tiles(self) -> usize {
        self.b_rows().div_ceil(128)
    }

    /// Returns the bytes of codes of `b` per stage.
    pub const fn b_codes(self) -> usize {
        self.b_rows_of_cta() * ROW
    }

    /// Returns the bytes of scales of `a` per stage.
    pub const fn a_scales(self) -> usize {
        self.atoms() * ATOM
    }

    /// Returns the bytes of scales of `b` per stage.
    pub const fn b_scales(self) -> usize {
        self.b_tiles() * self.a_scales()
    }

    /// Returns the bytes of a whole stage of a CTA.
    pub const fn stage_bytes(self) -> usize {
        A_CODES + self.b_codes() + self.a_scales() + self.b_scales()
    }

    /// Returns the offset of the codes of `b`, which follow those of `a` of all stages.
    pub const fn b_codes_at(self) -> usize {
        self.stages() * A_CODES
    }

    /// Returns the offset of the scales of `a`.
    pub const fn a_scales_at(self) -> usize {
        self.b_codes_at() + self.stages() * self.b_codes()
    }

    /// Returns the offset of the scales of `b`.
    pub const fn b_scales_at(self) -> usize {
        self.a_scales_at() + self.stages() * self.a_scales()
    }

    /// Returns the total bytes of all stages.
    pub const fn operands(self) -> usize {
        self.b_scales_at() + self.stages() * self.b_scales()
    }

    /// Returns the tensor memory columns of a stage's scales of `a`.
    const fn a_columns(self) -> usize {
        self.atoms() * ATOM_COLUMNS
    }

    /// Returns the tensor memory columns of a stage's scales of both operands.
    pub const fn scale_columns(self) -> usize {
        self.a_columns() * (1 + self.b_tiles())
    }

    /// Returns true if a group along K may begin within a 128x4 tile of scales, and so within a
    /// stage.
    pub const fn has_lead(self) -> bool {
        matches!(self.grouped, GroupedDim::K) && self.format.atom_k() > self.format.step_k()
    }

    /// Returns the index of the 128x4 tile of a stage with the scales of step `step`.
    const fn atom_of(self, step: usize) -> usize {
        step * self.format.step_k() / self.format.atom_k()
    }

    /// Returns the instruction descriptor of step `step` of a whole tile, or a wrong one for a
    /// fault. Elements outside the output are multiplied too, but their sums are not written.
    const fn idesc(self, step: usize) -> u32 {
        let (m, n) = (self.ctas() * SM100_TILE_M, self.b_rows());
        let right = instruction_descriptor(self.format, m as u32, n as u32);
        let idesc = match self.core.has_fault(Fault::WrongInstructionDescriptor) {
            true => right ^ 1 << 23,
            false => right,
        };
        let id = self.format.scale_id(step * self.format.step_k());
        match self.core.has_fault(Fault::WrongScaleId) {
            true => with_scale_ids(idesc, (id + 1) % 4),
            false => with_scale_ids(idesc, id),
        }
    }

    /// Returns the descriptor layout of codes, or a wrong one for a fault.
    const fn codes_layout(self) -> SharedLayout {
        match self.core.has_fault(Fault::WrongStride) {
            true => SharedLayout {
                stride: 512,
                ..SharedLayout::CODES
            },
            false => SharedLayout::CODES,
        }
    }

    /// Returns the tensor memory columns from the scales of one stage to those of the next.
    const fn stage_columns(self) -> u32 {
        match self.core.has_fault(Fault::SharedScaleColumns) {
            true => 0,
            false => self.scale_columns() as u32,
        }
    }

    /// Returns the column offset at which a fault reads the scales of `b`.
    const fn column_error(self) -> u32 {
        match self.core.has_fault(Fault::WrongScaleColumn) {
            true => 4,
            false => 0,
        }
    }
}

/// Returns the number of instructions of K tile `k_tile` of `k` columns: fewer than [`STEPS`] in
/// the last one. Scales end with the last instruction along K.
#[cube]
pub fn steps_of(k_tile: u32, k: u32, #[comptime] format: BlockScaled) -> u32 {
    let left = k.div_ceil(comptime!(format.step_k() as u32)) - k_tile * comptime!(STEPS as u32);
    min(left, comptime!(STEPS as u32))
}

/// Returns the number of 128x4 tiles of scales of K tile `k_tile` of `k` columns, for 128 rows.
#[cube]
pub fn atoms_of(k_tile: u32, k: u32, #[comptime] format: BlockScaled) -> u32 {
    let all = comptime!((format.tile_k() / format.atom_k()) as u32);
    if comptime!(all == 1) {
        1u32.runtime()
    } else {
        min(
            k.div_ceil(comptime!(format.atom_k() as u32)) - k_tile * all,
            all,
        )
    }
}

/// A CTA's share of a tile of the instruction's operands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct CtaShare {
    /// First of its 128 rows of `a`.
    pub a: u32,
    /// Index of their 128-row tile of scales within the tile.
    pub a_tile: u32,
    /// First of its rows of `b`.
    pub b: u32,
}

/// Returns the share of CTA `rank`: everything or, in a pair, 128 rows of `a` and half of `b`.
#[cube]
pub fn cta_share(rank: u32, #[comptime] plan: Sm100Plan) -> CtaShare {
    let rows = comptime!(plan.b_rows_of_cta() as u32);
    CtaShare {
        a: rank * comptime!(SM100_TILE_M as u32),
        a_tile: rank,
        b: if comptime!(plan.core.has_fault(Fault::WrongHalf)) {
            (1u32 - rank) * rows
        } else {
            rank * rows
        },
    }
}

/// Returns the index, within the tile, of the 128 rows of `b` whose scales CTA `rank` holds in part
/// `part` of a stage: all of them in order.
#[cube]
pub fn scales_of_part(rank: u32, #[comptime] part: usize, #[comptime] plan: Sm100Plan) -> u32 {
    if comptime!(plan.core.has_fault(Fault::HalfOfScales)) {
        rank
    } else {
        comptime!(part as u32).runtime()
    }
}

/// A stage and its position, relative to the base addresses of the CTA's shared and tensor memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct StageAt {
    /// Address of the stages in shared memory.
    pub operands: u32,
    /// Address of the accumulators in tensor memory; the scales follow them.
    pub tmem: u32,
    /// Stage index.
    pub stage: u32,
    /// K tile index.
    pub k_tile: u32,
    /// Steps of the first K tile that belong to the previous group.
    pub lead: u32,
    /// With swapped operands: rows of `b` to multiply, a multiple of 8.
    pub n: u32,
    /// With swapped operands: offset of the first row of `b` within the 128 rows of its scales, 0
    /// or 64.
    pub b_row: u32,
}

/// Operands of `tcgen05.cp`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct ScaleCopy {
    /// Address of four columns of tensor memory.
    pub target: u32,
    /// Descriptor of 512 bytes of scales in shared memory.
    pub source: u64,
}

/// Returns the address of a stage's scales in tensor memory: those of `a` for all steps, then those
/// of `b`.
#[cube]
fn scale_columns(at: StageAt, #[comptime] plan: Sm100Plan) -> u32 {
    at.tmem + comptime!(plan.b_rows() as u32) + at.stage * comptime!(plan.stage_columns())
}

/// Returns the copy of the 128x4 tile `atom` of scales: of the rows of `a` (part 0), or the first
/// or second 128 rows of `b` (part 1 or 2).
#[cube]
pub fn scale_copy(
    at: StageAt,
    #[comptime] atom: usize,
    #[comptime] part: usize,
    #[comptime] plan: Sm100Plan,
) -> ScaleCopy {
    let columns = scale_columns(at, plan);
    if comptime!(part == 0) {
        let from = at.operands
            + comptime!((plan.a_scales_at() + atom * ATOM) as u32)
            + at.stage * comptime!(plan.a_scales() as u32);
        ScaleCopy {
            target: columns + comptime!((atom * ATOM_COLUMNS) as u32),
            source: tcgen05_descriptor(from, SharedLayout::SCALES),
        }
    } else {
        let within = comptime!((part - 1) * plan.a_scales() + atom * ATOM);
        let from = at.operands
            + comptime!((plan.b_scales_at() + within) as u32)
            + at.stage * comptime!(plan.b_scales() as u32);
        let tile = comptime!(atom * plan.b_tiles() + part - 1);
        let first = comptime!(plan.a_columns() + tile * ATOM_COLUMNS);
        ScaleCopy {
            target: columns + comptime!(first as u32),
            source: tcgen05_descriptor(from, SharedLayout::SCALES),
        }
    }
}

/// Returns the operands of step `step` of a stage.
#[cube]
pub fn mma_operands(
    at: StageAt,
    #[comptime] step: usize,
    #[comptime] plan: Sm100Plan,
) -> MmaOperands {
    let columns = scale_columns(at, plan);
    let layout = comptime!(plan.codes_layout());
    let codes = at.operands + comptime!((step * STEP) as u32);
    let a = codes + at.stage * comptime!(A_CODES as u32);
    let b =
        codes + comptime!(plan.b_codes_at() as u32) + at.stage * comptime!(plan.b_codes() as u32);
    let atom = comptime!(plan.atom_of(step));
    let b_first = comptime!(plan.a_columns() + atom * plan.b_tiles() * ATOM_COLUMNS);
    let mut b_scales = columns + comptime!(b_first as u32 + plan.column_error());
    let mut idesc = comptime!(plan.idesc(step)).runtime();
    if comptime!(plan.swaps_ab()) {
        // One column of scales per 32 rows.
        b_scales += at.b_row / 32u32;
        idesc = tcgen05_instruction_descriptor(at.n, comptime!(plan.idesc(step)));
    }
    MmaOperands {
        d: at.tmem,
        a: tcgen05_descriptor(a, layout),
        b: tcgen05_descriptor(b, layout),
        idesc: u32::reinterpret(idesc),
        a_scales: columns + comptime!((atom * ATOM_COLUMNS) as u32),
        b_scales: u32::reinterpret(b_scales),
        accumulate: if comptime!(plan.has_lead()) {
            u32::cast_from(at.k_tile > 0u32 || comptime!(step as u32).runtime() > at.lead)
        } else if comptime!(step == 0) {
            u32::cast_from(at.k_tile > 0u32)
        } else {
            1u32.runtime()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Matches NVIDIA's NVFP4 kernel for tiles of the same shape (CUTLASS's
    /// `dense_blockscaled_gemm_persistent`, compiled for sm_100a, values read from its PTX): the
    /// instruction descriptor, the bytes that complete a full stage, and the tensor memory columns
    /// of a stage's scales. MXFP8 has as many bytes of codes and a quarter of the scales.
    #[test]
    fn stages_are_those_of_nvidia() {
        for (form, idesc, bytes, columns, stages) in [
            (Sm100Form::OneCta, 0x0840_0480, 55_296, (16, 32), 4),
            (Sm100Form::TwoCta, 0x1040_0480, 77_824, (16, 32), 5),
            (Sm100Form::SwapAb, 0x0810_0480, 28_672, (16, 16), 7),
        ] {
            let plan =
                |format| Sm100Plan::new(Sm100Tile::instruction(format, form), GroupedDim::None);
            let own = plan(BlockScaled::Nvfp4);
            assert_eq!(own.idesc(0), idesc, "{form}: {:#x}", own.idesc(0));
            assert_eq!(own.ctas() * own.stage_bytes(), bytes, "{form}");
            assert_eq!(own.a_columns(), columns.0, "{form}");
            assert_eq!(own.scale_columns(), columns.0 + columns.1, "{form}");
            assert_eq!(own.stages(), stages, "{form}");
            assert_eq!(own.operands(), stages * own.stage_bytes(), "{form}");
            let mxfp8 = plan(BlockScaled::Mxfp8);
            let scales = own.a_scales() + own.b_scales();
            assert_eq!(mxfp8.stage_bytes(), own.stage_bytes() - scales * 3 / 4);
            assert_eq!(4 * mxfp8.scale_columns(), own.scale_columns(), "{form}");
        }
    }

    /// Codes of both operands begin at multiples of 1024 bytes, as the swizzle requires.
    #[test]
    fn stages_are_aligned() {
        for format in BlockScaled::ALL {
            for form in Sm100Form::ALL {
                let tile = Sm100Tile::instruction(format, form);
                let plan = Sm100Plan::new(tile, GroupedDim::None);
                for bytes in [A_CODES, plan.b_codes(), plan.b_codes_at()] {
                    assert_eq!(bytes % 1024, 0, "{format:?}, {form}");
                }
                // TMA writes to multiples of 128 bytes.
                for bytes in [plan.a_scales_at(), plan.b_scales_at(), plan.a_scales()] {
                    assert_eq!(bytes % 128, 0, "{format:?}, {form}");
                }
            }
        }
    }
}
