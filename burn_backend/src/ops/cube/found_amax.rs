//! Amax values that a kernel computed of its output, kept until the output is quantized.
//!
//! A norm or an attention and the next layer are separate operations, and so are their backwards;
//! autodiff and fusion pass only tensors between them. Therefore the amax values are kept here,
//! keyed by the memory of the tensor. Memory that is kept here is neither freed nor, because it has
//! two owners, written in place: a matching address implies matching contents.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cubecl::server::Handle;
use nvfp4_formats::AmaxGranularity;
use nvfp4_kernels::quantize::{AmaxRequest, Amaxes};
use nvfp4_kernels::tensor::{Groups, Matrix};

use super::super::spec::OutputAmax;

/// Maximum number of matrices whose memory is kept: an entry that is never used is evicted by later
/// ones. The layer after a norm follows it immediately.
const MOST: usize = 4;

/// Amax values of a matrix, in groups of rows.
struct Found {
    of: Matrix,
    groups: Groups,
    request: AmaxRequest,
    amax: Amaxes,
}

static FOUND: Mutex<VecDeque<Found>> = Mutex::new(VecDeque::new());

fn found() -> MutexGuard<'static, VecDeque<Found>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the request to a kernel.
pub(in crate::ops) fn request(amax: Option<OutputAmax>) -> AmaxRequest {
    AmaxRequest {
        rows: amax.map(|amax| amax.rows),
        cols: amax.and_then(|amax| amax.cols),
    }
}

/// Keeps the amax values of `matrix` in `groups` that were computed by `request`, unless the
/// request is empty.
pub(in crate::ops) fn remember(
    (matrix, groups): (&Matrix, &Groups),
    request: AmaxRequest,
    amax: Amaxes,
) {
    if request == AmaxRequest::default() {
        return;
    }
    let mut found = found();
    found.truncate(MOST - 1);
    found.push_front(Found {
        of: matrix.clone(),
        groups: groups.clone(),
        request,
        amax,
    });
}

/// Removes and returns the amax values of `matrix` in `groups` for `request`, if they are known.
pub(super) fn take((matrix, groups): (&Matrix, &Groups), request: &AmaxRequest) -> Option<Amaxes> {
    if *request == AmaxRequest::default() {
        return None;
    }
    let mut found = found();
    let mut of_matrix = found.iter().map(|one| is_same(&one.of, matrix));
    let place = of_matrix.position(|same| same)?;
    let of = found.remove(place)?;
    // One amax per row does not depend on the groups.
    let is_same = is_of(&of.groups, groups);
    let serves_rows = is_same || request.rows == Some(AmaxGranularity::PerRow);
    let has_rows = request.rows.is_none() || serves_rows && request.rows == of.request.rows;
    let has_cols = request.cols.is_none() || is_same && request.cols == of.request.cols;
    if !has_rows || !has_cols {
        return None;
    }
    #[cfg(test)]
    tests::note_taken(matrix);
    Some(Amaxes {
        rows: request.rows.and(of.amax.rows),
        cols: request.cols.and(of.amax.cols),
    })
}

fn is_same(a: &Matrix, b: &Matrix) -> bool {
    let shape = |matrix: &Matrix| (matrix.rows, matrix.cols, matrix.dtype);
    is_in_place(&a.handle, &b.handle) && shape(a) == shape(b)
}

fn is_of(a: &Groups, b: &Groups) -> bool {
    match (a, b) {
        (Groups::One, Groups::One) => true,
        (Groups::Batch(a), Groups::Batch(b)) => a == b,
        (
            Groups::Offsets { offsets, count },
            Groups::Offsets {
                offsets: others,
                count: other,
            },
        ) => count == other && is_in_place(offsets, others),
        _ => false,
    }
}

/// Returns true if both begin at the same place of the same memory.
fn is_in_place(a: &Handle, b: &Handle) -> bool {
    let place = |handle: &Handle| {
        let start = handle.offset_start.unwrap_or(0);
        (handle.memory.descriptor().id, handle.service, start)
    };
    place(a) == place(b)
}

#[cfg(test)]
mod tests {
    use burn_core::module::Param;
    use burn_core::tensor::{Device, Distribution, Int, Tensor, TensorData};

    use super::super::super::context::tests::device;
    use super::*;
    use crate::attention::{AttentionParams, Sequences, try_attention_qkv_with_amax};
    use crate::nn::tensor_parallel::{ColumnParallelLinear, TensorParallel};
    use crate::nn::{
        ExpertDispatch, ExpertParallelMoe, LayerNormConfig, Neighbours, ResidualStream, RmsNorm,
        RmsNormConfig, Routing,
    };
    use crate::parallel::ProcessGroup;
    use crate::{
        Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig, Nvfp4Linear, Nvfp4LinearConfig,
        Nvfp4MoeConfig, Nvfp4Recipe,
    };

    /// Rows and columns of the matrices whose values were taken.
    static TAKEN: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

    pub(super) fn note_taken(matrix: &Matrix) {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        taken.push((matrix.rows, matrix.cols));
    }

    fn was_taken(shape: (usize, usize)) -> bool {
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        taken.contains(&shape)
    }

    fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
        tensor.into_data().as_bytes().to_vec()
    }

    fn layer(recipe: &str, width: usize, device: &Device) -> Nvfp4Linear {
        let recipe = Nvfp4Recipe::preset(recipe).expect("a preset");
        let config = Nvfp4LinearConfig::new(width, 64).with_recipe(recipe);
        config.with_layer(Some(1)).with_bias(false).init(device)
    }

    /// Returns the sum, the output of the layer and both gradients, for a norm followed by a layer.
    /// If `finds`, the norm passes its amax values to the layer.
    fn results(
        finds: bool,
        (norm, layer): (&RmsNorm, Nvfp4Linear),
        parts: [Tensor<3>; 2],
    ) -> [Vec<u8>; 4] {
        let [x, residual] = parts.map(|part| part.require_grad());
        let stream = ResidualStream {
            sum: residual,
            pending: Some(x.clone()),
        };
        let neighbours = Neighbours {
            before: None,
            next: finds.then_some(&layer),
        };
        let made = norm.try_forward_stream_for(neighbours, stream);
        let (sum, normed) = made.expect("it fits");
        let y = layer.forward(normed);
        let grads = y.clone().powi_scalar(2).sum().backward();
        let of_weight = layer.weight.val().grad(&grads).expect("a gradient");
        let of_x = x.grad(&grads).expect("a gradient");
        [
            bits(sum.inner()),
            bits(y.inner()),
            bits(of_weight),
            bits(of_x),
        ]
    }

    /// A layer that quantizes with the amax values of the preceding norm gives the same bits as one
    /// that computes them.
    #[test]
    fn a_layer_takes_what_the_norm_before_it_found() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        let recipes = [
            ("nvidia", 48, true),
            ("nvidia_4over6", 80, true),
            ("quartet2", 112, true),
            ("per_token", 144, true),
        ];
        for (recipe, width, takes) in recipes {
            let mut norm = RmsNormConfig::new(width).init(&device);
            let gain = Tensor::random([width], Distribution::Normal(1.0, 0.2), &device);
            norm.gamma = Param::from_tensor(gain);
            let random = || {
                let values = Tensor::<3>::random([2, 35, width], Distribution::Default, &device);
                values.cast(dtype).detach()
            };
            let parts = [random(), random()];
            let layer = layer(recipe, width, &device);
            let weight = layer.weight.val().into_data();
            let [with, without] = [true, false].map(|finds| {
                let mut layer = self::layer(recipe, width, &device);
                layer.weight = Param::from_data(weight.clone(), &device);
                results(finds, (&norm, layer), parts.clone())
            });
            assert!(with == without, "{recipe}");
            // Flex does not keep amax values.
            let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
            assert_eq!(was_taken((70, width)), takes && is_cube, "{recipe}");
        }
    }

    /// The next layer may be behind a layer norm, and be a rank's shard with a rank's tokens.
    #[test]
    fn a_shard_takes_what_the_layer_norm_before_it_found() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
        let tokens = 48;
        for (recipe, width) in [("nvidia", 176), ("per_token", 208)] {
            let random = Tensor::<2>::random([tokens, width], Distribution::Default, &device);
            let x = random.into_data();
            let weight = layer(recipe, width, &device).weight.val().into_data();
            // Ranks share no tensors.
            let run = |finds: bool, parallel: &TensorParallel| {
                let norm = LayerNormConfig::new(width).init(&device);
                let x = Tensor::<2>::from_data(x.clone(), &device).cast(dtype);
                let x = x.detach().require_grad();
                let mut layer = layer(recipe, width, &device);
                layer.weight = Param::from_data(weight.clone(), &device);
                let layer = ColumnParallelLinear::from_linear(layer, parallel).expect("it fits");
                let next = finds.then_some(&layer.linear);
                let neighbours = Neighbours { before: None, next };
                let stream = x.clone().reshape([1, tokens, width]).into();
                let made = norm.try_forward_stream_for(neighbours, stream);
                let (_, normed) = made.expect("it fits");
                let y = layer.forward(normed.reshape([tokens, width]));
                let grads = y.clone().powi_scalar(2).sum().backward();
                let of_weight = layer.linear.weight.val().grad(&grads).expect("a gradient");
                let of_x = x.grad(&grads).expect("a gradient");
                [bits(y.inner()), bits(of_weight), bits(of_x)]
            };
            std::thread::scope(|scope| {
                let groups = ProcessGroup::loopback(2, std::time::Duration::from_secs(120));
                for group in groups {
                    let run = &run;
                    scope.spawn(move || {
                        let parallel = TensorParallel::new(group).with_sequence_parallel(true);
                        let [with, without] = [true, false].map(|finds| run(finds, &parallel));
                        assert!(with == without, "{recipe}");
                    });
                }
            });
            assert_eq!(was_taken((tokens, width)), is_cube, "{recipe}");
        }
    }

    /// Returns the gradients of the input and the weight of a layer followed by a norm. If `finds`,
    /// the norm computes the amax values with which the layer quantizes its gradient.
    fn behind(finds: bool, (norm, layer): (&RmsNorm, Nvfp4Linear), x: Tensor<2>) -> [Vec<u8>; 2] {
        let x = x.require_grad();
        let [tokens, _] = x.dims();
        let y = layer.forward(x.clone());
        let [_, width] = y.dims();
        let y = y.reshape([1, tokens, width]);
        let stream = ResidualStream {
            sum: y.clone().detach(),
            pending: Some(y),
        };
        let neighbours = Neighbours {
            before: finds.then_some(&layer),
            next: None,
        };
        let made = norm.try_forward_stream_for(neighbours, stream);
        let (sum, normed) = made.expect("it fits");
        let grads = (normed.powi_scalar(2) + sum).sum().backward();
        let of_weight = layer.weight.val().grad(&grads).expect("a gradient");
        [bits(x.grad(&grads).expect("a gradient")), bits(of_weight)]
    }

    /// The gradient of a norm is quantized with the amax values that the norm computed.
    #[test]
    fn a_layer_takes_what_the_norm_behind_it_found() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        // The outputs of `layer` have 64 columns.
        let norm = RmsNormConfig::new(64).init(&device);
        for (recipe, tokens, takes) in [
            ("nvidia", 48, true),
            ("nvidia_headroom", 4224, true),
            ("per_token", 112, true),
            ("per_token", 4240, true),
            ("quartet2", 80, false),
        ] {
            let random = Tensor::<2>::random([tokens, 32], Distribution::Default, &device);
            let x = random.cast(dtype).detach();
            let weight = layer(recipe, 32, &device).weight.val().into_data();
            let [with, without] = [true, false].map(|finds| {
                let mut layer = self::layer(recipe, 32, &device);
                layer.weight = Param::from_data(weight.clone(), &device);
                behind(finds, (&norm, layer), x.clone())
            });
            assert!(with == without, "{recipe}");
            let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
            assert_eq!(was_taken((tokens, 64)), takes && is_cube, "{recipe}");
        }
    }

    /// Returns the output of the layer, its gradient and that of the projection, for an attention
    /// followed by a layer. If `finds`, the attention passes its amax values to the layer.
    fn attended(finds: bool, layer: Nvfp4Linear, qkv: Tensor<2>) -> [Vec<u8>; 3] {
        let qkv = qkv.require_grad();
        let [_, width] = qkv.dims();
        let params = AttentionParams::causal(width / 3);
        let sequences = Sequences::Equal(2);
        let amax = finds.then(|| layer.next_spec().input_amax(true)).flatten();
        let attention = try_attention_qkv_with_amax;
        let mixed = attention(qkv.clone(), [1, 1], &sequences, None, params, amax);
        let y = layer.forward(mixed.expect("it fits"));
        let grads = y.clone().powi_scalar(2).sum().backward();
        let of_weight = layer.weight.val().grad(&grads).expect("a gradient");
        let of_qkv = qkv.grad(&grads).expect("a gradient");
        [bits(y.inner()), bits(of_weight), bits(of_qkv)]
    }

    /// A layer that quantizes with the amax values of the preceding attention gives the same bits
    /// as one that computes them.
    #[test]
    fn a_layer_takes_what_the_attention_before_it_found() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        for (recipe, tokens, takes) in [("nvidia", 32, true), ("per_token", 96, true)] {
            let random = Tensor::<2>::random([tokens, 192], Distribution::Default, &device);
            let qkv = random.cast(dtype).detach();
            let layer = layer(recipe, 64, &device);
            let weight = layer.weight.val().into_data();
            let [with, without] = [true, false].map(|finds| {
                let mut layer = self::layer(recipe, 64, &device);
                layer.weight = Param::from_data(weight.clone(), &device);
                attended(finds, layer, qkv.clone())
            });
            assert!(with == without, "{recipe}");
            let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
            assert_eq!(was_taken((tokens, 64)), takes && is_cube, "{recipe}");
        }
    }

    fn experts(recipe: &str, width: usize, device: &Device) -> Nvfp4GroupedLinear {
        let recipe = Nvfp4Recipe::preset(recipe).expect("a preset");
        let config = Nvfp4GroupedLinearConfig::new(3, width, 64).with_recipe(recipe);
        config.with_layer(Some(1)).init(device)
    }

    /// Experts that quantize with the amax values of the sorting of their tokens give the same bits
    /// as those that compute them. The second expert has no tokens.
    #[test]
    fn experts_take_what_the_sorting_found() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
        let (tokens, top_k) = (37, 2);
        let chosen = [0i32, 2].repeat(tokens);
        let chosen = TensorData::new(chosen, [tokens, top_k]);
        let routing = Tensor::<2, Int>::from_data(chosen, &device.clone().inner());
        let routing = Routing::try_new(routing, 3).expect("it fits");
        // Experts with MXFP8 have no amax.
        for (recipe, width, takes) in [
            ("nvidia", 240, true),
            ("nvidia_4over6", 272, true),
            ("per_token", 304, true),
            ("quartet2", 336, true),
            ("fwd_nvfp4_bwd_mxfp8", 368, true),
            ("mxfp8", 400, false),
        ] {
            let shape = [tokens, width];
            let random = Tensor::<2>::random(shape, Distribution::Default, &device);
            let x = random.cast(dtype).detach();
            let weight = experts(recipe, width, &device).weight.val().into_data();
            let [with, without] = [true, false].map(|finds| {
                let mut layer = experts(recipe, width, &device);
                layer.weight = Param::from_data(weight.clone(), &device);
                let x = x.clone().require_grad();
                let sorted = match finds {
                    true => routing.dispatch_for(&layer, x.clone()),
                    false => routing.dispatch(x.clone()),
                };
                let y = layer.forward(sorted, routing.experts());
                let grads = y.clone().powi_scalar(2).sum().backward();
                let of_weight = layer.weight.val().grad(&grads).expect("a gradient");
                let of_x = x.grad(&grads).expect("a gradient");
                [bits(y.inner()), bits(of_weight), bits(of_x)]
            });
            assert!(with == without, "{recipe}");
            let shape = (tokens * top_k, width);
            assert_eq!(was_taken(shape), takes && is_cube, "{recipe}");
        }
    }

    /// The experts of a mixture do, on one rank and on two, by both dispatch modes.
    #[test]
    fn mixtures_find_the_amax_where_they_sort() {
        let (device, dtype, _) = device();
        let device = device.autodiff();
        let test_device = std::env::var("NVFP4_TEST_DEVICE");
        let is_cube = matches!(test_device.as_deref(), Ok("cpu" | "cuda"));
        // All tokens choose both experts, so a rank has as many rows as there are tokens.
        let config = |width| Nvfp4MoeConfig::new(width, 32, 2).with_top_k(2);
        let tokens = |count, width| {
            let x = Tensor::<2>::random([count, width], Distribution::Default, &device);
            x.cast(dtype).detach().require_grad()
        };
        let step = |output: Tensor<2>| output.powi_scalar(2).sum().backward();
        step(config(432).init(&device).forward(tokens(11, 432)).output);
        assert_eq!(was_taken((22, 432)), is_cube);
        for (dispatch, width, rows) in [
            (ExpertDispatch::AllToAll, 464, 22),
            (ExpertDispatch::AllGather, 496, 44),
        ] {
            std::thread::scope(|scope| {
                let groups = ProcessGroup::loopback(2, std::time::Duration::from_secs(120));
                for group in groups {
                    let (device, config, tokens, step) = (&device, &config, &tokens, &step);
                    scope.spawn(move || {
                        let moe = ExpertParallelMoe::new(&config(width), device, &group);
                        let moe = moe.with_dispatch(dispatch);
                        step(moe.forward(tokens(11, width)).output);
                    });
                }
            });
            assert_eq!(was_taken((rows, width)), is_cube, "{dispatch:?}");
        }
    }
}
