//! Experts when other devices have further experts: the contents of rows of those do not matter.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nvfp4::ops::{
    FeedForwardSpec, LinearContext, LinearParams, LinearSpec, MaybeTensor, Nvfp4Ops, RowGroups,
};
use burn_nvfp4::{Hadamard, Nvfp4Recipe, RngState};
use nvfp4_formats::reference::Activation;

use super::{HIDDEN, WIDTH};
use crate::support::{Matrix, activation, device, small_only, values};

/// Number of tokens of each expert of this device.
const SIZES: [usize; 3] = [5, 0, 17];

/// Returns the operands of layer `layer` of a preset.
fn spec(preset: &str, layer: u64) -> LinearSpec {
    Nvfp4Recipe::preset(preset).unwrap().spec(&RngState {
        seed: 1,
        layer,
        offset: 0,
        rht_signs: Hadamard::DEFAULT_SIGNS,
    })
}

fn words(words: &[u32]) -> Tensor<1, Int> {
    let data = TensorData::new(words.to_vec(), [words.len()]);
    Tensor::from_data(data, (&device().autodiff(), DType::U32))
}

/// Returns output and gradients by tokens and weights, for the rows of these experts followed by
/// `others` rows of NaN.
fn run(preset: &str, dtype: DType, recompute: bool, others: usize) -> [Vec<f32>; 4] {
    let device = device().autodiff();
    let own: usize = SIZES.iter().sum();
    let rows = |seed| {
        let mut values = Matrix::gaussian(own, WIDTH, dtype, seed).values;
        values.extend(vec![f32::NAN; others * WIDTH]);
        Matrix::new(values, own + others, WIDTH, dtype).tensor(&device)
    };
    let weight = |d_in, d_out, seed| {
        let values = Matrix::gaussian(SIZES.len() * d_in, d_out, DType::F32, seed).values;
        let data = TensorData::new(values, [SIZES.len(), d_in, d_out]);
        Tensor::<3>::from_data(data, &device).require_grad()
    };
    let (x, dy) = (rows(1).require_grad(), rows(2));
    let (gate_up, down) = (weight(WIDTH, 2 * HIDDEN, 3), weight(HIDDEN, WIDTH, 4));
    let mut offsets = vec![0u32];
    for size in SIZES {
        offsets.push(offsets[offsets.len() - 1] + size as u32);
    }
    let offsets = words(&offsets).into_dispatch();
    let groups = match others {
        0 => RowGroups::Offsets(offsets),
        _ => RowGroups::Window {
            offsets,
            earlier: words(&[0; 5]).into_dispatch(),
        },
    };
    let params = |weight: &Tensor<3>| LinearParams {
        weight: weight.clone().into_dispatch(),
        bias: MaybeTensor::Absent,
    };
    let y = Dispatch::nvfp4_feed_forward(
        x.clone().into_dispatch(),
        params(&gate_up),
        params(&down),
        groups,
        FeedForwardSpec {
            activation: Activation::SwiGlu,
            input: (spec(preset, 0), LinearContext::default()),
            output: (spec(preset, 1), LinearContext::default()),
            recompute,
        },
    );
    let y = Tensor::<2>::from_dispatch(y);
    let grads = (y.clone() * dy).sum().backward();
    let own_rows = |x: Tensor<2>| values(x.narrow(0, 0, own));
    [
        own_rows(y),
        own_rows(x.grad(&grads).unwrap()),
        values(gate_up.grad(&grads).unwrap()),
        values(down.grad(&grads).unwrap()),
    ]
}

#[test]
fn rows_of_other_devices_do_not_matter() {
    let (presets, dtypes) = match small_only() {
        true => (vec!["bf16", "nvidia"], vec![DType::F32]),
        false => {
            let presets = Nvfp4Recipe::preset_names().collect();
            (presets, vec![DType::F32, activation()])
        }
    };
    for preset in presets {
        for &dtype in &dtypes {
            let recomputes: &[bool] = if small_only() {
                &[false]
            } else {
                &[false, true]
            };
            for &recompute in recomputes {
                let what = format!("{preset}, {dtype:?}, recompute {recompute}");
                let expected = run(preset, dtype, recompute, 0);
                let found = run(preset, dtype, recompute, 23);
                let names = ["y", "dx", "gate_up", "down"].into_iter();
                for ((name, found), expected) in names.zip(&found).zip(&expected) {
                    assert_eq!(found, expected, "{what}: {name}");
                }
            }
        }
    }
}
