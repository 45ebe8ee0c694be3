//! What the kernels of decoding are told at compile time.

use crate::{
    attention::mma::{problem::MmaPlan, tile::Tile as HeadTile},
    cube::codec::Conversion,
    reference::attention::{DECODE_TILE, decode_slices},
    tensor::FloatKind,
};

/// Warps of a cube.
pub(super) const WARPS: usize = 4;
/// Keys of a tile that a warp has.
pub(super) const WARP_KEYS: usize = DECODE_TILE / WARPS;
/// Rows of the left operand of an instruction.
pub(super) const FRAGMENT_ROWS: usize = 16;

/// As many runs as `decode_splits` gives at most.
pub(super) const MOST_RUNS: usize = 64;

/// The widest head of which a warp of matrix instructions has registers for a row.
const MAX_MMA_HEAD: usize = 128;

/// What is in a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// Elements of the type of the activations.
    Float,
    /// E4M3 elements, times a factor for all keys, and one for all values.
    E4m3,
}

impl CacheKind {
    /// Bytes of an element, where those of the activations are of type `dtype`.
    pub(super) const fn element(self, dtype: FloatKind) -> usize {
        match self {
            Self::Float => dtype.size(),
            Self::E4m3 => 1,
        }
    }
}

/// Bytes of shared memory for keys, and for values, at least, where there is room: an SM of Hopper
/// holds two cubes. They begin beside those of the kernel in front, and more of them would crowd on
/// the SMs that these leave first (H100, a step of Llama 3.2 1B: 0.634 ms with three, 0.605 with two,
/// 0.629 with one).
const LEAST_STAGED: usize = 39 << 10;

/// The comptime choices of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DecodePlan {
    /// Elements of a head, a multiple of 8.
    pub head: usize,
    /// Queries of a cube.
    pub rows: usize,
    /// Elements of a vector of the cache: 4 or 8.
    pub width: usize,
    /// Whether queries and keys are turned by their positions.
    pub rotary: bool,
    /// Whether scores are bounded.
    pub softcap: bool,
    /// Whether loops are unrolled, which takes many registers and a compiler that is quick.
    pub unroll: bool,
    /// Whether each key of a tile has a unit, in planes of 32.
    pub planes: bool,
    /// Teams of units of a cube, each of which has its share of the queries: 1 without planes.
    pub teams: usize,
    /// Vectors of shared memory for the keys of a tile, which are brought there while units do other
    /// things, and as many for its values; 0 where they stay in the cache.
    pub staged: usize,
    /// Whether cubes run at the same time, and not one after another.
    pub concurrent: bool,
    /// Whether the kernels can begin before the one in front of them has ended.
    pub overlaps: bool,
    /// Type of queries, and of new keys and values.
    pub kind: FloatKind,
    /// What is in the cache.
    pub cache: CacheKind,
    /// Whether matrix instructions multiply, which take elements of 16 bits.
    pub mma: bool,
    /// Who converts.
    pub conversion: Conversion,
}

impl DecodePlan {
    /// Vectors of a head.
    pub(super) const fn columns(self) -> usize {
        self.head / self.width
    }

    /// Slices of the keys of a tile.
    pub(super) const fn slices(self) -> usize {
        decode_slices(self.head)
    }

    /// Segments of a tile whose largest scores are found apart: its planes, where it has any.
    pub(super) const fn segments(self) -> usize {
        if self.planes { DECODE_TILE / 32 } else { 8 }
    }

    /// Queries of a team.
    pub(super) const fn own_rows(self) -> usize {
        self.rows / self.teams
    }

    /// Bytes of a vector of the cache.
    pub(super) const fn vector_bytes(self) -> usize {
        self.width * self.cache.element(self.kind)
    }

    /// Bytes that a cube has in shared memory beside keys and values, at most.
    const fn stage_bytes(self) -> usize {
        let of_row = 2 * self.head
            + DECODE_TILE
            + self.segments()
            + self.width * self.pitch()
            + self.slices()
            + 3;
        // What aligns each of them, and a word for who comes last.
        self.rows * of_row * 4 + 256
    }

    /// The same plan, whose keys and values are in shared memory where a cube's `shared` bytes have
    /// room for those of a tile.
    pub(super) fn staged_in(self, shared: usize) -> Self {
        let tile = DECODE_TILE * self.columns();
        let room = shared.saturating_sub(self.stage_bytes()) / (2 * self.vector_bytes());
        let staged = match room < tile {
            true => 0,
            false => room.min(tile.max(LEAST_STAGED / self.vector_bytes())),
        };
        Self { staged, ..self }
    }

    /// The same plan for matrix instructions, if there are any for its types and heads, and a cube's
    /// `shared` bytes have room for it.
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
        // What aligns each of them, and a word for who comes last.
        let others = queries + 4 * plan.scratch() + 512;
        let fits = 2 * tile + others <= shared;
        fits.then_some(Self {
            staged: tile / 16,
            ..plan
        })
    }

    /// How keys, values and queries lie in shared memory for matrix instructions.
    pub(super) const fn mma_tile(self) -> HeadTile {
        HeadTile { head: self.head }
    }

    /// What a warp computes with matrix instructions.
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

    /// Floats of shared memory in which warps, and then runs, are added.
    pub(super) const fn scratch(self) -> usize {
        let of_warps = WARPS * self.rows * self.part();
        let of_runs = self.rows * MOST_RUNS;
        if of_warps > of_runs {
            of_warps
        } else {
            of_runs
        }
    }

    /// Floats from one element of a vector to the next in the sums of the slices: some more than
    /// there are, so that the units of a warp read from different banks.
    pub(super) const fn pitch(self) -> usize {
        (self.slices() + 1) * self.columns()
    }

    /// Floats of a row's part: its sums, the largest score and the sum of weights.
    pub const fn part(self) -> usize {
        self.head + 2
    }
}
