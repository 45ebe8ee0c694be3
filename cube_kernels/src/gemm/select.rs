//! Which tile a shape takes, with the measurements behind it.

use std::fmt;

use cubecl::client::Client;

use super::{
    product::{Elements, Operand},
    sm90::{Grouping, TILE_M, Tile},
    sm90_fused::{self, FusedTile},
};

/// Which kernels a product takes on Hopper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plan {
    /// `b` is decoded in registers; with the height of a band of tiles.
    Fused(FusedTile, usize),
    /// Few rows, `b` decoded in registers by a kernel without the copy engine.
    FewRows,
    /// Packed operands are decoded to bf16 before the product; with the height of a band.
    Decoded(Tile, usize),
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fused(tile, _) => {
                let (m, n) = (tile.rows_a, tile.rows_b());
                write!(f, "wgmma, packed `b` decoded in registers, tiles of {m} x {n}")
            }
            Self::FewRows => write!(f, "few rows, packed `b` decoded in registers, mma.sync"),
            Self::Decoded(tile, _) => {
                let n = tile.n();
                write!(f, "wgmma, packed operands decoded to bf16 before, tiles of {TILE_M} x {n}")
            }
        }
    }
}

/// Cost of a tile in units of a 128 x 256 one, by its width: what is lost to operand traffic.
///
/// Measured (H100, bf16 operands, TFLOP/s of 128 x 256 / 128 x 128 / 128 x 64): 8192 cubed 781 / 640 /
/// -, 4096 cubed 762 / 682 / 440, 2048 cubed 667 / 627 / 487, 256 x 8192 x 8192 (a narrow tile fills
/// more processors) 427 / 597 / 466, 128 x 8192 x 8192 216 / 312 / 329.
const TILES: [(Tile, f64); 3] = [(Tile::N256, 1.0), (Tile::N128, 0.55), (Tile::N64, 0.36)];

/// Height of a band of tiles that run side by side, in tiles: with 132 processors and tiles of 128 x
/// 256, a band of 16 reads about as many rows of either operand at a time.
///
/// Measured (H100, 128 x 256, TFLOP/s for bands of 2 / 4 / 8 / 16): 8192 cubed 759 / 781 / 782 / 789,
/// 4096 cubed 755 / 762 / 762 / 767, 8192 x 14336 x 4096 705 / 758 / 767 / 771.
const BAND: usize = 16;

/// The kernels for `a` times `b`, `m` x `n` with a contraction of `k` as stored, in `groups` groups.
pub fn plan(
    client: &Client,
    a: &Operand,
    b: &Operand,
    (m, n, k): (usize, usize, usize),
    grouping: Grouping,
    groups: usize,
) -> Plan {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let processors = processors.unwrap_or(132) as usize;
    let is_packed = |operand: &Operand| matches!(operand.elements, Elements::Packed(_));
    plan_of(processors, (is_packed(a), is_packed(b)), (m, n, k), grouping, groups)
}

/// [`plan`] from what decides it: the number of processors, and which operands are packed.
pub(super) fn plan_of(
    processors: usize,
    (_a_packed, b_packed): (bool, bool),
    (m, n, k): (usize, usize, usize),
    grouping: Grouping,
    groups: usize,
) -> Plan {
    if b_packed && sm90_fused::takes(k) && grouping != Grouping::Depth {
        // Rows in a group, on average.
        let rows = m.div_ceil(groups);
        if rows <= 256 || grouping == Grouping::Rows {
            return Plan::Fused(fused_tile(processors, rows, n), BAND);
        }
    }
    Plan::Decoded(tile(processors, m, n), BAND)
}

/// The tile for `rows` rows of `a`.
fn fused_tile(processors: usize, rows: usize, n: usize) -> FusedTile {
    let rows_a = rows.next_power_of_two().clamp(8, 256);
    let few = n.div_ceil(128) * rows.div_ceil(rows_a) < processors * 3 / 4;
    let (rows_a, ways) = match (rows_a, few) {
        (8..=32, _) => (rows_a, 4),
        (64, _) | (128, true) => (rows_a, 2),
        (256, true) => (128, 1),
        _ => (rows_a, 1),
    };
    FusedTile { rows_a, ways }
}

/// The tile whose waves over the processors cost least.
fn tile(processors: usize, m: usize, n: usize) -> Tile {
    let cost = |&(tile, cost): &(Tile, f64)| {
        let tiles = m.div_ceil(TILE_M) * n.div_ceil(tile.n());
        tiles.div_ceil(processors) as f64 * cost
    };
    let best = TILES.iter().min_by(|x, y| cost(x).total_cmp(&cost(y)));
    best.map_or(Tile::N256, |&(tile, _)| tile)
}
