//! Operations between linear layers: norms with and without a residual, and activations, forward
//! and backward.

use nvfp4_formats::reference::{Activation, Gelu, Norm};
use nvfp4_kernels::{
    activation::{activation, activation_backward},
    norm::{NormBackwardRequest, NormRequest, norm, norm_backward},
    quantize::AmaxRequest,
};

use crate::{
    dense::copy,
    harness::Section,
    inputs::{Inputs, plain_and_transformed, words},
};

const EPSILON: f32 = 1e-6;

/// Times norms of `rows` x `cols` elements. The byte count has each matrix read or written once;
/// factors, statistics and partial sums are not counted.
pub fn norms(section: &mut Section<'_>, (rows, cols): (usize, usize)) {
    let client = section.client();
    let [x, y, grad] = [0; 3].map(|_| Inputs::bf16(&client, rows, cols));
    copy(section, &x);
    let ones = || words(&client, (0..cols).map(|_| 1.0f32.to_bits()));
    let (gain, bias) = (ones(), ones());
    let n = x.elements();
    for (name, kind) in [("RMSNorm", Norm::Rms), ("LayerNorm", Norm::Layer)] {
        let is_layer = kind == Norm::Layer;
        let request = |i: usize, added: bool| NormRequest {
            norm: kind,
            x: x.get(i),
            residual: added.then(|| y.get(i)),
            gain: &gain,
            bias: is_layer.then_some(&bias),
            epsilon: EPSILON,
            amax: AmaxRequest::default(),
        };
        let stats = norm(&client, &request(0, false)).unwrap().stats;
        let backward = |i: usize, added: bool| NormBackwardRequest {
            norm: kind,
            grad: grad.get(i),
            sum_grad: added.then(|| y.get(i)),
            x: x.get(i),
            stats: &stats,
            gain: &gain,
            bias: is_layer,
            amax: AmaxRequest::default(),
        };
        for (suffix, added, matrices) in [("", false, 2.0), (", residual added", true, 4.0)] {
            section.time(&format!("{name}{suffix}"), 2.0 * matrices * n, |i| {
                norm(&client, &request(i, added)).unwrap();
            });
        }
        section.time(
            &format!("{name}, residual added, with amax"),
            8.0 * n,
            |i| {
                let amax = plain_and_transformed();
                let request = NormRequest {
                    amax,
                    ..request(i, true)
                };
                norm(&client, &request).unwrap();
            },
        );
        for (suffix, added, matrices) in [("", false, 3.0), (", gradient added", true, 4.0)] {
            let name = format!("{name} backward{suffix}");
            section.time(&name, 2.0 * matrices * n, |i| {
                norm_backward(&client, &backward(i, added)).unwrap();
            });
        }
        let title = format!("{name} backward, gradient added, with amax");
        section.time(&title, 8.0 * n, |i| {
            let request = NormBackwardRequest {
                amax: plain_and_transformed(),
                ..backward(i, true)
            };
            norm_backward(&client, &request).unwrap();
        });
    }
}

/// Times activations with `rows` x `width` outputs.
pub fn activations(section: &mut Section<'_>, (rows, width): (usize, usize)) {
    let client = section.client();
    let (x, both) = (
        Inputs::bf16(&client, rows, width),
        Inputs::bf16(&client, rows, 2 * width),
    );
    copy(section, &x);
    let n = 2.0 * x.elements();
    for (name, which) in [
        ("SwiGLU", Activation::SwiGlu),
        ("GELU by erf", Activation::Gelu(Gelu::Erf)),
        ("GELU by tanh", Activation::Gelu(Gelu::Tanh)),
    ] {
        let inputs = which.inputs() as f64;
        let of = |i: usize| match which {
            Activation::SwiGlu => both.get(i),
            Activation::Gelu(_) => x.get(i),
        };
        section.time(name, (inputs + 1.0) * n, |i| {
            activation(&client, which, of(i)).unwrap();
        });
        section.time(&format!("{name} backward"), (2.0 * inputs + 1.0) * n, |i| {
            // The gradient is a different matrix from the input.
            activation_backward(&client, which, x.get(i + 1), of(i)).unwrap();
        });
    }
}
