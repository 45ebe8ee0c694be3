//! GEMM throughput on a GPU: dense, small M, model shapes, and groups. Also measures the six GEMMs
//! and the quantizations of a linear layer's forward and backward, the cost of a cuBLASLt call,
//! tiles of every width with and without stream-K, dgrad with packed weights, and GEMMs of layers in
//! other forms: an amax per row, groups along K (weight gradients of experts), fused norm and SwiGLU.
//!
//! Run `cargo bench -p nvfp4-kernels --features cuda --bench gemm`; a filter after `--` selects,
//! such as `-- few`. cuBLAS's bf16 GEMM (through cuBLASLt) is timed in the same process, on the
//! same values and the same stream, because the clock depends on the temperature. Operands are
//! random, since zeros draw less power, and rotate among sets that together exceed the L2 cache.
//! GEMMs are captured into a graph that is replayed, which excludes host time; `calls` measures the
//! host cost of a call. GEMMs that are bound by packed bytes, with small M or groups, are compared
//! with a copy in the same process. Groups are compared with the dense GEMM of as many operations,
//! too.
//!
//! A table is printed to standard output. The same figures are written as a results file, which
//! `cargo xtask results` reads, to `nvfp4-bench-gemm.json` in the target folder (or to the file in
//! `NVFP4_BENCH_JSON`).
//!
//! For each GEMM of packed operands the table includes estimates for a B200, by a roofline and by
//! NVIDIA's model. Neither is measured.
//!
//! If `NVFP4_BENCH_ONCE` is set, everything runs once and nothing is timed, for a profiler. With
//! `NVFP4_BENCH_DEVICE=cpu` (and the feature `cpu`) everything runs once at tiny sizes on CubeCL's
//! CPU runtime, as a smoke test; GEMMs that need a GPU are left out with a message.

mod common;
mod dgrad;
mod forms;

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use common::{
    b200::{Shape, modelled},
    device::{self, is_gpu, is_run_once},
    results::{Results, Row},
};
use criterion::Criterion;
use cubecl::prelude::*;
use nvfp4_formats::{
    BlockScaling, Format, Hadamard, Layout, QuantParams, RandomStream, Rounding, Usage,
};
use nvfp4_kernels::{
    capabilities::Capabilities,
    cubecl,
    gemm::{
        self, Elements, Gemm, Operand, Plan, Scale, Target,
        proof::{
            DequantThenBf16, DequantThenStreamK, Sm90Tile, W4a16, W4a16Tile,
            cublaslt::{self, CublasLtFormat, CublasLtGemm, CublasLtOperand},
            decode, transposed,
        },
    },
    moe::GroupOffsets,
    quantize::{Quantize, TargetSpec},
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

/// Name of cuBLAS's GEMMs.
const CUBLAS: &str = "cuBLAS bf16";

/// Name of the copy.
const COPY: &str = "copy";

/// Timing of one benchmark.
#[derive(Clone)]
struct Record {
    name: String,
    /// Number of floating-point operations.
    operations: f64,
    /// Bytes of packed weights, if they bound the GEMM; for a copy, all bytes read and written.
    bytes: Option<f64>,
    /// Shape of a GEMM of packed operands, for the B200 estimates.
    shape: Option<Shape>,
    /// Seconds per launch, for each batch.
    seconds: Vec<f64>,
}

impl Record {
    fn new(name: String, operations: f64) -> Self {
        Self {
            name,
            operations,
            bytes: None,
            shape: None,
            seconds: Vec::new(),
        }
    }

    /// Returns the record of a GEMM of packed operands, whose weight has `groups * n` x `k`
    /// elements.
    fn of_packed(name: String, shape: Shape) -> Self {
        let Shape {
            m, n, k, groups, ..
        } = shape;
        Self {
            bytes: Some((groups * n * k) as f64 * shape.element_bytes()),
            shape: Some(shape),
            ..Self::new(name, 2.0 * (m * n * k) as f64)
        }
    }

    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }
}

static RECORDS: Mutex<Vec<Record>> = Mutex::new(Vec::new());

fn sync(client: &Client) {
    futures_lite::future::block_on(client.sync()).expect("a kernel failed");
}

/// Times `launch(i)` as `name`, in batches between two synchronizations, each after a pause in
/// which the chip cools down.
fn time(criterion: &mut Criterion, client: &Client, record: Record, mut launch: impl FnMut(usize)) {
    if is_run_once() {
        return run_once(client, &record, launch);
    }
    // Compile kernels and grow memory pools before the samples.
    (0..2).for_each(&mut launch);
    sample(criterion, client, record, |launches| {
        (0..launches).for_each(&mut launch);
        launches
    });
}

/// Runs `launch(0)`, if its record is selected.
fn run_once(client: &Client, record: &Record, mut launch: impl FnMut(usize)) {
    if is_wanted(&record.name) {
        println!("{}", record.name);
        launch(0);
        sync(client);
    }
}

/// Times device work like [`time`]: captures `launch(i)` into a graph and replays it.
fn time_on_device(
    criterion: &mut Criterion,
    client: &Client,
    record: Record,
    mut launch: impl FnMut(usize),
) {
    if is_run_once() {
        return run_once(client, &record, launch);
    }
    client.graph_prepare().expect("a graph");
    (0..2).for_each(&mut launch);
    sync(client);
    // Two milliseconds at a petaflop per second: short GEMMs are batched to hide the cost of a
    // replay.
    let count = ((2e12 / record.operations) as usize).clamp(2, 32);
    client.start_capture().expect("a graph");
    (0..count).for_each(&mut launch);
    let graph = client.stop_capture().expect("a graph");
    sample(criterion, client, record, |launches| {
        let replays = launches.div_ceil(count);
        for _ in 0..replays {
            // SAFETY: the operands are alive, and nothing else runs on this stream.
            unsafe { graph.replay() }.expect("a graph");
        }
        replays * count
    });
}

/// Samples `launch(count)`, which launches at least `count` times and returns the number of
/// launches.
fn sample(
    criterion: &mut Criterion,
    client: &Client,
    record: Record,
    mut launch: impl FnMut(usize) -> usize,
) {
    let mut group = criterion.benchmark_group("gemm");
    group.sample_size(10);
    // The table below has medians; criterion's intervals are not worth seconds per GEMM.
    group.nresamples(1001);
    group.warm_up_time(Duration::from_millis(50));
    group.measurement_time(Duration::from_millis(200));
    group.bench_function(&record.name, |bencher| {
        bencher.iter_custom(|iterations| {
            std::thread::sleep(Duration::from_millis(20));
            // Let the clock rise first.
            launch(1);
            sync(client);
            let start = Instant::now();
            let launches = launch(iterations as usize);
            sync(client);
            let elapsed = start.elapsed();
            let seconds = elapsed.as_secs_f64() / launches as f64;
            // Short batches measure the synchronization.
            if elapsed > Duration::from_micros(500) {
                let mut records = RECORDS.lock().unwrap();
                let known = records.iter().position(|other| other.name == record.name);
                let at = known.unwrap_or_else(|| {
                    records.push(record.clone());
                    records.len() - 1
                });
                records[at].seconds.push(seconds);
            }
            Duration::from_secs_f64(seconds * iterations as f64)
        });
    });
    group.finish();
}

/// True if the command line selects names that start with `name`; otherwise its operands are not
/// made.
fn is_wanted(name: &str) -> bool {
    let mut filters = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    let first = filters.next();
    first.is_none_or(|filter| name.contains(&filter) || filter.contains(name))
}

/// Pseudorandom words, repeated from different offsets.
struct Noise(Vec<u32>);

impl Noise {
    fn new() -> Self {
        let mut state = 0x9e37_79b9u32;
        Self(
            (0..(1 << 20) + 7)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 17;
                    state ^= state << 5;
                    state
                })
                .collect(),
        )
    }

    /// Returns `count` values from the word at `seed` on.
    fn fill<T: Copy>(&self, seed: usize, count: usize, value: impl Fn(u32) -> T) -> Vec<T> {
        let stretch: Vec<T> = self.0.iter().map(|&word| value(word)).collect();
        let mut filled = Vec::with_capacity(count);
        let mut from = seed * 65_537 % stretch.len();
        while filled.len() < count {
            let to = stretch.len().min(from + count - filled.len());
            filled.extend_from_slice(&stretch[from..to]);
            from = 0;
        }
        filled
    }

    /// Returns an operand of arbitrary codes, with block scales between 2^-2 and 2^3.
    fn packed(&self, client: &Client, rows: usize, k: usize, seed: usize) -> DeviceQuantized {
        let codes = self.fill(seed, rows * k / 8, |word| word);
        let scales = self.fill(seed + 1, rows * k / 16, |word| {
            0x28 + (word >> 9 & 0x1f) as u8
        });
        let upload = |bytes: &[u8]| client.create_from_slice(bytes);
        let amax = upload(&1000.0f32.to_ne_bytes());
        let parts = (upload(bytemuck::cast_slice(&codes)), upload(&scales), amax);
        DeviceQuantized::new(Layout::nvfp4(rows, k, Usage::Rowwise), parts)
    }

    /// Returns an operand of arbitrary codes in an MX format except NaN, with block scales between
    /// 2^-4 and 2^3.
    fn mx(
        &self,
        client: &Client,
        format: Format,
        (rows, k): (usize, usize),
        seed: usize,
    ) -> DeviceQuantized {
        // No MXFP8 code has all of its lower seven bits set.
        let mask = match format {
            Format::Mxfp8 => 0xbfbf_bfbf,
            _ => u32::MAX,
        };
        let words = rows * k * format.code_bits() / 32;
        let codes = self.fill(seed, words, |word| word & mask);
        let scales = self.fill(seed + 1, rows * k / 32, |word| 123 + (word >> 9 & 7) as u8);
        let upload = |bytes: &[u8]| client.create_from_slice(bytes);
        let scales = upload(&scales);
        let parts = (upload(bytemuck::cast_slice(&codes)), scales.clone(), scales);
        DeviceQuantized::new(Layout::new(format, (rows, k), Usage::Rowwise), parts)
    }

    /// Returns an operand in `format`.
    fn operand(
        &self,
        client: &Client,
        format: Format,
        (rows, k): (usize, usize),
        seed: usize,
    ) -> DeviceQuantized {
        match format {
            Format::Nvfp4 => self.packed(client, rows, k, seed),
            Format::Mxfp8 | Format::Mxfp4 => self.mx(client, format, (rows, k), seed),
        }
    }

    /// Returns sums of two uniform values, between -1 and 1, as bf16.
    fn matrix(&self, client: &Client, rows: usize, k: usize, seed: usize) -> Matrix {
        let values = self.fill(seed, rows * k, |word| {
            let (x, y) = ((word & 0xffff) as f32, (word >> 16) as f32);
            (((x + y) / 65535.0 - 1.0).to_bits() >> 16) as u16
        });
        let handle = client.create_from_slice(bytemuck::cast_slice(&values));
        Matrix::new(handle, rows, k, FloatKind::Bf16).unwrap()
    }
}

/// Cubes and other shapes with two large operands.
const LARGE: [(usize, usize, usize); 6] = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (16384, 4096, 4096),
    (8192, 14336, 4096),
    (512, 8192, 8192),
];

/// Weight gradients of a block of width 768 and 16384 tokens, and other outputs whose tiles do not
/// fill all SMs evenly.
const UNEVEN: [(usize, usize, usize); 9] = [
    (768, 768, 16384),
    (768, 2304, 16384),
    (768, 4096, 16384),
    (2048, 768, 16384),
    (1024, 1024, 8192),
    (2048, 2048, 2048),
    (2048, 6144, 8192),
    (8192, 2048, 2048),
    (16384, 768, 2048),
];

/// Rows of a decoding step.
const FEW: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Weights of the linear layers of models: name, rows, columns.
const MODELS: [(&str, usize, usize); 13] = [
    ("Llama-3 8B qkv", 6144, 4096),
    ("Llama-3 8B o", 4096, 4096),
    ("Llama-3 8B gate, up", 28672, 4096),
    ("Llama-3 8B down", 4096, 14336),
    ("Llama-3 70B qkv", 10240, 8192),
    ("Llama-3 70B o", 8192, 8192),
    ("Llama-3 70B gate, up", 57344, 8192),
    ("Llama-3 70B down", 8192, 28672),
    ("DeepSeek-V3 q, kv a", 2112, 7168),
    ("DeepSeek-V3 q b", 24576, 1536),
    ("DeepSeek-V3 kv b", 32768, 512),
    ("DeepSeek-V3 o", 7168, 16384),
    ("DeepSeek-V3 dense gate, up", 36864, 7168),
];

/// Experts of DeepSeek-V3: tokens, rows and columns of a weight, experts.
const EXPERTS: [(usize, usize, usize, usize); 7] = [
    (8192, 4096, 7168, 8),
    (8192, 4096, 7168, 32),
    (8192, 4096, 7168, 64),
    (8192, 4096, 7168, 128),
    (8192, 4096, 7168, 256),
    (8192, 7168, 2048, 256),
    (32768, 4096, 7168, 128),
];

/// Returns the shape of a GEMM, for the B200 estimates.
fn b200_shape(format: Format, (m, n, k): (usize, usize, usize), groups: usize) -> Shape {
    Shape {
        format,
        m,
        n,
        k,
        groups,
    }
}

/// Returns M, N and K: unchanged on a GPU, otherwise tiny.
fn shrunk((m, n, k): (usize, usize, usize)) -> (usize, usize, usize) {
    device::size((m, n, k), (m.min(32), 32, 64))
}

/// Decodes the elements of a packed operand to bf16, without the global scale.
fn decoded(client: &Client, packed: &DeviceQuantized) -> Matrix {
    let (rows, cols) = (packed.outer(), packed.inner());
    Matrix::new(decode(client, packed), rows, cols, FloatKind::Bf16).unwrap()
}

/// Runs cuBLAS's GEMM of two bf16 matrices.
fn cublas(client: &Client, a: &Matrix, b: &Matrix) -> Result<Matrix, nvfp4_formats::Nvfp4Error> {
    let out = Matrix::empty(client, a.rows, b.rows, FloatKind::Bf16);
    let side = |matrix: &Matrix, data| CublasLtOperand {
        rows: matrix.rows,
        data,
        scale: None,
    };
    let product = CublasLtGemm {
        format: CublasLtFormat::Bf16,
        k: a.cols,
        a: side(a, &a.handle),
        b: side(b, &b.handle),
        alpha: None,
        bias: None,
        out: &out,
        accumulate: false,
    };
    cublaslt::gemm(client, &product)?;
    Ok(out)
}

/// Runs our GEMM.
fn multiply(client: &Client, request: Gemm) -> Result<Matrix, nvfp4_formats::Nvfp4Error> {
    gemm::gemm(client, &request).map(|output| output.matrix)
}

/// Runs our GEMM of two bf16 matrices.
fn bf16(client: &Client, a: Elements, b: Elements) -> Matrix {
    let [a, b] = [a, b].map(|elements| Operand {
        elements,
        scale: Scale::One,
    });
    multiply(client, Gemm::new(a, b).out(FloatKind::Bf16)).unwrap()
}

fn dense(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    let mut all = |name: String, (m, n, k): (usize, usize, usize)| {
        if !is_wanted(&name) {
            return;
        }
        let (m, n, k) = shrunk((m, n, k));
        let operations = 2.0 * (m * n * k) as f64;
        // Enough sets that the operands of one leave the L2 cache before their next use.
        let sets = |bytes: usize| (100_000_000 / bytes).clamp(1, 7) + 1;
        let packed = sets(n * k / 2);
        let (a, b): (Vec<_>, Vec<_>) = (0..packed)
            .map(|i| {
                let a = noise.packed(client, m, k, 2 * i);
                (a, noise.packed(client, n, k, 2 * i + 1))
            })
            .unzip();
        let plain = sets(2 * n * k).min(packed);
        let (x, y): (Vec<_>, Vec<_>) = (0..plain)
            .map(|i| (decoded(client, &a[i]), decoded(client, &b[i])))
            .unzip();
        let shape = |format| b200_shape(format, (m, n, k), 1);
        let mut run = |kind: &str, launch: &dyn Fn(usize)| {
            let name = format!("{name}, {kind}");
            let record = match kind {
                "NVFP4" => Record::of_packed(name, shape(Format::Nvfp4)),
                "MXFP8" => Record::of_packed(name, shape(Format::Mxfp8)),
                "MXFP4" => Record::of_packed(name, shape(Format::Mxfp4)),
                _ => Record::new(name, operations),
            };
            time_on_device(criterion, client, record, launch);
        };
        run("NVFP4", &|i| {
            let (a, b) = (&a[i % packed], &b[i % packed]);
            multiply(client, Gemm::new(a, b).out(FloatKind::Bf16)).unwrap();
        });
        // As in recipes in MXFP8 and MXFP4, which have many tokens.
        let others = [("MXFP8", Format::Mxfp8), ("MXFP4", Format::Mxfp4)];
        for (kind, format) in others.into_iter().filter(|_| m > 256) {
            let sets = sets(n * k).min(packed);
            let (a, b): (Vec<_>, Vec<_>) = (0..sets)
                .map(|i| {
                    let a = noise.operand(client, format, (m, k), 2 * i);
                    (a, noise.operand(client, format, (n, k), 2 * i + 1))
                })
                .unzip();
            run(kind, &|i| {
                let (a, b) = (&a[i % sets], &b[i % sets]);
                multiply(client, Gemm::new(a, b).out(FloatKind::Bf16)).unwrap();
            });
        }
        run("bf16", &|i| {
            let (x, y) = (&x[i % plain], &y[i % plain]);
            multiply(client, Gemm::new(x, y).out(FloatKind::Bf16)).unwrap();
        });
        let columns = |matrices: &[Matrix]| -> Vec<_> {
            let matrices = matrices.iter();
            matrices
                .map(|matrix| transposed(client, matrix, 1))
                .collect()
        };
        let (x_columns, y_columns) = (columns(&x), columns(&y));
        // As in a layer's forward and its weight gradient.
        run("bf16 with b in columns", &|i| {
            let (x, y) = (&x[i % plain], &y_columns[i % plain]);
            bf16(client, Elements::Bf16(x), Elements::Bf16MnMajor(y));
        });
        run("bf16 in columns", &|i| {
            let (x, y) = (&x_columns[i % plain], &y_columns[i % plain]);
            bf16(client, Elements::Bf16MnMajor(x), Elements::Bf16MnMajor(y));
        });
        match cublas(client, &x[0], &y[0]) {
            Ok(_) => run(CUBLAS, &|i| {
                cublas(client, &x[i % plain], &y[i % plain]).unwrap();
            }),
            Err(error) => println!("{name}: {error}"),
        }
    };
    for (m, n, k) in LARGE {
        all(format!("large/{m} x {n} x {k}"), (m, n, k));
    }
    for m in FEW {
        all(format!("few/{m} x 8192 x 8192"), (m, 8192, 8192));
    }
    for (name, n, k) in MODELS {
        for m in [1, 64, 8192] {
            all(format!("model/{name}, {m} tokens"), (m, n, k));
        }
    }
}

/// Times data-parallel and stream-K tiles of every width.
fn tiles(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    for (m, n, k) in UNEVEN {
        let name = format!("tiles/{m} x {n} x {k}");
        if !is_wanted(&name) {
            continue;
        }
        let (m, n, k) = shrunk((m, n, k));
        let operations = 2.0 * (m * n * k) as f64;
        let (x, y): (Vec<_>, Vec<_>) = (0..2)
            .map(|i| {
                let x = noise.matrix(client, m, k, 2 * i);
                (x, noise.matrix(client, n, k, 2 * i + 1))
            })
            .unzip();
        let plans = Sm90Tile::ALL.map(|tile| {
            let whole = format!("128 x {}", tile.n());
            let shared = format!("128 x {} shared", tile.n());
            let whole = (whole, Plan::from(DequantThenBf16(tile, 16)));
            [whole, (shared, Plan::from(DequantThenStreamK(tile, 16)))]
        });
        for (plan, chosen) in plans.into_iter().flatten() {
            let queue = |i: usize| {
                let gemm = Gemm::new(&x[i % 2], &y[i % 2]).out(FloatKind::Bf16);
                multiply(client, gemm.plan(chosen))
            };
            if let Err(error) = queue(0) {
                println!("{name}, {plan}: {error}");
                continue;
            }
            let record = Record::new(format!("{name}, {plan}"), operations);
            time_on_device(criterion, client, record, |i| {
                queue(i).unwrap();
            });
        }
        // Both packed, as in some weight gradients.
        let [a, b] = [(m, 1), (n, 2)].map(|(rows, seed)| {
            let packed = |i: usize| noise.packed(client, rows, k, seed + 2 * i);
            [packed(0), packed(1)]
        });
        let fused = W4a16Tile::ALL.into_iter().filter(|tile| tile.rows_a >= 112);
        let fused = fused.map(|tile| {
            let form = format!("{} x {}", tile.rows_b(), tile.rows_a);
            (
                format!("packed, {form} in registers"),
                Plan::from(W4a16(tile, 16)),
            )
        });
        let decoded = Plan::from(DequantThenStreamK(Sm90Tile::N256, 16));
        for (plan, chosen) in fused.chain([("packed, 128 x 256 shared".into(), decoded)]) {
            let record = Record::new(format!("{name}, {plan}"), operations);
            let queue = |i: usize| {
                let gemm = Gemm::new(&a[i % 2], &b[i % 2]).out(FloatKind::Bf16);
                multiply(client, gemm.plan(chosen))
            };
            if queue(0).is_ok() {
                time_on_device(criterion, client, record, |i| {
                    queue(i).unwrap();
                });
            }
        }
        let record = Record::new(format!("{name}, {CUBLAS}"), operations);
        match cublas(client, &x[0], &y[0]) {
            Ok(_) => time_on_device(criterion, client, record, |i| {
                cublas(client, &x[i % 2], &y[i % 2]).unwrap();
            }),
            Err(error) => println!("{name}: {error}"),
        }
    }
}

/// Times calls for one small GEMM: a cuBLASLt call queued on CubeCL's stream, the same call between
/// two host synchronizations, and a launch of our kernel.
fn calls(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    let (m, n, k) = device::size((128, 128, 128), (16, 16, 16));
    let (a, b) = (noise.matrix(client, m, k, 1), noise.matrix(client, n, k, 2));
    if let Err(error) = cublas(client, &a, &b) {
        println!("calls: {error}");
        return;
    }
    // Many calls per batch: one call is shorter than the synchronization after it.
    const CALLS: usize = 256;
    let mut run = |kind: &str, launch: &dyn Fn()| {
        let name = format!("calls/{CALLS} of {m} x {n} x {k}, {kind}");
        let operations = (CALLS * 2 * m * n * k) as f64;
        time(criterion, client, Record::new(name, operations), |_| {
            (0..CALLS).for_each(|_| launch());
        });
    };
    run("queued", &|| {
        cublas(client, &a, &b).unwrap();
    });
    run("between synchronisations", &|| {
        sync(client);
        cublas(client, &a, &b).unwrap();
        sync(client);
    });
    run("our kernel", &|| {
        multiply(client, Gemm::new(&a, &b).out(FloatKind::Bf16)).unwrap();
    });
}

/// Returns the sizes of `groups` groups with `rows` rows in total: equal, or from a fifth to nine
/// fifths of the mean.
fn sizes(rows: usize, groups: usize, skewed: bool) -> Vec<usize> {
    let mut sizes = vec![rows / groups; groups];
    if skewed {
        for g in 0..groups / 2 {
            let moved = sizes[g] * (g % 4 + 1) / 5;
            sizes[g] -= moved;
            sizes[groups - 1 - g] += moved;
        }
    }
    sizes
}

/// Returns a view of rows of a bf16 matrix.
fn view(matrix: &Matrix, first: usize, rows: usize) -> Matrix {
    let bytes = |rows: usize| (rows * matrix.cols * matrix.dtype.size()) as u64;
    let behind = matrix.rows - first - rows;
    let handle = matrix.handle.clone().offset_start(bytes(first));
    let handle = handle.offset_end(bytes(behind));
    Matrix::new(handle, rows, matrix.cols, matrix.dtype).unwrap()
}

/// Times a copy of more bytes than the L2 cache holds, all of which are read and written. Runs with
/// any filter, because GEMMs are compared with it.
fn copy(client: &Client) {
    const COPIES: usize = 8;
    let bytes = 1 << 29;
    let (from, to) = (client.empty(bytes), client.empty(bytes));
    let batch = |_| {
        sync(client);
        let start = Instant::now();
        (0..COPIES).for_each(|_| common::copy(client, &from, &to, bytes));
        sync(client);
        start.elapsed().as_secs_f64() / COPIES as f64
    };
    // The first run compiles the kernel.
    let seconds = (0..6).map(batch).skip(1).collect();
    RECORDS.lock().unwrap().push(Record {
        name: COPY.into(),
        operations: 0.0,
        bytes: Some(2.0 * bytes as f64),
        shape: None,
        seconds,
    });
}

/// Times the dense GEMM with as many operations as the groups, by the kernel that it normally uses
/// and by the grouped kernel.
fn ungrouped(
    criterion: &mut Criterion,
    client: &Client,
    noise: &Noise,
    (rows, n, k): (usize, usize, usize),
) {
    let name = dense_of(rows, n, k);
    if !is_wanted(&name) {
        return;
    }
    let (rows, n, k) = shrunk((rows, n, k));
    let (a, b) = (
        noise.packed(client, rows, k, 1),
        noise.packed(client, n, k, 2),
    );
    let fused = Plan::from(W4a16(W4a16Tile::ALL[0], 16));
    for (kind, plan) in [
        ("NVFP4", None),
        ("NVFP4 by the kernel of groups", Some(fused)),
    ] {
        if plan.is_some() && !is_gpu() {
            continue;
        }
        let record = Record::new(format!("{name}, {kind}"), 2.0 * (rows * n * k) as f64);
        time_on_device(criterion, client, record, |_| {
            let (a, b) = (Operand::from(&a), Operand::from(&b));
            let target = Target::New(FloatKind::Bf16);
            multiply(client, Gemm::new(a, b).target(target).plan(plan)).unwrap();
        });
    }
}

/// Returns the name of the dense GEMM of groups.
fn dense_of(rows: usize, n: usize, k: usize) -> String {
    format!("grouped/{rows} x {n} x {k}, dense")
}

fn grouped(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    let mut shapes = EXPERTS.map(|(rows, n, k, _)| (rows, n, k)).to_vec();
    shapes.dedup();
    for shape in shapes {
        ungrouped(criterion, client, noise, shape);
    }
    for (rows, n, k, groups) in EXPERTS {
        if !is_wanted(&format!("grouped/{rows} x {n} x {k}, {groups} ")) {
            continue;
        }
        let name = format!("grouped/{rows} x {n} x {k}, {groups}");
        let (rows, n, k) = shrunk((rows, n, k));
        let rows = rows.max(groups);
        let (a, b) = (
            noise.packed(client, rows, k, 1),
            noise.packed(client, groups * n, k, 2),
        );
        let (x, y) = (decoded(client, &a), decoded(client, &b));
        for skewed in [false, true] {
            let mut offsets = vec![0u32];
            for size in sizes(rows, groups, skewed) {
                offsets.push(offsets.last().unwrap() + size as u32);
            }
            let offsets = GroupOffsets {
                offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
                count: groups,
            };
            let kind = if skewed { "skewed" } else { "balanced" };
            let name = format!("{name} {kind}");
            let operations = 2.0 * (rows * n * k) as f64;
            for (kind, format) in [("NVFP4", Format::Nvfp4), ("MXFP8", Format::Mxfp8)] {
                let shape = b200_shape(format, (rows, n, k), groups);
                let record = Record::of_packed(format!("{name}, {kind}"), shape);
                let a = noise.operand(client, format, (rows, k), 1);
                let b = noise.operand(client, format, (groups * n, k), 2);
                time_on_device(criterion, client, record, |_| {
                    let target = Target::New(FloatKind::Bf16);
                    let request = Gemm::new(&a, &b).target(target).m_grouped(&offsets);
                    multiply(client, request).unwrap();
                });
            }
            // One cuBLAS call per expert, which requires the sizes on the host.
            let mut first = 0;
            let experts: Vec<_> = sizes(rows, groups, skewed)
                .into_iter()
                .enumerate()
                .filter(|(_, size)| *size > 0)
                .map(|(g, size)| {
                    let x = view(&x, first, size);
                    first += size;
                    (x, view(&y, g * n, n))
                })
                .collect();
            match cublas(client, &experts[0].0, &experts[0].1) {
                Ok(_) => {
                    let record = Record::new(format!("{name}, {CUBLAS}"), operations);
                    time_on_device(criterion, client, record, |_| {
                        for (x, y) in &experts {
                            cublas(client, x, y).unwrap();
                        }
                    });
                }
                Err(error) => println!("{name}: {error}"),
            }
        }
    }
}

/// Times a linear layer as the `nvfp4` recipe trains it: all amax values, quantized copies and
/// GEMMs of forward and backward, with weights in 16x16 tiles, stochastically rounded gradients,
/// and both operands of the weight gradient transformed. Also times the three GEMMs of a bf16
/// layer, whose weight is `inputs` x `outputs`: on the matrices in their original layout, and on
/// copies with every K dimension along rows.
fn linear(criterion: &mut Criterion, client: &Client, noise: &Noise) {
    for (tokens, inputs, outputs) in [(8192, 4096, 4096), (8192, 4096, 14336)] {
        let shape = format!("linear/{tokens} x {inputs} x {outputs}");
        let (tokens, inputs, outputs) = shrunk((tokens, inputs, outputs));
        let x = noise.matrix(client, tokens, inputs, 1);
        let w = noise.matrix(client, outputs, inputs, 2);
        let dy = noise.matrix(client, tokens, outputs, 3);
        let rht = Some(Hadamard::default());
        let both = |matrix: &Matrix, row: Rounding, col: Rounding| {
            let col = TargetSpec::new(QuantParams {
                hadamard: rht,
                ..QuantParams::nvfp4(col)
            });
            let request = Quantize::new(matrix)
                .rowwise(TargetSpec::new(row))
                .columnwise(col);
            request.launch(client).unwrap().into_both()
        };
        let nearest = || Rounding::Nearest;
        let stochastic = |stream| Rounding::Stochastic(RandomStream::new(1, stream, 3));
        let operations = 6.0 * (tokens * inputs * outputs) as f64;
        let stored = transposed(client, &w, 1);
        let (stored, x, dy) = (&stored, &x, &dy);
        let record = |kind: &str| Record::new(format!("{shape}, {kind}"), operations);
        time_on_device(criterion, client, record("bf16"), |_| {
            use Elements::{Bf16, Bf16MnMajor};
            bf16(client, Bf16(x), Bf16MnMajor(stored));
            bf16(client, Bf16(dy), Bf16(stored));
            bf16(client, Bf16MnMajor(x), Bf16MnMajor(dy));
        });
        time_on_device(criterion, client, record("bf16 after transposing"), |_| {
            use Elements::Bf16;
            let [w, x_rows, dy_rows] = [stored, x, dy].map(|matrix| transposed(client, matrix, 1));
            bf16(client, Bf16(x), Bf16(&w));
            bf16(client, Bf16(dy), Bf16(stored));
            bf16(client, Bf16(&x_rows), Bf16(&dy_rows));
        });
        let record = record("NVFP4");
        if !is_wanted(&record.name) {
            continue;
        }
        time(criterion, client, record, |_| {
            let (x_row, x_col) = both(x, nearest(), nearest());
            let tiles = TargetSpec::new(QuantParams::nvfp4_2d(BlockScaling::Standard));
            let request = Quantize::new(&w).rowwise(tiles.clone()).columnwise(tiles);
            let (w_row, w_col) = request.launch(client).unwrap().into_both();
            multiply(client, Gemm::new(&x_row, &w_row).out(FloatKind::Bf16)).unwrap();
            let (dy_row, dy_col) = both(dy, stochastic(2), stochastic(4));
            multiply(client, Gemm::new(&dy_row, &w_col).out(FloatKind::Bf16)).unwrap();
            multiply(client, Gemm::new(&dy_col, &x_col).out(FloatKind::F32)).unwrap();
        });
    }
}

fn main() {
    let client = device::client();
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    let noise = Noise::new();
    if !is_run_once() && (is_wanted("few") || is_wanted("grouped") || is_wanted("form")) {
        copy(&client);
    }
    dense(&mut criterion, &client, &noise);
    if is_wanted("dgrad") {
        dgrad::dgrad(&mut criterion, &client, &noise);
    }
    if is_wanted("tiles") {
        tiles(&mut criterion, &client, &noise);
    }
    if is_wanted("grouped") {
        grouped(&mut criterion, &client, &noise);
    }
    if is_wanted("linear") {
        linear(&mut criterion, &client, &noise);
    }
    if is_wanted("form") {
        forms::forms(&mut criterion, &client, &noise);
    }
    if is_wanted("calls") {
        calls(&mut criterion, &client, &noise);
    }
    let rows = print(&RECORDS.lock().unwrap());
    if !is_run_once() {
        write(&client, rows);
    }
}

/// Writes the results file.
fn write(client: &Client, rows: Vec<Row>) {
    let results = Results {
        bench: "gemm",
        gpu: Capabilities::of(client).device.clone(),
        title: "GEMMs beside cuBLAS in bf16",
        about: &["cube_kernels/src/gemm", "cube_kernels/src/cube"],
        method: "captured graphs, medians; cuBLAS in the same process",
        row: "GEMM",
        units: &[
            ("µs", 1),
            ("TFLOP/s", 1),
            ("% of cuBLAS bf16", 1),
            ("% of dense", 1),
            ("packed bytes, % of copy", 1),
        ],
        rows,
    };
    results.write().expect("the results could not be written");
}

/// Returns the B200 estimates of a GEMM of packed operands: the roofline, and the value in
/// `modelled`.
fn of_b200(record: &Record, modelled: &[(Shape, f64)]) -> [String; 2] {
    let roofline = record.shape.map(Shape::roofline);
    let known = modelled
        .iter()
        .find(|(shape, _)| record.shape == Some(*shape));
    let model = known.map(|(_, us)| *us);
    [roofline, model].map(|us| us.map_or("-".into(), |us| format!("{us:.1}")))
}

/// Prints the table of all records and returns its rows.
fn print(records: &[Record]) -> Vec<Row> {
    let find = |name: &str| records.iter().find(|record| record.name == name);
    let copy = find(COPY).map(|copy| copy.bytes.unwrap() / copy.median());
    let shown = |percent: &Option<f64>| percent.map_or("-".into(), |share| format!("{share:.1} %"));
    let modelled = modelled();
    println!("B200: a roofline and a model (benches/model_b200.py), not measured");
    println!(
        "| product | us | TFLOP/s | of cuBLAS bf16 | of dense | packed bytes, of a copy | B200, \
         roofline, us | B200, model, us |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let mut rows = Vec::new();
    for record in records {
        let (name, median) = (record.name.as_str(), record.median());
        let product = name.rsplit_once(", ").map_or(name, |(product, _)| product);
        let faster = |name: String| find(&name).map(|other| 100.0 * other.median() / median);
        let cublas = faster(format!("{product}, {CUBLAS}"));
        // Shape without the groups.
        let shape = product
            .rsplit_once(", ")
            .map_or(product, |(shape, _)| shape);
        let dense = faster(format!("{shape}, dense, NVFP4"));
        let bytes = record
            .bytes
            .zip(copy)
            .map(|(bytes, rate)| 100.0 * bytes / rate / median);
        let (us, rate) = (median * 1e6, record.operations / median / 1e12);
        let shares = [cublas, dense, bytes];
        let [of_cublas, of_dense, of_copy] = shares.each_ref().map(shown);
        let [roofline, model] = of_b200(record, &modelled);
        println!(
            "| {name} | {us:.1} | {rate:.1} | {of_cublas} | {of_dense} | {of_copy} | {roofline} | \
             {model} |"
        );
        rows.push(Row {
            name: name.to_owned(),
            at: None,
            values: [&[Some(us), Some(rate)][..], &shares].concat(),
        });
    }
    rows
}
