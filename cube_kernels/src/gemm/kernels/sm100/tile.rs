//! Tile shapes of the `tcgen05` kernel, and what executes its instructions.

use std::fmt;

use crate::cube::ptx::BlockScaled;

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
