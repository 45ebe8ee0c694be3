//! Storage forms of quantized tensors.

use nvfp4_formats::ScaleLayout;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_formats::Storage;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_formats::reference::swizzle::TILE_INNER;
#[cfg(feature = "cubecl-backend")]
use nvfp4_formats::{Layout, Usage};

/// Storage form of a quantized tensor. It affects only the number of passes before a GEMM, never
/// the result.
///
/// The Flex backend stores rows of scales instead of tiles: its GEMMs read rows, and nothing else
/// reads the scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredForm {
    /// Codes, and block scales in this layout. 128x4 tiles begin anew at each matrix of a stack,
    /// and at each group of rows of a row-wise tensor. A column-wise tensor of grouped tokens,
    /// which must be MXFP8, has the tiles of one matrix.
    Packed(ScaleLayout),
    /// Column-wise NVFP4 tensor of tokens, with block scales in 128x4 tiles: padded with zero
    /// tokens to a multiple of 64, and each group of tokens too, so that the scales of all groups
    /// are one matrix.
    WholeTiles,
    /// Code times block scale in bf16; for one matrix only.
    Bf16Unscaled,
}

impl StoredForm {
    /// Codes, and block scales in rows.
    pub const ROWS: Self = Self::Packed(ScaleLayout::Compact);
    /// Codes, and block scales in 128x4 tiles.
    pub const TILES: Self = Self::Packed(ScaleLayout::Swizzled128x4);

    /// Returns the kind of storage.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(super) fn storage(self) -> Storage {
        match self {
            Self::Packed(_) | Self::WholeTiles => Storage::Packed,
            Self::Bf16Unscaled => Storage::Bf16Unscaled,
        }
    }

    /// Returns the layout of the block scales.
    pub(super) fn scale_layout(self) -> ScaleLayout {
        match self {
            Self::Packed(layout) => layout,
            Self::WholeTiles => ScaleLayout::Swizzled128x4,
            Self::Bf16Unscaled => ScaleLayout::Compact,
        }
    }

    /// Returns the layout in this form of a tensor with the packed `layout`.
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

    /// Returns the unit to whose multiple a column-wise tensor of tokens is padded; at least
    /// `unit`.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(super) fn unit(self, unit: usize) -> usize {
        match self {
            Self::WholeTiles => unit.max(TILE_INNER),
            Self::Packed(_) | Self::Bf16Unscaled => unit,
        }
    }
}
