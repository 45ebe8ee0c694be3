//! Data-parallel training on two GPUs: a thread and a fork of the model for each device, gradients averaged
//! by [`DataParallel`]. (With burn-train: train_tests/tests/ddp.rs.)
//!
//! Skips itself, and says so, unless `NVFP4_TEST_DEVICE=cuda` and there are two CUDA devices. Run it
//! with `--nocapture` to see the losses, step by step.
#![cfg(feature = "cuda")]

use burn_core as burn;

use std::thread;

use burn_core::module::Module;
use burn_core::tensor::{
    DType, Device, DeviceType, FloatDType, Tensor, TensorData, activation::gelu,
};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{
    DataParallel, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4State, RngState, decorate,
};
use burn_optim::AdamWConfig;

#[path = "shared/skip.rs"]
mod skip;

use skip::skip;

const WIDTH: usize = 128;
/// Rows of the global batch; each of two devices takes half.
const ROWS: usize = 256;
const STEPS: usize = 20;

#[derive(Module, Debug)]
struct Net {
    up: Nvfp4Linear,
    down: Nvfp4Linear,
}

#[derive(Module, Debug)]
struct Plain {
    up: Linear,
    down: Linear,
}

trait Model: Module + 'static {
    fn run(&self, x: Tensor<2>) -> Tensor<2>;
}

impl Model for Net {
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

impl Model for Plain {
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(gelu(self.up.forward(x)))
    }
}

/// The first two CUDA devices, or why there are none.
fn devices() -> Result<[Device; 2], String> {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        return Err("NVFP4_TEST_DEVICE is not cuda".into());
    }
    decorate::install().unwrap();
    let count = Device::enumerate(DeviceType::Cuda).len();
    if count < 2 {
        return Err(format!("{count} CUDA devices, two are needed"));
    }
    Ok([Device::cuda(0), Device::cuda(1)])
}

/// `rows` rows of noise; the same for the same seed.
fn noise(rows: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..rows * WIDTH)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
        })
        .collect()
}

/// Rows `part` of `parts` of the global batch of `step`, in `bf16`, and what to learn: a shift.
fn batch(step: usize, part: usize, parts: usize, device: &Device) -> (Tensor<2>, Tensor<2>) {
    let rows = ROWS / parts;
    let values = noise(ROWS, step as u64 + 1)[part * rows * WIDTH..][..rows * WIDTH].to_vec();
    let x = Tensor::<2>::from_data(TensorData::new(values, [rows, WIDTH]), (device, DType::F32));
    let target = x.clone().roll(&[1], &[1]);
    (x, target)
}

fn loss<M: Model>(model: &M, step: usize, part: usize, parts: usize, device: &Device) -> Tensor<1> {
    let (x, target) = batch(step, part, parts, device);
    (model.run(x) - target).powi_scalar(2).mean()
}

/// The losses of one worker.
fn work<M: Model>(model: M, part: usize, ranks: &DataParallel) -> (Vec<f32>, M) {
    let device = ranks.devices()[part].clone().autodiff();
    let parts = ranks.devices().len();
    let mut model = model.fork(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (grads, loss) = ranks.step(&model, |model| {
            let loss = loss(model, step, part, parts, &device);
            (loss.clone(), loss.inner())
        });
        losses.push(loss.into_scalar::<f32>());
        model = optimizer.step(3e-3, model, grads);
    }
    (losses, model)
}

/// Train on one device, and on two with the same global batch. Returns both runs' losses, and
/// what the two workers' weights are.
fn compare<M: Model>(what: &str, model: M, devices: &[Device; 2]) -> (Vec<f32>, Vec<f32>, [M; 2]) {
    let state = Nvfp4State::collect(&model);
    let (single, _) = work(model.clone(), 0, &DataParallel::new(&devices[..1]).unwrap());
    state.apply(&model).unwrap();
    let ranks = DataParallel::new(devices).unwrap();
    let workers = [0, 1].map(|part| {
        let (model, ranks) = (model.clone(), ranks.clone());
        thread::spawn(move || work(model, part, &ranks))
    });
    let [(one, first), (two, second)] = workers.map(|worker| worker.join().unwrap());
    let double: Vec<f32> = one
        .iter()
        .zip(&two)
        .map(|(one, two)| (one + two) / 2.0)
        .collect();
    eprintln!("{what}\nstep  one GPU   two GPUs  difference");
    for (step, (one, two)) in single.iter().zip(&double).enumerate() {
        eprintln!("{step:4}  {one:.6}  {two:.6}  {:+.2e}", (two - one) / one);
    }
    (single, double, [first, second])
}

fn assert_close(single: &[f32], double: &[f32], tolerance: f32) {
    for (step, (one, two)) in single.iter().zip(double).enumerate() {
        assert!(
            (one - two).abs() <= tolerance * one,
            "step {step}: {one} on one GPU, {two} on two"
        );
    }
    let last = STEPS - 1;
    assert!(
        single[last] < 0.8 * single[0] && double[last] < 0.8 * double[0],
        "it learns"
    );
}

fn values(tensor: Tensor<2>) -> Vec<f32> {
    tensor
        .cast(FloatDType::F32)
        .try_into_vec_as::<f32>()
        .unwrap()
}

fn net(recipe: &Nvfp4Recipe, device: &Device) -> Net {
    device.seed(1);
    let layer = || {
        Nvfp4LinearConfig::new(WIDTH, WIDTH)
            .with_recipe(recipe.clone())
            .init(device)
    };
    let net = Net {
        up: layer(),
        down: layer(),
    };
    assign_layer_ids(&net);
    net
}

/// All in one test: NCCL has one communicator for each device and process.
#[test]
fn two_devices_train_as_one() {
    let devices = match devices() {
        Ok(devices) => devices,
        Err(reason) => skip!("{reason}"),
    };
    let device = devices[0].clone().autodiff();

    // Workers draw different bits, with the same transform.
    for stochastic in [false, true] {
        let recipe = Nvfp4Recipe::new().with_stochastic_rounding(stochastic);
        let layer = net(&recipe, &device).up;
        let [one, two] = devices.clone().map(|device| {
            let device = device.autodiff();
            let layer = layer.clone().fork(&device);
            let (x, target) = batch(0, 0, 1, &device);
            let grads = (layer.forward(x) * target).sum().backward();
            values(layer.weight.grad(&grads).unwrap())
        });
        assert_eq!(one != two, stochastic, "stochastic rounding {stochastic}");
    }

    // Rounded to nearest, what is left is that each half has its own maximum, and the order of sums.
    let nearest = Nvfp4Recipe::new().with_stochastic_rounding(false);
    let (single, double, _) = compare("round to nearest", net(&nearest, &device), &devices);
    assert_close(&single, &double, 0.02);

    let model = net(&Nvfp4Recipe::new(), &device);
    let (single, double, [first, second]) = compare("default recipe", model, &devices);
    assert_close(&single, &double, 0.03);
    for (one, two) in [(&first.up, &second.up), (&first.down, &second.down)] {
        let (one, two) = (
            values(one.weight.val().inner()),
            values(two.weight.val().inner()),
        );
        assert_eq!(one, two, "both workers hold the same weights");
    }
    let state = Nvfp4State::collect(&first);
    assert_eq!(
        state,
        Nvfp4State::collect(&second),
        "and the same count of forwards"
    );
    let RngState { offset, .. } = state.layers["up"];
    assert_eq!(offset, STEPS as u64);

    device.seed(1);
    let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
    let plain = Plain {
        up: linear(),
        down: linear(),
    };
    let model = decorate(plain, &Nvfp4Recipe::new()).unwrap();
    assign_layer_ids(&model);
    let (single, double, workers) = compare("decorated", model, &devices);
    assert_close(&single, &double, 0.03);
    for worker in workers {
        let report = decorate::report(&worker).unwrap();
        eprintln!("{report}");
        report.check().unwrap();
    }
}
