//! The head of a rank, with its loss.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{FloatDType, Int, Tensor};
use nvfp4_kernels::{CrossEntropy, Nvfp4Error};
use nvfp4_parallel::Reduction;

use super::super::{LmHead, cast};
use super::embedding::{OwnNumbers, own_numbers};
use super::{ShardedParameter, TensorParallel, replaced};
use crate::functions::{linear_of_rows, or_panic};
use crate::ops::{LinearContext, LinearSpec};
use crate::parallel::{ProcessGroup, functions, whole_dims};
use crate::validate;

/// [`LmHead`] with a part of the vocabulary on each rank: a weight `[d_model, vocab / ranks]`.
///
/// Of the softmax, ranks exchange the largest logit of each token and the sum of its exponentials,
/// never the logits. The loss is the same number on all ranks; it differs from that of one device
/// by the order of its sums. The logits of all tokens are in memory, in `f32`, for the rank's part
/// of the vocabulary.
#[derive(Module, Debug)]
pub struct VocabParallelHead {
    /// The rank's columns.
    pub weight: Param<Tensor<2>>,
    /// The loss.
    #[module(skip)]
    pub params: CrossEntropy,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelHead {
    /// This rank's part of `head`, of which all ranks have the same. The parameter keeps its id.
    ///
    /// # Errors
    /// When the ranks do not divide the vocabulary.
    pub fn from_head(head: LmHead, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        let group = &parallel.group;
        let vocab = head.weight.lazy_shape().dims::<2>()[1];
        group.check_parts("head", vocab)?;
        let cols = vocab / group.size();
        let own = |weight: Tensor<2>| weight.narrow(1, group.rank() * cols, cols);
        Ok(Self {
            weight: replaced(&head.weight, own),
            params: head.params,
            parallel: parallel.clone(),
        })
    }

    /// The head of one device, of the parts of all ranks, each of which calls this.
    ///
    /// # Panics
    /// When the group fails.
    pub fn into_head(self) -> LmHead {
        let group = &self.parallel.group;
        let weight = replaced(&self.weight, |weight| group.all_gather(weight, 1));
        LmHead::new(weight).with_params(self.params)
    }

    /// The parameter, of which each rank has a part.
    pub fn sharded_parameter(&self) -> (ParamId, ShardedParameter) {
        let ranks = self.parallel.group.size();
        let sharded = ShardedParameter::of_one(&self.weight, 1, ranks);
        (self.weight.id, sharded)
    }

    /// The rank's logits of `x`, `[tokens, vocab / ranks]` in its type; `x` is `[tokens, d_model]`,
    /// the same on all ranks, or with sequence parallelism the rank's part of that.
    ///
    /// # Errors
    /// When the type of `x` is not supported, or its last axis is not `d_model`.
    pub fn try_logits(&self, x: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
        validate::operand("x", &x)?;
        validate::parameter(&x.device(), "weight", &self.weight)?;
        let ([rows, width], [d_model, _]) = (x.dims(), whole_dims(&self.weight));
        let why = || "the d_model of the head".into();
        validate::shape("x", [rows, width], [rows, d_model], why)?;
        let group = &self.parallel.group;
        let x = match self.parallel.sequence_parallel {
            true => functions::gather_sum(x, 0, group),
            false => functions::copy(x, group),
        };
        let (spec, context) = (LinearSpec::high_precision(), LinearContext::default());
        Ok(linear_of_rows(x, self.weight.val(), None, spec, context))
    }

    /// The cross entropy, `f32[1]`, of the logits of `x` ([`try_logits`](Self::try_logits)) with
    /// the `targets` of all tokens, `[tokens]`; as [`CrossEntropy`] defines it.
    ///
    /// # Errors
    /// As [`try_logits`](Self::try_logits), and when there is not a target for each token, or the
    /// loss does not pass [`CrossEntropy::check`].
    pub fn try_loss(&self, x: Tensor<2>, targets: Tensor<1, Int>) -> Result<Tensor<1>, Nvfp4Error> {
        self.params.check()?;
        let group = &self.parallel.group;
        let tokens = match self.parallel.sequence_parallel {
            true => x.dims()[0] * group.size(),
            false => x.dims()[0],
        };
        let why = || "a target for each token".into();
        validate::shape("targets", targets.dims(), [tokens], why)?;
        validate::same_device(("x", &x.device()), ("targets", &targets.device()))?;
        let [_, cols] = whole_dims(&self.weight);
        let numbers = own_numbers(targets.clone(), cols, &self.parallel)?;
        let logits = cast(self.try_logits(x)?, FloatDType::F32);
        Ok(self.loss_of(logits, targets, numbers, group))
    }

    /// The loss of the rank's logits, `f32[tokens, vocab / ranks]`.
    fn loss_of(
        &self,
        logits: Tensor<2>,
        targets: Tensor<1, Int>,
        numbers: OwnNumbers,
        group: &ProcessGroup,
    ) -> Tensor<1> {
        let CrossEntropy {
            ignore,
            smoothing,
            z_loss,
            reduction,
        } = self.params;
        let [tokens, cols] = logits.dims();
        let largest = group.all_reduce(logits.clone().detach().max_dim(1), Reduction::Max);
        let exponentials = (logits.clone() - largest.clone()).exp().sum_dim(1);
        let lse = (functions::reduce(exponentials, group).log() + largest).reshape([tokens]);
        // The logit of the target is on one rank; the others add zeros.
        let absent = numbers.own.clone().equal_elem(-1);
        let place = numbers
            .own
            .mask_fill(absent.clone(), 0)
            .reshape([tokens, 1]);
        let own = logits.clone().gather(1, place).reshape([tokens]);
        let of_target = functions::reduce(own.mask_fill(absent, 0), group);
        let mut losses = (lse.clone() - of_target).mul_scalar(1.0 - smoothing);
        if smoothing > 0.0 {
            let sums = functions::reduce(logits.sum_dim(1), group).reshape([tokens]);
            let mean = sums.div_scalar((cols * group.size()) as f32);
            losses = losses + (lse.clone() - mean).mul_scalar(smoothing);
        }
        if z_loss > 0.0 {
            losses = losses + lse.square().mul_scalar(z_loss);
        }
        let ignored = targets.equal_elem(ignore);
        let counted = Tensor::<1>::ones([tokens], &losses.device().without_autodiff());
        let counted = counted.cast(FloatDType::F32).mask_fill(ignored.clone(), 0);
        let count = counted.clone().sum().clamp_min(1.0);
        // NaN, in loss and gradient, for a target that is no class.
        let wrong = numbers.nowhere.bool_and(ignored.bool_not());
        let weights = counted.mask_fill(wrong, f32::NAN);
        let weights = match reduction {
            nvfp4_kernels::Reduction::Mean => weights / count,
            nvfp4_kernels::Reduction::Sum => weights,
        };
        (losses * Tensor::from_inner(weights)).sum()
    }

    /// [`try_loss`](Self::try_loss), panicking where it fails.
    pub fn loss(&self, x: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        or_panic("VocabParallelHead::loss", self.try_loss(x, targets))
    }
}
