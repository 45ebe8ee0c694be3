//! Plan of a layer's three GEMMs: the forms of the quantized operands that they read.

use burn_core::backend::{Backend, TensorMetadata};
use burn_core::tensor::FloatDType;
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
use crate::ops::dtype::float_kind;
use crate::ops::{LinearSpec, OperandSpec, RowGroups};

/// Grouped dimension of a layer's GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum GroupedAxis {
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
pub(in crate::ops) struct LayerGemm<'a> {
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
            _ => return StoredForm::Rows,
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
            return StoredForm::Rows;
        };
        let client = device.client();
        let own = self.specs[0].unit().max(self.specs[1].unit());
        // Tokens are padded to whole tiles only for GEMMs that read tiles. MXFP8 blocks need no
        // further padding.
        let whole = own.max(TILE_INNER);
        let is_padded = self.along_tokens && self.stored_k(own) != self.stored_k(whole);
        if is_padded && format == Format::Nvfp4 && may_read_tiles(&client) {
            let reads = packed_reads(&client, &self.problem(format, whole));
            if reads == StoredForm::Tiles {
                return reads;
            }
        }
        packed_reads(&client, &self.problem(format, own))
    }

    /// Version of [`reads`](Self::reads) for operands of a format: Flex reads rows.
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    fn reads_on<B: Backend>(&self, _: &B::Device, _: Format) -> StoredForm {
        StoredForm::Rows
    }

    /// Returns the form of the GEMM's operands if it reads them as `reads`. Operands that are kept
    /// for another use have its [packed](StoredForm::packed) form.
    pub fn form(&self, reads: StoredForm) -> StoredForm {
        match reads {
            // For one matrix only.
            StoredForm::Bf16Unscaled if self.grouped != GroupedAxis::None => StoredForm::Rows,
            StoredForm::Tiles if self.along_tokens => StoredForm::WholeTiles,
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
    pub(in crate::ops) fprop: StoredForm,
    pub(in crate::ops) dgrad: StoredForm,
    pub(in crate::ops) wgrad: StoredForm,
}

/// Properties of a layer that determine the plan of its GEMMs.
pub(super) struct PlannedLayer<'a, B: Backend> {
    pub(super) spec: &'a LinearSpec,
    pub(super) groups: &'a RowGroups<B>,
    /// Form that the GEMMs are assumed to read; `None` for what those of the device read.
    pub(super) reads: Option<StoredForm>,
    /// Numbers of tokens, `d_in` and `d_out`; for a sharded layer, those of this rank.
    pub(super) shape: (usize, usize, usize),
    /// Dtypes of the activations, and of the weight's gradient.
    pub(super) dtypes: [FloatDType; 2],
    /// True if the layer adds a bias.
    pub(super) bias: bool,
}

impl<B: Backend> PlannedLayer<'_, B> {
    /// Returns the plan on `device`, with the GEMMs of the gradients of the input and of the weight
    /// that are required.
    pub(super) fn plan(&self, device: &B::Device, [x, w]: [bool; 2]) -> LinearPlan {
        let rows = StoredForm::Rows;
        LinearPlan {
            fprop: self.fprop(device),
            dgrad: if x { self.dgrad(device) } else { rows },
            wgrad: if w { self.wgrad(device) } else { rows },
        }
    }

    /// Returns `plan`, that of the forward, with the GEMMs of both gradients planned for the shape
    /// of this layer.
    pub(super) fn gradients(&self, device: &B::Device, plan: LinearPlan) -> LinearPlan {
        LinearPlan {
            dgrad: self.dgrad(device),
            wgrad: self.wgrad(device),
            ..plan
        }
    }

    /// Returns the form of the operands of fprop.
    pub(super) fn fprop(&self, device: &B::Device) -> StoredForm {
        let (tokens, d_in, d_out) = self.shape;
        self.form(
            device,
            &LayerGemm {
                specs: [&self.spec.fprop_x, &self.spec.fprop_w],
                shape: (tokens, d_out, d_in),
                grouped: self.groups.along_rows(),
                along_tokens: false,
                bias: self.bias,
                out: self.dtypes[0],
            },
        )
    }

    /// Returns the form of the operands of dgrad.
    fn dgrad(&self, device: &B::Device) -> StoredForm {
        let (tokens, d_in, d_out) = self.shape;
        self.form(
            device,
            &LayerGemm {
                specs: [&self.spec.dgrad_dy, &self.spec.dgrad_w],
                shape: (tokens, d_in, d_out),
                grouped: self.groups.along_rows(),
                along_tokens: false,
                bias: false,
                out: self.dtypes[0],
            },
        )
    }

    /// Returns the form of the operands of wgrad.
    fn wgrad(&self, device: &B::Device) -> StoredForm {
        let (tokens, d_in, d_out) = self.shape;
        self.form(
            device,
            &LayerGemm {
                specs: [&self.spec.wgrad_x, &self.spec.wgrad_dy],
                shape: (d_in, d_out, tokens),
                grouped: self.groups.along_tokens(),
                along_tokens: true,
                bias: false,
                out: self.dtypes[1],
            },
        )
    }

    fn form(&self, device: &B::Device, gemm: &LayerGemm<'_>) -> StoredForm {
        let reads = self.reads.unwrap_or_else(|| gemm.reads::<B>(device));
        gemm.form(reads)
    }
}

impl<B: Backend> RowGroups<B> {
    /// Returns the grouped dimension of a GEMM of these tokens with weights.
    fn along_rows(&self) -> GroupedAxis {
        self.offsets_count()
            .map_or(GroupedAxis::None, GroupedAxis::Rows)
    }

    /// Returns the grouped dimension of a GEMM along these tokens.
    fn along_tokens(&self) -> GroupedAxis {
        self.offsets_count()
            .map_or(GroupedAxis::None, GroupedAxis::Tokens)
    }

    fn offsets_count(&self) -> Option<usize> {
        self.offsets().map(|offsets| offsets.shape()[0] - 1)
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn_core::tensor::{Device, Distribution, Tensor};
    use nvfp4_kernels::gemm::selections;

    use crate::experts::{ExpertOffsets, grouped_linear_unchecked};
    use crate::functions::linear_unchecked;
    use crate::ops::LinearContext;
    use crate::ops::context::tests::spec;

    /// Presets whose six operands are quantized.
    const PRESETS: [&str; 5] = ["nvidia", "nvidia_4over6", "quartet2", "per_token", "mxfp8"];

    /// Numbers of tokens, `d_in` and `d_out`, in a combination that no other test has.
    fn sizes(preset: usize, groups: usize) -> [usize; 3] {
        [80 + 16 * groups, 112 + 16 * preset, 208 + 16 * groups]
    }

    /// Returns how often kernels were selected for fprop, dgrad and wgrad of these sizes, with any
    /// padding of K.
    fn selected([tokens, d_in, d_out]: [usize; 3]) -> [usize; 3] {
        let gemms = [
            (tokens, d_out, d_in),
            (tokens, d_in, d_out),
            (d_in, d_out, tokens),
        ];
        gemms.map(|(m, n, k)| (k..2 * k + 512).map(|k| selections((m, n, k))).sum())
    }

    fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::random(shape, normal, device).detach()
    }

    /// The first step selects one kernel per GEMM: the plan describes each GEMM as its launch does.
    /// Later steps select none.
    #[test]
    fn a_layer_selects_three_kernels() {
        let device = nvfp4_test_support::cpu_runtime(Device::cpu).autodiff();
        for (number, preset) in PRESETS.into_iter().enumerate() {
            for has_bias in [false, true] {
                let shape = sizes(number, has_bias.into());
                let [tokens, d_in, d_out] = shape;
                let x = random([tokens, d_in], &device).require_grad();
                let w = random([d_in, d_out], &device).require_grad();
                let bias = has_bias.then(|| random([d_out], &device).require_grad());
                for step in 0..2 {
                    let context = LinearContext::default();
                    let y =
                        linear_unchecked(x.clone(), w.clone(), bias.clone(), spec(preset), context);
                    let grads = y.sum_dim(1).sum().backward();
                    for leaf in [&x, &w] {
                        leaf.grad(&grads).expect("a gradient").into_data();
                    }
                    let what = format!("{preset}, bias: {has_bias}, step {step}");
                    assert_eq!(selected(shape), [1; 3], "{what}");
                }
            }
        }
    }

    /// Version of this test for experts.
    #[test]
    fn experts_select_three_kernels() {
        let device = nvfp4_test_support::cpu_runtime(Device::cpu).autodiff();
        let counts = [0, 5, 66, 0, 37];
        for (number, preset) in PRESETS.into_iter().enumerate() {
            let [_, d_in, d_out] = sizes(number, 4);
            let tokens = counts.iter().sum::<usize>() + 12;
            let x = random([tokens, d_in], &device).require_grad();
            let w = random([counts.len(), d_in, d_out], &device).require_grad();
            let experts = ExpertOffsets::of_counts(&counts, &device);
            for step in 0..2 {
                let context = LinearContext::default();
                let y = grouped_linear_unchecked(
                    x.clone(),
                    w.clone(),
                    None,
                    &experts,
                    spec(preset),
                    context,
                );
                let grads = y.sum_dim(1).sum().backward();
                x.grad(&grads).expect("a gradient").into_data();
                w.grad(&grads).expect("a gradient").into_data();
                let what = format!("{preset}, step {step}");
                assert_eq!(selected([tokens, d_in, d_out]), [1; 3], "{what}");
            }
        }
    }
}
