//! Steps by a captured graph have the bits of ordinary steps. CUDA captures; CubeCL's CPU runtime
//! runs the same steps kernel by kernel.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nvfp4::graph::{GraphSteps, TakenBy, copy_into};
use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4State, RngState};

use crate::memory::memory_usage;
use crate::support::{Matrix, cube_only, device};

const ROWS: usize = 32;
const D_IN: usize = 48;
const D_OUT: usize = 64;

fn is_flex() -> bool {
    format!("{:?}", device()).contains("Flex")
}

/// A device has only one graph at a time.
static GRAPH: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    GRAPH.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Creates a layer that has run 5 times.
fn layer(recipe: Nvfp4Recipe) -> Nvfp4Linear {
    let device = device().autodiff();
    let config = Nvfp4LinearConfig::new(D_IN, D_OUT).with_recipe(recipe);
    let layer = config.with_layer(Some(3)).init(&device);
    let mut state = Nvfp4State::collect(&layer);
    for rng_state in state.layers.values_mut() {
        *rng_state = RngState {
            offset: 5,
            ..*rng_state
        };
    }
    state.apply(&layer).unwrap();
    layer
}

/// Returns the gradient of the input, which is rounded stochastically.
fn gradient(layer: &Nvfp4Linear, x: &Tensor<2>, upstream: &Tensor<2>) -> Tensor<2> {
    let x = x.clone().require_grad();
    let y = layer.forward(x.clone()) * upstream.clone();
    x.grad(&y.sum().backward()).unwrap()
}

fn matrix(rows: usize, cols: usize, seed: u64) -> Tensor<2> {
    Matrix::gaussian(rows, cols, DType::F32, seed).tensor(&device().autodiff())
}

fn bytes(tensor: &Tensor<2>) -> Vec<u8> {
    tensor.clone().into_data().as_bytes().to_vec()
}

#[test]
fn steps_have_the_bits_of_ordinary_ones() {
    cube_only!();
    have_the_bits_of_ordinary_ones(&Nvfp4Recipe::new());
}

/// MS-EDEN draws signs too: the kernels draw those of each step.
#[test]
fn steps_with_ms_eden_have_the_bits_of_ordinary_ones() {
    cube_only!();
    have_the_bits_of_ordinary_ones(&Nvfp4Recipe::quartet2());
}

fn have_the_bits_of_ordinary_ones(recipe: &Nvfp4Recipe) {
    let _alone = alone();
    let (x, upstream) = (matrix(ROWS, D_IN, 1), matrix(ROWS, D_OUT, 2));
    let layer = layer(recipe.clone());
    // The same weight with separate offsets.
    let mut ordinary = layer.clone();
    ordinary.state = self::layer(recipe.clone()).state;
    let expected: Vec<_> = (0..8)
        .map(|_| bytes(&gradient(&ordinary, &x, &upstream)))
        .collect();
    assert!(expected[0] != expected[1], "fresh bits in every step");

    let mut steps = GraphSteps::begin(&layer, &device()).unwrap();
    let error = GraphSteps::begin(&layer, &device()).err().unwrap();
    assert!(error.to_string().contains("another graph"), "{error}");
    let mut found = None;
    let mut taken = Vec::new();
    for (i, expected) in expected.iter().enumerate() {
        let step = steps.step(|| found = Some(gradient(&layer, &x, &upstream)));
        match step {
            Ok(by) => taken.push(by),
            Err(error) => {
                assert!(
                    !format!("{:?}", device()).to_lowercase().contains("cuda"),
                    "{error}"
                );
                assert!(error.to_string().contains("capture"), "{error}");
                assert_eq!(i, 3, "after the ordinary steps");
                break;
            }
        }
        assert!(bytes(found.as_ref().unwrap()) == *expected, "step {i}");
        let state = Nvfp4State::collect(&layer);
        assert_eq!(state.layers.values().next().unwrap().offset, 6 + i as u64);
    }
    assert_eq!(taken[..3], [TakenBy::Launches; 3]);
    if taken.len() == 8 {
        assert_eq!(taken[3], TakenBy::Capture);
        assert_eq!(taken[4..], [TakenBy::Replay; 4]);
    }
    // Offsets are host counts again.
    drop(steps);
    let before = Nvfp4State::collect(&layer);
    before.apply(&ordinary).unwrap();
    let after = [&layer, &ordinary].map(|layer| bytes(&gradient(layer, &x, &upstream)));
    assert!(after[0] == after[1]);
}

#[test]
fn copies_go_where_the_tensor_is() {
    let numbers = |values: [i32; 3]| {
        Tensor::<1, Int>::from_data(TensorData::new(values.to_vec(), [3]), &device())
    };
    let made = copy_into(numbers([1, 2, 3]), numbers([4, 5, 6]));
    if is_flex() {
        assert!(made.unwrap_err().to_string().contains("Flex"));
        return;
    }
    let made: Vec<i32> = made.unwrap().into_data().iter::<i32>().collect();
    assert_eq!(made, [4, 5, 6]);
    let short = Tensor::<1, Int>::from_data([1i32], &device());
    let error = copy_into(numbers([1, 2, 3]), short).unwrap_err();
    assert!(error.to_string().contains("from"), "{error}");
}

/// Bytes reserved in the pools of this test's stream but not used.
fn free() -> u64 {
    let usage = memory_usage(&device());
    usage.bytes_reserved - usage.bytes_in_use
}

/// During a capture no memory can be added, and free memory may be fragmented differently than
/// before.
#[test]
fn there_is_more_room_for_the_capture_than_a_step_took() {
    cube_only!();
    let _alone = alone();
    let layer = layer(Nvfp4Recipe::new());
    let mut steps = GraphSteps::begin(&layer, &device()).unwrap();
    let mut found = 0.0;
    let mut step = || {
        let made = Tensor::<2>::ones([4096, 4096], &device()) * 2.0;
        found = made.slice([0..1, 0..1]).into_scalar::<f32>();
    };
    steps.launch(&mut step).unwrap();
    let before = free();
    assert!(before > 16 << 20, "{before} bytes of a step's 64 MiB");
    for _ in 0..3 {
        steps.step(&mut step).unwrap();
    }
    // As much as the largest tensor.
    assert!(
        free() >= before + (64 << 20),
        "{} of {before} bytes",
        free()
    );
    drop(steps);
    assert_eq!(found, 2.0);
}
