//! Stages of the W4A16 kernel for an MN-major `b`: the warps that load block scales, and the
//! addresses of a lane's codes and scales.

use cubecl::prelude::*;

use super::super::w4a16::TilePlace;
use super::tiles::{W4a16MnMajorPlan, place_of, steps_of, tile_columns, tile_rows};
#[cfg(doc)]
use crate::cube::ptx::sm90_mainloop_w4a16_mn_major::mn_major_mainloop_n128;
use crate::{
    cube::{
        codec::decode_e4m3_pair,
        ptx::{
            cvta_to_global, ld_global_no_allocate_v4, mbarrier_arrive, mbarrier_wait_parity, prmt,
            sm90_mainloop_w4a16_mn_major::{MnMajorStage, STAGE_K, STAGE_SCALES, STEP_SCALES},
            st_shared,
        },
    },
    gemm::arguments::{GroupedProblem, thread_in_cta},
};

/// Warps that load scales.
const CARRIERS: u32 = 3;

/// Addresses in shared memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedAddresses {
    pub full: u32,
    pub empty: u32,
    pub a: u32,
    pub codes: u32,
    pub scales: u32,
}

/// A scale-loading warp: fills every `CARRIERS`th stage of this cube. A lane has the 16 blocks of
/// two neighbouring K indices, which it loads before the stage is empty. Scales outside the matrix
/// are zeros, since no scale there may be NaN.
#[cube]
pub(super) fn bring_scales(
    b_scales: &[u16],
    problem: &GroupedProblem,
    shared: SharedAddresses,
    #[comptime] plan: W4a16MnMajorPlan,
) {
    let stages = comptime!(plan.tile.stages() as u32);
    let steps = steps_of(problem);
    let own = thread_in_cta() / 32u32 - 1u32;
    let lane = UNIT_POS % 32u32;
    let to = shared.scales + place_of_scales(lane);
    let mut tile = CUBE_POS as u32;
    let mut group = 0u32;
    let mut passed = 0u32;
    let mut used = 0u32;
    while group < problem.shape.groups {
        let rows = tile_rows(problem, group, plan);
        let tiles = rows * tile_columns(problem);
        if tile - passed < tiles {
            let at = place_of(problem, group, tile - passed, rows, plan);
            for step in 0..steps {
                if used % CARRIERS == own {
                    let stage = used % stages;
                    let parity = ((used / stages) & 1u32) ^ 1u32;
                    let depth = step * comptime!(STAGE_K as u32) + 2u32 * lane;
                    let even = load_scales(b_scales, problem, at, depth);
                    let odd = load_scales(b_scales, problem, at, depth + 1u32);
                    mbarrier_wait_parity(shared.empty + stage * 8u32, parity);
                    let to = to + stage * comptime!(STAGE_SCALES as u32);
                    #[unroll]
                    for word in 0..4usize {
                        let (x, y) = (even.extract(word), odd.extract(word));
                        // Two blocks of both K indices.
                        let low = prmt(x, y, 0x5140u32);
                        let high = prmt(x, y, 0x7362u32);
                        let to = to + comptime!(4 * 32 * word as u32);
                        st_shared(to, decode_e4m3_pair(low));
                        st_shared(to + 32u32, decode_e4m3_pair(low >> 16u32));
                        st_shared(to + 64u32, decode_e4m3_pair(high));
                        st_shared(to + 96u32, decode_e4m3_pair(high >> 16u32));
                    }
                    mbarrier_arrive(shared.full + stage * 8u32);
                }
                used += 1u32;
            }
            tile += CUBE_COUNT as u32;
        } else {
            passed += tiles;
            group += 1u32;
        }
    }
}

/// Returns the offset in a stage of the scales of the first block at K indices `2 lane` and
/// `2 lane + 1`. Each pair is one word, and a step of 16 K indices has the order of
/// [`mn_major_mainloop_n128()`].
#[cube]
fn place_of_scales(lane: u32) -> u32 {
    (lane / 8u32) * comptime!(STEP_SCALES as u32)
        + (lane % 4u32) * 8u32
        + ((lane / 4u32) & 1u32) * 4u32
}

/// Returns the scales of the 16 blocks of the tile at `at`, at K index `depth` of its group: with
/// one load if rows of scales have whole vectors, otherwise in pairs, which is always possible.
#[cube]
fn load_scales(
    b_scales: &[u16],
    problem: &GroupedProblem,
    at: TilePlace,
    depth: u32,
) -> Vector<u32, Const<4>> {
    let pairs = problem.shape.n / 32u32;
    let first = at.column / 32u32;
    let mut words = Vector::<u32, Const<4>>::new(0u32);
    if depth < problem.shape.k {
        let row = (at.group * problem.shape.k + depth) as usize * pairs as usize;
        if pairs.is_multiple_of(8u32) {
            let from = cvta_to_global::<u16>(b_scales.as_ptr());
            words = ld_global_no_allocate_v4(from + 2u64 * u64::cast_from(row + first as usize));
        } else {
            #[unroll]
            for word in 0..4usize {
                let pair = first + comptime!(2 * word as u32);
                let mut four = 0u32;
                if pair < pairs {
                    four = u32::cast_from(b_scales[row + pair as usize]);
                }
                if pair + 1u32 < pairs {
                    four |= u32::cast_from(b_scales[row + pair as usize + 1usize]) << 16u32;
                }
                words.insert(word, four);
            }
        }
    }
    words
}

/// Returns the addresses that a lane of the warp of `strip` reads in stage 0. The TMA swizzle
/// permutes the 16-byte chunks of a row: strip `s` of row `r` is at `s ^ (r % 8)`.
#[cube]
pub(super) fn lane_of_stage(shared: SharedAddresses, strip: u32, lane: u32) -> MnMajorStage {
    let row = 2u32 * (lane % 4u32);
    let codes = shared.codes + (lane / 4u32) * 2u32;
    MnMajorStage {
        even: codes + row * 128u32 + (strip ^ row) * 16u32,
        odd: codes + (row + 1u32) * 128u32 + (strip ^ (row + 1u32)) * 16u32,
        scales: shared.scales + (strip * 2u32 + lane / 16u32) * 32u32 + (lane % 4u32) * 8u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cube::ptx::sm90_mainloop_w4a16_mn_major::STAGE_CODES;

    const SHARED: SharedAddresses = SharedAddresses {
        full: 0,
        empty: 0,
        a: 0,
        codes: 0,
        scales: 1 << 20,
    };

    /// Each lane reads the codes that TMA loads, and the scales that `bring_scales` stores, for the
    /// positions of its fragments and of the rows of its sums.
    #[test]
    fn lanes_read_what_their_fragments_want() {
        // K index and first of the four columns of each two bytes, by address: the 16-byte chunks
        // of row `r` are permuted by `r % 8`.
        let mut codes = vec![None; STAGE_CODES / 2];
        for (row, two) in (0..STAGE_K).flat_map(|row| (0..64).map(move |two| (row, two))) {
            let address = row * 128 + ((two / 8) ^ (row % 8)) * 16 + two % 8 * 2;
            assert!(codes[address / 2].replace((row, 4 * two)).is_none());
        }
        // For scales: the first K index of a pair, and the block.
        let mut scales = vec![None; STAGE_SCALES / 4];
        for (lane, block) in (0..32u32).flat_map(|lane| (0..16u32).map(move |block| (lane, block)))
        {
            let address = (place_of_scales(lane) + 32 * block) as usize;
            let pair = (2 * lane as usize, block as usize);
            assert!(scales[address / 4].replace(pair).is_none());
        }
        for (warp, lane) in (0..8).flat_map(|warp| (0..32).map(move |lane| (warp, lane))) {
            let packed = lane_of_stage(SHARED, warp, lane);
            let (quad, four) = (lane as usize % 4, lane as usize / 4);
            let columns = warp as usize * 32 + 4 * four;
            for step in 0..STAGE_K / 16 {
                // "Register Fragments for wgmma": k of the registers of both halves.
                for (offset, k) in [(0, 2 * quad), (1024, 2 * quad + 8)] {
                    let k = 16 * step + k;
                    for (address, k) in [(packed.even, k), (packed.odd, k + 1)] {
                        let address = address as usize + 2048 * step + offset;
                        assert_eq!(codes[address / 2], Some((k, columns)), "{warp}, {lane}");
                    }
                    let address = (packed.scales - SHARED.scales) as usize + step * STEP_SCALES;
                    let pair = Some((k, columns / 16));
                    assert_eq!(scales[(address + offset / 256) / 4], pair, "{warp}, {lane}");
                }
            }
        }
    }

    /// A warp's simultaneous reads are in different banks, and so are its writes.
    #[test]
    fn no_two_words_share_a_bank() {
        let distinct = |addresses: &mut dyn Iterator<Item = u32>| {
            let mut words: Vec<u32> = addresses.map(|address| address / 4).collect();
            words.sort_unstable();
            words.dedup();
            let mut banks: Vec<u32> = words.iter().map(|word| word % 32).collect();
            banks.sort_unstable();
            banks.windows(2).all(|two| two[0] != two[1])
        };
        for warp in 0..8 {
            let lanes = || (0..32).map(move |lane| lane_of_stage(SHARED, warp, lane));
            assert!(distinct(&mut lanes().map(|lane| lane.even)), "{warp}");
            assert!(distinct(&mut lanes().map(|lane| lane.odd)), "{warp}");
            let scales = lanes().flat_map(|lane| [lane.scales, lane.scales + 4]);
            assert!(distinct(&mut scales.into_iter()), "{warp}");
        }
        assert!(distinct(&mut (0..32).map(place_of_scales)));
    }
}
