//! Stochastic rounding of four values by one random word on a device, which answers the questions
//! of [`reference::read_random_bits`](crate::reference::read_random_bits).

use cubecl::prelude::*;

use crate::launch::{buffer, grid};
use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, conversion_of},
    cube::{
        codec::{Conversion, INFINITY, MAGNITUDE, QUIET_NAN, round_stochastic, software_word},
        ptx,
    },
    memory::{allocate, download},
    reference::{Question, read_random_bits, round_in_order},
};

/// Returns true if the device has an instruction for stochastic rounding to E2M1.
pub fn has_stochastic_instruction(client: &Client) -> bool {
    Capabilities::of(client).conversion == Conversion::Hardware
}

/// Makes the oracle of this process round stochastically as the device does: it takes random bits
/// in the order that the device's answers show. For tests: call it before anything is quantized on
/// the host.
///
/// # Errors
/// Returns an error if no order of eight bits for each element explains the answers.
///
/// # Panics
/// See [`round_in_order`].
pub fn match_random_bits(client: &Client) -> Result<(), Nvfp4Error> {
    if Capabilities::of(client).conversion.has_stochastic() {
        let ask = |questions: &[Question]| answer_random_bits(client, questions);
        round_in_order(read_random_bits(ask)?);
    }
    Ok(())
}

/// Returns the codes of each question, element 0 in the lowest nibble, waiting for the device. Uses
/// `cvt.rs.satfinite.e2m1x4.f32` if the device has it, and otherwise the software form, in which
/// byte `i` of the word rounds element `i`.
///
/// The instruction has never run, because no GPU that has it was available.
///
/// # Errors
/// Returns an error if the kernel failed.
pub fn answer_random_bits(client: &Client, questions: &[Question]) -> Result<Vec<u16>, Nvfp4Error> {
    if questions.is_empty() {
        return Ok(Vec::new());
    }
    let values: Vec<f32> = questions.iter().flat_map(|(values, _)| *values).collect();
    let words: Vec<u32> = questions.iter().map(|(_, word)| *word).collect();
    let count = questions.len();
    let values = client.create_from_slice(bytemuck::cast_slice(&values));
    let words = client.create_from_slice(bytemuck::cast_slice(&words));
    let codes = allocate(client, 4 * count);
    let (cubes, dim) = grid(client, count);
    // SAFETY: the buffers hold four values, one word and one result for each question.
    unsafe {
        random_bits_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            buffer(&values, 4 * count),
            buffer(&words, count),
            buffer(&codes, count),
            count,
            conversion_of(client),
        );
    }
    let codes = download(client, &codes, 4 * count)?;
    let codes = codes.chunks_exact(4);
    Ok(codes
        .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
        .collect())
}

/// Each unit answers every `units`-th question.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn random_bits_kernel(
    values: &[f32],
    words: &[u32],
    codes: &mut [u32],
    count: usize,
    #[comptime] conversion: Conversion,
) {
    let mut item = ABSOLUTE_POS;
    while item < count {
        let word = words[item];
        if comptime!(conversion == Conversion::Hardware) {
            let mut eight = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                eight[i] = values[4 * item + comptime!(i % 4)];
            }
            codes[item] = ptx::cvt_rs_e2m1x8(&eight, 0usize, word, word) & 0xFFFFu32;
        } else {
            let word = software_word(word, conversion);
            let mut four = 0u32;
            #[unroll]
            for i in 0..4usize {
                let element = comptime!(3 - i);
                // Canonicalizes NaN to positive, as every operation of the device would produce it.
                let bits = u32::reinterpret(values[4 * item + element]);
                let value = f32::reinterpret(select(bits & MAGNITUDE > INFINITY, QUIET_NAN, bits));
                four = four * 16u32
                    + round_stochastic(value, word, comptime!(element as u32), conversion);
            }
            codes[item] = four;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
