//! Optimizer by the oracle.

use burn_core::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::{self, AdamWSchedule, AdamWUpdate, Element};

use super::super::MaybeTensor;
use super::super::optimizer::{
    AdamWBatch, AdamWOptions, BATCH, GradientBatch, OptimizerOps, ParameterState,
};
use super::tensors::with_elements;

fn vector(values: Vec<f32>) -> FlexTensor {
    let len = values.len();
    FlexTensor::from_data(TensorData::new(values, [len]))
}

/// Returns a contiguous tensor whose elements can be accessed without a copy unless they are
/// shared.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    // `tensor` is consumed here, so it does not share the storage.
    tensor.to_contiguous()
}

/// Updates one parameter, and returns its new state.
fn step(
    gradient: FlexTensor,
    state: ParameterState<Flex>,
    schedule: &AdamWSchedule,
    factor: f32,
    options: &AdamWOptions,
) -> ParameterState<Flex> {
    let mut state = ParameterState {
        weight: contiguous(state.weight),
        first: contiguous(state.first),
        second: contiguous(state.second),
        ..state
    };
    macro_rules! update {
        ($gradient:expr, $moment:ty) => {{
            let update = AdamWUpdate {
                gradient: $gradient,
                weight: state.weight.storage_mut(),
                first: state.first.storage_mut::<$moment>(),
                second: state.second.storage_mut::<$moment>(),
                decay: state.decay,
                key: state.key,
            };
            reference::adamw(&options.params, schedule, factor, update)
        }};
    }
    with_elements!(gradient, |gradient| match state.first.dtype() {
        DType::BF16 => update!(gradient, bf16),
        _ => update!(gradient, f32),
    });
    if let MaybeTensor::Present(copy) = state.copy {
        let mut copy = contiguous(copy);
        let weight: &[f32] = state.weight.storage();
        match copy.dtype() {
            DType::BF16 => round_to::<bf16>(weight, copy.storage_mut()),
            DType::F16 => round_to::<f16>(weight, copy.storage_mut()),
            other => panic!("element type {other:?}: expected BF16 or F16"),
        }
        state.copy = MaybeTensor::Present(copy);
    }
    state
}

fn round_to<T: Element>(weight: &[f32], copy: &mut [T]) {
    for (copy, weight) in copy.iter_mut().zip(weight) {
        *copy = T::from_f32(*weight);
    }
}

/// Returns the amax of the parameter; NaN if it contains a NaN.
fn amax(state: &ParameterState<Flex>) -> f32 {
    let parameter = match &state.copy {
        MaybeTensor::Present(copy) => copy,
        MaybeTensor::Absent => &state.weight,
    };
    with_elements!(parameter, |values| reference::amax(values))
}

impl OptimizerOps for Flex {
    fn nvfp4_square_sums(gradients: GradientBatch<Self>) -> FloatTensor<Self> {
        let sums = gradients
            .into_vec()
            .into_iter()
            .flat_map(|gradient| with_elements!(gradient, |values| reference::square_sums(values)));
        vector(sums.collect())
    }

    fn nvfp4_clip_factor(sums: FloatTensor<Self>, max_norm: f32) -> FloatTensor<Self> {
        let sums = sums.to_contiguous();
        let (norm, factor) = reference::clip_factor(sums.storage(), max_norm);
        vector(vec![norm, factor])
    }

    fn nvfp4_set_words(out: IntTensor<Self>, words: [u32; 4]) -> IntTensor<Self> {
        let mut out = contiguous(out);
        out.storage_mut::<u32>().copy_from_slice(&words);
        out
    }

    fn nvfp4_write_maxima(_out: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self> {
        from
    }

    fn nvfp4_adamw(
        gradients: GradientBatch<Self>,
        batch: AdamWBatch<Self>,
        schedule: IntTensor<Self>,
        factor: MaybeTensor<Self>,
        options: AdamWOptions,
    ) -> AdamWBatch<Self> {
        let schedule = schedule.to_contiguous();
        let words: &[u32] = schedule.storage();
        let schedule = AdamWSchedule::from_words([words[0], words[1], words[2], words[3]]);
        let factor = factor.into_option();
        let factor = factor.map_or(1.0, |factor| factor.to_contiguous().storage::<f32>()[1]);
        let (parameters, _) = batch.into_parts();
        let made: Vec<_> = gradients
            .into_vec()
            .into_iter()
            .zip(parameters)
            .map(|(gradient, state)| step(gradient, state, &schedule, factor, &options))
            .collect();
        let amax = options.amax.then(|| {
            let mut found: Vec<f32> = made.iter().map(amax).collect();
            found.resize(BATCH, 0.0);
            vector(found)
        });
        AdamWBatch::new(made, amax)
    }
}
