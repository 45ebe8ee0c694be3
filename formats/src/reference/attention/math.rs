//! Scalar functions with identical bits on every device: single IEEE operations, and fused
//! multiply-adds where `mul_add` is written.

use super::super::exponential::exp_of_negative;

/// Coefficients of `tanh x = x (1 + x² p(x²))` for `|x| < 1/4`: the Taylor series, whose next term
/// is below 2⁻²⁶.
pub const TANH_SERIES: [f32; 4] = [-0.333_333_34, 0.133_333_34, -0.053_968_254, 0.021_869_488];
/// Upper limit of the series.
pub const TANH_SMALL: f32 = 0.25;

/// Coefficients of `r`, a polynomial in `s²`, in `ln(1 + f) = f - f²/2 + s (f²/2 + r)` with
/// `s = f / (2 + f)` (Sun's `logf`).
pub const LN_POLYNOMIAL: [f32; 4] = [0.666_666_6, 0.400_009_72, 0.284_987_87, 0.242_790_79];
/// Bits of `sqrt(1/2)`: arguments are reduced to the range from there to `sqrt(2)`.
pub const SQRT_HALF: u32 = 0x3F35_04F3;
/// Upper 15 bits of `ln 2`, so that the product with an exponent is exact.
pub const LN_2_UPPER: f32 = 0.693_138_1;
/// Remainder of `ln 2` after [`LN_2_UPPER`].
pub const LN_2_LOWER: f32 = 9.058_001e-6;

/// Computes [`exp_of_negative`]; every NaN gives NaN.
#[inline(always)]
pub fn exp_or_nan(x: f32) -> f32 {
    if x.is_nan() { x } else { exp_of_negative(x) }
}

/// Returns the hyperbolic tangent, within 3 ulps.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let square = x * x;
    let [c1, c2, c3, c4] = TANH_SERIES;
    let series = c4
        .mul_add(square, c3)
        .mul_add(square, c2)
        .mul_add(square, c1);
    let near = (series * square).mul_add(x, x);
    let e = exp_or_nan(-2.0 * a);
    let far = (1.0 - e) * (1.0 / (1.0 + e));
    let signed = if x < 0.0 { -far } else { far };
    if a < TANH_SMALL { near } else { signed }
}

/// Returns the natural logarithm of a positive normal number, within 2 ulps. `-inf` for 0; NaN
/// stays NaN.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    // Exponent and significand, with a significand of at least sqrt(1/2).
    let shifted = x.to_bits().wrapping_add(0x3F80_0000 - SQRT_HALF);
    let k = ((shifted >> 23) as i32 - 127) as f32;
    let f = f32::from_bits((shifted & 0x007F_FFFF) + SQRT_HALF) - 1.0;
    let s = f * (1.0 / (2.0 + f));
    let z = s * s;
    let w = z * z;
    let [c1, c2, c3, c4] = LN_POLYNOMIAL;
    let r = w.mul_add(c4.mul_add(w, c2), z * c3.mul_add(w, c1));
    let half = (0.5 * f).mul_add(f, 0.0);
    let tail = k.mul_add(LN_2_LOWER, s * (half + r));
    let value = k.mul_add(LN_2_UPPER, f + (tail - half));
    if x.is_nan() {
        x
    } else if x == 0.0 {
        f32::NEG_INFINITY
    } else {
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ulps(found: f32, expected: f64) -> f64 {
        let magnitude = (expected.abs() as f32).max(f32::MIN_POSITIVE);
        let unit = 2f64.powi(magnitude.log2().floor() as i32 - 23);
        (found as f64 - expected).abs() / unit
    }

    #[test]
    fn tangent_is_within_three_units() {
        let mut worst = (0f64, 0f32);
        for bits in (0x3000_0000u32..0x4180_0000).step_by(997) {
            let x = f32::from_bits(bits);
            let error = ulps(tanh(x), (x as f64).tanh());
            if error > worst.0 {
                worst = (error, x);
            }
            assert_eq!(tanh(-x).to_bits(), (-tanh(x)).to_bits(), "{x}");
        }
        assert!(worst.0 <= 3.0, "{worst:?}");
        assert_eq!(tanh(f32::INFINITY), 1.0);
        assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
        assert_eq!(tanh(0.0).to_bits(), 0);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn logarithm_is_within_two_units() {
        let mut worst = (0f64, 0f32);
        for bits in (f32::MIN_POSITIVE.to_bits()..f32::MAX.to_bits()).step_by(4999) {
            let x = f32::from_bits(bits);
            let error = ulps(ln(x), (x as f64).ln());
            if error > worst.0 {
                worst = (error, x);
            }
        }
        // Every float near 1, where the logarithm is small.
        for bits in 0x3F7F_0000u32..0x3F81_0000 {
            let x = f32::from_bits(bits);
            let error = ulps(ln(x), (x as f64).ln());
            if error > worst.0 {
                worst = (error, x);
            }
        }
        assert!(worst.0 <= 2.0, "{worst:?}");
        assert_eq!(ln(1.0).to_bits(), 0);
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert!(ln(f32::NAN).is_nan());
    }
}
