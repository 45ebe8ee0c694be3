//! Which tile a shape takes: on sm_90 with the measurements behind it, on sm_100 by a model.

use super::{
    operand::OperandLayout,
    problem::{GemmShape, Problem},
    scheduler::GroupedDim,
    stream_k::{StreamK, stages_of, tiles_of},
    tiles::{SM100_TILE_M, SM100_TILE_N, Sm90Tile, W4A16_MN_TILE_N, W4a16MnTile, W4a16Tile},
};

/// Microseconds that a CTA takes for a tile with a contraction of 8192, the kernel that reads bf16.
///
/// Measured (H100, bf16 operands, TFLOP/s of 128 x 256 / 128 x 128 / 128 x 64): 8192 cubed 798 /
/// 640 / -, 4096 cubed 762 / 682 / 440, 2048 cubed 667 / 627 / 487, 256 x 8192 x 8192 (a narrow
/// tile fills more SMs) 427 / 597 / 466, 128 x 8192 x 8192 216 / 312 / 329. Of 128 x 176: 0.74 of
/// 128 x 256 (H200).
const BF16: [(Sm90Tile, f64); 4] = [
    (Sm90Tile::N256, 89.0),
    (Sm90Tile::N176, 65.5),
    (Sm90Tile::N128, 49.0),
    (Sm90Tile::N64, 32.0),
];

/// The same for the kernel that dequantizes `b` in registers, of tiles that hold `rows_a` x `ways`.
///
/// Measured (H100, both operands packed, N = K = 8192, so many rows of `a` that each SM has one
/// tile, all of the GEMM's own work included; the first with an earlier main loop). That of 192 rows
/// was estimated from the first, 0.79 of it; a weight gradient of 768 x 4096 x 16384 then took 0.80,
/// 157 and 195 microseconds. That of 112 rows was interpolated; with it a step of `quartet2`, 12 of
/// whose weight gradients are of 768 x 2304 x 16384, took 36.13 ms, and 36.46 without. Groups, 8192
/// rows x 4096 x 7168, microseconds with tiles of 256 / 128 rows: 32 equal groups 711 / 794, 32 of
/// unequal size 996 / 1008.
const W4A16: [(usize, usize, f64); 7] = [
    (256, 1, 94.0),
    (192, 1, 74.0),
    (128, 1, 52.0),
    (112, 1, 46.6),
    (128, 2, 39.0),
    (64, 2, 27.0),
    (32, 4, 26.0),
];

/// Microseconds for dequantizing a row of 8192 elements to bf16: 2.56 bytes an element at 2.7 TB/s.
const DEQUANTIZE_ROW: f64 = 0.0078;

/// Height of a band of tiles that run at the same time, in tiles: with 132 SMs and tiles of 128 x
/// 256, a band of 16 reads about as many rows of either operand at a time.
///
/// Measured (H100, 128 x 256, TFLOP/s for bands of 2 / 4 / 8 / 16): 8192 cubed 759 / 781 / 782 /
/// 789, 4096 cubed 755 / 762 / 762 / 767, 8192 x 14336 x 4096 705 / 758 / 767 / 771.
pub(crate) const BAND: usize = 16;

/// Microseconds for dequantizing `rows` rows of an operand.
fn dequantize(operand: OperandLayout, rows: usize) -> f64 {
    match operand {
        OperandLayout::Packed => rows as f64 * DEQUANTIZE_ROW,
        OperandLayout::Mxfp8
        | OperandLayout::KMajor
        | OperandLayout::MnMajor
        | OperandLayout::PackedMnMajor => 0.0,
    }
}

/// How often all SMs take a tile each.
fn waves(tiles: usize, sms: usize) -> f64 {
    tiles.div_ceil(sms) as f64
}

/// The tile of the kernel that reads bf16, the height of its bands and the estimated time.
pub(crate) fn sm90_bf16(sms: usize, problem: &Problem) -> (Sm90Tile, usize, f64) {
    let GemmShape { m, n, .. } = problem.shape;
    // Every group along K has an output of its own.
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

/// Microseconds that sharing out tiles of 128 x 256 costs, where the owner of a tile adds up to two
/// partial tiles: counters are cleared, partial tiles are written, and owners wait for them.
///
/// Measured (H100, microseconds beyond the share of the contraction, 128 x 256 tiles): 768 x 2304 x
/// 16384 27, 768 x 4096 x 16384 37, 2048 x 768 x 16384 17, 1024 x 1024 x 8192 17, 2048 x 6144 x
/// 8192 25. Of 768 x 768 x 16384, with nine partial tiles for each owner 28, with four of 128 x
/// 128 11, and with tiles of 128 x 64 25.
const EXCHANGE: f64 = 25.0;

/// Microseconds for each further partial tile of 128 x 256.
const PARTIAL_TILE: f64 = 4.0;

/// The share of its estimate that a single wave takes that leaves SMs idle: the others have more of
/// the clock and of the L2 cache. Measured (H100): 0.87 with 96 tiles of 128 x 256, 0.85 with 36 of
/// 128 x 128, 0.92 with 108.
const PARTIAL_WAVE: f64 = 0.87;

/// The same for the kernel that shares tiles out along the contraction, of a dense GEMM; infinite
/// where whole tiles take no longer. How operands in bf16 are stored decides nothing: sums of
/// shared tiles have another order, and should not depend on it.
pub(crate) fn sm90_stream_k(sms: usize, problem: &Problem) -> (Sm90Tile, usize, f64) {
    let GemmShape { m, n, k } = problem.shape;
    let before = dequantize(problem.a, m) + dequantize(problem.b, n);
    let depth = stages_of(k);
    let shared = BF16.into_iter().filter_map(|(tile, cost)| {
        // Behind whole waves it has never won, and narrow tiles take as long to exchange.
        let plan = StreamK::of(tiles_of(problem.shape, tile), depth, sms)
            .filter(|plan| plan.whole == 0 && matches!(tile, Sm90Tile::N256 | Sm90Tile::N128))?;
        let waves = plan.slice as f64 / depth as f64;
        let further = plan.partials_of_tile().saturating_sub(2) * tile.n();
        let exchange = (EXCHANGE * tile.n() as f64 + PARTIAL_TILE * further as f64) / 256.0;
        // These costs do not grow with the contraction, unlike all others here.
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

/// The same for the kernel that dequantizes `b` in registers, of a dense GEMM.
pub(crate) fn sm90_w4a16(sms: usize, problem: &Problem) -> (W4a16Tile, usize, f64) {
    let GemmShape { m, n, .. } = problem.shape;
    let before = dequantize(problem.a, m);
    cheapest(W4A16.into_iter().map(|(rows_a, ways, cost)| {
        let tile = W4a16Tile { rows_a, ways };
        let tiles = m.div_ceil(rows_a) * n.div_ceil(tile.rows_b());
        (tile, BAND, waves(tiles, sms) * cost + before)
    }))
}

/// The same with groups along M: always this kernel, since a tile at the end of a group is as
/// narrow as its rows.
pub(crate) fn sm90_w4a16_grouped(problem: &Problem) -> (W4a16Tile, usize) {
    let (m, groups) = (problem.shape.m, problem.groups);
    let rows_a = if m.div_ceil(groups) < 256 { 128 } else { 256 };
    // A band holds rows of tiles of one group, and no more: they read the same rows of `b`, those
    // of other groups only push each other's rows of `a` out of the cache (H100, bands of 16
    // instead: 32 equal groups 682 us instead of 670, 128 1101 instead of 1055).
    let band = (m / (groups * rows_a)).clamp(1, BAND);
    (W4a16Tile { rows_a, ways: 1 }, band)
}

/// What a tile of the kernel for a packed MN-major `b` takes, in units of one of 128 rows: one of
/// 64 rows dequantizes as much for half of the instructions. Measured (H100, 4096 x 4096 x 14336):
/// 675 and 978 µs, for twice as many tiles.
const W4A16_MN_MAJOR: [(W4a16MnTile, f64); 2] =
    [(W4a16MnTile::M128, 1.0), (W4a16MnTile::M64, 0.73)];

/// The tile of the kernel for a packed MN-major `b`, and the height of its bands. Groups have as
/// many rows as on average, and bands as in [`sm90_w4a16_grouped`].
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

/// Whether two CTAs share the tiles of the kernel for `tcgen05`, of a dense GEMM or one with groups
/// along M. A model: no such GPU was at hand.
///
/// In a wave each SM multiplies 128 x 256 at most and applies the epilogue to them, whether it has
/// a tile to itself or half of one of 256 x 256. Of two CTAs each loads half as much of `b`, 38,912
/// bytes of a stage instead of 55,296, so that a wave of pairs takes no longer. They share tiles
/// where that takes no more waves and the odd CTA has rows of its own: only an odd number of tiles
/// along M leaves CTAs of pairs idle. Groups have as many rows as on average.
pub(crate) fn sm100_two_ctas(sms: usize, problem: &Problem) -> bool {
    let GemmShape { m, n, .. } = problem.shape;
    let rows = m.div_ceil(problem.groups);
    let tiles = |tile_m| problem.groups * rows.div_ceil(tile_m) * n.div_ceil(SM100_TILE_N);
    let of_pairs = waves(tiles(2 * SM100_TILE_M), (sms / 2).max(1));
    rows > SM100_TILE_M && of_pairs <= waves(tiles(SM100_TILE_M), sms)
}

/// The first of the estimates that are the lowest.
fn cheapest<T>(estimates: impl Iterator<Item = (T, usize, f64)>) -> (T, usize, f64) {
    estimates
        .min_by(|x, y| x.2.total_cmp(&y.2))
        .expect("there are tiles")
}
