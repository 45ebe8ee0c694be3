//! Timing with device events inside criterion, and the summary table.

use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput};
use cubecl::{prelude::*, server::Handle};
use futures_lite::future::block_on;
use nvfp4_kernels::capabilities::Capabilities;

use crate::common::{
    self,
    device::is_run_once,
    results::{Results, Row},
};

/// Kernel whose rate is 100 %.
const COPY: &str = "copy";
/// Kernel whose time is that of a launch.
const EMPTY: &str = "empty kernel";
/// Prefix of kernels that are compared with the kernel of the same name after [`PER_TENSOR`].
pub const PER_TOKEN: &str = "per-token";
pub const PER_TENSOR: &str = "per-tensor";

#[cube(launch_unchecked)]
fn empty_kernel(out: &mut [u32], limit: u32) {
    // Never true: a kernel that does not use its arguments has none.
    if UNIT_POS >= limit {
        out[0] = limit;
    }
}

/// Work of one launch.
#[derive(Clone, Copy)]
pub enum Work {
    /// Compulsory memory traffic in bytes.
    Bytes(f64),
    /// Number of floating-point operations.
    Operations(f64),
}

impl Work {
    fn amount(self) -> f64 {
        match self {
            Self::Bytes(amount) | Self::Operations(amount) => amount,
        }
    }
}

/// Measurement time.
#[derive(Clone, Copy)]
pub enum Effort {
    /// For benchmarks with performance limits.
    Full,
    /// For all other benchmarks.
    Brief,
}

impl Effort {
    /// Returns the time to warm up, and the time to measure.
    fn windows(self) -> [Duration; 2] {
        match self {
            Self::Full => [60, 250],
            Self::Brief => [5, 40],
        }
        .map(Duration::from_millis)
    }
}

/// Result of one benchmark.
struct Record {
    shape: String,
    kernel: String,
    work: Work,
    /// Seconds per launch, one entry per batch.
    seconds: Vec<f64>,
}

impl Record {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }

    /// Returns the amount per second, in units of 10⁹.
    fn rate(&self) -> f64 {
        self.work.amount() / self.median() / 1e9
    }
}

pub struct Bench {
    criterion: Criterion,
    client: Client,
    records: Vec<Record>,
}

impl Bench {
    pub fn new(client: &Client) -> Self {
        Self {
            // Ten samples do not need a hundred thousand resamples; an argument can request them.
            criterion: Criterion::default()
                .nresamples(2000)
                .configure_from_args()
                .without_plots(),
            client: client.clone(),
            records: Vec::new(),
        }
    }

    /// Runs `measure` under the name of a shape, unless `NVFP4_BENCH_SHAPES` is set and not
    /// contained in that name.
    pub fn at(&mut self, shape: String, effort: Effort, measure: impl FnOnce(&mut Section<'_>)) {
        if std::env::var("NVFP4_BENCH_SHAPES").is_ok_and(|part| !shape.contains(&part)) {
            return;
        }
        measure(&mut Section {
            bench: self,
            shape,
            effort,
            captured: false,
        });
    }

    /// Returns the record of `kernel` at `shape`.
    fn find(&self, shape: &str, kernel: &str) -> Option<&Record> {
        let is_it = |record: &&Record| record.shape == shape && record.kernel == kernel;
        self.records.iter().find(is_it)
    }

    /// Returns the time of a kernel with one amax per token as a multiple of that with one amax,
    /// if `record` is such a kernel.
    fn of_per_tensor(&self, record: &Record) -> Option<f64> {
        let rest = record.kernel.strip_prefix(PER_TOKEN)?;
        let other = self.find(&record.shape, &format!("{PER_TENSOR}{rest}"))?;
        Some(record.median() / other.median())
    }

    /// Prints the table, and writes it as a results file; neither if nothing was timed.
    pub fn report(self) -> std::io::Result<()> {
        if is_run_once() {
            return Ok(());
        }
        self.criterion.final_summary();
        let device = Capabilities::of(&self.client);
        println!("\n{} (CubeCL {})", device.device, device.runtime);
        println!(
            "| shape | kernel | us | GB/s | % of copy | launches | of per-tensor |\n\
             |---|---|---|---|---|---|---|"
        );
        let mut rows = Vec::new();
        for record in &self.records {
            let Record { shape, kernel, .. } = record;
            let (us, rate) = (record.median() * 1e6, record.rate());
            // If an empty launch was timed: the time as a multiple of it.
            let launches = self.find(shape, EMPTY).map(|one| us / (one.median() * 1e6));
            let shown = |value: Option<f64>, digits| {
                value.map_or(String::new(), |value| format!("{value:.digits$}"))
            };
            let (text, gigabytes, share, teraflops) = match record.work {
                Work::Operations(_) => {
                    let rate = rate / 1e3;
                    (format!("{rate:.1} TFLOP/s"), None, None, Some(rate))
                }
                Work::Bytes(_) => {
                    let copy = self.find(shape, COPY);
                    let share = copy.map(|copy| 100.0 * rate / copy.rate());
                    (format!("{rate:.0}"), Some(rate), share, None)
                }
            };
            let of_per_tensor = self.of_per_tensor(record);
            let (percent, multiple) = (shown(share, 0), shown(launches, 1));
            let ratio = shown(of_per_tensor, 2);
            println!(
                "| {shape} | {kernel} | {us:.1} | {text} | {percent} | {multiple} | {ratio} |"
            );
            rows.push(Row {
                name: kernel.clone(),
                at: Some(shape.clone()),
                values: vec![
                    Some(us),
                    gigabytes,
                    share,
                    launches,
                    teraflops,
                    of_per_tensor,
                ],
            });
        }
        let results = Results {
            bench: "kernels",
            gpu: device.device.clone(),
            title: "Kernels beside a copy",
            about: &["cube_kernels/src"],
            method: "device events around batches of launches, medians",
            row: "kernel",
            units: &[
                ("µs", 1),
                ("GB/s", 0),
                ("% of copy", 0),
                ("launches", 1),
                ("TFLOP/s", 1),
                ("of per-tensor", 2),
            ],
            rows,
        };
        results.write()
    }
}

/// Measurements of one shape.
pub struct Section<'a> {
    bench: &'a mut Bench,
    shape: String,
    effort: Effort,
    captured: bool,
}

impl Section<'_> {
    pub fn client(&self) -> Client {
        self.bench.client.clone()
    }

    /// Returns the section with less measurement time.
    pub fn brief(&mut self) -> Section<'_> {
        Section {
            effort: Effort::Brief,
            shape: self.shape.clone(),
            bench: &mut *self.bench,
            captured: self.captured,
        }
    }

    /// Returns the section with launches captured into a graph that is replayed, which excludes
    /// host time even for short launches.
    pub fn captured(&mut self) -> Section<'_> {
        Section {
            captured: true,
            ..self.brief()
        }
    }

    /// Times `launch(i)`, which reads and writes `bytes` bytes.
    pub fn time(&mut self, kernel: &str, bytes: f64, launch: impl FnMut(usize)) {
        self.time_work(kernel, Work::Bytes(bytes), launch);
    }

    /// Times `launch(i)`, which does `work`, unless `NVFP4_BENCH_KERNELS` is set and no alternative
    /// of it is contained in the name.
    pub fn time_work(&mut self, kernel: &str, work: Work, mut launch: impl FnMut(usize)) {
        let is_asked = |parts: String| parts.split('|').any(|part| kernel.contains(part));
        if !std::env::var("NVFP4_BENCH_KERNELS").map_or(true, is_asked) {
            return;
        }
        let client = self.client();
        if is_run_once() {
            println!("{}/{kernel}", self.shape);
            launch(0);
            return block_on(client.sync()).expect("a kernel failed");
        }
        if !self.captured {
            return self.sample(kernel, work, &mut |launches| {
                (0..launches).for_each(&mut launch);
                launches
            });
        }
        let mut graph = None;
        // As many launches as take about 3 ms at 3 TB/s or 500 TFLOP/s, so that a replay costs little.
        let captured = match work {
            Work::Bytes(bytes) => 9e9 / bytes,
            Work::Operations(operations) => 1.5e12 / operations,
        };
        let captured = captured.clamp(2.0, 64.0) as usize;
        self.sample(kernel, work, &mut |launches| {
            let graph = graph.get_or_insert_with(|| {
                client.graph_prepare().expect("a graph");
                (0..2).for_each(&mut launch);
                block_on(client.sync()).expect("a kernel failed");
                client.start_capture().expect("a graph");
                (0..captured).for_each(&mut launch);
                client.stop_capture().expect("a graph")
            });
            let replays = launches.div_ceil(captured);
            for _ in 0..replays {
                // SAFETY: the operands are alive, and nothing else runs on this stream.
                unsafe { graph.replay() }.expect("a graph");
            }
            replays * captured
        });
    }

    /// Samples `run(count)`, which launches at least `count` times and returns the number of
    /// launches.
    fn sample(&mut self, kernel: &str, work: Work, run: &mut dyn FnMut(usize) -> usize) {
        let client = self.client();
        let mut seconds: Vec<f64> = Vec::new();
        let mut warm = false;
        let [warm_up, measurement] = self.effort.windows();
        let mut group = self.bench.criterion.benchmark_group(&self.shape);
        if let Work::Bytes(bytes) = work {
            group.throughput(Throughput::Bytes(bytes as u64));
        }
        group.sample_size(10);
        group.sampling_mode(SamplingMode::Flat);
        group.warm_up_time(warm_up);
        group.measurement_time(measurement);
        group.bench_function(kernel, |bencher| {
            bencher.iter_custom(|iterations| {
                if !warm {
                    // Compile kernels and grow the memory pool before the samples.
                    run(4);
                    block_on(client.sync()).expect("a kernel failed");
                    warm = true;
                }
                // In batches of less than 3 ms, overhead before and after dominates.
                let least = seconds.last().map_or(8.0, |each| 3e-3 / each);
                let window = client.profile_start().expect("profiling");
                let launches = run((iterations as usize).max(least.clamp(4.0, 32.0) as usize));
                let profile = client.profile_end(window).expect("profiling");
                let ticks = block_on(profile.resolve()).expect("a measurement");
                let each = ticks.duration().as_secs_f64() / launches as f64;
                seconds.push(each);
                Duration::from_secs_f64(each * iterations as f64)
            });
        });
        group.finish();
        if !seconds.is_empty() {
            self.bench.records.push(Record {
                shape: self.shape.clone(),
                kernel: kernel.into(),
                work,
                seconds,
            });
        }
    }

    /// Times the copy of `bytes` from `source(i)`, the baseline of the shape's other kernels.
    pub fn copy<'h>(&mut self, bytes: usize, source: impl Fn(usize) -> &'h Handle) {
        let client = self.client();
        let out = client.empty(bytes);
        self.time(COPY, 2.0 * bytes as f64, |i| {
            common::copy(&client, source(i), &out, bytes);
        });
    }

    /// Times an empty launch, of which other launches of the shape are reported as multiples.
    pub fn empty(&mut self) {
        let client = self.client();
        let out = client.empty(4);
        self.time(EMPTY, 0.0, |_| {
            // SAFETY: nothing is written.
            unsafe {
                empty_kernel::launch_unchecked(
                    &client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(32),
                    BufferArg::from_raw_parts(out.clone(), 1),
                    32,
                );
            }
        });
    }
}
