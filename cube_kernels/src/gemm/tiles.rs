//! Tile shapes that the kernels which ran on hardware are compiled for. Kernels add the values that
//! follow from their own shared memory layout in separate `impl` blocks.

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
