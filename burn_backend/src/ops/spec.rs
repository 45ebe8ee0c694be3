//! Quantization of the operands of a linear layer's GEMMs, with all random draws resolved.

use nvfp4_formats::{
    AmaxGranularity, BLOCK, BlockPosition, BlockScaling, Format, Hadamard, HadamardSize,
    Nvfp4Error, Rounding, Usage,
};
pub use nvfp4_formats::{EdenDraw, QuantParams, QuantRounding};
use serde::{Deserialize, Serialize};

/// Returns the expectation, for an error message, if no kernel quantizes the operand `name` of the
/// GEMM `gemm` with `params`.
fn refusal(params: &QuantParams, gemm: &str, name: &str) -> Option<&'static str> {
    let is_eden_of_128 = |hadamard: Hadamard| hadamard.size() == HadamardSize::H128;
    let is_stochastic = !params.is_deterministic() && !params.is_ms_eden();
    let is_2d = params.is_2d();
    let refused = match params.hadamard {
        _ if params.format.is_mx() => {
            (!params.has_only_own_options()).then_some("an MX format without options")
        }
        _ if redraws_unknown_signs(params) => {
            Some("signs that are drawn from a seed, in a step that is captured")
        }
        hadamard if params.is_ms_eden() => {
            let fits = params.has_only_own_options()
                && hadamard.is_some_and(is_eden_of_128)
                && gemm != "fprop";
            (!fits).then_some("MS-EDEN with a transform of 128, in dgrad and wgrad")
        }
        Some(_) if gemm != "wgrad" => Some("no transform: it runs along the tokens, in wgrad"),
        _ if params.scaling == BlockScaling::Static => {
            Some("a global scale that is derived from the amax")
        }
        _ if is_2d && name != "w" => Some("1x16 blocks: 16x16 blocks are for weights"),
        _ if is_2d && params.scaling == BlockScaling::Headroom => {
            Some("standard or four-over-six scales of 16x16 blocks")
        }
        _ if is_2d && (is_stochastic || !params.shares_amax()) => {
            Some("16x16 blocks to nearest, with one amax and no transform")
        }
        _ => None,
    };
    let is_four_over_six = matches!(params.scaling, BlockScaling::FourOverSix(_));
    refused.or_else(|| {
        (is_stochastic && is_four_over_six).then_some("four over six with rounding to nearest")
    })
}

/// Returns true if a captured step would repeat the signs of `params`.
fn redraws_unknown_signs(params: &QuantParams) -> bool {
    let is_given = matches!(
        params.rounding,
        QuantRounding::MsEden(EdenDraw { signs: None, .. })
    );
    params.offset_in_memory && is_given
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

    /// Returns the quantization parameters, if the operand has 1x16 blocks and is quantized from
    /// amax values of its matrix.
    fn with_amax(&self) -> Option<QuantParams> {
        let params = self.params().copied();
        params.filter(|params| !params.is_made_from_codes() && !params.is_2d())
    }

    /// Returns the quantization parameters, if the operand has 1x16 blocks and one amax of the
    /// whole matrix.
    pub(super) fn one_amax(&self) -> Option<QuantParams> {
        self.with_amax().filter(QuantParams::has_one_amax)
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
    /// Granularity of the row-wise tensor.
    pub rows: AmaxGranularity,
    /// Granularity and transform of the column-wise tensor, if there is one with a separate amax.
    pub cols: Option<(AmaxGranularity, Option<Hadamard>)>,
}

impl OutputAmax {
    /// Returns the amax values of tensors with these parameters: one, if it serves both.
    fn new(row: QuantParams, col: Option<QuantParams>) -> Self {
        let col = col.filter(|col| !(row.shares_amax() && col.shares_amax()));
        Self {
            rows: row.amax,
            cols: col.map(|col| (col.amax, col.hadamard)),
        }
    }
}

impl LinearSpec {
    /// Returns the amax values of `dy` for its operands, if its row-wise operand has them.
    pub(crate) fn gradient_amax(&self) -> Option<OutputAmax> {
        let row = self.dgrad_dy.with_amax()?;
        Some(OutputAmax::new(row, self.wgrad_dy.with_amax()))
    }

    /// Returns the amax values of `x` for its operands, if its row-wise operand has them; those for
    /// wgrad only if there is a backward.
    pub(crate) fn input_amax(&self, has_backward: bool) -> Option<OutputAmax> {
        let row = self.fprop_x.with_amax()?;
        // The operand for wgrad otherwise derives from the other one.
        let col = match self.source {
            BackwardSource::Original if has_backward => self.wgrad_x.with_amax(),
            BackwardSource::Original | BackwardSource::Forward => None,
        };
        Some(OutputAmax::new(row, col))
    }

    /// Returns true if both operands of `w` are quantized from its values: because of the source,
    /// or because they have 16x16 blocks, in which case each is the transpose of the other for any
    /// source.
    pub(crate) fn has_weight_pair(&self) -> bool {
        self.source == BackwardSource::Original
            || self.fprop_w == self.dgrad_w && self.fprop_w.params().is_some_and(QuantParams::is_2d)
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

    /// Returns true if an operand is quantized.
    pub(crate) fn is_quantized(mut self) -> bool {
        let mut operands = self.operands().into_iter();
        operands.any(|spec| *spec != OperandSpec::HighPrecision)
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
                let refused = operand
                    .params()
                    .and_then(|params| refusal(params, gemm, name));
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
