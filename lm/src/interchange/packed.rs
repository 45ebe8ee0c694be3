//! One NVFP4 weight as stored in checkpoints, with the convention of its global scale.

use anyhow::{Context, Result, bail, ensure};
use nvfp4_formats::format::e4m3;
use nvfp4_formats::ptq::{GlobalScale, MIN_FACTOR, values};
use nvfp4_formats::{Amax, BLOCK, BlockScaling, Format, QuantizedTensor, StoredForm, Usage};

use super::PreQuantScale;

/// Returns an error if one of the E4M3 bytes `scales` is NaN or negative; a row has `blocks` of
/// them.
pub(super) fn check_scales(scales: &[u8], blocks: usize) -> Result<()> {
    let Some(at) = scales.iter().position(|&byte| byte >= e4m3::NAN_BYTE) else {
        return Ok(());
    };
    let what = match scales[at] & e4m3::NAN_BYTE {
        e4m3::NAN_BYTE => "NaN",
        _ => "negative",
    };
    bail!(
        "the block scale of row {}, block {} is {what} (byte {:#04x})",
        at / blocks,
        at % blocks,
        scales[at]
    )
}

/// Order of operations in dequantization. All operations are `f32`, with one rounding each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// `fl((code · scale) · factor)`: this project, where code · scale is exact.
    CodeTimesScale,
    /// `fl(code · fl(scale · factor))`: ModelOpt's `NVFP4QTensor.dequantize`.
    ModelOpt,
    /// `fl(code · fl(scale / g))`: compressed-tensors' `dequantize`, before its rounding to bf16.
    CompressedTensors,
}

/// One weight `[n, k]` of a checkpoint, with the bytes of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedWeight {
    n: usize,
    k: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    global: GlobalScale,
    input_global: Option<GlobalScale>,
    pre_quant: Option<PreQuantScale>,
}

impl PackedWeight {
    /// Creates a weight of `n` output and `k` input features.
    ///
    /// `codes` are `[n, k / 2]` with the even element in the low nibble, `scales` are `[n, k / 16]`
    /// E4M3 bytes; both are row-major and not swizzled. `input_global` is the static global scale
    /// of the input, if activations are quantized.
    ///
    /// # Errors
    /// Returns an error if `k` is not a multiple of 16, a length does not match the shape, a scale
    /// byte is NaN or negative, or a global scale is zero, negative or not finite.
    pub fn new(
        [n, k]: [usize; 2],
        codes: Vec<u8>,
        scales: Vec<u8>,
        global: GlobalScale,
        input_global: Option<GlobalScale>,
    ) -> Result<Self> {
        ensure!(
            k.is_multiple_of(BLOCK),
            "the weight has {k} input features, but blocks need a multiple of {BLOCK}"
        );
        let elements = n.checked_mul(k);
        ensure!(
            elements.is_some_and(|elements| codes.len() == elements / 2),
            "{} bytes of codes for a weight of {n} x {k}",
            codes.len()
        );
        ensure!(
            scales.len() == n * (k / BLOCK),
            "{} block scales for a weight of {n} x {k}, but {} are needed",
            scales.len(),
            n * (k / BLOCK)
        );
        check_scales(&scales, k / BLOCK)?;
        global.check()?;
        if let Some(scale) = input_global {
            scale.check().context("input")?;
        }
        Ok(Self {
            n,
            k,
            codes,
            scales,
            global,
            input_global,
            pre_quant: None,
        })
    }

    /// Converts a weight quantized in training, keeping its codes.
    ///
    /// 16x16 blocks are exported exactly, with their scale byte repeated in each of the 16 rows.
    /// The range 1536 of four over six is folded into the global scale.
    ///
    /// # Errors
    /// Returns an error unless the tensor is row-wise NVFP4 with one amax, row-major scales and no
    /// rotation.
    pub fn from_quantized(tensor: &QuantizedTensor) -> Result<Self> {
        let layout = tensor.layout();
        let plain = layout.usage == Usage::Rowwise
            && layout.format == Format::Nvfp4
            && layout.form == StoredForm::Rows
            && layout.hadamard.is_none()
            && layout.cols.is_multiple_of(BLOCK);
        let &Amax::Tensor(amax) = tensor.amax() else {
            bail!("the weight has no single amax: {:?}", tensor.amax());
        };
        ensure!(
            plain,
            "the weight is {layout:?}, but checkpoints hold rowwise tensors with row-major scales, \
             without rotation, of a multiple of {BLOCK} columns"
        );
        let range = layout.scaling.range();
        let global = match layout.scaling {
            // A zero tensor has no natural scale; any works except zero, which would be refused.
            _ if amax == 0.0 => GlobalScale::Multiply(1.0),
            // Training does not produce a smaller factor.
            _ if amax / range < MIN_FACTOR => GlobalScale::Multiply(MIN_FACTOR),
            BlockScaling::FourOverSix(_) => GlobalScale::Multiply(amax / range),
            _ => GlobalScale::Amax(amax),
        };
        let (codes, scales) = (tensor.codes().to_vec(), tensor.scales().to_vec());
        Self::new([layout.rows, layout.cols], codes, scales, global, None)
    }

    /// Returns the number of output features (rows).
    pub const fn n(&self) -> usize {
        self.n
    }

    /// Returns the number of input features (columns).
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Returns the codes `[n, k / 2]`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the E4M3 scale bytes `[n, k / 16]`.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Returns the global scale of the weight.
    pub const fn global(&self) -> GlobalScale {
        self.global
    }

    /// Returns the static global scale of the input, if activations are quantized.
    pub const fn input_global(&self) -> Option<GlobalScale> {
        self.input_global
    }

    /// Sets the global scale of the input.
    ///
    /// # Errors
    /// Returns the errors of [`GlobalScale::check`].
    pub fn with_input_global(mut self, scale: Option<GlobalScale>) -> Result<Self> {
        if let Some(scale) = scale {
            scale.check().context("input")?;
        }
        self.input_global = scale;
        Ok(self)
    }

    /// Returns the scales that multiply the input features, if any.
    pub const fn pre_quant(&self) -> Option<&PreQuantScale> {
        self.pre_quant.as_ref()
    }

    /// Sets the scales that multiply the input features.
    ///
    /// # Errors
    /// Returns an error if the number of features differs.
    pub fn with_pre_quant(mut self, scale: Option<PreQuantScale>) -> Result<Self> {
        if let Some(scale) = &scale {
            ensure!(
                scale.values().len() == self.k,
                "the input is multiplied by {} factors, but the weight has {} input features",
                scale.values().len(),
                self.k
            );
        }
        self.pre_quant = scale;
        Ok(self)
    }

    /// Returns the bytes of codes, block scales, global scales, and input feature scales.
    pub fn bytes(&self) -> usize {
        let globals = 1 + usize::from(self.input_global.is_some());
        let pre_quant = self
            .pre_quant
            .as_ref()
            .map_or(0, |scale| scale.bytes().len());
        self.codes.len() + self.scales.len() + 4 * globals + pre_quant
    }

    /// Sets the codes of blocks whose scale byte is 0 to 0, and returns the number of changed
    /// bytes.
    ///
    /// TransformerEngine's rule leaves ±7 in such blocks, which would become wrong values if a tool
    /// raised the scale. The dequantized values do not change, except for the sign of zeros.
    pub fn clear_zero_blocks(&mut self) -> usize {
        let mut changed = 0;
        for (&scale, codes) in self.scales.iter().zip(self.codes.chunks_mut(BLOCK / 2)) {
            if scale == 0 {
                changed += codes.iter().filter(|&&byte| byte != 0).count();
                codes.fill(0);
            }
        }
        changed
    }

    /// Returns the effective weight `[n, k]`, row-major: [`dequantize`](Self::dequantize)
    /// multiplied by the input feature scales.
    pub fn effective(&self, arithmetic: Arithmetic) -> Vec<f32> {
        let mut values = self.dequantize(arithmetic);
        if let Some(scale) = &self.pre_quant {
            for row in values.chunks_exact_mut(self.k) {
                let factors = row.iter_mut().zip(scale.values());
                factors.for_each(|(value, factor)| *value *= factor);
            }
        }
        values
    }

    /// Dequantizes the codes to `[n, k]`, row-major.
    pub fn dequantize(&self, arithmetic: Arithmetic) -> Vec<f32> {
        let factor = self.global.decode();
        let (divisor, _) = self.global.to_divisor();
        let factors = std::array::from_fn(|byte| {
            let scale = e4m3::decode(byte as u8);
            match arithmetic {
                Arithmetic::CodeTimesScale => scale,
                Arithmetic::ModelOpt => scale * factor,
                Arithmetic::CompressedTensors => scale / divisor.value(),
            }
        });
        let last = match arithmetic {
            Arithmetic::CodeTimesScale => factor,
            Arithmetic::ModelOpt | Arithmetic::CompressedTensors => 1.0,
        };
        values::dequantize(&self.codes, &self.scales, &factors, last)
    }
}

#[cfg(test)]
mod tests {
    use nvfp4_formats::format::e2m1;
    use nvfp4_formats::ptq::RANGE;
    use nvfp4_formats::{BlockShape, ErrorNorm, QuantParams, Rounding, reference};

    use super::*;

    fn weight(scales: Vec<u8>, global: GlobalScale) -> Result<PackedWeight> {
        let codes = (0..16u8).flat_map(|i| [i, i.wrapping_mul(29)]).collect();
        PackedWeight::new([2, 32], codes, scales, global, None)
    }

    #[test]
    fn the_amax_has_one_convention() {
        for amax in [0.75f32, 3.0, 448.5] {
            for scale in [
                GlobalScale::Amax(amax),
                GlobalScale::multiply(amax / RANGE),
                GlobalScale::divide(RANGE / amax),
            ] {
                let ulps = scale.amax().to_bits().abs_diff(amax.to_bits());
                assert!(ulps <= 1, "{scale:?}: {}", scale.amax());
            }
        }
    }

    #[test]
    fn the_factor_of_a_divisor_is_kept_and_that_of_a_multiplier_moves_by_one_ulp_at_most() {
        let (mut moved, mut bits) = (0, 1u32);
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // From 2^-40 to 2^24, the range of scales in models.
            let value = f32::from_bits((87 + (bits >> 26)) << 23 | bits & 0x7F_FFFF);
            let divide = GlobalScale::Divide(value);
            assert_eq!(divide.decode(), divide.to_multiplier().decode());
            assert_eq!(divide.to_divisor(), (divide, 0));
            let (divisor, ulps) = GlobalScale::Multiply(value).to_divisor();
            let distance = divisor.decode().to_bits().abs_diff(value.to_bits());
            assert_eq!(distance, ulps);
            assert!(ulps <= 1, "{value:e} moved by {ulps}");
            moved += ulps;
        }
        // For mantissas x of at least √2, reciprocals hit 2 / x² of the floats. With uniform
        // mantissas, the integral of 1 - 2 / x² from √2 to 2 is missed, 17.2 %.
        assert!((3300..3560).contains(&moved), "{moved}");
    }

    #[test]
    fn the_arithmetics_are_those_of_their_tools() {
        let scales = vec![0x38, 0x41, 0x77, 0x03];
        for global in [GlobalScale::Multiply(1.3e-3), GlobalScale::Divide(597.3)] {
            let packed = weight(scales.clone(), global).unwrap();
            for arithmetic in [
                Arithmetic::CodeTimesScale,
                Arithmetic::ModelOpt,
                Arithmetic::CompressedTensors,
            ] {
                let values = packed.dequantize(arithmetic);
                assert_eq!(values.len(), 64);
                for (i, &value) in values.iter().enumerate() {
                    let code = packed.codes()[i / 2] >> (4 * (i % 2)) & 15;
                    let code = e2m1::VALUES[code as usize];
                    let scale = e4m3::decode(scales[i / 16]);
                    let expected = match (arithmetic, global) {
                        (Arithmetic::CodeTimesScale, _) => (code * scale) * global.decode(),
                        (Arithmetic::ModelOpt, _) => code * (scale * global.decode()),
                        (_, GlobalScale::Divide(g)) => code * (scale / g),
                        (_, _) => code * (scale / (1.0 / global.decode())),
                    };
                    assert_eq!(value.to_bits(), expected.to_bits(), "{arithmetic:?}, {i}");
                }
            }
        }
    }

    #[test]
    fn bad_scales_are_refused() {
        let good = vec![0x38; 4];
        let refuses = |scales: &[u8], global, says: &str| {
            let error = weight(scales.to_vec(), global).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        };
        assert!(weight(good.clone(), GlobalScale::Multiply(1.0)).is_ok());
        let one = GlobalScale::Multiply(1.0);
        refuses(&[0x38, 0x38, 0x38, 0x7F], one, "row 1, block 1 is NaN");
        refuses(&[0x38, 0xFF, 0x38, 0x38], one, "row 0, block 1 is NaN");
        refuses(&[0x80, 0x38, 0x38, 0x38], one, "row 0, block 0 is negative");
        refuses(&[0x38; 3], one, "3 block scales");
        let odd = PackedWeight::new([2, 24], vec![0; 24], vec![0x38; 2], one, None);
        assert!(odd.unwrap_err().to_string().contains("24 input features"));
        for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY] {
            refuses(&good, GlobalScale::Multiply(bad), "global scale");
            refuses(&good, GlobalScale::Divide(bad), "global scale");
            refuses(&good, GlobalScale::Amax(bad), "global scale");
        }
        // Its reciprocal is infinite.
        refuses(&good, GlobalScale::Divide(1e-39), "dequantizes by inf");
        let zero_blocks = weight(vec![0, 0x20, 0x38, 0], one).unwrap();
        let mut cleared = zero_blocks.clone();
        assert_eq!(
            cleared.clear_zero_blocks(),
            14,
            "two of the bytes are 0 already"
        );
        assert_eq!(
            cleared.dequantize(Arithmetic::CodeTimesScale),
            zero_blocks.dequantize(Arithmetic::CodeTimesScale)
        );
        assert_eq!(cleared.codes()[8..24], zero_blocks.codes()[8..24]);
    }
    #[test]
    fn trained_weights_export_with_the_codes_and_values_that_they_were_trained_with() {
        let x: Vec<f32> = (0..32 * 64)
            .map(|i| (i as f32 * 0.7).sin().powi(3))
            .collect();
        for (block, scaling) in [
            (BlockShape::Block1d, BlockScaling::Standard),
            (BlockShape::Block2d, BlockScaling::Standard),
            (
                BlockShape::Block2d,
                BlockScaling::FourOverSix(ErrorNorm::Mae),
            ),
        ] {
            let mut policy = QuantParams::nvfp4(Rounding::Nearest);
            policy.scaling = scaling;
            let amax = Amax::Tensor(reference::amax(&x));
            let tensor = match block {
                BlockShape::Block1d => {
                    reference::quantize(&x, 32, 64, Usage::Rowwise, &amax, &policy, 0)
                }
                BlockShape::Block2d => {
                    reference::quantize_tile(&x, 32, 64, &amax, scaling).map(|(rowwise, _)| rowwise)
                }
            };
            let tensor = tensor.unwrap();
            let exported = PackedWeight::from_quantized(&tensor).unwrap();
            assert_eq!(exported.codes(), tensor.codes());
            assert_eq!(exported.scales(), tensor.scales());
            let values = exported.dequantize(Arithmetic::CodeTimesScale);
            assert_eq!(
                values,
                reference::dequantize(&tensor),
                "{block:?}, {scaling:?}"
            );
        }
        let policy = QuantParams::nvfp4(Rounding::Nearest);
        let amax = Amax::Tensor(1.0);
        let other = reference::quantize(&x, 32, 64, Usage::Columnwise, &amax, &policy, 0);
        let error = PackedWeight::from_quantized(&other.unwrap()).unwrap_err();
        assert!(error.to_string().contains("rowwise"), "{error}");
    }
}
