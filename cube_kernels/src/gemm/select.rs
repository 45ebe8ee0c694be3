//! Which tile a shape takes, with the measurements behind it.

use cubecl::client::Client;

use super::sm90::{TILE_M, Tile};

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

/// The tile whose waves over the processors cost least, and the height of a band.
pub(super) fn tile(client: &Client, m: usize, n: usize) -> (Tile, usize) {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let processors = processors.unwrap_or(132) as usize;
    let cost = |&(tile, cost): &(Tile, f64)| {
        let tiles = m.div_ceil(TILE_M) * n.div_ceil(tile.n());
        tiles.div_ceil(processors) as f64 * cost
    };
    let best = TILES.iter().min_by(|x, y| cost(x).total_cmp(&cost(y)));
    (best.map_or(Tile::N256, |&(tile, _)| tile), BAND)
}
