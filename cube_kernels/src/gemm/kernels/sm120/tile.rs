//! Tile shapes of the block-scaled kernel of consumer Blackwell.

use crate::cube::ptx::BlockScaled;

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
