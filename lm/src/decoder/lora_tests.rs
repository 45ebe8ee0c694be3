//! Tests that joined adapters compute what separate ones do.

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::Nvfp4Linear;

use super::lora::{AdaptedModule, Adapter, FrozenBase, LoraProjection, joined_rank};
use crate::optim::Optimizer;

const ROWS: usize = 24;
const D_IN: usize = 48;
/// Output columns of the modules that the projection fuses.
const OUTPUTS: [usize; 3] = [64, 32, 32];
const SCALE: f64 = 1.5;

/// Returns the device that `NVFP4_TEST_DEVICE` names, with autodiff.
fn device() -> Device {
    let device = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => Device::cuda(0),
        #[cfg(feature = "cpu")]
        Ok("cpu") => nvfp4_test_support::cpu_runtime(Device::cpu),
        _ => Device::flex(),
    };
    device.autodiff()
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let normal = Distribution::Normal(0.0, 0.5);
    Tensor::random(shape, normal, (device, DType::F32)).detach()
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Returns a frozen layer, and adapters of `rank` on the modules `adapted`.
fn parts(adapted: &[usize], rank: usize, device: &Device) -> (Tensor<2>, Vec<Adapter>) {
    let weight = random([D_IN, OUTPUTS.iter().sum()], device);
    let adapters = adapted.iter().map(|&index| {
        let first: usize = OUTPUTS[..index].iter().sum();
        Adapter {
            module: AdaptedModule {
                name: index.to_string(),
                columns: first..first + OUTPUTS[index],
            },
            a: random([D_IN, rank], device),
            b: random([rank, OUTPUTS[index]], device),
        }
    });
    (weight, adapters.collect())
}

/// Returns the projection of these parts, whose base is frozen.
fn joined(weight: &Tensor<2>, adapters: &[Adapter]) -> LoraProjection {
    let weight = Param::from_tensor(weight.clone());
    let linear = Linear { weight, bias: None };
    let base = Nvfp4Linear::from_linear(linear, &Nvfp4Recipe::bf16()).unwrap();
    let adapters = adapters.iter().map(|adapter| Adapter {
        module: adapter.module.clone(),
        a: adapter.a.clone(),
        b: adapter.b.clone(),
    });
    LoraProjection::new(FrozenBase::Nvfp4(base.no_grad()), adapters.collect(), SCALE)
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    // A GPU rounds the operands of an f32 matmul to 11 bits.
    let error = match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        Ok("cuda") => 8e-3,
        _ => 1e-5,
    };
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found - expected).abs();
        assert!(
            difference <= error * largest,
            "{what}: {found}, not {expected}"
        );
    }
}

/// Output and gradients are those of separate adapters by Burn's matmuls, for every rank and for
/// every choice of modules.
#[test]
fn joined_adapters_are_separate_ones() {
    let device = device();
    for rank in [1, 4, 16] {
        for adapted in [&[0, 1, 2][..], &[0, 2], &[1]] {
            let what = format!("rank {rank}, modules {adapted:?}");
            let (weight, adapters) = parts(adapted, rank, &device);
            let dy = random([ROWS, weight.dims()[1]], &device);
            let input = random([ROWS, D_IN], &device);

            let x = input.clone().require_grad();
            let layer = joined(&weight, &adapters);
            assert_eq!(layer.a.dims()[1], joined_rank(adapted.len(), rank));
            let y = layer.forward(x.clone()).unwrap();
            let grads = (y.clone() * dy.clone()).sum().backward();
            let found = LoraProjection {
                a: Param::from_tensor(layer.a.grad(&grads).unwrap()),
                b: Param::from_tensor(layer.b.grad(&grads).unwrap()),
                ..layer.valid()
            };
            let dx = x.grad(&grads).unwrap();

            let x = input.clone().require_grad();
            let mut expected = x.clone().matmul(weight.clone());
            let mut leaves = Vec::new();
            for Adapter { module, a, b } in &adapters {
                let (a, b) = (a.clone().require_grad(), b.clone().require_grad());
                let columns = [0..ROWS, module.columns.clone()];
                let product = x.clone().matmul(a.clone()).matmul(b.clone());
                let sum = expected.clone().slice(columns.clone()) + product.mul_scalar(SCALE);
                expected = expected.slice_assign(columns, sum);
                leaves.push((a, b));
            }
            let grads = (expected.clone() * dy).sum().backward();
            assert_close(&values(y.inner()), &values(expected.inner()), &what);
            assert_close(&values(dx), &values(x.grad(&grads).unwrap()), &what);
            for (found, (a, b)) in found.adapters().into_iter().zip(leaves) {
                let (a, b) = (a.grad(&grads).unwrap(), b.grad(&grads).unwrap());
                assert_close(&values(found.a), &values(a), &format!("A, {what}"));
                assert_close(&values(found.b), &values(b), &format!("B, {what}"));
            }

            let merged = input.inner().matmul(layer.valid().merged().0);
            let own = layer.valid().forward(x.inner()).unwrap();
            assert_close(&values(merged), &values(own), &format!("merged, {what}"));
        }
    }
}

/// Values outside of the blocks, and those of the padding, are zero before and after steps with
/// weight decay; all others change. The frozen layer does not.
#[test]
fn zeros_stay_zero() {
    let device = device();
    for rank in [1, 4] {
        let (weight, adapters) = parts(&[0, 2], rank, &device);
        let mut layer = joined(&weight, &adapters);
        let before = [&layer.a, &layer.b].map(|matrix| values(matrix.val().inner()));
        let mut optimizer = Optimizer::adamw(0.1, 1.0).unwrap();
        for _ in 0..5 {
            let y = layer.forward(random([ROWS, D_IN], &device)).unwrap();
            let grads = y.powf_scalar(2.0).mean().backward();
            let grads = GradientsParams::from_grads(grads, &layer);
            layer = optimizer.step(1e-2, layer, grads);
        }
        let after = [&layer.a, &layer.b].map(|matrix| values(matrix.val().inner()));
        let [width, joined] = [weight.dims()[1], joined_rank(2, rank)];
        let is_own = |row: usize, column: usize| {
            let adapters = adapters.iter().enumerate();
            let mut adapters = adapters.filter(|(index, _)| row / rank == *index);
            adapters.any(|(_, adapter)| adapter.module.columns.contains(&column))
        };
        for at in 0..D_IN * joined {
            let is_own = at % joined < 2 * rank;
            assert_eq!(before[0][at] != 0.0, is_own, "A before, {at}");
            assert_eq!(after[0][at] != before[0][at], is_own, "A, {at}");
        }
        for at in 0..joined * width {
            let is_own = is_own(at / width, at % width);
            assert_eq!(before[1][at] != 0.0, is_own, "B before, {at}");
            assert_eq!(after[1][at] != before[1][at], is_own, "B, {at}");
        }
        let FrozenBase::Nvfp4(base) = &layer.base else {
            panic!("the base has another form");
        };
        assert_eq!(values(base.weight.val().inner()), values(weight.inner()));
    }
}

/// Joining and separating adapters keeps their bits.
#[test]
fn separated_adapters_are_the_joined_ones() {
    let device = device();
    for rank in [1, 4, 16] {
        let (weight, adapters) = parts(&[0, 2], rank, &device);
        let found = joined(&weight, &adapters).adapters();
        assert_eq!(found.len(), 2);
        for (found, expected) in found.into_iter().zip(adapters) {
            assert_eq!(found.module.name, expected.module.name);
            assert_eq!(found.module.columns, expected.module.columns);
            assert_eq!(values(found.a.inner()), values(expected.a.inner()));
            assert_eq!(values(found.b.inner()), values(expected.b.inner()));
        }
    }
}
