//! Router by the oracle.

use std::ops::Range;

use burn_core::backend::{
    Flex, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{Element, TensorData};
use burn_flex::FlexTensor;
use nvfp4_formats::reference::{self, BatchPart, EARLIER_UNITS, Routed, Router, RouterGradients};

use super::{RoutedTensors, RoutingOps, SortedTensors, WindowTensors};
use crate::ops::trace_op;

fn tensor<T: Element, const D: usize>(values: Vec<T>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Converts numbers below 2^31 to `i32`.
fn ints<const D: usize>(values: Vec<u32>, shape: [usize; D]) -> FlexTensor {
    let values = values.into_iter().map(|x| x as i32);
    tensor(values.collect(), shape)
}

fn unsigned(tensor: &FlexTensor) -> Vec<u32> {
    let tensor = tensor.to_contiguous();
    tensor.storage::<i32>().iter().map(|&x| x as u32).collect()
}

impl RoutingOps for Flex {
    fn nvfp4_route(logits: FloatTensor<Self>, router: Router) -> RoutedTensors<Self> {
        let logits = logits.to_contiguous();
        trace_op("router", "forward", logits.shape()[0], router.experts);
        let made = reference::route(logits.storage(), router);
        let mut weights = made.weights;
        weights.extend([made.balance, made.z]);
        let len = weights.len();
        RoutedTensors {
            weights: tensor(weights, [len]),
            chosen: ints(made.chosen, [(len - 2) / router.top_k, router.top_k]),
            counts: ints(made.counts, [router.experts]),
        }
    }

    fn nvfp4_route_backward(
        logits: FloatTensor<Self>,
        routed: RoutedTensors<Self>,
        grads: FloatTensor<Self>,
        router: Router,
    ) -> FloatTensor<Self> {
        let [logits, grads, weights] =
            [logits, grads, routed.weights].map(|tensor| tensor.to_contiguous());
        let (weights, grads) = (weights.storage::<f32>(), grads.storage::<f32>());
        let slots = weights.len() - 2;
        trace_op("router", "backward", slots / router.top_k, router.experts);
        let routed = Routed {
            chosen: unsigned(&routed.chosen),
            weights: weights[..slots].to_vec(),
            counts: unsigned(&routed.counts),
            balance: weights[slots],
            z: weights[slots + 1],
        };
        let grads = RouterGradients {
            weights: &grads[..slots],
            balance: grads[slots],
            z: grads[slots + 1],
        };
        let made = reference::route_backward(logits.storage(), &routed, grads, router);
        let tokens = made.len() / router.experts;
        tensor(made, [tokens, router.experts])
    }

    fn nvfp4_router_losses(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let logits = logits.to_contiguous();
        trace_op("router_losses", "forward", part.tokens, router.experts);
        let place = (part, router);
        let made = reference::router_losses(logits.storage(), &unsigned(&counts), place);
        tensor(made.to_vec(), [2])
    }

    fn nvfp4_router_losses_backward(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        grads: FloatTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let [logits, grads] = [logits, grads].map(|tensor| tensor.to_contiguous());
        trace_op("router_losses", "backward", part.tokens, router.experts);
        let by = grads.storage::<f32>();
        let made = reference::router_losses_backward(
            logits.storage(),
            &unsigned(&counts),
            [by[0], by[1]],
            (part, router),
        );
        tensor(made, [part.tokens, router.experts])
    }

    fn nvfp4_sort_choices(chosen: IntTensor<Self>, experts: usize) -> SortedTensors<Self> {
        let chosen = unsigned(&chosen);
        trace_op("sort_choices", "", chosen.len(), experts);
        let made = reference::sort_choices(&chosen, experts);
        SortedTensors {
            choices: ints(made.choices, [chosen.len()]),
            places: ints(made.places, [chosen.len()]),
            offsets: tensor(made.offsets, [experts + 1]),
            counts: ints(made.counts, [experts]),
        }
    }

    fn nvfp4_sort_window(
        chosen: IntTensor<Self>,
        experts: usize,
        held: Range<usize>,
    ) -> WindowTensors<Self> {
        let chosen = unsigned(&chosen);
        trace_op("sort_choices", "window", chosen.len(), experts);
        let offsets = held.len() + 1;
        let made = reference::sort_window(&chosen, experts, held);
        WindowTensors {
            choices: ints(made.choices, [chosen.len()]),
            places: ints(made.places, [chosen.len()]),
            offsets: tensor(made.offsets, [offsets]),
            earlier: tensor(made.earlier, [EARLIER_UNITS.len()]),
            counts: ints(made.counts, [experts]),
        }
    }
}
