//! The random Hadamard transform; see [`reference::transform`](crate::reference::transform).

use cubecl::prelude::*;

use super::codec::round_to_bf16;

/// Transforms 16 values in place, rounded to bf16. Bit `i` of `signs` negates element `i`.
#[cube]
pub fn transform(block: &mut Array<f32>, signs: u32) {
    #[unroll]
    for i in 0..16usize {
        let flip = ((signs >> comptime!(i as u32)) & 1u32) << 31u32;
        block[i] = f32::reinterpret(u32::reinterpret(block[i]) ^ flip);
    }
    #[unroll]
    for stage in 0..4u32 {
        let distance = comptime!(1usize << stage);
        #[unroll]
        for i in 0..16usize {
            if comptime!(i & distance == 0) {
                let a = block[i];
                let b = block[comptime!(i + distance)];
                block[i] = a + b;
                block[comptime!(i + distance)] = a - b;
            }
        }
    }
    #[unroll]
    for i in 0..16usize {
        block[i] = round_to_bf16(block[i] * 0.25f32);
    }
}
