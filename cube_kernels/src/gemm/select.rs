//! Which tile a shape takes, with the measurements behind it.

use cubecl::client::Client;

use super::sm90::{TILE_M, Tile};

/// Cost of a tile in units of a 128 x 256 one, by its width: what is lost to operand traffic.
const TILES: [(Tile, f64); 3] = [(Tile::N256, 1.0), (Tile::N128, 0.55), (Tile::N64, 0.36)];

/// Height of a band of tiles that run side by side.
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
