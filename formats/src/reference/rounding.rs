//! Rounds a scaled value to E2M1.

/// Returns the code nearest to `value`, ties to the even code, saturating at ±6. The sign is kept
/// on a zero result, and NaN gives +6, as in `cvt.rn.satfinite.e2m1x2.f32`.
#[inline(always)]
pub fn round_nearest(value: f32) -> u8 {
    nearest_code(value) as u8
}

/// Rounds `value` to one of its two neighbors by eight random bits: up with probability
/// `floor(256 f) / 256` for a value at fraction `f` above the lower one. Values on the grid are
/// unchanged, values beyond ±6 saturate, NaN gives +6.
#[inline(always)]
pub fn round_stochastic(value: f32, random: u8) -> u8 {
    stochastic_code(value, random as u32) as u8
}

/// Computes [`round_nearest`] in the width of its argument, without a branch.
#[inline(always)]
pub(super) fn nearest_code(value: f32) -> u32 {
    let (magnitude, binade) = clamp(value.to_bits());
    // The neighbors of `magnitude` are half its binade apart, and so are the floats from 2^22 ·
    // binade on: this sum rounds to them, ties to even. The product is exact. The part of the sum
    // below 2^22 · binade is counted in its last bits: 2 for the binade that was added, then twice
    // the magnitude divided by the binade.
    let sum = binade * 4_194_305.0 + magnitude;
    // The last bit of the sum is the last bit of the code, so ties go to the even code. The
    // difference to the code is -2, 0 and 2 in the three binades: twice the exponent of the binade,
    // modulo 8.
    let code = sum.to_bits().wrapping_add(binade.to_bits() >> 22) & 7;
    code | sign_unless_nan(value)
}

/// Computes [`round_stochastic`] in the width of its argument, without a branch; `random` is below
/// 256.
#[inline(always)]
pub(super) fn stochastic_code(value: f32, random: u32) -> u32 {
    let (magnitude, binade) = clamp(value.to_bits());
    // Eight bits times a power of two are exact, so this sum rounds once, like an fma. The step
    // between neighbors is half the binade.
    let dithered = random as i32 as f32 * (binade * (1.0 / 512.0)) + magnitude;
    // The largest grid value not above `dithered` is `floor(dithered / step) * step`, saturated at
    // 6, because the grid consists of the multiples of each step in its range. From 1 on, its code
    // is the exponent and first mantissa bit, counted from those of 0.5; `dithered` is below 8.
    let reached = dithered.to_bits() as i32;
    let code = (reached >> 22).wrapping_sub((0.5f32.to_bits() >> 22) as i32);
    let half = (reached >= 0.5f32.to_bits() as i32) as i32;
    code.max(half) as u32 | sign_unless_nan(value)
}

/// Returns the magnitude of the float with these bits, at most 6, with NaN counting as 6. Also
/// returns the power of two below it, at least 1: the binade that determines its grid.
#[inline(always)]
fn clamp(bits: u32) -> (f32, f32) {
    // Magnitudes compare as integers, NaN above everything.
    let magnitude = ((bits & 0x7FFF_FFFF) as i32).min(6f32.to_bits() as i32);
    let binade = magnitude.max(1f32.to_bits() as i32) & 0x7F80_0000;
    (
        f32::from_bits(magnitude as u32),
        f32::from_bits(binade as u32),
    )
}

/// Returns bit 3 of a code.
#[inline(always)]
fn sign_unless_nan(value: f32) -> u32 {
    let sign = value.to_bits() >> 28 & 8;
    if value.is_nan() { 0 } else { sign }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::e2m1;

    /// Finds the nearest code by exhaustive search, independent of thresholds.
    fn nearest_by_search(value: f32) -> u8 {
        // Beyond f64's resolution all codes would have the same distance.
        let magnitude = (value.abs() as f64).min(100.0);
        let mut best = 0u8;
        for code in 1..8u8 {
            let distance = |c: u8| (e2m1::decode(c) as f64 - magnitude).abs();
            if distance(code) < distance(best)
                || (distance(code) == distance(best) && code % 2 == 0)
            {
                best = code;
            }
        }
        best | if value.is_sign_negative() { 8 } else { 0 }
    }

    #[test]
    fn nearest_agrees_with_search_at_and_around_every_boundary() {
        let points = [
            0.0f32, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0,
        ];
        for point in points.into_iter().chain([6.0, 7.0, 1e30, 1e-40]) {
            for delta in -2i32..=2 {
                let bits = point.to_bits() as i32 + delta;
                if bits < 0 {
                    continue;
                }
                for value in [f32::from_bits(bits as u32), -f32::from_bits(bits as u32)] {
                    assert_eq!(round_nearest(value), nearest_by_search(value), "{value:e}");
                }
            }
        }
    }

    /// Computes codes by counting the thresholds that a magnitude reaches, the simplest form.
    fn count(value: f32, thresholds: [(f32, bool); 7]) -> u8 {
        if value.is_nan() {
            return 7;
        }
        let magnitude = value.abs();
        let reached = thresholds
            .iter()
            .filter(|&&(point, included)| magnitude > point || included && magnitude == point);
        reached.count() as u8 | if value.is_sign_negative() { 8 } else { 0 }
    }

    fn nearest_by_counting(value: f32) -> u8 {
        let midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        let even = [false, true, false, true, false, true, false];
        count(value, std::array::from_fn(|i| (midpoints[i], even[i])))
    }

    fn stochastic_by_counting(value: f32, random: u8) -> u8 {
        let magnitude = value.abs();
        let dithered = random as f32 * (1.0 / 256.0) * step(magnitude) + magnitude;
        let points = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        count(dithered.copysign(value), points.map(|point| (point, true)))
    }

    fn step(magnitude: f32) -> f32 {
        match magnitude {
            m if m >= 4.0 => 2.0,
            m if m >= 2.0 => 1.0,
            _ => 0.5,
        }
    }

    /// Returns every combination of the 16 upper bits of a float, with corner values of the lower
    /// 16 bits.
    fn floats() -> impl Iterator<Item = f32> {
        let corners = [0u32, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF];
        (0..=u16::MAX as u32)
            .flat_map(move |high| corners.map(|low| f32::from_bits(high << 16 | low)))
    }

    #[test]
    fn nearest_agrees_with_counting_on_every_pattern() {
        for value in floats() {
            assert_eq!(
                round_nearest(value),
                nearest_by_counting(value),
                "{:#x}",
                value.to_bits()
            );
        }
        let mut bits = 1u32;
        for _ in 0..4_000_000 {
            // A full-period generator modulo 2^32.
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            assert_eq!(
                round_nearest(value),
                nearest_by_counting(value),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn stochastic_agrees_with_counting() {
        // Dithered sums on and beside every grid point, for every random byte.
        for random in 0..=255u8 {
            for code in 0..8u8 {
                let grid = e2m1::decode(code);
                for step in [0.5, 1.0, 2.0] {
                    let start = grid - random as f32 * (1.0 / 256.0) * step;
                    for delta in -3i32..=3 {
                        let value = f32::from_bits((start.to_bits() as i32 + delta) as u32);
                        for value in [value, -value] {
                            assert_eq!(
                                round_stochastic(value, random),
                                stochastic_by_counting(value, random),
                                "{value:e} with {random}"
                            );
                        }
                    }
                }
            }
        }
        for (i, value) in floats().enumerate() {
            let random = (i / 8 + i * 37) as u8;
            assert_eq!(
                round_stochastic(value, random),
                stochastic_by_counting(value, random),
                "{:#x} with {random}",
                value.to_bits()
            );
        }
        let mut bits = 1u32;
        for _ in 0..4_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Half of the values are in the range that is not saturated or zero.
            let exponent = if bits & 1 == 0 {
                124 + (bits >> 5 & 7)
            } else {
                bits >> 23 & 0xFF
            };
            let value = f32::from_bits(bits & 0x807F_FFFF | exponent << 23);
            let random = (bits >> 9) as u8;
            assert_eq!(
                round_stochastic(value, random),
                stochastic_by_counting(value, random),
                "{value:e} with {random}"
            );
        }
    }

    #[test]
    fn special_values() {
        assert_eq!(round_nearest(f32::INFINITY), 7);
        assert_eq!(round_nearest(f32::NEG_INFINITY), 15);
        assert_eq!(round_nearest(f32::NAN), 7);
        assert_eq!(round_nearest(-f32::NAN), 7);
        assert_eq!(round_nearest(-0.0), 8);
        for random in [0, 255] {
            assert_eq!(round_stochastic(f32::INFINITY, random), 7);
            assert_eq!(round_stochastic(f32::NEG_INFINITY, random), 15);
            assert_eq!(round_stochastic(-f32::NAN, random), 7);
            assert_eq!(round_stochastic(-0.0, random), 8);
        }
    }

    #[test]
    fn stochastic_follows_its_law_exactly() {
        let grid: Vec<f32> = (0..8).map(e2m1::decode).collect();
        for pair in grid.windows(2) {
            for fraction in 0..=256u32 {
                let value = pair[0] + (pair[1] - pair[0]) * fraction as f32 / 256.0;
                let ups = (0..=255u8)
                    .filter(|&random| e2m1::decode(round_stochastic(value, random)) == pair[1])
                    .count();
                let others = (0..=255u8)
                    .filter(|&random| {
                        let rounded = e2m1::decode(round_stochastic(value, random));
                        rounded != pair[0] && rounded != pair[1]
                    })
                    .count();
                assert_eq!((ups as u32, others), (fraction, 0), "{value}");
            }
        }
    }

    #[test]
    fn stochastic_never_moves_a_grid_point_nor_more_than_a_step() {
        for random in 0..=255u8 {
            for code in 0..16u8 {
                assert_eq!(round_stochastic(e2m1::decode(code), random), code);
            }
            for i in 0..600 {
                let value = i as f32 * 0.01 + 0.003;
                let rounded = e2m1::decode(round_stochastic(value, random));
                assert!(
                    (rounded - value).abs() < step(value) + 1e-6,
                    "{value} -> {rounded}"
                );
            }
        }
    }
}
