//! Unscaled values of blocks: code times block scale in bf16, which is exact, without the global
//! scale. GEMMs on devices without FP4 instructions multiply them.

use cubecl::prelude::*;

use super::{
    block::Encoded,
    codec::{Conversion, decode_e2m1, decode_e2m1x8_sm80, decode_e4m3},
    ptx,
};

/// Returns the E4M3 scale `byte` as a bf16 in both halves of a word, exactly: a bf16 is the upper
/// half of an `f32`.
#[cube]
pub fn scale_pair(byte: u32) -> u32 {
    let scale = u32::reinterpret(decode_e4m3(byte)) >> 16u32;
    scale | (scale << 16u32)
}

/// Returns the values of a word of eight codes with the scale `pair` of [`scale_pair()`], in order.
#[cube]
pub fn unscaled_word(
    codes: u32,
    pair: u32,
    #[comptime] conversion: Conversion,
) -> Vector<u32, Const<4>> {
    if comptime!(conversion.has_ptx()) {
        decode_e2m1x8_sm80(u32::reinterpret(codes), u32::reinterpret(pair))
    } else {
        let scale = f32::reinterpret(pair & 0xFFFF_0000u32);
        let mut values = Vector::<u32, Const<4>>::empty();
        #[unroll]
        for i in 0..4usize {
            let two = codes >> comptime!(8 * i as u32);
            let low = u32::reinterpret(decode_e2m1(two) * scale);
            let high = u32::reinterpret(decode_e2m1(two >> 4u32) * scale);
            values.insert(i, (low >> 16u32) | (high & 0xFFFF_0000u32));
        }
        values
    }
}

/// Writes the values of block `at`, given its 16 codes and its scale byte, if it is `inside`.
///
/// On a GPU neighbouring units, an even one and the next, must have neighbouring blocks, and all
/// units of the plane must call it. Each writes a half of both blocks, so that one instruction of
/// two units writes the 32 bytes of a whole sector.
#[cube]
pub fn store_unscaled_block(
    out: &mut [Vector<u32, Const<4>>],
    at: usize,
    block: &Encoded,
    inside: bool,
    #[comptime] conversion: Conversion,
) {
    let pair = scale_pair(block.scale);
    let low = block.codes.extract(0usize);
    let high = block.codes.extract(1usize);
    if comptime!(conversion.has_ptx()) {
        let odd = UNIT_POS % 2u32;
        let is_odd = odd == 1u32;
        // A scale has no sign, so the sign bit tells if the block is inside.
        let own = pair | (u32::cast_from(inside) << 31u32);
        let other = of_neighbour(own);
        let taken = of_neighbour(select(is_odd, low, high));
        let vector = at * 2usize - odd as usize;
        let first = select(is_odd, other, own);
        if first >= 0x8000_0000u32 {
            let codes = select(is_odd, taken, low);
            out[vector] = unscaled_word(codes, first & 0x7FFF_FFFFu32, conversion);
        }
        let second = select(is_odd, own, other);
        if second >= 0x8000_0000u32 {
            let codes = select(is_odd, high, taken);
            out[vector + 2usize] = unscaled_word(codes, second & 0x7FFF_FFFFu32, conversion);
        }
    } else if inside {
        out[at * 2usize] = unscaled_word(low, pair, conversion);
        out[at * 2usize + 1usize] = unscaled_word(high, pair, conversion);
    }
}

/// Returns `word` of the other one of two neighbouring units.
#[cube]
fn of_neighbour(word: u32) -> u32 {
    u32::reinterpret(ptx::shfl_sync_bfly(f32::reinterpret(word), 1u32))
}
