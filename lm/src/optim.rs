//! AdamW, global-norm clipping, and the learning rate.
//!
//! Burn's own optimizer clips each parameter by itself, reloads its state on the default device,
//! which need not be the one of the run, and updates parameters in their own type; this one does
//! none of these. Moments are f32, and parameters of another type have an f32 copy that is updated
//! in their place: steps of a learning rate are too small for bf16.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, FloatDType, Tensor, TensorData};
use burn_pack::{Reader, Writer};

use crate::model::{cast, sum};

/// Decay of the first moment.
const BETA_1: f64 = 0.9;
/// Decay of the second moment.
const BETA_2: f64 = 0.95;
/// Added to the root of the second moment.
const EPSILON: f64 = 1e-8;
/// Added to the gradients' norm, which may be zero.
const NORM_EPSILON: f64 = 1e-6;
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

/// The state of one parameter, flat, in f32.
struct AdamWState {
    /// Running mean of the gradient.
    first: Tensor<1>,
    /// Running mean of its square.
    second: Tensor<1>,
    /// The parameter, if it is not f32 itself.
    weight: Option<Tensor<1>>,
}

impl AdamWState {
    /// The tensors, by the names that a file has for them.
    fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor<1>)> {
        let always = [(FIRST, &self.first), (SECOND, &self.second)];
        always
            .into_iter()
            .chain(self.weight.iter().map(|weight| (WEIGHT, weight)))
    }
}

/// Name of the first moment in a file, after the parameter's id.
const FIRST: &str = "first";
/// Name of the second moment.
const SECOND: &str = "second";
/// Name of the f32 copy of the parameter.
const WEIGHT: &str = "weight";

/// `x` flat and in f32.
fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let elements = x.dims().iter().product::<usize>();
    cast(x.reshape([elements]), FloatDType::F32)
}

/// The optimizer, with its state.
pub struct AdamW {
    weight_decay: f64,
    grad_clip: f64,
    /// Steps taken.
    time: u64,
    /// By parameter id. A map that is ordered, so that files repeat.
    states: BTreeMap<u64, AdamWState>,
}

impl AdamW {
    /// An optimizer that has taken no step. `weight_decay` applies to matrices; gradients are
    /// scaled down to the global norm `grad_clip` when theirs is larger.
    pub fn new(weight_decay: f64, grad_clip: f64) -> Self {
        Self {
            weight_decay,
            grad_clip,
            time: 0,
            states: BTreeMap::new(),
        }
    }

    /// An optimizer with the same settings that has taken no step.
    pub(crate) fn fresh(&self) -> Self {
        Self::new(self.weight_decay, self.grad_clip)
    }

    /// Steps taken so far.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// One step of all parameters that have a gradient. Nothing is read back from the device.
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        let mut norm = SquaredNorm {
            gradients: &gradients,
            sum: None,
        };
        model.visit(&mut norm);
        let Some(sum) = norm.sum else { return model };
        let factor = sum
            .sqrt()
            .add_scalar(NORM_EPSILON)
            .recip()
            .mul_scalar(self.grad_clip);
        let factor = factor.clamp_max(1.0);
        self.time += 1;
        model.map(&mut Update {
            optimizer: self,
            lr,
            gradients,
            factor,
        })
    }

    /// The state as a burnpack container: `ID.first` and `ID.second` for each parameter,
    /// `ID.weight` for those that are not f32 themselves, `time` in the metadata.
    ///
    /// # Errors
    /// When the container cannot be made.
    pub fn to_bytes(&self) -> Result<Bytes> {
        let mut tensors = Vec::with_capacity(2 * self.states.len());
        for (id, state) in &self.states {
            for (name, tensor) in state.tensors() {
                let (bytes, shape, dtype) = tensor.clone().into_data().into_parts();
                let name = format!("{id:016x}.{name}");
                tensors.push(burn_pack::Tensor::new(name, dtype, shape, Some(*id), bytes));
            }
        }
        let writer = Writer::new(tensors).with_metadata("time", &self.time.to_string());
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
        let mut states = BTreeMap::new();
        for (id, mut parts) in found {
            let [first, second, weight] = [FIRST, SECOND, WEIGHT].map(|name| parts.remove(name));
            let (Some(first), Some(second)) = (first, second) else {
                anyhow::bail!("parameter {id:016x} has only one of its two moments");
            };
            states.insert(
                id,
                AdamWState {
                    first,
                    second,
                    weight,
                },
            );
        }
        self.time = time;
        self.states = states;
        Ok(())
    }
}

/// Sums the squares of all gradients.
struct SquaredNorm<'a> {
    gradients: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl ModuleVisitor for SquaredNorm<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.get::<D>(param.id) {
            let square = sum(cast(gradient, FloatDType::F32).square());
            self.sum = Some(match self.sum.take() {
                Some(sum) => sum + square,
                None => square,
            });
        }
    }
}

struct Update<'a> {
    optimizer: &'a mut AdamW,
    lr: f64,
    gradients: GradientsParams,
    /// What gradients are scaled by, `[1]`.
    factor: Tensor<1>,
}

impl ModuleMapper for Update<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            return param;
        };
        let (id, weight, mapper) = param.consume();
        let dims = weight.dims();
        let tracked = weight.is_require_grad();
        let weight = weight.without_autodiff();
        let dtype = weight.dtype();

        let gradient = flat(gradient) * self.factor.clone();
        let optimizer = &mut *self.optimizer;
        let first = gradient.clone().mul_scalar(1.0 - BETA_1);
        let second = gradient.square().mul_scalar(1.0 - BETA_2);
        let (first, second, own) = match optimizer.states.remove(&id.val()) {
            Some(old) => (
                old.first.mul_scalar(BETA_1) + first,
                old.second.mul_scalar(BETA_2) + second,
                old.weight,
            ),
            None => (first, second, None),
        };
        let time = optimizer.time as f64;
        let direction = first.clone().div_scalar(1.0 - BETA_1.powf(time))
            / second
                .clone()
                .div_scalar(1.0 - BETA_2.powf(time))
                .sqrt()
                .add_scalar(EPSILON);

        // Norm gains are not decayed: they have a scale of their own.
        let decay = if D > 1 {
            self.lr * optimizer.weight_decay
        } else {
            0.0
        };
        let weight = own.unwrap_or_else(|| flat(weight)).mul_scalar(1.0 - decay)
            - direction.mul_scalar(self.lr);
        let own = (dtype != DType::F32).then(|| weight.clone());
        optimizer.states.insert(
            id.val(),
            AdamWState {
                first,
                second,
                weight: own,
            },
        );
        let weight: Tensor<D> = cast(weight, dtype.into()).reshape(dims);
        let weight = if tracked {
            weight.autodiff().require_grad()
        } else {
            weight
        };
        Param::from_mapped_value(id, weight, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
