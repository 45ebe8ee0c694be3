//! Shapes of parameters that hold less than their value.

use burn_core::module::Param;
use burn_core::tensor::Tensor;

use crate::nn::PackedParameter;
use crate::parallel::Sharded;
use crate::validate::Weight;

/// Returns the shape of the whole value of a parameter, which may be sharded or packed, without
/// reading it.
pub(crate) fn whole_dims<const D: usize>(param: &Param<Tensor<D>>) -> [usize; D] {
    if let Some(packed) = param.reparameterization::<PackedParameter>() {
        return packed.dims();
    }
    let mut dims = param.lazy_shape().dims::<D>();
    if let Some(sharded) = param.reparameterization::<Sharded>() {
        dims[0] *= sharded.group().size();
    }
    dims
}

impl<const D: usize> Weight<D> for Param<Tensor<D>> {
    fn held(&self) -> &Tensor<D> {
        self
    }

    fn whole_dims(&self) -> [usize; D] {
        whole_dims(self)
    }
}
