//! The optimizer of a module.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};

use burn_core::backend::{Dispatch, DispatchTensor, tensor::FloatTensor};
use burn_core::module::{Module, ModuleMapper, Param, ParamGroup, ParamId, ParamMapper};
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_optim::GradientsParams;
use nvfp4_kernels::reference::{AdamWParams, AdamWSchedule};
use nvfp4_kernels::{Nvfp4Error, RandomStream};

use crate::ops::MaybeTensor;
use crate::ops::optimizer::{
    AdamWBatch, AdamWOptions, BATCH, GradientBatch, OptimizerOps, ParameterState,
};
use crate::validate;

/// Tells the random bits of moments from those of layers with the same seed.
const SEED: u64 = 0x41_6461_6d57;

/// How moments are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MomentType {
    /// In `f32`.
    #[default]
    F32,
    /// In `bf16`, rounded stochastically: half the memory. The bits depend on the seed, the
    /// parameter's id, the step and the element alone.
    Bf16,
}

impl MomentType {
    const fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}

/// Settings of [`AdamW`].
#[derive(Debug, Clone)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// The decay of parameters of two axes or more, which is multiplied by the learning rate.
    /// Vectors are not decayed: gains have a scale of their own.
    pub weight_decay: f64,
    /// Decays of groups of parameters; the last group that matches counts, before
    /// [`weight_decay`](Self::weight_decay).
    pub groups: Vec<(ParamGroup, f64)>,
    /// The global norm that gradients are scaled down to when theirs is larger.
    pub grad_clip: Option<f64>,
    /// How moments are stored.
    pub moments: MomentType,
    /// Seed of the random bits that round moments.
    pub seed: u64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            groups: Vec::new(),
            grad_clip: Some(1.0),
            moments: MomentType::F32,
            seed: 0,
        }
    }
}

impl AdamWConfig {
    /// An optimizer that has taken no step.
    pub fn init(self) -> AdamW {
        AdamW {
            config: self,
            time: 0,
            moments: BTreeMap::new(),
        }
    }

    fn params(&self) -> AdamWParams {
        AdamWParams {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
        }
    }

    fn decay(&self, id: ParamId, path: &str, axes: usize) -> f64 {
        let group = self.groups.iter().rev();
        match group
            .into_iter()
            .find(|(group, _)| group.matches(&id, Some(path)))
        {
            Some((_, decay)) => *decay,
            None if axes > 1 => self.weight_decay,
            None => 0.0,
        }
    }
}

/// What AdamW keeps of one parameter, flat.
#[derive(Debug, Clone)]
pub struct ParameterMoments {
    /// Running mean of the gradient.
    pub first: Tensor<1>,
    /// Running mean of its square.
    pub second: Tensor<1>,
    /// The parameter in `f32`, if it is not `f32` itself.
    pub weight: Option<Tensor<1>>,
}

/// AdamW with decoupled decay, and with its state.
#[derive(Debug, Clone)]
pub struct AdamW {
    config: AdamWConfig,
    time: u64,
    moments: BTreeMap<u64, ParameterMoments>,
}

impl AdamW {
    /// The settings.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Steps taken so far.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// The state of each parameter by its id, in ascending order.
    pub fn moments(&self) -> &BTreeMap<u64, ParameterMoments> {
        &self.moments
    }

    /// Goes on from this state, taken after `time` steps.
    ///
    /// # Errors
    /// When the moments of a parameter have another type than the configuration says, or its
    /// tensors have different lengths.
    pub fn restore(
        &mut self,
        time: u64,
        moments: BTreeMap<u64, ParameterMoments>,
    ) -> Result<(), Nvfp4Error> {
        let expected = DType::from(self.config.moments.dtype());
        for state in moments.values() {
            let parts = [("first", &state.first), ("second", &state.second)];
            for (name, tensor) in parts {
                validate::shape(name, tensor.dims(), state.first.dims(), || {
                    "that of the first moment".into()
                })?;
                if tensor.dtype() != expected {
                    return Err(Nvfp4Error::DType {
                        argument: name,
                        found: format!("{:?}", tensor.dtype()),
                        expected: format!("{expected:?}, as configured"),
                    });
                }
            }
            if let Some(weight) = &state.weight {
                validate::shape("weight", weight.dims(), state.first.dims(), || {
                    "that of the first moment".into()
                })?;
            }
        }
        self.time = time;
        self.moments = moments;
        Ok(())
    }

    /// One step of all parameters that have a gradient, with learning rate `lr`.
    ///
    /// # Errors
    /// When a parameter or a gradient is on a device or of a type that has no implementation, or
    /// a parameter does not fit its gradient or its state. No parameter has changed then, but
    /// `model` is gone.
    pub fn try_step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        let mut check = Check {
            moments: &self.moments,
            gradients: &gradients,
            failure: None,
        };
        model.visit(&mut check);
        if let Some(error) = check.failure {
            return Err(error);
        }
        let mut take = Take {
            optimizer: self,
            gradients,
            path: Vec::new(),
            taken: VecDeque::new(),
            device: None,
        };
        let model = model.map(&mut take);
        let Take {
            mut taken, device, ..
        } = take;
        if let Some(device) = device {
            self.time += 1;
            self.update(lr, &device, &mut taken);
        }
        Ok(model.map(&mut Give {
            optimizer: self,
            taken,
        }))
    }

    /// [`try_step`](Self::try_step) that panics with its error.
    ///
    /// # Panics
    /// As there.
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        crate::functions::or_panic("AdamW", self.try_step(lr, model, gradients))
    }

    /// The step of what was taken from the model.
    fn update(&self, lr: f64, device: &Device, taken: &mut VecDeque<Option<Taken>>) {
        let params = self.config.params();
        let words = AdamWSchedule::new(&params, lr, self.time).words();
        let data = TensorData::new(words.to_vec(), [words.len()]);
        let schedule = Tensor::<1, Int>::from_data(data, (device, DType::U32));
        let factor = self.config.grad_clip.map(|norm| factor(norm, taken));
        let options = AdamWOptions {
            params,
            amax: false,
        };
        let mut present: Vec<&mut Taken> = taken.iter_mut().flatten().collect();
        for batch in present.chunks_mut(BATCH) {
            let gradients = batch.iter_mut().filter_map(|taken| taken.gradient.take());
            let gradients = GradientBatch::<Dispatch>::new(gradients.collect::<Vec<_>>());
            let states = batch.iter_mut().filter_map(|taken| taken.state.take());
            let states = AdamWBatch::new(states.collect::<Vec<_>>(), None);
            let (states, _) = Dispatch::nvfp4_adamw(
                gradients,
                states,
                schedule.clone().into_dispatch(),
                factor.clone().into(),
                options,
            )
            .into_parts();
            for (taken, state) in batch.iter_mut().zip(states) {
                taken.state = Some(state);
            }
        }
    }
}

/// The norm of all gradients and what scales them down to `max_norm`.
fn factor(max_norm: f64, taken: &VecDeque<Option<Taken>>) -> FloatTensor<Dispatch> {
    let gradients: Vec<DispatchTensor> = taken
        .iter()
        .flatten()
        .filter_map(|taken| taken.gradient.clone())
        .collect();
    let sums = gradients.chunks(BATCH).map(|batch| {
        let batch = GradientBatch::<Dispatch>::new(batch.iter().cloned());
        Tensor::<1>::from_dispatch(Dispatch::nvfp4_square_sums(batch))
    });
    let sums: Vec<_> = sums.collect();
    let sums = match <[_; 1]>::try_from(sums) {
        Ok([sums]) => sums,
        Err(sums) => Tensor::cat(sums, 0),
    };
    Dispatch::nvfp4_clip_factor(sums.into_dispatch(), max_norm as f32)
}

/// A parameter on its way through the step.
struct Taken {
    id: ParamId,
    gradient: Option<FloatTensor<Dispatch>>,
    state: Option<ParameterState<Dispatch>>,
    tracked: bool,
    /// A `ParamMapper<Tensor<D>>`.
    mapper: Box<dyn Any>,
}

/// Looks for what would fail, before anything is taken.
struct Check<'a> {
    moments: &'a BTreeMap<u64, ParameterMoments>,
    gradients: &'a GradientsParams,
    failure: Option<Nvfp4Error>,
}

impl Check<'_> {
    fn parameter<const D: usize>(
        &self,
        id: ParamId,
        weight: &Tensor<D>,
        gradient: &Tensor<D>,
    ) -> Result<(), Nvfp4Error> {
        validate::operand("parameter", weight)?;
        validate::operand("gradient", gradient)?;
        validate::shape("gradient", gradient.dims(), weight.dims(), || {
            format!("that of parameter {id}")
        })?;
        if let Some(moments) = self.moments.get(&id.val()) {
            let elements = weight.dims().iter().product::<usize>();
            validate::shape("moments", moments.first.dims(), [elements], || {
                format!("the elements of parameter {id}")
            })?;
        }
        Ok(())
    }
}

impl burn_core::module::ModuleVisitor for Check<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.failure.is_none()
            && let Some(gradient) = self.gradients.get::<D>(param.id)
        {
            self.failure = self.parameter(param.id, &param.val(), &gradient).err();
        }
    }
}

/// Takes parameters out of the module, so that nobody else holds their buffers.
struct Take<'a> {
    optimizer: &'a mut AdamW,
    gradients: GradientsParams,
    path: Vec<String>,
    /// One entry for each parameter that the module has, none for those without a gradient.
    taken: VecDeque<Option<Taken>>,
    device: Option<Device>,
}

impl ModuleMapper for Take<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            self.taken.push_back(None);
            return param;
        };
        let (id, weight, mapper) = param.consume();
        let tracked = weight.is_require_grad();
        let weight = weight.without_autodiff();
        let device = weight.device();
        let (dtype, shape) = (weight.dtype(), weight.shape());
        let elements = shape.num_elements();
        let moment = self.optimizer.config.moments.dtype();
        let zeros = || Tensor::<1>::zeros([elements], (&device, DType::from(moment)));
        let (first, second, own) = match self.optimizer.moments.remove(&id.val()) {
            Some(moments) => (moments.first, moments.second, moments.weight),
            None => (zeros(), zeros(), None),
        };
        let (weight, copy) = match dtype {
            DType::F32 => (weight.into_dispatch(), MaybeTensor::Absent),
            _ => {
                let flat = || weight.clone().cast(FloatDType::F32).reshape([elements]);
                let own = own.unwrap_or_else(flat);
                (
                    own.into_dispatch(),
                    MaybeTensor::Present(weight.into_dispatch()),
                )
            }
        };
        let config = &self.optimizer.config;
        let path = self.path.join(".");
        let state = ParameterState {
            weight,
            first: first.into_dispatch(),
            second: second.into_dispatch(),
            copy,
            decay: config.decay(id, &path, D) as f32,
            key: RandomStream::new(config.seed ^ SEED, id.val(), 0).key(),
        };
        self.taken.push_back(Some(Taken {
            id,
            gradient: Some(gradient.into_dispatch()),
            state: Some(state),
            tracked,
            mapper: Box::new(mapper),
        }));
        self.device.get_or_insert(device.clone());
        // Nothing is made of this: the parameter is put back in its place.
        let nothing = move |_: &Device, _: bool| unreachable!("the parameter is put back");
        Param::uninitialized(id, nothing, device, tracked, shape)
    }
}

/// Puts the parameters back.
struct Give<'a> {
    optimizer: &'a mut AdamW,
    taken: VecDeque<Option<Taken>>,
}

impl ModuleMapper for Give<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Taken {
            id,
            state: Some(state),
            tracked,
            mapper,
            ..
        }) = self.taken.pop_front().flatten()
        else {
            return param;
        };
        let (weight, own) = match state.copy {
            MaybeTensor::Absent => (state.weight, None),
            MaybeTensor::Present(copy) => (copy, Some(Tensor::from_dispatch(state.weight))),
        };
        let moments = ParameterMoments {
            first: Tensor::from_dispatch(state.first),
            second: Tensor::from_dispatch(state.second),
            weight: own,
        };
        self.optimizer.moments.insert(id.val(), moments);
        let weight = Tensor::<D>::from_dispatch(weight);
        let weight = match tracked {
            true => weight.autodiff().require_grad(),
            false => weight,
        };
        let mapper = mapper.downcast::<ParamMapper<Tensor<D>>>();
        let mapper = mapper.expect("modules are traversed in the same order");
        Param::from_mapped_value(id, weight, *mapper)
    }
}
