//! A weight of which each rank has some rows (FSDP): what is gathered are its quantized operands.

use burn_core::backend::{TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::FloatDType;
use nvfp4_kernels::Usage;
use nvfp4_parallel::Reduction;

use super::{FormedSpec, FoundAmax, LinearSharding, Role, ShardedDim};
use crate::ops::Nvfp4KernelOps;
use crate::ops::collective::{Step, exchange_beside};
use crate::ops::dtype::cast;
use crate::ops::form::WeightForms;
use crate::ops::operands::requantize;
use crate::ops::spec::{LinearSpec, OperandSpec};
use crate::ops::tensors::{Operand, RowGroups};
use crate::parallel::ProcessGroup;

/// How the rows of a weight become those of all ranks.
///
/// Each rank quantizes its rows to the bytes that one device would: with the amax of all rows, and
/// with the random bits of their place. Codes and block scales travel, 0.5625 bytes an element and
/// orientation in NVFP4, where the parameter in `f32` has four. In high precision the weight
/// travels in the type of the activations.
#[derive(Clone, Debug)]
pub(crate) struct GatheredWeight {
    group: ProcessGroup,
    /// The parameter whose gradient is averaged beside the rest of the backward. Without it, the
    /// gradient goes to this rank's rows, which are made of those of several parameters.
    parameter: Option<u64>,
    /// How the gradients of ranks become one.
    reduction: Reduction,
}

impl GatheredWeight {
    /// The weight of which each rank of `group` has `rows` rows, for the operands of `spec`; none
    /// if blocks or rotation groups of an operand would have rows of two ranks.
    pub(crate) fn new(
        group: &ProcessGroup,
        (parameter, reduction): (Option<u64>, Reduction),
        rows: usize,
        spec: &LinearSpec,
    ) -> Option<Self> {
        let operands = [&spec.fprop_w, &spec.dgrad_w];
        let fits = |spec: &OperandSpec| rows.is_multiple_of(spec.unit());
        operands.into_iter().all(fits).then(|| Self {
            group: group.clone(),
            parameter,
            reduction,
        })
    }

    /// The ranks.
    pub(in crate::ops) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The operand of fprop of the weight of which this rank has `rows`; `known` is their amax, if
    /// it was found before and the operand is made from it.
    pub(in crate::ops) fn fprop_operand<B: Nvfp4KernelOps>(
        &self,
        rows: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        asked: FormedSpec<'_>,
        dtype: FloatDType,
    ) -> Operand<B> {
        let (_, w) = self.quantize(rows, known, (None, Some(asked)), dtype);
        w.expect("asked for")
    }

    /// The operand of dgrad; `known` is what the operand of fprop was made from, and this one can be.
    pub(in crate::ops) fn dgrad_operand<B: Nvfp4KernelOps>(
        &self,
        rows: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        spec: &LinearSpec,
        forms: WeightForms,
        dtype: FloatDType,
    ) -> Operand<B> {
        let asked = (&spec.dgrad_w, forms.dgrad);
        if spec.has_weight_pair() {
            let (w, _) = self.quantize(rows, known, (Some(asked), None), dtype);
            return w.expect("asked for");
        }
        let forward = self.fprop_operand(rows, known, (&spec.fprop_w, forms.fprop), dtype);
        let (spec, form) = asked;
        requantize::<B>(
            forward,
            &RowGroups::Whole,
            spec,
            Usage::Rowwise,
            dtype,
            form,
        )
    }

    /// The operands, as far as they are asked for, of the weight of which this rank has the rows
    /// `w`; `known` is their amax, if it was found before and the operands are made from it.
    fn quantize<B: Nvfp4KernelOps>(
        &self,
        w: FloatTensor<B>,
        known: Option<FoundAmax<B>>,
        specs: (Option<FormedSpec<'_>>, Option<FormedSpec<'_>>),
        dtype: FloatDType,
    ) -> (Option<Operand<B>>, Option<Operand<B>>) {
        let rows = LinearSharding::of_rows(&self.group);
        // Rows of a weight are gathered as rows of tokens are.
        let part = rows.part(Role::Input, w.shape()[0]);
        let specs = rows.readable(Role::Input, specs);
        rows.quantize_part(w, known, &part, specs, dtype)
    }

    /// The gradient of this rank's rows, of type `dtype`, of `grad`, that of the whole weight: the
    /// mean over the ranks, which have a part of the batch each, or their sum. None if it
    /// [waits](crate::ops::collective::Waiting) beside the rest of the backward.
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
    /// Of operands whose rows are gathered as soon as they are quantized, over all of `group`.
    pub(super) fn of_rows(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            dim: ShardedDim::Output,
            segments: Vec::new(),
            sequence_parallel: true,
            group_amax: true,
            deterministic: false,
        }
    }
}
