//! Choice of the tile for a shape: from measurements on sm_90, from a model on sm_100.

use super::{
    operand::OperandLayout,
    problem::{GemmShape, Problem},
    scheduler::GroupedDim,
    stream_k::{StreamK, stages_of, tiles_of},
    tiles::{Sm90Tile, W4A16_MN_TILE_N, W4a16MnTile, W4a16Tile},
};

/// Microseconds that a CTA takes per tile with K = 8192, for the kernel that reads bf16.
///
/// Measured (H100, bf16 operands, TFLOP/s of 128 x 256 / 128 x 128 / 128 x 64): 8192 cubed 798 /
/// 640 / -, 4096 cubed 762 / 682 / 440, 2048 cubed 667 / 627 / 487, 256 x 8192 x 8192 (a narrow
/// tile fills more SMs) 427 / 597 / 466, 128 x 8192 x 8192 216 / 312 / 329. 128 x 176 takes 0.74 of
/// the time of 128 x 256 (H200).
const BF16: [(Sm90Tile, f64); 4] = [
    (Sm90Tile::N256, 89.0),
    (Sm90Tile::N176, 65.5),
    (Sm90Tile::N128, 49.0),
    (Sm90Tile::N64, 32.0),
];

/// Microseconds that a CTA takes per tile with K = 8192, for the kernel that dequantizes `b` in
/// registers. Entries are `rows_a`, `ways` and the time.
///
/// Measured (H100, both operands packed, N = K = 8192, with enough rows of `a` that each SM has one
/// tile, including all of the GEMM's own work; the first entry with an earlier main loop). The
/// entry of 192 rows was estimated as 0.79 of the first; a weight gradient of 768 x 4096 x 16384
/// later took 0.80, 157 and 195 microseconds. The entry of 112 rows was interpolated; with it a
/// step of `quartet2`, in which 12 weight gradients are 768 x 2304 x 16384, took 36.13 ms, and
/// 36.46 ms without. Groups, 8192 rows x 4096 x 7168, microseconds with tiles of 256 / 128 rows: 32
/// equal groups 711 / 794, 32 of unequal size 996 / 1008.
const W4A16: [(usize, usize, f64); 7] = [
    (256, 1, 94.0),
    (192, 1, 74.0),
    (128, 1, 52.0),
    (112, 1, 46.6),
    (128, 2, 39.0),
    (64, 2, 27.0),
    (32, 4, 26.0),
];

/// Microseconds to dequantize a row of 8192 elements to bf16: 2.56 bytes per element at 2.7 TB/s.
const DEQUANTIZE_ROW: f64 = 0.0078;

/// Height, in tiles, of a band of tiles that run at the same time: with 132 SMs and tiles of 128 x
/// 256, a band of 16 reads about as many rows of `a` as of `b` at a time.
///
/// Measured (H100, 128 x 256, TFLOP/s for bands of 2 / 4 / 8 / 16): 8192 cubed 759 / 781 / 782 /
/// 789, 4096 cubed 755 / 762 / 762 / 767, 8192 x 14336 x 4096 705 / 758 / 767 / 771.
pub(crate) const BAND: usize = 16;

/// Returns the microseconds to dequantize `rows` rows of an operand.
fn dequantize(operand: OperandLayout, rows: usize) -> f64 {
    match operand {
        OperandLayout::Packed => rows as f64 * DEQUANTIZE_ROW,
        OperandLayout::Mxfp8
        | OperandLayout::KMajor
        | OperandLayout::MnMajor
        | OperandLayout::PackedMnMajor => 0.0,
    }
}

/// Returns the number of waves: tiles per SM, rounded up.
fn waves(tiles: usize, sms: usize) -> f64 {
    tiles.div_ceil(sms) as f64
}

/// Returns the tile of the kernel that reads bf16, the height of its bands and the estimated time.
pub(crate) fn sm90_bf16(sms: usize, problem: &Problem) -> (Sm90Tile, usize, f64) {
    let GemmShape { m, n, .. } = problem.shape;
    // Every group along K has its own output.
    let outputs = match problem.grouped {
        GroupedDim::K => problem.groups,
        GroupedDim::None | GroupedDim::M => 1,
    };
    let before = dequantize(problem.a, m) + dequantize(problem.b, n * problem.groups);
    let b_mn_major = problem.b == OperandLayout::MnMajor;
    let possible = BF16
        .into_iter()
        .filter(|(tile, _)| !b_mn_major || tile.takes_mn_major());
    let estimates = possible.map(|(tile, cost)| {
        let tiles = outputs * tiles_of(problem.shape, tile);
        (tile, BAND, waves(tiles, sms) * cost + before)
    });
    cheapest(estimates)
}

/// Microseconds that stream-K costs with tiles of 128 x 256 if the owner of a tile adds up to two
/// partial tiles: clearing counters, writing partial tiles, and waiting for them.
///
/// Measured (H100, microseconds beyond the share of the K dimension, 128 x 256 tiles): 768 x 2304 x
/// 16384 27, 768 x 4096 x 16384 37, 2048 x 768 x 16384 17, 1024 x 1024 x 8192 17, 2048 x 6144 x
/// 8192 25. For 768 x 768 x 16384: 28 with nine partial tiles per owner, 11 with four of 128 x 128,
/// and 25 with tiles of 128 x 64.
const EXCHANGE: f64 = 25.0;

/// Microseconds per further partial tile of 128 x 256.
const PARTIAL_TILE: f64 = 4.0;

/// Factor on the estimate of a single wave that leaves SMs idle: the busy ones get a higher clock
/// and more of the L2 cache. Measured (H100): 0.87 with 96 tiles of 128 x 256, 0.85 with 36 of 128
/// x 128, 0.92 with 108.
const PARTIAL_WAVE: f64 = 0.87;

/// Returns the tile, height of bands and estimated time of the stream-K kernel for a dense GEMM;
/// the time is infinite if whole tiles take no longer. The storage order of bf16 operands does not
/// affect the choice: stream-K changes the order of sums, which should not depend on it.
pub(crate) fn sm90_stream_k(sms: usize, problem: &Problem) -> (Sm90Tile, usize, f64) {
    let GemmShape { m, n, k } = problem.shape;
    let before = dequantize(problem.a, m) + dequantize(problem.b, n);
    let depth = stages_of(k);
    let shared = BF16.into_iter().filter_map(|(tile, cost)| {
        // After whole waves, stream-K has never won. Narrow tiles take as long to exchange.
        let plan = StreamK::of(tiles_of(problem.shape, tile), depth, sms)
            .filter(|plan| plan.whole == 0 && matches!(tile, Sm90Tile::N256 | Sm90Tile::N128))?;
        let waves = plan.slice as f64 / depth as f64;
        let further = plan.partials_of_tile().saturating_sub(2) * tile.n();
        let exchange = (EXCHANGE * tile.n() as f64 + PARTIAL_TILE * further as f64) / 256.0;
        // Unlike all other costs here, these do not grow with K.
        Some((tile, BAND, waves * cost + exchange * 8192.0 / k as f64))
    });
    let none = (Sm90Tile::N256, BAND, f64::INFINITY);
    let (tile, band, estimate) = cheapest(shared.chain([none]));
    let whole = BF16.into_iter().map(|(tile, cost)| {
        let tiles = tiles_of(problem.shape, tile);
        let idle = if tiles < sms { PARTIAL_WAVE } else { 1.0 };
        (tile, BAND, waves(tiles, sms) * cost * idle)
    });
    match estimate < cheapest(whole).2 {
        true => (tile, band, estimate + before),
        false => none,
    }
}

/// Returns the tile, height of bands and estimated time of the kernel that dequantizes `b` in
/// registers, for a dense GEMM.
pub(crate) fn sm90_w4a16(sms: usize, problem: &Problem) -> (W4a16Tile, usize, f64) {
    let GemmShape { m, n, .. } = problem.shape;
    let before = dequantize(problem.a, m);
    cheapest(W4A16.into_iter().map(|(rows_a, ways, cost)| {
        let tile = W4a16Tile { rows_a, ways };
        let tiles = m.div_ceil(rows_a) * n.div_ceil(tile.rows_b());
        (tile, BAND, waves(tiles, sms) * cost + before)
    }))
}

/// Returns the tile and height of bands of that kernel with groups along M. No time is estimated:
/// it is always this kernel, since its instructions for a tile at the end of a group are only as
/// wide as the rows that are left.
pub(crate) fn sm90_w4a16_grouped(problem: &Problem) -> (W4a16Tile, usize) {
    let (m, groups) = (problem.shape.m, problem.groups);
    let rows_a = if m.div_ceil(groups) < 256 { 128 } else { 256 };
    // A band holds only tiles of one group: they read the same rows of `b`, whereas tiles of other
    // groups only evict each other's rows of `a` from the cache (H100, with bands of 16 instead: 32
    // equal groups 682 us instead of 670, 128 groups 1101 instead of 1055).
    let band = (m / (groups * rows_a)).clamp(1, BAND);
    (W4a16Tile { rows_a, ways: 1 }, band)
}

/// Time per tile of the kernel for a packed MN-major `b`, relative to a tile of 128 rows: one of 64
/// rows dequantizes as much for half of the instructions. Measured (H100, 4096 x 4096 x 14336): 675
/// and 978 µs, the latter for twice as many tiles.
const W4A16_MN_MAJOR: [(W4a16MnTile, f64); 2] =
    [(W4a16MnTile::M128, 1.0), (W4a16MnTile::M64, 0.73)];

/// Returns the tile and height of bands of the kernel for a packed MN-major `b`. Groups are assumed
/// to have the average number of rows, and bands are as in [`sm90_w4a16_grouped`].
pub(crate) fn sm90_w4a16_mn_major(sms: usize, problem: &Problem) -> (W4a16MnTile, usize) {
    let (GemmShape { m, n, .. }, groups) = (problem.shape, problem.groups);
    let rows = m.div_ceil(groups);
    let estimates = W4A16_MN_MAJOR.into_iter().map(|(tile, cost)| {
        let tiles = groups * rows.div_ceil(tile.rows_a()) * n.div_ceil(W4A16_MN_TILE_N);
        let band = match problem.grouped {
            GroupedDim::M => (rows / tile.rows_a()).clamp(1, BAND),
            GroupedDim::None | GroupedDim::K => BAND,
        };
        (tile, band, waves(tiles, sms) * cost)
    });
    let (tile, band, _) = cheapest(estimates);
    (tile, band)
}

/// Returns the first of the lowest estimates.
fn cheapest<T>(estimates: impl Iterator<Item = (T, usize, f64)>) -> (T, usize, f64) {
    estimates
        .min_by(|x, y| x.2.total_cmp(&y.2))
        .expect("there are tiles")
}
