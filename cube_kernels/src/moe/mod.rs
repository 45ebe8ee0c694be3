//! Mixture of experts: groups of rows (the tokens of an expert), their permutation, padding and
//! sums.
//!
//! Groups are defined by offsets in device memory ([`GroupOffsets`]), so no launch waits for the
//! device.

// `#[cube]` generates public items that cannot carry documentation.
mod earlier;
#[allow(missing_docs)]
pub(crate) mod groups;
#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)]
mod padding;
#[allow(missing_docs)]
mod permute;
#[allow(missing_docs)]
pub(crate) mod router;
#[allow(missing_docs)]
pub(crate) mod segments;
#[allow(missing_docs)]
mod window;

pub use earlier::EarlierGroups;
pub use groups::GroupOffsets;
pub use padding::{pad_groups, pad_groups_only, unpad_groups};
pub use permute::{
    Named, moe_permute, moe_permute_with_amaxes, moe_unpermute, moe_unpermute_backward,
};
pub use router::{
    DeviceRouted, DeviceSortedChoices, route, route_backward, router_losses,
    router_losses_backward, sort_choices,
};
pub use segments::{broadcast_group_values, column_sums, segment_sum, zero_padding_rows};
pub use window::{DeviceChoiceWindow, sort_window};
