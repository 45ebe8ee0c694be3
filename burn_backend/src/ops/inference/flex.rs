//! Flex: the oracle's arithmetic.

use burn_core::backend::{Flex, tensor::FloatTensor};
use nvfp4_formats::StoredForm;

use super::super::flex::quantize::quantize_with_amax;
use super::super::flex::tensors::amax_values;
use super::super::tensors::{MaybeTensor, QuantizedMatrix, RowGroups};
use super::{InferenceOps, STATIC};

impl InferenceOps for Flex {
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        groups: RowGroups<Self>,
        _form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        let global = amax_values(MaybeTensor::Present(global));
        quantize_with_amax(x, &groups, &STATIC, &global)
    }
}
