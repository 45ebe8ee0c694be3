//! Tile shapes that the kernels are compiled for. Kernels add the values that follow from their own
//! shared memory layout in separate `impl` blocks.

use std::fmt;

use crate::cube::ptx::BlockScaled;

/// Rows of `a` per tile: 64 for each consumer warpgroup.
pub const SM90_TILE_M: usize = 128;
/// Rows of a tile per TMA box of an MN-major operand: the 128 bytes that the swizzle spans.
pub(crate) const SM90_BOX: usize = 64;
/// Columns of both operands per stage: the 128 bytes that the swizzle spans.
pub(crate) const SM90_TILE_K: usize = 64;

/// Tile shape and number of pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm90Tile {
    /// 128 x 256, four stages.
    N256,
    /// 128 x 176, five stages: `n` = 2112, the first projection of DeepSeek-V3, is twelve of these.
    N176,
    /// 128 x 128, six stages.
    N128,
    /// 128 x 64, eight stages.
    N64,
}

impl Sm90Tile {
    /// All shapes, widest first.
    pub const ALL: [Self; 4] = [Self::N256, Self::N176, Self::N128, Self::N64];

    /// Returns the rows of `b` per tile.
    pub const fn n(self) -> usize {
        match self {
            Self::N256 => 256,
            Self::N176 => 176,
            Self::N128 => 128,
            Self::N64 => 64,
        }
    }

    /// Returns true if `b` may be MN-major: the tile then consists of boxes of 64 rows.
    pub const fn takes_mn_major(self) -> bool {
        self.n().is_multiple_of(SM90_BOX)
    }

    /// Returns the accumulators per unit. There is no vector of 88 values, so 128 are declared; the
    /// last 40 stay unwritten and take no registers.
    pub const fn accumulators(self) -> usize {
        match self {
            Self::N176 => 128,
            _ => self.n() / 2,
        }
    }

    /// Returns the number of stages, as many as fit into shared memory besides the epilogue
    /// staging. The main loops of [`sm90_mainloop`](crate::cube::ptx::sm90_mainloop) use the same
    /// number.
    pub const fn stages(self) -> usize {
        match self {
            Self::N256 => 4,
            Self::N176 => 5,
            Self::N128 => 6,
            Self::N64 => 8,
        }
    }
}

/// Rows of `b` per consumer warpgroup.
pub(crate) const W4A16_STRIP: usize = 64;
/// Tile shape and number of pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16Tile {
    /// Rows of `a`: 32, 64, 112, 128, 192 or 256.
    pub rows_a: usize,
    /// Number of consumer warpgroups that share the same 64 rows of `b` and alternate along K, 2
    /// or 4. If it is 1, there are two warpgroups with 64 rows each.
    pub ways: usize,
}

impl W4a16Tile {
    /// All tiles with compiled kernels. With 112 rows, 768 x 2304 has 126 tiles, one wave of an
    /// H100 with 132 SMs; with 128 rows it has 108.
    pub const ALL: [Self; 7] = {
        const fn tile(rows_a: usize, ways: usize) -> W4a16Tile {
            W4a16Tile { rows_a, ways }
        }
        [
            tile(256, 1),
            tile(192, 1),
            tile(128, 1),
            tile(112, 1),
            tile(128, 2),
            tile(64, 2),
            tile(32, 4),
        ]
    };

    /// Returns the number of consumer warpgroups.
    pub const fn consumers(self) -> usize {
        if self.ways == 1 { 2 } else { self.ways }
    }

    /// Returns the units per cube: one producer warpgroup and the consumers.
    pub const fn units(self) -> u32 {
        128 + 128 * self.consumers() as u32
    }

    /// Returns the rows of `b` per tile.
    pub const fn rows_b(self) -> usize {
        if self.ways == 1 {
            2 * W4A16_STRIP
        } else {
            W4A16_STRIP
        }
    }

    /// Returns the instruction widths in rows of `a`, ascending: a tile uses the first one that
    /// holds its rows.
    pub const fn widths(self) -> &'static [usize] {
        match (self.rows_a, self.ways) {
            (256, _) => &[128, 256],
            (192, _) => &[96, 192],
            (128, 1) => &[32, 64, 96, 128],
            (112, _) => &[112],
            (128, _) => &[96, 128],
            (64, _) => &[64],
            _ => &[32],
        }
    }

    /// Returns the rows of `a` that one TMA instruction loads: a divisor of all widths.
    pub const fn rows_of_copy(self) -> usize {
        match self.rows_a {
            256 => 128,
            192 => 96,
            112 => 112,
            64 => 64,
            _ => 32,
        }
    }

    /// Returns the number of stages of 128 columns, about as many as fit into shared memory.
    pub const fn stages(self) -> usize {
        match self.rows_a {
            256 => 2,
            192 => 3,
            112 | 128 => 5,
            64 => 8,
            _ => 12,
        }
    }
}

/// Columns per tile of the W4A16 kernel for an MN-major `b`: 128 for each of two consumer
/// warpgroups.
pub(crate) const W4A16_MN_TILE_N: usize = 256;
/// Tile height of the W4A16 kernel for an MN-major `b`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum W4a16MnTile {
    /// 128 rows of `a`.
    M128,
    /// 64 rows of `a`, for shapes in which tiles of 128 rows leave SMs idle.
    M64,
}

impl W4a16MnTile {
    /// All heights.
    pub const ALL: [Self; 2] = [Self::M128, Self::M64];

    /// Returns the rows of `a` per tile.
    pub const fn rows_a(self) -> usize {
        match self {
            Self::M128 => 128,
            Self::M64 => 64,
        }
    }

    /// Returns the instruction widths in rows of `a`, ascending: a tile uses the first one that
    /// holds its rows. Each TMA copy loads 32 rows.
    pub const fn widths(self) -> &'static [usize] {
        match self {
            Self::M128 => &[32, 64, 128],
            Self::M64 => &[32, 64],
        }
    }

    /// Returns the number of stages of 64 elements along K, about as many as fit into shared
    /// memory.
    pub const fn stages(self) -> usize {
        match self {
            Self::M128 => 8,
            Self::M64 => 12,
        }
    }
}

/// Columns per tile: rows of `b`.
pub(crate) const CMMA_TILE_N: usize = 128;
/// Tile shape, shared by eight planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CmmaTile {
    /// 128 x 128: each plane has 64 x 32.
    M128,
    /// 32 x 128, for small M: each plane has 32 x 16.
    M32,
}

impl CmmaTile {
    /// Returns the rows of `a` per tile.
    pub const fn rows(self) -> usize {
        match self {
            Self::M128 => 128,
            Self::M32 => 32,
        }
    }

    /// Returns the number of planes along the rows of `b`.
    pub(crate) const fn planes_n(self) -> usize {
        match self {
            Self::M128 => 4,
            Self::M32 => 8,
        }
    }

    /// Returns the instructions per plane along the rows of `a`, and of `b`.
    pub(crate) const fn strips(self) -> usize {
        match self {
            Self::M128 => 4,
            Self::M32 => 2,
        }
    }

    pub(crate) const fn columns(self) -> usize {
        CMMA_TILE_N / 16 / self.planes_n()
    }

    /// Returns the smallest tile that holds `rows` rows, or the larger one.
    pub(crate) const fn of(rows: usize) -> Self {
        if rows <= Self::M32.rows() {
            Self::M32
        } else {
            Self::M128
        }
    }
}

/// Implementation of the multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiply {
    /// The block-scaled instruction of sm_120 and sm_121.
    Instruction,
    /// Emulation by lane exchanges and plain arithmetic, with the documented layout of the
    /// instruction's operands: runs on any GPU with warps of 32, for tests.
    Software,
}

/// Rows of `b` per tile of the block-scaled kernel.
pub const SM120_TILE_N: usize = 128;

/// Tile of a cube, and implementation of the multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm120Tile {
    /// Format of the operands, which selects the instruction.
    pub format: BlockScaled,
    /// Groups of 16 rows of `a` per warp: 1 or 2.
    pub strips: usize,
    /// Implementation of the multiplication.
    pub multiply: Multiply,
}

impl Sm120Tile {
    /// Returns the rows of `a` per tile.
    pub const fn tile_m(self) -> usize {
        64 * self.strips
    }

    /// Returns the widest tile of which there is at least one per SM, for `outputs` outputs of `m`
    /// x `n`; otherwise the narrowest. Not measured.
    pub(crate) fn of(
        format: BlockScaled,
        sms: usize,
        (m, n, outputs): (usize, usize, usize),
        multiply: Multiply,
    ) -> Self {
        let wide = Self {
            format,
            strips: 2,
            multiply,
        };
        let tiles = m.div_ceil(wide.tile_m()) * n.div_ceil(SM120_TILE_N) * outputs;
        let strips = if m > 64 && tiles >= sms { 2 } else { 1 };
        Self { strips, ..wide }
    }
}

/// Rows of the first operand of a `tcgen05` instruction per CTA: the lanes of tensor memory.
pub const SM100_TILE_M: usize = 128;
/// Rows of the second operand: the columns of its accumulators.
pub const SM100_TILE_N: usize = 256;
/// Rows of the second operand with swapped operands: for small M, `a` is the second operand.
pub const SM100_SWAP_AB_N: usize = 64;

/// Executor of `tcgen05` instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorCore {
    /// Tensor cores of sm_100 and sm_103.
    Instruction,
    /// Four additional warps, which execute the same commands from a ring buffer in shared memory;
    /// tensor memory is emulated in device memory. For tests, and for Hopper, which has the same
    /// TMA and barriers.
    Software(Fault),
}

impl TensorCore {
    /// Returns true if a kernel with this executor has `fault` injected.
    pub const fn has_fault(self, fault: Fault) -> bool {
        match self {
            Self::Instruction => false,
            Self::Software(injected) => injected as u32 == fault as u32,
        }
    }
}

/// Fault that a test injects into the kernel, to verify that the software model detects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// No fault.
    None,
    /// Stages are multiplied without waiting for their data.
    NoFullWait,
    /// Accumulators are read without waiting for them.
    NoAccumulatorWait,
    /// A stage is released when its instructions are issued, before they are complete.
    EarlyStageReuse,
    /// Codes are copied without the swizzle that their descriptor specifies.
    WrongSwizzle,
    /// Scales of `b` are read at an offset of four columns.
    WrongScaleColumn,
    /// All stages keep their scales in the same columns, so that a copy may overtake the
    /// instruction that reads them.
    SharedScaleColumns,
    /// The instruction descriptor specifies scales of the other format.
    WrongInstructionDescriptor,
    /// The descriptor of codes has a wrong stride between groups of eight rows.
    WrongStride,
    /// The instruction descriptor specifies the next scale of each word.
    WrongScaleId,
    /// Two CTAs: stages are multiplied without waiting for those of the odd CTA.
    NoPeerWait,
    /// Two CTAs: each loads the other one's half of the rows of `b`.
    WrongHalf,
    /// Two CTAs: each loads only the scales of its own half of `b`, twice.
    HalfOfScales,
}

impl Fault {
    /// Faults that apply to every form.
    pub const INJECTED: [Self; 9] = [
        Self::NoFullWait,
        Self::NoAccumulatorWait,
        Self::EarlyStageReuse,
        Self::WrongSwizzle,
        Self::WrongScaleColumn,
        Self::SharedScaleColumns,
        Self::WrongInstructionDescriptor,
        Self::WrongStride,
        Self::WrongScaleId,
    ];
    /// Faults that only apply to [`Sm100Form::TwoCta`].
    pub const OF_PAIRS: [Self; 3] = [Self::NoPeerWait, Self::WrongHalf, Self::HalfOfScales];
}

/// Mapping of a tile of the `tcgen05` kernel to instructions and CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm100Form {
    /// A CTA multiplies 128 rows of `a` by 256 of `b`.
    OneCta,
    /// Two CTAs of a cluster multiply 256 rows of each operand, with one instruction for both. A
    /// CTA has half of the rows of each operand in its shared memory, and 128 rows of the output.
    TwoCta,
    /// `b` is the first operand of the instructions and `a` the second, whose width adapts to the
    /// number of rows: for small M. Not with groups along K.
    SwapAb,
}

impl Sm100Form {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::OneCta, Self::TwoCta, Self::SwapAb];

    /// Returns the number of CTAs that share a tile.
    pub const fn ctas(self) -> usize {
        match self {
            Self::TwoCta => 2,
            Self::OneCta | Self::SwapAb => 1,
        }
    }

    /// Returns true if the first operand of the instructions is `b`.
    pub const fn swaps_ab(self) -> bool {
        matches!(self, Self::SwapAb)
    }
}

impl fmt::Display for Sm100Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneCta => "one CTA",
            Self::TwoCta => "two CTAs",
            Self::SwapAb => "exchanged operands",
        })
    }
}

/// Configuration of the `tcgen05` kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm100Tile {
    /// Format of both operands.
    pub format: BlockScaled,
    /// Mapping of a tile to instructions and CTAs.
    pub form: Sm100Form,
    /// Executor of the instructions.
    pub core: TensorCore,
    /// Seed of delays and command order in the software model; 0 means no delays and issue order.
    /// With odd seeds, scale copies may overtake instructions.
    pub seed: u32,
}

impl Sm100Tile {
    /// Returns the tile of `format` on hardware instructions.
    pub const fn instruction(format: BlockScaled, form: Sm100Form) -> Self {
        Self {
            format,
            form,
            core: TensorCore::Instruction,
            seed: 0,
        }
    }

    /// Returns the same tile on the software model, without faults.
    pub const fn in_software(self, seed: u32) -> Self {
        Self {
            core: TensorCore::Software(Fault::None),
            seed,
            ..self
        }
    }

    /// Returns the rows of `a` per tile.
    pub const fn tile_m(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => self.form.ctas() * SM100_TILE_M,
            Sm100Form::SwapAb => SM100_SWAP_AB_N,
        }
    }

    /// Returns the rows of `b` per tile.
    pub const fn tile_n(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => SM100_TILE_N,
            Sm100Form::SwapAb => SM100_TILE_M,
        }
    }
}
