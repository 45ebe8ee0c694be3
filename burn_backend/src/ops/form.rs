//! Forms of a layer's quantized operands, as required by the GEMM that reads them.

use burn_core::backend::{Backend, tensor::IntTensor};
use burn_core::tensor::Shape;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::AmaxGranularity;
use nvfp4_kernels::reference::swizzle::TILE_INNER;
use nvfp4_kernels::{Format, PackedReads};

use super::spec::{OperandSpec, QuantParams};
use super::stored::StoredForm;
use super::tensors::RowGroups;

impl StoredForm {
    /// Returns this form, or rows of codes and scales if tensors by `params` are not stored in it.
    pub(super) fn of(self, params: &QuantParams) -> Self {
        match (self, params.format) {
            (Self::Bf16Unscaled, _) if !params.has_bf16_storage() => Self::ROWS,
            // No GEMM multiplies MXFP4 codes: they are dequantized from rows.
            (_, Format::Mxfp4) => Self::ROWS,
            // An instruction multiplies one MXFP8 block, so groups of tokens can begin inside
            // tiles.
            (Self::WholeTiles, Format::Mxfp8) => Self::TILES,
            (form, _) => form,
        }
    }
}

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
pub(super) struct LayerGemm<'a> {
    /// Representation of the operands.
    pub specs: [&'a OperandSpec; 2],
    /// M, N and K, without padding.
    pub shape: (usize, usize, usize),
    /// Grouped dimension.
    pub grouped: GroupedAxis,
    /// True if the K dimension is the tokens.
    pub along_tokens: bool,
}

impl LayerGemm<'_> {
    /// Returns the operand form that the GEMM reads on `device`. The device is queried only if both
    /// operands are NVFP4 or both MXFP8: codes of other formats are not multiplied.
    pub fn reads<B: Backend>(&self, device: &B::Device) -> PackedReads {
        let format = match self.specs.map(OperandSpec::format) {
            [Some(Format::Nvfp4), Some(Format::Nvfp4)] => Format::Nvfp4,
            [Some(Format::Mxfp8), Some(Format::Mxfp8)] => Format::Mxfp8,
            _ => return PackedReads::Compact,
        };
        let own = self.specs[0].unit().max(self.specs[1].unit());
        // Tokens are padded to whole tiles only for GEMMs that read tiles. MXFP8 blocks need no
        // further padding.
        let tiles = TILE_INNER;
        let is_odd = !self.shape.2.next_multiple_of(own).is_multiple_of(tiles);
        if self.along_tokens && is_odd && format == Format::Nvfp4 {
            let reads = self.reads_padded::<B>(device, format, own.max(tiles));
            if reads == PackedReads::Swizzled {
                return reads;
            }
        }
        self.reads_padded::<B>(device, format, own)
    }

    /// Version of [`reads`](Self::reads) for a K dimension padded to a multiple of `unit`.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    fn reads_padded<B: Backend>(
        &self,
        device: &B::Device,
        format: Format,
        unit: usize,
    ) -> PackedReads {
        use nvfp4_kernels::gemm::{Factor, GroupedDim, OperandLayout, Problem, packed_reads};
        let device: &dyn std::any::Any = device;
        let Some(device) = device.downcast_ref::<burn_cubecl::CubeDevice>() else {
            return PackedReads::Compact;
        };
        let (m, n, k) = self.shape;
        let layout = match format {
            Format::Mxfp8 => OperandLayout::Mxfp8,
            Format::Nvfp4 | Format::Mxfp4 => OperandLayout::Packed,
        };
        let problem = Problem::new([layout; 2], (m, n, k.next_multiple_of(unit)));
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
        (problem.epilogue.a, problem.epilogue.b) = (factor(self.specs[0]), factor(self.specs[1]));
        packed_reads(&device.client(), &problem)
    }

    /// Version of [`reads`](Self::reads) for a K dimension padded to a multiple of `unit`: Flex
    /// reads rows.
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    fn reads_padded<B: Backend>(&self, _: &B::Device, _: Format, _: usize) -> PackedReads {
        PackedReads::Compact
    }

    /// Returns the forms of the GEMM's operands if it reads them as `reads`.
    pub fn forms(&self, reads: PackedReads) -> Forms {
        let is_one_matrix = self.grouped == GroupedAxis::None;
        match reads {
            PackedReads::Bf16 if is_one_matrix => Forms::BF16,
            PackedReads::Bf16 | PackedReads::Compact => Forms::ROWS,
            PackedReads::Swizzled if self.along_tokens => Forms::both(StoredForm::WholeTiles),
            PackedReads::Swizzled => Forms::both(StoredForm::TILES),
        }
    }
}

/// Forms of a GEMM's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Forms {
    /// Form of an operand that only this GEMM reads.
    pub once: StoredForm,
    /// Form of an operand that is kept.
    pub kept: StoredForm,
}

impl Forms {
    /// Rows of codes and scales.
    pub const ROWS: Self = Self::both(StoredForm::ROWS);

    /// Values for operands that only this GEMM reads; rows of codes and scales for others.
    pub const BF16: Self = Self {
        once: StoredForm::Bf16Unscaled,
        kept: StoredForm::ROWS,
    };

    /// Uses `form` for all operands.
    pub const fn both(form: StoredForm) -> Self {
        Self {
            once: form,
            kept: form,
        }
    }
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

/// Forms of the operands of a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightForms {
    pub(super) fprop: StoredForm,
    pub(super) dgrad: StoredForm,
}

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Distribution, Int, Tensor};
    use nvfp4_kernels::{Rounding, Usage};

    use super::super::Nvfp4KernelOps;
    use super::super::context::tests::device;
    use super::super::tensors::{QuantUsages, QuantizeRequest, QuantizedMatrix};
    use super::*;

    /// Returns the layout, and the bytes of codes and of scales.
    fn parts(made: QuantizedMatrix<Dispatch>) -> (nvfp4_kernels::Layout, [Vec<u8>; 2]) {
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
                let usages = QuantUsages::one(usage, params, form);
                let request = QuantizeRequest::of_matrix(x.clone().into_dispatch(), usages);
                Dispatch::nvfp4_quantize(request.groups(groups())).into_one()
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
