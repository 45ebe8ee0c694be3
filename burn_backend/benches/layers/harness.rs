//! Devices, data, timing, and the summary.

use std::env;
use std::time::Instant;

use burn_core::tensor::{DType, Device, Distribution, Tensor};
use burn_nvfp4::ops::StoredForm;
#[cfg(feature = "cuda")]
use nvfp4_kernels::cubecl::{MemoryScope, prelude::Client};

use crate::results::{Results, Row};

/// Steps per batch.
const STEPS: usize = 10;
/// Number of batches, of which the fastest counts.
const BATCHES: usize = 3;

/// Measurement of one step.
struct Record {
    setting: String,
    name: String,
    milliseconds: f64,
    /// Gigabytes that the memory pools hold afterwards.
    held: Option<f64>,
}

/// Measurements of a run.
pub struct Bench {
    /// Device with autodiff.
    pub device: Device,
    device_name: String,
    filter: Option<String>,
    once: bool,
    records: Vec<Record>,
}

impl Bench {
    /// Creates a benchmark on the device that `NVFP4_BENCH_DEVICE` names, with the filter of the
    /// command line.
    pub fn new() -> Self {
        let default = if cfg!(feature = "cuda") {
            "cuda"
        } else {
            "flex"
        };
        let name = env::var("NVFP4_BENCH_DEVICE").unwrap_or_else(|_| default.into());
        let device = match name.as_str() {
            #[cfg(feature = "flex")]
            "flex" => Device::flex(),
            #[cfg(feature = "cpu")]
            "cpu" => Device::cpu(),
            #[cfg(feature = "cuda")]
            "cuda" => Device::cuda(0),
            other => panic!("NVFP4_BENCH_DEVICE={other}: not a device of this build"),
        };
        // `cargo bench` adds this argument, `cargo test --benches` does not.
        let is_test = env::args().all(|argument| argument != "--bench");
        Self {
            device: device.autodiff(),
            device_name: name,
            filter: env::args()
                .skip(1)
                .find(|argument| !argument.starts_with("--")),
            once: is_test || env::var_os("NVFP4_BENCH_ONCE").is_some(),
            records: Vec::new(),
        }
    }

    /// Returns true if the device is measured; others run at tiny sizes.
    pub fn is_gpu(&self) -> bool {
        self.device_name == "cuda"
    }

    /// Returns true if the device is a CubeCL device, which decoration and graphs require.
    pub fn is_cube(&self) -> bool {
        self.device_name != "flex"
    }

    /// Returns true if the filter selects only settings that begin with `setting`.
    pub fn asks_for(&self, setting: &str) -> bool {
        self.filter
            .as_ref()
            .is_some_and(|filter| filter.starts_with(setting))
    }

    /// Returns `full` on a GPU, otherwise `tiny`.
    pub fn size<T>(&self, full: T, tiny: T) -> T {
        match self.is_gpu() {
            true => full,
            false => tiny,
        }
    }

    /// Returns the dtype of activations: `bf16`, except on CubeCL's CPU runtime, which has no bf16
    /// arithmetic.
    pub fn activation(&self) -> DType {
        match self.device_name.as_str() {
            "cpu" => DType::F32,
            _ => DType::BF16,
        }
    }

    /// Returns normally distributed data of dtype `dtype` that requires a gradient.
    pub fn leaf<const D: usize>(&self, shape: [usize; D], dtype: DType) -> Tensor<D> {
        self.constant(shape, dtype).require_grad()
    }

    /// Returns normally distributed data of dtype `dtype`.
    pub fn constant<const D: usize>(&self, shape: [usize; D], dtype: DType) -> Tensor<D> {
        let normal = Distribution::Normal(0.0, 1.0);
        let values = Tensor::<D>::random(shape, normal, (&self.device, DType::F32));
        values.cast(dtype).detach()
    }

    /// Times `step` as `name` in `setting`, unless the filter excludes it.
    pub fn time(&mut self, setting: &str, name: &str, mut step: impl FnMut()) {
        self.time_after(setting, name, || (), |()| step());
    }

    /// Times `step` of what `prepare` returns, which is computed before.
    pub fn time_after<T>(
        &mut self,
        setting: &str,
        name: &str,
        mut prepare: impl FnMut() -> T,
        mut step: impl FnMut(T),
    ) {
        let id = format!("{setting}/{name}");
        if self
            .filter
            .as_ref()
            .is_some_and(|part| !id.contains(part.as_str()))
        {
            return;
        }
        let device = self.device.clone();
        let mut run = |steps: usize| {
            let prepared: Vec<T> = (0..steps).map(|_| prepare()).collect();
            device.sync().expect("a device that works");
            let start = Instant::now();
            prepared.into_iter().for_each(&mut step);
            device.sync().expect("a device that works");
            start.elapsed().as_secs_f64() * 1e3 / steps as f64
        };
        if self.once {
            run(1);
            println!("{id}: ran");
            return;
        }
        // Kernels are compiled and selected in the first steps.
        run(STEPS / 2);
        let milliseconds = (0..BATCHES)
            .map(|_| run(STEPS))
            .fold(f64::INFINITY, f64::min);
        let held = self.held();
        println!(
            "{id}: {milliseconds:.3} ms, {:.2} GB held",
            held.unwrap_or(f64::NAN)
        );
        self.records.push(Record {
            setting: setting.into(),
            name: name.into(),
            milliseconds,
            held,
        });
    }

    /// Returns the form in which the GEMMs of the device read packed operands of one matrix.
    pub fn packed_form(&self) -> StoredForm {
        #[cfg(feature = "cuda")]
        if self.is_gpu() && nvfp4_kernels::gemm::may_read_tiles(&client()) {
            return StoredForm::Tiles;
        }
        StoredForm::Rows
    }

    /// Returns unused memory to a GPU, so that the memory of the next measurement is its own.
    pub fn release(&self) {
        self.device.sync().expect("a device that works");
        #[cfg(feature = "cuda")]
        if self.is_gpu() {
            // Memory that stays reserved after an error is only released later.
            let _ = client().memory_cleanup();
        }
    }

    /// Returns the gigabytes that the memory pools of a GPU hold.
    fn held(&self) -> Option<f64> {
        #[cfg(feature = "cuda")]
        if self.is_gpu() {
            let usage = client().memory_report(MemoryScope::Device).usage();
            return Some(usage.bytes_reserved as f64 / 1e9);
        }
        None
    }

    /// Prints the table, and writes the results file.
    pub fn report(self) -> std::io::Result<()> {
        if self.once {
            return Ok(());
        }
        println!("\n| setting | layer | ms | GB held |\n|---|---|---|---|");
        for record in &self.records {
            let Record {
                setting,
                name,
                milliseconds,
                held,
            } = record;
            let held = held.map_or(String::new(), |held| format!("{held:.2}"));
            println!("| {setting} | {name} | {milliseconds:.3} | {held} |");
        }
        let rows = self.records.into_iter().map(|record| Row {
            name: record.name,
            at: Some(record.setting),
            values: vec![Some(record.milliseconds), record.held],
        });
        let results = Results {
            bench: "layers",
            gpu: device_name(&self.device_name),
            title: "Layers beside Burn's, forward and backward",
            about: &["burn_backend/src", "formats/src", "cube_kernels/src"],
            method: "the host's clock around ten steps, the fastest of three batches",
            row: "layer",
            units: &[("ms", 3), ("GB held", 2)],
            rows: rows.collect(),
        };
        results.write()
    }
}

/// Returns the client of the GPU.
#[cfg(feature = "cuda")]
fn client() -> Client {
    nvfp4_kernels::cubecl::Device::Cuda(Default::default()).client()
}

/// Returns the name of the device for a results file.
fn device_name(name: &str) -> String {
    match name {
        #[cfg(feature = "cuda")]
        "cuda" => {
            use nvfp4_kernels::capabilities::Capabilities;
            Capabilities::of(&client()).device.clone()
        }
        other => other.into(),
    }
}

/// Computes the gradient of `x` by forward and backward of `layer`, through a sum, whose time is
/// measured separately. Rows are added first, because Burn sums all elements in one cube.
pub fn backward<const D: usize>(
    x: &Tensor<D>,
    layer: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let y = layer(x.clone()).cast(DType::F32);
    let grads = y.sum_dim(D - 1).sum().backward();
    x.grad(&grads).expect("x requires a gradient")
}

/// Reads an element of `x`, so that fusion omits nothing of its computation.
pub fn read<const D: usize>(x: Tensor<D>) {
    let elements = x.shape().num_elements();
    x.reshape([elements]).narrow(0, 0, 1).into_data();
}
