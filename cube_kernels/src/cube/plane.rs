//! Reductions over a plane of 32 units by exchanges, in the same order on every device.

use cubecl::prelude::*;

use super::{codec::Conversion, ptx};

/// Returns `value` of the unit of this plane whose index differs by the bits of `mask`.
#[cube]
pub fn exchange(value: f32, #[comptime] mask: u32, #[comptime] conversion: Conversion) -> f32 {
    if comptime!(conversion.has_ptx()) {
        ptx::shfl_sync_bfly(value, mask)
    } else {
        plane_shuffle_xor(value, mask)
    }
}

/// Returns the largest value of a plane.
#[cube]
pub fn plane_largest(value: f32, #[comptime] conversion: Conversion) -> f32 {
    let mut largest = value;
    #[unroll]
    for stage in 0..5u32 {
        largest = max(
            largest,
            exchange(largest, comptime!(1u32 << stage), conversion),
        );
    }
    largest
}

/// Returns the sum of a plane's values, in a tree of neighbours.
#[cube]
pub fn plane_tree(value: f32, #[comptime] conversion: Conversion) -> f32 {
    let mut sum = value;
    #[unroll]
    for stage in 0..5u32 {
        sum += exchange(sum, comptime!(1u32 << stage), conversion);
    }
    sum
}

/// Returns the largest integer of a plane.
#[cube]
pub fn plane_largest_u32(value: u32, #[comptime] conversion: Conversion) -> u32 {
    let mut largest = value;
    #[unroll]
    for stage in 0..5u32 {
        // Moves the bits unchanged.
        let other = exchange(
            f32::reinterpret(largest),
            comptime!(1u32 << stage),
            conversion,
        );
        largest = max(largest, u32::reinterpret(other));
    }
    largest
}
