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
use nvfp4_formats::{StoredForm, Usage};

use super::layers::{Activation, ActivationOps};
use super::packed::PackedOps;
use super::spec::QuantParams;
use super::tensors::{
    BothStorages, GemmGroups, MaybeTensor, Operand, QuantUsages, QuantizedMatrix, QuantizedPair,
    RowGroups,
};
use super::{Nvfp4KernelOps, Nvfp4Ops};
use tensors::ranges;

impl Nvfp4Ops for Flex {}

impl PackedOps for Flex {}

impl Nvfp4KernelOps for Flex {
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize(x, &groups, usages)
    }

    fn nvfp4_amax(x: FloatTensor<Self>, params: QuantParams, usage: Usage) -> FloatTensor<Self> {
        quantize::amax(&x, &params, usage)
    }

    fn nvfp4_quantize_with_amax(
        x: FloatTensor<Self>,
        rowwise_amax: MaybeTensor<Self>,
        columnwise_amax: MaybeTensor<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize_from_amax(x, [rowwise_amax, columnwise_amax], usages)
    }

    fn nvfp4_quantize_with_entry(
        x: FloatTensor<Self>,
        maxima: FloatTensor<Self>,
        entry: usize,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize_from_entry(x, maxima, entry, usages)
    }

    fn nvfp4_quantize_in_both_storages(
        x: FloatTensor<Self>,
        activation: Option<Activation>,
        params: QuantParams,
    ) -> BothStorages<Self> {
        let x = match activation {
            None => x,
            Some(activation) => Self::nvfp4_activation(x, activation),
        };
        quantize::quantize_in_both_storages(x, params)
    }

    fn nvfp4_requantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        form: StoredForm,
        via: FloatDType,
    ) -> QuantizedMatrix<Self> {
        // MS-EDEN uses the exact values.
        let via = match params.is_ms_eden() {
            true => FloatDType::F32,
            false => via,
        };
        let values = quantize::dequantize(source, &groups, via);
        let usages = QuantUsages::one(usage, params, form);
        quantize::quantize(values, &groups, usages).into_one()
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
            GemmGroups::None => gemm::dense(a, b, bias, dtype),
            GemmGroups::M { offsets, .. } => {
                grouped_gemm::m_grouped(&a, &b, bias.as_ref(), &offsets, dtype)
            }
            GemmGroups::K {
                offsets, tokens, ..
            } => grouped_gemm::k_grouped(&a, &b, &offsets, tokens, dtype),
        }
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
}
