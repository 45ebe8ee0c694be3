//! Vocabulary-parallel output head, with its loss.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{Bool, DType, Int, Tensor};
use nvfp4_formats::{CrossEntropy, Nvfp4Error};

use super::super::LmHead;
use super::embedding::own_numbers;
use super::{ShardedParameter, TensorParallel, replaced};
use crate::functions::{linear_of_rows, or_panic};
use crate::loss::CHUNK_BYTES;
use crate::ops::loss::{VocabLoss, VocabTargets, vocab_parallel_cross_entropy};
use crate::ops::{LinearContext, LinearSpec};
use crate::parallel::functions;
use crate::validate;
use crate::whole::whole_dims;

/// [`LmHead`] with the vocabulary sharded over ranks: a weight `[d_model, vocab / ranks]` per rank.
///
/// For the softmax, ranks exchange only the maximum logit of each token and the sum of its
/// exponentials, never the logits. The loss is the same number on all ranks; it differs from that
/// of one device by the order of summation. Tokens are processed in chunks whose logits and
/// gradients take at most [`CHUNK_BYTES`](crate::loss::CHUNK_BYTES) (or 128 rows). The gradients of
/// features and weight are computed in the forward, and kept.
#[derive(Module, Debug)]
pub struct VocabParallelHead {
    /// Columns of this rank.
    pub weight: Param<Tensor<2>>,
    /// Loss configuration.
    #[module(skip)]
    pub params: CrossEntropy,
    #[module(skip)]
    parallel: TensorParallel,
}

impl VocabParallelHead {
    /// Returns this rank's shard of `head`, which is identical on all ranks. The parameter keeps
    /// its id.
    ///
    /// # Errors
    /// Returns an error if the number of ranks does not divide the vocabulary.
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

    /// Gathers the shards of all ranks into an unsharded head. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_head(self) -> LmHead {
        let group = &self.parallel.group;
        let weight = replaced(&self.weight, |weight| group.all_gather(weight, 1));
        LmHead::new(weight).with_params(self.params)
    }

    /// Returns the sharded parameter.
    pub fn sharded_parameter(&self) -> (ParamId, ShardedParameter) {
        let ranks = self.parallel.group.size();
        let sharded = ShardedParameter::of_one(&self.weight, 1, ranks);
        (self.weight.id, sharded)
    }

    /// Computes the rank's logits of `x`, `[tokens, vocab / ranks]` in the dtype of `x`. `x` is
    /// `[tokens, d_model]`, replicated on all ranks, or with sequence parallelism the rank's rows
    /// of that.
    ///
    /// # Errors
    /// Returns an error if the dtype of `x` is not supported, or its last axis is not `d_model`.
    pub fn try_logits(&self, x: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
        self.check_features(&x)?;
        let (spec, context) = (LinearSpec::high_precision(), LinearContext::default());
        let weight = self.weight.val();
        Ok(linear_of_rows(
            self.all_features(x),
            weight,
            None,
            spec,
            context,
        ))
    }

    /// Returns an error if the head does not accept `x`.
    fn check_features(&self, x: &Tensor<2>) -> Result<(), Nvfp4Error> {
        validate::operand("x", x)?;
        validate::parameter(&x.device(), "weight", &self.weight)?;
        let ([rows, width], [d_model, _]) = (x.dims(), whole_dims(&self.weight));
        let why = || "the d_model of the head".into();
        validate::shape("x", [rows, width], [rows, d_model], why)
    }

    /// Gathers the features of all tokens, given those of this rank.
    fn all_features(&self, x: Tensor<2>) -> Tensor<2> {
        let group = &self.parallel.group;
        match self.parallel.sequence_parallel {
            true => functions::gather_sum(x, 0, group),
            false => functions::copy(x, group),
        }
    }

    /// Computes the cross entropy, `f32[1]`, of the logits of `x`
    /// ([`try_logits`](Self::try_logits)) against the `targets` of all tokens, `[tokens]`, as
    /// defined by [`CrossEntropy`].
    ///
    /// # Errors
    /// Same as [`try_logits`](Self::try_logits); also if the number of targets differs from the
    /// number of tokens, or [`CrossEntropy::check`] fails.
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
        self.check_features(&x)?;
        let numbers = own_numbers(targets.clone(), cols, &self.parallel)?;
        let targets = VocabTargets {
            weights: self.weights_of(targets, numbers.nowhere),
            own: numbers.own,
        };
        let of = VocabLoss {
            params: self.params,
            group,
            chunk_bytes: CHUNK_BYTES,
        };
        let operands = [self.all_features(x), self.weight.val()];
        Ok(vocab_parallel_cross_entropy(operands, targets, of))
    }

    /// Returns the factors of the losses of tokens, `f32[tokens]`: zero for ignored targets; NaN,
    /// in loss and gradient, for a target that is no class or is marked in `nowhere`.
    fn weights_of(&self, targets: Tensor<1, Int>, nowhere: Tensor<1, Bool>) -> Tensor<1> {
        let CrossEntropy {
            ignore, reduction, ..
        } = self.params;
        let ignored = targets.equal_elem(ignore);
        let device = nowhere.device().without_autodiff();
        let counted = Tensor::<1>::ones(nowhere.dims(), (&device, DType::F32));
        let counted = counted.mask_fill(ignored.clone(), 0);
        let weights = match reduction {
            nvfp4_formats::Reduction::Mean => {
                let count = counted.clone().sum().clamp_min(1.0);
                counted / count
            }
            nvfp4_formats::Reduction::Sum => counted,
        };
        weights.mask_fill(nowhere.bool_and(ignored.bool_not()), f32::NAN)
    }

    /// Panicking version of [`try_loss`](Self::try_loss).
    #[track_caller]
    pub fn loss(&self, x: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        or_panic("VocabParallelHead::loss", self.try_loss(x, targets))
    }
}
