//! AdamW as Burn's `Optimizer` of one parameter.

use std::sync::{Arc, Mutex, PoisonError};

use burn_core::backend::Dispatch;
use burn_core::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_optim::{LearningRate, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource};

use super::adamw::split;
use super::config::{AdamWConfig, learning_rate};
use super::schedule::Schedule;
use crate::functions::or_panic;
use crate::ops::MaybeTensor;
use crate::ops::optimizer::{
    AdamWBatch, AdamWOptions, GradientBatch, OptimizerOps, ParameterState,
};
use crate::validate;

/// An optimizer in which each parameter of `model` is a group of its own: Burn tells an `Optimizer`
/// neither id nor path, on which decay and random bits depend.
pub(super) fn build<M: Module>(config: &AdamWConfig, model: &M) -> ModuleOptimizer {
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

/// Adds a group for each parameter.
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

/// The schedule of the step that is being taken, for all parameters.
#[derive(Debug, Default)]
struct StepSchedule {
    /// Device, learning rate and step of `words`.
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
                // Dropped first, so that its buffer is written in place.
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
    /// The decay; by the parameter's axes where it was not known.
    decay: Option<f64>,
    key: [u32; 2],
    schedule: Arc<Mutex<StepSchedule>>,
}

/// What is kept of a parameter: `time`, the moments `first` and `second`, and `weight`, its value in
/// `f32`, where it is not `f32` itself; all flat.
///
/// What a record held stays on the host until the parameter's device is known: Burn loads records
/// onto its default device, which need not exist.
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
    OnDevice {
        first: Tensor<1>,
        second: Tensor<1>,
        weight: Option<Tensor<1>>,
    },
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

impl RecordState for OneState {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let (first, second, weight) = match self.tensors.clone() {
            Stored::OnHost {
                first,
                second,
                weight,
            } => (first, second, weight),
            Stored::OnDevice {
                first,
                second,
                weight,
            } => (
                first.into_data(),
                second.into_data(),
                weight.map(Tensor::into_data),
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
        let (time, stored) = match state {
            Some(state) => (state.time + 1, Some(state.tensors.on_device(&device))),
            None => (1, None),
        };
        let elements = tensor.shape().num_elements();
        let (first, second, own) = match stored {
            Some((first, second, own)) => {
                let expected = || "the elements of the parameter".into();
                let found = validate::shape("state", first.dims(), [elements], expected);
                or_panic("AdamW", found);
                (first, second, own)
            }
            None => {
                let dtype = DType::from(self.config.moments.dtype());
                let zeros = || Tensor::zeros([elements], (&device, dtype));
                (zeros(), zeros(), None)
            }
        };
        let decay = self.decay.unwrap_or(self.config.decay_by_axes(D));
        let (weight, copy) = split(tensor, own);
        let parameter = ParameterState {
            weight,
            first: first.into_dispatch(),
            second: second.into_dispatch(),
            copy,
            decay: decay as f32,
            key: self.key,
        };
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
        let made = made.into_iter().next().expect("one parameter went in");
        let (tensor, weight) = match made.copy {
            MaybeTensor::Absent => (made.weight, None),
            MaybeTensor::Present(copy) => (copy, Some(Tensor::from_dispatch(made.weight))),
        };
        let tensors = Stored::OnDevice {
            first: Tensor::from_dispatch(made.first),
            second: Tensor::from_dispatch(made.second),
            weight,
        };
        (
            Tensor::from_dispatch(tensor),
            Some(OneState { time, tensors }),
        )
    }

    fn to_device<const D: usize>(state: OneState, device: &Device) -> OneState {
        let (first, second, weight) = state.tensors.on_device(device);
        let tensors = Stored::OnDevice {
            first,
            second,
            weight,
        };
        OneState { tensors, ..state }
    }
}

impl Stored {
    /// Both moments and the `f32` weight on `device`.
    fn on_device(self, device: &Device) -> (Tensor<1>, Tensor<1>, Option<Tensor<1>>) {
        match self {
            Self::OnDevice {
                first,
                second,
                weight,
            } => {
                let to = |tensor: Tensor<1>| match tensor.device() == *device {
                    true => tensor,
                    false => tensor.to_device(device),
                };
                (to(first), to(second), weight.map(to))
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
                (up(first), up(second), weight.map(up))
            }
        }
    }
}
