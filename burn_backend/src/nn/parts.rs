//! Concatenation of layers into one, and the inverse, which restores their ids.

use burn_core::backend::Dispatch;
use burn_core::module::{Param, ParamId};
use burn_core::tensor::Tensor;
use burn_nn::Linear;

use crate::functions::into_bias;
use crate::ops::{LinearContext, LinearSpec, Nvfp4Ops, RowGroups, WeightIdentity};
use crate::parallel::is_sharded;

/// Parameter ids of a layer that was concatenated into another.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartIds {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl PartIds {
    /// Returns the ids of each of `linears`.
    pub fn of(linears: &[Linear]) -> Vec<Self> {
        let ids = |linear: &Linear| Self {
            weight: linear.weight.id,
            bias: linear.bias.as_ref().map(|bias| bias.id),
        };
        linears.iter().map(ids).collect()
    }
}

/// Linear layer as a part of a feed-forward, with one weight or one per group of rows.
pub(super) struct LinearPart<const W: usize, const B: usize> {
    pub weight: Tensor<W>,
    pub bias: Option<Tensor<B>>,
    pub spec: (LinearSpec, LinearContext),
}

impl<const W: usize, const B: usize> LinearPart<W, B> {
    /// Returns true if the output for the input `x` has a gradient.
    pub fn tracks(&self, x: &Tensor<2>) -> bool {
        let bias = self.bias.as_ref().is_some_and(Tensor::is_tracked);
        x.is_tracked() || self.weight.is_tracked() || bias
    }

    /// Runs the layer on the rows `x`. If tokens are sharded, the number of output rows differs.
    pub fn run(self, x: Tensor<2>, groups: RowGroups<Dispatch>) -> Tensor<2> {
        let (spec, context) = self.spec;
        Tensor::from_dispatch(Dispatch::nvfp4_linear(
            x.into_dispatch(),
            self.weight.into_dispatch(),
            into_bias(self.bias),
            groups,
            spec,
            context,
        ))
    }
}

/// Identity of the weight with values `values` of `params`, the cache key of its operands. `None`
/// for a weight without autodiff that is gathered for each use: the cache would keep it alive and
/// never find it again.
pub(super) fn identity_of<'a, const D: usize>(
    params: impl IntoIterator<Item = &'a Param<Tensor<D>>>,
    values: &[&Tensor<D>],
) -> Option<WeightIdentity> {
    let is_autodiff = values.iter().all(|value| value.is_autodiff());
    let is_kept = is_autodiff || !params.into_iter().any(is_sharded);
    is_kept.then(|| WeightIdentity::of(values.iter().copied()))?
}

/// Returns a separate layer, with the ids at `index` in `ids`, or with new ids.
pub(super) fn apart(
    ids: Option<&[PartIds]>,
    index: usize,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Linear {
    let ids = ids.map(|ids| ids[index]);
    Linear {
        weight: param(ids.map(|ids| ids.weight), weight),
        bias: bias.map(|bias| param(ids.and_then(|ids| ids.bias), bias)),
    }
}

fn param<const D: usize>(id: Option<ParamId>, value: Tensor<D>) -> Param<Tensor<D>> {
    let mut param = Param::from_tensor(value);
    if let Some(id) = id {
        param.id = id;
    }
    param
}

/// Returns the value of a parameter without a gradient requirement. Detaching alone keeps the
/// requirement of a leaf, and a result computed from that could not be a parameter.
pub(super) fn constant<const D: usize>(param: &Param<Tensor<D>>) -> Tensor<D> {
    param.val().detach().set_require_grad(false)
}

/// Concatenates layers of one input into one layer with concatenated outputs. A missing bias
/// becomes zero if another layer has one.
pub(super) fn side_by_side(linears: &[Linear]) -> Linear {
    let weights = linears.iter().map(|linear| constant(&linear.weight));
    let weight = Tensor::cat(weights.collect(), 1);
    let biased = linears.iter().any(|linear| linear.bias.is_some());
    let biases = linears.iter().map(|linear| match &linear.bias {
        Some(bias) => constant(bias),
        None => {
            let [_, d_out] = linear.weight.dims();
            Tensor::zeros([d_out], (&weight.device(), weight.dtype()))
        }
    });
    let bias = biased.then(|| Param::from_tensor(Tensor::cat(biases.collect(), 0)));
    Linear {
        weight: Param::from_tensor(weight),
        bias,
    }
}

/// Splits a layer into `N` layers of equal outputs: the inverse of [`side_by_side`].
pub(super) fn parts<const N: usize>(linear: Linear, ids: Option<&[PartIds]>) -> [Linear; N] {
    let [_, d_out] = linear.weight.dims();
    let width = d_out / N;
    let weight = constant(&linear.weight);
    let bias = linear.bias.as_ref().map(constant);
    std::array::from_fn(|index| {
        let first = index * width;
        let bias = bias.clone().map(|bias| bias.narrow(0, first, width));
        apart(ids, index, weight.clone().narrow(1, first, width), bias)
    })
}
