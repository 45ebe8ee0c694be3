//! Steps of a mixture that do not depend on the placement of its experts.

use burn_core::backend::Dispatch;
use burn_core::tensor::{FloatDType, Tensor};
use burn_nn::Linear;
use nvfp4_formats::Nvfp4Error;

use super::super::feed_forward::{feed_forward_between, try_feed_forward_of_experts};
use super::super::{MlpActivation, Nvfp4GroupedLinear, Nvfp4SwiGlu, cast};
use crate::experts::{ChoiceWindow, ExpertOffsets, MoeRoute, Router, check_experts, try_moe_route};
use crate::ops::{LinearSpec, RowGroups};
use crate::parallel::{ProcessGroup, functions};
use crate::validate;
use crate::whole::whole_dims;

/// Settings of a mixture.
#[derive(Clone, Copy, Debug)]
pub(super) struct MoeSettings {
    /// Number of experts per token.
    pub top_k: usize,
    /// True to divide the weights of a token's experts by their sum.
    pub normalize: bool,
    /// Activation of the experts.
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the experts' activation.
    pub recompute: bool,
}

/// Layers of a mixture. The router has one column per expert; `gate_up` and `down` have one matrix
/// per expert of this rank.
pub(super) struct MoeParts<'a> {
    pub router: &'a Linear,
    /// Ranks with other tokens of the same loss, over which the router's gradients are summed.
    pub tensor: Option<&'a ProcessGroup>,
    pub gate_up: &'a Nvfp4GroupedLinear,
    pub down: &'a Nvfp4GroupedLinear,
    pub shared: Option<&'a Nvfp4SwiGlu>,
    pub settings: MoeSettings,
}

impl MoeParts<'_> {
    /// Number of experts that the router chooses from.
    pub fn experts(&self) -> usize {
        let [_, experts] = whole_dims(&self.router.weight);
        experts
    }

    /// Returns an error if the layers do not match each other or the input `x`, with `held` experts
    /// on this rank.
    pub fn check<const D: usize>(&self, x: &Tensor<D>, held: usize) -> Result<(), Nvfp4Error> {
        let (dims, device) = (x.dims(), x.device());
        let router = &self.router.weight;
        let [d_model, experts] = whole_dims(router);
        if dims.last() != Some(&d_model) || dims.contains(&0) {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{dims:?}"),
                format!("at least one token, and a last axis of {d_model}"),
            ));
        }
        validate::parameter(&device, "router.weight", router)?;
        validate::operand("router.weight", router)?;
        check_experts("router.weight", experts)?;
        self.layers().check((x, d_model), held)?;
        self.shared.iter().try_for_each(|shared| shared.check(x))
    }

    /// Computes the logits of tokens, `f32[tokens, experts]`.
    pub fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let [d_model, experts] = whole_dims(&self.router.weight);
        let [tokens, _] = x.dims();
        let router = self.router.weight.val();
        let router = match self.tensor {
            Some(group) => functions::copy_parameter(router, group),
            None => router,
        };
        let router = cast(router, FloatDType::F32);
        // Runs as a batch of GEMMs: in the router's wgrad, M and N are small and K is the number of
        // tokens; a single GEMM would leave most of a GPU idle.
        let parts = equal_parts(tokens, 5);
        cast(x, FloatDType::F32)
            .reshape([parts, tokens / parts, d_model])
            .matmul(router.unsqueeze::<3>())
            .reshape([tokens, experts])
    }

    /// Returns the experts of tokens with these logits, their weights, and the losses of these
    /// tokens.
    pub fn route(&self, logits: Tensor<2>) -> Result<MoeRoute, Nvfp4Error> {
        try_moe_route(
            logits,
            Router {
                experts: self.experts(),
                top_k: self.settings.top_k,
                normalize: self.settings.normalize,
            },
        )
    }

    /// Returns the layers of the experts.
    pub fn layers(&self) -> ExpertLayers<'_> {
        ExpertLayers {
            gate_up: self.gate_up,
            down: self.down,
            activation: self.settings.activation,
            recompute: self.settings.recompute,
        }
    }

    /// Applies the shared expert, if any.
    pub fn run_shared(&self, x: Tensor<2>) -> Result<Option<Tensor<2>>, Nvfp4Error> {
        self.shared.map(|shared| shared.try_forward(x)).transpose()
    }
}

/// Layers of the experts of this rank, one matrix per expert, with an activation between them.
pub(super) struct ExpertLayers<'a> {
    pub gate_up: &'a Nvfp4GroupedLinear,
    pub down: &'a Nvfp4GroupedLinear,
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the activation.
    pub recompute: bool,
}

impl ExpertLayers<'_> {
    /// Returns an error if the layers do not have `held` experts, do not match each other or the
    /// input `x` of width `d_model`, or if the activation does not support recomputation.
    pub fn check<const D: usize>(
        &self,
        (x, d_model): (&Tensor<D>, usize),
        held: usize,
    ) -> Result<(), Nvfp4Error> {
        self.activation.check_recompute(self.recompute)?;
        validate::operand("x", x)?;
        let (device, [_, _, d_inner]) = (x.device(), whole_dims(&self.gate_up.weight));
        let names = ["gate_up.weight", "gate_up.bias"];
        let shape = [held, d_model, d_inner];
        self.gate_up.check_part(names, &device, shape)?;
        let names = ["down.weight", "down.bias"];
        let shape = [held, d_inner / self.activation.inputs(), d_model];
        self.down.check_part(names, &device, shape)
    }

    /// Runs the experts of this rank on tokens sorted by expert. `earlier` are the token counts of
    /// the experts of earlier ranks; random bits of this rank's blocks continue after those of
    /// their blocks.
    pub fn run(
        &self,
        sorted: Tensor<2>,
        experts: &ExpertOffsets,
        earlier: &[usize],
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let groups = RowGroups::Offsets(experts.offsets().clone().into_dispatch());
        let behind = |spec: LinearSpec, dims| spec.behind_experts(earlier, dims);
        self.run_groups((sorted, experts), groups, behind)
    }

    /// Version of [`run`](Self::run) for the tokens of all ranks, with those of this rank's experts
    /// first; the contents of the other rows do not matter. `first` is the global index of its
    /// first expert.
    pub fn run_window(
        &self,
        sorted: Tensor<2>,
        window: &ChoiceWindow,
        first: usize,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let behind = |spec: LinearSpec, dims| spec.behind_weights(first, dims);
        self.run_groups((sorted, &window.experts), window.groups(), behind)
    }

    /// Runs the experts on grouped rows. `behind` returns the block numbering of a layer with
    /// weights `[d_in, d_out]`.
    fn run_groups(
        &self,
        (sorted, experts): (Tensor<2>, &ExpertOffsets),
        groups: RowGroups<Dispatch>,
        behind: impl Fn(LinearSpec, [usize; 2]) -> LinearSpec,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let Self {
            activation,
            recompute,
            ..
        } = *self;
        self.gate_up.check(&sorted, experts)?;
        if self.gate_up.packed().or(self.down.packed()).is_some() {
            let layers = (self.gate_up, self.down);
            return try_feed_forward_of_experts(layers, activation, sorted, experts, false);
        }
        let mut input = self.gate_up.part(sorted.is_tracked())?;
        let mut output = self.down.part(input.tracks(&sorted))?;
        for part in [&mut input, &mut output] {
            let [_, d_in, d_out] = part.weight.dims();
            part.spec.0 = behind(part.spec.0, [d_in, d_out]);
        }
        feed_forward_between(sorted, (input, output), groups, (activation, recompute))
    }
}

/// Returns the largest power of two, at most `2^log`, that divides `rows`.
fn equal_parts(rows: usize, log: u32) -> usize {
    1 << rows.trailing_zeros().min(log)
}
