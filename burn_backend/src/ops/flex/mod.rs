//! Flex: the oracle's arithmetic on plain slices.
//!
//! Operands are quantized by [`reference`](nvfp4_formats::reference), which is parallel and
//! vectorized. GEMMs dequantize them (exactly) to `f32`, one panel of rows at a time, and run
//! Flex's own matmul.

mod gemm;
mod grouped_gemm;
mod layers;
mod optimizer;
pub(super) mod quantize;
pub(super) mod tensors;

use burn_core::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, TensorData};
use burn_flex::FlexTensor;
use nvfp4_formats::StoredForm;

use super::packed::PackedOps;
use super::tensors::{
    ComputedAmax, GemmGroups, MaybeTensor, Operand, QuantizeRequest, QuantizedMatrix,
    QuantizedPair, RowGroups,
};
use super::{Nvfp4KernelOps, Nvfp4Ops, float_dtype};
use tensors::ranges;

impl Nvfp4Ops for Flex {}

impl PackedOps for Flex {}

impl Nvfp4KernelOps for Flex {
    fn nvfp4_quantize(request: QuantizeRequest<Self>) -> QuantizedPair<Self> {
        quantize::quantize(request)
    }

    fn nvfp4_amax(request: QuantizeRequest<Self>) -> ComputedAmax<Self> {
        quantize::amax(request)
    }

    fn nvfp4_in_form(
        source: QuantizedMatrix<Self>,
        _groups: RowGroups<Self>,
        _form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        source
    }

    fn nvfp4_dequantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        quantize::dequantize(source, &groups, dtype)
    }

    fn nvfp4_gemm(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: MaybeTensor<Self>,
        groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let bias = bias.into_option();
        match groups {
            GemmGroups::None => gemm::dense(a, b, gemm::Addend::of_bias(bias), dtype),
            GemmGroups::M { offsets, .. } => {
                grouped_gemm::m_grouped(&a, &b, bias.as_ref(), &offsets, dtype)
            }
            GemmGroups::K {
                offsets, tokens, ..
            } => grouped_gemm::k_grouped(&a, &b, &offsets, tokens, dtype),
        }
    }

    fn nvfp4_add_gemm(
        added: FloatTensor<Self>,
        a: Operand<Self>,
        b: Operand<Self>,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(added.dtype());
        gemm::dense(a, b, gemm::Addend::Matrix(added), dtype)
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = values.to_contiguous();
        let mut out = vec![0f32; rows];
        for (value, group) in values.storage::<f32>().iter().zip(ranges(&offsets, rows)) {
            out[group].fill(*value);
        }
        FlexTensor::from_data(TensorData::new(out, [rows]))
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        grouped_gemm::segment_sum(x, &offsets)
    }

    fn nvfp4_column_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        grouped_gemm::column_sums(x)
    }
}
