//! What tensors in a microscaling format are made as, and what kernels choose for it.

use cubecl::client::Client;

use super::super::tile::Grouping;
use crate::{
    Format, Layout, ScaleLayout, Usage,
    capabilities::Capabilities,
    format::block::ElementFormat,
    reference::padding::padded_bound,
    tensor::{DeviceQuantized, FloatKind, Groups},
};

/// What a tensor in a microscaling format is made as; of a [`Format`], with scales in rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MxForm {
    /// The format.
    pub format: Format,
    /// The order of its block scales.
    pub layout: ScaleLayout,
}

impl From<Format> for MxForm {
    fn from(format: Format) -> Self {
        Self {
            format,
            layout: ScaleLayout::Compact,
        }
    }
}

/// The comptime choices of every kernel here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxPlan {
    /// The elements of the format.
    pub element: ElementFormat,
    /// Whether the device converts to E4M3.
    pub hardware: bool,
    /// The element type of the matrix, or the one that dequantized values are rounded to.
    pub kind: FloatKind,
    /// Whether the scales that are made lie in 128x4 tiles.
    pub swizzled: bool,
}

impl MxPlan {
    pub(super) fn new(client: &Client, form: MxForm, kind: FloatKind) -> Self {
        Self {
            element: form.format.element(),
            hardware: has_e4m3(client),
            kind,
            swizzled: form.layout == ScaleLayout::Swizzled128x4,
        }
    }

    /// Codes in a word.
    pub(super) const fn per_word(&self) -> usize {
        32 / self.element.bits()
    }

    /// Words of the codes of a block of 32: as many as a code has bits.
    pub(super) const fn block_words(&self) -> usize {
        self.element.bits()
    }
}

/// [`MxPlan`] of a kernel over blocks along stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxRowPlan {
    /// Whether rows are whole blocks.
    pub dense: bool,
    /// Units that share a block.
    pub lanes: usize,
    /// How rows are grouped where blocks are taken by 128x4 tiles of scales; else they are taken
    /// row by row.
    pub tiles: Option<Grouping>,
    /// What all kernels choose.
    pub mx: MxPlan,
}

/// Memory for the tensors of groups in one plain matrix; see [`mx_quantize_groups`].
pub(super) fn empty_of_groups(
    client: &Client,
    (rows, cols): (usize, usize),
    groups: &Groups,
    usage: Usage,
    form: MxForm,
) -> DeviceQuantized {
    let MxForm { format, layout } = form;
    let (shape, stored) = match (groups, usage) {
        (Groups::Batch(count), Usage::Columnwise) => ((count * cols, rows / count), Usage::Rowwise),
        (Groups::Offsets { count, .. }, Usage::Columnwise) => {
            ((padded_bound(rows, *count, format.block()), cols), usage)
        }
        _ => ((rows, cols), usage),
    };
    // Where tiles of scales begin anew.
    let groups = match (layout, groups, usage) {
        (ScaleLayout::Compact, ..) | (_, Groups::Offsets { .. }, Usage::Columnwise) => Groups::One,
        (ScaleLayout::Swizzled128x4, groups, _) => groups.clone(),
    };
    let layout = Layout {
        scale_layout: layout,
        ..Layout::new(format, shape, stored)
    };
    DeviceQuantized::empty_unscaled(client, layout, groups)
}

/// Whether the device converts to E4M3 itself: sm_89 and later.
fn has_e4m3(client: &Client) -> bool {
    let capability = Capabilities::of(client).compute_capability;
    capability.is_some_and(|capability| capability >= 89)
}
