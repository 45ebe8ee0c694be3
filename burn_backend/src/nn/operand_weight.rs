//! Weight of a layer's next forward: the whole weight or this rank's shard.

use burn_core::module::Param;
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::packed::PackedParameter;
use super::parts::{LinearPart, identity_of};
use crate::ops::sharding::{GatheredWeight, WeightPart};
use crate::ops::{LinearContext, LinearSpec, WeightIdentity};
use crate::parallel::{ReduceDtype, Sharded, reduce_dtype_of, warn_of_distributed_weight};
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;

/// State and recipe of a layer.
type OfLayer<'a> = (&'a LayerState, &'a Nvfp4Recipe);

/// Returns the gather of the operands of the weight `param` for the next forward of a layer, if the
/// weight is sharded. `is_alone` is true if this weight is the whole weight of that forward.
pub(super) fn gathered_weight<const D: usize>(
    param: &Param<Tensor<D>>,
    (state, recipe): OfLayer<'_>,
    is_alone: bool,
) -> Option<GatheredWeight> {
    // Not with a telemetry probe: it compares operands with the values that they are made from.
    let sharded = param.reparameterization::<Sharded>();
    let sharded = sharded.filter(|_| state.probe().is_none())?;
    let part = WeightPart::of(&param.dims());
    sharded.operands(is_alone, part, &state.next_spec(recipe))
}

/// Weight of a forward.
pub(super) struct OperandWeight<const D: usize> {
    /// Whole weight, or this rank's shard.
    pub held: Tensor<D>,
    /// Gather that turns the operands of this rank's shard into those of the whole weight.
    pub gathered: Option<GatheredWeight>,
    /// Dtype of the gradient exchange, if the weight is one parameter.
    reduce_dtype: ReduceDtype,
    is_packed: bool,
}

impl<const D: usize> OperandWeight<D> {
    /// Wraps the weight `param`, with its gather.
    pub fn new(param: &Param<Tensor<D>>, gathered: Option<GatheredWeight>) -> Self {
        Self {
            held: match gathered {
                Some(_) => param.base(),
                None => param.val(),
            },
            gathered,
            reduce_dtype: reduce_dtype_of(param),
            is_packed: param.reparameterization::<PackedParameter>().is_some(),
        }
    }

    /// Begins the next forward of a layer with this weight, identified by `identity`. Returns its
    /// operand specification and context. `is_tracked` is true if autodiff tracks the input.
    ///
    /// # Errors
    /// Returns an error if the weight is packed: it would be quantized twice.
    pub fn begin(
        &self,
        (state, recipe): OfLayer<'_>,
        identity: Option<WeightIdentity>,
        is_tracked: bool,
    ) -> Result<(LinearSpec, LinearContext), Nvfp4Error> {
        if self.is_packed {
            return Err(Nvfp4Error::value(
                "weight",
                "a packed weight",
                "a weight in high precision: only layers of one rank multiply by packed weights",
            ));
        }
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

    /// Returns a layer with this weight, of the parameter `param`, and a `bias` as a part of a
    /// feed-forward, for its next forward. `is_tracked` is true if autodiff tracks the input.
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
    /// Concatenates `weights` with equal numbers of rows along the columns.
    pub fn side_by_side(weights: Vec<Self>) -> Self {
        let gathered = weights.first().and_then(|weight| weight.gathered.clone());
        let held = weights.into_iter().map(|weight| weight.held).collect();
        Self {
            held: Tensor::cat(held, 1),
            gathered,
            reduce_dtype: ReduceDtype::default(),
            is_packed: false,
        }
    }
}
