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
mod view;

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::tensor::FloatDType;
use burn_cubecl::CubeBackend;
use nvfp4_formats::StoredForm;

pub use view::device_matrix;

use super::branch::{Branch, BranchPoint};
use super::layers::Activation;
use super::packed::PackedOps;
use super::tensors::{
    ComputedAmax, GatherSpec, GemmGroups, MaybeTensor, Named, Operand, QuantizeRequest,
    QuantizedMatrix, QuantizedPair, RowGroups, UnpermuteGradients,
};
use super::{Nvfp4KernelOps, Nvfp4Ops, float_dtype};

impl Nvfp4Ops for CubeBackend {}

impl PackedOps for CubeBackend {}

impl Nvfp4KernelOps for CubeBackend {
    fn nvfp4_quantize(request: QuantizeRequest<Self>) -> QuantizedPair<Self> {
        quantize::quantize(request)
    }

    fn nvfp4_amax(request: QuantizeRequest<Self>) -> ComputedAmax<Self> {
        quantize::amax(request)
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
            GemmGroups::None => gemm::dense(a, b, gemm::Addend::of_bias(bias), dtype),
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

    fn nvfp4_add_gemm(
        added: FloatTensor<Self>,
        a: Operand<Self>,
        b: Operand<Self>,
    ) -> FloatTensor<Self> {
        let dtype = float_dtype(added.dtype);
        gemm::dense(a, b, gemm::Addend::Matrix(added), dtype)
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

    fn nvfp4_column_sums(x: FloatTensor<Self>) -> FloatTensor<Self> {
        moe::column_sums(x)
    }

    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        moe::sum_rows(x, weights, places, named)
    }

    fn nvfp4_gather_rows(
        x: FloatTensor<Self>,
        numbers: IntTensor<Self>,
        groups: RowGroups<Self>,
        spec: GatherSpec,
    ) -> FloatTensor<Self> {
        moe::gather_rows(x, numbers, groups, spec)
    }

    fn nvfp4_activation_of_groups(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        layers::activation_of_groups(x, grad.into_option(), groups, activation)
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
