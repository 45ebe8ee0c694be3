//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread if fusion is on.

mod branch;
mod dequantize;
mod form;
pub(in crate::ops) mod found_amax;
pub(super) mod gemm;
mod grouped_gemm;
mod layers;
mod moe;
mod optimizer;
mod quantize;
pub(super) mod tensors;

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::tensor::FloatDType;
use burn_cubecl::CubeBackend;
use nvfp4_formats::{StoredForm, Usage};

use super::branch::{Branch, BranchPoint};
use super::layers::Activation;
use super::packed::PackedOps;
use super::spec::QuantParams;
use super::tensors::{
    ActivationAmaxes, AmaxPair, BothStorages, GemmGroups, MaybeTensor, Named, Operand, QuantUsages,
    QuantizedMatrix, QuantizedPair, RowGroups, UnpermuteGradients,
};
use super::{Nvfp4KernelOps, Nvfp4Ops};

impl Nvfp4Ops for CubeBackend {}

impl PackedOps for CubeBackend {}

impl Nvfp4KernelOps for CubeBackend {
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize(x, groups, usages)
    }

    fn nvfp4_amax(x: FloatTensor<Self>, params: QuantParams, usage: Usage) -> FloatTensor<Self> {
        quantize::amax(x, &params, usage)
    }

    fn nvfp4_amax_pair(
        x: FloatTensor<Self>,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> AmaxPair<Self> {
        quantize::amax_pair(x, &rowwise, &columnwise)
    }

    fn nvfp4_activation_amaxes(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        activation: Activation,
        rowwise: QuantParams,
        columnwise: QuantParams,
    ) -> ActivationAmaxes<Self> {
        let of = (x, grad.into_option());
        quantize::activation_amaxes(of, activation, &rowwise, &columnwise)
    }

    fn nvfp4_quantize_with_amax(
        x: FloatTensor<Self>,
        rowwise_amax: MaybeTensor<Self>,
        columnwise_amax: MaybeTensor<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let amax = [rowwise_amax, columnwise_amax].map(MaybeTensor::into_option);
        quantize::quantize_from_amax(x, amax, usages)
    }

    fn nvfp4_quantize_with_entry(
        x: FloatTensor<Self>,
        maxima: FloatTensor<Self>,
        entry: usize,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize_from_entry(x, &maxima, entry, usages)
    }

    fn nvfp4_quantize_activation(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        quantize::quantize_activation(x, grad.into_option(), groups, activation, usages)
    }

    fn nvfp4_quantize_in_both_storages(
        x: FloatTensor<Self>,
        activation: Option<Activation>,
        params: QuantParams,
    ) -> BothStorages<Self> {
        quantize::quantize_in_both_storages(x, activation, &params)
    }

    fn nvfp4_requantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        form: StoredForm,
        via: FloatDType,
    ) -> QuantizedMatrix<Self> {
        quantize::requantize(source, groups, usage, (&params, form), via)
    }

    fn nvfp4_in_form(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        form::in_form(source, groups, form)
    }

    fn nvfp4_dequantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        dequantize::dequantize(source, &groups, dtype)
    }

    fn nvfp4_branch(operand: Operand<Self>, branch: Branch, point: BranchPoint) -> Operand<Self> {
        branch::mark(&operand, &branch.kernels, point);
        operand
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
            GemmGroups::M { offsets, others } => {
                grouped_gemm::m_grouped(a, b, bias, (offsets, others), dtype)
            }
            GemmGroups::K {
                offsets,
                tokens,
                others,
            } => grouped_gemm::k_grouped(a, b, (offsets, others), tokens, dtype),
        }
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        moe::broadcast_group_values(values, offsets, rows)
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        moe::segment_sum(x, offsets)
    }

    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        moe::sum_rows(x, weights, places, named)
    }

    fn nvfp4_named_rows(x: FloatTensor<Self>, numbers: IntTensor<Self>) -> FloatTensor<Self> {
        moe::named_rows(x, numbers)
    }

    fn nvfp4_activation_of_groups(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        quantize::activation_of_rows(x, grad.into_option(), groups, activation)
    }

    fn nvfp4_moe_unpermute_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
        named: Named,
    ) -> UnpermuteGradients<Self> {
        moe::unpermute_backward(dout, y, weights, (places, choices), named)
    }
}
