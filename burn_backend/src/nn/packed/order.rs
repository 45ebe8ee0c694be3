//! Block scales of a stack of matrices, from rows to 128x4 tiles and back, by operations that every
//! backend has: once, where a weight is loaded or saved.

use burn_core::tensor::{DType, Int, Tensor};

/// The matrices that block scales are of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrices {
    /// Their number.
    pub(super) count: usize,
    /// Rows of each.
    pub(super) rows: usize,
    /// Blocks of a row.
    pub(super) blocks: usize,
}

impl Matrices {
    /// Tiles down and across a matrix.
    fn tiles(&self) -> (usize, usize) {
        (self.rows.div_ceil(128), self.blocks.div_ceil(4))
    }

    /// The `scales` in tiles that begin anew at each matrix, zeros behind its rows and blocks.
    pub(super) fn in_tiles(&self, scales: Tensor<2, Int>) -> Tensor<2, Int> {
        let (down, across) = self.tiles();
        let (rows, blocks) = (128 * down, 4 * across);
        let scales = scales.reshape([self.count, self.rows, self.blocks]);
        let scales = padded(scales, 1, rows);
        let scales = padded(scales, 2, blocks);
        // A tile is 32 lines of four rows, 32 apart, with four blocks each.
        let parts = scales.reshape([self.count * down, 4, 32, across, 4]);
        let tiles = parts.permute([0, 3, 2, 1, 4]);
        tiles.reshape([self.count * rows, blocks])
    }

    /// The `scales`, which are in tiles, in rows.
    pub(super) fn in_rows(&self, scales: Tensor<2, Int>) -> Tensor<2, Int> {
        let (down, across) = self.tiles();
        let tiles = scales.reshape([self.count * down, across, 32, 4, 4]);
        let rows = tiles.permute([0, 3, 2, 1, 4]);
        let rows = rows.reshape([self.count, 128 * down, 4 * across]);
        let own = rows.slice([0..self.count, 0..self.rows, 0..self.blocks]);
        own.reshape([self.count * self.rows, self.blocks])
    }
}

/// `x` with zeros behind it along `dim`, up to `len`.
fn padded(x: Tensor<3, Int>, dim: usize, len: usize) -> Tensor<3, Int> {
    let mut dims = x.dims();
    if dims[dim] == len {
        return x;
    }
    dims[dim] = len - dims[dim];
    let zeros = Tensor::zeros(dims, (&x.device(), DType::U8));
    Tensor::cat(vec![x, zeros], dim)
}
