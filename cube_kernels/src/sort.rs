//! Sorts tokens by id, stably: a radix sort with digits of at most 8 bits. Ids are rows of an
//! embedding, or experts.
//!
//! Each cube sorts one tile of tokens. One unit counts a digit, and later scatters its tokens, by
//! scanning the tile in order, so that units never compete for an output index. The time of a pass
//! is therefore that of the tile's length and of the most frequent digit: tiles are short, and the
//! bits of an id are divided evenly among the passes.

use cubecl::{prelude::*, server::Handle};

use crate::{
    capabilities::is_cpu,
    launch::{buffer, units},
    memory::allocate,
};

/// Largest number of bits of a digit.
const MOST_BITS: u32 = 8;
/// Smallest number of units of a tile's cube; they load the tile.
const LOADING: usize = 128;
/// Tokens per tile, for few and for many tokens: one cube sums the counts of all tiles.
const TILES: [usize; 2] = [256, 1024];
/// Largest number of tokens that counts as few.
const FEW: usize = 1 << 16;

/// Parameters of a sorting pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SortPlan {
    /// Tokens per tile.
    pub tile: usize,
    /// Bits per digit.
    pub bits: u32,
}

impl SortPlan {
    /// Returns the number of passes for `tokens` ids up to `vocab`, and their plan.
    fn of(tokens: usize, vocab: usize) -> (u32, Self) {
        let bits = usize::BITS - vocab.leading_zeros();
        let passes = bits.div_ceil(MOST_BITS);
        let [short, long] = TILES;
        let plan = Self {
            tile: if tokens <= FEW { short } else { long },
            bits: bits.div_ceil(passes.max(1)),
        };
        (passes, plan)
    }

    /// Returns the number of values of a digit.
    const fn digits(self) -> usize {
        1 << self.bits
    }
}

/// Parameters of the scatter of one pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlacePlan {
    /// Plan of the pass.
    pub sort: SortPlan,
    /// True for the first pass, in which tokens are in their original order.
    pub first: bool,
}

/// Tokens sorted by id.
pub(crate) struct Sorted {
    /// Ids of the tokens; `vocab` if the id is not a row.
    pub keys: Handle,
    /// Indices of the tokens.
    pub order: Handle,
}

/// Sorts `tokens` ids of type `u32`.
pub(crate) fn sort(client: &Client, ids: &Handle, tokens: usize, vocab: usize) -> Sorted {
    let (passes, plan) = SortPlan::of(tokens, vocab);
    let tiles = tokens.div_ceil(plan.tile);
    let count = tiles * plan.digits();
    let counts = allocate(client, count * 4);
    let words = || allocate(client, tokens * 4);
    let (mut from, mut to) = ((ids.clone(), words()), (words(), words()));
    let cpu = is_cpu(client);
    let tile_units = if cpu {
        units(client)
    } else {
        plan.digits().max(LOADING)
    };
    let scan_units = if cpu { units(client) } else { 1024 };
    for pass in 0..passes {
        let shift = pass * plan.bits;
        let cubes = CubeCount::Static(tiles as u32, 1, 1);
        // SAFETY: the kernels stay below the tokens, and below the counts of their digits.
        unsafe {
            count_digits_kernel::launch_unchecked(
                client,
                cubes.clone(),
                CubeDim::new_1d(tile_units as u32),
                buffer(&from.0, tokens),
                buffer(&counts, count),
                tokens,
                vocab as u32,
                shift,
                plan,
            );
            scan_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(scan_units as u32),
                buffer(&counts, count),
                count,
                scan_units,
            );
            place_kernel::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(tile_units as u32),
                TokensLaunch::new(buffer(&from.0, tokens), buffer(&from.1, tokens)),
                buffer(&counts, count),
                buffer(&to.0, tokens),
                buffer(&to.1, tokens),
                tokens,
                vocab as u32,
                shift,
                PlacePlan {
                    sort: plan,
                    first: pass == 0,
                },
            );
        }
        if pass == 0 {
            // The caller's ids are read-only.
            from = (words(), from.1);
        }
        (from, to) = (to, from);
    }
    let (keys, order) = from;
    Sorted { keys, order }
}

/// Keys, and the indices of their tokens.
#[derive(CubeType, CubeLaunch)]
pub struct Tokens {
    /// Ids.
    pub keys: Box<[u32]>,
    /// Indices of tokens.
    pub order: Box<[u32]>,
}

/// Loads the ids of a tile into shared memory; ids that are not a row become `vocab`.
#[cube]
fn load_tile(
    keys: &[u32],
    tokens: usize,
    vocab: u32,
    shared: &mut Shared<[u32]>,
    #[comptime] tile: usize,
) -> usize {
    let start = CUBE_POS * tile;
    let len = min(tokens - start, tile);
    let mut i = UNIT_POS as usize;
    while i < len {
        shared[i] = min(keys[start + i], vocab);
        i += CUBE_DIM as usize;
    }
    sync_cube();
    len
}

/// Counts the digits of a tile, one tile per cube: `counts[digit][tile]`.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn count_digits_kernel(
    keys: &[u32],
    counts: &mut [u32],
    tokens: usize,
    vocab: u32,
    shift: u32,
    #[comptime] plan: SortPlan,
) {
    let mut shared: Shared<[u32]> = Shared::new_slice(comptime!(plan.tile));
    let len = load_tile(keys, tokens, vocab, &mut shared, plan.tile);
    let mut digit = UNIT_POS as usize;
    while digit < comptime!(plan.digits()) {
        let mut count = 0u32;
        for i in 0..len {
            let own = (shared[i] >> shift) & comptime!(plan.digits() as u32 - 1);
            count += u32::cast_from(own == digit as u32);
        }
        counts[digit * CUBE_COUNT + CUBE_POS] = count;
        digit += CUBE_DIM as usize;
    }
}

/// Exclusive prefix sum of `counts` by one cube of `units` units. Each unit has consecutive
/// entries.
#[allow(clippy::needless_range_loop, reason = "cube code has no iterators")]
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn scan_kernel(counts: &mut [u32], len: usize, #[comptime] units: usize) {
    let mut sums: Shared<[u32]> = Shared::new_slice(units);
    let unit = UNIT_POS as usize;
    let each = (len + comptime!(units - 1)) / units;
    let start = min(unit * each, len);
    let end = min(start + each, len);
    let mut sum = 0u32;
    for i in start..end {
        sum += counts[i];
    }
    sums[unit] = sum;
    sync_cube();
    let mut distance = 1usize.runtime();
    while distance < units {
        let mut before = 0u32;
        if unit >= distance {
            before = sums[unit - distance];
        }
        sync_cube();
        sums[unit] += before;
        sync_cube();
        distance *= 2usize;
    }
    let mut place = sums[unit] - sum;
    for i in start..end {
        let count = counts[i];
        counts[i] = place;
        place += count;
    }
}

/// Scatters the tokens of a tile, one tile per cube, to consecutive indices from
/// `places[digit][tile]`.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn place_kernel(
    from: Tokens,
    places: &[u32],
    keys: &mut [u32],
    order: &mut [u32],
    tokens: usize,
    vocab: u32,
    shift: u32,
    #[comptime] plan: PlacePlan,
) {
    let (first, plan) = comptime!((plan.first, plan.sort));
    let mut shared: Shared<[u32]> = Shared::new_slice(comptime!(plan.tile));
    let len = load_tile(&from.keys, tokens, vocab, &mut shared, plan.tile);
    let start = CUBE_POS * comptime!(plan.tile);
    let mut digit = UNIT_POS as usize;
    while digit < comptime!(plan.digits()) {
        let mut place = places[digit * CUBE_COUNT + CUBE_POS] as usize;
        for i in 0..len {
            let key = shared[i];
            if (key >> shift) & comptime!(plan.digits() as u32 - 1) == digit as u32 {
                // Always true, unless another kernel wrote to the counts.
                if place < tokens {
                    keys[place] = key;
                    order[place] = if comptime!(first) {
                        (start + i) as u32
                    } else {
                        from.order[start + i]
                    };
                }
                place += 1usize;
            }
        }
        digit += CUBE_DIM as usize;
    }
}
