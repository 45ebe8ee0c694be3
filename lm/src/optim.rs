//! Optimizers of a run, and the learning-rate schedule.
//!
//! The optimizers come from `burn_nvfp4::optim`. They clip by the global gradient norm, keep their
//! state on the device of the run, and hold an f32 copy of each parameter of another type, because
//! typical updates are too small for bf16. This module serializes them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Bytes, DType, Device, FloatDType, Tensor, TensorData};
use burn_nvfp4::optim::{
    AdamW, AdamWConfig, Muon, MuonConfig, MuonState, NewtonSchulz, ParameterMoments, ZeroAdamW,
};
use burn_nvfp4::parallel::{ExpertGroups, Shards, SplitParameters};
use burn_pack::{Reader, Writer};

use crate::config::{OptimizerName, RunConfig};

/// Suffix of the first moment in a file, after the parameter's ID.
const FIRST: &str = "first";
/// Suffix of the second moment.
const SECOND: &str = "second";
/// Suffix of Muon's momentum.
const MOMENTUM: &str = "momentum";
/// Suffix of the f32 copy of the parameter.
const WEIGHT: &str = "weight";
/// Metadata key of AdamW's step count.
const TIME: &str = "time";
/// Metadata key of Muon's step count.
const MUON_TIME: &str = "muon_time";

/// Tensors of one parameter's state, by their names in a file.
type Parts = BTreeMap<String, Tensor<1>>;

/// Optimizer with its state.
#[derive(Debug, Clone)]
pub enum Optimizer {
    /// AdamW for all parameters.
    AdamW(Box<AdamW>),
    /// Muon for the matrices of the blocks, AdamW for all others.
    Muon(Box<Muon>),
    /// AdamW whose state is sharded over the ranks.
    Zero(Box<ZeroAdamW>),
}

impl Optimizer {
    /// Creates the optimizer that `config` names, before its first step.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn new(config: &RunConfig) -> Result<Self> {
        let (decay, clip) = (config.weight_decay, config.grad_clip);
        match config.optimizer {
            OptimizerName::AdamW => {
                let adamw = AdamWConfig {
                    // Quantization of the weights needs the amax.
                    amax: config.is_quantized(&config.recipe)?,
                    ..adamw_config(decay, clip)
                };
                Ok(Self::AdamW(Box::new(adamw.try_init()?)))
            }
            OptimizerName::Muon => Self::muon(decay, clip, config.activation.into()),
        }
    }

    /// Creates AdamW before its first step. `weight_decay` applies to matrices. Gradients whose
    /// global norm exceeds `grad_clip` are scaled down to it.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn adamw(weight_decay: f64, grad_clip: f64) -> Result<Self> {
        let config = adamw_config(weight_decay, grad_clip);
        Ok(Self::AdamW(Box::new(config.try_init()?)))
    }

    /// Creates Muon before its first step, with AdamW's learning rate and decay. Its matrix
    /// multiplications have type `precision`. Clipping applies to the parameters that AdamW
    /// updates.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn muon(weight_decay: f64, grad_clip: f64, precision: FloatDType) -> Result<Self> {
        let config = MuonConfig {
            weight_decay,
            newton_schulz: NewtonSchulz {
                precision,
                ..NewtonSchulz::default()
            },
            adamw: adamw_config(weight_decay, grad_clip),
            ..MuonConfig::default()
        };
        Ok(Self::Muon(Box::new(config.try_init()?)))
    }

    /// Creates an optimizer with the same settings, before its first step.
    pub(crate) fn fresh(&self) -> Self {
        match self {
            Self::AdamW(adamw) => Self::AdamW(Box::new(adamw.config().clone().init())),
            Self::Zero(zero) => Self::AdamW(Box::new(zero.adamw().config().clone().init())),
            Self::Muon(muon) => Self::Muon(Box::new(muon.config().clone().init())),
        }
    }

    /// Creates an optimizer with the same settings, before its first step, whose state is sharded
    /// over the ranks of `groups`. `splits` lists the parameters of the model that are already
    /// split.
    ///
    /// # Errors
    /// Returns an error if the optimizer is not AdamW.
    pub(crate) fn sharded(
        &self,
        groups: ExpertGroups<'_>,
        splits: Vec<SplitParameters>,
    ) -> Result<Self> {
        match self.fresh() {
            Self::AdamW(adamw) => {
                let config = AdamWConfig {
                    // The amax of a shard is not the amax of the parameter.
                    amax: false,
                    ..adamw.config().clone()
                };
                let zero = ZeroAdamW::try_new(config, groups.batch)?;
                let zero = zero.with_experts(groups.experts, groups.data);
                let zero = zero.with_loss(groups.loss);
                Ok(Self::Zero(Box::new(zero.with_splits(splits))))
            }
            _ => bail!("optimizer is muon, but state is sharded of adamw alone"),
        }
    }

    /// Declares the parameters in `shards` to be shards.
    ///
    /// # Errors
    /// Returns an error if the optimizer is not AdamW.
    pub(crate) fn set_shards(&mut self, shards: Vec<Shards>) -> Result<()> {
        match self {
            Self::AdamW(adamw) => adamw.set_shards(shards),
            _ => bail!("optimizer is not adamw, but it must be for sharded parameters"),
        }
        Ok(())
    }

    /// Returns the number of steps taken.
    pub fn time(&self) -> u64 {
        match self {
            Self::AdamW(adamw) => adamw.time(),
            Self::Muon(muon) => muon.time(),
            Self::Zero(zero) => zero.adamw().time(),
        }
    }

    /// Updates all parameters that have a gradient. Does not synchronize with the device.
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        match self {
            Self::AdamW(adamw) => adamw.step(lr, model, gradients),
            Self::Muon(muon) => muon.step(lr, model, gradients),
            Self::Zero(zero) => zero.step(lr, model, gradients),
        }
    }

    /// Runs the part of a step with learning rate `lr` that cannot be captured in a graph; see
    /// [`AdamW::begin_step`].
    ///
    /// # Errors
    /// Returns an error if the learning rate is negative or not finite, or if the optimizer is not
    /// plain AdamW. Muon's kernels take the learning rate as an argument, and sharded state moves
    /// the weights.
    pub(crate) fn begin_step(&mut self, lr: f64, device: &Device) -> Result<()> {
        match self {
            Self::AdamW(adamw) => Ok(adamw.begin_step(lr, device)?),
            Self::Muon(_) => bail!("optimizer is muon, but a step of a graph has adamw"),
            Self::Zero(_) => bail!("zero1 is true, but the weights of a graph stay where they are"),
        }
    }

    /// Runs the step that [`begin_step`](Self::begin_step) began.
    ///
    /// # Panics
    /// If no step was begun.
    pub(crate) fn step_begun<M: Module>(&mut self, model: M, gradients: GradientsParams) -> M {
        let made = match self {
            Self::AdamW(adamw) => adamw.try_step_begun(model, gradients),
            Self::Muon(_) | Self::Zero(_) => unreachable!("`begin_step` fails"),
        };
        made.unwrap_or_else(|error| panic!("nvfp4 AdamW: {error}"))
    }

    /// Returns the tensors that the file stores for each parameter.
    fn parts(&self) -> Vec<(u64, &'static str, &Tensor<1>)> {
        let (moments, momenta) = match self {
            Self::AdamW(adamw) => (adamw.moments(), None),
            Self::Zero(zero) => (zero.adamw().moments(), None),
            Self::Muon(muon) => (muon.adamw().moments(), Some(muon.states())),
        };
        let mut parts = Vec::with_capacity(2 * moments.len());
        for (id, state) in moments {
            parts.push((*id, FIRST, &state.first));
            parts.push((*id, SECOND, &state.second));
            parts.extend(state.weight.iter().map(|weight| (*id, WEIGHT, weight)));
        }
        for (id, state) in momenta.into_iter().flatten() {
            parts.push((*id, MOMENTUM, &state.momentum));
            parts.extend(state.weight.iter().map(|weight| (*id, WEIGHT, weight)));
        }
        parts
    }

    /// Serializes the state as a burnpack container: `ID.first` and `ID.second` for each parameter
    /// of AdamW, `ID.momentum` for each of Muon, and `ID.weight` for parameters that are not f32.
    /// The metadata has `time`, and `muon_time` for Muon.
    ///
    /// # Errors
    /// Returns an error if the container cannot be made.
    pub fn to_bytes(&self) -> Result<Bytes> {
        let tensors = self.parts().into_iter().map(|(id, name, tensor)| {
            let (bytes, shape, dtype) = tensor.clone().into_data().into_parts();
            burn_pack::Tensor::new(format!("{id:016x}.{name}"), dtype, shape, Some(id), bytes)
        });
        let writer = Writer::new(tensors.collect());
        let writer = match self {
            Self::AdamW(_) | Self::Zero(_) => writer.with_metadata(TIME, &self.time().to_string()),
            Self::Muon(muon) => writer
                .with_metadata(TIME, &muon.adamw().time().to_string())
                .with_metadata(MUON_TIME, &muon.time().to_string()),
        };
        writer.into_bytes().context("packing the optimizer's state")
    }

    /// Loads a state from [`to_bytes`](Self::to_bytes) onto `device`.
    ///
    /// # Errors
    /// Returns an error if `bytes` is not such a container, or holds the state of another
    /// optimizer.
    pub fn load(&mut self, bytes: Bytes, device: &Device) -> Result<()> {
        let device = device.clone().without_autodiff();
        let reader = Reader::from_bytes(bytes)?;
        let number = |key: &str| -> Result<u64> {
            let text = reader.metadata().get(key);
            let text = text.with_context(|| format!("the optimizer's state has no {key}"))?;
            text.parse()
                .with_context(|| format!("the optimizer's {key} is not a number"))
        };
        let time = number(TIME)?;
        let muon_time = match self {
            Self::AdamW(_) | Self::Zero(_) => None,
            Self::Muon(_) => Some(number(MUON_TIME).context("the state is not Muon's")?),
        };
        let mut found: BTreeMap<u64, Parts> = BTreeMap::new();
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
        let mut momenta = BTreeMap::new();
        for (id, mut parts) in found {
            let weight = parts.remove(WEIGHT);
            if let Some(momentum) = parts.remove(MOMENTUM) {
                ensure!(
                    muon_time.is_some(),
                    "parameter {id:016x} has Muon's momentum, but the optimizer is AdamW"
                );
                momenta.insert(id, MuonState { momentum, weight });
                continue;
            }
            let (Some(first), Some(second)) = (parts.remove(FIRST), parts.remove(SECOND)) else {
                bail!("parameter {id:016x} has only one of its two moments");
            };
            let state = ParameterMoments {
                first,
                second,
                weight,
            };
            moments.insert(id, state);
        }
        match self {
            Self::AdamW(adamw) => adamw.restore(time, moments),
            Self::Zero(zero) => zero.adamw_mut().restore(time, moments),
            Self::Muon(muon) => {
                muon.restore((muon_time.unwrap_or_default(), time), momenta, moments)
            }
        }
        .context("the optimizer's state")
    }
}

fn adamw_config(weight_decay: f64, grad_clip: f64) -> AdamWConfig {
    AdamWConfig {
        weight_decay,
        grad_clip: Some(grad_clip),
        ..AdamWConfig::default()
    }
}

#[cfg(test)]
mod tests {
    #[cfg(feature = "flex")]
    use burn::module::Param;

    use super::*;

    const BETA_1: f64 = 0.9;
    const BETA_2: f64 = 0.95;
    const EPSILON: f64 = 1e-8;

    /// Checks two steps against the formulas, one with a clipped gradient and one without.
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
        let mut optimizer = Optimizer::adamw(weight_decay, clip).unwrap();
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

        // Updates of a bf16 parameter go to the f32 copy: bf16 would round each of a hundred steps
        // away.
        let start = Tensor::<2>::from_data([[1.0f32]], &device).cast(FloatDType::BF16);
        let mut small = One {
            weight: Param::initialized(ParamId::from(6), start.detach().require_grad()),
        };
        let mut steps = Optimizer::adamw(0.0, 1.0).unwrap();
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
        let mut reloaded = Optimizer::adamw(weight_decay, clip).unwrap();
        reloaded
            .load(Bytes::from_bytes_vec(bytes.clone()), &device)
            .unwrap();
        assert_eq!(reloaded.time(), 2);
        assert_eq!(reloaded.to_bytes().unwrap().to_vec(), bytes);
        let mut with_copies = Optimizer::adamw(0.0, 1.0).unwrap();
        let copies = steps.to_bytes().unwrap().to_vec();
        with_copies
            .load(Bytes::from_bytes_vec(copies.clone()), &device)
            .unwrap();
        assert_eq!(with_copies.to_bytes().unwrap().to_vec(), copies);
        let broken = Bytes::from_bytes_vec(bytes[..20].to_vec());
        assert!(reloaded.load(broken, &device).is_err());
    }

    /// Muon's state survives serialization bit by bit; AdamW rejects a file of Muon.
    #[cfg(feature = "flex")]
    #[test]
    fn muon_is_kept_in_a_file() {
        use burn::module::ParamId;

        #[derive(Module, Debug)]
        struct Two {
            matrix: Param<Tensor<2>>,
            gain: Param<Tensor<1>>,
        }
        let device = Device::flex().autodiff();
        let plain = Device::flex();
        let start = Tensor::<2>::from_data([[1.0f32, 2.0], [3.0, 5.0]], &device);
        let gain = Tensor::<1>::from_data([1.0f32, 1.0], &device);
        let model = Two {
            matrix: Param::initialized(ParamId::from(1), start.require_grad()),
            gain: Param::initialized(ParamId::from(2), gain.require_grad()),
        };
        let step = |optimizer: &mut Optimizer, model: Two| {
            let mut given = GradientsParams::new();
            let gradient = Tensor::<2>::from_data([[0.5f32, -1.0], [2.0, 0.25]], &plain);
            given.register(ParamId::from(1), gradient);
            given.register(ParamId::from(2), Tensor::<1>::ones([2], &plain));
            optimizer.step(0.1, model, given)
        };
        let mut optimizer = Optimizer::muon(0.1, 1.0, FloatDType::F32).unwrap();
        let model = step(&mut optimizer, model);
        let bytes = optimizer.to_bytes().unwrap().to_vec();
        let mut loaded = optimizer.fresh();
        let given = || Bytes::from_bytes_vec(bytes.clone());
        loaded.load(given(), &device).unwrap();
        assert_eq!(loaded.time(), 1);
        assert_eq!(loaded.to_bytes().unwrap().to_vec(), bytes);
        let through = step(&mut optimizer, model.clone());
        let resumed = step(&mut loaded, model);
        let bits = |model: &Two| model.matrix.val().into_data();
        assert_eq!(bits(&through), bits(&resumed));

        let mut other = Optimizer::adamw(0.1, 1.0).unwrap();
        let error = other.load(given(), &device).unwrap_err();
        assert!(error.to_string().contains("AdamW"), "{error}");
        let empty = other.to_bytes().unwrap().to_vec();
        let error = loaded.load(Bytes::from_bytes_vec(empty), &device);
        assert!(format!("{:#}", error.unwrap_err()).contains("Muon"));
    }
}
