//! Measures the cost of a training step: time, memory and kernels.
//!
//! A step is measured in several ways, one after the other, because each would disturb the others:
//! its time, over rounds of steps between two synchronizations; on request, its time when telemetry
//! samples it; its memory, by polling; and each kernel launch, timed on the device. Memory and
//! kernels are known only on CubeCL runtimes, which report them.

use std::marker::PhantomData;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_nvfp4::telemetry::Telemetry;
use serde::Serialize;

use crate::config::{RecipeName, RunConfig};
use crate::data::Batch;
use crate::groups::ParallelGroups;
use crate::memory::bytes::budget;
use crate::model::LanguageModel;
use crate::optim::Optimizer;
use crate::train::rank::{Rank, Watched};
use crate::train::{GraphInput, StepInput, bytes};

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) mod observe;

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
pub(crate) mod observe {
    use burn::tensor::Device;

    use super::Kernel;

    pub(crate) fn step(_: &Device, _: impl FnMut()) -> (Option<u64>, Vec<Kernel>) {
        (None, Vec::new())
    }

    pub(crate) fn kept<T>(_: &Device, _: impl FnOnce() -> T) -> Option<u64> {
        None
    }

    pub(crate) fn reserved(_: &Device) -> Option<u64> {
        None
    }

    pub(crate) fn release(_: &Device) {}
}

/// Number of steps and rounds to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Steps before the first measurement, which compile kernels and fill memory pools; at least 1.
    pub warm: usize,
    /// Rounds of steps, each measured separately; at least 1.
    pub rounds: usize,
    /// Steps per round; at least 1.
    pub steps: usize,
}

impl Effort {
    /// Checks the numbers.
    ///
    /// # Errors
    /// Returns an error that names a number that is zero.
    pub(crate) fn check(self) -> Result<()> {
        for (name, value) in [
            ("warm", self.warm),
            ("rounds", self.rounds),
            ("steps", self.steps),
        ] {
            ensure!(value > 0, "{name} is 0, but it must be at least 1");
        }
        Ok(())
    }
}

/// Cost of a training step with one recipe.
#[derive(Debug, Clone, Serialize)]
pub struct Cost {
    /// Tokens per step; bytes of text for models over bytes.
    pub tokens: usize,
    /// Seconds to build the model; weights are drawn on the host.
    pub built: f64,
    /// Seconds of the steps before the first round, mostly kernel compilation.
    pub warmed: f64,
    /// Mean seconds per step, for each round.
    pub seconds: Vec<f64>,
    /// Mean seconds per step sampled by telemetry, for each round; empty without telemetry.
    pub sampled: Vec<f64>,
    /// Number of operands that telemetry samples in such a step.
    pub sampled_operands: usize,
    /// Device memory of a step, if known.
    pub memory: Option<Memory>,
    /// Kernels of one step, most expensive first; empty if launches are not reported.
    pub kernels: Vec<Kernel>,
}

/// Device memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Peak of all tensors: weights, optimizer state, tensors saved for backward, and intermediate
    /// results.
    pub peak: u64,
    /// Bytes held by the memory pools after the measured rounds.
    pub reserved: u64,
    /// State saved for backward: packed operands, inputs of norms, attention and activations, and
    /// the gradients of the head. Excludes the quantized weights, which persist across steps.
    pub kept: u64,
}

/// All launches of one kernel in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kernel {
    /// Name reported by the kernel.
    pub name: String,
    /// Purpose of the kernel.
    pub class: KernelClass,
    /// Number of launches.
    pub launches: usize,
    /// Device seconds of all launches.
    pub seconds: f64,
}

/// Purpose of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelClass {
    /// GEMMs of linear layers, from nvfp4-kernels.
    Gemm,
    /// Quantization: NVFP4, MS-EDEN, MXFP8.
    Quantize,
    /// Amax values for global scales.
    Amax,
    /// Dequantization, and operands materialized in a GEMM kernel's layout.
    Dequantize,
    /// Attention kernels of nvfp4-kernels: scores, softmax, weighted sums, rotary embedding.
    Attention,
    /// GEMMs of Burn: attention outside the kernels above, head, embedding, and Burn's own layers.
    BurnGemm,
    /// Sums, means and other reductions.
    Reduce,
    /// Elementwise computation, fused or not.
    Elementwise,
    /// Data movement only.
    Move,
    /// Everything else.
    Other,
}

impl KernelClass {
    /// All classes, in the order of a table.
    pub const ALL: [Self; 10] = [
        Self::Gemm,
        Self::Quantize,
        Self::Amax,
        Self::Dequantize,
        Self::Attention,
        Self::BurnGemm,
        Self::Reduce,
        Self::Elementwise,
        Self::Move,
        Self::Other,
    ];

    /// Returns the name for tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gemm => "GEMM",
            Self::Quantize => "quantize",
            Self::Amax => "amax",
            Self::Dequantize => "dequantize",
            Self::Attention => "attention",
            Self::BurnGemm => "Burn's GEMM",
            Self::Reduce => "reduce",
            Self::Elementwise => "elementwise",
            Self::Move => "move",
            Self::Other => "other",
        }
    }

    /// Returns the class of the kernel called `name`, the path of its type.
    pub fn of(name: &str) -> Self {
        // The first match counts, because a name can contain several of these words.
        const OURS: [(&str, KernelClass); 19] = [
            ("::attention::", KernelClass::Attention),
            ("amax", KernelClass::Amax),
            ("zero_kernel", KernelClass::Amax),
            ("rstd", KernelClass::Reduce),
            ("segment_sum", KernelClass::Reduce),
            ("norm_parts", KernelClass::Reduce),
            ("::norm::", KernelClass::Elementwise),
            ("::activation::", KernelClass::Elementwise),
            // SwiGLU and its gradients, not quantized.
            ("prologue_kernel", KernelClass::Elementwise),
            ("dequant", KernelClass::Dequantize),
            ("transpose", KernelClass::Move),
            ("::materialize", KernelClass::Dequantize),
            ("::w4a16_arrange", KernelClass::Dequantize),
            ("::gemm::", KernelClass::Gemm),
            // Must come before the name of the module that contains it.
            ("swizzle", KernelClass::Move),
            ("offset", KernelClass::Move),
            ("padding", KernelClass::Move),
            ("::moe::", KernelClass::Move),
            ("::quantize", KernelClass::Quantize),
        ];
        const BURNS: [(&str, KernelClass); 17] = [
            ("matmul", KernelClass::BurnGemm),
            ("gemm", KernelClass::BurnGemm),
            ("gemv", KernelClass::BurnGemm),
            ("attention", KernelClass::BurnGemm),
            ("reduce", KernelClass::Reduce),
            ("cumulative", KernelClass::Reduce),
            ("sort", KernelClass::Reduce),
            ("elemwise", KernelClass::Elementwise),
            ("::index::", KernelClass::Move),
            ("contiguous", KernelClass::Move),
            ("copy", KernelClass::Move),
            ("unary", KernelClass::Elementwise),
            ("::binary::", KernelClass::Elementwise),
            ("::cast::", KernelClass::Elementwise),
            ("::mask::", KernelClass::Elementwise),
            ("::comparison::", KernelClass::Elementwise),
            ("full_kernel", KernelClass::Elementwise),
        ];
        let find = |classes: &[(&str, Self)], name: &str| {
            let found = classes.iter().find(|(word, _)| name.contains(word));
            found.map_or(Self::Other, |(_, class)| *class)
        };
        match name.contains("nvfp4_kernels::") {
            true => find(&OURS, name),
            false => find(&BURNS, &name.to_lowercase()),
        }
    }
}

impl Cost {
    /// Returns the seconds of a step: the median of the rounds.
    pub fn median(&self) -> f64 {
        median(&self.seconds).expect("there is a round")
    }

    /// Returns the seconds of a step sampled by telemetry: the median of the rounds, if any.
    pub fn median_sampled(&self) -> Option<f64> {
        median(&self.sampled)
    }

    /// Returns the relative increase of the mean step time if telemetry samples one step in
    /// `every`.
    pub fn telemetry_share(&self, every: u64) -> Option<f64> {
        let more = self.median_sampled()? - self.median();
        Some(more / (every as f64 * self.median()))
    }

    /// Returns the [`tokens`](Self::tokens) per second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.median()
    }

    /// Returns the seconds that a step spends in kernels of a class.
    pub fn of(&self, class: KernelClass) -> f64 {
        let own = self.kernels.iter().filter(|kernel| kernel.class == class);
        own.fold(0.0, |sum, kernel| sum + kernel.seconds)
    }
}

/// Returns the median, or the larger of the two middle values; none if `values` is empty.
fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// Lock on the device during a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLock {
    /// Shared with other processes, while the model is built and warms up.
    Shared,
    /// Exclusive, while steps are measured.
    Exclusive,
}

/// Measures the model `M` of the run `config` with `recipe` on `device`, trained on random bytes.
/// If the run has telemetry, also measures steps that it samples.
///
/// `lock` returns a guard that locks the device until it is dropped: shared before the model is
/// built, exclusive before the measurement. Processes thus compile at the same time and measure one
/// after the other.
///
/// # Errors
/// Returns an error if a count of `effort` is zero, the configuration does not fit the device, the
/// device runs out of memory, or `lock` fails.
pub fn measure<M: LanguageModel, T>(
    config: &RunConfig,
    recipe: &RecipeName,
    device: &Device,
    effort: Effort,
    lock: impl Fn(DeviceLock) -> Result<T>,
) -> Result<Cost> {
    effort.check()?;
    config.check()?;
    config.check_ranks(1)?;
    let budget = budget(config, recipe);
    budget.check(device)?;
    let training = ByteTraining::<M> {
        config,
        recipe,
        model: PhantomData,
    };
    budget.guard(device, || measure_steps(&training, device, effort, lock))
}

/// Training of bytes, of the model `M`.
struct ByteTraining<'a, M> {
    config: &'a RunConfig,
    recipe: &'a RecipeName,
    model: PhantomData<M>,
}

impl<M: LanguageModel> Training for ByteTraining<'_, M> {
    type Model = M;
    type Batch = bytes::Batch;

    fn recipe(&self) -> &RecipeName {
        self.recipe
    }

    fn tokens(&self) -> usize {
        self.config.batch * self.config.model.context
    }

    fn lr(&self) -> f64 {
        self.config.lr
    }

    fn has_telemetry(&self) -> bool {
        self.config.telemetry_every > 0
    }

    fn build(&self, device: &Device) -> Result<Rank<M, Self::Batch>> {
        let config = self.config;
        let model = M::build(config, self.recipe, device)?;
        let model = M::part_of(model, config, &ParallelGroups::single())?;
        let mut rank = Rank::new(device.clone(), model, Optimizer::new(config)?);
        if config.uncaptured().is_none() {
            rank.begin_graph()?;
        }
        Ok(rank)
    }

    fn input(&self, number: u64, device: &Device) -> Result<StepInput<Self::Batch>> {
        let (config, context) = (self.config, self.config.model.context);
        let batch = Batch::random(config.seed, number, config.batch, context);
        Ok(bytes::step_input([batch], device))
    }

    fn loss(&self, model: &M, batch: &Self::Batch, scale: Option<&Tensor<1>>) -> Result<Tensor<1>> {
        bytes::loss(model, batch, scale)
    }
}

/// Training whose steps are measured.
pub(crate) trait Training {
    /// Model.
    type Model: Module;
    /// Tensors of one forward pass.
    type Batch: GraphInput;

    /// Returns the recipe, for messages.
    fn recipe(&self) -> &RecipeName;

    /// Returns the number of tokens per step.
    fn tokens(&self) -> usize;

    /// Returns the learning rate.
    fn lr(&self) -> f64;

    /// Returns true if steps that telemetry samples are measured, too.
    fn has_telemetry(&self) -> bool {
        false
    }

    /// Builds model and optimizer on `device`, an autodiff device. Their steps are captured as a
    /// graph if those of a run are.
    ///
    /// # Errors
    /// Returns an error if the configuration does not fit the device.
    fn build(&self, device: &Device) -> Result<Rank<Self::Model, Self::Batch>>;

    /// Returns the random input of step `number`.
    ///
    /// # Errors
    /// Returns an error if the input does not fit the device.
    fn input(&self, number: u64, device: &Device) -> Result<StepInput<Self::Batch>>;

    /// Returns the loss of a batch, given the [scale](StepInput::scale) of its step.
    ///
    /// # Errors
    /// Returns an error if a type or shape does not match.
    fn loss(
        &self,
        model: &Self::Model,
        batch: &Self::Batch,
        scale: Option<&Tensor<1>>,
    ) -> Result<Tensor<1>>;
}

/// Observer of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Observer {
    None,
    Telemetry,
    Profiler,
}

/// Measures the steps of `training` on `device`, after the checks of [`Effort::check`]. `lock` is
/// that of [`measure`].
///
/// # Errors
/// Returns the errors of `training` and of `lock`. Also returns an error if a loss is not finite.
pub(crate) fn measure_steps<S: Training, T>(
    training: &S,
    device: &Device,
    effort: Effort,
    lock: impl Fn(DeviceLock) -> Result<T>,
) -> Result<Cost> {
    let shared = lock(DeviceLock::Shared)?;
    let started = Instant::now();
    let trained = device.clone().autodiff();
    let mut rank = training.build(&trained)?;
    let built = started.elapsed().as_secs_f64();
    let (mut number, mut sampled_operands) = (0, 0);
    let loss = |model: &S::Model, batch: &S::Batch, scale: Option<&Tensor<1>>| {
        training.loss(model, batch, scale)
    };
    let mut take = |count: usize, observer: Observer| -> Result<(f64, Vec<f32>)> {
        let started = Instant::now();
        for _ in 0..count {
            let input = training.input(number, &trained)?;
            let telemetry =
                (observer == Observer::Telemetry).then(|| Telemetry::start(rank.model()));
            let watched = match observer {
                Observer::None => Watched::No,
                Observer::Telemetry | Observer::Profiler => Watched::Yes,
            };
            rank.step(input, training.lr(), watched, loss)?;
            if let Some(telemetry) = telemetry {
                sampled_operands = telemetry.finish().len();
            }
            number += 1;
        }
        // Waits for the device.
        let losses = rank.losses();
        Ok((started.elapsed().as_secs_f64() / count as f64, losses))
    };
    let started = Instant::now();
    take(effort.warm, Observer::None)?;
    let has_telemetry = training.has_telemetry();
    if has_telemetry {
        take(1, Observer::Telemetry)?;
    }
    let warmed = started.elapsed().as_secs_f64();
    drop(shared);
    let _exclusive = lock(DeviceLock::Exclusive)?;
    let mut rounds = |observer: Observer| -> Result<Vec<f64>> {
        let mut seconds = Vec::with_capacity(effort.rounds);
        for _ in 0..effort.rounds {
            let (each, losses) = take(effort.steps, observer)?;
            ensure!(
                losses.iter().all(|loss| loss.is_finite()),
                "the {} loss is {losses:?} on random tokens: try a lower --lr",
                training.recipe()
            );
            seconds.push(each);
        }
        Ok(seconds)
    };
    let seconds = rounds(Observer::None)?;
    // Launched steps cannot use the memory of the graph and would add their own.
    let reserved = observe::reserved(device);
    let sampled = match has_telemetry {
        true => rounds(Observer::Telemetry)?,
        false => Vec::new(),
    };
    let mut observed = Ok(());
    let (peak, kernels) = observe::step(device, || {
        let taken = take(1, Observer::Profiler).map(|_| ());
        observed = std::mem::replace(&mut observed, Ok(())).and(taken);
    });
    observed?;
    let kept = observe::kept(device, || {
        let input = training.input(number, &trained)?;
        training.loss(rank.model(), &input.batches[0], input.scale().as_ref())
    });
    let memory = peak.zip(reserved).zip(kept);
    let memory = memory.map(|((peak, reserved), kept)| Memory {
        peak,
        reserved,
        kept,
    });
    Ok(Cost {
        tokens: training.tokens(),
        built,
        warmed,
        seconds,
        sampled,
        sampled_operands,
        memory,
        kernels,
    })
}

/// Returns unused memory to the device, so that every measurement starts from the same state.
pub fn release(device: &Device) {
    observe::release(device);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_have_classes() {
        let ours = "nvfp4_kernels::";
        for (name, class) in [
            (
                "quantize::amax::amax_tiles_kernel::AmaxTilesKernel",
                KernelClass::Amax,
            ),
            (
                "quantize::amax::strips::amax_strips_kernel::X<u32>",
                KernelClass::Amax,
            ),
            (
                "quantize::ms_eden::ms_eden_amax_kernel::X<f32>",
                KernelClass::Amax,
            ),
            (
                "quantize::ms_eden::ms_eden_kernel::X",
                KernelClass::Quantize,
            ),
            (
                "quantize::quantize::quantize_row_kernel::X",
                KernelClass::Quantize,
            ),
            (
                "quantize::mx::mx_quantize_row_kernel::X",
                KernelClass::Quantize,
            ),
            (
                "norm::backward::norm_backward_kernel::X",
                KernelClass::Elementwise,
            ),
            ("norm::backward::norm_parts_kernel::X", KernelClass::Reduce),
            (
                "quantize::prologue::kernel::prologue_kernel::X",
                KernelClass::Elementwise,
            ),
            ("quantize::swizzle::swizzle_kernel::X", KernelClass::Move),
            (
                "quantize::dequantize::dequantize_rows_kernel::X",
                KernelClass::Dequantize,
            ),
            (
                "quantize::mx::mx_dequantize_row_kernel::X",
                KernelClass::Dequantize,
            ),
            (
                "quantize::mx::mx_requantize_along_kernel::X",
                KernelClass::Quantize,
            ),
            ("moe::padding::move_groups_kernel::X", KernelClass::Move),
            ("moe::segments::segment_sum_kernel::X", KernelClass::Reduce),
        ] {
            assert_eq!(KernelClass::of(&format!("{ours}{name}")), class, "{name}");
        }
        for (name, class) in [
            (
                "nvfp4_kernels::gemm::kernels::sm90::bf16::sm90_bf16_kernel::X",
                KernelClass::Gemm,
            ),
            (
                "nvfp4_kernels::gemm::materialize::dequantize_unscaled_kernel::X",
                KernelClass::Dequantize,
            ),
            (
                "nvfp4_kernels::gemm::materialize::transpose_kernel::X",
                KernelClass::Move,
            ),
            (
                "cubek_matmul::components::Matmul<f32>",
                KernelClass::BurnGemm,
            ),
            ("cubek_reduce::launch::ReduceKernel", KernelClass::Reduce),
            (
                "burn_cubecl::kernel::index::slice::SliceKernel",
                KernelClass::Move,
            ),
            (
                "burn_cubecl::kernel::binary::KernelBinop",
                KernelClass::Elementwise,
            ),
            (
                "burn_cubecl_fusion::optim::elemwise::ElemwiseFuse",
                KernelClass::Elementwise,
            ),
            ("something::else", KernelClass::Other),
        ] {
            assert_eq!(KernelClass::of(name), class, "{name}");
        }
    }

    #[test]
    fn the_median_round_counts() {
        let kernel = |class, seconds| Kernel {
            name: String::new(),
            class,
            launches: 1,
            seconds,
        };
        let cost = Cost {
            tokens: 100,
            built: 0.5,
            warmed: 9.0,
            seconds: vec![4.0, 1.0, 2.0],
            sampled: vec![9.0, 5.0, 3.0],
            sampled_operands: 40,
            memory: None,
            kernels: vec![
                kernel(KernelClass::Gemm, 0.5),
                kernel(KernelClass::Amax, 0.25),
                kernel(KernelClass::Gemm, 0.125),
            ],
        };
        assert_eq!((cost.median(), cost.tokens_per_s()), (2.0, 50.0));
        assert_eq!(cost.of(KernelClass::Gemm), 0.625);
        assert_eq!(cost.of(KernelClass::Reduce), 0.0);
        // Sampling adds three seconds to a step of two seconds, once in ten steps.
        assert_eq!(cost.median_sampled(), Some(5.0));
        assert_eq!(cost.telemetry_share(10), Some(0.15));
        let without = Cost {
            sampled: Vec::new(),
            ..cost
        };
        assert_eq!(without.telemetry_share(10), None);
    }
}
