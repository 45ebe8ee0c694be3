//! Plan of a layer's three GEMMs.

use burn_core::backend::Backend;
use burn_core::tensor::FloatDType;

use super::request::RequiresGrad;
use crate::ops::form::{LayerGemm, LinearPlan};
use crate::ops::{LinearContext, LinearSpec, RowGroups, StoredForm};

/// Properties of a layer that determine the plan of its GEMMs.
pub(super) struct PlannedLayer<'a, B: Backend> {
    pub(super) spec: &'a LinearSpec,
    pub(super) groups: &'a RowGroups<B>,
    pub(super) context: &'a LinearContext,
    /// Numbers of tokens, `d_in` and `d_out`; for a sharded layer, those of this rank.
    pub(super) shape: (usize, usize, usize),
    /// Dtypes of the activations, and of the weight's gradient.
    pub(super) dtypes: [FloatDType; 2],
    /// True if the layer adds a bias.
    pub(super) bias: bool,
}

impl<B: Backend> PlannedLayer<'_, B> {
    /// Returns the plan on `device`. GEMMs of gradients that are not required are not planned.
    pub(super) fn plan(&self, device: &B::Device, requires_grad: RequiresGrad) -> LinearPlan {
        let RequiresGrad { x, w, .. } = requires_grad;
        LinearPlan {
            fprop: self.fprop(device),
            dgrad: if x {
                self.dgrad(device)
            } else {
                StoredForm::ROWS
            },
            wgrad: if w {
                self.wgrad(device)
            } else {
                StoredForm::ROWS
            },
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
        self.context.form::<B>(gemm, device)
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
