//! Global scales of checkpoint formats.

use crate::Nvfp4Error;

/// 6 · 448: the largest magnitude that codes and block scales can represent with a global scale of
/// 1.
pub const RANGE: f32 = 2688.0;

/// A global scale: the stored bits and their convention.
///
/// The conventions are converted only by [`GlobalScale::to_multiplier`] and
/// [`GlobalScale::to_divisor`], because the amax cannot be recovered: for one `f32` in seven, no
/// amax satisfies `fl(amax / 2688)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GlobalScale {
    /// Dequantization multiplies by this factor, about amax / 2688 (ModelOpt).
    Multiply(f32),
    /// Dequantization divides by this value, about 2688 / amax (compressed-tensors).
    Divide(f32),
    /// Largest magnitude of the tensor (this project's training).
    Amax(f32),
}

/// The smallest factor whose divisor fits in `f32`: 2⁻¹²⁸, the reciprocal of the largest `f32`.
pub const MIN_FACTOR: f32 = 1.0 / f32::MAX;

impl GlobalScale {
    /// Creates a multiplier; a `factor` below [`MIN_FACTOR`] is raised to it.
    pub const fn multiply(factor: f32) -> Self {
        Self::Multiply(factor.max(MIN_FACTOR))
    }

    /// Creates a divisor; an infinite `divisor` is lowered to the largest `f32`.
    pub const fn divide(divisor: f32) -> Self {
        Self::Divide(divisor.min(f32::MAX))
    }

    /// Returns the stored scalar.
    pub const fn value(self) -> f32 {
        match self {
            Self::Multiply(value) | Self::Divide(value) | Self::Amax(value) => value,
        }
    }

    /// Returns the dequantization factor: the stored one, `fl(1 / g)`, or `fl(amax / 2688)`.
    pub fn decode(self) -> f32 {
        match self {
            Self::Multiply(factor) => factor,
            Self::Divide(divisor) => 1.0 / divisor,
            Self::Amax(amax) => amax / RANGE,
        }
    }

    /// Returns the amax of the tensor, the same for all conventions: 2688 times the dequantization
    /// factor, up to its rounding. This is the magnitude of the largest code with the largest block
    /// scale. A scale with headroom (four over six) is that of a larger amax.
    pub fn amax(self) -> f32 {
        match self {
            Self::Amax(amax) => amax,
            Self::Multiply(factor) => factor * RANGE,
            Self::Divide(divisor) => RANGE / divisor,
        }
    }

    /// Checks that the scalar and its dequantization factor are positive and finite.
    ///
    /// # Errors
    /// Returns an error for zero, negative and non-finite scalars, and for those whose factor is
    /// zero or infinite.
    pub fn check(self) -> Result<(), Nvfp4Error> {
        let (value, factor) = (self.value(), self.decode());
        let is_valid = |x: f32| x.is_finite() && x > 0.0;
        match is_valid(value) && is_valid(factor) {
            true => Ok(()),
            false => Err(Nvfp4Error::value(
                "global scale",
                format!("{value:e}, which dequantizes by {factor:e}"),
                "both positive and finite",
            )),
        }
    }

    /// Converts to a multiplier with exactly the same dequantization factor.
    pub fn to_multiplier(self) -> Self {
        Self::Multiply(self.decode())
    }

    /// Converts to a divisor. Also returns the change of the dequantization factor in units in the
    /// last place: 0 or 1, and more below [`MIN_FACTOR`], which has no divisor.
    ///
    /// `fl(1 / x)` is the best possible divisor. For a mantissa below √2 its reciprocal is `x`
    /// again; above, reciprocals are sparser than multipliers, and the result may be a neighbour of
    /// `x`.
    pub fn to_divisor(self) -> (Self, u32) {
        if let Self::Divide(_) = self {
            return (self, 0);
        }
        let factor = self.decode();
        let divisor = Self::divide(1.0 / factor);
        let moved = divisor.decode().to_bits().abs_diff(factor.to_bits());
        (divisor, moved)
    }
}
