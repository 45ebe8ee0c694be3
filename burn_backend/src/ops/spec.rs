//! Quantization of the operands of a linear layer's GEMMs, with all random draws resolved.

use nvfp4_formats::{
    AmaxGranularity, BLOCK, BlockPosition, BlockScaling, BlockShape, Format, Hadamard,
    HadamardSize, Nvfp4Error, RandomStream, Rounding, StoredForm, Usage,
};
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
use nvfp4_formats::{Layout, reference::EDEN_GROUP};
use serde::{Deserialize, Serialize};

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
    /// Seed of the transform's signs, if they were drawn from one ([`Hadamard::seeded_with_size`]):
    /// a captured step draws them again from it.
    pub signs: Option<u64>,
}

/// Parameters of one quantized tensor, for any usage: a [`QuantSpec`](crate::recipe::QuantSpec)
/// with its random draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantParams {
    /// Block format.
    pub format: Format,
    /// Block shape: elements that share one block scale.
    pub block: BlockShape,
    /// Granularity of the amax, in a format with a global scale.
    pub amax: AmaxGranularity,
    /// Rounding of elements. Four over six requires rounding to nearest.
    pub rounding: QuantRounding,
    /// Transform along the K dimension before quantization.
    pub hadamard: Option<Hadamard>,
    /// Rule for block scales from the amax of a block.
    pub scaling: BlockScaling,
    /// True if the offset that [`GraphSteps`](crate::graph) keeps in device memory is added to the
    /// offset of the stream.
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
    pub(super) fn at(mut self, position: BlockPosition) -> Self {
        match &mut self.rounding {
            QuantRounding::Elements(Rounding::Nearest) => {}
            QuantRounding::Elements(Rounding::Stochastic(stream))
            | QuantRounding::MsEden(EdenDraw { stream, .. }) => stream.position = position,
        }
        self
    }

    /// Returns true if two quantizations of one matrix are equal, without random bits.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.stream().is_none()
    }

    /// Returns true if the tensor is quantized by MS-EDEN.
    pub const fn is_ms_eden(&self) -> bool {
        matches!(self.rounding, QuantRounding::MsEden(_))
    }

    /// Returns true if the tensor can be quantized directly from the codes of another one.
    pub(super) fn is_made_from_codes(&self) -> bool {
        self.is_ms_eden() || !self.format.has_global_scale()
    }

    /// Returns true if the values before the global scale can be stored as bf16 instead of codes.
    pub(super) fn has_bf16_storage(&self) -> bool {
        self.block == BlockShape::Block1d && self.format.has_global_scale()
    }

    /// Returns true if one amax of the whole matrix, transformed or not, is sufficient; false for
    /// MS-EDEN.
    pub(super) fn has_one_amax(&self) -> bool {
        self.format.has_global_scale()
            && !self.is_made_from_codes()
            && self.amax == AmaxGranularity::PerTensor
    }

    /// Returns true if one amax of the untransformed matrix is sufficient.
    pub(super) fn shares_amax(&self) -> bool {
        self.has_one_amax() && self.hadamard.is_none()
    }

    /// Returns the unit to whose multiple the K dimension is padded, in elements.
    pub(crate) fn unit(&self) -> usize {
        match self.hadamard {
            None => self.format.block(),
            Some(hadamard) => hadamard.size().elements(),
        }
    }

    /// Returns the layout of a quantized `rows` x `cols` matrix. MS-EDEN pads the matrix itself.
    #[cfg(any(feature = "flex", feature = "cubecl-backend"))]
    pub(super) fn layout(
        &self,
        (rows, cols): (usize, usize),
        usage: Usage,
        form: StoredForm,
    ) -> Layout {
        let shape = match (self.is_ms_eden(), usage) {
            (false, _) => (rows, cols),
            (true, Usage::Rowwise) => (rows, cols.next_multiple_of(EDEN_GROUP)),
            (true, Usage::Columnwise) => (rows.next_multiple_of(EDEN_GROUP), cols),
        };
        Layout {
            scaling: self.scaling,
            amax: self.amax,
            hadamard: self.hadamard,
            storage: form.storage(),
            scale_layout: form.scale_layout(),
            ..Layout::new(self.format, shape, usage)
        }
    }

    /// Returns the expectation, for an error message, if no kernel quantizes the operand `name` of
    /// the GEMM `gemm` with these parameters.
    fn refusal(&self, gemm: &str, name: &str) -> Option<&'static str> {
        let is_eden_of_128 = |hadamard: Hadamard| hadamard.size() == HadamardSize::H128;
        let is_stochastic = matches!(
            self.rounding,
            QuantRounding::Elements(Rounding::Stochastic(_))
        );
        let is_2d = self.block == BlockShape::Block2d;
        let refused = match (*self, self.hadamard) {
            (params, _) if !params.format.has_global_scale() => {
                (params != Self::new(params.format)).then_some("an MX format without options")
            }
            (params, _) if params.redraws_unknown_signs() => {
                Some("signs that are drawn from a seed, in a step that is captured")
            }
            (params, Some(hadamard)) if params.is_ms_eden() => {
                let plain = Self {
                    rounding: params.rounding,
                    hadamard: params.hadamard,
                    offset_in_memory: params.offset_in_memory,
                    ..Self::new(Format::Nvfp4)
                };
                (params != plain || !is_eden_of_128(hadamard) || gemm == "fprop")
                    .then_some("MS-EDEN with a transform of 128, in dgrad and wgrad")
            }
            (params, None) if params.is_ms_eden() => {
                Some("MS-EDEN with a transform of 128, in dgrad and wgrad")
            }
            (_, Some(_)) if gemm != "wgrad" => {
                Some("no transform: it runs along the tokens, in wgrad")
            }
            _ if self.scaling == BlockScaling::Static => {
                Some("a global scale that is derived from the amax")
            }
            _ if is_2d && name != "w" => Some("1x16 blocks: 16x16 blocks are for weights"),
            _ if is_2d && self.scaling == BlockScaling::Headroom => {
                Some("standard or four-over-six scales of 16x16 blocks")
            }
            _ if is_2d && (is_stochastic || !self.has_one_plain_amax()) => {
                Some("16x16 blocks to nearest, with one amax and no transform")
            }
            _ => None,
        };
        let is_four_over_six = matches!(self.scaling, BlockScaling::FourOverSix(_));
        refused.or_else(|| {
            (is_stochastic && is_four_over_six).then_some("four over six with rounding to nearest")
        })
    }

    /// Returns true if a captured step would repeat its signs.
    fn redraws_unknown_signs(&self) -> bool {
        let is_given = matches!(
            self.rounding,
            QuantRounding::MsEden(EdenDraw { signs: None, .. })
        );
        self.offset_in_memory && is_given
    }

    fn has_one_plain_amax(&self) -> bool {
        self.amax == AmaxGranularity::PerTensor && self.hadamard.is_none()
    }
}

/// Representation of one operand of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandSpec {
    /// Unquantized, in the dtype of the activations.
    HighPrecision,
    /// Quantized.
    Quantized(QuantParams),
}

impl OperandSpec {
    /// NVFP4 in 1x16 blocks.
    pub const fn nvfp4(rounding: Rounding) -> Self {
        Self::Quantized(QuantParams::nvfp4(rounding))
    }

    /// Returns the quantization parameters, if quantized.
    pub const fn params(&self) -> Option<&QuantParams> {
        match self {
            Self::HighPrecision => None,
            Self::Quantized(params) => Some(params),
        }
    }

    /// Returns the block format, if quantized.
    pub(crate) fn format(&self) -> Option<Format> {
        self.params().map(|params| params.format)
    }

    /// Returns the quantization parameters, if the operand has 1x16 blocks and one amax of the
    /// whole matrix.
    pub(super) fn one_amax(&self) -> Option<QuantParams> {
        let params = self.params().copied();
        params.filter(|params| params.has_one_amax() && params.block == BlockShape::Block1d)
    }

    /// Returns true if the operand has 4-bit codes.
    pub(crate) fn is_nvfp4(&self) -> bool {
        self.format() == Some(Format::Nvfp4)
    }

    /// Returns the unit to whose multiple the K dimension is padded, in elements.
    pub(crate) fn unit(&self) -> usize {
        self.params().map_or(1, QuantParams::unit)
    }

    /// Returns true if two uses of one matrix give the same operand, without random bits.
    pub(crate) fn is_deterministic(&self) -> bool {
        self.params().is_none_or(QuantParams::is_deterministic)
    }

    /// Advances the block numbers by the number that `earlier` returns for the
    /// [`unit`](Self::unit).
    fn advance(&mut self, earlier: impl FnOnce(usize) -> usize) {
        if let Self::Quantized(params) = self
            && let Some(stream) = params.stream()
        {
            let first = stream.position.first + earlier(params.unit()) as u64;
            *params = params.at(BlockPosition {
                first,
                ..stream.position
            });
        }
    }

    /// Advances the block numbers, along `usage` of experts' weights `[d_in, d_out]`, past those of
    /// the first `experts` in the tensor of all experts.
    pub(super) fn behind_weights(
        mut self,
        experts: usize,
        usage: Usage,
        [d_in, d_out]: [usize; 2],
    ) -> Self {
        let (outer, inner) = usage.stored_shape(d_in, d_out);
        self.advance(|unit| experts * outer * blocks(inner, unit));
        self
    }

    /// Returns true if a GEMM can multiply the operand by `other`. `is_wgrad` is true if both are
    /// along the tokens.
    fn fits(&self, other: &Self, is_wgrad: bool) -> bool {
        match (self.params(), other.params()) {
            (None, None) => true,
            // With one quantized operand, the other one is not padded to its blocks.
            (Some(one), None) | (None, Some(one)) => {
                !is_wgrad && one.format.has_global_scale() && !one.is_ms_eden()
            }
            (Some(left), Some(right)) => {
                left.format == right.format
                    && left.is_ms_eden() == right.is_ms_eden()
                    && left.hadamard == right.hadamard
            }
        }
    }
}

/// Returns the number of blocks of 16 in `len` elements padded to a multiple of `unit`.
fn blocks(len: usize, unit: usize) -> usize {
    len.next_multiple_of(unit) / BLOCK
}

/// Source values of the backward's operands of `x` and `w`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackwardSource {
    /// Tensors of the forward.
    #[default]
    Original,
    /// Dequantized operands of the forward.
    Forward,
}

/// Six operands of a linear layer's three GEMMs; see
/// [`nvfp4_linear`](super::Nvfp4Ops::nvfp4_linear).
///
/// `y = x w`: `x` along its columns, `w` along its rows. `dx = dy wᵀ`: both along their columns.
/// `dw = xᵀ dy`: both along their rows, the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearSpec {
    /// `x` in fprop.
    pub fprop_x: OperandSpec,
    /// `w` in fprop.
    pub fprop_w: OperandSpec,
    /// `dy` in dgrad.
    pub dgrad_dy: OperandSpec,
    /// `w` in dgrad.
    pub dgrad_w: OperandSpec,
    /// `x` in wgrad.
    pub wgrad_x: OperandSpec,
    /// `dy` in wgrad.
    pub wgrad_dy: OperandSpec,
    /// Source of `dgrad_w` and `wgrad_x`.
    pub source: BackwardSource,
}

/// Amax values of a matrix that is quantized along its rows and optionally along its columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputAmax {
    /// Transform of the column-wise tensor, if there is one with a separate amax.
    pub hadamard: Option<Hadamard>,
}

impl LinearSpec {
    /// Returns the amax values of `dy` for its operands, if these use an amax of the whole matrix.
    pub(crate) fn gradient_amax(&self) -> Option<OutputAmax> {
        self.dgrad_dy.one_amax()?;
        let col = self.wgrad_dy.one_amax();
        Some(OutputAmax {
            hadamard: col.and_then(|col| col.hadamard),
        })
    }

    /// Returns the amax values of `x` for its operands, if these use an amax of the whole matrix;
    /// that for wgrad only if there is a backward.
    pub(crate) fn input_amax(&self, has_backward: bool) -> Option<OutputAmax> {
        self.fprop_x.one_amax()?;
        // The operand for wgrad otherwise derives from the other one, or needs no such amax.
        let col = match self.source {
            BackwardSource::Original if has_backward => self.wgrad_x.one_amax(),
            BackwardSource::Original | BackwardSource::Forward => None,
        };
        Some(OutputAmax {
            hadamard: col.and_then(|col| col.hadamard),
        })
    }

    /// Returns true if both operands of `w` are quantized from its values: because of the source,
    /// or because they have 16x16 blocks, in which case each is the transpose of the other for any
    /// source.
    pub(crate) fn has_weight_pair(&self) -> bool {
        let is_2d = |params: &QuantParams| params.block == BlockShape::Block2d;
        self.source == BackwardSource::Original
            || self.fprop_w == self.dgrad_w && self.fprop_w.params().is_some_and(is_2d)
    }

    /// Returns the operands of all GEMMs.
    fn operands(&mut self) -> [&mut OperandSpec; 6] {
        [
            &mut self.fprop_x,
            &mut self.fprop_w,
            &mut self.dgrad_dy,
            &mut self.dgrad_w,
            &mut self.wgrad_x,
            &mut self.wgrad_dy,
        ]
    }

    /// Returns true if a part of the random offsets is in device memory: in the steps of a graph,
    /// including those before its capture.
    pub(crate) fn has_offset_in_memory(mut self) -> bool {
        let in_memory = |params: &QuantParams| params.offset_in_memory;
        let mut operands = self.operands().into_iter();
        operands.any(|spec| spec.params().is_some_and(in_memory))
    }

    /// Marks a part of all random offsets as being in device memory.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(crate) fn with_offset_in_memory(mut self) -> Self {
        for operand in self.operands() {
            if let OperandSpec::Quantized(params) = operand {
                params.offset_in_memory = params.stream().is_some();
            }
        }
        self
    }

    /// Advances the block numbers for experts with weights `[d_in, d_out]` that come after others
    /// in the tensors of all experts, so that they draw the bits of their position there. `earlier`
    /// are the token counts of the other experts. See [`experts`](crate::experts) for the block
    /// numbering.
    pub(crate) fn behind_experts(mut self, earlier: &[usize], [d_in, d_out]: [usize; 2]) -> Self {
        let rows = earlier.iter().sum::<usize>();
        let along_tokens = |unit| earlier.iter().map(|&len| blocks(len, unit)).sum::<usize>();
        self = self.behind_weights(earlier.len(), [d_in, d_out]);
        self.fprop_x.advance(|unit| rows * blocks(d_in, unit));
        self.dgrad_dy.advance(|unit| rows * blocks(d_out, unit));
        self.wgrad_x.advance(|unit| d_in * along_tokens(unit));
        self.wgrad_dy.advance(|unit| d_out * along_tokens(unit));
        self
    }

    /// Advances only the block numbers of weights past those of `experts` earlier experts: the
    /// positions of their tokens are in device memory
    /// ([`RowGroups::Window`](super::RowGroups::Window)).
    pub(crate) fn behind_weights(self, experts: usize, dims: [usize; 2]) -> Self {
        let behind = |w: OperandSpec, usage| w.behind_weights(experts, usage, dims);
        Self {
            fprop_w: behind(self.fprop_w, Usage::Columnwise),
            dgrad_w: behind(self.dgrad_w, Usage::Rowwise),
            ..self
        }
    }

    /// TransformerEngine's default recipe: `x` in 1x16 blocks rounded to nearest, `w` in 16x16
    /// blocks, `dy` rounded by `dgrad` and `wgrad`, `hadamard` on both operands of wgrad.
    pub fn nvidia(hadamard: Option<Hadamard>, dgrad: Rounding, wgrad: Rounding) -> Self {
        let transformed = |rounding| {
            OperandSpec::Quantized(QuantParams {
                hadamard,
                ..QuantParams::nvfp4(rounding)
            })
        };
        let w = OperandSpec::Quantized(QuantParams::nvfp4_2d(BlockScaling::Standard));
        Self {
            fprop_x: OperandSpec::nvfp4(Rounding::Nearest),
            fprop_w: w,
            dgrad_dy: OperandSpec::nvfp4(dgrad),
            dgrad_w: w,
            wgrad_x: transformed(Rounding::Nearest),
            wgrad_dy: transformed(wgrad),
            source: BackwardSource::Original,
        }
    }

    /// All operands in the dtype of the activations.
    pub const fn high_precision() -> Self {
        let plain = OperandSpec::HighPrecision;
        Self {
            fprop_x: plain,
            fprop_w: plain,
            dgrad_dy: plain,
            dgrad_w: plain,
            wgrad_x: plain,
            wgrad_dy: plain,
            source: BackwardSource::Original,
        }
    }

    /// Returns an error if kernels cannot quantize every operand and multiply every pair.
    pub(crate) fn check(&self) -> Result<(), Nvfp4Error> {
        let gemms = [
            ("fprop", [("x", self.fprop_x), ("w", self.fprop_w)]),
            ("dgrad", [("dy", self.dgrad_dy), ("w", self.dgrad_w)]),
            ("wgrad", [("x", self.wgrad_x), ("dy", self.wgrad_dy)]),
        ];
        for (gemm, operands) in gemms {
            let [(left_name, left), (right_name, right)] = operands;
            let error = |found: String, expected: &str| {
                let found = format!("{gemm} of {left_name} and {right_name}: {found}");
                Nvfp4Error::value("spec", found, expected)
            };
            for (name, operand) in operands {
                let refused = operand.params().and_then(|p| p.refusal(gemm, name));
                if let Some(expected) = refused {
                    return Err(error(format!("{name} is {operand:?}"), expected));
                }
            }
            if !left.fits(&right, gemm == "wgrad") {
                return Err(error(
                    format!("{left:?} and {right:?}"),
                    "operands of one format and transform, or NVFP4 and high precision in fprop \
                     and dgrad",
                ));
            }
        }
        Ok(())
    }
}
