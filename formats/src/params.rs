//! Parameters of one quantized tensor, with all random draws resolved.

use crate::{
    AmaxGranularity, BlockPosition, BlockScaling, BlockShape, Format, Hadamard, Layout,
    RandomStream, Rounding, StoredForm, Usage, policy::EDEN_GROUP,
};

/// Rounding of the elements of a quantized tensor, with the random bits of the draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuantRounding {
    /// Each element rounded to nearest, or stochastically.
    Elements(Rounding),
    /// MS-EDEN: elements rounded to nearest, block scales corrected and rounded stochastically.
    MsEden(EdenDraw),
}

/// Random draw of MS-EDEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EdenDraw {
    /// Random stream for the block scales.
    pub stream: RandomStream,
    /// Seed of the transform's signs, if they were drawn from one ([`Hadamard::seeded_with_size`]).
    /// With an offset in device memory, a kernel draws the signs of the seed plus
    /// [`Hadamard::SEED_STEP`] times that offset: a captured graph that advances the offset draws
    /// fresh signs at each replay.
    pub signs: Option<u64>,
}

/// Parameters of one quantized tensor, for any usage and storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantParams {
    /// Block format. MX formats round to nearest and have no other options.
    pub format: Format,
    /// Block shape: elements that share one block scale.
    pub block: BlockShape,
    /// Granularity of the amax, in a format with a global scale.
    pub amax: AmaxGranularity,
    /// Rounding of elements. Four over six requires rounding to nearest.
    pub rounding: QuantRounding,
    /// Transform along the K dimension before quantization. The amax of a columnwise tensor is that
    /// of the transformed values; a rowwise tensor supports 16 elements and is scaled by the amax
    /// of the values before the transform. MS-EDEN requires 128 elements, along either axis.
    pub hadamard: Option<Hadamard>,
    /// Rule for block scales from the amax of a block.
    pub scaling: BlockScaling,
    /// True if an offset in device memory is added to the offset of the stream.
    pub offset_in_memory: bool,
}

impl QuantParams {
    /// `format` in 1x16 (or 1x32) blocks, rounded to nearest, with one amax, standard scales and no
    /// transform.
    pub const fn new(format: Format) -> Self {
        Self {
            format,
            block: BlockShape::Block1d,
            amax: AmaxGranularity::PerTensor,
            rounding: QuantRounding::Elements(Rounding::Nearest),
            hadamard: None,
            scaling: BlockScaling::Standard,
            offset_in_memory: false,
        }
    }

    /// NVFP4 in 1x16 blocks with rounding `rounding`.
    pub const fn nvfp4(rounding: Rounding) -> Self {
        Self {
            rounding: QuantRounding::Elements(rounding),
            ..Self::new(Format::Nvfp4)
        }
    }

    /// NVFP4 in 16x16 blocks, rounded to nearest.
    pub const fn nvfp4_2d(scaling: BlockScaling) -> Self {
        Self {
            block: BlockShape::Block2d,
            scaling,
            ..Self::new(Format::Nvfp4)
        }
    }

    /// MXFP8.
    pub const fn mxfp8() -> Self {
        Self::new(Format::Mxfp8)
    }

    /// MXFP4.
    pub const fn mxfp4() -> Self {
        Self::new(Format::Mxfp4)
    }

    /// NVFP4 by MS-EDEN: after `hadamard` of size 128, which both operands of a GEMM share, with
    /// the random bits of `stream`.
    pub const fn ms_eden(hadamard: Hadamard, stream: RandomStream) -> Self {
        let signs = None;
        Self {
            rounding: QuantRounding::MsEden(EdenDraw { stream, signs }),
            hadamard: Some(hadamard),
            ..Self::new(Format::Nvfp4)
        }
    }

    /// Returns the random stream, if any.
    pub const fn stream(&self) -> Option<RandomStream> {
        match self.rounding {
            QuantRounding::Elements(Rounding::Nearest) => None,
            QuantRounding::Elements(Rounding::Stochastic(stream))
            | QuantRounding::MsEden(EdenDraw { stream, .. }) => Some(stream),
        }
    }

    /// Sets the position of the blocks in the larger tensor that this one is part of.
    pub fn at(mut self, position: BlockPosition) -> Self {
        match &mut self.rounding {
            QuantRounding::Elements(Rounding::Nearest) => {}
            QuantRounding::Elements(Rounding::Stochastic(stream))
            | QuantRounding::MsEden(EdenDraw { stream, .. }) => stream.position = position,
        }
        self
    }

    /// Returns true if two quantizations of one matrix are equal, without random bits.
    pub const fn is_deterministic(&self) -> bool {
        self.stream().is_none()
    }

    /// Returns true if the tensor is quantized by MS-EDEN.
    pub const fn is_ms_eden(&self) -> bool {
        matches!(self.rounding, QuantRounding::MsEden(_))
    }

    /// Returns true if the tensor has 16x16 blocks.
    pub const fn is_2d(&self) -> bool {
        matches!(self.block, BlockShape::Block2d)
    }

    /// Returns true if the tensor can be quantized directly from the codes of another one.
    pub const fn is_made_from_codes(&self) -> bool {
        self.is_ms_eden() || self.format.is_mx()
    }

    /// Returns true if one amax of the whole matrix, transformed or not, is sufficient; false for
    /// MS-EDEN.
    pub fn has_one_amax(&self) -> bool {
        !self.is_made_from_codes() && self.amax == AmaxGranularity::PerTensor
    }

    /// Returns true if one amax of the untransformed matrix is sufficient.
    pub fn shares_amax(&self) -> bool {
        self.has_one_amax() && self.hadamard.is_none()
    }

    /// Returns true unless an option is set that MX formats, or MS-EDEN, do not have.
    pub fn has_only_own_options(&self) -> bool {
        let plain = Self::new(self.format);
        match self.is_ms_eden() {
            _ if self.format.is_mx() => *self == plain,
            true => {
                let own = Self {
                    rounding: self.rounding,
                    hadamard: self.hadamard,
                    offset_in_memory: self.offset_in_memory,
                    ..plain
                };
                *self == own
            }
            false => true,
        }
    }

    /// Returns the unit to whose multiple the K dimension is padded, in elements.
    pub fn unit(&self) -> usize {
        match self.hadamard {
            None => self.format.block(),
            Some(hadamard) => hadamard.size().elements(),
        }
    }

    /// Returns `form`, or rows of codes and scales if tensors by these parameters are not stored in
    /// it.
    pub fn stored_form(&self, form: StoredForm) -> StoredForm {
        match (form, self.format) {
            (StoredForm::Bf16Unscaled, _) if self.is_2d() || self.format.is_mx() => {
                StoredForm::Rows
            }
            // GEMMs dequantize MXFP4 codes, from rows of scales.
            (_, Format::Mxfp4) => StoredForm::Rows,
            // An instruction multiplies one MXFP8 block, so groups of tokens can begin inside
            // tiles.
            (StoredForm::WholeTiles, Format::Mxfp8) => StoredForm::Tiles,
            (form, _) => form,
        }
    }

    /// Returns the layout of a quantized `rows` x `cols` matrix. MS-EDEN pads the matrix itself.
    pub fn layout(&self, (rows, cols): (usize, usize), usage: Usage, form: StoredForm) -> Layout {
        let shape = match (self.is_ms_eden(), usage) {
            (false, _) => (rows, cols),
            (true, Usage::Rowwise) => (rows, cols.next_multiple_of(EDEN_GROUP)),
            (true, Usage::Columnwise) => (rows.next_multiple_of(EDEN_GROUP), cols),
        };
        Layout {
            scaling: self.scaling,
            amax: self.amax,
            hadamard: self.hadamard,
            form: form.of_padded(),
            ..Layout::new(self.format, shape, usage)
        }
    }
}

impl From<Format> for QuantParams {
    fn from(format: Format) -> Self {
        Self::new(format)
    }
}

impl From<Rounding> for QuantParams {
    fn from(rounding: Rounding) -> Self {
        Self::nvfp4(rounding)
    }
}
