//! The SwiGLU feed-forward of Llama 70B, the benchmark of torchao's pull request 2408: in bf16,
//! MXFP8, MXFP4 and NVFP4. `benches/pytorch_step.py mlp` has PyTorch's times in bf16.
//!
//! GEMMs dequantize MXFP4 codes to bf16. MXFP8 is dequantized too, except on GPUs with block-scaled
//! instructions.

use burn_core::module::Module;
use burn_nvfp4::{Nvfp4Recipe, Nvfp4SwiGluConfig, QuantizeConfig, nn::Activations, quantize};
use nvfp4_formats::Format;

use crate::b200::{Shape, modelled};
use crate::harness::{Bench, backward, read};

/// Prefix of the names of its settings.
pub const SETTING: &str = "mlp";

/// Times forward and step for few and many tokens, and the forward with packed weights.
pub fn mlps(bench: &mut Bench) {
    let [width, hidden] = bench.size([8192, 28672], [64, 96]);
    let dtype = bench.activation();
    for tokens in bench.size([1024, 16384], [32, 64]) {
        let setting = |part: &str| format!("{SETTING} {width}-{hidden}, {tokens} tokens, {part}");
        let x = bench.leaf([tokens, width], dtype);
        let inner = x.clone().inner();
        for preset in ["bf16", "mxfp8", "mxfp4", "nvidia"] {
            bench.release();
            let recipe = Nvfp4Recipe::preset(preset).expect("a preset");
            let config = Nvfp4SwiGluConfig::new(width, hidden).with_recipe(recipe);
            let mlp = config.init(&bench.device);
            let constant = mlp.valid();
            bench.time(&setting("forward"), &format!("`{preset}`"), || {
                read(constant.forward(inner.clone()));
            });
            if preset == "nvidia" {
                let config = QuantizeConfig::new().with_activations(Activations::DYNAMIC);
                let (packed, _) = quantize(constant, &config).expect("layers to pack");
                let name = "NVFP4, packed weights";
                bench.time(&setting("forward"), name, || {
                    read(packed.forward(inner.clone()));
                });
            }
            bench.time(&setting("step"), &format!("`{preset}`"), || {
                read(backward(&x, |x| mlp.forward(x)));
            });
        }
        print_model([tokens, width, hidden]);
    }
}

/// Prints the time of both GEMMs of a forward on a B200 by NVIDIA's model, if it is known.
fn print_model([tokens, width, hidden]: [usize; 3]) {
    let known = modelled();
    for format in [Format::Mxfp8, Format::Nvfp4] {
        let time = |(n, k)| {
            let shape = Shape {
                format,
                m: tokens,
                n,
                k,
                groups: 1,
            };
            let found = known.iter().find(|(other, _)| *other == shape);
            found.map(|(_, microseconds)| microseconds / 1e3)
        };
        let both = time((2 * hidden, width)).zip(time((width, hidden)));
        if let Some((gate_up, down)) = both {
            let total = gate_up + down;
            println!("{tokens} tokens, both GEMMs on a B200, modelled: {format:?} {total:.3} ms");
        }
    }
}
