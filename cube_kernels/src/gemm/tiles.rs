//! The shapes of tiles that the kernels are compiled for. A kernel adds what follows from its own
//! layout of shared memory in an `impl` of its own.

use std::fmt;

use crate::cube::ptx::BlockScaled;

/// Rows of `a` in a tile: 64 for each consumer warpgroup.
pub const SM90_TILE_M: usize = 128;
/// Rows of a tile in one TMA box of an MN-major operand: the 128 bytes that the swizzle spans.
pub(crate) const SM90_BOX: usize = 64;
/// Columns of both operands in a stage: the 128 bytes that the swizzle spans.
pub(crate) const SM90_TILE_K: usize = 64;

/// The shape of a tile and of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm90Tile {
    /// 128 x 256, four stages.
    N256,
    /// 128 x 176, five stages: an `n` of 2112, DeepSeek-V3's first projection, is twelve of these.
    N176,
    /// 128 x 128, six stages.
    N128,
    /// 128 x 64, eight stages.
    N64,
}

impl Sm90Tile {
    /// All of them, the widest first.
    pub const ALL: [Self; 4] = [Self::N256, Self::N176, Self::N128, Self::N64];

    /// Rows of `b` in a tile.
    pub const fn n(self) -> usize {
        match self {
            Self::N256 => 256,
            Self::N176 => 176,
            Self::N128 => 128,
            Self::N64 => 64,
        }
    }

    /// Whether `b` may be MN-major: in boxes of 64 rows of the tile.
    pub const fn takes_mn_major(self) -> bool {
        self.n().is_multiple_of(SM90_BOX)
    }

    /// Sums that a unit holds of a tile. There is no vector of 88 values: of 128 the last 40 stay
    /// unwritten (and take no registers).
    pub const fn accumulators(self) -> usize {
        match self {
            Self::N176 => 128,
            _ => self.n() / 2,
        }
    }

    /// Stages of the ring, as many as shared memory holds beside the staging; the main loops of
    /// [`sm90_mainloop`](crate::cube::ptx::sm90_mainloop) count the same.
    pub const fn stages(self) -> usize {
        match self {
            Self::N256 => 4,
            Self::N176 => 5,
            Self::N128 => 6,
            Self::N64 => 8,
        }
    }
}

/// Rows of `b` of one consumer warpgroup.
pub(crate) const W4A16_STRIP: usize = 64;
/// The shape of a tile and of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16Tile {
    /// Rows of `a`: 32, 64, 112, 128, 192 or 256.
    pub rows_a: usize,
    /// Consumer warpgroups that have the same 64 rows of `b` and take turns along the contraction:
    /// 2 or 4; or 1, and two warpgroups have 64 rows each.
    pub ways: usize,
}

impl W4a16Tile {
    /// The tiles that there are kernels for. Of 112 rows, 768 x 2304 are 126, a wave of an H100
    /// with 132 SMs; of 128 rows they are 108.
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

    /// Consumer warpgroups.
    pub const fn consumers(self) -> usize {
        if self.ways == 1 { 2 } else { self.ways }
    }

    /// Units of a cube: the first warpgroup and the consumers.
    pub const fn units(self) -> u32 {
        128 + 128 * self.consumers() as u32
    }

    /// Rows of `b`.
    pub const fn rows_b(self) -> usize {
        if self.ways == 1 {
            2 * W4A16_STRIP
        } else {
            W4A16_STRIP
        }
    }

    /// Rows of `a` that instructions may span, ascending: a tile takes the first that holds its
    /// rows.
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

    /// Rows of `a` that one TMA instruction brings: they divide all widths.
    pub const fn rows_of_copy(self) -> usize {
        match self.rows_a {
            256 => 128,
            192 => 96,
            112 => 112,
            64 => 64,
            _ => 32,
        }
    }

    /// Stages of 128 columns in the ring, about as many as shared memory holds.
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

/// Columns of a tile of the W4A16 kernel that reads an MN-major `b`: 128 for each of two consumer
/// warpgroups.
pub(crate) const W4A16_MN_TILE_N: usize = 256;
/// The height of a tile of that kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum W4a16MnTile {
    /// 128 rows of `a`.
    M128,
    /// 64 rows of `a`, where those of 128 leave SMs idle.
    M64,
}

impl W4a16MnTile {
    /// Both.
    pub const ALL: [Self; 2] = [Self::M128, Self::M64];

    /// Rows of `a`.
    pub const fn rows_a(self) -> usize {
        match self {
            Self::M128 => 128,
            Self::M64 => 64,
        }
    }

    /// Rows of `a` that instructions may span, ascending: a tile takes the first that holds its
    /// rows. Copies of 32 rows bring them.
    pub const fn widths(self) -> &'static [usize] {
        match self {
            Self::M128 => &[32, 64, 128],
            Self::M64 => &[32, 64],
        }
    }

    /// Stages of 64 along the contraction in the ring, about as many as shared memory holds.
    pub const fn stages(self) -> usize {
        match self {
            Self::M128 => 8,
            Self::M64 => 12,
        }
    }
}

/// Columns of a tile: rows of `b`.
pub(crate) const CMMA_TILE_N: usize = 128;
/// The shape of a tile, shared by eight planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CmmaTile {
    /// 128 x 128: each plane has 64 x 32.
    M128,
    /// 32 x 128, for small M: each plane has 32 x 16.
    M32,
}

impl CmmaTile {
    /// Rows of `a` in a tile.
    pub const fn rows(self) -> usize {
        match self {
            Self::M128 => 128,
            Self::M32 => 32,
        }
    }

    /// Planes along the rows of `b`.
    pub(crate) const fn planes_n(self) -> usize {
        match self {
            Self::M128 => 4,
            Self::M32 => 8,
        }
    }

    /// Instructions of a plane along the rows of `a`, and of `b`.
    pub(crate) const fn strips(self) -> usize {
        match self {
            Self::M128 => 4,
            Self::M32 => 2,
        }
    }

    pub(crate) const fn columns(self) -> usize {
        CMMA_TILE_N / 16 / self.planes_n()
    }

    /// The narrowest tile that holds `rows` rows.
    pub(crate) const fn of(rows: usize) -> Self {
        if rows <= Self::M32.rows() {
            Self::M32
        } else {
            Self::M128
        }
    }
}

/// Who multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiply {
    /// The block-scaled instruction, of sm_120 and sm_121.
    Instruction,
    /// The same by exchanges between the lanes and plain arithmetic, from the layout of the
    /// instruction's operands as it is documented: any GPU with warps of 32, for tests.
    Software,
}

/// Rows of `b` in a tile of the block-scaled kernel.
pub const SM120_TILE_N: usize = 128;

/// The shape of a cube's tile, and who multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm120Tile {
    /// The format of the operands, and the instruction with it.
    pub format: BlockScaled,
    /// Groups of 16 rows of `a` in each warp: 1 or 2.
    pub strips: usize,
    /// Who multiplies.
    pub multiply: Multiply,
}

impl Sm120Tile {
    /// Rows of `a` in a tile.
    pub const fn tile_m(self) -> usize {
        64 * self.strips
    }

    /// The widest tile of which there is one for each SM, of `outputs` outputs of `m` x `n`, or the
    /// narrowest. Not measured.
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

/// Rows of the first operand of a `tcgen05` instruction in a CTA: the lanes of tensor memory.
pub const SM100_TILE_M: usize = 128;
/// Rows of the second operand: the columns of its accumulators.
pub const SM100_TILE_N: usize = 256;
/// The same where the operands are exchanged for few rows of `a`, which are the second operand
/// then.
pub const SM100_SWAP_AB_N: usize = 64;

/// Who executes `tcgen05` instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TensorCore {
    /// The tensor cores of sm_100 and sm_103.
    Instruction,
    /// Four warps more, which execute the same commands from a ring in shared memory; tensor memory
    /// is in device memory. For Hopper, whose TMA and barriers are the same, and for tests.
    Software(Fault),
}

impl TensorCore {
    /// Whether a kernel with it has `fault`.
    pub const fn has_fault(self, fault: Fault) -> bool {
        match self {
            Self::Instruction => false,
            Self::Software(injected) => injected as u32 == fault as u32,
        }
    }
}

/// What a test breaks in the kernel, to see that the software model notices it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Nothing.
    None,
    /// Stages are multiplied without waiting for them.
    NoFullWait,
    /// Accumulators are read without waiting for them.
    NoAccumulatorWait,
    /// A stage is released when its instructions are issued, not when they are complete.
    EarlyStageReuse,
    /// Codes are copied without the swizzle that their descriptor names.
    WrongSwizzle,
    /// Scales of `b` are read four columns further.
    WrongScaleColumn,
    /// All stages have their scales in the same columns, so that a copy may overtake the
    /// instruction that reads them.
    SharedScaleColumns,
    /// The instruction descriptor names scales of the other format.
    WrongInstructionDescriptor,
    /// The descriptor of codes has another distance between groups of eight rows.
    WrongStride,
    /// The instruction descriptor names the next scale of each word.
    WrongScaleId,
    /// Of two CTAs: stages are multiplied without waiting for those of the odd CTA.
    NoPeerWait,
    /// Of two CTAs: each has the other one's half of the rows of `b`.
    WrongHalf,
    /// Of two CTAs: each has the scales of its own half of `b` alone, twice.
    HalfOfScales,
}

impl Fault {
    /// Those of every form.
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
    /// Those of [`Sm100Form::TwoCta`] alone.
    pub const OF_PAIRS: [Self; 3] = [Self::NoPeerWait, Self::WrongHalf, Self::HalfOfScales];
}

/// How a tile of the `tcgen05` kernel is shared out to instructions and CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm100Form {
    /// A CTA multiplies 128 rows of `a` by 256 of `b`.
    OneCta,
    /// Two CTAs of a cluster multiply 256 rows of each, with one instruction for both: a CTA has
    /// half of the rows of either in its shared memory, and 128 rows of the output.
    TwoCta,
    /// `b` is the first operand of the instructions and `a` the second, whose width follows the
    /// rows that there are: for few rows of `a`. Not with groups along K.
    SwapAb,
}

impl Sm100Form {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::OneCta, Self::TwoCta, Self::SwapAb];

    /// CTAs that share a tile.
    pub const fn ctas(self) -> usize {
        match self {
            Self::TwoCta => 2,
            Self::OneCta | Self::SwapAb => 1,
        }
    }

    /// Whether the first operand of the instructions is `b`.
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

/// How the `tcgen05` kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm100Tile {
    /// The format of both operands.
    pub format: BlockScaled,
    /// How a tile is shared out.
    pub form: Sm100Form,
    /// Who multiplies.
    pub core: TensorCore,
    /// In software: the seed of delays and of the order of commands, or 0 for none and the order in
    /// which they were issued. Odd seeds let scale copies overtake instructions.
    pub seed: u32,
}

impl Sm100Tile {
    /// Of `format`, with the instructions.
    pub const fn instruction(format: BlockScaled, form: Sm100Form) -> Self {
        Self {
            format,
            form,
            core: TensorCore::Instruction,
            seed: 0,
        }
    }

    /// The same in software, as it is.
    pub const fn in_software(self, seed: u32) -> Self {
        Self {
            core: TensorCore::Software(Fault::None),
            seed,
            ..self
        }
    }

    /// Rows of `a`.
    pub const fn tile_m(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => self.form.ctas() * SM100_TILE_M,
            Sm100Form::SwapAb => SM100_SWAP_AB_N,
        }
    }

    /// Rows of `b`.
    pub const fn tile_n(self) -> usize {
        match self.form {
            Sm100Form::OneCta | Sm100Form::TwoCta => SM100_TILE_N,
            Sm100Form::SwapAb => SM100_TILE_M,
        }
    }
}
