//! Tiles of heads in shared memory: their layout, copies by `cp.async`, and reads by `ldmatrix`.
//!
//! A tile has one row per token. Rows are as long as the head, rounded up to 64 bytes. Their
//! 16-byte chunks are swizzled, so that the same chunk of eight rows, which `ldmatrix` reads at a
//! time, is in different banks.

use cubecl::prelude::*;

use crate::cube::ptx::{cp_async_zfill, cvta_to_global, ld_shared_v4, st_shared};

/// Layout of a tile's rows in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Elements per head, a multiple of 16.
    pub head: usize,
}

impl Tile {
    /// Returns the bytes from one row to the next.
    pub const fn pitch(self) -> usize {
        self.head.div_ceil(32) * 64
    }

    /// Returns the 16-byte chunks per row.
    pub const fn chunks(self) -> usize {
        self.head / 8
    }

    /// Returns the bits of a chunk's index that are swizzled. Eight chunks cover the 128 bytes of
    /// all banks; if rows are an odd multiple of 64 bytes, two rows together cover them.
    const fn mask(self) -> u32 {
        if self.pitch().is_multiple_of(128) {
            7
        } else {
            3
        }
    }
}

/// Returns the value that the index of a chunk in row `row` is XORed with.
#[cube]
fn swizzle(row: u32, #[comptime] tile: Tile) -> u32 {
    if comptime!(tile.mask() == 7) {
        row & 7u32
    } else {
        (row >> 1u32) & 3u32
    }
}

/// Returns the offset of chunk `chunk` of row `row` in a tile.
#[cube]
pub fn chunk_offset(row: u32, chunk: u32, #[comptime] tile: Tile) -> u32 {
    row * comptime!(tile.pitch() as u32) + ((chunk ^ swizzle(row, tile)) << 4u32)
}

/// Heads of tokens in device memory: the first head of token `t` starts `offset + t * stride`
/// vectors of 16 bytes after the start of the memory, and is followed by the token's other heads.
#[derive(CubeType, CubeLaunch)]
pub struct HeadsView {
    /// Memory of the heads.
    pub data: Box<[u32]>,
    /// Vectors before the first token's first head.
    pub offset: u32,
    /// Vectors from one token to the next.
    pub stride: u32,
}

/// One head of consecutive tokens in device memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Source {
    /// Address of the head of token 0.
    address: u64,
    /// Bytes from one token to the next.
    stride: u64,
}

#[cube]
impl HeadsView {
    /// Returns head `head` from token `first` on.
    pub fn source(&self, head: u32, first: u32, #[comptime] tile: Tile) -> Source {
        let stride = u64::cast_from(self.stride) * 16u64;
        let vectors = u64::cast_from(self.offset + head * comptime!(tile.chunks() as u32));
        Source {
            address: cvta_to_global::<u32>(self.data.as_ptr())
                + vectors * 16u64
                + u64::cast_from(first) * stride,
            stride,
        }
    }
}

/// Starts copies of tokens `first..first + rows` to the tile at `target`, with zeros for tokens
/// from `end` on.
#[allow(
    clippy::if_same_then_else,
    reason = "a comptime condition is decided before the other"
)]
#[cube]
pub fn copy_rows(
    source: Source,
    target: u32,
    first: u32,
    end: u32,
    #[comptime] rows: usize,
    #[comptime] units: usize,
    #[comptime] tile: Tile,
) {
    let items = comptime!(rows * tile.chunks());
    #[unroll]
    for i in 0..comptime!(items.div_ceil(units)) {
        let item = UNIT_POS + comptime!((i * units) as u32);
        if comptime!((i + 1) * units <= items) {
            copy_item(source, target, first, end, item, tile);
        } else if item < comptime!(items as u32) {
            copy_item(source, target, first, end, item, tile);
        }
    }
}

/// Starts the copy of chunk `item` of the tile.
#[cube]
fn copy_item(source: Source, target: u32, first: u32, end: u32, item: u32, #[comptime] tile: Tile) {
    let row = item / comptime!(tile.chunks() as u32);
    let chunk = item % comptime!(tile.chunks() as u32);
    let inside = first + row < end;
    // Tokens out of range are not read; their address is that of the first token.
    let at = u64::cast_from(first + row) * source.stride + u64::cast_from(chunk * 16u32);
    cp_async_zfill(
        target + chunk_offset(row, chunk, tile),
        source.address + select(inside, at, 0u64),
        select(inside, 16u32, 0u32),
        16u32,
    );
}

/// Returns this lane's address for a fragment of 16 rows from `row` (a multiple of 16) on and their
/// first 16 elements: for the left operand by `ldmatrix`, or, transposed, for a right operand whose
/// K dimension is along the rows.
#[cube]
pub fn fragment_rows(tile_at: u32, row: u32, #[comptime] tile: Tile) -> u32 {
    let lane = UNIT_POS % 32u32;
    tile_at + chunk_offset(row + lane % 16u32, lane / 16u32, tile)
}

/// Returns this lane's address for a right operand whose K dimension is along the elements.
#[cube]
pub fn fragment_columns(tile_at: u32, row: u32, #[comptime] tile: Tile) -> u32 {
    let lane = UNIT_POS % 32u32;
    let line = lane % 8u32 + (lane / 16u32) * 8u32;
    tile_at + chunk_offset(row + line, (lane / 8u32) % 2u32, tile)
}

/// Returns the address of the fragment `step` times 16 elements further in the same rows.
#[cube]
pub fn along_head(at: u32, #[comptime] step: usize, #[comptime] tile: Tile) -> u32 {
    // The lower bits of a chunk's index are XORed, the upper ones are added.
    let low = comptime!(((2 * step as u32) & tile.mask()) << 4);
    let high = comptime!(((2 * step as u32) & !tile.mask()) << 4);
    (at ^ low) + high
}

/// Stores the pair of elements `2 * pair` of chunk `chunk` of row `row` to the tile at `tile_at`.
#[cube]
pub fn store_pair(
    tile_at: u32,
    row: u32,
    #[comptime] chunk: usize,
    pair: u32,
    word: u32,
    #[comptime] tile: Tile,
) {
    let at = tile_at + chunk_offset(row, comptime!(chunk as u32).runtime(), tile) + pair * 4u32;
    st_shared(at, word);
}

/// Loads chunk `chunk` of row `row` of the tile at `tile_at`.
#[cube]
pub fn load_chunk(
    tile_at: u32,
    row: u32,
    chunk: u32,
    #[comptime] tile: Tile,
) -> Vector<u32, Const<4>> {
    ld_shared_v4(tile_at + chunk_offset(row, chunk, tile))
}
