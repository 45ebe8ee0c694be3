//! What the buffers of a quantized matrix mean.

use serde::{Deserialize, Serialize};

use super::{block::Format, swizzle};
use crate::policy::{AmaxGranularity, BlockScaling, Hadamard, ScaleLayout, Storage};

/// Which operand of a GEMM a quantized tensor is: the axis of its source along which blocks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// Blocks along each row; stored in the orientation of the source.
    Rowwise,
    /// Blocks down each column; stored transposed.
    Columnwise,
}

impl Usage {
    /// The usage with the same blocks of the transposed matrix.
    pub const fn transposed(self) -> Self {
        match self {
            Self::Rowwise => Self::Columnwise,
            Self::Columnwise => Self::Rowwise,
        }
    }

    /// `(outer, inner)` of a quantized `rows` x `cols` matrix: stored rows, and the length of the
    /// blocked axis before padding.
    pub const fn stored_shape(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Self::Rowwise => (rows, cols),
            Self::Columnwise => (cols, rows),
        }
    }
}

/// What the buffers of a quantized matrix mean, on the host, on a device and in Burn.
///
/// The source is `rows` x `cols`. The quantized tensor has `outer` stored rows of `inner` elements:
/// the source for [`Usage::Rowwise`], its transpose for [`Usage::Columnwise`]. Stored rows are
/// padded with zeros to a multiple of [`unit`](Self::unit).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Rows of the source matrix.
    pub rows: usize,
    /// Columns of the source matrix.
    pub cols: usize,
    /// The axis of the source along which blocks lie.
    pub usage: Usage,
    /// The block format.
    pub format: Format,
    /// Order of the block scales.
    pub scale_layout: ScaleLayout,
    /// How block scales were found, which decides the range that an amax stands for.
    pub scaling: BlockScaling,
    /// How many elements share one amax, where the format has a global scale.
    pub amax: AmaxGranularity,
    /// The transform that was applied along the blocks.
    pub hadamard: Option<Hadamard>,
    /// Codes and scales, or their bf16 products.
    pub storage: Storage,
}

impl Layout {
    /// Codes and compact scales, standard block scales, one amax, no transform.
    pub const fn new(format: Format, (rows, cols): (usize, usize), usage: Usage) -> Self {
        Self {
            rows,
            cols,
            usage,
            format,
            scale_layout: ScaleLayout::Compact,
            scaling: BlockScaling::Standard,
            amax: AmaxGranularity::PerTensor,
            hadamard: None,
            storage: Storage::Packed,
        }
    }

    /// [`Self::new`] in NVFP4.
    pub const fn nvfp4(rows: usize, cols: usize, usage: Usage) -> Self {
        Self::new(Format::Nvfp4, (rows, cols), usage)
    }

    /// Stored rows.
    pub const fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of a stored row, without padding.
    pub const fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Elements to whose multiple stored rows are padded: those of a block, or of a transform.
    pub const fn unit(&self) -> usize {
        match &self.hadamard {
            None => self.format.block(),
            Some(hadamard) => hadamard.size().elements(),
        }
    }

    /// Blocks in one stored row, with padding.
    pub const fn blocks(&self) -> usize {
        let unit = self.unit();
        self.inner().div_ceil(unit) * (unit / self.format.block())
    }

    /// Elements of one stored row, with padding.
    pub const fn padded_inner(&self) -> usize {
        self.blocks() * self.format.block()
    }

    /// Bytes of the codes of one block; of its bf16 values where these are stored.
    pub const fn block_bytes(&self) -> usize {
        match self.storage {
            Storage::Packed => self.format.block() * self.format.code_bits() / 8,
            Storage::Bf16Unscaled => self.format.block() * 2,
        }
    }

    /// Bytes of the codes, or of the bf16 values.
    pub const fn code_bytes(&self) -> usize {
        self.outer() * self.blocks() * self.block_bytes()
    }

    /// Bytes of the block scales, in their order; bf16 values have none.
    pub const fn scale_bytes(&self) -> usize {
        match (self.storage, self.scale_layout) {
            (Storage::Bf16Unscaled, _) => 0,
            (Storage::Packed, ScaleLayout::Compact) => self.outer() * self.blocks(),
            (Storage::Packed, ScaleLayout::Swizzled128x4) => {
                swizzle::padded_len(self.outer(), self.blocks())
            }
        }
    }

    /// Number of amax values; none where the format has no global scale.
    pub const fn amax_len(&self) -> usize {
        match self.amax {
            _ if !self.format.has_global_scale() => 0,
            AmaxGranularity::PerTensor => 1,
            AmaxGranularity::PerRow => self.outer(),
        }
    }

    /// The stored matrix as it lies in memory, padding included, as the rowwise tensor of a matrix.
    pub const fn stored(&self) -> Self {
        Self {
            rows: self.outer(),
            cols: self.padded_inner(),
            usage: Usage::Rowwise,
            ..*self
        }
    }
}
