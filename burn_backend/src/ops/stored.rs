//! How a quantized tensor is stored.

use nvfp4_kernels::ScaleLayout;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_kernels::Storage;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_kernels::reference::swizzle::TILE_INNER;
#[cfg(feature = "cubecl-backend")]
use nvfp4_kernels::{Layout, Usage};

/// How a quantized tensor is stored. No result of a GEMM depends on it, only how many passes there
/// are before the GEMM.
///
/// The Flex backend stores tiles of scales as rows: its GEMMs read these, and there is no other
/// reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredForm {
    /// Codes, and block scales in this order. 128x4 tiles begin anew at each matrix of a stack, and
    /// at each group of rows of a rowwise tensor. The columnwise tensor of tokens in groups, which
    /// is MXFP8 then, has the tiles of one matrix.
    Packed(ScaleLayout),
    /// The columnwise NVFP4 tensor of tokens, with block scales in 128x4 tiles: padded with zero
    /// tokens to a multiple of 64, and each group of tokens too, so that the scales of all are one
    /// matrix.
    WholeTiles,
    /// Code times block scale in bf16; of one matrix.
    Bf16Unscaled,
}

impl StoredForm {
    /// Codes, and block scales in rows.
    pub const ROWS: Self = Self::Packed(ScaleLayout::Compact);
    /// Codes, and block scales in 128x4 tiles.
    pub const TILES: Self = Self::Packed(ScaleLayout::Swizzled128x4);

    /// What is stored.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(super) fn storage(self) -> Storage {
        match self {
            Self::Packed(_) | Self::WholeTiles => Storage::Packed,
            Self::Bf16Unscaled => Storage::Bf16Unscaled,
        }
    }

    /// The order of the block scales.
    pub(super) fn scale_layout(self) -> ScaleLayout {
        match self {
            Self::Packed(layout) => layout,
            Self::WholeTiles => ScaleLayout::Swizzled128x4,
            Self::Bf16Unscaled => ScaleLayout::Compact,
        }
    }

    /// The layout in this form of what has the packed `layout`.
    #[cfg(feature = "cubecl-backend")]
    pub(super) fn layout_of(self, layout: Layout) -> Layout {
        let rows = match layout.usage {
            Usage::Columnwise => layout.rows.next_multiple_of(self.unit(1)),
            Usage::Rowwise => layout.rows,
        };
        Layout {
            rows,
            scale_layout: self.scale_layout(),
            ..layout
        }
    }

    /// The tokens to whose multiple a columnwise tensor of tokens is padded, `unit` at least.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(super) fn unit(self, unit: usize) -> usize {
        match self {
            Self::WholeTiles => unit.max(TILE_INNER),
            Self::Packed(_) | Self::Bf16Unscaled => unit,
        }
    }
}
