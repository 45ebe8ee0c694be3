//! AdamW as a Burn `Optimizer` of one parameter.

use std::sync::{Arc, Mutex, PoisonError};

use burn_core::backend::Dispatch;
use burn_core::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn_core::tensor::{Device, Int, Tensor, TensorData};
use burn_optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};
use nvfp4_formats::Nvfp4Error;

use super::adamw::ParameterMoments;
use super::config::{AdamWConfig, learning_rate};
use super::schedule::Schedule;
use crate::functions::or_panic;
use crate::ops::MaybeTensor;
use crate::ops::optimizer::{AdamWBatch, AdamWOptions, GradientBatch, OptimizerOps};
use crate::validate;

impl AdamWConfig {
    /// Returns this optimizer in the form that Burn's learner takes, for the parameters of `model`:
    /// one launch per parameter, with the bits of [`AdamW`](super::AdamW). Parameters whose ids
    /// `model` does not contain are updated too, with the weight decay for their number of axes.
    ///
    /// Parameters are copied before they are updated, so that records that are not yet written,
    /// which Burn reads lazily, keep their weights.
    ///
    /// Burn passes such an optimizer one gradient at a time, so it cannot clip gradients to a
    /// global norm: [`grad_clip`](Self::grad_clip) must be `None`. Scale gradients by
    /// [`clip_grad_norm`](super::clip_grad_norm) before the step instead. [`amax`](Self::amax) must
    /// be off.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range, or `grad_clip` or `amax` is set.
    pub fn try_module_optimizer<M: Module>(
        &self,
        model: &M,
    ) -> Result<ModuleOptimizer, Nvfp4Error> {
        self.check()?;
        if let Some(norm) = self.grad_clip {
            let expected = "None: a ModuleOptimizer sees one gradient at a time; \
                            optim::clip_grad_norm clips all of them";
            return Err(Nvfp4Error::value("grad_clip", format!("{norm}"), expected));
        }
        if self.amax {
            let expected = "false: a ModuleOptimizer gives nothing but parameters back";
            return Err(Nvfp4Error::value("amax", "true", expected));
        }
        Ok(build(self, model))
    }

    /// Panicking version of [`try_module_optimizer`](Self::try_module_optimizer).
    ///
    /// # Panics
    /// If [`try_module_optimizer`](Self::try_module_optimizer) returns an error.
    #[track_caller]
    pub fn module_optimizer<M: Module>(&self, model: &M) -> ModuleOptimizer {
        or_panic("AdamW", self.try_module_optimizer(model))
    }
}

/// Builds an optimizer in which each parameter of `model` has a separate group: Burn passes an
/// `Optimizer` neither the id nor the path, on which decay and random bits depend.
fn build<M: Module>(config: &AdamWConfig, model: &M) -> ModuleOptimizer {
    let schedule = Arc::default();
    let fallback = OneParameter {
        config: config.clone(),
        decay: None,
        key: config.key(ParamId::from(0)),
        schedule: Arc::clone(&schedule),
    };
    let mut visitor = Groups {
        config,
        schedule,
        path: Vec::new(),
        optimizer: Some(ModuleOptimizer::from(fallback)),
    };
    model.visit(&mut visitor);
    visitor.optimizer.expect("each parameter puts it back")
}

/// Visitor that adds a group per parameter.
struct Groups<'a> {
    config: &'a AdamWConfig,
    schedule: Arc<Mutex<StepSchedule>>,
    path: Vec<String>,
    optimizer: Option<ModuleOptimizer>,
}

impl ModuleVisitor for Groups<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let own = OneParameter {
            config: self.config.clone(),
            decay: Some(self.config.decay(param.id, &self.path.join("."), D)),
            key: self.config.key(param.id),
            schedule: Arc::clone(&self.schedule),
        };
        let group = ParamGroup::from_ids(vec![param.id]);
        let optimizer = self.optimizer.take().expect("each parameter puts it back");
        self.optimizer = Some(optimizer.with_group(group, own, None));
    }
}

/// Schedule of the current step, shared by all parameters.
#[derive(Debug, Default)]
struct StepSchedule {
    /// Device, learning rate and step number of `words`.
    of: Option<(Device, LearningRate, u64)>,
    words: Option<Tensor<1, Int>>,
    buffer: Schedule,
}

impl StepSchedule {
    fn at(&mut self, config: &AdamWConfig, lr: f64, time: u64, device: &Device) -> Tensor<1, Int> {
        let of = Some((device.clone(), lr, time));
        match &self.words {
            Some(words) if self.of == of => words.clone(),
            _ => {
                // Drops the old handle first, so that the buffer is written in place.
                self.words = None;
                let words = self.buffer.at(&config.params(), lr, time, device);
                self.of = of;
                self.words = Some(words.clone());
                words
            }
        }
    }
}

/// AdamW of one parameter.
#[derive(Clone)]
struct OneParameter {
    config: AdamWConfig,
    /// Weight decay, by the parameter's axes if it was not in the model.
    decay: Option<f64>,
    key: [u32; 2],
    schedule: Arc<Mutex<StepSchedule>>,
}

/// State of a parameter: `time`, the moments `first` and `second`, and the `f32` master weight
/// `weight`, if the parameter is not `f32` itself. All are flattened.
///
/// The contents of a record stay on the host until the parameter's device is known: Burn loads
/// records onto its default device, which need not exist.
#[derive(Debug, Clone)]
struct OneState {
    time: u64,
    tensors: Stored,
}

#[derive(Debug, Clone)]
#[allow(
    clippy::large_enum_variant,
    reason = "one a parameter, and the larger one is the usual one"
)]
enum Stored {
    OnDevice(ParameterMoments),
    OnHost {
        first: TensorData,
        second: TensorData,
        weight: Option<TensorData>,
    },
}

const FIRST: &str = "first";
const SECOND: &str = "second";
const WEIGHT: &str = "weight";
const TIME: &str = "time";

/// Reads the current elements of `tensor`. Burn's `into_data` alone reads them from the device only
/// on first access.
fn read(tensor: Tensor<1>) -> TensorData {
    let data = tensor.into_data();
    let _read = data.as_bytes();
    data
}

impl RecordState for OneState {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let (first, second, weight) = match self.tensors.clone() {
            Stored::OnHost {
                first,
                second,
                weight,
            } => (first, second, weight),
            // Read now, because the next step overwrites the memory.
            Stored::OnDevice(moments) => (
                read(moments.first),
                read(moments.second),
                moments.weight.map(read),
            ),
        };
        out.push_tensor(prefix, FIRST, first);
        out.push_tensor(prefix, SECOND, second);
        if let Some(weight) = weight {
            out.push_tensor(prefix, WEIGHT, weight);
        }
        out.push_scalar(prefix, TIME, self.time.into());
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, _device: &Device) -> Option<Self> {
        Some(Self {
            time: u64::try_from(src.take_scalar(prefix, TIME)?).ok()?,
            tensors: Stored::OnHost {
                first: src.take_tensor(prefix, FIRST)?,
                second: src.take_tensor(prefix, SECOND)?,
                weight: src.take_tensor(prefix, WEIGHT),
            },
        })
    }
}

impl Optimizer for OneParameter {
    type State<const D: usize> = OneState;

    #[track_caller]
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<OneState>,
    ) -> (Tensor<D>, Option<OneState>) {
        or_panic("AdamW", learning_rate(lr));
        or_panic("AdamW", validate::operand("parameter", &tensor));
        or_panic("AdamW", validate::operand("gradient", &grad));
        let device = tensor.device();
        let elements = tensor.shape().num_elements();
        let (time, moments) = match state {
            Some(state) => {
                let moments = state.tensors.on_device(&device);
                let expected = || "the elements of the parameter".into();
                let found = validate::shape("state", moments.first.dims(), [elements], expected);
                or_panic("AdamW", found);
                (state.time + 1, moments)
            }
            None => {
                let zeros = ParameterMoments::zeros(elements, self.config.moments, &device);
                (1, zeros)
            }
        };
        let decay = self.decay.unwrap_or(self.config.decay_by_axes(D));
        // Keeps a handle, so that the step writes to other memory. Burn reads tensors lazily:
        // otherwise a record of the model that is not yet written would contain the weights of
        // later steps.
        let before = tensor.clone();
        let parameter = moments.into_state(tensor, decay, self.key);
        let schedule = {
            let mut schedule = self.schedule.lock().unwrap_or_else(PoisonError::into_inner);
            schedule.at(&self.config, lr, time, &device)
        };
        let (made, _) = Dispatch::nvfp4_adamw(
            GradientBatch::new([grad.into_dispatch()]),
            AdamWBatch::new([parameter], None),
            schedule.into_dispatch(),
            MaybeTensor::Absent,
            AdamWOptions {
                params: self.config.params(),
                amax: false,
            },
        )
        .into_parts();
        drop(before);
        let made = made.into_iter().next().expect("one parameter went in");
        let (tensor, moments) = ParameterMoments::from_state(made);
        let tensors = Stored::OnDevice(moments);
        (tensor, Some(OneState { time, tensors }))
    }

    fn to_device<const D: usize>(state: OneState, device: &Device) -> OneState {
        let tensors = Stored::OnDevice(state.tensors.on_device(device));
        OneState { tensors, ..state }
    }
}

impl Stored {
    /// Returns the tensors on `device`.
    fn on_device(self, device: &Device) -> ParameterMoments {
        match self {
            Self::OnDevice(moments) => {
                let to = |tensor: Tensor<1>| match tensor.device() == *device {
                    true => tensor,
                    false => tensor.to_device(device),
                };
                ParameterMoments {
                    first: to(moments.first),
                    second: to(moments.second),
                    weight: moments.weight.map(to),
                }
            }
            Self::OnHost {
                first,
                second,
                weight,
            } => {
                let up = |data: TensorData| {
                    let dtype = data.dtype();
                    Tensor::from_data(data, (device, dtype))
                };
                ParameterMoments {
                    first: up(first),
                    second: up(second),
                    weight: weight.map(up),
                }
            }
        }
    }
}
