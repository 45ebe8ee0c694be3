//! Linear layers: Burn's, and those of every preset.

use burn_core::tensor::DType;
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe};

use crate::harness::{Bench, backward};

/// Creates a Burn layer without a bias, with a weight of dtype `dtype`.
pub fn plain(bench: &Bench, inputs: usize, outputs: usize, dtype: DType) -> Linear {
    let config = LinearConfig::new(inputs, outputs).with_bias(false);
    let linear: Linear = config.init(&bench.device);
    Linear {
        // A parameter is a leaf: the cast must not be part of its graph.
        weight: (linear.weight).map(|weight| weight.cast(dtype).detach().require_grad()),
        bias: None,
    }
}

/// Times forward and backward of a layer: 8192 tokens, 4096 inputs, 4096 and 14336 outputs.
pub fn layers(bench: &mut Bench) {
    let [tokens, inputs] = bench.size([8192, 4096], [64, 64]);
    let dtype = bench.activation();
    for outputs in bench.size([4096, 14336], [64, 96]) {
        let setting = format!("linear {tokens}x{inputs}, {outputs} outputs");
        let x = bench.leaf([tokens, inputs], dtype);
        let y = bench.leaf([tokens, outputs], dtype);
        bench.time(&setting, "the sum alone", || {
            backward(&y, |y| y);
        });
        let burns = plain(bench, inputs, outputs, dtype);
        bench.time(&setting, "Burn's `Linear`", || {
            backward(&x, |x| burns.forward(x));
        });
        for preset in Nvfp4Recipe::preset_names() {
            let recipe = Nvfp4Recipe::preset(preset).expect("a preset");
            let layer = Nvfp4Linear::from_linear(plain(bench, inputs, outputs, dtype), &recipe)
                .expect("a layer of multiples of 16");
            bench.time(&setting, &format!("`{preset}`"), || {
                backward(&x, |x| layer.forward(x));
            });
        }
    }
}
