//! An MXFP8 matrix on the host.

use serde::{Deserialize, Serialize};

use crate::{Nvfp4Error, PackedAxis};

/// Elements that share one UE8M0 scale.
pub const MX_BLOCK: usize = 32;

/// A matrix in MXFP8: E4M3 codes, and one UE8M0 scale for each block of 32 along the packed axis.
///
/// The source is `rows` x `cols`; what is stored is `outer` x `inner`, the source for
/// [`PackedAxis::Cols`] and its transpose for [`PackedAxis::Rows`]. Where `inner` is no multiple of
/// 32, the last block is padded with zeros. An element decodes to `e4m3(code) · 2^(scale - 127)`
/// (specification, section 10).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MxPacked {
    rows: usize,
    cols: usize,
    axis: PackedAxis,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl MxPacked {
    /// A packed matrix from its parts: `codes` is `[outer, blocks * 32]`, `scales` `[outer, blocks]`.
    ///
    /// # Errors
    /// When a length does not fit the shape.
    pub fn from_parts(
        (rows, cols): (usize, usize),
        axis: PackedAxis,
        codes: Vec<u8>,
        scales: Vec<u8>,
    ) -> Result<Self, Nvfp4Error> {
        let (outer, inner) = axis.stored_shape(rows, cols);
        let blocks = outer * inner.div_ceil(MX_BLOCK);
        let check = |argument, found: usize, expected: usize| {
            if found == expected {
                return Ok(());
            }
            Err(Nvfp4Error::shape(
                argument,
                format!("{found} bytes"),
                format!("{expected}, for {rows}x{cols} packed along {axis:?}"),
            ))
        };
        check("codes", codes.len(), blocks * MX_BLOCK)?;
        check("scales", scales.len(), blocks)?;
        Ok(Self {
            rows,
            cols,
            axis,
            codes,
            scales,
        })
    }

    /// Rows of the source matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The axis of the source along which it is packed.
    pub fn axis(&self) -> PackedAxis {
        self.axis
    }

    /// Stored rows.
    pub fn outer(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.axis.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        self.inner().div_ceil(MX_BLOCK)
    }

    /// The E4M3 codes: `[outer, blocks * 32]`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The UE8M0 scales: `[outer, blocks]`.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }
}
