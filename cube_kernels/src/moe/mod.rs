//! Mixture of experts: groups of rows (the tokens of an expert), their permutation, padding and
//! sums.
//!
//! Groups are defined by offsets in device memory ([`GroupOffsets`]), so no launch waits for the
//! device.

// `#[cube]` generates public items that cannot carry documentation.
mod earlier;
#[allow(missing_docs)]
pub(crate) mod groups;
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
pub use permute::{Named, moe_permute, moe_unpermute, moe_unpermute_backward};
pub use router::{
    DeviceRouted, DeviceSortedChoices, route, route_backward, router_losses,
    router_losses_backward, sort_choices,
};
pub use segments::{broadcast_group_values, segment_sum, zero_padding_rows};
pub use window::{DeviceChoiceWindow, sort_window};

/// Kernels, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        groups::{GroupRowsLaunch, rescale_kernel},
        padding::{MovePlan, move_groups_kernel},
        permute::{
            UnpermuteBackwardPlan, UnpermutePlan, WeightedRowsLaunch, moe_permute_kernel,
            moe_unpermute_backward_kernel, moe_unpermute_kernel,
        },
        router::kernel::{
            RoutedArgsLaunch, RouterArgsLaunch, RouterOutLaunch, RouterPlan, RouterSumsLaunch,
            SortedKeysLaunch, choice_places_kernel, route_backward_kernel, route_kernel,
            route_sums_kernel,
        },
        segments::{broadcast_group_values_kernel, segment_sum_kernel, zero_padding_rows_kernel},
        window::{ChoiceWindowLaunch, window_places_kernel},
    };
}
