//! A quantized matrix on the host.

use serde::{Deserialize, Serialize};

use super::{block::ScaleFormat, check_extent, layout::Layout, layout::Usage, swizzle};
use crate::{
    error::Nvfp4Error,
    policy::{AmaxGranularity, BlockScaling, BlockShape, Rounding, StoredForm},
};

/// Amax values from which the global scales derive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Amax {
    /// None: the format has no global scale.
    Absent,
    /// One value for the tensor.
    Tensor(f32),
    /// One value per stored row (per-token scaling).
    PerRow(Vec<f32>),
}

impl Amax {
    /// Returns the amax of stored row `outer`.
    ///
    /// # Panics
    /// Panics if there is none.
    #[inline]
    pub fn of(&self, outer: usize) -> f32 {
        self.values()[if self.granularity() == AmaxGranularity::PerRow {
            outer
        } else {
            0
        }]
    }

    /// Returns all values.
    pub fn values(&self) -> &[f32] {
        match self {
            Self::Absent => &[],
            Self::Tensor(amax) => std::slice::from_ref(amax),
            Self::PerRow(amax) => amax,
        }
    }

    /// Returns the granularity of the amax.
    pub const fn granularity(&self) -> AmaxGranularity {
        match self {
            Self::Absent | Self::Tensor(_) => AmaxGranularity::PerTensor,
            Self::PerRow(_) => AmaxGranularity::PerRow,
        }
    }

    /// Returns the values of a tensor of layout `layout`.
    ///
    /// # Panics
    /// Panics if the layout has one amax and `values` is empty.
    pub fn new(layout: &Layout, values: Vec<f32>) -> Self {
        match layout.amax {
            _ if !layout.format.has_global_scale() => Self::Absent,
            AmaxGranularity::PerTensor => Self::Tensor(values[0]),
            AmaxGranularity::PerRow => Self::PerRow(values),
        }
    }
}

/// Origin of a quantized tensor's codes: block shape and rounding. Dequantization does not need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Shape of the elements that share one block scale.
    pub block: BlockShape,
    /// Rounding of the elements.
    pub rounding: Rounding,
}

impl Origin {
    /// Returns blocks along the contraction, rounded by `rounding`.
    pub const fn block_1d(rounding: Rounding) -> Self {
        Self {
            block: BlockShape::Block1d,
            rounding,
        }
    }

    /// Returns 16x16 tiles, rounded to nearest.
    pub const fn block_2d() -> Self {
        Self {
            block: BlockShape::Block2d,
            rounding: Rounding::Nearest,
        }
    }

    /// Returns an error for combinations that no quantizer makes. These are stochastic rounding
    /// with four over six, and 16x16 tiles that are rounded stochastically, transformed or scaled
    /// per stored row: the rowwise and columnwise tensors of such tiles would not be each other's
    /// transpose.
    fn check(&self, layout: &Layout, amax: &Amax) -> Result<(), Nvfp4Error> {
        let is_stochastic = matches!(self.rounding, Rounding::Stochastic(_));
        let refused = match (self.block, layout.scaling) {
            (BlockShape::Block1d, BlockScaling::FourOverSix(_)) => is_stochastic,
            (BlockShape::Block1d, _) => false,
            (BlockShape::Block2d, _) => {
                is_stochastic || layout.hadamard.is_some() || matches!(amax, Amax::PerRow(_))
            }
        };
        if !refused {
            return Ok(());
        }
        let count = match amax {
            Amax::Absent => "no amax",
            Amax::Tensor(_) => "one amax",
            Amax::PerRow(_) => "one amax for each stored row",
        };
        Err(Nvfp4Error::value(
            "origin",
            format!(
                "{self:?}, {:?}, {:?} with {count}",
                layout.scaling, layout.hadamard
            ),
            "rounding to nearest with four over six and for 16x16 tiles, which also have no transform \
             and one amax",
        ))
    }
}

impl Default for Origin {
    /// Returns blocks along the contraction, rounded to nearest.
    fn default() -> Self {
        Self::block_1d(Rounding::Nearest)
    }
}

/// A quantized matrix: codes, block scales, amax values, and how they were made.
///
/// An NVFP4 element dequantizes to `e2m1(code) · e4m3(scale) · amax / range`, where `range` is
/// [`BlockScaling::range`], 2688 or 1536. An MXFP8 element dequantizes to
/// `e4m3(code) · 2^(scale - 127)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct QuantizedTensor {
    layout: Layout,
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Amax,
    origin: Origin,
}

/// Fields of a deserialized [`QuantizedTensor`] before they are checked.
#[derive(Deserialize)]
#[serde(rename = "QuantizedTensor")]
struct Parts {
    layout: Layout,
    codes: Vec<u8>,
    scales: Vec<u8>,
    amax: Amax,
    origin: Origin,
}

impl TryFrom<Parts> for QuantizedTensor {
    type Error = Nvfp4Error;

    fn try_from(parts: Parts) -> Result<Self, Nvfp4Error> {
        Self::from_parts(
            parts.layout,
            parts.codes,
            parts.scales,
            parts.amax,
            parts.origin,
        )
    }
}

impl QuantizedTensor {
    /// Builds a quantized tensor from its buffers.
    ///
    /// `codes` has [`Layout::code_bytes`], `scales` [`Layout::scale_bytes`] bytes.
    ///
    /// # Errors
    /// Returns an error if a length does not fit the shape, an E4M3 scale has its sign bit set, a
    /// padding byte of the swizzled layout is not zero, an amax is negative, `amax` does not have
    /// the layout's granularity, the layout is not one of codes, or `origin` is a combination that
    /// no quantizer makes. Amax values and scales may be infinite or NaN, because quantization
    /// preserves those.
    pub fn from_parts(
        layout: Layout,
        codes: Vec<u8>,
        scales: Vec<u8>,
        amax: Amax,
        origin: Origin,
    ) -> Result<Self, Nvfp4Error> {
        let (rows, cols, usage) = (layout.rows, layout.cols, layout.usage);
        check_extent("rows, cols", rows, cols)?;
        origin.check(&layout, &amax)?;
        let has_amax = layout.format.has_global_scale();
        let absent = matches!(amax, Amax::Absent);
        let agrees = has_amax != absent && (absent || amax.granularity() == layout.amax);
        if !agrees || !layout.form.is_packed() {
            return Err(Nvfp4Error::value(
                "layout",
                format!("{layout:?}, {:?} amax", amax.granularity()),
                "codes, and an amax of the layout's granularity where the format has one",
            ));
        }
        let (outer, blocks) = (layout.outer(), layout.blocks());
        let check = |argument, found: usize, expected: usize, why: &str| {
            if found == expected {
                Ok(())
            } else {
                Err(Nvfp4Error::shape(
                    argument,
                    format!("{found}"),
                    format!("{expected} ({why}, for {rows}x{cols} quantized {usage:?})"),
                ))
            }
        };
        let (bytes, block) = (layout.block_bytes(), layout.format.block());
        let each_block = format!("{bytes} bytes for each block of {block}");
        check("codes", codes.len(), layout.code_bytes(), &each_block)?;
        let (found, expected) = (scales.len(), layout.scale_bytes());
        check("scales", found, expected, "one byte for each block")?;
        let values = amax.values();
        let why = "one value for each stored row";
        check("amax", values.len(), layout.amax_len(), why)?;
        let is_negative = |value: &f32| value.is_sign_negative() && !value.is_nan();
        if let Some(position) = values.iter().position(is_negative) {
            return Err(Nvfp4Error::value(
                "amax",
                format!("{} at {position}", values[position]),
                "magnitudes, 0 or more",
            ));
        }
        // Combining all bits first vectorizes; a search does not.
        if layout.format.scale() == ScaleFormat::E4m3
            && scales.iter().fold(0, |all, scale| all | scale) & 0x80 != 0
            && let Some(position) = scales.iter().position(|scale| scale & 0x80 != 0)
        {
            return Err(Nvfp4Error::value(
                "scales",
                format!("byte {:#04x} at {position}", scales[position]),
                "E4M3 bytes without a sign, 0x00 to 0x7f",
            ));
        }
        if layout.form == StoredForm::Tiles
            && let Some((row, block)) = swizzle::first_unclean_padding(&scales, outer, blocks)
        {
            return Err(Nvfp4Error::value(
                "scales",
                format!(
                    "byte {:#04x} in the padding, at row {row}, block {block}",
                    scales[swizzle::offset(row, block, blocks)]
                ),
                "zeros there",
            ));
        }
        Ok(Self {
            layout,
            codes,
            scales,
            amax,
            origin,
        })
    }

    /// Returns the layout of the buffers.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the number of rows of the source matrix.
    pub fn rows(&self) -> usize {
        self.layout.rows
    }

    /// Returns the number of columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.layout.cols
    }

    /// Returns the axis of the source along which blocks lie.
    pub fn usage(&self) -> Usage {
        self.layout.usage
    }

    /// Returns the number of stored rows.
    pub fn outer(&self) -> usize {
        self.layout.outer()
    }

    /// Returns the length of a stored row, without padding.
    pub fn inner(&self) -> usize {
        self.layout.inner()
    }

    /// Returns the number of blocks of one stored row, including padding.
    pub fn blocks(&self) -> usize {
        self.layout.blocks()
    }

    /// Returns the codes, `[outer, blocks * bytes of a block]`. Two 4-bit codes share a byte, low
    /// nibble first.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Returns the block scales, in the order of the layout's form.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Returns the amax values of the source.
    pub fn amax(&self) -> &Amax {
        &self.amax
    }

    /// Returns how the tensor was made.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns the divisor that turns an amax into the global scale.
    pub fn range(&self) -> f32 {
        self.layout.scaling.range()
    }

    /// Returns the tensor with its block scales in the order of `form`: in rows, or in 128x4 tiles.
    pub fn in_form(mut self, form: StoredForm) -> Self {
        let (outer, blocks) = (self.outer(), self.blocks());
        (self.scales, self.layout.form) = match (self.layout.form.has_tiles(), form.has_tiles()) {
            (false, true) => (
                swizzle::swizzle(&self.scales, outer, blocks),
                StoredForm::Tiles,
            ),
            (true, false) => (
                swizzle::unswizzle(&self.scales, outer, blocks),
                StoredForm::Rows,
            ),
            _ => return self,
        };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorNorm, Format, Hadamard, RandomStream};

    /// Fields of a quantized tensor with one error in them.
    struct Case {
        layout: Layout,
        codes: usize,
        scales: Vec<u8>,
        amax: Amax,
        origin: Origin,
    }

    impl Case {
        /// Returns valid 16 x 32 fields.
        fn good() -> Self {
            Self {
                layout: Layout::nvfp4(16, 32, Usage::Rowwise),
                codes: 256,
                scales: vec![0x38; 32],
                amax: Amax::Tensor(1.0),
                origin: Origin::default(),
            }
        }

        fn swizzled() -> Self {
            Self {
                layout: Layout {
                    form: StoredForm::Tiles,
                    ..Self::good().layout
                },
                scales: swizzle::swizzle(&[0x38; 32], 16, 2),
                ..Self::good()
            }
        }

        fn build(self) -> Result<QuantizedTensor, Nvfp4Error> {
            QuantizedTensor::from_parts(
                self.layout,
                vec![0x21; self.codes],
                self.scales,
                self.amax,
                self.origin,
            )
        }

        /// Reads the fields from the form that a file has.
        fn read(self) -> Result<QuantizedTensor, String> {
            let value = serde_json::json!({
                "layout": self.layout,
                "codes": vec![0x21; self.codes],
                "scales": self.scales,
                "amax": self.amax,
                "origin": self.origin,
            });
            serde_json::from_value(value).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn whole_parts_are_taken_and_read_back() {
        for case in [Case::good, Case::swizzled] {
            let built = case().build().unwrap();
            assert_eq!(case().read().unwrap(), built);
            let text = serde_json::to_string(&built).unwrap();
            assert_eq!(
                serde_json::from_str::<QuantizedTensor>(&text).unwrap(),
                built
            );
        }
        // Values that quantization preserves are accepted.
        for amax in [f32::NAN, -f32::NAN, f32::INFINITY, 0.0] {
            let amax = Amax::Tensor(amax);
            let case = Case {
                amax,
                scales: vec![0x7f; 32],
                ..Case::good()
            };
            case.build().unwrap();
        }
    }

    #[test]
    fn every_wrong_part_is_named() {
        let stochastic = Rounding::Stochastic(RandomStream::new(1, 2, 3));
        let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mae);
        let mut signed = vec![0x38; 32];
        signed[7] = 0x81;
        let mut unclean = Case::swizzled().scales;
        // Row 16 is the first row after the matrix, and block 2 of row 3 lies after the row's two
        // blocks.
        for (row, block) in [(16, 0), (3, 2)] {
            unclean[swizzle::offset(row, block, 2)] = 1;
        }
        let per_row = |len| Amax::PerRow(vec![1.0; len]);
        let good = Case::good().layout;
        let rows_of_one = Layout {
            amax: AmaxGranularity::PerRow,
            ..good
        };
        let scaled = |scaling| Layout { scaling, ..good };
        let swizzled = Case::swizzled().layout;
        let shaped = |rows, cols| Layout { rows, cols, ..good };
        let with_origin = |origin, layout, amax| Case {
            origin,
            layout,
            amax,
            ..Case::good()
        };
        let tile = Origin::block_2d();
        let one = || Amax::Tensor(1.0);
        let transformed = Layout {
            hadamard: Some(Hadamard::default()),
            ..good
        };
        #[rustfmt::skip]
        let cases: Vec<(Case, [&str; 2])> = vec![
            (Case { codes: 255, ..Case::good() }, ["`codes`", "found 255"]),
            (Case { scales: vec![0; 31], ..Case::good() }, ["`scales`", "found 31"]),
            (Case { layout: swizzled, ..Case::good() }, ["`scales`", "expected 512"]),
            (Case { scales: signed, ..Case::good() }, ["`scales`", "0x81 at 7"]),
            (Case { scales: unclean, ..Case::swizzled() }, ["`scales`", "row 3, block 2"]),
            (Case { layout: rows_of_one, amax: per_row(15), ..Case::good() },
                ["`amax`", "found 15"]),
            (Case { amax: per_row(16), ..Case::good() }, ["`layout`", "PerRow amax"]),
            (Case { amax: Amax::Absent, ..Case::good() }, ["`layout`", "Nvfp4"]),
            (Case { layout: Layout { form: StoredForm::Bf16Unscaled, ..good }, ..Case::good() },
                ["`layout`", "Bf16Unscaled"]),
            (Case { amax: Amax::Tensor(-1.0), ..Case::good() }, ["`amax`", "-1 at 0"]),
            (Case { layout: shaped(1 << 62, 64), codes: 0, ..Case::good() },
                ["`rows, cols`", "4611686018427387904 x 64"]),
            (Case { layout: shaped(usize::MAX, usize::MAX), ..Case::good() },
                ["`rows, cols`", "at most"]),
            (with_origin(Origin::block_1d(stochastic), scaled(four_over_six), one()),
                ["`origin`", "FourOverSix"]),
            (with_origin(Origin { rounding: stochastic, ..tile }, good, one()),
                ["`origin`", "Stochastic"]),
            (with_origin(tile, transformed, one()), ["`origin`", "Hadamard"]),
            (with_origin(tile, rows_of_one, per_row(16)), ["`origin`", "each stored row"]),
        ];
        for (case, parts) in cases {
            let again = Case {
                scales: case.scales.clone(),
                amax: case.amax.clone(),
                ..case
            };
            let read = again.read().unwrap_err();
            let built = case.build().unwrap_err().to_string();
            for part in parts {
                assert!(built.contains(part), "{part}: {built}");
                assert!(read.contains(part), "{part}: {read}");
            }
        }
    }

    #[test]
    fn every_wrong_part_of_a_microscaling_tensor_is_named() {
        let build = |shape, codes, scales| {
            let layout = Layout::new(Format::Mxfp8, shape, Usage::Columnwise);
            let (codes, scales) = (vec![1; codes], vec![0x82; scales]);
            QuantizedTensor::from_parts(layout, codes, scales, Amax::Absent, Origin::default())
        };
        let good = build((40, 3), 192, 6).unwrap();
        assert_eq!((good.outer(), good.inner(), good.blocks()), (3, 40, 2));
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(
            serde_json::from_str::<QuantizedTensor>(&text).unwrap(),
            good
        );
        for (shape, codes, scales, parts) in [
            ((40, 3), 191, 6, ["`codes`", "found 191"]),
            ((40, 3), 192, 5, ["`scales`", "found 5"]),
            ((64, 1 << 62), 0, 0, ["`rows, cols`", "64 x 4611"]),
        ] {
            let error = build(shape, codes, scales).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let torn = text.replace("\"rows\":40", "\"rows\":400");
        let error = serde_json::from_str::<QuantizedTensor>(&torn).unwrap_err();
        assert!(error.to_string().contains("`codes`"), "{error}");
    }
}
