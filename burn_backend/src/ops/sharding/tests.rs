//! Tests that the forms of a sharded layer's operands change no bit.

use std::thread;
use std::time::Duration;

use burn_core::tensor::{Device, Distribution, Tensor};
use nvfp4_formats::StoredForm;

use super::super::context::tests::{device, spec};
use super::super::{LinearContext, LinearSpec};
use super::{LinearSharding, ShardedDim};
use crate::functions::linear_of_rows;
use crate::parallel::ProcessGroup;

/// Tokens per rank: those of two ranks are not a multiple of 64.
const TOKENS: usize = 48;
/// Features per rank if sharded, and unsharded features.
const OWN: usize = 64;
const ALL: usize = 96;

/// Sharding of a layer over two ranks.
#[derive(Debug, Clone)]
struct Shares {
    dim: ShardedDim,
    sequence_parallel: bool,
    deterministic: bool,
    segments: Vec<usize>,
}

/// Input, weight and output gradient of a rank.
#[derive(Clone)]
struct Case {
    x: Tensor<2>,
    w: Tensor<2>,
    dy: Tensor<2>,
}

impl Case {
    fn new(shares: &Shares, tokens: usize, device: &Device) -> Self {
        let part = match shares.sequence_parallel {
            true => tokens,
            false => 2 * tokens,
        };
        let (x, w, dy) = match shares.dim {
            ShardedDim::Output => ([part, ALL], [ALL, OWN], [2 * tokens, OWN]),
            ShardedDim::Input => ([2 * tokens, OWN], [OWN, ALL], [part, ALL]),
        };
        let device = device.clone().autodiff();
        let normal = Distribution::Normal(0.0, 1.0);
        let random = |dims| {
            let dtype = super::super::context::tests::device().1;
            let tensor = Tensor::<2>::random(dims, normal, &device);
            tensor.cast(dtype).detach()
        };
        Self {
            x: random(x).require_grad(),
            w: random(w).require_grad(),
            dy: random(dy),
        }
    }

    /// Returns the bytes of `y`, `dx` and `dw`.
    fn run(
        &self,
        group: ProcessGroup,
        shares: &Shares,
        spec: LinearSpec,
        reads: StoredForm,
    ) -> [Vec<u8>; 3] {
        let context = LinearContext {
            reads: Some(reads),
            sharding: Some(LinearSharding {
                group,
                dim: shares.dim,
                segments: shares.segments.clone(),
                sequence_parallel: shares.sequence_parallel,
                deterministic: shares.deterministic,
            }),
            ..LinearContext::default()
        };
        let y = linear_of_rows(self.x.clone(), self.w.clone(), None, spec, context);
        let grads = (y.clone() * self.dy.clone()).sum().backward();
        let [dx, dw] = [&self.x, &self.w].map(|leaf| leaf.grad(&grads).expect("a gradient"));
        [y.inner(), dx, dw].map(|x| x.into_data().as_bytes().to_vec())
    }
}

/// Returns the bytes of both ranks, with operands in the forms for `reads`.
fn of_ranks(
    cases: &[Case; 2],
    shares: &Shares,
    spec: LinearSpec,
    reads: StoredForm,
) -> Vec<[Vec<u8>; 3]> {
    let groups = ProcessGroup::loopback(2, Duration::from_secs(300));
    thread::scope(|scope| {
        let ranks = groups.into_iter().zip(cases);
        let threads =
            ranks.map(|(group, case)| scope.spawn(move || case.run(group, shares, spec, reads)));
        let threads = threads.collect::<Vec<_>>();
        let results = threads.into_iter().map(|thread| thread.join());
        results.map(|result| result.expect("a rank")).collect()
    })
}

/// Rows and tiles give the same bits for all gathered or segmented operands.
fn forms_change_no_bit(preset: &str, tokens: usize, segments: &[usize]) {
    let ((device, _, _), spec) = (device(), spec(preset));
    for dim in [ShardedDim::Output, ShardedDim::Input] {
        for (sequence_parallel, deterministic) in [(false, false), (true, false), (true, true)] {
            let shares = Shares {
                dim,
                sequence_parallel,
                deterministic,
                segments: segments.to_vec(),
            };
            let cases = [(); 2].map(|()| Case::new(&shares, tokens, &device));
            let rows = of_ranks(&cases, &shares, spec, StoredForm::Rows);
            let tiles = of_ranks(&cases, &shares, spec, StoredForm::Tiles);
            assert!(rows == tiles, "{preset}, {shares:?}");
        }
    }
}

#[test]
fn one_segment() {
    forms_change_no_bit("nvidia", TOKENS, &[OWN]);
}

/// More segments than one kernel supports if random bits are drawn.
#[test]
fn four_segments() {
    forms_change_no_bit("nvidia", TOKENS, &[OWN / 4; 4]);
}

#[test]
fn mxfp8() {
    forms_change_no_bit("mxfp8", 32, &[OWN / 2; 2]);
}

#[test]
fn per_token() {
    forms_change_no_bit("per_token", TOKENS, &[OWN / 2; 2]);
}

#[test]
fn backward_from_the_forward() {
    forms_change_no_bit("fwd_nvfp4_bwd_mxfp8_dequantized", 32, &[OWN]);
}
