//! Comptime choices of the decoding kernels.

use crate::{
    attention::mma::{problem::MmaPlan, tile::Tile as HeadTile},
    cube::codec::Conversion,
    reference::attention::{DECODE_TILE, decode_slices},
    tensor::FloatKind,
};

/// Warps per cube.
pub(super) const WARPS: usize = 4;
/// Keys of a tile per warp.
pub(super) const WARP_KEYS: usize = DECODE_TILE / WARPS;
/// Rows of an instruction's left operand.
pub(super) const FRAGMENT_ROWS: usize = 16;

/// Largest number of runs that `decode_splits` returns.
pub(super) const MOST_RUNS: usize = 64;

/// Largest head size for which a warp of matrix instructions has registers for a row.
const MAX_MMA_HEAD: usize = 128;

/// Contents of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// Elements in the type of the activations.
    Float,
    /// E4M3 elements, with one scale for all keys and one for all values.
    E4m3,
}

impl CacheKind {
    /// Returns the size of an element in bytes, with activations of type `dtype`.
    pub(super) const fn element(self, dtype: FloatKind) -> usize {
        match self {
            Self::Float => dtype.size(),
            Self::E4m3 => 1,
        }
    }
}

/// Smallest number of bytes of shared memory for keys, and for values, if available: an SM of
/// Hopper then holds two cubes. Cubes start while the previous kernel's cubes still run, and more
/// of them would crowd on the SMs that those leave first (H100, a step of Llama 3.2 1B: 0.634 ms
/// with three, 0.605 with two, 0.629 with one).
const LEAST_STAGED: usize = 39 << 10;

/// Comptime choices of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodePlan {
    /// Elements per head, a multiple of 8.
    pub head: usize,
    /// Queries per cube.
    pub rows: usize,
    /// Elements per vector of the cache: 4 or 8.
    pub width: usize,
    /// True if queries and keys are rotated by their positions.
    pub rotary: bool,
    /// True if scores have a soft cap.
    pub softcap: bool,
    /// True to unroll loops, which takes many registers and a fast compiler.
    pub unroll: bool,
    /// True if each key of a tile has a unit, in planes of 32.
    pub planes: bool,
    /// Teams of units per cube, each with its share of the queries: 1 without planes.
    pub teams: usize,
    /// Vectors of shared memory for the keys of a tile, which are copied asynchronously, and as
    /// many for its values; 0 if they stay in the cache.
    pub staged: usize,
    /// True if cubes run concurrently, not one after another.
    pub concurrent: bool,
    /// True if the kernels can start before the previous one has ended.
    pub overlaps: bool,
    /// Type of queries, and of new keys and values.
    pub kind: FloatKind,
    /// Contents of the cache.
    pub cache: CacheKind,
    /// True if matrix instructions are used, which take 16-bit elements.
    pub mma: bool,
    /// Conversion method.
    pub conversion: Conversion,
}

impl DecodePlan {
    /// Returns the vectors per head.
    pub(super) const fn columns(self) -> usize {
        self.head / self.width
    }

    /// Returns the number of slices of a tile's keys.
    pub(super) const fn slices(self) -> usize {
        decode_slices(self.head)
    }

    /// Returns the number of segments of a tile whose largest scores are computed separately: its
    /// planes, if any.
    pub(super) const fn segments(self) -> usize {
        if self.planes { DECODE_TILE / 32 } else { 8 }
    }

    /// Returns the queries per team.
    pub(super) const fn own_rows(self) -> usize {
        self.rows / self.teams
    }

    /// Returns the size in bytes of a vector of the cache.
    pub(super) const fn vector_bytes(self) -> usize {
        self.width * self.cache.element(self.kind)
    }

    /// Returns an upper bound of a cube's shared memory in bytes, without keys and values.
    const fn stage_bytes(self) -> usize {
        let of_row = 2 * self.head
            + DECODE_TILE
            + self.segments()
            + self.width * self.pitch()
            + self.slices()
            + 3;
        // Alignment of each array, and a word that tells which cube is last.
        self.rows * of_row * 4 + 256
    }

    /// Returns the plan with keys and values in shared memory, if a tile of them fits in a cube's
    /// `shared` bytes.
    pub(super) fn staged_in(self, shared: usize) -> Self {
        let tile = DECODE_TILE * self.columns();
        let room = shared.saturating_sub(self.stage_bytes()) / (2 * self.vector_bytes());
        let staged = match room < tile {
            true => 0,
            false => room.min(tile.max(LEAST_STAGED / self.vector_bytes())),
        };
        Self { staged, ..self }
    }

    /// Returns the plan with matrix instructions, if its types and head size support them and it
    /// fits in a cube's `shared` bytes.
    pub(super) fn by_mma_in(self, shared: usize) -> Option<Self> {
        let takes = self.conversion.has_ptx()
            && self.kind != FloatKind::F32
            && self.cache == CacheKind::Float
            && self.head.is_multiple_of(16)
            && self.head <= MAX_MMA_HEAD;
        if !takes {
            return None;
        }
        let plan = Self {
            mma: true,
            width: 8,
            teams: 1,
            ..self
        };
        let tile = DECODE_TILE * plan.mma_tile().pitch();
        let queries = FRAGMENT_ROWS * plan.mma_tile().pitch();
        // Alignment of each array, and a word that tells which cube is last.
        let others = queries + 4 * plan.scratch() + 512;
        let fits = 2 * tile + others <= shared;
        fits.then_some(Self {
            staged: tile / 16,
            ..plan
        })
    }

    /// Returns the shared-memory layout of keys, values and queries for matrix instructions.
    pub(super) const fn mma_tile(self) -> HeadTile {
        HeadTile { head: self.head }
    }

    /// Returns the plan of a warp's matrix instructions.
    pub(super) const fn of_warp(self) -> MmaPlan {
        MmaPlan {
            head: self.head,
            kind: self.kind,
            strips: 1,
            half_strip: true,
            warps: WARPS,
            inner: WARP_KEYS,
            causal: true,
            window: true,
            softcap: self.softcap,
            quiet_softmax: false,
            offsets: false,
        }
    }

    /// Returns the floats of shared memory for summing warps, and then runs.
    pub(super) const fn scratch(self) -> usize {
        let of_warps = WARPS * self.rows * self.part();
        let of_runs = self.rows * MOST_RUNS;
        if of_warps > of_runs {
            of_warps
        } else {
            of_runs
        }
    }

    /// Returns the floats from one element of a vector to the next in the sums of the slices.
    /// Includes padding, so that the units of a warp read from different banks.
    pub(super) const fn pitch(self) -> usize {
        (self.slices() + 1) * self.columns()
    }

    /// Returns the floats of a row's partial result: its sums, the largest score and the sum of
    /// weights.
    pub const fn part(self) -> usize {
        self.head + 2
    }
}
