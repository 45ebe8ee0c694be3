//! The weight of a layer's next forward: all of it, or this rank's part.

use burn_core::module::Param;
use burn_core::tensor::Tensor;
use nvfp4_kernels::Nvfp4Error;

use super::parts::{LinearPart, identity_of};
use crate::ops::sharding::{GatheredWeight, WeightPart};
use crate::ops::{LinearContext, LinearSpec, WeightIdentity};
use crate::parallel::{ReduceDtype, Sharded, reduce_dtype_of, warn_of_distributed_weight};
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;

/// The state and the recipe of a layer.
type OfLayer<'a> = (&'a LayerState, &'a Nvfp4Recipe);

/// How operands of the weight `param` of a layer are gathered in its next forward, if they are.
/// `is_alone` says whether it is the whole weight of that.
pub(super) fn gathered_weight<const D: usize>(
    param: &Param<Tensor<D>>,
    (state, recipe): OfLayer<'_>,
    is_alone: bool,
) -> Option<GatheredWeight> {
    // Telemetry compares operands with the values that they are made from.
    let sharded = param.reparameterization::<Sharded>();
    let sharded = sharded.filter(|_| state.probe().is_none())?;
    let part = WeightPart::of(&param.lazy_shape().dims::<D>());
    sharded.operands(is_alone, part, &state.next_spec(recipe))
}

/// The weight of a forward.
pub(super) struct OperandWeight<const D: usize> {
    /// All of it, or the part that this rank has.
    pub held: Tensor<D>,
    /// How operands that are made of this rank's part become those of all.
    pub gathered: Option<GatheredWeight>,
    /// The type in which its gradient is exchanged, if it is one parameter.
    reduce_dtype: ReduceDtype,
}

impl<const D: usize> OperandWeight<D> {
    /// The weight `param`, so gathered.
    pub fn new(param: &Param<Tensor<D>>, gathered: Option<GatheredWeight>) -> Self {
        Self {
            held: match gathered {
                Some(_) => param.base(),
                None => param.val(),
            },
            gathered,
            reduce_dtype: reduce_dtype_of(param),
        }
    }

    /// The operands of the next forward of a layer with this weight, known by `identity`, and its
    /// context; whether the input `is_tracked`.
    pub fn begin(
        &self,
        (state, recipe): OfLayer<'_>,
        identity: Option<WeightIdentity>,
        is_tracked: bool,
    ) -> Result<(LinearSpec, LinearContext), Nvfp4Error> {
        let draws = is_tracked || self.held.is_tracked();
        if draws {
            warn_of_distributed_weight(&self.held);
        }
        let (spec, context) = state.for_forward(recipe, identity, draws)?;
        let gathered = self.gathered.clone();
        Ok((
            spec,
            LinearContext {
                gathered,
                reduce_dtype: self.reduce_dtype,
                ..context
            },
        ))
    }

    /// A layer with this weight, that of `param`, and a `bias` as a part of a feed-forward, for its
    /// next forward; whether the input `is_tracked`.
    pub fn part<const B: usize>(
        self,
        (param, bias): (&Param<Tensor<D>>, Option<Tensor<B>>),
        of_layer: OfLayer<'_>,
        is_tracked: bool,
    ) -> Result<LinearPart<D, B>, Nvfp4Error> {
        let identity = identity_of([param], &[&self.held]);
        let spec = self.begin(of_layer, identity, is_tracked)?;
        Ok(LinearPart {
            weight: self.held,
            bias,
            spec,
        })
    }
}

impl OperandWeight<2> {
    /// The weight of `weights` of one number of rows, side by side.
    pub fn side_by_side(weights: Vec<Self>) -> Self {
        let gathered = weights.first().and_then(|weight| weight.gathered.clone());
        let held = weights.into_iter().map(|weight| weight.held).collect();
        Self {
            held: Tensor::cat(held, 1),
            gathered,
            reduce_dtype: ReduceDtype::default(),
        }
    }
}
