//! What a training step costs: time, memory, and the kernels that take it.
//!
//! A step is measured in several ways, one after the other, since each would disturb the others:
//! its time, over rounds of steps between two synchronizations; on request its time when telemetry
//! samples it; its memory, polled all the time; and each launch, timed on the device. Memory and
//! kernels are known on CubeCL's runtimes only, which report them.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::Device;
use burn_nvfp4::telemetry::Telemetry;
use serde::Serialize;

use crate::config::{RecipeName, RunConfig};
use crate::data::Batch;
use crate::groups::ParallelGroups;
use crate::memory::MemoryBudget;
use crate::model::LanguageModel;
use crate::optim::Optimizer;
use crate::train::rank::{Rank, Watched};

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Steps before the first measurement, which compile kernels and fill memory pools; at least
    /// one.
    pub warm: usize,
    /// Rounds of steps, each with its own figure; at least one.
    pub rounds: usize,
    /// Steps of a round; at least one.
    pub steps: usize,
}

/// What the steps of a recipe cost.
#[derive(Debug, Clone, Serialize)]
pub struct Cost {
    /// Bytes of text in a step.
    pub tokens: usize,
    /// Seconds that the model took to build; its weights are drawn on the host.
    pub built: f64,
    /// Seconds of the steps before the first round, which mostly compile kernels.
    pub warmed: f64,
    /// Seconds of a step, the mean of each round.
    pub seconds: Vec<f64>,
    /// Seconds of a step that telemetry samples, the mean of each round; empty without telemetry.
    pub sampled: Vec<f64>,
    /// Operands that telemetry looks at in such a step.
    pub sampled_operands: usize,
    /// Device memory of a step, where it is known.
    pub memory: Option<Memory>,
    /// The kernels of one step, the costliest first; empty where launches are not known.
    pub kernels: Vec<Kernel>,
}

/// Device memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// The peak of all tensors: weights, optimizer state, tensors saved for the backward, and
    /// intermediate results.
    pub peak: u64,
    /// What the memory pools hold after the step.
    pub reserved: u64,
    /// What the forward keeps for the backward: packed operands, inputs of norms, attention and
    /// activations, and the gradients of the head. Not the quantized weights, which are kept from
    /// step to step.
    pub kept: u64,
}

/// All launches of one kernel in a step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kernel {
    /// As the kernel calls itself.
    pub name: String,
    /// What it is for.
    pub class: KernelClass,
    /// Number of launches.
    pub launches: usize,
    /// Seconds of all of them on the device.
    pub seconds: f64,
}

/// What a kernel is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelClass {
    /// GEMMs of linear layers, by the kernels of nvfp4-kernels.
    Gemm,
    /// Quantization: NVFP4, MS-EDEN, MXFP8.
    Quantize,
    /// Amax values for global scales.
    Amax,
    /// Dequantization, and operands materialized in a GEMM kernel's layout.
    Dequantize,
    /// Attention, by the kernels of nvfp4-kernels: scores, softmax and sums, rotations.
    Attention,
    /// GEMMs by Burn: attention that those do not take, head, embedding, and layers that are
    /// Burn's own.
    BurnGemm,
    /// Sums, means and other reductions.
    Reduce,
    /// What is computed element by element, fused or not.
    Elementwise,
    /// What only moves elements.
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

    /// What a table calls it.
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

    /// The class of the kernel called `name`, the path of its type.
    pub fn of(name: &str) -> Self {
        // The first that fits: a name holds several of these words.
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
            // Before the module that they are in.
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
    /// Seconds of a step: the median of the rounds.
    pub fn median(&self) -> f64 {
        median(&self.seconds).expect("there is a round")
    }

    /// Seconds of a step that telemetry samples: the median of the rounds, if there are any.
    pub fn median_sampled(&self) -> Option<f64> {
        median(&self.sampled)
    }

    /// How much longer the mean step takes if telemetry samples one in `every`, as a share of a
    /// step without it.
    pub fn telemetry_share(&self, every: u64) -> Option<f64> {
        let more = self.median_sampled()? - self.median();
        Some(more / (every as f64 * self.median()))
    }

    /// Bytes of text in a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.median()
    }

    /// Seconds of a step in kernels of a class.
    pub fn of(&self, class: KernelClass) -> f64 {
        let own = self.kernels.iter().filter(|kernel| kernel.class == class);
        own.fold(0.0, |sum, kernel| sum + kernel.seconds)
    }
}

/// The median, of two in the middle the larger; none of nothing.
fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// How a measurement locks the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceLock {
    /// With other processes, while the model is built and warms up.
    Shared,
    /// Alone, while steps are measured.
    Exclusive,
}

/// Measure the model `M` of the run `config` with `recipe` on `device`, trained on random bytes. If
/// the run has telemetry, steps that it samples are measured too.
///
/// `lock` locks the device until what it gives is dropped: shared before the model is built,
/// exclusive before it is measured. Processes compile at the same time and measure one after the
/// other.
///
/// # Errors
/// When the effort is none, the configuration does not fit the device, the device runs out of
/// memory, or `lock` fails.
pub fn measure<M: LanguageModel, T>(
    config: &RunConfig,
    recipe: &RecipeName,
    device: &Device,
    effort: Effort,
    lock: impl Fn(DeviceLock) -> Result<T>,
) -> Result<Cost> {
    for (name, value) in [
        ("warm", effort.warm),
        ("rounds", effort.rounds),
        ("steps", effort.steps),
    ] {
        ensure!(value > 0, "{name} is 0, but it must be at least 1");
    }
    config.check()?;
    config.check_graph()?;
    config.check_ranks(1)?;
    let budget = MemoryBudget::new(config, recipe);
    budget.check(device)?;
    budget.guard(device, || {
        measure_steps::<M, T>(config, recipe, device, effort, lock)
    })
}

/// Who looks on at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Observer {
    None,
    Telemetry,
    Profiler,
}

fn measure_steps<M: LanguageModel, T>(
    config: &RunConfig,
    recipe: &RecipeName,
    device: &Device,
    effort: Effort,
    lock: impl Fn(DeviceLock) -> Result<T>,
) -> Result<Cost> {
    let shared = lock(DeviceLock::Shared)?;
    let started = Instant::now();
    let model = M::build(config, recipe, &device.clone().autodiff())?;
    let model = M::part_of(model, config, &ParallelGroups::single())?;
    let built = started.elapsed().as_secs_f64();
    let optimizer = Optimizer::new(config)?;
    let mut rank = Rank::new(device.clone().autodiff(), model, optimizer);
    if config.graph {
        rank.begin_graph()?;
    }
    let (mut number, mut sampled_operands) = (0, 0);
    let mut take = |count: usize, observer: Observer| -> Result<(f64, Vec<f32>)> {
        let started = Instant::now();
        for _ in 0..count {
            let batch = Batch::random(config.seed, number, config.batch, config.model.context);
            let telemetry =
                (observer == Observer::Telemetry).then(|| Telemetry::start(rank.model()));
            let watched = match observer {
                Observer::None => Watched::No,
                Observer::Telemetry | Observer::Profiler => Watched::Yes,
            };
            rank.step(batch, config.lr, watched)?;
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
    let has_telemetry = config.telemetry_every > 0;
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
                "the {recipe} loss is {losses:?} on random bytes: try a lower --lr"
            );
            seconds.push(each);
        }
        Ok(seconds)
    };
    let seconds = rounds(Observer::None)?;
    let sampled = match has_telemetry {
        true => rounds(Observer::Telemetry)?,
        false => Vec::new(),
    };
    let mut observed = Ok(());
    let (memory, kernels) = observe::step(device, || {
        let taken = take(1, Observer::Profiler).map(|_| ());
        observed = std::mem::replace(&mut observed, Ok(())).and(taken);
    });
    observed?;
    let kept = observe::kept(device, || {
        let batch = Batch::random(config.seed, number, config.batch, config.model.context);
        let (inputs, targets) = batch.tensors(&device.clone().autodiff());
        rank.model().training_loss(inputs, targets)
    });
    let memory = memory.zip(kept);
    let memory = memory.map(|(memory, kept)| Memory { kept, ..memory });
    Ok(Cost {
        tokens: config.batch * config.model.context,
        built,
        warmed,
        seconds,
        sampled,
        sampled_operands,
        memory,
        kernels,
    })
}

/// Return unused memory to the device, so that the next measurement starts as the first did.
pub fn release(device: &Device) {
    observe::release(device);
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
pub(crate) mod observe {
    use burn::tensor::Device;

    use super::{Kernel, Memory};

    pub(crate) fn step(_: &Device, _: impl FnMut()) -> (Option<Memory>, Vec<Kernel>) {
        (None, Vec::new())
    }

    pub(crate) fn kept<T>(_: &Device, _: impl FnOnce() -> T) -> Option<u64> {
        None
    }

    pub(crate) fn release(_: &Device) {}
}

/// What CubeCL tells of memory and launches.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) mod observe {
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    use burn::tensor::Device;
    use nvfp4_kernels::cubecl::future::block_on;
    use nvfp4_kernels::cubecl::logging::{
        Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
    };

    use super::{Kernel, KernelClass, Memory};
    use crate::memory::{client, peak_of, usage};

    pub(crate) fn release(device: &Device) {
        if let Some(client) = client(device) {
            // What is left then is only held longer.
            let _ = device.sync();
            let _ = client.memory_cleanup();
        }
    }

    /// The memory of one step, and the kernels of another.
    pub(crate) fn step(device: &Device, mut step: impl FnMut()) -> (Option<Memory>, Vec<Kernel>) {
        let Some(client) = client(device) else {
            return (None, Vec::new());
        };
        let ((), peak) = peak_of(device, &mut step);
        let memory = peak.map(|peak| Memory {
            peak,
            reserved: usage(&client).bytes_reserved,
            kept: 0,
        });
        let watch = Arc::new(Watch::default());
        let observation = LaunchObservation::new(watch.clone());
        step();
        drop(observation);
        (memory, watch.kernels())
    }

    /// The memory that what `make` gives keeps in use.
    pub(crate) fn kept<T>(device: &Device, make: impl FnOnce() -> T) -> Option<u64> {
        let client = client(device)?;
        let in_use = || {
            let _ = device.sync();
            usage(&client).bytes_in_use
        };
        let before = in_use();
        let _made = make();
        Some(in_use().saturating_sub(before))
    }

    /// Keeps the measurement of every launch, unread, so that kernels run as they do without.
    #[derive(Default)]
    struct Watch {
        unread: Mutex<Vec<(&'static str, ProfileDuration)>>,
        /// Those that a profiling logger, if one is on, has read already.
        read: Mutex<Vec<(&'static str, Duration)>>,
    }

    impl LaunchObserver for Watch {
        fn launched(&self, _kernel: &'static str) {}

        fn timing(&self) -> TimingRequest {
            TimingRequest::Deferred
        }

        fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
            let mut unread = self.unread.lock().expect("no panic while it is held");
            unread.push((kernel, profile));
        }

        fn timed(&self, kernel: &'static str, duration: Duration, _method: TimingMethod) {
            let mut read = self.read.lock().expect("no panic while it is held");
            read.push((kernel, duration));
        }
    }

    impl Watch {
        /// What was measured, kernel by kernel, the costliest first. Waits for the device.
        fn kernels(&self) -> Vec<Kernel> {
            let unread = std::mem::take(&mut *self.unread.lock().expect("nobody panics"));
            let read = std::mem::take(&mut *self.read.lock().expect("nobody panics"));
            let resolved = unread.into_iter().filter_map(|(kernel, profile)| {
                let ticks = block_on(profile.resolve())?;
                Some((kernel, ticks.duration()))
            });
            let mut all: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
            for (kernel, duration) in resolved.chain(read) {
                let (launches, seconds) = all.entry(kernel).or_default();
                *launches += 1;
                *seconds += duration.as_secs_f64();
            }
            let mut kernels: Vec<Kernel> = all
                .into_iter()
                .map(|(name, (launches, seconds))| Kernel {
                    name: name.into(),
                    class: KernelClass::of(name),
                    launches,
                    seconds,
                })
                .collect();
            kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
            kernels
        }
    }
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
                "nvfp4_kernels::gemm::kernels::sm90_bf16::sm90_bf16_kernel::X",
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
        // Three seconds more for one step in ten, of two seconds each.
        assert_eq!(cost.median_sampled(), Some(5.0));
        assert_eq!(cost.telemetry_share(10), Some(0.15));
        let without = Cost {
            sampled: Vec::new(),
            ..cost
        };
        assert_eq!(without.telemetry_share(10), None);
    }
}
