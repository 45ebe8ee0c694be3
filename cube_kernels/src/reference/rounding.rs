//! Rounding a scaled value to E2M1.

/// The code nearest to `value`, ties to the even code, saturating at ±6; the sign is kept on a zero
/// result, and NaN gives +6. What `cvt.rn.satfinite.e2m1x2.f32` computes.
#[inline(always)]
pub fn round_nearest(value: f32) -> u8 {
    let bits = value.to_bits();
    // Magnitudes compare as integers, NaN above everything: it clears every midpoint and lands on
    // the code of 6. Ties are won by the even code, so midpoints alternate > and >=.
    let magnitude = bits & 0x7FFF_FFFF;
    let code = (magnitude > 0.25f32.to_bits()) as u8
        + (magnitude >= 0.75f32.to_bits()) as u8
        + (magnitude > 1.25f32.to_bits()) as u8
        + (magnitude >= 1.75f32.to_bits()) as u8
        + (magnitude > 2.5f32.to_bits()) as u8
        + (magnitude >= 3.5f32.to_bits()) as u8
        + (magnitude > 5.0f32.to_bits()) as u8;
    code | sign_unless_nan(bits)
}

/// `value` rounded to one of its two neighbours by eight random bits: up with probability
/// `floor(256 f) / 256` for a value a fraction `f` above the lower one. Values on the grid never
/// move, values beyond ±6 saturate, NaN gives +6.
#[inline(always)]
pub fn round_stochastic(value: f32, random: u8) -> u8 {
    let bits = value.to_bits();
    let magnitude = f32::from_bits(bits & 0x7FFF_FFFF);
    // An eighth-bit uniform times a power of two is exact, so this sum rounds once, as an fma would.
    let dithered = random as f32 * (1.0 / 256.0) * step(magnitude) + magnitude;
    // The largest grid value not above `dithered` is `floor(dithered / step) * step`, saturated at 6,
    // because the grid is what is left of the multiples of each step in its range. Its code counts
    // the values that `dithered` reaches; as integers, which NaN all reaches.
    let reached = dithered.to_bits() & 0x7FFF_FFFF;
    let code = (reached >= 0.5f32.to_bits()) as u8
        + (reached >= 1.0f32.to_bits()) as u8
        + (reached >= 1.5f32.to_bits()) as u8
        + (reached >= 2.0f32.to_bits()) as u8
        + (reached >= 3.0f32.to_bits()) as u8
        + (reached >= 4.0f32.to_bits()) as u8
        + (reached >= 6.0f32.to_bits()) as u8;
    code | sign_unless_nan(bits)
}

/// The distance between E2M1 neighbours around a magnitude.
#[inline(always)]
fn step(magnitude: f32) -> f32 {
    if magnitude >= 4.0 {
        2.0
    } else if magnitude >= 2.0 {
        1.0
    } else {
        0.5
    }
}

#[inline(always)]
fn sign_unless_nan(bits: u32) -> u8 {
    let nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000;
    ((bits >> 28) as u8 & 8) * !nan as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::e2m1;

    /// Nearest by exhaustive search, independent of thresholds.
    fn nearest_by_search(value: f32) -> u8 {
        // Beyond f64's resolution all codes would be equally far.
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
