//! Device memory: a lower bound on what a run needs, and the out-of-memory error.
//!
//! CubeCL does not fail at an allocation that does not fit: the tensor carries the failure, kernels
//! that would read it are skipped, and the first value that is read back panics with the whole
//! chain. [`MemoryBudget::guard`] converts this panic to [`OutOfMemory`].

pub mod bytes;
mod used;

use std::any::Any;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use burn::tensor::Device;

pub use used::MemoryUsed;
pub(crate) use used::peak_of;

/// Bytes that a training step holds at once on one device.
///
/// This is a lower bound: a step may take several times as much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNeed {
    /// Trained parameters.
    pub weights: u64,
    /// Frozen weights: those of a teacher, or of the model under adapters.
    pub frozen: u64,
    /// Gradients of all parameters.
    pub gradients: u64,
    /// AdamW moments, and f32 copies of bf16 parameters.
    pub optimizer: u64,
    /// Activations saved for backward.
    pub activations: u64,
}

/// Sizes of a training step, from which its memory on each rank follows.
#[derive(Debug, Clone)]
pub(crate) struct StepSizes {
    /// Trained elements of which a rank has values and gradients.
    pub trained: u64,
    /// Trained elements of which a rank has the optimizer state.
    pub optimized: u64,
    /// Bytes per trained element.
    pub parameter: u64,
    /// Bytes of frozen weights.
    pub frozen: u64,
    /// Tokens of a forward pass on all ranks.
    pub tokens: u64,
    /// Number of ranks that share the activations of these tokens.
    pub ranks: u64,
    /// Bytes per activation.
    pub activation: u64,
    /// Activations per token that each layer saves: those that it must save, and those that it can
    /// recompute.
    pub layers: Vec<[usize; 2]>,
    /// Number of layers that recompute.
    pub recompute: usize,
    /// Other bytes per token that a step saves.
    pub others: u64,
}

impl StepSizes {
    /// Returns true if a layer saves activations that it could recompute.
    pub fn can_recompute(&self) -> bool {
        let left = self.layers.iter().skip(self.recompute);
        left.into_iter().any(|[_, recomputable]| *recomputable > 0)
    }

    /// Returns the memory that a step needs on the device of each rank.
    pub fn need(&self) -> MemoryNeed {
        let layers = self.layers.iter().enumerate();
        let saved = layers.map(
            |(index, [always, recomputable])| match index < self.recompute {
                true => *always as u64,
                false => (always + recomputable) as u64,
            },
        );
        let of_token = self.activation * saved.sum::<u64>() + self.others;
        // AdamW has two moments, and an f32 copy of parameters of another type.
        let f32_copy = if self.parameter == 4 { 0 } else { 4 };
        MemoryNeed {
            weights: self.trained * self.parameter,
            frozen: self.frozen,
            gradients: self.trained * self.parameter,
            optimizer: self.optimized * (8 + f32_copy),
            activations: self.tokens.saturating_mul(of_token) / self.ranks,
        }
    }
}

impl MemoryNeed {
    /// Returns the part that does not depend on the batch.
    fn fixed(&self) -> u64 {
        self.weights + self.frozen + self.gradients + self.optimizer
    }

    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.fixed() + self.activations
    }
}

/// Memory of a device, as far as the runtime reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Capacity in bytes.
    pub capacity: Option<u64>,
    /// Bytes held by the memory pools of this process.
    pub reserved: Option<u64>,
}

impl DeviceMemory {
    /// Queries the runtime of `device`. Empty for Flex, whose tensors are in host memory.
    pub fn of(device: &Device) -> Self {
        // The query may fail after another failure of the runtime.
        panic::catch_unwind(AssertUnwindSafe(|| cubecl::memory(device))).unwrap_or_default()
    }
}

/// Error: a device has too little memory for a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutOfMemory {
    /// True if it was found before the first step, from the lower bound on the need of a step.
    pub is_forecast: bool,
    /// Bytes of the failed allocation, if known.
    pub asked: Option<u64>,
    /// Memory of the device after the failure.
    pub memory: DeviceMemory,
    /// Budget of the run.
    pub budget: MemoryBudget,
}

/// Formats bytes in the largest fitting decimal unit.
pub fn shown(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        1e9.. => format!("{:.1} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryBudget {
            device,
            need,
            batch,
            context,
            ranks,
            advice,
        } = &self.budget;
        write!(f, "out of device memory on {device}: ")?;
        match (self.is_forecast, self.asked) {
            (true, _) => write!(f, "a step needs at least {}", shown(need.total()))?,
            (false, Some(asked)) => write!(f, "an allocation of {} failed", shown(asked))?,
            (false, None) => write!(f, "an allocation failed")?,
        }
        if let Some(capacity) = self.memory.capacity {
            write!(f, ", and the device has {}", shown(capacity))?;
        }
        if let (false, Some(reserved)) = (self.is_forecast, self.memory.reserved) {
            write!(f, ", of which this process holds {}", shown(reserved))?;
        }
        writeln!(f, "\n  weights          {:>10}", shown(need.weights))?;
        if need.frozen > 0 {
            writeln!(f, "  frozen weights   {:>10}", shown(need.frozen))?;
        }
        writeln!(f, "  gradients        {:>10}", shown(need.gradients))?;
        writeln!(f, "  optimizer state  {:>10}", shown(need.optimizer))?;
        let (share, each) = match ranks {
            0 | 1 => (*batch, ""),
            _ => (batch / ranks, " on each rank"),
        };
        writeln!(
            f,
            "  activations      {:>10} or more, for {share} sequences of {context} {}{each}",
            shown(need.activations),
            advice.elements
        )?;
        write!(f, "Use ")?;
        match self.budget.largest_batch(self.memory.capacity) {
            Some(0) => write!(f, "{}", advice.smaller_model)?,
            // This does not claim that the batch fits.
            Some(most) if most < *batch => {
                write!(f, "a smaller --batch (no more than {most} can fit)")?
            }
            _ => write!(f, "a smaller --batch")?,
        }
        write!(f, ", a shorter --context")?;
        for option in &advice.options {
            write!(f, ", {option}")?;
        }
        if let Some(option) = advice.narrower {
            write!(f, "; {option} halves the activations")?;
        }
        write!(f, ".")
    }
}

impl std::error::Error for OutOfMemory {}

/// The memory that a run needs on the device of each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Name of the device.
    pub device: String,
    /// Memory of a step.
    pub need: MemoryNeed,
    /// Sequences per forward pass on all ranks.
    pub batch: usize,
    /// Length of a sequence.
    pub context: usize,
    /// Number of ranks that share a batch.
    pub ranks: usize,
    /// Options that reduce the memory.
    pub advice: Advice,
}

/// Options of a command that reduce the memory of a run, besides `--batch` and `--context`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// Elements of a sequence.
    pub elements: &'static str,
    /// Advice if no batch fits.
    pub smaller_model: &'static str,
    /// Other options.
    pub options: Vec<&'static str>,
    /// Option that makes `f32` activations `bf16`, if they are `f32`.
    pub narrower: Option<&'static str>,
}

/// Option that recomputes activations.
pub(crate) const RECOMPUTE: &str = "a larger --recompute";
/// Advice of smaller forward passes.
pub(crate) const ACCUMULATE: &str = "a larger --accumulate in place of the batch";

impl MemoryBudget {
    /// Returns the largest batch that fits into `capacity` together with the memory that does not
    /// depend on the batch. Larger batches certainly do not fit.
    fn largest_batch(&self, capacity: Option<u64>) -> Option<usize> {
        let left = capacity?.saturating_sub(self.need.fixed());
        let share =
            u128::from(left) * self.batch as u128 / u128::from(self.need.activations.max(1));
        let most = share as usize / self.ranks * self.ranks;
        Some(most)
    }

    fn error(&self, is_forecast: bool, asked: Option<u64>, memory: DeviceMemory) -> OutOfMemory {
        OutOfMemory {
            is_forecast,
            asked,
            memory,
            budget: self.clone(),
        }
    }

    /// Checks whether a step certainly exceeds the memory of `device`.
    ///
    /// # Errors
    /// Returns [`OutOfMemory`] if the device has less memory than a step needs at the least.
    pub fn check(&self, device: &Device) -> Result<()> {
        let memory = DeviceMemory::of(device);
        match memory.capacity {
            Some(capacity) if capacity < self.need.total() => {
                Err(self.error(true, None, memory).into())
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` on `device`. After an out-of-memory error, state that `work` modified must not
    /// be used again.
    ///
    /// # Errors
    /// Returns [`OutOfMemory`] if the device runs out of memory, else the errors of `work`.
    pub fn guard<T>(&self, device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let outcome = panic::catch_unwind(AssertUnwindSafe(work));
        let failure = match &outcome {
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Failure::find(&format!("{error:#}")),
            Err(cause) => Failure::find(message(&**cause)),
        };
        if let Some(Failure { asked }) = failure {
            let memory = DeviceMemory::of(device);
            return Err(self.error(false, asked, memory).into());
        }
        outcome.unwrap_or_else(|cause| panic::resume_unwind(cause))
    }
}

/// A failed allocation reported by CubeCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Failure {
    /// Bytes of the allocation, if the report contains them.
    asked: Option<u64>,
}

impl Failure {
    /// Finds a failed allocation reported in `text`. Burn forwards CubeCL's errors only as text.
    fn find(text: &str) -> Option<Self> {
        /// Text before the number of bytes.
        const SIZED: [&str; 4] = [
            "out of device memory allocating ",
            "can't allocate buffer of size: ",
            "Can't allocate ",
            "a deferred allocation of ",
        ];
        const UNSIZED: [&str; 3] = [
            "An out-of-memory error happened during launch",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "was never allocated: the reservation behind it failed",
        ];
        let sized = SIZED.iter().find_map(|before| {
            let (_, rest) = text.split_once(before)?;
            let end = rest.find(|c: char| !c.is_ascii_digit());
            rest[..end.unwrap_or(rest.len())].parse().ok()
        });
        let is_failure = sized.is_some() || UNSIZED.iter().any(|part| text.contains(part));
        is_failure.then_some(Self { asked: sized })
    }

    /// Returns true if `text` reports work that was skipped because of a failure.
    fn is_aftermath(text: &str) -> bool {
        text.contains("The work was skipped: an input carried a failure")
            || text.contains("The bytes were never written (failure")
    }
}

/// Returns the message of a panic.
pub(crate) fn message(cause: &(dyn Any + Send)) -> &str {
    cause
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| cause.downcast_ref::<&str>().copied())
        .unwrap_or("for a reason that it did not say")
}

/// Hides panics that report a lack of device memory, and those that follow from one, from the
/// terminal: [`MemoryBudget::guard`] reports them as one error. Programs call this function at
/// their start.
pub fn mute_memory_panics() {
    static IS_OUT: AtomicBool = AtomicBool::new(false);
    let default = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let text = message(info.payload());
        if Failure::find(text).is_some() {
            IS_OUT.store(true, Ordering::Relaxed);
        } else if !(IS_OUT.load(Ordering::Relaxed) && Failure::is_aftermath(text)) {
            default(info);
        }
    }));
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
mod cubecl {
    use burn::tensor::Device;

    use super::DeviceMemory;

    pub(super) fn memory(_: &Device) -> DeviceMemory {
        DeviceMemory::default()
    }
}

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use cubecl::{client, usage};

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cubecl {
    use burn::backend::DispatchDevice;
    use burn::tensor::Device;
    use nvfp4_kernels::cubecl::prelude::Client;
    use nvfp4_kernels::cubecl::{MemoryScope, MemoryUsage};

    use super::DeviceMemory;

    /// Returns the client of a CubeCL device.
    pub(crate) fn client(device: &Device) -> Option<Client> {
        match device.as_dispatch() {
            DispatchDevice::Cube(device) => Some(device.client()),
            _ => None,
        }
    }

    /// Returns the usage of the pools of all streams.
    pub(crate) fn usage(client: &Client) -> MemoryUsage {
        client.memory_report(MemoryScope::Device).usage()
    }

    pub(super) fn memory(device: &Device) -> DeviceMemory {
        let Some(client) = client(&device.clone().without_autodiff()) else {
            return DeviceMemory::default();
        };
        DeviceMemory {
            capacity: client.properties().memory.max_memory(),
            reserved: Some(usage(&client).bytes_reserved),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Preset, RunConfig};

    fn budget(batch: usize, device: &str) -> MemoryBudget {
        let mut config = RunConfig::preset(Preset::Tiny, device);
        config.batch = batch;
        bytes::budget(&config, &config.recipe)
    }

    #[test]
    fn the_error_says_what_is_held_and_what_to_change() {
        let memory = DeviceMemory {
            capacity: Some(85_000_000_000),
            reserved: Some(71_200_000_000),
        };
        let budget = budget(100_000, "cuda:0");
        let text = budget
            .error(false, Some(13_107_200_000), memory)
            .to_string();
        for part in [
            "out of device memory on cuda:0: an allocation of 13.1 GB failed",
            "the device has 85.0 GB, of which this process holds 71.2 GB",
            "weights              3.5 MB",
            "gradients            3.5 MB",
            "optimizer state      7.0 MB",
            "activations        170.4 GB or more, for 100000 sequences of 128 bytes",
            "a smaller --batch (no more than 49",
            "--context",
            "--recompute",
            "nvfp4 launch",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let forecast = budget.error(true, None, memory).to_string();
        assert!(
            forecast.contains("a step needs at least 170.4 GB"),
            "{forecast}"
        );
        let small = DeviceMemory {
            capacity: Some(1 << 20),
            ..memory
        };
        let error = budget.error(true, None, small).to_string();
        assert!(error.contains("a smaller model (--preset"), "{error}");
    }

    /// Reports of CubeCL's errors, alone and as the cause of a failed read.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    #[test]
    fn reports_of_cubecl_are_recognised() {
        use nvfp4_kernels::cubecl::server::{IoError, LaunchError, ServerError};

        let size = 13_107_200_000;
        let io = [
            IoError::OutOfMemory {
                size,
                backtrace: Default::default(),
            },
            IoError::BufferTooBig {
                size,
                backtrace: Default::default(),
            },
            IoError::PageSizesExhausted {
                size,
                backtrace: Default::default(),
            },
            IoError::StorageMappingFailed {
                size,
                source: Box::new(IoError::OutOfMemory {
                    size,
                    backtrace: Default::default(),
                }),
                backtrace: Default::default(),
            },
        ];
        let asked = Some(Failure { asked: Some(size) });
        for error in io {
            let root = ServerError::from(error);
            assert_eq!(Failure::find(&root.to_string()), asked, "{root}");
            let read = ServerError::Several {
                errors: vec![ServerError::Unwritten {
                    failure: 1,
                    claimed: 40,
                    chain: vec!["skipped `Matmul`: it needed memory 7".into()],
                    root: Box::new(root),
                    backtrace: Default::default(),
                }],
                backtrace: Default::default(),
            };
            let burn = format!("Error while reading data: {:?}", read.to_string());
            assert_eq!(Failure::find(&burn), asked, "{burn}");
            assert!(Failure::is_aftermath(&read.to_string()));
        }
        let launch = ServerError::from(LaunchError::OutOfMemory {
            reason: "no memory".into(),
            backtrace: Default::default(),
        });
        let unsized_failure = Some(Failure { asked: None });
        assert_eq!(Failure::find(&launch.to_string()), unsized_failure);
        let skipped = ServerError::Skipped.to_string();
        assert!(Failure::find(&skipped).is_none() && Failure::is_aftermath(&skipped));
    }

    #[cfg(feature = "flex")]
    #[test]
    fn other_failures_stay_what_they_are() {
        let device = Device::flex();
        let budget = budget(8, "flex");
        let error = budget.guard::<()>(&device, || anyhow::bail!("the loss is NaN"));
        assert_eq!(error.unwrap_err().to_string(), "the loss is NaN");
        let panic = panic::catch_unwind(|| budget.guard::<()>(&device, || panic!("a bug")));
        assert_eq!(message(&*panic.unwrap_err()), "a bug");
        let error = budget.guard::<()>(&device, || {
            panic!("Caused by: out of device memory allocating 4096 bytes\nNo backtrace available")
        });
        let error = error.unwrap_err();
        let error: &OutOfMemory = error.downcast_ref().unwrap();
        assert_eq!((error.asked, error.is_forecast), (Some(4096), false));
    }

    /// The device's report of an allocation that does not fit becomes the error, and the device
    /// remains usable.
    #[cfg(feature = "cpu")]
    #[test]
    fn an_allocation_that_does_not_fit_is_the_error() {
        const TERABYTE: usize = 1 << 40;
        let device = nvfp4_test_support::cpu_runtime(Device::cpu);
        let client = client(&device).unwrap();
        let error = budget(8, "cpu").guard(&device, || {
            let read = client.read_one(client.empty(TERABYTE));
            Ok(read.unwrap_or_else(|error| panic!("reading: {error}")))
        });
        let error = error.unwrap_err();
        let error: &OutOfMemory = error.downcast_ref().expect("lack of memory");
        assert_eq!(error.asked, Some(TERABYTE as u64));
        assert!(error.memory.capacity.is_some());
        let one = client.read_one(client.create_from_slice(&[7; 4])).unwrap();
        assert_eq!(one[..], [7; 4]);
    }
}
