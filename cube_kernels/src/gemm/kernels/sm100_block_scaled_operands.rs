//! Stages of the `sm100_block_scaled` kernel: how codes and block scales of both operands lie in
//! shared memory and in tensor memory, and the operands of each instruction. Nothing here is
//! specific to CUDA: a test takes the operands from these functions.
//!
//! `a` and `b` are the operands of the instruction: those of the GEMM, or these exchanged
//! ([`Sm100Form::SwapAb`]). Formats differ in how many columns 128 bytes of codes have, and in how
//! many of them a 128x4 tile of scales holds: in NVFP4 those of one instruction, in MXFP8 those of
//! all four of a stage, which take the bytes of a word one after another.
//!
//! Of two CTAs ([`Sm100Form::TwoCta`]) each has its own stages at the same addresses: its 128 rows
//! of `a` with their scales, half of the rows of `b`, and the scales of all rows of `b`, because
//! its accumulators are those of its rows of `a` and of all of `b`. The operands of an instruction
//! are valid for both.

use cubecl::prelude::*;

use crate::{
    cube::ptx::{
        BlockScaled, MmaOperands, SharedLayout, instruction_descriptor, tcgen05_descriptor,
        tcgen05_instruction_descriptor, with_scale_ids,
    },
    gemm::{
        scheduler::GroupedDim,
        tiles::{
            Fault, SM100_SWAP_AB_N, SM100_TILE_M, SM100_TILE_N, Sm100Form, Sm100Tile, TensorCore,
        },
    },
};

/// Bytes of a row of codes in a stage: what the swizzle spans.
const ROW: usize = 128;
/// Bytes of a row of codes that an instruction reads.
const STEP: usize = 32;
/// Instructions of a stage.
pub const STEPS: usize = ROW / STEP;
/// Bytes of a 128x4 tile of scales.
pub const ATOM: usize = 512;
/// Bytes of codes of `a` in a stage.
pub const A_CODES: usize = SM100_TILE_M * ROW;
/// Columns of tensor memory of a 128x4 tile of scales.
const ATOM_COLUMNS: usize = 4;

/// The comptime choices of `sm100_block_scaled_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm100Plan {
    /// The format of both operands.
    pub format: BlockScaled,
    /// How a tile is shared out.
    pub form: Sm100Form,
    /// What is in groups.
    pub grouped: GroupedDim,
    /// Who multiplies.
    pub core: TensorCore,
}

impl Sm100Plan {
    /// Of `tile`.
    pub const fn new(tile: Sm100Tile, grouped: GroupedDim) -> Self {
        Self {
            format: tile.format,
            form: tile.form,
            grouped,
            core: tile.core,
        }
    }

    /// Without the seed.
    pub const fn tile(self) -> Sm100Tile {
        Sm100Tile {
            format: self.format,
            form: self.form,
            core: self.core,
            seed: 0,
        }
    }

    /// CTAs that share a tile.
    pub const fn ctas(self) -> usize {
        self.form.ctas()
    }

    /// Whether the instruction's `a` is the GEMM's `b`.
    pub const fn swaps_ab(self) -> bool {
        self.form.swaps_ab()
    }

    /// Rows of the instruction's `b`: the columns of the accumulators.
    pub const fn b_rows(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => SM100_TILE_N,
            Sm100Form::SwapAb => SM100_SWAP_AB_N,
        }
    }

    /// Those of them that a CTA has the codes of.
    pub const fn b_rows_of_cta(self) -> usize {
        self.b_rows() / self.ctas()
    }

    /// Stages of the ring: as many as shared memory holds beside the ring of commands.
    pub const fn stages(self) -> usize {
        match self.form {
            Sm100Form::OneCta => 4,
            Sm100Form::TwoCta => 5,
            Sm100Form::SwapAb => 7,
        }
    }

    /// 128x4 tiles of scales of 128 rows in a stage.
    pub const fn atoms(self) -> usize {
        self.format.tile_k() / self.format.atom_k()
    }

    /// How many times 128 rows of `b` there are scales of, at most.
    pub const fn b_tiles(self) -> usize {
        self.b_rows().div_ceil(128)
    }

    /// Bytes of codes of `b` in a stage.
    pub const fn b_codes(self) -> usize {
        self.b_rows_of_cta() * ROW
    }

    /// Bytes of scales of `a` in a stage.
    pub const fn a_scales(self) -> usize {
        self.atoms() * ATOM
    }

    /// Bytes of scales of `b` in a stage.
    pub const fn b_scales(self) -> usize {
        self.b_tiles() * self.a_scales()
    }

    /// Bytes of a whole stage of a CTA.
    pub const fn stage_bytes(self) -> usize {
        A_CODES + self.b_codes() + self.a_scales() + self.b_scales()
    }

    /// Where the codes of `b` begin, behind those of `a` of all stages.
    pub const fn b_codes_at(self) -> usize {
        self.stages() * A_CODES
    }

    /// Where the scales of `a` begin.
    pub const fn a_scales_at(self) -> usize {
        self.b_codes_at() + self.stages() * self.b_codes()
    }

    /// Where the scales of `b` begin.
    pub const fn b_scales_at(self) -> usize {
        self.a_scales_at() + self.stages() * self.a_scales()
    }

    /// Bytes of all parts.
    pub const fn operands(self) -> usize {
        self.b_scales_at() + self.stages() * self.b_scales()
    }

    /// Columns of tensor memory of a stage's scales of `a`.
    const fn a_columns(self) -> usize {
        self.atoms() * ATOM_COLUMNS
    }

    /// Columns of tensor memory of a stage's scales of both.
    pub const fn scale_columns(self) -> usize {
        self.a_columns() * (1 + self.b_tiles())
    }

    /// Whether a group along K may begin within a 128x4 tile of scales, and so within a stage.
    pub const fn has_lead(self) -> bool {
        matches!(self.grouped, GroupedDim::K) && self.format.atom_k() > self.format.step_k()
    }

    /// The 128x4 tile of a stage that has the scales of step `step`.
    const fn atom_of(self, step: usize) -> usize {
        step * self.format.step_k() / self.format.atom_k()
    }

    /// The instruction descriptor of step `step` of a whole tile, or a wrong one. What lies outside
    /// of the output is multiplied too: its sums are not written.
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

    /// The descriptor of codes, or a wrong one.
    const fn codes_layout(self) -> SharedLayout {
        match self.core.has_fault(Fault::WrongStride) {
            true => SharedLayout {
                stride: 512,
                ..SharedLayout::CODES
            },
            false => SharedLayout::CODES,
        }
    }

    /// Columns of tensor memory between the scales of one stage and of the next.
    const fn stage_columns(self) -> u32 {
        match self.core.has_fault(Fault::SharedScaleColumns) {
            true => 0,
            false => self.scale_columns() as u32,
        }
    }

    /// How much further than they were copied to the scales of `b` are read.
    const fn column_error(self) -> u32 {
        match self.core.has_fault(Fault::WrongScaleColumn) {
            true => 4,
            false => 0,
        }
    }
}

/// Instructions of K tile `k_tile` of `k` columns: fewer than [`STEPS`] in the last one. Scales end
/// with the last instruction of the contraction.
#[cube]
pub fn steps_of(k_tile: u32, k: u32, #[comptime] format: BlockScaled) -> u32 {
    let left = k.div_ceil(comptime!(format.step_k() as u32)) - k_tile * comptime!(STEPS as u32);
    min(left, comptime!(STEPS as u32))
}

/// 128x4 tiles of scales of K tile `k_tile` of `k` columns, for 128 rows.
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

/// What a CTA has of a tile of the instruction's operands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct CtaShare {
    /// The first of its 128 rows of `a`.
    pub a: u32,
    /// Their 128x4 tiles of scales, among those of the tile.
    pub a_tile: u32,
    /// The first of its rows of `b`.
    pub b: u32,
}

/// What CTA `rank` has of the tile: everything, or of two CTAs 128 rows of `a` and half of `b`.
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

/// Which 128 rows of `b`, of those of the tile, CTA `rank` has scales of in part `part` of a stage:
/// all of them one after another.
#[cube]
pub fn scales_of_part(rank: u32, #[comptime] part: usize, #[comptime] plan: Sm100Plan) -> u32 {
    if comptime!(plan.core.has_fault(Fault::HalfOfScales)) {
        rank
    } else {
        comptime!(part as u32).runtime()
    }
}

/// A stage and what it is of, by where shared and tensor memory of the CTA begin.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct StageAt {
    /// The address of the stages in shared memory.
    pub operands: u32,
    /// The address of the accumulators in tensor memory; the scales are behind them.
    pub tmem: u32,
    /// Which stage.
    pub stage: u32,
    /// Which K tile it has.
    pub k_tile: u32,
    /// Steps of the first K tile that belong to the group before.
    pub lead: u32,
    /// With exchanged operands: rows of `b` that are multiplied, a multiple of 8.
    pub n: u32,
    /// With exchanged operands: the first row of `b` among the 128 of its scales, 0 or 64.
    pub b_row: u32,
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
fn scale_columns(at: StageAt, #[comptime] plan: Sm100Plan) -> u32 {
    at.tmem + comptime!(plan.b_rows() as u32) + at.stage * comptime!(plan.stage_columns())
}

/// The copy of the 128x4 tile `atom` of scales: of part 0, the rows of `a`, or part 1 or 2, the
/// first or second 128 rows of `b`.
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

/// The operands of step `step` of a stage.
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
        // A column of scales for each 32 rows.
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

    /// What NVIDIA's NVFP4 kernel has for tiles of the same shape (CUTLASS's
    /// `dense_blockscaled_gemm_persistent`, compiled for sm_100a and read in its PTX): the
    /// instruction descriptor, the bytes that complete a full stage, and the columns of tensor
    /// memory of the scales of a stage. MXFP8 has as many bytes of codes and a quarter of the
    /// scales.
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

    /// Codes of either operand begin at multiples of 1024 bytes, as the swizzle asks for.
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
