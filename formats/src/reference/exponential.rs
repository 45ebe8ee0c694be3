//! Exponential and sigmoid, made of operations with identical bits on every device.

/// [`exp_of_negative`] is 0 below this value.
pub const EXP_CUTOFF: f32 = -87.0;
/// `log2(e)`, rounded.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 1.5 · 2²³: adding it rounds to an integer, which is then in the lowest bits.
pub const TO_INTEGER: f32 = 12_582_912.0;
/// `ln 2`, rounded.
pub const LN2_HIGH: f32 = std::f32::consts::LN_2;
/// Remainder of `ln 2` after [`LN2_HIGH`].
pub const LN2_LOW: f32 = -1.904_654_2e-9;
/// `(e^r - 1 - r) / r²` for `|r| <= ln 2 / 2`, constant term first: interpolated at the zeros of a
/// Chebyshev polynomial, with rounded coefficients. It gives `e^r` a relative error of 1.1e-8.
pub const EXP_POLYNOMIAL: [f32; 5] = [
    0.5,
    0.166_665_76,
    0.041_666_556,
    0.008_363_179,
    0.001_392_618_4,
];

/// Returns `e^x` for `x <= 0`, within 1 ulp; 0 below -87 (results leave the normal numbers at
/// -87.3). NaN stays NaN.
///
/// Cody and Waite: `x = k ln 2 + r`, with `ln 2` in two parts so that `r` is exact except for one
/// rounding; a polynomial of degree 6 in `r`; `2^k` is added to the exponent.
#[inline(always)]
pub fn exp_of_negative(x: f32) -> f32 {
    let shifted = x.mul_add(LOG2_E, TO_INTEGER);
    let k = shifted - TO_INTEGER;
    let r = k.mul_add(-LN2_LOW, k.mul_add(-LN2_HIGH, x));
    let [c2, c3, c4, c5, c6] = EXP_POLYNOMIAL;
    let tail = c6
        .mul_add(r, c5)
        .mul_add(r, c4)
        .mul_add(r, c3)
        .mul_add(r, c2);
    let value = tail.mul_add(r, 1.0).mul_add(r, 1.0);
    if x < EXP_CUTOFF {
        0.0
    } else {
        // The lowest bits of `shifted` are `k`; the bits above are shifted out.
        f32::from_bits(value.to_bits().wrapping_add(shifted.to_bits() << 23))
    }
}

/// Returns `s = 1 / (1 + e^-x)` and `1 - s`, both without cancellation.
#[inline(always)]
pub fn sigmoid(x: f32) -> (f32, f32) {
    let e = exp_of_negative(-x.abs());
    let far = 1.0 / (1.0 + e);
    let near = e * far;
    if x < 0.0 { (near, far) } else { (far, near) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error of `found` against the real number `expected`, in ulps.
    fn ulps(found: f32, expected: f64) -> f64 {
        let magnitude = (expected.abs() as f32).max(f32::MIN_POSITIVE);
        let unit = 2f64.powi(magnitude.log2().floor() as i32 - 23);
        (found as f64 - expected).abs() / unit
    }

    #[test]
    fn exponential_is_within_a_unit() {
        let mut worst = 0f64;
        // Every 509th float, and every float from -2 to -1, where all bits of the polynomial
        // matter.
        let all = (0x8000_0000u32..=(-87f32).to_bits()).step_by(509);
        for bits in all.chain((-1f32).to_bits()..(-2f32).to_bits()) {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(exp_of_negative(x), (x as f64).exp()));
        }
        assert!(worst <= 1.0, "{worst}");
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(-87.000_01), 0.0);
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
        assert!(exp_of_negative(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_keeps_both_tails() {
        for bits in (0u32..0x42AE_0000).step_by(1009) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (value, rest) = sigmoid(x);
                let e = (-x as f64).exp();
                assert!(ulps(value, 1.0 / (1.0 + e)) <= 2.5, "{x}: {value}");
                assert!(ulps(rest, e / (1.0 + e)) <= 2.5, "{x}: {rest}");
            }
        }
        assert_eq!(sigmoid(f32::INFINITY), (1.0, 0.0));
        assert_eq!(sigmoid(f32::NEG_INFINITY), (0.0, 1.0));
        assert!(sigmoid(f32::NAN).0.is_nan());
    }
}
