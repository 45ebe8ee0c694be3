//! AdamW optimizer of a module.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};

use burn_core::backend::{Dispatch, tensor::FloatTensor};
use burn_core::module::{Module, ModuleMapper, Param, ParamId, ParamMapper};
use burn_core::tensor::{DType, Device, FloatDType, GradientCheckpointingStrategy, Int, Tensor};
use burn_optim::GradientsParams;
use nvfp4_formats::Nvfp4Error;
use nvfp4_parallel::Reduction;

use super::clip::clip_factor;
use super::config::{AdamWConfig, MomentType, learning_rate};
use super::schedule::Schedule;
use crate::ops::known_amax::KnownWeights;
use crate::ops::optimizer::{
    AdamWBatch, AdamWOptions, BATCH, GradientBatch, OptimizerOps, ParameterState,
};
use crate::ops::{MaybeTensor, WeightIdentity};
use crate::parallel::Shards;
use crate::validate;

/// AdamW state of one parameter, flattened.
#[derive(Debug, Clone)]
pub struct ParameterMoments {
    /// First moment: running mean of the gradient.
    pub first: Tensor<1>,
    /// Second moment: running mean of the squared gradient.
    pub second: Tensor<1>,
    /// `f32` master weight, if the parameter is not `f32` itself.
    pub weight: Option<Tensor<1>>,
}

impl ParameterMoments {
    /// State before the first step of a parameter of `elements`, with moments of dtype `moment`.
    pub(super) fn zeros(elements: usize, moment: MomentType, device: &Device) -> Self {
        let zeros = || Tensor::zeros([elements], (device, DType::from(moment.dtype())));
        Self {
            first: zeros(),
            second: zeros(),
            weight: None,
        }
    }

    /// Converts to the state of `parameter` that a step takes. Its `weight` is the `f32` tensor
    /// that is updated: the parameter itself or its master weight. Its `copy` is the parameter, if
    /// it is rounded from the master weight.
    pub(super) fn into_state<const D: usize>(
        self,
        parameter: Tensor<D>,
        decay: f64,
        key: [u32; 2],
    ) -> ParameterState<Dispatch> {
        let (weight, copy) = match parameter.dtype() {
            DType::F32 => (parameter.into_dispatch(), MaybeTensor::Absent),
            _ => {
                let flat = || {
                    let wide = parameter.clone().cast(FloatDType::F32);
                    wide.reshape([parameter.shape().num_elements()])
                };
                let own = self.weight.unwrap_or_else(flat);
                let copy = MaybeTensor::Present(parameter.into_dispatch());
                (own.into_dispatch(), copy)
            }
        };
        ParameterState {
            weight,
            first: self.first.into_dispatch(),
            second: self.second.into_dispatch(),
            copy,
            decay: decay as f32,
            key,
        }
    }

    /// Returns the parameter after a step, and its state.
    pub(super) fn from_state<const D: usize>(state: ParameterState<Dispatch>) -> (Tensor<D>, Self) {
        let (parameter, weight) = match state.copy {
            MaybeTensor::Absent => (state.weight, None),
            MaybeTensor::Present(copy) => (copy, Some(Tensor::from_dispatch(state.weight))),
        };
        let moments = Self {
            first: Tensor::from_dispatch(state.first),
            second: Tensor::from_dispatch(state.second),
            weight,
        };
        (Tensor::from_dispatch(parameter), moments)
    }
}

/// Returns an error if `tensor`, a part of a parameter's state, does not have `elements` and dtype
/// `dtype`.
pub(super) fn check_part(
    name: &'static str,
    tensor: &Tensor<1>,
    elements: usize,
    dtype: DType,
) -> Result<(), Nvfp4Error> {
    validate::shape(name, tensor.dims(), [elements], || {
        "that of the state's first tensor".into()
    })?;
    match tensor.dtype() == dtype {
        true => Ok(()),
        false => Err(Nvfp4Error::DType {
            argument: name,
            found: format!("{:?}", tensor.dtype()),
            expected: format!("{dtype:?}"),
        }),
    }
}

/// AdamW with decoupled weight decay, and its state.
#[derive(Debug, Clone)]
pub struct AdamW {
    config: AdamWConfig,
    time: u64,
    moments: BTreeMap<u64, ParameterMoments>,
    schedule: Schedule,
    maxima: Maxima,
    shards: Vec<Shards>,
}

/// Amax values that steps compute.
#[derive(Debug, Default)]
struct Maxima {
    /// By batch, the ids of its parameters and their amax values. A step of the same parameters
    /// writes to the same memory: the forward of a captured step reads there what the step before
    /// it wrote.
    batches: Vec<(Vec<u64>, Tensor<1>)>,
    /// For each set of shards, the amax over all its ranks, for all batches in order; also in
    /// constant memory. Entries of parameters outside the set are undefined.
    of_groups: Vec<Tensor<1>>,
    /// Amax values that the layers of the weights know.
    known: KnownWeights,
}

/// Creates an empty value: clones that share the memory would overwrite each other's steps.
impl Clone for Maxima {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Maxima {
    /// Returns the memory of batch `batch` of the last step, if it had these parameters.
    fn of_batch(&self, batch: usize, ids: &[u64]) -> Option<&Tensor<1>> {
        let (own, maxima) = self.batches.get(batch)?;
        (own == ids).then_some(maxima)
    }

    /// Stores the amax values of a step, and reduces them over the ranks of each of `shards`, which
    /// all take the step: one collective per set, instead of one per quantized weight.
    fn found(&mut self, batches: Vec<(Vec<u64>, Tensor<1>)>, shards: &[Shards]) {
        let before = std::mem::take(&mut self.of_groups);
        let same = self.batches.len() == batches.len() && before.len() == shards.len();
        self.batches = batches;
        if self.batches.is_empty() {
            return;
        }
        let mut before = before.into_iter().filter(|_| same);
        for shards in shards {
            let all = self.batches.iter().map(|(_, maxima)| maxima.clone());
            let all = Tensor::cat(all.collect(), 0);
            let largest = shards.group.all_reduce(all, Reduction::Max);
            self.of_groups.push(match before.next() {
                Some(before) => {
                    let (before, largest) = (before.into_dispatch(), largest.into_dispatch());
                    Tensor::from_dispatch(Dispatch::nvfp4_write_maxima(before, largest))
                }
                None => largest,
            });
        }
    }

    /// Registers entry `entry` of batch `batch` as the amax of `weight`, the new parameter `id`, so
    /// that its layers quantize it with that. If it is a shard of a set in `shards`, also registers
    /// the amax over the ranks of that set.
    fn tell<const D: usize>(
        &mut self,
        (batch, entry): (usize, usize),
        (id, weight): (ParamId, &Tensor<D>),
        shards: &[Shards],
    ) {
        let Some(node) = WeightIdentity::of([weight]).and_then(|weight| weight.node()) else {
            return;
        };
        let Some((_, maxima)) = self.batches.get(batch) else {
            return;
        };
        Dispatch::nvfp4_remember_amax(maxima.clone().into_dispatch(), entry, node);
        self.known.push(node);
        for (shards, largest) in shards.iter().zip(&self.of_groups) {
            if shards.contains(id) {
                let (largest, entry) = (largest.clone().into_dispatch(), batch * BATCH + entry);
                let group = shards.group.link();
                Dispatch::nvfp4_remember_group_amax(largest, entry, node, group);
            }
        }
    }
}

impl AdamWConfig {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn try_init(self) -> Result<AdamW, Nvfp4Error> {
        self.check()?;
        Ok(AdamW::new(self))
    }

    /// Panicking version of [`try_init`](Self::try_init).
    ///
    /// # Panics
    /// If [`try_init`](Self::try_init) returns an error.
    #[track_caller]
    pub fn init(self) -> AdamW {
        crate::functions::or_panic("AdamW", self.try_init())
    }
}

impl AdamW {
    pub(super) fn new(config: AdamWConfig) -> Self {
        Self {
            config,
            time: 0,
            moments: BTreeMap::new(),
            schedule: Schedule::default(),
            maxima: Maxima::default(),
            shards: Vec::new(),
        }
    }

    /// Declares the parameters in `shards` as sharded: the gradient norm for clipping then covers
    /// the shards of all ranks, which must step together. If different parameters are sharded over
    /// different groups of ranks, each parameter must be in one set, and all ranks must pass the
    /// same number of sets in the same order; see [`Shards::with_splits`].
    pub fn set_shards(&mut self, shards: impl IntoIterator<Item = Shards>) {
        self.shards = shards.into_iter().collect();
    }

    /// Returns the settings.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Number of steps taken so far.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Returns the state of each parameter by its id, in ascending order.
    pub fn moments(&self) -> &BTreeMap<u64, ParameterMoments> {
        &self.moments
    }

    /// Returns the amax of each parameter that the last step updated, `f32[1]` on the device, by
    /// parameter id (of this rank's shard, if it is sharded). Empty unless [`AdamWConfig::amax`] is
    /// set. The bits are those of a separate amax computation. The layers of this crate use these
    /// values automatically to quantize the new weights.
    pub fn amax(&self) -> BTreeMap<u64, Tensor<1>> {
        let entries = self.maxima.batches.iter().flat_map(|(ids, maxima)| {
            let own = |(entry, id): (usize, &u64)| (*id, maxima.clone().narrow(0, entry, 1));
            ids.iter().enumerate().map(own).collect::<Vec<_>>()
        });
        entries.collect()
    }

    /// Number of elements in the state of a parameter.
    pub(super) fn elements(&self, id: u64) -> Option<usize> {
        self.moments.get(&id).map(|moments| moments.first.dims()[0])
    }

    /// Restores this state, taken after `time` steps.
    ///
    /// # Errors
    /// Returns an error if the tensors of a parameter differ in length, or their dtypes do not
    /// match the configuration; `weight` must be `f32`.
    pub fn restore(
        &mut self,
        time: u64,
        moments: BTreeMap<u64, ParameterMoments>,
    ) -> Result<(), Nvfp4Error> {
        let moment = DType::from(self.config.moments.dtype());
        for state in moments.values() {
            let [elements] = state.first.dims();
            check_part("first", &state.first, elements, moment)?;
            check_part("second", &state.second, elements, moment)?;
            if let Some(weight) = &state.weight {
                check_part("weight", weight, elements, DType::F32)?;
            }
        }
        self.time = time;
        self.moments = moments;
        Ok(())
    }

    /// Updates all parameters that have a gradient, with learning rate `lr`. Other parameters are
    /// unchanged.
    ///
    /// Parameters are updated in place. Burn reads records of a model lazily: a record that is not
    /// yet written will contain the weights of a later step.
    ///
    /// # Errors
    /// Returns an error if the learning rate is negative or not finite, parameters with a gradient
    /// are on several devices, a parameter or a gradient is on a device or of a dtype that has no
    /// implementation, or a parameter does not match its gradient or its state. No parameter has
    /// changed then, but `model` is dropped.
    pub fn try_step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        learning_rate(lr)?;
        self.take_step(Numbers::Of(lr), model, gradients)
    }

    /// Advances the step count and writes the numbers of the next step, with learning rate `lr`, to
    /// the memory of `device`, where [`try_step_begun`](Self::try_step_begun) reads them. This part
    /// of a step cannot be captured in a graph, because it differs from step to step.
    ///
    /// # Errors
    /// Returns an error if the learning rate is negative or not finite.
    pub fn begin_step(&mut self, lr: f64, device: &Device) -> Result<(), Nvfp4Error> {
        learning_rate(lr)?;
        self.time += 1;
        let device = device.clone().without_autodiff();
        let params = self.config.params();
        self.schedule.begin(&params, lr, self.time, &device);
        Ok(())
    }

    /// Takes the step that [`begin_step`](Self::begin_step) began, like
    /// [`try_step`](Self::try_step). A replay of a graph with this step needs only another
    /// `begin_step`.
    ///
    /// # Errors
    /// Same as [`try_step`](Self::try_step); also if no step was begun on the device of the
    /// parameters.
    pub fn try_step_begun<M: Module>(
        &mut self,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        self.take_step(Numbers::Begun, model, gradients)
    }

    fn take_step<M: Module>(
        &mut self,
        numbers: Numbers,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        let elements = |id| self.elements(id);
        let device = Check::new(&elements, &gradients).run(&model)?;
        let schedule = match (numbers, device) {
            (_, None) => None,
            (Numbers::Of(lr), Some(device)) => {
                self.time += 1;
                let params = self.config.params();
                Some(self.schedule.at(&params, lr, self.time, &device))
            }
            (Numbers::Begun, Some(device)) => {
                let begun = self.schedule.begun(&device);
                Some(begun.ok_or_else(|| {
                    let found = format!("a step on {device:?} that was not begun there");
                    Nvfp4Error::value("model", found, "one after `begin_step` with its device")
                })?)
            }
        };
        let mut take = Take {
            optimizer: self,
            gradients,
            path: Vec::new(),
            taken: VecDeque::new(),
        };
        let model = model.map(&mut take);
        let Take { mut taken, .. } = take;
        if let Some(schedule) = schedule {
            self.update(&schedule, &mut taken);
        }
        Ok(model.map(&mut Give {
            optimizer: self,
            taken,
        }))
    }

    /// Panicking version of [`try_step`](Self::try_step).
    ///
    /// # Panics
    /// If [`try_step`](Self::try_step) returns an error.
    #[track_caller]
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        crate::functions::or_panic("AdamW", self.try_step(lr, model, gradients))
    }

    /// Updates the parameters that were taken from the model.
    fn update(&mut self, schedule: &Tensor<1, Int>, taken: &mut VecDeque<Option<Taken>>) {
        let factor = self.config.grad_clip.map(|norm| {
            let taken = taken.iter().flatten();
            let gradients = taken.filter_map(|taken| Some((taken.id, taken.gradient.clone()?)));
            clip_factor(norm, gradients, &self.shards)
        });
        let options = AdamWOptions {
            params: self.config.params(),
            amax: self.config.amax,
        };
        self.maxima.known.forget();
        let mut batches = Vec::new();
        let mut present: Vec<&mut Taken> = taken.iter_mut().flatten().collect();
        for (number, batch) in present.chunks_mut(BATCH).enumerate() {
            let ids: Vec<u64> = batch.iter().map(|taken| taken.id.val()).collect();
            let maxima = self.maxima.of_batch(number, &ids);
            let maxima = maxima.map(|maxima| maxima.clone().into_dispatch());
            let gradients = batch.iter_mut().filter_map(|taken| taken.gradient.take());
            let gradients = GradientBatch::<Dispatch>::new(gradients.collect::<Vec<_>>());
            let states = batch.iter_mut().filter_map(|taken| taken.state.take());
            let states = AdamWBatch::new(states.collect::<Vec<_>>(), maxima);
            let (states, amax) = Dispatch::nvfp4_adamw(
                gradients,
                states,
                schedule.clone().into_dispatch(),
                factor.clone().into(),
                options,
            )
            .into_parts();
            let maxima = amax.map(Tensor::<1>::from_dispatch);
            for (entry, (taken, state)) in batch.iter_mut().zip(states).enumerate() {
                taken.state = Some(state);
                taken.amax = maxima.as_ref().map(|_| (number, entry));
            }
            batches.extend(maxima.map(|maxima| (ids, maxima)));
        }
        self.maxima.found(batches, &self.shards);
    }
}

/// Source of the numbers of a step.
enum Numbers {
    /// The step writes those of this learning rate.
    Of(f64),
    /// [`AdamW::begin_step`] wrote them.
    Begun,
}

/// Parameter that was taken out of the module for a step.
struct Taken {
    id: ParamId,
    gradient: Option<FloatTensor<Dispatch>>,
    state: Option<ParameterState<Dispatch>>,
    /// Location of the new parameter's amax, once computed: batch index, and entry in the batch.
    amax: Option<(usize, usize)>,
    /// Autodiff state of the parameter.
    tracked: Tracking,
    /// A `ParamMapper<Tensor<D>>`.
    mapper: Box<dyn Any>,
}

/// Autodiff state of a parameter, restored after the step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tracking {
    require_grad: bool,
    distributed: bool,
    /// `None` if autodiff was off.
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl Tracking {
    pub(super) fn of<const D: usize>(weight: &Tensor<D>) -> Self {
        Self {
            require_grad: weight.is_require_grad(),
            distributed: weight.is_distributed(),
            checkpointing: weight.gradient_checkpointing_strategy(),
        }
    }

    pub(super) fn restore<const D: usize>(self, weight: Tensor<D>, id: ParamId) -> Tensor<D> {
        let Some(strategy) = self.checkpointing else {
            return weight;
        };
        let weight = weight.autodiff();
        let weight = weight.with_gradient_checkpointing_strategy(strategy);
        let weight = match self.require_grad {
            true => weight.require_grad(),
            false => weight,
        };
        match self.distributed {
            true => weight.set_distributed(id),
            false => weight,
        }
    }
}

/// Visitor that checks for errors before anything is taken.
pub(super) struct Check<'a> {
    /// Number of elements in the state of a parameter.
    elements: &'a dyn Fn(u64) -> Option<usize>,
    gradients: &'a GradientsParams,
    /// Device of the first parameter with a gradient.
    device: Option<Device>,
    failure: Option<Nvfp4Error>,
}

impl<'a> Check<'a> {
    pub(super) fn new(
        elements: &'a dyn Fn(u64) -> Option<usize>,
        gradients: &'a GradientsParams,
    ) -> Self {
        Self {
            elements,
            gradients,
            device: None,
            failure: None,
        }
    }

    /// Returns an error if a step would. Otherwise returns the device of the parameters, if one has
    /// a gradient.
    pub(super) fn run<M: Module>(mut self, model: &M) -> Result<Option<Device>, Nvfp4Error> {
        model.visit(&mut self);
        match self.failure {
            None => Ok(self.device),
            Some(failure) => Err(failure),
        }
    }

    fn parameter<const D: usize>(
        &mut self,
        id: ParamId,
        weight: &Tensor<D>,
        gradient: &Tensor<D>,
    ) -> Result<(), Nvfp4Error> {
        validate::operand("parameter", weight)?;
        validate::operand("gradient", gradient)?;
        let device = weight.device().inner();
        let first = self.device.get_or_insert_with(|| device.clone());
        validate::same_device(("the first parameter", first), ("parameter", &device))?;
        let of_gradient = gradient.device().inner();
        validate::same_device(("parameter", &device), ("gradient", &of_gradient))?;
        validate::shape("gradient", gradient.dims(), weight.dims(), || {
            format!("that of parameter {id}")
        })?;
        if let Some(found) = (self.elements)(id.val()) {
            let elements = weight.dims().iter().product::<usize>();
            validate::shape("moments", [found], [elements], || {
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

/// Takes parameters out of the module, so that nothing else holds their buffers.
struct Take<'a> {
    optimizer: &'a mut AdamW,
    gradients: GradientsParams,
    path: Vec<String>,
    /// One entry per parameter of the module, `None` for those without a gradient.
    taken: VecDeque<Option<Taken>>,
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
        let tracked = Tracking::of(&weight);
        let weight = weight.without_autodiff();
        let device = weight.device();
        let shape = weight.shape();
        let config = &self.optimizer.config;
        let moments = self.optimizer.moments.remove(&id.val());
        let moments = moments.unwrap_or_else(|| {
            ParameterMoments::zeros(shape.num_elements(), config.moments, &device)
        });
        let decay = config.decay(id, &self.path.join("."), D);
        let state = moments.into_state(weight, decay, config.key(id));
        self.taken.push_back(Some(Taken {
            id,
            gradient: Some(gradient.into_dispatch()),
            state: Some(state),
            amax: None,
            tracked,
            mapper: Box::new(mapper),
        }));
        // Never initialized: `Give` puts the parameter back.
        let nothing = move |_: &Device, _: bool| unreachable!("the parameter is put back");
        Param::uninitialized(id, nothing, device, tracked.require_grad, shape)
    }
}

/// Puts the parameters back into the module.
struct Give<'a> {
    optimizer: &'a mut AdamW,
    taken: VecDeque<Option<Taken>>,
}

impl ModuleMapper for Give<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(Taken {
            id,
            state: Some(state),
            amax,
            tracked,
            mapper,
            ..
        }) = self.taken.pop_front().flatten()
        else {
            return param;
        };
        let (weight, moments) = ParameterMoments::from_state::<D>(state);
        self.optimizer.moments.insert(id.val(), moments);
        let weight = tracked.restore(weight, id);
        if let Some(amax) = amax {
            let AdamW { maxima, shards, .. } = &mut *self.optimizer;
            maxima.tell(amax, (id, &weight), shards);
        }
        let mapper = mapper.downcast::<ParamMapper<Tensor<D>>>();
        let mapper = mapper.expect("modules are traversed in the same order");
        Param::from_mapped_value(id, weight, *mapper)
    }
}
