//! AdamW and the norm of gradients, over the parameters of a model.

use cubecl::server::Handle;
use nvfp4_formats::reference::{AdamWParams, AdamWSchedule};
use nvfp4_kernels::{
    graph,
    optimizer::{self, AdamWSpec, AdamWUpdate, Gradient},
    tensor::FloatKind,
};

use crate::{common::device::size, harness::Section};

/// Number of parameters of the model.
const PARAMETERS: usize = 13;

/// Returns the number of elements of each parameter.
fn elements() -> usize {
    size(16 << 20, 1 << 10)
}

const PARAMS: AdamWParams = AdamWParams {
    beta_1: 0.9,
    beta_2: 0.95,
    epsilon: 1e-8,
};

/// Times a step of 218 million parameters, as in `benches/pytorch_step.py`: everything in `f32`;
/// then with gradients and parameter copies in `bf16`; then with moments in `bf16`, too.
pub fn adamw(section: &mut Section<'_>) {
    let client = section.client();
    let elements = elements();
    let total = (PARAMETERS * elements) as f64;
    let words = AdamWSchedule::new(&PARAMS, 1e-6, 1).words();
    let schedule = client.empty(16);
    graph::set_words(&client, &schedule, words).unwrap();
    let source = client.empty(4 * elements);
    section.copy(4 * elements, |_| &source);
    let (f32, bf16) = (FloatKind::F32, FloatKind::Bf16);
    for (name, gradient, moments, copy) in [
        ("AdamW, f32", f32, f32, None),
        ("AdamW, bf16 parameters", bf16, f32, Some(bf16)),
        ("AdamW, bf16 parameters and moments", bf16, bf16, Some(bf16)),
    ] {
        let zeros = |kind: FloatKind| -> Handle {
            client.create_from_slice(&vec![0u8; elements * kind.size()])
        };
        let updates: Vec<AdamWUpdate> = (0..PARAMETERS)
            .map(|index| AdamWUpdate {
                gradient: Gradient {
                    handle: zeros(gradient),
                    elements,
                    dtype: gradient,
                },
                weight: zeros(f32),
                first: zeros(moments),
                second: zeros(moments),
                copy: copy.map(|kind| (zeros(kind), kind)),
                decay: 0.1,
                key: [index as u32, 1],
            })
            .collect();
        let gradients: Vec<Gradient> = updates
            .iter()
            .map(|update| update.gradient.clone())
            .collect();
        let size = |kind: FloatKind| kind.size() as f64;
        section.time(&format!("{name}: norm"), total * size(gradient), |_| {
            let (sums, count) = optimizer::square_sums(&client, &gradients).unwrap();
            optimizer::clip_factor(&client, &sums, count, 1.0).unwrap();
        });
        let (sums, count) = optimizer::square_sums(&client, &gradients).unwrap();
        let factor = optimizer::clip_factor(&client, &sums, count, 1.0).unwrap();
        let spec = AdamWSpec {
            params: PARAMS,
            moments,
            schedule: &schedule,
            factor: Some(&factor),
        };
        let written = copy.map_or(0.0, size);
        let bytes = size(gradient) + 2.0 * 4.0 + 4.0 * size(moments) + written;
        section.time(name, total * bytes, |_| {
            optimizer::adamw(&client, &spec, &updates, None).unwrap();
        });
        let amax = optimizer::no_amax(&client, PARAMETERS);
        section.time(&format!("{name}, with amax"), total * bytes, |_| {
            optimizer::clear_amax(&client, &amax, PARAMETERS).unwrap();
            optimizer::adamw(&client, &spec, &updates, Some(&amax)).unwrap();
        });
    }
}
