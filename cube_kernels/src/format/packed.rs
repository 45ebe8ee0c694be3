//! A packed matrix on the host.

use serde::{Deserialize, Serialize};

use crate::{
    BLOCK, BlockScaling, Hadamard, Nvfp4Error, QuantParams, Rounding, format::check_extent,
    reference::swizzle,
};

/// Which operand of a GEMM a quantized tensor is: the axis of its source along which blocks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// Blocks along each row; stored in the orientation of the source.
    Rowwise,
    /// Blocks down each column; stored transposed.
    Columnwise,
}

impl Usage {
    /// The usage with the same blocks of the transposed matrix.
    pub const fn transposed(self) -> Self {
        match self {
            Self::Rowwise => Self::Columnwise,
            Self::Columnwise => Self::Rowwise,
        }
    }

    /// `(outer, inner)` of a quantized `rows` x `cols` matrix: stored rows, and the length of the
    /// blocked axis before padding.
    pub const fn stored_shape(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Self::Rowwise => (rows, cols),
            Self::Columnwise => (cols, rows),
        }
    }
}

/// Order of the block scales in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScaleLayout {
    /// `[outer, blocks]`, row-major, without padding.
    Compact,
    /// The 128x4 tiles that FP4 tensor cores read, padded with zeros; see
    /// [`swizzle`].
    Swizzled128x4,
}

/// The largest magnitudes from which the global scales derive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Amax {
    /// One for the tensor.
    Tensor(f32),
    /// One for each stored row (per-token scaling).
    PerRow(Vec<f32>),
}

impl Amax {
    /// The maximum that governs stored row `outer`.
    #[inline]
    pub fn of(&self, outer: usize) -> f32 {
        match self {
            Self::Tensor(amax) => *amax,
            Self::PerRow(amax) => amax[outer],
        }
    }
}

/// Elements that decide one scale together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockShape {
    /// 16 elements along the packed axis.
    OneBy16,
    /// A 16x16 tile, whose scale is repeated for its 16 stored rows.
    Tile16x16,
}

/// How the codes of a packed tensor came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Elements that decided one scale.
    pub block: BlockShape,
    /// How elements were rounded.
    pub rounding: Rounding,
    /// The transform applied along the packed axis before quantization, if any.
    pub hadamard: Option<Hadamard>,
    /// How block scales were found, which decides how an amax decodes.
    pub scaling: BlockScaling,
}

impl Origin {
    /// 1x16 blocks made by `policy`.
    pub const fn copy(policy: &QuantParams) -> Self {
        Self {
            block: BlockShape::OneBy16,
            rounding: policy.rounding,
            hadamard: policy.hadamard,
            scaling: policy.scaling,
        }
    }

    /// 1x16 blocks with standard scales, rounded by `rounding`, after `hadamard` if there is one.
    pub const fn one_by_16(rounding: Rounding, hadamard: Option<Hadamard>) -> Self {
        Self {
            block: BlockShape::OneBy16,
            rounding,
            hadamard,
            scaling: BlockScaling::Standard,
        }
    }

    /// 16x16 tiles with standard scales, rounded to nearest.
    pub const fn tile() -> Self {
        Self {
            block: BlockShape::Tile16x16,
            rounding: Rounding::Nearest,
            hadamard: None,
            scaling: BlockScaling::Standard,
        }
    }

    /// The E4M3 bound of the global scale: 448, or 256 with four over six.
    pub const fn scale_bound(&self) -> u16 {
        self.scaling.bound()
    }

    /// Fails for what no quantizer makes: stochastic rounding with four over six, and 16x16 tiles
    /// that are rounded stochastically, transformed or scaled by stored rows, because then their two
    /// copies are not each other's transpose.
    fn check(&self, amax: &Amax) -> Result<(), Nvfp4Error> {
        let is_stochastic = matches!(self.rounding, Rounding::Stochastic(_));
        let refused = match (self.block, self.scaling) {
            (BlockShape::OneBy16, BlockScaling::FourOverSix(_)) => is_stochastic,
            (BlockShape::OneBy16, _) => false,
            (BlockShape::Tile16x16, _) => {
                is_stochastic || self.hadamard.is_some() || matches!(amax, Amax::PerRow(_))
            }
        };
        if !refused {
            return Ok(());
        }
        let scope = match amax {
            Amax::Tensor(_) => "one amax",
            Amax::PerRow(_) => "one amax for each stored row",
        };
        Err(Nvfp4Error::value(
            "origin",
            format!("{self:?} with {scope}"),
            "rounding to nearest with four over six and for 16x16 tiles, which also have no transform \
             and one amax",
        ))
    }

    /// Blocks in a stored row whose packed axis has `inner` elements: it is padded with zeros to a
    /// multiple of 16, or of the transform's size, because a transform spreads values over all of
    /// its group.
    pub const fn blocks(&self, inner: usize) -> usize {
        let group = match &self.hadamard {
            None => BLOCK,
            Some(hadamard) => hadamard.size().elements(),
        };
        inner.div_ceil(group) * (group / BLOCK)
    }
}

/// A matrix in NVFP4: codes, block scales, maximum, and how they were made.
///
/// The source is `rows` x `cols`; what is stored is `outer` x `inner` with blocks of 16 along
/// `inner`, `outer` x `inner` being the source for [`Usage::Rowwise`] and its transpose for
/// [`Usage::Columnwise`]. Where `inner` is no multiple of 16, or of the size of the transform that
/// the source went through, it is padded with zeros; see [`Origin::blocks`].
///
/// An element decodes to `e2m1(code) · e4m3(scale) · amax / range`, `range` being
/// [`BlockScaling::range`], 2688 or 1536.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct QuantizedTensor {
    rows: usize,
    cols: usize,
    usage: Usage,
    codes: Vec<u8>,
    scales: Vec<u8>,
    scale_layout: ScaleLayout,
    amax: Amax,
    origin: Origin,
}

/// A [`QuantizedTensor`] as it is read, before it is checked.
#[derive(Deserialize)]
#[serde(rename = "QuantizedTensor")]
struct Parts {
    rows: usize,
    cols: usize,
    usage: Usage,
    codes: Vec<u8>,
    scales: Vec<u8>,
    scale_layout: ScaleLayout,
    amax: Amax,
    origin: Origin,
}

impl TryFrom<Parts> for QuantizedTensor {
    type Error = Nvfp4Error;

    fn try_from(parts: Parts) -> Result<Self, Nvfp4Error> {
        Self::from_parts(
            (parts.rows, parts.cols),
            parts.usage,
            parts.codes,
            (parts.scale_layout, parts.scales),
            parts.amax,
            parts.origin,
        )
    }
}

impl QuantizedTensor {
    /// A packed tensor from its parts.
    ///
    /// `codes` holds `outer * blocks * 8` bytes, `scales` `outer * blocks` bytes in the compact
    /// layout or the padded number of the swizzled one, `blocks` being [`Origin::blocks`] of `inner`.
    ///
    /// # Errors
    /// When a length does not fit the shape, a scale has its sign bit set, a byte of the swizzled
    /// layout's padding is not zero, an amax is negative, or `origin` is a combination that no
    /// quantizer makes. Maxima and scales may be infinite or NaN: those survive quantization.
    pub fn from_parts(
        (rows, cols): (usize, usize),
        usage: Usage,
        codes: Vec<u8>,
        (scale_layout, scales): (ScaleLayout, Vec<u8>),
        amax: Amax,
        origin: Origin,
    ) -> Result<Self, Nvfp4Error> {
        check_extent("rows, cols", rows, cols)?;
        origin.check(&amax)?;
        let (outer, inner) = usage.stored_shape(rows, cols);
        let blocks = origin.blocks(inner);
        let check = |argument, found: usize, expected: usize, why: &str| {
            if found == expected {
                Ok(())
            } else {
                Err(Nvfp4Error::shape(
                    argument,
                    format!("{found}"),
                    format!("{expected} ({why}, for {rows}x{cols} packed along {usage:?})"),
                ))
            }
        };
        check(
            "codes",
            codes.len(),
            outer * blocks * 8,
            "8 bytes for each block of 16",
        )?;
        let scale_count = match scale_layout {
            ScaleLayout::Compact => outer * blocks,
            ScaleLayout::Swizzled128x4 => swizzle::padded_len(outer, blocks),
        };
        check(
            "scales",
            scales.len(),
            scale_count,
            "one byte for each block",
        )?;
        let maxima = match &amax {
            Amax::Tensor(value) => std::slice::from_ref(value),
            Amax::PerRow(values) => {
                check("amax", values.len(), outer, "one value for each stored row")?;
                values
            }
        };
        let is_negative = |value: &f32| value.is_sign_negative() && !value.is_nan();
        if let Some(position) = maxima.iter().position(is_negative) {
            return Err(Nvfp4Error::value(
                "amax",
                format!("{} at {position}", maxima[position]),
                "magnitudes, 0 or more",
            ));
        }
        // All bits together first: that vectorises, a search does not.
        if scales.iter().fold(0, |all, scale| all | scale) & 0x80 != 0
            && let Some(position) = scales.iter().position(|scale| scale & 0x80 != 0)
        {
            return Err(Nvfp4Error::value(
                "scales",
                format!("byte {:#04x} at {position}", scales[position]),
                "E4M3 bytes without a sign, 0x00 to 0x7f",
            ));
        }
        if scale_layout == ScaleLayout::Swizzled128x4
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
            rows,
            cols,
            usage,
            codes,
            scales,
            scale_layout,
            amax,
            origin,
        })
    }

    /// Rows of the source matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The axis of the source along which it is packed.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Stored rows.
    pub fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row, padding included.
    pub fn blocks(&self) -> usize {
        self.origin.blocks(self.inner())
    }

    /// The codes, two to a byte, low nibble first: `[outer, blocks * 8]`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The block scales, in the order of [`Self::scale_layout`].
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// Order of [`Self::scales`].
    pub fn scale_layout(&self) -> ScaleLayout {
        self.scale_layout
    }

    /// The maxima of the source.
    pub fn amax(&self) -> &Amax {
        &self.amax
    }

    /// How it was made.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The same tensor with its scales in `layout`.
    pub fn with_scale_layout(mut self, layout: ScaleLayout) -> Self {
        let (outer, blocks) = (self.outer(), self.blocks());
        self.scales = match (self.scale_layout, layout) {
            (ScaleLayout::Compact, ScaleLayout::Swizzled128x4) => {
                swizzle::swizzle(&self.scales, outer, blocks)
            }
            (ScaleLayout::Swizzled128x4, ScaleLayout::Compact) => {
                swizzle::unswizzle(&self.scales, outer, blocks)
            }
            _ => self.scales,
        };
        self.scale_layout = layout;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorNorm, RandomStream};

    /// Parts of a packed tensor, and one way in which they are wrong.
    struct Case {
        shape: (usize, usize),
        codes: usize,
        layout: ScaleLayout,
        scales: Vec<u8>,
        amax: Amax,
        origin: Origin,
    }

    impl Case {
        /// 16 x 32, in order.
        fn good() -> Self {
            Self {
                shape: (16, 32),
                codes: 256,
                layout: ScaleLayout::Compact,
                scales: vec![0x38; 32],
                amax: Amax::Tensor(1.0),
                origin: Origin::one_by_16(Rounding::Nearest, None),
            }
        }

        fn swizzled() -> Self {
            Self {
                layout: ScaleLayout::Swizzled128x4,
                scales: swizzle::swizzle(&[0x38; 32], 16, 2),
                ..Self::good()
            }
        }

        fn build(self) -> Result<QuantizedTensor, Nvfp4Error> {
            QuantizedTensor::from_parts(
                self.shape,
                Usage::Rowwise,
                vec![0x21; self.codes],
                (self.layout, self.scales),
                self.amax,
                self.origin,
            )
        }

        /// The same parts as a file would hold them.
        fn read(self) -> Result<QuantizedTensor, String> {
            let value = serde_json::json!({
                "rows": self.shape.0,
                "cols": self.shape.1,
                "usage": Usage::Rowwise,
                "codes": vec![0x21; self.codes],
                "scales": self.scales,
                "scale_layout": self.layout,
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
        // What survives quantization is not refused.
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
        // Row 16 is the first behind the matrix, and block 2 of row 3 lies behind its two blocks.
        for (row, block) in [(16, 0), (3, 2)] {
            unclean[swizzle::offset(row, block, 2)] = 1;
        }
        let per_row = |len| Amax::PerRow(vec![1.0; len]);
        let with_origin = |origin, amax| Case {
            origin,
            amax,
            ..Case::good()
        };
        let tile = Origin::tile();
        #[rustfmt::skip]
        let cases: Vec<(Case, [&str; 2])> = vec![
            (Case { codes: 255, ..Case::good() }, ["`codes`", "found 255"]),
            (Case { scales: vec![0; 31], ..Case::good() }, ["`scales`", "found 31"]),
            (Case { layout: ScaleLayout::Swizzled128x4, ..Case::good() }, ["`scales`", "expected 512"]),
            (Case { scales: signed, ..Case::good() }, ["`scales`", "0x81 at 7"]),
            (Case { scales: unclean, ..Case::swizzled() }, ["`scales`", "row 3, block 2"]),
            (Case { amax: per_row(15), ..Case::good() }, ["`amax`", "found 15"]),
            (Case { amax: Amax::Tensor(-1.0), ..Case::good() }, ["`amax`", "-1 at 0"]),
            (Case { shape: (1 << 62, 64), codes: 0, ..Case::good() }, ["`rows, cols`", "4611686018427387904 x 64"]),
            (Case { shape: (usize::MAX, usize::MAX), ..Case::good() }, ["`rows, cols`", "at most"]),
            (with_origin(Origin { rounding: stochastic, scaling: four_over_six, ..Case::good().origin }, Amax::Tensor(1.0)),
                ["`origin`", "FourOverSix"]),
            (with_origin(Origin { rounding: stochastic, ..tile }, Amax::Tensor(1.0)), ["`origin`", "Stochastic"]),
            (with_origin(Origin { hadamard: Some(Hadamard::default()), ..tile }, Amax::Tensor(1.0)), ["`origin`", "Hadamard"]),
            (with_origin(tile, per_row(16)), ["`origin`", "each stored row"]),
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
}
