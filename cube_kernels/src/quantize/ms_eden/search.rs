//! Exact amax values of a screened matrix, along and across its rows, from one launch. A plane
//! inspects the screening results of 32 tiles at once. Of the few tiles that may hold the largest
//! magnitude it processes one turn, and three more planes of its cube the others.

use cubecl::{prelude::*, server::Handle};

use super::{
    arguments::{EdenSigns, EdenStored, EdenStoredArgs, atomic_amax},
    plane_tile::{Reading, plane_amax},
    position::{EdenPolicy, EdenTiles, EdenTilesLaunch, TURNS, tile_position},
    screen::{EdenScreen, Screen},
    transform::EdenTransform,
};
use crate::{
    cube::{eden::LINES, ptx},
    launch::{buffer, multiprocessors, units},
    memory::address_type,
    reference::EDEN_GROUP,
    tensor::{FloatKind, Matrix},
};

/// Tiles whose screening results a plane inspects together: one per unit.
const SEEN: usize = 32;

/// Cubes per SM of each search, at 64 registers per unit.
const CUBES_OF_SM: usize = 2;

/// The search along the rows of a matrix, or across them.
#[derive(CubeType, CubeLaunch)]
pub struct EdenSearch {
    /// Tiles.
    pub tiles: EdenTiles,
    /// Screening results.
    pub screen: EdenScreen,
    /// Amax: one word, initially zero.
    pub amax: Box<[Atomic<u32>]>,
    /// Signs of the transform.
    pub signs: EdenSigns,
}

#[cube]
impl EdenSearch {
    /// Raises the amax to the largest magnitude of `source`. Every other cube calls it.
    fn run<N: Size>(
        &mut self,
        source: &EdenStored<u32, N>,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) {
        let count = self.tiles.row_tiles * self.tiles.shape.tile_cols;
        let planes = CUBE_DIM as usize / 32usize;
        // The turns of all tiles that are inspected together, in sequence.
        let end = count.div_ceil(SEEN) * TURNS;
        let mut index = CUBE_POS / 2usize * planes + UNIT_POS as usize / 32usize;
        let step = CUBE_COUNT / 2usize * planes;
        let mut bits = 0u32;
        let mut is_raised = false.runtime();
        while index < end {
            let first = index / TURNS * SEEN;
            let seen = first + UNIT_POS_PLANE as usize;
            let may = self.screen.may_hold_largest(min(seen, count - 1usize));
            let mut wanted = ptx::vote_sync_ballot(u32::cast_from(may && seen < count));
            if wanted != 0u32 {
                let signs = self.signs.resolve(policy.redrawn_signs);
                let reading = Reading::new(1.0f32, self.tiles.shape.cols, &signs, policy);
                while wanted != 0u32 {
                    let tile = first + usize::cast_from(u32::trailing_zeros(wanted));
                    let at = tile_position(tile, &self.tiles, policy);
                    let turn = index % TURNS;
                    let found = plane_amax::<u32, N>(source, turn, &at, reading, policy, kind);
                    bits = max(bits, found);
                    wanted &= wanted - 1u32;
                }
                is_raised = true;
            }
            index += step;
        }
        if is_raised {
            atomic_amax(&mut self.amax, 0usize, bits, policy);
        }
    }
}

/// Computes the amax values of a matrix of 16-bit elements after both transforms, one per search.
/// `vectors` and `pairs` are the same memory, whose rows have a multiple of eight elements. The
/// number of cubes must be even: even cubes search along the rows, odd cubes across them.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_pair_kernel(
    vectors: EdenStored<u32, Const<4>>,
    pairs: EdenStored<u32, Const<1>>,
    mut along: EdenSearch,
    mut across: EdenSearch,
    #[comptime] policies: [EdenPolicy; 2],
    #[comptime] kind: FloatKind,
) {
    if CUBE_POS % 2usize == 1usize {
        across.run::<Const<1>>(&pairs, comptime!(policies[1]), kind);
    } else {
        along.run::<Const<4>>(&vectors, comptime!(policies[0]), kind);
    }
}

/// Launch arguments of a search.
pub(super) struct Search<'a> {
    /// Configuration of the kernel that processes all tiles.
    pub policy: EdenPolicy,
    /// Tiles.
    pub tiles: EdenTilesLaunch,
    /// Number of tiles.
    pub tile_count: usize,
    /// Screening results.
    pub screen: &'a Screen,
    /// Transform.
    pub transform: &'a EdenTransform,
    /// Amax: one word, initially zero.
    pub amax: &'a Handle,
}

impl Search<'_> {
    fn arg(self) -> EdenSearchLaunch {
        // SAFETY: as much was allocated.
        let amax = unsafe { buffer(self.amax, 1) };
        let signs = self.transform.arg(self.amax);
        EdenSearchLaunch::new(self.tiles, self.screen.arg(), amax, signs)
    }
}

/// Searches a screened matrix along and across its rows.
pub(super) fn search_pair(client: &Client, matrix: &Matrix, searches: [Search<'_>; 2]) {
    let policies = searches.each_ref().map(|search| EdenPolicy {
        planes_of_tile: TURNS,
        ..search.policy
    });
    let [along, across] = searches;
    let most = along.tile_count.max(across.tile_count);
    let planes = units(client) / 32;
    let cubes = (most.div_ceil(SEEN) * TURNS)
        .div_ceil(planes)
        .clamp(1, CUBES_OF_SM * multiprocessors(client));
    // SAFETY: the matrix was checked against its memory, the rest was allocated, and the kernel
    // masks every access by the shape.
    unsafe {
        ms_eden_amax_pair_kernel::launch_unchecked(
            client,
            CubeCount::Static(2 * cubes as u32, 1, 1),
            CubeDim::new_1d(32 * planes as u32),
            address_type(most * LINES * EDEN_GROUP),
            EdenStoredArgs::Matrix(buffer(&matrix.handle, matrix.len() / 8)),
            EdenStoredArgs::Matrix(buffer(&matrix.handle, matrix.len() / 2)),
            along.arg(),
            across.arg(),
            policies,
            matrix.dtype,
        );
    }
}
