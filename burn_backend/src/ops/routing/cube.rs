//! Router by the CubeCL kernels.

use std::ops::Range;

use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_formats::reference::{BatchPart, EARLIER_UNITS, Router};
use nvfp4_kernels::moe::{self, DeviceRouted};

use super::super::cube::tensors::{launched, new_tensor};
use super::super::trace_op;
use super::{RoutedTensors, RoutingOps, SortedTensors, WindowTensors};

fn ints<const D: usize>(like: &CubeTensor, handle: Handle, shape: [usize; D]) -> CubeTensor {
    new_tensor(like, handle, Shape::new(shape), DType::I32)
}

impl RoutingOps for CubeBackend {
    fn nvfp4_route(logits: FloatTensor<Self>, router: Router) -> RoutedTensors<Self> {
        let logits = into_contiguous(logits);
        let tokens = logits.meta.shape()[0];
        trace_op("router", "forward", tokens, router.experts);
        let made = launched(moe::route(&logits.client, &logits.handle, tokens, router));
        let len = tokens * router.top_k + 2;
        RoutedTensors {
            weights: new_tensor(&logits, made.weights, Shape::new([len]), DType::F32),
            chosen: ints(&logits, made.chosen, [tokens, router.top_k]),
            counts: ints(&logits, made.counts, [router.experts]),
        }
    }

    fn nvfp4_route_backward(
        logits: FloatTensor<Self>,
        routed: RoutedTensors<Self>,
        grads: FloatTensor<Self>,
        router: Router,
    ) -> FloatTensor<Self> {
        let [logits, grads, weights] = [logits, grads, routed.weights].map(into_contiguous);
        let [chosen, counts] = [routed.chosen, routed.counts].map(into_contiguous);
        let tokens = logits.meta.shape()[0];
        trace_op("router", "backward", tokens, router.experts);
        let routed = DeviceRouted {
            weights: weights.handle,
            chosen: chosen.handle,
            counts: counts.handle,
        };
        let (client, handle) = (&logits.client, &logits.handle);
        let place = (tokens, router);
        let made = launched(moe::route_backward(
            client,
            handle,
            &routed,
            &grads.handle,
            place,
        ));
        let shape = Shape::new([tokens, router.experts]);
        new_tensor(&logits, made, shape, DType::F32)
    }

    fn nvfp4_router_losses(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let (logits, counts) = (into_contiguous(logits), into_contiguous(counts));
        trace_op("router_losses", "forward", part.tokens, router.experts);
        let (client, handle) = (&logits.client, &logits.handle);
        let place = (part, router);
        let made = launched(moe::router_losses(client, handle, &counts.handle, place));
        new_tensor(&logits, made, Shape::new([2]), DType::F32)
    }

    fn nvfp4_router_losses_backward(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        grads: FloatTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let [logits, grads] = [logits, grads].map(into_contiguous);
        let counts = into_contiguous(counts);
        trace_op("router_losses", "backward", part.tokens, router.experts);
        let made = launched(moe::router_losses_backward(
            &logits.client,
            &logits.handle,
            &counts.handle,
            &grads.handle,
            (part, router),
        ));
        let shape = Shape::new([part.tokens, router.experts]);
        new_tensor(&logits, made, shape, DType::F32)
    }

    fn nvfp4_sort_choices(chosen: IntTensor<Self>, experts: usize) -> SortedTensors<Self> {
        let chosen = into_contiguous(chosen);
        let slots = chosen.meta.shape().num_elements();
        trace_op("sort_choices", "", slots, experts);
        let (client, handle) = (&chosen.client, &chosen.handle);
        let made = launched(moe::sort_choices(client, handle, slots, experts));
        let offsets = Shape::new([experts + 1]);
        SortedTensors {
            choices: ints(&chosen, made.choices, [slots]),
            places: ints(&chosen, made.places, [slots]),
            offsets: new_tensor(&chosen, made.offsets, offsets, DType::U32),
            counts: ints(&chosen, made.counts, [experts]),
        }
    }

    fn nvfp4_sort_window(
        chosen: IntTensor<Self>,
        experts: usize,
        held: Range<usize>,
    ) -> WindowTensors<Self> {
        let chosen = into_contiguous(chosen);
        let slots = chosen.meta.shape().num_elements();
        trace_op("sort_choices", "window", slots, experts);
        let words = |handle, len| new_tensor(&chosen, handle, Shape::new([len]), DType::U32);
        let offsets = held.len() + 1;
        let (client, handle) = (&chosen.client, &chosen.handle);
        let made = launched(moe::sort_window(client, handle, slots, experts, held));
        WindowTensors {
            choices: ints(&chosen, made.choices, [slots]),
            places: ints(&chosen, made.places, [slots]),
            offsets: words(made.offsets, offsets),
            earlier: words(made.earlier, EARLIER_UNITS.len()),
            counts: ints(&chosen, made.counts, [experts]),
        }
    }
}
