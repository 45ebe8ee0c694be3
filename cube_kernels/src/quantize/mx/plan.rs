//! Allocation of microscaling tensors, and comptime configuration of their kernels.

use cubecl::client::Client;

use super::super::{target::TargetSpec, tile::Grouping};
use crate::{
    Layout, Usage,
    capabilities::Capabilities,
    format::block::ElementFormat,
    reference::padding::padded_bound,
    tensor::{DeviceQuantized, FloatKind, Groups},
};

/// Common comptime configuration of all microscaling kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxPlan {
    /// Element format.
    pub element: ElementFormat,
    /// True if the device converts to E4M3 in hardware.
    pub hardware: bool,
    /// Element type of the matrix, or of the dequantized values.
    pub kind: FloatKind,
    /// True if the output scales are in 128x4 tiles.
    pub swizzled: bool,
}

impl MxPlan {
    pub(super) fn new(client: &Client, target: &TargetSpec, kind: FloatKind) -> Self {
        Self {
            element: target.params.format.element(),
            hardware: has_e4m3(client),
            kind,
            swizzled: target.form.has_tiles(),
        }
    }

    /// Returns the codes per word.
    pub(super) const fn per_word(&self) -> usize {
        32 / self.element.bits()
    }

    /// Returns the words of codes per block of 32: the number of bits of a code.
    pub(super) const fn block_words(&self) -> usize {
        self.element.bits()
    }
}

/// Comptime configuration of a kernel over blocks along stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MxRowPlan {
    /// True if rows consist of whole blocks.
    pub dense: bool,
    /// Units that share a block.
    pub lanes: usize,
    /// Representation of row groups if blocks are processed by 128x4 tiles of scales; `None` for
    /// row by row.
    pub tiles: Option<Grouping>,
    /// Common configuration.
    pub mx: MxPlan,
}

/// Allocates the tensors of groups in one plain matrix; see
/// [`mx_quantize`](super::quantize::mx_quantize).
pub(super) fn empty_of_groups(
    client: &Client,
    (rows, cols): (usize, usize),
    groups: &Groups,
    usage: Usage,
    target: &TargetSpec,
) -> DeviceQuantized {
    let format = target.params.format;
    let (shape, stored) = match (groups, usage) {
        (Groups::Batch(count), Usage::Columnwise) => ((count * cols, rows / count), Usage::Rowwise),
        (Groups::Offsets { count, .. }, Usage::Columnwise) => {
            ((padded_bound(rows, *count, format.block()), cols), usage)
        }
        _ => ((rows, cols), usage),
    };
    // Groups at which tiles of scales start anew.
    let groups = match (target.form.has_tiles(), groups, usage) {
        (false, ..) | (_, Groups::Offsets { .. }, Usage::Columnwise) => Groups::One,
        (true, groups, _) => groups.clone(),
    };
    let layout = Layout {
        form: target.form.of_padded(),
        ..Layout::new(format, shape, stored)
    };
    DeviceQuantized::empty_unscaled(client, layout, groups)
}

/// Returns true if the device converts to E4M3 in hardware: sm_89 and later.
fn has_e4m3(client: &Client) -> bool {
    let capability = Capabilities::of(client).compute_capability;
    capability.is_some_and(|capability| capability >= 89)
}
