//! Mixtures with experts on several ranks, compared with one rank with the tokens of all ranks.

mod equal;
mod module;
mod order;
mod overlap;
mod sharded;
mod training;
mod window;

use std::ops::Range;

use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::nn::{ExpertDispatch, ExpertParallelMoe, MlpActivation, MoeOutput};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::recipe::OperandFormat;
use burn_nvfp4::{Nvfp4Moe, Nvfp4MoeConfig, Nvfp4Recipe, state};

use super::on_ranks;
use crate::support::{Matrix, device, float_sums_depend_on_rows, gaussian, values};

const WIDTH: usize = 32;
const HIDDEN: usize = 48;

/// A mixture, and the tokens of its ranks.
#[derive(Clone)]
struct Case {
    recipe: Nvfp4Recipe,
    experts: usize,
    top_k: usize,
    /// Number of tokens per rank.
    tokens: Vec<usize>,
    dtype: DType,
    shared: bool,
    /// Activation of all experts.
    activation: MlpActivation,
    /// Factors of the balance loss and the z-loss, if they are part of the loss.
    losses: Option<[f64; 2]>,
    /// Expert that all tokens choose.
    favourite: Option<usize>,
    /// Dispatch mode.
    dispatch: ExpertDispatch,
    /// True if exchanges overlap with kernels.
    overlap: bool,
    /// True if gate and up are recomputed.
    recompute: bool,
    /// True if autodiff recomputes what it can.
    checkpointing: bool,
}

impl Case {
    fn new(recipe: &Nvfp4Recipe, experts: usize, top_k: usize, tokens: &[usize]) -> Self {
        Self {
            recipe: recipe.clone(),
            experts,
            top_k,
            tokens: tokens.to_vec(),
            dtype: DType::F32,
            shared: false,
            activation: MlpActivation::SwiGlu,
            losses: None,
            favourite: None,
            dispatch: ExpertDispatch::AllToAll,
            overlap: false,
            recompute: false,
            checkpointing: false,
        }
    }

    /// Returns the device for autodiff.
    fn device(&self) -> Device {
        let device = device().autodiff();
        match self.checkpointing {
            true => device.gradient_checkpointing(),
            false => device,
        }
    }

    /// Returns this case in every dispatch mode that supports its token counts.
    fn dispatches(&self) -> Vec<Self> {
        let same = self.tokens.iter().all(|tokens| *tokens == self.tokens[0]);
        let ways = [ExpertDispatch::AllToAll, ExpertDispatch::AllGather].into_iter();
        let ways = ways.filter(|way| same || *way == ExpertDispatch::AllToAll);
        let with = |dispatch| Self {
            dispatch,
            ..self.clone()
        };
        ways.map(with).collect()
    }

    /// Returns true if outputs have the bits of one rank: sums of two terms do, in `f32`, without
    /// intermediate rounding.
    fn has_bits_of_one(&self) -> bool {
        let rounds = self.top_k > 2 || self.dtype != DType::F32 && self.top_k > 1;
        self.dispatch == ExpertDispatch::AllToAll || !rounds
    }

    /// Returns true if the gradients of experts have the bits of one rank.
    fn has_gradients_of_one(&self) -> bool {
        let wgrad = &self.recipe.wgrad;
        let in_floats = [&wgrad.x, &wgrad.dy]
            .iter()
            .any(|spec| spec.format == OperandFormat::HighPrecision);
        !(in_floats && self.dtype == DType::F32 && float_sums_depend_on_rows())
    }

    fn config(&self) -> Nvfp4MoeConfig {
        Nvfp4MoeConfig::new(WIDTH, HIDDEN, self.experts)
            .with_top_k(self.top_k)
            .with_shared_hidden(self.shared.then_some(64))
            .with_activation(self.activation)
            .with_recipe(self.recipe.clone())
    }

    /// Creates the mixture, with the same parameters for every caller.
    fn moe(&self, device: &Device) -> Nvfp4Moe {
        let mut moe = self.config().init(device).map(&mut Fixed(300));
        if let Some(expert) = self.favourite {
            // The first feature of all tokens is 1, and only this expert responds to it.
            let mut router = vec![0f32; WIDTH * self.experts];
            router[expert] = 50.0;
            let data = TensorData::new(router, [WIDTH, self.experts]);
            let weight = |_| Tensor::from_data(data, device).require_grad();
            moe.router.weight = moe.router.weight.map(weight);
        }
        self.recipe.apply(&moe).unwrap();
        state::assign_layer_ids(&moe);
        moe
    }

    /// Returns rows of the tokens of all ranks, with values from `seed`.
    fn rows(&self, rows: Range<usize>, seed: u64, device: &Device) -> Tensor<2> {
        let all: usize = self.tokens.iter().sum();
        let mut all = Matrix::gaussian(all, WIDTH, self.dtype, seed);
        if self.favourite.is_some() {
            all.values.iter_mut().step_by(WIDTH).for_each(|x| *x = 1.0);
        }
        let values = all.values[rows.start * WIDTH..rows.end * WIDTH].to_vec();
        Matrix::new(values, rows.len(), WIDTH, self.dtype).tensor(device)
    }

    /// Returns the range of a rank's tokens among those of all ranks.
    fn part(&self, rank: usize) -> Range<usize> {
        let start = self.tokens[..rank].iter().sum();
        start..start + self.tokens[rank]
    }

    /// Runs on one rank with the tokens of all ranks.
    fn on_one(&self) -> Found {
        let device = device().autodiff();
        let moe = self.moe(&device);
        let all = 0..self.tokens.iter().sum();
        let weights = Weights {
            router: moe.router.weight.val(),
            gate_up: moe.gate_up.weight.val(),
            down: moe.down.weight.val(),
            shared: (moe.shared.as_ref()).map(|shared| shared.down.weight.val()),
        };
        self.measure(all, 1, weights, |x| moe.forward(x))
    }

    /// Runs on as many ranks as `tokens` has entries.
    fn on_ranks(&self) -> Vec<Found> {
        on_ranks(self.tokens.len(), |group| self.on_rank(&group))
    }

    /// Returns a rank's shard of the mixture.
    fn part_of_moe(&self, device: &Device, group: &ProcessGroup) -> ExpertParallelMoe {
        let moe = ExpertParallelMoe::from_moe(self.moe(device), group);
        let moe = moe.with_dispatch(self.dispatch);
        moe.with_overlap(self.overlap)
            .with_recompute(self.recompute)
    }

    fn on_rank(&self, group: &ProcessGroup) -> Found {
        let moe = self.part_of_moe(&self.device(), group);
        let weights = Weights {
            router: moe.router.weight.val(),
            gate_up: moe.gate_up.weight.val(),
            down: moe.down.weight.val(),
            shared: (moe.shared.as_ref()).map(|shared| shared.down.weight.val()),
        };
        let part = self.part(group.rank());
        self.measure(part, group.size(), weights, |x| moe.forward(x))
    }

    /// Runs forward and backward on these tokens; each of `ranks` has a share of the losses.
    fn measure(
        &self,
        tokens: Range<usize>,
        ranks: usize,
        weights: Weights,
        forward: impl Fn(Tensor<2>) -> MoeOutput<2>,
    ) -> Found {
        let device = self.device();
        let x = self.rows(tokens.clone(), 5, &device).require_grad();
        let dy = self.rows(tokens, 6, &device);
        let out = forward(x.clone());
        let mut loss = (out.output.clone() * dy).cast(DType::F32).sum();
        if let Some([balance, z]) = self.losses {
            let [balance, z] = [balance, z].map(|factor| factor / ranks as f64);
            loss = loss + out.balance_loss.clone() * balance + out.z_loss.clone() * z;
        }
        let gradients = loss.backward();
        Found {
            y: values(out.output),
            dx: values(x.grad(&gradients).unwrap()),
            router: values(weights.router.grad(&gradients).unwrap()),
            gate_up: values(weights.gate_up.grad(&gradients).unwrap()),
            down: values(weights.down.grad(&gradients).unwrap()),
            shared: weights
                .shared
                .map_or(vec![], |weight| values(weight.grad(&gradients).unwrap())),
            losses: [out.balance_loss, out.z_loss].map(|loss| values(loss)[0]),
            counts: out.counts.into_data().iter().collect(),
        }
    }
}

struct Weights {
    router: Tensor<2>,
    gate_up: Tensor<3>,
    down: Tensor<3>,
    shared: Option<Tensor<2>>,
}

/// Results of a forward and a backward.
#[derive(PartialEq)]
struct Found {
    y: Vec<f32>,
    dx: Vec<f32>,
    /// Gradients.
    router: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    shared: Vec<f32>,
    /// Balance loss and z-loss.
    losses: [f32; 2],
    counts: Vec<i64>,
}

/// Replaces parameters by normal values, beginning with this seed.
struct Fixed(u64);

impl ModuleMapper for Fixed {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        param.map(|tensor| {
            let dims = tensor.dims();
            let values = gaussian(dims.iter().product(), self.0).into_iter();
            let values: Vec<f32> = values.map(|value| 0.2 * value).collect();
            Tensor::from_data(TensorData::new(values, dims), &tensor.device()).require_grad()
        })
    }
}

/// Concatenates the values of the ranks.
fn joined(found: &[Found], of: impl Fn(&Found) -> &Vec<f32>) -> Vec<f32> {
    found.iter().flat_map(|found| of(found).clone()).collect()
}

/// Sums the values of the ranks.
fn summed(found: &[Found], of: impl Fn(&Found) -> &Vec<f32>) -> Vec<f32> {
    let mut sum = of(&found[0]).clone();
    for found in &found[1..] {
        sum.iter_mut().zip(of(found)).for_each(|(a, b)| *a += b);
    }
    sum
}

/// Returns the largest difference relative to the largest magnitude.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1e-30f32, |max, x| max.max(x.abs()));
    let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    errors.fold(0f32, f32::max) / scale
}
