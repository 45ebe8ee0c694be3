//! Linear layers whose weights (tensor parallelism), and optionally tokens (sequence parallelism),
//! are sharded over a group of ranks: quantization and communication of each rank.
//!
//! An operand of a rank is a shard of the operand of one device. Each rank quantizes its shard to
//! the same bytes as one device would: with the amax of the group, and with the random bits of its
//! position. Operands with sharded tokens are gathered after quantization: as 4-bit codes and block
//! scales, not as activations.
//!
//! A GEMM with a sharded K dimension gives partial sums, which are added over the group; the order
//! of summation differs from that of one device. The deterministic mode gathers both quantized
//! operands along K instead, and computes the GEMM of one device on every rank.

mod gather;
mod gathered_weight;
mod places;
#[cfg(test)]
mod tests;

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_formats::{AmaxGranularity, StoredForm, Usage};
use nvfp4_parallel::Reduction;

use super::Nvfp4KernelOps;
use super::collective::{Exchange, Step};
use super::dtype::cast;
use super::operands::{FormedSpec, is_one_kernel};
use super::segments::narrow;
use super::spec::{BackwardSource, OperandSpec, QuantParams};
use super::tensors::{
    GemmGroups, GivenAmax, MaybeTensor, Operand, QuantizeRequest, QuantizeSource, QuantizedMatrix,
    QuantizedPair, RowGroups,
};
use crate::parallel::ProcessGroup;
pub(crate) use gather::gathered_tokens;
pub(crate) use gathered_weight::{GatheredWeight, WeightPart};
use places::{Axis, GapsBetween, Segment, concatenated, positioned};

/// Sharded dimension of a weight `[d_in, d_out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShardedDim {
    /// `d_out`: the output of a rank has a shard of the columns, and dgrad gives partial sums.
    Output,
    /// `d_in`: the input of a rank has a shard of the columns, and fprop gives partial sums.
    Input,
}

/// Sharding of a rank's linear layer.
#[derive(Debug, Clone)]
pub(crate) struct LinearSharding {
    /// Ranks.
    pub(crate) group: ProcessGroup,
    /// Sharded dimension.
    pub(crate) dim: ShardedDim,
    /// Segments of this rank's shard of the dimension. Segment `i` of the whole layer is the
    /// concatenation of segment `i` of all ranks, in rank order: gate and up of a gated activation
    /// are two segments.
    pub(crate) segments: Vec<usize>,
    /// True if tokens are sharded where columns are not: in the input with [`ShardedDim::Output`],
    /// in the output with [`ShardedDim::Input`].
    pub(crate) sequence_parallel: bool,
    /// True if no sum is reordered.
    pub(crate) deterministic: bool,
}

/// Operand of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Input,
    Weight,
    OutputGradient,
}

/// Known amax values of a rank's shard.
#[derive(Clone, Debug)]
pub(crate) struct FoundAmax<B: Backend> {
    /// Amax of the row-wise and of the column-wise tensor of the rank's shard: `f32[1]`.
    pub(crate) of_part: [FloatTensor<B>; 2],
    /// Amax over the group, if known, for both usages.
    pub(crate) of_group: Option<FloatTensor<B>>,
}

/// Part of one device's operand that a rank has.
#[derive(Debug, Clone)]
enum Part {
    /// The whole operand.
    Whole,
    /// Some of its rows, in segments.
    Rows(Vec<usize>),
    /// Some of its columns, in segments.
    Cols(Vec<usize>),
    /// Some of its tokens: rows that are gathered right after quantization.
    Tokens(usize),
}

impl Part {
    /// True if the amax of the operand is the largest of the group's.
    fn shares_amax(&self, params: &QuantParams, usage: Usage) -> bool {
        match (params.amax, usage, self) {
            (_, _, Self::Whole) => false,
            (AmaxGranularity::PerTensor, ..) => true,
            // Where the contraction of a stored row is split.
            (AmaxGranularity::PerRow, Usage::Rowwise, Self::Cols(_)) => true,
            (AmaxGranularity::PerRow, Usage::Columnwise, Self::Rows(_) | Self::Tokens(_)) => true,
            (AmaxGranularity::PerRow, ..) => false,
        }
    }
}

impl LinearSharding {
    /// Returns the part that this rank has of an operand with `rows` tokens, or of the weight.
    fn part(&self, role: Role, rows: usize) -> Part {
        let tokens = || match self.sequence_parallel {
            true => Part::Tokens(rows),
            false => Part::Whole,
        };
        let segments = || self.segments.clone();
        match (role, self.dim) {
            (Role::Weight, ShardedDim::Output) => Part::Cols(segments()),
            (Role::Weight, ShardedDim::Input) => Part::Rows(segments()),
            (Role::Input, ShardedDim::Input) => Part::Cols(segments()),
            (Role::OutputGradient, ShardedDim::Output) => Part::Cols(segments()),
            (Role::Input, ShardedDim::Output) => tokens(),
            (Role::OutputGradient, ShardedDim::Input) => tokens(),
        }
    }

    /// Returns the row-wise and the column-wise operand of `x`, if requested.
    pub(super) fn quantize<B: Nvfp4KernelOps>(
        &self,
        x: QuantizeSource<B>,
        role: Role,
        row: Option<FormedSpec<'_>>,
        col: Option<FormedSpec<'_>>,
        dtype: FloatDType,
    ) -> (Option<Operand<B>>, Option<Operand<B>>) {
        let part = self.part(role, x.shape().0);
        let one_amax = |spec: Option<FormedSpec<'_>>| {
            let params = spec?.0.params().copied();
            params.filter(QuantParams::has_one_amax)
        };
        let (x, found) = match (x, [row, col].map(one_amax)) {
            (source @ QuantizeSource::Activation { .. }, [Some(row), Some(col)]) => {
                let made = B::nvfp4_amax(QuantizeRequest::new(source).both(row, col));
                let values = made.values.into_option().expect("an activation");
                let amax = [made.rowwise, made.columnwise];
                let found = FoundAmax {
                    of_part: amax.map(|amax| amax.into_option().expect("requested")),
                    of_group: None,
                };
                (values, Some(found))
            }
            (x, _) => (x.into_values(), None),
        };
        let specs = self.readable(role, (row, col));
        self.quantize_part(x, found, &part, specs, dtype)
    }

    /// Returns the requested operands of the weight `w`. `known` is its amax, if the optimizer
    /// computed it and the operands are quantized with it.
    pub(super) fn quantize_weight<B: Nvfp4KernelOps>(
        &self,
        w: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        specs: (Option<FormedSpec<'_>>, Option<FormedSpec<'_>>),
        dtype: FloatDType,
    ) -> (Option<Operand<B>>, Option<Operand<B>>) {
        let part = self.part(Role::Weight, w.shape()[0]);
        let specs = self.readable(Role::Weight, specs);
        self.quantize_part(w, known, &part, specs, dtype)
    }

    /// Returns the operands of the input by the specs of fprop and, if required, of wgrad.
    pub(super) fn input<B: Nvfp4KernelOps>(
        &self,
        x: QuantizeSource<B>,
        (row, col): (FormedSpec<'_>, Option<FormedSpec<'_>>),
        source: BackwardSource,
        dtype: FloatDType,
    ) -> (Operand<B>, Option<Operand<B>>) {
        let original = col.filter(|_| source == BackwardSource::Original);
        let (forward, saved) = self.quantize(x, Role::Input, Some(row), original, dtype);
        let forward = forward.expect("asked for");
        let saved = match (col, source) {
            (Some(col), BackwardSource::Forward) => {
                let usage = Usage::Columnwise;
                Some(self.requantize(forward.clone(), Role::Input, col, usage, dtype))
            }
            _ => saved,
        };
        (forward, saved)
    }

    /// Returns the source values of this rank's operand of `role`: `x`, or if tokens are gathered,
    /// the tokens of all ranks.
    pub(super) fn sources<B: Nvfp4KernelOps>(
        &self,
        x: FloatTensor<B>,
        role: Role,
    ) -> FloatTensor<B> {
        match self.part(role, x.shape()[0]) {
            Part::Tokens(_) => self.gathered_rows::<B>(x),
            _ => x,
        }
    }

    /// Quantizes the dequantized values of `forward`, the operand of the forward with gathered
    /// tokens, along `usage` by `spec`.
    pub(super) fn requantize<B: Nvfp4KernelOps>(
        &self,
        forward: Operand<B>,
        role: Role,
        (spec, form): FormedSpec<'_>,
        usage: Usage,
        dtype: FloatDType,
    ) -> Operand<B> {
        let values = match forward {
            Operand::Float(x, _) => x,
            Operand::Quantized(source) | Operand::QuantizedMnMajor(source) => {
                // MS-EDEN uses the exact values, everything else the dtype of the activations.
                let is_exact = spec.params().is_some_and(QuantParams::is_ms_eden);
                let dtype = if is_exact { FloatDType::F32 } else { dtype };
                B::nvfp4_dequantize(source, RowGroups::Whole, dtype)
            }
        };
        let part = match self.part(role, values.shape()[0]) {
            Part::Tokens(_) => Part::Whole,
            part => part,
        };
        let asked = Some((spec, form));
        let (row, col) = match usage {
            Usage::Rowwise => (asked, None),
            Usage::Columnwise => (None, asked),
        };
        let specs = self.readable(role, (row, col));
        let (row, col) = self.quantize_part(values, None, &part, specs, dtype);
        row.or(col).expect("one usage was asked for")
    }

    /// Returns the operands of `x`, with the amax values `found`, if they were computed together
    /// with it.
    fn quantize_part<B: Nvfp4KernelOps>(
        &self,
        x: FloatTensor<B>,
        found: Option<FoundAmax<B>>,
        part: &Part,
        (row, col): (Option<FormedSpec<'_>>, Option<FormedSpec<'_>>),
        dtype: FloatDType,
    ) -> (Option<Operand<B>>, Option<Operand<B>>) {
        let params = |spec: Option<FormedSpec<'_>>| spec.and_then(|spec| spec.0.params().copied());
        let [row_params, col_params] = [params(row), params(col)];
        let read = |spec: Option<FormedSpec<'_>>| match (params(spec), spec) {
            (Some(params), Some((_, form))) => params.stored_form(form),
            _ => StoredForm::Rows,
        };
        let [row_read, col_read] = [read(row), read(col)];
        let draws = [row_params, col_params]
            .into_iter()
            .flatten()
            .any(|params| !params.is_deterministic());
        let is_moved = matches!(part, Part::Tokens(_)) || draws && self.is_cut(part);
        // Tensors to be gathered are stored as rows of codes and scales, which can be concatenated.
        let [row_form, col_form] = match is_moved {
            true => [StoredForm::Rows; 2],
            false => [row_read, col_read],
        };
        let [row, col] = [row, col].map(|spec| spec.map(|(spec, _)| spec));
        let [row_amax, col_amax] = self.amaxes::<B>(&x, found, part, [row_params, col_params]);
        let (row_made, col_made) = match (row_params, col_params) {
            (Some(row), Some(col)) if is_one_kernel(&RowGroups::<B>::Whole, &row, &col) => {
                let targets = [Some((row, row_form)), Some((col, col_form))];
                self.segments::<B>(&x, part, (row_amax, col_amax), targets)
                    .into_options()
            }
            _ => {
                let one = |params: Option<QuantParams>, form: StoredForm, usage, amax| {
                    let (target, none) = (Some((params?, form)), MaybeTensor::Absent);
                    let (amax, targets) = match usage {
                        Usage::Rowwise => ((amax, none), [target, None]),
                        Usage::Columnwise => ((none, amax), [None, target]),
                    };
                    Some(self.segments::<B>(&x, part, amax, targets).into_one())
                };
                let made = one(row_params, row_form, Usage::Rowwise, row_amax);
                (made, one(col_params, col_form, Usage::Columnwise, col_amax))
            }
        };
        let is_plain = |spec: Option<&OperandSpec>| spec == Some(&OperandSpec::HighPrecision);
        let values = (is_plain(row) || is_plain(col)).then(|| {
            let x = cast::<B>(x, dtype);
            match part {
                Part::Tokens(_) => self.gathered_rows::<B>(x),
                _ => x,
            }
        });
        let operand = |made: Option<QuantizedMatrix<B>>, spec, usage| match made {
            None if is_plain(spec) => values.clone().map(|x| Operand::Float(x, usage)),
            made => made.map(|made| {
                let axis = match usage {
                    Usage::Rowwise => Axis::Outer,
                    Usage::Columnwise => Axis::Inner,
                };
                let made = match part {
                    Part::Tokens(len) => self.gathered_matrix::<B>(made, axis, &[*len]),
                    _ => made,
                };
                // Converted once, not before each GEMM that reads it: a weight is kept.
                let form = match usage {
                    Usage::Rowwise => row_read,
                    Usage::Columnwise => col_read,
                };
                Operand::Quantized(match is_moved && form != StoredForm::Rows {
                    true => B::nvfp4_in_form(made, RowGroups::Whole, form),
                    false => made,
                })
            }),
        };
        (
            operand(row_made, row, Usage::Rowwise),
            operand(col_made, col, Usage::Columnwise),
        )
    }

    /// Returns the operands of `role` by these specs, in forms that they can have on a rank.
    ///
    /// Operands that the deterministic mode gathers along K are stored as rows of codes and scales:
    /// they are gathered for each GEMM, and the GEMM swizzles the scales.
    fn readable<'a>(
        &self,
        role: Role,
        (row, col): (Option<FormedSpec<'a>>, Option<FormedSpec<'a>>),
    ) -> (Option<FormedSpec<'a>>, Option<FormedSpec<'a>>) {
        let readable = |usage, (spec, form): FormedSpec<'a>| {
            let is_gathered = self.deterministic && self.splits_contraction(role, usage);
            match form {
                _ if is_gathered => (spec, StoredForm::Rows),
                // Shards are packed.
                StoredForm::Bf16Unscaled => (spec, StoredForm::Rows),
                form => (spec, form),
            }
        };
        (
            row.map(|spec| readable(Usage::Rowwise, spec)),
            col.map(|spec| readable(Usage::Columnwise, spec)),
        )
    }

    /// Returns true if the K dimension of this operand's GEMM is sharded: in dgrad if the output is
    /// sharded, in fprop if the input is.
    fn splits_contraction(&self, role: Role, usage: Usage) -> bool {
        match self.dim {
            ShardedDim::Output => {
                matches!(role, Role::OutputGradient | Role::Weight) && usage == Usage::Rowwise
            }
            ShardedDim::Input => matches!(
                (role, usage),
                (Role::Input, Usage::Rowwise) | (Role::Weight, Usage::Columnwise)
            ),
        }
    }

    /// Returns true if a part with random bits is quantized in more than one piece.
    fn is_cut(&self, part: &Part) -> bool {
        match part {
            Part::Whole | Part::Tokens(_) => false,
            Part::Rows(lens) => GapsBetween::of(0, &self.places(lens)).is_none(),
            Part::Cols(lens) => GapsBetween::of(1, &self.places(lens)).is_none(),
        }
    }

    /// Returns the amax values with which a rank quantizes its part. Those of the group are reduced
    /// in one exchange. Empty for a format without a global scale.
    fn amaxes<B: Nvfp4KernelOps>(
        &self,
        x: &FloatTensor<B>,
        found: Option<FoundAmax<B>>,
        part: &Part,
        params: [Option<QuantParams>; 2],
    ) -> [MaybeTensor<B>; 2] {
        let usages = [Usage::Rowwise, Usage::Columnwise];
        let params = params.map(|params| params.filter(|params| params.format.has_global_scale()));
        let (found, of_group) = match found {
            Some(FoundAmax { of_part, of_group }) => (Some(of_part), of_group),
            None => (None, None),
        };
        let found = match (found, params) {
            (Some([row_amax, col_amax]), [row, col]) => {
                [row.map(|_| row_amax), col.map(|_| col_amax)]
            }
            (None, [Some(row), Some(col)]) if !row.is_ms_eden() && !col.is_ms_eden() => {
                let found = B::nvfp4_amax(QuantizeRequest::of_matrix(x.clone()).both(row, col));
                [found.rowwise, found.columnwise].map(MaybeTensor::into_option)
            }
            _ => [0, 1].map(|i| {
                let request = QuantizeRequest::of_matrix(x.clone());
                let found = B::nvfp4_amax(request.along(usages[i], params[i]?, StoredForm::Rows));
                let [row, col] = [found.rowwise, found.columnwise].map(MaybeTensor::into_option);
                row.or(col)
            }),
        };
        if let Some(largest) = of_group {
            return [0, 1]
                .map(|i| {
                    let (own, params) = (found[i].clone()?, params[i].as_ref()?);
                    Some(match part.shares_amax(params, usages[i]) {
                        true => largest.clone(),
                        false => own,
                    })
                })
                .map(MaybeTensor::from);
        }
        // Without transforms both amax values are the same.
        if let ([Some(row), Some(col)], [Some(amax), _]) = (&params, &found)
            && row.shares_amax()
            && col.shares_amax()
        {
            let amax = match part.shares_amax(row, Usage::Rowwise) {
                true => self.exchange::<B>(amax.clone(), Step::AllReduce(Reduction::Max)),
                false => amax.clone(),
            };
            return [amax.clone(), amax].map(MaybeTensor::Present);
        }
        let mut found = found.into_iter();
        let found = [0, 1].map(|i| {
            let amax = found.next().expect("two")?;
            let params = params[i].as_ref().expect("it was found by them");
            Some((amax, part.shares_amax(params, usages[i])))
        });
        let shared: Vec<_> = found
            .iter()
            .flatten()
            .filter(|(_, shared)| *shared)
            .collect();
        if shared.is_empty() {
            return found.map(|found| found.map(|(amax, _)| amax).into());
        }
        let parts = shared.into_iter().map(|(amax, _)| amax.clone()).collect();
        let largest = Step::AllReduce(Reduction::Max);
        let all = self.exchange::<B>(B::float_cat(parts, 0), largest);
        let mut first = 0;
        found.map(|found| {
            let amax = found.map(|(amax, shared)| {
                if !shared {
                    return amax;
                }
                let len = amax.shape()[0];
                first += len;
                narrow::<B>(all.clone(), 0, first - len, len)
            });
            amax.into()
        })
    }

    /// Quantizes the part, segment by segment if segments draw random bits at positions that are
    /// not consecutive.
    fn segments<B: Nvfp4KernelOps>(
        &self,
        x: &FloatTensor<B>,
        part: &Part,
        (row_amax, col_amax): (MaybeTensor<B>, MaybeTensor<B>),
        targets: [Option<(QuantParams, StoredForm)>; 2],
    ) -> QuantizedPair<B> {
        let quantize = |x, row_amax, col_amax, [rowwise, columnwise]: [_; 2]| {
            B::nvfp4_quantize(QuantizeRequest {
                rowwise,
                columnwise,
                ..QuantizeRequest::of_matrix(x).amax(GivenAmax::Each {
                    rowwise: row_amax,
                    columnwise: col_amax,
                })
            })
        };
        let mut all = targets.iter().flatten();
        if all.all(|(params, _)| params.is_deterministic()) {
            return quantize(x.clone(), row_amax, col_amax, targets);
        }
        let [rows, cols] = [x.shape()[0], x.shape()[1]];
        let whole = self.whole_shape((rows, cols), part);
        let at = |start: (usize, usize), gaps: GapsBetween| {
            let at = |made: Option<(QuantParams, StoredForm)>, usage| {
                made.map(|(params, form)| (positioned(params, usage, (start, whole), &gaps), form))
            };
            let [row, col] = targets;
            [at(row, Usage::Rowwise), at(col, Usage::Columnwise)]
        };
        let (dim, segments) = match part {
            Part::Whole => return quantize(x.clone(), row_amax, col_amax, targets),
            Part::Rows(lens) => (0, self.places(lens)),
            Part::Tokens(len) => (0, self.places(&[*len])),
            Part::Cols(lens) => (1, self.places(lens)),
        };
        let start = |segment: &Segment| match dim {
            0 => (segment.whole, 0),
            _ => (0, segment.whole),
        };
        if let Some(gaps) = GapsBetween::of(dim, &segments) {
            return quantize(x.clone(), row_amax, col_amax, at(start(&segments[0]), gaps));
        }
        let made = segments.iter().map(|segment| {
            // For an amax per row or column, those of the segment.
            let amax = |amax: &MaybeTensor<B>, per: usize| {
                let len = if dim == 0 { rows } else { cols };
                let is_along = per == dim && len > 1;
                amax.clone()
                    .map(|amax| match is_along && amax.shape()[0] == len {
                        true => narrow::<B>(amax, 0, segment.own, segment.len),
                        false => amax,
                    })
            };
            let part = narrow::<B>(x.clone(), dim, segment.own, segment.len);
            quantize(
                part,
                amax(&row_amax, 0),
                amax(&col_amax, 1),
                at(start(segment), GapsBetween::none(dim)),
            )
        });
        let made = made.collect::<Vec<_>>();
        concatenated(made, dim)
    }

    /// Returns the segments of this rank.
    fn places(&self, lens: &[usize]) -> Vec<Segment> {
        let (rank, size) = (self.group.rank(), self.group.size());
        let (mut own, mut whole) = (0, 0);
        let places = lens.iter().map(|&len| {
            let segment = Segment {
                own,
                whole: whole + rank * len,
                len,
            };
            own += len;
            whole += size * len;
            segment
        });
        places.collect()
    }

    fn whole_shape(&self, (rows, cols): (usize, usize), part: &Part) -> (usize, usize) {
        let size = self.group.size();
        match part {
            Part::Whole => (rows, cols),
            Part::Rows(_) | Part::Tokens(_) => (rows * size, cols),
            Part::Cols(_) => (rows, cols * size),
        }
    }

    /// Computes the output of a rank from its operands.
    pub(super) fn fprop<B: Nvfp4KernelOps>(
        &self,
        x: Operand<B>,
        w: Operand<B>,
        bias: MaybeTensor<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        if self.dim == ShardedDim::Output {
            return B::nvfp4_gemm(x, w, bias, GemmGroups::None, dtype);
        }
        if self.deterministic {
            return self.whole_gemm(x, w, bias, dtype);
        }
        let y = B::nvfp4_gemm(x, w, MaybeTensor::Absent, GemmGroups::None, dtype);
        let y = self.sum::<B>(y);
        match bias.into_option() {
            None => y,
            Some(bias) => {
                let width = bias.shape()[0];
                let bias = B::float_reshape(bias, Shape::new([1, width]));
                let [y, bias] = [y, bias].map(|x| cast::<B>(x, FloatDType::F32));
                cast::<B>(B::float_add(y, bias), dtype)
            }
        }
    }

    /// Computes the input gradient of a rank from its operands.
    pub(super) fn dgrad<B: Nvfp4KernelOps>(
        &self,
        dy: Operand<B>,
        w: Operand<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let bias = MaybeTensor::Absent;
        match (self.dim, self.deterministic) {
            (ShardedDim::Input, _) => B::nvfp4_gemm(dy, w, bias, GemmGroups::None, dtype),
            (ShardedDim::Output, true) => self.whole_gemm(dy, w, bias, dtype),
            (ShardedDim::Output, false) => {
                self.sum::<B>(B::nvfp4_gemm(dy, w, bias, GemmGroups::None, dtype))
            }
        }
    }

    /// Returns the gradient of the bias, in `f32`, given `dy` and `sum`, the sum of its rows.
    pub(super) fn bias_grad<B: Nvfp4KernelOps>(
        &self,
        dy: FloatTensor<B>,
        sum: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    ) -> FloatTensor<B> {
        match (self.dim, self.sequence_parallel) {
            (ShardedDim::Input, true) if self.deterministic => sum(self.gathered_rows::<B>(dy)),
            (ShardedDim::Input, true) => {
                let step = Step::AllReduce(Reduction::Sum);
                B::nvfp4_exchange(sum(dy), self.group.gradient_exchange(step))
            }
            _ => sum(dy),
        }
    }

    /// Computes the GEMM of operands with a sharded K dimension as one device would, and returns
    /// this rank's rows.
    fn whole_gemm<B: Nvfp4KernelOps>(
        &self,
        a: Operand<B>,
        b: Operand<B>,
        bias: MaybeTensor<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let (a, b) = self.gather_contraction(a, b);
        let out = B::nvfp4_gemm(a, b, bias, GemmGroups::None, dtype);
        match self.sequence_parallel {
            true => self.exchange::<B>(out, Step::Slice),
            false => out,
        }
    }

    /// Gathers both operands of a GEMM with a sharded K dimension along K.
    fn gather_contraction<B: Nvfp4KernelOps>(
        &self,
        a: Operand<B>,
        b: Operand<B>,
    ) -> (Operand<B>, Operand<B>) {
        let gathered = |operand| self.gathered(operand, Axis::Inner, &self.segments);
        (gathered(a), gathered(b))
    }

    /// Sums the partial results of all ranks, and returns the sum or this rank's rows of it.
    fn sum<B: Nvfp4KernelOps>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let step = match self.sequence_parallel {
            true => Step::ReduceScatter(Reduction::Sum),
            false => Step::AllReduce(Reduction::Sum),
        };
        self.exchange::<B>(x, step)
    }

    /// Gathers the rows of all ranks.
    fn gathered_rows<B: Nvfp4KernelOps>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        self.exchange::<B>(x, Step::AllGather)
    }

    fn exchange<B: Nvfp4KernelOps>(&self, x: FloatTensor<B>, step: Step) -> FloatTensor<B> {
        B::nvfp4_exchange(x, self.constant(step))
    }

    fn constant(&self, forward: Step) -> Exchange {
        Exchange::constant(self.group.link(), forward)
    }
}
