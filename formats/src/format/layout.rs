//! Layout of the buffers of a quantized matrix.

use serde::{Deserialize, Serialize};

use super::{block::Format, swizzle};
use crate::policy::{AmaxGranularity, BlockScaling, Hadamard, StoredForm};

/// Axis of the source along which blocks lie; it decides which GEMM operand the quantized tensor
/// can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// Blocks along each row; stored in the orientation of the source.
    Rowwise,
    /// Blocks down each column; stored transposed.
    Columnwise,
}

impl Usage {
    /// Returns the usage that has the same blocks in the transposed matrix.
    pub const fn transposed(self) -> Self {
        match self {
            Self::Rowwise => Self::Columnwise,
            Self::Columnwise => Self::Rowwise,
        }
    }

    /// Returns `(outer, inner)` of a quantized `rows` x `cols` matrix: the number of stored rows,
    /// and the length of the blocked axis before padding.
    pub const fn stored_shape(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Self::Rowwise => (rows, cols),
            Self::Columnwise => (cols, rows),
        }
    }
}

/// Layout of the buffers of a quantized matrix, on the host, on a device and in Burn.
///
/// The source is `rows` x `cols`. The quantized tensor has `outer` stored rows of `inner` elements:
/// the source for [`Usage::Rowwise`], its transpose for [`Usage::Columnwise`]. Stored rows are
/// padded with zeros to a multiple of [`unit`](Self::unit).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Number of rows of the source matrix.
    pub rows: usize,
    /// Number of columns of the source matrix.
    pub cols: usize,
    /// Axis of the source along which blocks lie.
    pub usage: Usage,
    /// Block format.
    pub format: Format,
    /// Form of the buffers. That of a tensor padded to whole tiles is [`StoredForm::Tiles`].
    pub form: StoredForm,
    /// Rule for the block scales, which decides the range that an amax stands for.
    pub scaling: BlockScaling,
    /// Granularity of the amax, if the format has a global scale.
    pub amax: AmaxGranularity,
    /// Transform that was applied along the blocks.
    pub hadamard: Option<Hadamard>,
}

impl Layout {
    /// Returns the layout in `form` of a packed tensor with this layout.
    pub fn in_form(self, form: StoredForm) -> Self {
        let rows = match self.usage {
            Usage::Columnwise => self.rows.next_multiple_of(form.unit(1)),
            Usage::Rowwise => self.rows,
        };
        Self {
            rows,
            form: form.of_padded(),
            ..self
        }
    }

    /// Returns a layout of codes and compact scales with standard block scales, one amax and no
    /// transform.
    pub const fn new(format: Format, (rows, cols): (usize, usize), usage: Usage) -> Self {
        Self {
            rows,
            cols,
            usage,
            format,
            form: StoredForm::Rows,
            scaling: BlockScaling::Standard,
            amax: AmaxGranularity::PerTensor,
            hadamard: None,
        }
    }

    /// Returns [`Self::new`] for NVFP4.
    pub const fn nvfp4(rows: usize, cols: usize, usage: Usage) -> Self {
        Self::new(Format::Nvfp4, (rows, cols), usage)
    }

    /// Returns the number of stored rows.
    pub const fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Returns the length of a stored row, without padding.
    pub const fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Returns the number of elements of a block or of a transform, to a multiple of which stored
    /// rows are padded.
    pub const fn unit(&self) -> usize {
        match &self.hadamard {
            None => self.format.block(),
            Some(hadamard) => hadamard.size().elements(),
        }
    }

    /// Returns the number of blocks of one stored row, including padding.
    pub const fn blocks(&self) -> usize {
        let unit = self.unit();
        self.inner().div_ceil(unit) * (unit / self.format.block())
    }

    /// Returns the number of elements of one stored row, including padding.
    pub const fn padded_inner(&self) -> usize {
        self.blocks() * self.format.block()
    }

    /// Returns the size in bytes of one block's codes, or of its bf16 values if these are stored.
    pub const fn block_bytes(&self) -> usize {
        let bits = match self.form.is_packed() {
            true => self.format.code_bits(),
            false => 16,
        };
        self.format.block() * bits / 8
    }

    /// Returns the size in bytes of the codes, or of the bf16 values.
    pub const fn code_bytes(&self) -> usize {
        self.outer() * self.blocks() * self.block_bytes()
    }

    /// Returns the size in bytes of the block scales; 0 for bf16 values.
    pub const fn scale_bytes(&self) -> usize {
        match self.form {
            StoredForm::Bf16Unscaled => 0,
            StoredForm::Rows => self.outer() * self.blocks(),
            StoredForm::Tiles | StoredForm::WholeTiles => {
                swizzle::padded_len(self.outer(), self.blocks())
            }
        }
    }

    /// Returns the number of amax values; 0 if the format has no global scale.
    pub const fn amax_len(&self) -> usize {
        match self.amax {
            _ if !self.format.has_global_scale() => 0,
            AmaxGranularity::PerTensor => 1,
            AmaxGranularity::PerRow => self.outer(),
        }
    }

    /// Returns the layout of the stored matrix as it is in memory, including padding, seen as the
    /// rowwise tensor of a matrix.
    pub const fn stored(&self) -> Self {
        Self {
            rows: self.outer(),
            cols: self.padded_inner(),
            usage: Usage::Rowwise,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_format_and_form() {
        let packed = Layout::nvfp4(3, 40, Usage::Rowwise);
        let tiles = Layout {
            form: StoredForm::Tiles,
            ..packed
        };
        let bf16 = Layout {
            form: StoredForm::Bf16Unscaled,
            ..packed
        };
        let mxfp8 = Layout::new(Format::Mxfp8, (40, 3), Usage::Columnwise);
        // Three blocks of 16 per row, or two of 32.
        for (layout, codes, scales) in [
            (packed, 3 * 3 * 8, 3 * 3),
            (tiles, 3 * 3 * 8, 128 * 4),
            (bf16, 3 * 3 * 32, 0),
            (mxfp8, 3 * 2 * 32, 3 * 2),
        ] {
            let bytes = (layout.code_bytes(), layout.scale_bytes());
            assert_eq!(bytes, (codes, scales), "{layout:?}");
        }
    }
}
