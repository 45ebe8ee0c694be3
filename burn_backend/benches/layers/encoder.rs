//! Training steps of a transformer encoder: with the modules of burn-nn, with the modules of the same
//! names in `nvfp4::nn`, and with burn-nn's after `decorate`. A step is forward with a causal mask,
//! backward, and AdamW. `benches/pytorch_step.py encoder` measures the same step of
//! `torch.nn.TransformerEncoder`.

use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_nn::transformer as burns;
use burn_nvfp4::nn::transformer as ours;
use burn_nvfp4::{Nvfp4Recipe, state::assign_layer_ids};

use crate::harness::Bench;
use crate::step;

/// Prefix of the names of its settings.
pub const SETTING: &str = "encoder";

/// Prefix of the settings with `decorate`, which run in a separate process: it replaces the fusion
/// of all layers.
pub const DECORATED: &str = "decorated encoder";

/// Sizes of an encoder and its input.
#[derive(Clone, Copy)]
struct Size {
    width: usize,
    layers: usize,
    heads: usize,
    hidden: usize,
    batch: usize,
    time: usize,
}

/// An encoder of either kind.
trait Encoder: Module {
    /// Returns the features of `x`, with a causal mask.
    fn features(&self, x: Tensor<3>) -> Tensor<3>;
}

/// Implements [`Encoder`] with the names of burn-nn, which both modules have.
macro_rules! encoder {
    ($($nn:ident)::+) => {
        impl Encoder for $($nn)::+::transformer::TransformerEncoder {
            fn features(&self, x: Tensor<3>) -> Tensor<3> {
                use $($nn)::+::attention::generate_autoregressive_mask;
                use $($nn)::+::transformer::TransformerEncoderInput;

                let [batch, time, _] = x.dims();
                let device = x.device().without_autodiff();
                let mask = generate_autoregressive_mask(batch, time, &device);
                self.forward(TransformerEncoderInput::new(x).mask_attn(mask))
            }
        }
    };
}

encoder!(burn_nn);
encoder!(burn_nvfp4::nn);

/// Times steps of burn-nn's encoder and of this crate's in several recipes.
pub fn steps(bench: &mut Bench) {
    for (name, size) in sizes(bench) {
        let setting = format!("{SETTING} {name}");
        let model = burn_nn_encoder(bench, size);
        time(bench, &setting, "burn-nn, bf16", size, model, false);
        for preset in ["bf16", "nvidia", "quartet2"] {
            for is_graph in [false, true] {
                let graph = if is_graph { ", graph" } else { "" };
                let name = format!("nvfp4::nn, {preset}{graph}");
                let model = ours::TransformerEncoderConfig::new(
                    size.width,
                    size.hidden,
                    size.heads,
                    size.layers,
                )
                .with_dropout(0.0)
                .with_norm_first(true)
                .with_recipe(Nvfp4Recipe::preset(preset).expect("a preset"))
                .init(&bench.device);
                assign_layer_ids(&model);
                time(bench, &setting, &name, size, model, is_graph);
            }
        }
    }
}

/// Times steps of burn-nn's encoder before and after `decorate`, on a device with its fusion.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub fn decorated(bench: &mut Bench) {
    if !bench.is_cube() {
        println!("decorated: left out, models are decorated on CubeCL's devices");
        return;
    }
    burn_nvfp4::decorate::install().expect("no tensor was made before");
    for (name, size) in sizes(bench) {
        let setting = format!("{DECORATED} {name}");
        let recipe = Nvfp4Recipe::preset("nvidia").expect("a preset");
        for is_graph in [false, true] {
            let graph = if is_graph { ", graph" } else { "" };
            let model = burn_nn_encoder(bench, size);
            let name = format!("undecorated, bf16{graph}");
            time(bench, &setting, &name, size, model, is_graph);
            let model = burn_nvfp4::decorate(burn_nn_encoder(bench, size), &recipe);
            let model = model.expect("an encoder has linear layers");
            assign_layer_ids(&model);
            let name = format!("decorated, nvidia{graph}");
            time(bench, &setting, &name, size, model, is_graph);
        }
    }
}

fn sizes(bench: &Bench) -> Vec<(String, Size)> {
    let sizes = bench.size(
        vec![(768, 12, 12, 16, 1024), (4096, 1, 32, 16, 512)],
        vec![(32, 1, 2, 2, 16)],
    );
    let size = |(width, layers, heads, batch, time)| {
        let size = Size {
            width,
            layers,
            heads,
            hidden: 4 * width,
            batch,
            time,
        };
        (format!("{width} x {layers}"), size)
    };
    sizes.into_iter().map(size).collect()
}

/// Returns burn-nn's encoder with parameters of the activations' dtype, which its layers require.
fn burn_nn_encoder(bench: &Bench, size: Size) -> burns::TransformerEncoder {
    burns::TransformerEncoderConfig::new(size.width, size.hidden, size.heads, size.layers)
        .with_dropout(0.0)
        .with_norm_first(true)
        .init(&bench.device)
        .map(&mut Cast(bench.activation()))
}

struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<D>>) -> Param<Tensor<D>> {
        parameter.map(|tensor| {
            tensor
                .cast(FloatDType::from(self.0))
                .detach()
                .require_grad()
        })
    }
}

/// Times steps of `model` as `name` in `setting`.
fn time<E: Encoder>(
    bench: &mut Bench,
    setting: &str,
    name: &str,
    size: Size,
    model: E,
    is_graph: bool,
) {
    let x = bench.constant([size.batch, size.time, size.width], bench.activation());
    step::time(bench, [setting, name], model, is_graph, |model| {
        model.features(x.clone())
    });
}
