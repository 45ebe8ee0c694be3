//! AdamW, global-norm clipping, and the learning rate.
//!
//! The optimizer is that of `burn_nvfp4::optim`: it clips by the norm of all gradients, keeps its
//! state on the device of the run, updates in place, and has an f32 copy of parameters of another
//! type, since steps of a learning rate are too small for bf16. Here it becomes a file.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};
use burn_nvfp4::optim::{self, AdamWConfig, ParameterMoments};
use burn_pack::{Reader, Writer};

/// Share of the highest learning rate at which the cosine ends.
const FINAL_SHARE: f64 = 0.1;

/// Learning rate of step `step`, counted from 0, of `steps`: a linear rise over `warmup` steps,
/// then a cosine down to a tenth.
pub fn learning_rate(step: u64, steps: u64, warmup: u64, highest: f64) -> f64 {
    if step < warmup {
        return highest * (step + 1) as f64 / (warmup + 1) as f64;
    }
    let progress = (step - warmup) as f64 / (steps - warmup).max(1) as f64;
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress.min(1.0)).cos());
    highest * (FINAL_SHARE + (1.0 - FINAL_SHARE) * cosine)
}

/// The tensors of one parameter's state, by the names that a file has for them.
fn parts(state: &ParameterMoments) -> impl Iterator<Item = (&'static str, &Tensor<1>)> {
    let always = [(FIRST, &state.first), (SECOND, &state.second)];
    let weight = state.weight.iter().map(|weight| (WEIGHT, weight));
    always.into_iter().chain(weight)
}

/// Name of the first moment in a file, after the parameter's id.
const FIRST: &str = "first";
/// Name of the second moment.
const SECOND: &str = "second";
/// Name of the f32 copy of the parameter.
const WEIGHT: &str = "weight";

/// The optimizer, with its state.
pub struct AdamW(optim::AdamW);

impl AdamW {
    /// An optimizer that has taken no step. `weight_decay` applies to matrices; gradients are
    /// scaled down to the global norm `grad_clip` when theirs is larger.
    pub fn new(weight_decay: f64, grad_clip: f64) -> Self {
        let config = AdamWConfig {
            weight_decay,
            grad_clip: Some(grad_clip),
            ..AdamWConfig::default()
        };
        Self(config.init())
    }

    /// An optimizer with the same settings that has taken no step.
    pub(crate) fn fresh(&self) -> Self {
        Self(self.0.config().clone().init())
    }

    /// Steps taken so far.
    pub fn time(&self) -> u64 {
        self.0.time()
    }

    /// One step of all parameters that have a gradient. Nothing is read back from the device.
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        self.0.step(lr, model, gradients)
    }

    /// The state as a burnpack container: `ID.first` and `ID.second` for each parameter,
    /// `ID.weight` for those that are not f32 themselves, `time` in the metadata.
    ///
    /// # Errors
    /// When the container cannot be made.
    pub fn to_bytes(&self) -> Result<Bytes> {
        let mut tensors = Vec::with_capacity(2 * self.0.moments().len());
        for (id, state) in self.0.moments() {
            for (name, tensor) in parts(state) {
                let (bytes, shape, dtype) = tensor.clone().into_data().into_parts();
                let name = format!("{id:016x}.{name}");
                tensors.push(burn_pack::Tensor::new(name, dtype, shape, Some(*id), bytes));
            }
        }
        let writer = Writer::new(tensors).with_metadata("time", &self.time().to_string());
        writer.into_bytes().context("packing the optimizer's state")
    }

    /// Take over a state from [`to_bytes`](Self::to_bytes), onto `device`.
    ///
    /// # Errors
    /// When `bytes` is not such a container.
    pub fn load(&mut self, bytes: Bytes, device: &Device) -> Result<()> {
        let device = device.clone().without_autodiff();
        let reader = Reader::from_bytes(bytes)?;
        let time = reader
            .metadata()
            .get("time")
            .context("the optimizer's state has no time")?;
        let time = time
            .parse()
            .context("the optimizer's time is not a number")?;
        let mut found: BTreeMap<u64, BTreeMap<String, Tensor<1>>> = BTreeMap::new();
        for tensor in reader.into_tensors()? {
            let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
            let id = id.with_context(|| format!("{name} names no parameter"))?;
            ensure!(
                dtype == DType::F32 && shape.num_dims() == 1,
                "{name} is {dtype:?} of shape {shape}, but the optimizer's tensors are flat and f32"
            );
            let part = name.rsplit('.').next().unwrap_or_default().to_string();
            let data = TensorData::from_bytes(bytes, shape, dtype);
            let tensor = Tensor::from_data(data, &device);
            found.entry(id).or_default().insert(part, tensor);
        }
        let mut moments = BTreeMap::new();
        for (id, mut parts) in found {
            let [first, second, weight] = [FIRST, SECOND, WEIGHT].map(|name| parts.remove(name));
            let (Some(first), Some(second)) = (first, second) else {
                anyhow::bail!("parameter {id:016x} has only one of its two moments");
            };
            moments.insert(
                id,
                ParameterMoments {
                    first,
                    second,
                    weight,
                },
            );
        }
        self.0
            .restore(time, moments)
            .context("the optimizer's state")
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "flex")]
    use burn::module::Param;
    #[cfg(feature = "flex")]
    use burn::tensor::FloatDType;

    use super::*;

    const BETA_1: f64 = 0.9;
    const BETA_2: f64 = 0.95;
    const EPSILON: f64 = 1e-8;

    #[test]
    fn the_learning_rate_rises_and_falls() {
        let at = |step| learning_rate(step, 100, 10, 2.0);
        assert!((at(0) - 2.0 / 11.0).abs() < 1e-12);
        assert!((at(10) - 2.0).abs() < 1e-12);
        assert!((1..=10).all(|step| at(step) > at(step - 1)));
        assert!((11..100).all(|step| at(step) < at(step - 1)));
        assert!(at(99) > 0.2 && at(99) < 0.21);
        assert!((learning_rate(0, 1, 0, 2.0) - 2.0).abs() < 1e-12);
    }

    /// Two steps against the formulas, with a gradient that is clipped and one that is not.
    #[cfg(feature = "flex")]
    #[test]
    fn adamw_is_the_formula() {
        use burn::module::ParamId;

        #[derive(Module, Debug)]
        struct One {
            weight: Param<Tensor<2>>,
        }
        let device = Device::flex().autodiff();
        let start = [[1.0f32, -2.0], [0.5, 0.25]];
        let gradients = [[[3.0f32, -4.0], [0.0, 0.0]], [[0.1, 0.2], [0.0, -0.3]]];
        let (lr, weight_decay, clip) = (0.1, 0.5, 1.0);

        let mut model = One {
            weight: Param::initialized(
                ParamId::from(5),
                Tensor::from_data(start, &device).require_grad(),
            ),
        };
        let mut optimizer = AdamW::new(weight_decay, clip);
        let mut expected: Vec<f64> = start.concat().into_iter().map(f64::from).collect();
        let (mut first, mut second) = (vec![0.0; 4], vec![0.0; 4]);
        for (time, gradient) in (1..).zip(gradients) {
            let mut given = GradientsParams::new();
            let plain = device.clone().without_autodiff();
            given.register(ParamId::from(5), Tensor::<2>::from_data(gradient, &plain));
            model = optimizer.step(lr, model, given);
            assert!(model.weight.val().is_require_grad());

            let gradient: Vec<f64> = gradient.concat().into_iter().map(f64::from).collect();
            let norm = gradient.iter().map(|g| g * g).sum::<f64>().sqrt();
            let factor = (clip / norm).min(1.0);
            for i in 0..4 {
                let g = gradient[i] * factor;
                first[i] = BETA_1 * first[i] + (1.0 - BETA_1) * g;
                second[i] = BETA_2 * second[i] + (1.0 - BETA_2) * g * g;
                let m = first[i] / (1.0 - BETA_1.powi(time));
                let v: f64 = second[i] / (1.0 - BETA_2.powi(time));
                expected[i] -= lr * (weight_decay * expected[i] + m / (v.sqrt() + EPSILON));
            }
            let found: Vec<f32> = model.weight.val().into_data().iter::<f32>().collect();
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (f64::from(*found) - expected).abs() < 1e-5,
                    "{found} is not {expected}"
                );
            }
        }

        // Of a bf16 parameter the f32 copy takes the steps: a hundred that bf16 would round away.
        let start = Tensor::<2>::from_data([[1.0f32]], &device).cast(FloatDType::BF16);
        let mut small = One {
            weight: Param::initialized(ParamId::from(6), start.detach().require_grad()),
        };
        let mut steps = AdamW::new(0.0, 1.0);
        for _ in 0..100 {
            let mut given = GradientsParams::new();
            let plain = device.clone().without_autodiff();
            let gradient = Tensor::<2>::from_data([[0.5f32]], &plain);
            given.register(ParamId::from(6), gradient.cast(FloatDType::BF16));
            small = steps.step(1e-4, small, given);
        }
        let found = small.weight.val();
        assert_eq!(found.dtype(), DType::BF16);
        let found: f32 = found.into_scalar();
        assert!((found - 0.99).abs() < 0.004, "{found}, not 1 - 100 * 1e-4");

        let bytes = optimizer.to_bytes().unwrap().to_vec();
        let mut reloaded = AdamW::new(weight_decay, clip);
        reloaded
            .load(Bytes::from_bytes_vec(bytes.clone()), &device)
            .unwrap();
        assert_eq!(reloaded.time(), 2);
        assert_eq!(reloaded.to_bytes().unwrap().to_vec(), bytes);
        let mut with_copies = AdamW::new(0.0, 1.0);
        let copies = steps.to_bytes().unwrap().to_vec();
        with_copies
            .load(Bytes::from_bytes_vec(copies.clone()), &device)
            .unwrap();
        assert_eq!(with_copies.to_bytes().unwrap().to_vec(), copies);
        let broken = Bytes::from_bytes_vec(bytes[..20].to_vec());
        assert!(reloaded.load(broken, &device).is_err());
    }
}
