//! Flex: separate operations.

use burn_core::backend::{Flex, tensor::FloatTensor};

use super::super::tensors::{MaybeTensor, QuantizedMatrix};
use super::{NormLinearOps, NormLinearResult, NormLinearSpec, separate};

impl NormLinearOps for Flex {
    fn nvfp4_norm_linear(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        w: QuantizedMatrix<Self>,
        bias: MaybeTensor<Self>,
        spec: NormLinearSpec,
    ) -> NormLinearResult<Self> {
        separate::<Self>(x, residual, gain, w, bias, spec)
    }
}
