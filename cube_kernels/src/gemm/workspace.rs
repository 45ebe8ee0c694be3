//! Packed operands as bf16, exactly and without the factor of the tensor.

use cubecl::{prelude::*, server::Handle};

use crate::{
    BLOCK,
    cube::{codec::decode_e4m3, ptx_sm90::decode_e2m1x8},
    device::{DevicePacked, address_type, allocate},
};

/// Units of a cube.
const UNITS: usize = 256;
/// Words that a unit decodes, all loaded before the first is stored.
const WORDS: usize = 4;

/// One word of eight codes becomes 16 bytes of eight bf16: a warp reads 128 bytes of codes and writes
/// 512 at a time.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn decode_kernel(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<u32, Const<4>>],
    words: usize,
) {
    let first = CUBE_POS * comptime!(UNITS * WORDS) + UNIT_POS as usize;
    let mut loaded = Array::<u32>::new(WORDS);
    let mut bytes = Array::<u32>::new(WORDS);
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        // What lies outside reads the first word and is not stored.
        let word = select(word < words, word, 0usize);
        loaded[i] = codes[word];
        bytes[i] = u32::cast_from(scales[word / 2usize]);
    }
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        // An E4M3 value is exact in bf16, the upper half of an f32.
        let scale = u32::reinterpret(decode_e4m3(bytes[i])) >> 16u32;
        let scale = scale | (scale << 16u32);
        if word < words {
            out[word] = decode_e2m1x8(u32::reinterpret(loaded[i]), scale);
        }
    }
}

/// A bf16 copy of `packed`: `outer` rows of `blocks * 16` elements, without the factor of its
/// maximum. It lives until the last product that reads it has run.
pub fn decode(client: &Client, packed: &DevicePacked) -> Handle {
    let words = packed.outer() * packed.blocks() * 2;
    let out = allocate(client, words * 16);
    if words == 0 {
        return out;
    }
    // SAFETY: the operand was checked against its shape, and the kernel stays below `words`.
    unsafe {
        decode_kernel::launch_unchecked(
            client,
            CubeCount::Static(words.div_ceil(UNITS * WORDS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(words / 2 * BLOCK),
            BufferArg::from_raw_parts(packed.codes.clone(), words),
            BufferArg::from_raw_parts(packed.scales.clone(), words / 2),
            BufferArg::from_raw_parts(out.clone(), words),
            words,
        );
    }
    out
}
