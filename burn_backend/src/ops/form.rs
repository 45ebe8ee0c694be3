//! Forms of a layer's quantized operands, as required by the GEMM that reads them.

use burn_core::backend::{Backend, tensor::IntTensor};
use burn_core::tensor::{FloatDType, Shape};
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_formats::{
    AmaxGranularity,
    reference::{padding::padded_bound, swizzle::TILE_INNER},
};
use nvfp4_formats::{Format, StoredForm};
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::gemm::{
    EpilogueKind, Factor, GroupedDim, OperandLayout, Problem, may_read_tiles, packed_reads,
};

#[cfg(any(feature = "cpu", feature = "cuda"))]
use super::dtype::float_kind;
use super::spec::OperandSpec;
use super::tensors::RowGroups;

/// Grouped dimension of a layer's GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupedAxis {
    /// No groups.
    None,
    /// Rows, in this number of groups with separate weights.
    Rows(usize),
    /// Tokens along the K dimension, in this number of groups.
    Tokens(usize),
}

/// GEMM of a layer: the properties that determine the form of its operands.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda")),
    allow(dead_code, reason = "Flex reads rows")
)]
pub(super) struct LayerGemm<'a> {
    /// Representation of the operands.
    pub specs: [&'a OperandSpec; 2],
    /// M, N and K, without padding.
    pub shape: (usize, usize, usize),
    /// Grouped dimension.
    pub grouped: GroupedAxis,
    /// True if the K dimension is the tokens.
    pub along_tokens: bool,
    /// True if a bias is added.
    pub bias: bool,
    /// Dtype of the output.
    pub out: FloatDType,
}

impl LayerGemm<'_> {
    /// Returns the operand form that the GEMM reads on `device`. The device is queried only if both
    /// operands are NVFP4 or both MXFP8: codes of other formats are not multiplied.
    ///
    /// This chooses the kernel of the GEMM, which the launch then uses.
    pub fn reads<B: Backend>(&self, device: &B::Device) -> StoredForm {
        let format = match self.specs.map(OperandSpec::format) {
            [Some(Format::Nvfp4), Some(Format::Nvfp4)] => Format::Nvfp4,
            [Some(Format::Mxfp8), Some(Format::Mxfp8)] => Format::Mxfp8,
            _ => return StoredForm::ROWS,
        };
        self.reads_on::<B>(device, format)
    }

    /// Returns the length of the K dimension in memory if it is padded to multiples of `unit`.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    fn stored_k(&self, unit: usize) -> usize {
        let k = self.shape.2;
        match self.grouped {
            GroupedAxis::None | GroupedAxis::Rows(_) => k.next_multiple_of(unit),
            GroupedAxis::Tokens(count) => padded_bound(k, count, unit),
        }
    }

    /// Returns the GEMM with operands of `format`, whose K dimension is padded to multiples of
    /// `unit`, as its launch describes it.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    fn problem(&self, format: Format, unit: usize) -> Problem {
        let (m, n, _) = self.shape;
        let layout = match format {
            Format::Mxfp8 => OperandLayout::Mxfp8,
            Format::Nvfp4 => OperandLayout::Packed,
            Format::Mxfp4 => OperandLayout::KMajor,
        };
        let problem = Problem::new([layout; 2], (m, n, self.stored_k(unit)));
        let (mut problem, per_tensor) = match self.grouped {
            GroupedAxis::None => (problem, Factor::Tensor),
            GroupedAxis::Rows(count) => (problem.grouped(GroupedDim::M, count), Factor::PerGroup),
            GroupedAxis::Tokens(count) => (problem.grouped(GroupedDim::K, count), Factor::PerGroup),
        };
        let factor = |spec: &OperandSpec| match spec.params().map(|params| params.amax) {
            _ if !format.has_global_scale() => Factor::One,
            Some(AmaxGranularity::PerRow) => Factor::PerRow,
            _ => per_tensor,
        };
        let [a, b] = self.specs.map(factor);
        problem.epilogue = EpilogueKind {
            a,
            b,
            bias: self.bias,
            out: float_kind(self.out),
            ..problem.epilogue
        };
        problem
    }

    /// Version of [`reads`](Self::reads) for operands of `format`.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    fn reads_on<B: Backend>(&self, device: &B::Device, format: Format) -> StoredForm {
        let device: &dyn std::any::Any = device;
        let Some(device) = device.downcast_ref::<burn_cubecl::CubeDevice>() else {
            return StoredForm::ROWS;
        };
        let client = device.client();
        let own = self.specs[0].unit().max(self.specs[1].unit());
        // Tokens are padded to whole tiles only for GEMMs that read tiles. MXFP8 blocks need no
        // further padding.
        let whole = own.max(TILE_INNER);
        let is_padded = self.along_tokens && self.stored_k(own) != self.stored_k(whole);
        if is_padded && format == Format::Nvfp4 && may_read_tiles(&client) {
            let reads = packed_reads(&client, &self.problem(format, whole));
            if reads == StoredForm::TILES {
                return reads;
            }
        }
        packed_reads(&client, &self.problem(format, own))
    }

    /// Version of [`reads`](Self::reads) for operands of a format: Flex reads rows.
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    fn reads_on<B: Backend>(&self, _: &B::Device, _: Format) -> StoredForm {
        StoredForm::ROWS
    }

    /// Returns the form of the GEMM's operands if it reads them as `reads`. Operands that are kept
    /// for another use have its [packed](StoredForm::packed) form.
    pub fn form(&self, reads: StoredForm) -> StoredForm {
        match reads {
            // For one matrix only.
            StoredForm::Bf16Unscaled if self.grouped != GroupedAxis::None => StoredForm::ROWS,
            StoredForm::TILES if self.along_tokens => StoredForm::WholeTiles,
            reads => reads,
        }
    }
}

/// Plan of a layer's step: the form of the operands of its three GEMMs.
///
/// It is made once, in the forward, and the backward uses the same. Making it chooses the kernel of
/// each GEMM ([`LayerGemm::reads`]). That choice is kept by device and by the properties of the
/// GEMM: the launch, and all later steps of the same shape, use it without choosing again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinearPlan {
    pub(super) fprop: StoredForm,
    pub(super) dgrad: StoredForm,
    pub(super) wgrad: StoredForm,
}

impl<B: Backend> RowGroups<B> {
    /// Returns the grouped dimension of a GEMM of these tokens with weights.
    pub(super) fn along_rows(&self) -> GroupedAxis {
        self.offsets_count()
            .map_or(GroupedAxis::None, GroupedAxis::Rows)
    }

    /// Returns the grouped dimension of a GEMM along these tokens.
    pub(super) fn along_tokens(&self) -> GroupedAxis {
        self.offsets_count()
            .map_or(GroupedAxis::None, GroupedAxis::Tokens)
    }

    fn offsets_count(&self) -> Option<usize> {
        use burn_core::backend::TensorMetadata;
        self.offsets().map(|offsets| offsets.shape()[0] - 1)
    }
}

/// Converts block scales from 128x4 tiles, which begin anew at each matrix, to row-major
/// `[matrices * outer, blocks]`.
pub(super) fn rows_of_tiles<B: Backend>(
    scales: IntTensor<B>,
    matrices: usize,
    (outer, blocks): (usize, usize),
) -> IntTensor<B> {
    let (down, across) = (outer.div_ceil(128), blocks.div_ceil(4));
    // A tile is 32 lines of four rows, 32 apart, with four blocks each.
    let tiles = Shape::new([matrices * down, across, 32, 4, 4]);
    let tiles = B::int_reshape(scales, tiles);
    let rows = B::int_permute(tiles, &[0, 3, 2, 1, 4]);
    let rows = B::int_reshape(rows, Shape::new([matrices, down * 128, across * 4]));
    let own = [0..matrices, 0..outer, 0..blocks].map(burn_core::tensor::Slice::from);
    let rows = B::int_slice(rows, &own);
    B::int_reshape(rows, Shape::new([matrices * outer, blocks]))
}

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Distribution, Int, Tensor};
    use nvfp4_formats::{QuantParams, Rounding, Usage};

    use super::super::Nvfp4KernelOps;
    use super::super::context::tests::device;
    use super::super::tensors::{QuantizeRequest, QuantizedMatrix};
    use super::*;

    /// Returns the layout, and the bytes of codes and of scales.
    fn parts(made: QuantizedMatrix<Dispatch>) -> (nvfp4_formats::Layout, [Vec<u8>; 2]) {
        let layout = made.layout;
        let (codes, scales) = made.into_packed();
        let bytes = [codes, scales].map(|x| {
            let data = Tensor::<2, Int>::from_dispatch(x).into_data();
            data.as_bytes().to_vec()
        });
        (layout, bytes)
    }

    /// A tensor that was quantized in rows and converted to a form equals one quantized in that
    /// form, even if its tokens are padded.
    #[test]
    fn in_form_as_quantized() {
        let (device, _, _) = device();
        let normal = Distribution::Normal(0.0, 1.0);
        let nvfp4 = QuantParams::nvfp4(Rounding::Nearest);
        let (rowwise, columnwise) = (Usage::Rowwise, Usage::Columnwise);
        let cases = [
            (nvfp4, columnwise, StoredForm::WholeTiles, None),
            (nvfp4, columnwise, StoredForm::TILES, None),
            (nvfp4, rowwise, StoredForm::TILES, None),
            (nvfp4, rowwise, StoredForm::TILES, Some(3)),
            (QuantParams::mxfp8(), columnwise, StoredForm::TILES, None),
            (QuantParams::mxfp8(), rowwise, StoredForm::TILES, Some(3)),
        ];
        for (params, usage, form, stack) in cases {
            let what = format!("{:?} {usage:?} {form:?} {stack:?}", params.format);
            let x = Tensor::<2>::random([210, 80], normal, (&device, DType::F32));
            let groups = || stack.map_or(RowGroups::Whole, RowGroups::Batch);
            let made = |form| {
                let request = QuantizeRequest::of_matrix(x.clone().into_dispatch());
                let request = request.groups(groups()).along(usage, params, form);
                Dispatch::nvfp4_quantize(request).into_one()
            };
            let found = Dispatch::nvfp4_in_form(made(StoredForm::ROWS), groups(), form);
            assert_eq!(parts(found), parts(made(form)), "{what}");
            if form == StoredForm::TILES {
                let rows = Dispatch::nvfp4_in_form(made(form), groups(), StoredForm::ROWS);
                assert_eq!(parts(rows), parts(made(StoredForm::ROWS)), "{what}, back");
            }
        }
    }
}
