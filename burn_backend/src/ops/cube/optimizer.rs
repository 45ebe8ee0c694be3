//! Launches of the optimizer kernels.

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use nvfp4_kernels::graph;
use nvfp4_kernels::optimizer::{self, AdamWSpec, AdamWUpdate, Gradient};

use super::super::dtype::float_kind;
use super::super::optimizer::{
    AdamWBatch, AdamWOptions, BATCH, GradientBatch, OptimizerOps, ParameterState,
};
use super::super::{MaybeTensor, float_dtype, trace_op};
use super::tensors::{is_own, launched, new_tensor, owned};

/// Name of these operations in traces.
const OP: &str = "optimizer";

fn gradients(batch: GradientBatch<CubeBackend>) -> (Vec<CubeTensor>, Vec<Gradient>) {
    let tensors: Vec<CubeTensor> = batch.into_vec().into_iter().map(into_contiguous).collect();
    let gradients = tensors.iter().map(|tensor| Gradient {
        handle: tensor.handle.clone(),
        elements: tensor.meta.shape().num_elements(),
        dtype: float_kind(float_dtype(tensor.dtype)),
    });
    let gradients = gradients.collect();
    (tensors, gradients)
}

fn owned_parameter(parameter: ParameterState<CubeBackend>) -> ParameterState<CubeBackend> {
    ParameterState {
        weight: updated("weight", parameter.weight),
        first: updated("first moment", parameter.first),
        second: updated("second moment", parameter.second),
        copy: parameter.copy.map(|copy| updated("rounded weight", copy)),
        ..parameter
    }
}

/// Returns `tensor` for an in-place update. Like [`owned`], but panics instead of copying in a
/// graph: a replay would read the data of the capture, and write to a copy that no later replay
/// reads.
fn updated(part: &str, tensor: CubeTensor) -> CubeTensor {
    assert!(
        !tensor.client.is_capturing() || is_own(&tensor),
        "nvfp4 AdamW: the {part} of a parameter, {:?}, is held elsewhere too, so that a step of a \
         graph would update a copy of it: drop the clones of the model and of the optimizer",
        tensor.meta.shape()
    );
    owned(OP, tensor)
}

impl OptimizerOps for CubeBackend {
    fn nvfp4_square_sums(batch: GradientBatch<Self>) -> FloatTensor<Self> {
        let (tensors, gradients) = gradients(batch);
        let like = &tensors[0];
        trace_op(OP, "square sums", 1, gradients.len());
        let (sums, count) = launched(optimizer::square_sums(&like.client, &gradients));
        new_tensor(like, sums, Shape::new([count]), DType::F32)
    }

    fn nvfp4_clip_factor(sums: FloatTensor<Self>, max_norm: f32) -> FloatTensor<Self> {
        let sums = into_contiguous(sums);
        let count = sums.meta.shape()[0];
        let made = optimizer::clip_factor(&sums.client, &sums.handle, count, max_norm);
        new_tensor(&sums, launched(made), Shape::new([2]), DType::F32)
    }

    fn nvfp4_set_words(out: IntTensor<Self>, words: [u32; 4]) -> IntTensor<Self> {
        let out = owned(OP, out);
        launched(graph::set_words(&out.client, &out.handle, words));
        out
    }

    fn nvfp4_write_maxima(out: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self> {
        // In place even if other owners exist: layers read this buffer.
        let [out, from] = [out, from].map(into_contiguous);
        let words = out.meta.shape().num_elements();
        launched(graph::copy_words(
            &out.client,
            &from.handle,
            &out.handle,
            words,
        ));
        out
    }

    fn nvfp4_adamw(
        batch: GradientBatch<Self>,
        parameters: AdamWBatch<Self>,
        schedule: IntTensor<Self>,
        factor: MaybeTensor<Self>,
        options: AdamWOptions,
    ) -> AdamWBatch<Self> {
        let (tensors, gradients) = gradients(batch);
        let like = &tensors[0];
        let client = &like.client;
        let (parameters, maxima) = parameters.into_parts();
        trace_op(OP, "adamw", 1, parameters.len());
        let schedule = into_contiguous(schedule);
        let factor = factor.into_option().map(into_contiguous);
        let moments = float_kind(float_dtype(parameters[0].first.dtype));
        let parameters: Vec<_> = parameters.into_iter().map(owned_parameter).collect();
        let updates: Vec<_> = parameters
            .iter()
            .zip(gradients)
            .map(|(parameter, gradient)| AdamWUpdate {
                gradient,
                weight: parameter.weight.handle.clone(),
                first: parameter.first.handle.clone(),
                second: parameter.second.handle.clone(),
                copy: match &parameter.copy {
                    MaybeTensor::Absent => None,
                    MaybeTensor::Present(copy) => {
                        Some((copy.handle.clone(), float_kind(float_dtype(copy.dtype))))
                    }
                },
                decay: parameter.decay,
                key: parameter.key,
            })
            .collect();
        let amax = options.amax.then(|| match maxima {
            Some(maxima) => {
                launched(optimizer::clear_amax(client, &maxima.handle, BATCH));
                maxima.handle
            }
            None => optimizer::no_amax(client, BATCH),
        });
        let spec = AdamWSpec {
            params: options.params,
            moments,
            schedule: &schedule.handle,
            factor: factor.as_ref().map(|factor| &factor.handle),
        };
        launched(optimizer::adamw(client, &spec, &updates, amax.as_ref()));
        let amax = amax.map(|amax| new_tensor(like, amax, Shape::new([BATCH]), DType::F32));
        AdamWBatch::new(parameters, amax)
    }
}
