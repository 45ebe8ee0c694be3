//! Sharded weight (FSDP) whose quantized operands are gathered.

use burn_core::backend::{TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::FloatDType;
use nvfp4_formats::Usage;
use nvfp4_parallel::Reduction;

use super::places::Axis;
use super::{FormedSpec, FoundAmax, LinearSharding, Role, ShardedDim};
use crate::ops::Nvfp4KernelOps;
use crate::ops::collective::{Step, exchange_beside};
use crate::ops::dtype::cast;
use crate::ops::linear::plan::LinearPlan;
use crate::ops::operands::{quantize, requantize};
use crate::ops::spec::{LinearSpec, OperandSpec};
use crate::ops::tensors::{Operand, QuantizeSource, RowGroups};
use crate::parallel::ProcessGroup;

/// Shard of a weight on each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightPart {
    /// This number of rows of a matrix.
    Rows(usize),
    /// This number of matrices of a stack, which has one per expert.
    Experts(usize),
}

impl WeightPart {
    /// Returns the shard of a rank with these dimensions.
    ///
    /// # Panics
    /// If they are neither those of a matrix nor those of a stack.
    pub(crate) fn of(dims: &[usize]) -> Self {
        match *dims {
            [rows, _] => Self::Rows(rows),
            [experts, _, _] => Self::Experts(experts),
            _ => panic!("a weight of the dimensions {dims:?}"),
        }
    }
}

/// Gather of the operands of a sharded weight.
///
/// Each rank quantizes its shard to the same bytes as one device would: with the random bits of its
/// position and, for a matrix, with the amax of all rows. Experts of a stack have separate amax
/// values, which are gathered with the codes. Codes and block scales are gathered, 0.5625 bytes per
/// element and orientation in NVFP4, compared with four for the parameter in `f32`. In high
/// precision the weight is gathered in the dtype of the activations.
#[derive(Clone, Debug)]
pub(crate) struct GatheredWeight {
    group: ProcessGroup,
    /// Parameter whose gradient is averaged concurrently with the rest of the backward. Without it,
    /// the gradient is passed to this rank's shard, which consists of the shards of several
    /// parameters.
    parameter: Option<u64>,
    /// Reduction of the gradients of the ranks.
    reduction: Reduction,
    part: WeightPart,
}

impl GatheredWeight {
    /// Creates the gather of the weight with shards `part` on the ranks of `group`, for the
    /// operands of `spec`. Returns `None` if operands quantized by shards differ from those of the
    /// whole:
    ///
    /// - if blocks or RHT groups would contain rows of two ranks;
    /// - if the weight is transformed with signs that each rank draws separately: they must be
    ///   those of the gradient that the operand is multiplied by.
    pub(crate) fn new(
        group: &ProcessGroup,
        (parameter, reduction): (Option<u64>, Reduction),
        part: WeightPart,
        spec: &LinearSpec,
    ) -> Option<Self> {
        let operands = [&spec.fprop_w, &spec.dgrad_w];
        let has_whole_blocks = |spec: &OperandSpec| match part {
            WeightPart::Rows(rows) => rows.is_multiple_of(spec.unit()),
            WeightPart::Experts(_) => true,
        };
        let is_rotated = |spec: &OperandSpec| {
            let params = spec.params();
            params.is_some_and(|params| params.hadamard.is_some())
        };
        let is_rotated = spec.has_weight_pair() && is_rotated(&spec.dgrad_w);
        let fits = operands.into_iter().all(has_whole_blocks) && !is_rotated;
        fits.then(|| Self {
            group: group.clone(),
            parameter,
            reduction,
            part,
        })
    }

    /// Returns the ranks.
    pub(in crate::ops) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the operand of fprop of the weight whose shard on this rank is `part`. `known` is
    /// the amax of the shard, if it is known and the operand is quantized with it.
    pub(in crate::ops) fn fprop_operand<B: Nvfp4KernelOps>(
        &self,
        part: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        asked: FormedSpec<'_>,
        dtype: FloatDType,
    ) -> Operand<B> {
        self.quantize(part, known, (asked, Usage::Columnwise), dtype)
    }

    /// Returns the operand of dgrad. `known` is the amax that the operand of fprop was quantized
    /// with, if this one can use it too.
    pub(in crate::ops) fn dgrad_operand<B: Nvfp4KernelOps>(
        &self,
        part: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        spec: &LinearSpec,
        plan: LinearPlan,
        dtype: FloatDType,
    ) -> Operand<B> {
        let asked = (&spec.dgrad_w, plan.dgrad.packed());
        if spec.has_weight_pair() {
            return self.quantize(part, known, (asked, Usage::Rowwise), dtype);
        }
        let forward = self.fprop_operand(part, known, (&spec.fprop_w, plan.fprop.packed()), dtype);
        let groups = match self.part {
            WeightPart::Rows(_) => RowGroups::Whole,
            WeightPart::Experts(held) => RowGroups::Batch(held * self.group.size()),
        };
        let (spec, form) = asked;
        requantize::<B>(forward, &groups, spec, Usage::Rowwise, dtype, form)
    }

    /// Returns the operand along `usage` of the weight whose shard on this rank is `w`. `known` is
    /// the amax of the shard, if it is known and the operand is quantized with it.
    fn quantize<B: Nvfp4KernelOps>(
        &self,
        w: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        (asked, usage): (FormedSpec<'_>, Usage),
        dtype: FloatDType,
    ) -> Operand<B> {
        let sharding = LinearSharding::of_rows(&self.group);
        match self.part {
            WeightPart::Rows(rows) => {
                // Rows of a weight are gathered like rows of tokens.
                let part = sharding.part(Role::Input, rows);
                let specs = match usage {
                    Usage::Rowwise => (Some(asked), None),
                    Usage::Columnwise => (None, Some(asked)),
                };
                let specs = sharding.readable(Role::Input, specs);
                let (row, col) = sharding.quantize_part(w, known, &part, specs, dtype);
                row.or(col).expect("one usage was asked for")
            }
            WeightPart::Experts(held) => {
                let (shape, (spec, form)) = (w.shape(), asked);
                let earlier = self.group.rank() * held;
                let spec = spec.behind_weights(earlier, usage, [shape[1], shape[2]]);
                let (w, groups) = (QuantizeSource::Matrix(w), RowGroups::Batch(held));
                let part = quantize::<B>(w, &groups, &spec, usage, dtype, form);
                sharding.gathered(part, Axis::Stack, &[held])
            }
        }
    }

    /// Reduces `grad`, the gradient of the whole weight, to that of this rank's shard, of dtype
    /// `dtype`: the mean over the ranks, which each have a shard of the batch, or the sum. Returns
    /// `None` if it [waits](crate::ops::collective::Waiting) while the rest of the backward runs.
    pub(in crate::ops) fn reduce<B: Nvfp4KernelOps>(
        &self,
        grad: FloatTensor<B>,
        dtype: FloatDType,
    ) -> Option<FloatTensor<B>> {
        let exchange = (self.group).gradient_exchange(Step::ReduceScatter(self.reduction));
        match self.parameter {
            Some(id) => {
                exchange_beside::<B>((id, dtype.into()), grad, exchange);
                None
            }
            None => Some(cast::<B>(B::nvfp4_exchange(grad, exchange), dtype)),
        }
    }
}

impl LinearSharding {
    /// Sharding of operands whose rows are gathered over `group` right after quantization.
    pub(super) fn of_rows(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            dim: ShardedDim::Output,
            segments: Vec::new(),
            sequence_parallel: true,
            deterministic: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Distribution, Int, Tensor};
    use nvfp4_formats::{AmaxGranularity, Layout, RandomStream, Rounding, StoredForm};

    use super::*;
    use crate::Nvfp4Recipe;
    use crate::ops::context::tests::{device, spec};
    use crate::ops::spec::{BackwardSource, QuantParams};
    use crate::ops::tensors::{QuantizedData, QuantizedMatrix};

    /// Returns the layout, if the operand is quantized, and the bytes of all tensors.
    fn parts(operand: Operand<Dispatch>) -> (Option<Layout>, Vec<Vec<u8>>) {
        let float = |x| Tensor::<2>::from_dispatch(x).into_data();
        let int = |x| Tensor::<2, Int>::from_dispatch(x).into_data();
        let (layout, tensors) = match operand {
            Operand::Float(x, _) => (None, vec![float(x)]),
            Operand::Quantized(QuantizedMatrix { data, amax, layout }) => {
                let QuantizedData::Packed { codes, scales } = data else {
                    panic!("operands of experts are packed");
                };
                let amax = amax.into_option();
                let amax = amax.map(|amax| Tensor::<1>::from_dispatch(amax).into_data());
                let tensors = [int(codes), int(scales)].into_iter().chain(amax);
                (Some(layout), tensors.collect())
            }
            other => panic!("{other:?} is no operand of a layer"),
        };
        let bytes = tensors.into_iter().map(|data| data.as_bytes().to_vec());
        (layout, bytes.collect())
    }

    /// Returns the operands of fprop and of dgrad in this form.
    fn operands(
        spec: &LinearSpec,
        form: StoredForm,
        w: Tensor<3>,
        gathered: Option<&GatheredWeight>,
    ) -> [(Option<Layout>, Vec<Vec<u8>>); 2] {
        let dtype = FloatDType::F32;
        let plan = LinearPlan {
            fprop: form,
            dgrad: form,
            wgrad: form,
        };
        let [experts, ..] = w.dims();
        let w = w.into_dispatch();
        let (fprop, dgrad) = match gathered {
            Some(gathered) => {
                let asked = (&spec.fprop_w, form);
                let fprop = gathered.fprop_operand(w.clone(), None, asked, dtype);
                let dgrad = gathered.dgrad_operand(w, None, spec, plan, dtype);
                (fprop, dgrad)
            }
            None => {
                let groups = RowGroups::Batch(experts);
                let made = |spec, usage| {
                    let w = QuantizeSource::Matrix(w.clone());
                    quantize::<Dispatch>(w, &groups, spec, usage, dtype, form)
                };
                let fprop = made(&spec.fprop_w, Usage::Columnwise);
                let dgrad = match spec.has_weight_pair() {
                    true => made(&spec.dgrad_w, Usage::Rowwise),
                    false => {
                        let (from, usage) = (fprop.clone(), Usage::Rowwise);
                        requantize(from, &groups, &spec.dgrad_w, usage, dtype, form)
                    }
                };
                (fprop, dgrad)
            }
        };
        [fprop, dgrad].map(parts)
    }

    /// The operands of a stack that two ranks quantize, in rows and in tiles, have the bytes of the
    /// whole.
    fn operands_of_ranks_are_those_of_the_whole(what: &str, spec: &LinearSpec) {
        let (device, ..) = device();
        let normal = Distribution::Normal(0.0, 1.0);
        for [d_in, d_out] in [[48, 80], [128, 256]] {
            let w = Tensor::<3>::random([4, d_in, d_out], normal, (&device, DType::F32));
            for form in [StoredForm::Rows, StoredForm::Tiles] {
                let expected = operands(spec, form, w.clone(), None);
                thread::scope(|scope| {
                    for group in ProcessGroup::loopback(2, Duration::from_secs(60)) {
                        let (w, expected) = (w.clone(), &expected);
                        scope.spawn(move || {
                            let part = WeightPart::Experts(2);
                            let of = (None, Reduction::Avg);
                            let gathered = GatheredWeight::new(&group, of, part, spec);
                            let gathered = gathered.expect("experts are whole");
                            let w = w.narrow(0, 2 * group.rank(), 2);
                            let found = operands(spec, form, w, Some(&gathered));
                            let is_same = found == *expected;
                            assert!(is_same, "{what}, {form:?}, {d_in} x {d_out}");
                        });
                    }
                });
            }
        }
    }

    #[test]
    fn of_each_preset() {
        for preset in Nvfp4Recipe::preset_names() {
            operands_of_ranks_are_those_of_the_whole(preset, &spec(preset));
        }
    }

    #[test]
    fn with_random_bits() {
        let stream = RandomStream::new(1, 2, 3);
        let drawn = OperandSpec::nvfp4(Rounding::Stochastic(stream));
        let mut spec = spec("nvidia");
        (spec.fprop_w, spec.dgrad_w) = (drawn, drawn);
        operands_of_ranks_are_those_of_the_whole("random bits", &spec);
    }

    #[test]
    fn with_an_amax_for_each_row() {
        let per_row = OperandSpec::Quantized(QuantParams {
            amax: AmaxGranularity::PerRow,
            ..QuantParams::nvfp4(Rounding::Nearest)
        });
        let mut spec = spec("nvidia");
        (spec.fprop_w, spec.dgrad_w) = (per_row, per_row);
        operands_of_ranks_are_those_of_the_whole("amax of rows", &spec);
    }

    /// Weights that are transformed with signs that ranks draw separately are not gathered.
    #[test]
    fn rotated_weights_are_not_gathered() {
        let mut spec = spec("quartet2");
        let is_gathered = |spec: &LinearSpec, part| {
            let group = &ProcessGroup::loopback(2, Duration::ZERO)[0];
            GatheredWeight::new(group, (None, Reduction::Avg), part, spec).is_some()
        };
        let parts = [WeightPart::Rows(128), WeightPart::Experts(2)];
        assert!(parts.iter().all(|&part| is_gathered(&spec, part)));
        spec.source = BackwardSource::Original;
        assert!(!parts.iter().any(|&part| is_gathered(&spec, part)));
    }
}
