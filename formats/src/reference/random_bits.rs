//! Determines by experiment which random bit rounds which element.
//!
//! `cvt.rs.satfinite.e2m1x4.f32` rounds four values by 32 random bits, eight per value, but the PTX
//! ISA does not specify which eight, nor their order. [`read_random_bits`] finds out: a value at
//! fraction `1 - 2^j / 256` of the way to its upper neighbor is rounded up if its random byte is at
//! least `2^j`. A word with a single bit set therefore tells whether that bit belongs to the
//! element, and its significance.

use std::sync::OnceLock;

use super::{philox::philox4x32, round_stochastic};
use crate::Nvfp4Error;

/// Four values and the random word that rounds them.
pub type Question = ([f32; 4], u32);

/// Position in the random word of each bit of each element's byte, for four elements, least
/// significant bit first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomBits {
    /// `positions[element][significance]`.
    pub positions: [[u8; 8]; 4],
}

impl RandomBits {
    /// Returns the software form: byte `i` of the word, little-endian, rounds element `i`.
    pub fn software() -> Self {
        Self {
            positions: std::array::from_fn(|element| {
                std::array::from_fn(|bit| (8 * element + bit) as u8)
            }),
        }
    }

    /// Returns the word that rounds in the software form as `word` does in this order: its byte `i`
    /// has the bits of element `i`.
    pub fn software_word(&self, word: u32) -> u32 {
        let positions = self.positions.as_flattened().iter().enumerate();
        positions.fold(0, |found, (bit, position)| {
            found | (word >> position & 1) << bit
        })
    }

    /// Returns the four codes, element 0 in the lowest nibble, that the oracle computes with these
    /// bits.
    pub fn round(&self, (values, word): &Question) -> u16 {
        let bytes = self.software_word(*word).to_le_bytes();
        let code = |element: usize| u16::from(round_stochastic(values[element], bytes[element]));
        (0..4).fold(0, |codes, element| codes | code(element) << (4 * element))
    }
}

/// Order in which the oracle takes random bits, if it is not that of the software form.
static ORDER: OnceLock<Option<RandomBits>> = OnceLock::new();

/// Makes the oracle of this process take random bits in the order of a device that rounds by
/// `cvt.rs`, so that it can be compared with this device bit for bit. For tests: call it before
/// anything is quantized.
///
/// # Panics
/// Panics if another order was set before, or the oracle has rounded in that of the software form.
pub fn round_in_order(bits: RandomBits) {
    let order = (bits != RandomBits::software()).then_some(bits);
    let set = *ORDER.get_or_init(|| order);
    assert!(
        set == order,
        "the oracle takes random bits in the order {set:?} already, not in {order:?}"
    );
}

/// Returns the order set by [`round_in_order`], or `None` for that of the software form.
pub(super) fn order() -> Option<RandomBits> {
    *ORDER.get_or_init(|| None)
}

/// Determines the bits of `round`, which answers each question with four codes, element 0 in the
/// lowest nibble.
///
/// # Errors
/// Returns an error if `round` fails, or its answers do not correspond to eight separate bits per
/// element.
pub fn read_random_bits(
    mut round: impl FnMut(&[Question]) -> Result<Vec<u16>, Nvfp4Error>,
) -> Result<RandomBits, Nvfp4Error> {
    let mut positions = [[0; 8]; 4];
    for (element, positions) in positions.iter_mut().enumerate() {
        let mut questions = Vec::new();
        for bit in 0..32 {
            for significance in 0..8 {
                let fraction = (256 - (1 << significance)) as f32 / 256.0;
                let mut values = [0.0; 4];
                // Between 1 and 1.5; exact.
                values[element] = 1.0 + 0.5 * fraction;
                questions.push((values, 1u32 << bit));
            }
        }
        let answers = round(&questions)?;
        let mut found = [None; 8];
        for bit in 0..32 {
            let ups: Vec<bool> = answers[8 * bit..][..8]
                .iter()
                .map(|codes| codes >> (4 * element) & 15 == 3)
                .collect();
            let count = ups.iter().take_while(|up| **up).count();
            if ups[count..].contains(&true) {
                return Err(mapping(format!(
                    "bit {bit} rounds element {element} up by {ups:?}, fractions ascending from the \
                     smallest need"
                )));
            }
            if count > 0
                && let Some(other) = found[count - 1].replace(bit as u8)
            {
                return Err(mapping(format!(
                    "bits {other} and {bit} both count {} for element {element}",
                    1 << (count - 1)
                )));
            }
        }
        for (significance, (position, found)) in positions.iter_mut().zip(found).enumerate() {
            *position = found.ok_or_else(|| {
                mapping(format!(
                    "no bit counts {} for element {element}",
                    1 << significance
                ))
            })?;
        }
    }
    Ok(RandomBits { positions })
}

fn mapping(found: String) -> Nvfp4Error {
    Nvfp4Error::value(
        "rbits",
        found,
        "eight bits for each element, one of each weight",
    )
}

/// Result of [`compare_random_bits`].
#[derive(Debug, Clone, PartialEq)]
pub struct BitComparison {
    /// Number of questions.
    pub questions: usize,
    /// Number of answers that differ from the oracle's.
    pub different: usize,
    /// First different answer: the question, the answer, the oracle's.
    pub first: Option<(Question, u16, u16)>,
}

/// Compares `round` with the oracle under `bits` on `count` questions: values over the whole range,
/// on and beside the grid, beyond it, NaN and infinities, with random words.
///
/// # Errors
/// Returns an error if `round` fails.
pub fn compare_random_bits(
    bits: &RandomBits,
    count: usize,
    mut round: impl FnMut(&[Question]) -> Result<Vec<u16>, Nvfp4Error>,
) -> Result<BitComparison, Nvfp4Error> {
    const GRID: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = |random: u32| {
        let sign = if random & 1 == 0 { 1.0 } else { -1.0 };
        let magnitude = match random >> 1 & 15 {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::from_bits(random >> 8),
            3 => GRID[(random >> 8 & 7) as usize],
            4 => f32::from_bits(GRID[(random >> 8 & 7) as usize].to_bits() + (random >> 11 & 3)),
            5 => 6.0 + (random >> 8) as f32 * 1e-6,
            _ => (random >> 8) as f32 * (6.0 / (1u32 << 24) as f32),
        };
        sign * magnitude
    };
    let questions: Vec<Question> = (0..count as u32)
        .map(|index| {
            let values = philox4x32([index, 0, 0, 0], [1, 2]).map(value);
            (values, philox4x32([index, 1, 0, 0], [1, 2])[0])
        })
        .collect();
    let answers = round(&questions)?;
    let mut found = BitComparison {
        questions: count,
        different: 0,
        first: None,
    };
    for (question, answer) in questions.iter().zip(answers) {
        let expected = bits.round(question);
        if answer != expected {
            found.different += 1;
            found.first.get_or_insert((*question, answer, expected));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns two bytes each from two half-words, as the text of the PTX ISA suggests for e2m1x4.
    fn halves() -> RandomBits {
        let byte = |first: u8| std::array::from_fn(|bit| first + bit as u8);
        RandomBits {
            positions: [byte(0), byte(16), byte(8), byte(24)],
        }
    }

    fn answer(bits: RandomBits) -> impl FnMut(&[Question]) -> Result<Vec<u16>, Nvfp4Error> {
        move |questions| {
            Ok(questions
                .iter()
                .map(|question| bits.round(question))
                .collect())
        }
    }

    #[test]
    fn any_order_of_bits_is_read() {
        let mut scattered = RandomBits::software();
        for (i, position) in scattered.positions.iter_mut().flatten().enumerate() {
            *position = ((i * 11 + 5) % 32) as u8;
        }
        for bits in [RandomBits::software(), halves(), scattered] {
            assert_eq!(read_random_bits(answer(bits)).unwrap(), bits);
            let same = compare_random_bits(&bits, 5000, answer(bits)).unwrap();
            assert_eq!((same.questions, same.different), (5000, 0));
        }
        let other = compare_random_bits(&halves(), 5000, answer(RandomBits::software())).unwrap();
        assert!(other.different > 1000 && other.first.is_some());
    }

    #[test]
    fn a_word_in_another_order_rounds_as_one_of_the_software_form() {
        assert_eq!(
            RandomBits::software().software_word(0x1234_5678),
            0x1234_5678
        );
        // Bytes 0, 16, 8, 24 of the word become bytes 0, 1, 2, 3.
        assert_eq!(halves().software_word(0x1234_5678), 0x1256_3478);
        for index in 0..100 {
            let word = philox4x32([index, 2, 0, 0], [1, 2])[0];
            let values = [0.3, -1.2, 2.6, 5.1];
            let other = (values, halves().software_word(word));
            assert_eq!(
                halves().round(&(values, word)),
                RandomBits::software().round(&other)
            );
        }
    }

    #[test]
    fn what_is_no_order_of_bits_is_refused() {
        let zeros = read_random_bits(|questions| Ok(vec![0; questions.len()]));
        assert!(zeros.unwrap_err().to_string().contains("no bit counts 1"));
        let twice = RandomBits {
            positions: [[7, 1, 2, 3, 4, 5, 6, 7]; 4],
        };
        assert!(read_random_bits(answer(twice)).is_err());
        let always = read_random_bits(|questions| Ok(vec![0x3333; questions.len()]));
        assert!(always.unwrap_err().to_string().contains("both count 128"));
    }
}
