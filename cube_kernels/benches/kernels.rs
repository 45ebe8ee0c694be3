//! Every kernel on a GPU: bytes a second against a copy timed in the same process.
//! `cargo bench -p nvfp4-kernels --features cuda --bench kernels`; a filter is the usual one of criterion.
//!
//! A sample is a batch of launches between two events of the device, so that the host does not count as
//! long as it keeps up. Inputs rotate among sets that together exceed the L2 cache. Bytes are compulsory
//! ones: every input read once, every output written once. The shapes are those of the peers: squares,
//! Llama 3's activations and weights, DeepSeek-V3's tokens in groups and experts.
//!
//! `NVFP4_BENCH_SHAPES` takes a part of the names of shapes, and leaves out all others.
//! A table goes to standard output, and the same as JSON to `target/nvfp4-bench.json` (or the file
//! that `NVFP4_BENCH_JSON` names).

use std::{collections::BTreeMap, time::Duration};

use criterion::{Criterion, Throughput};
use cubecl::prelude::*;
use futures_lite::future::block_on;
use nvfp4_kernels::{
    BlockScaling, ErrorNorm, Hadamard, HadamardSize, PackedAxis, RandomStream, ScaleLayout,
    device::{AmaxScope, Capabilities, DeviceCopy, DeviceRounding, FloatKind, Groups, Matrix},
    gemm,
    ops::{self, AmaxRequest, Amaxes, CopyRequest, Gated, Source},
    reference::EdenTarget,
};

#[cube(launch_unchecked)]
fn copy_kernel(from: &[Vector<u32, Const<4>>], to: &mut [Vector<u32, Const<4>>]) {
    let i = ABSOLUTE_POS;
    if i < to.len() {
        to[i] = from[i];
    }
}

/// What one benchmark gave.
struct Record {
    shape: String,
    kernel: String,
    /// Compulsory bytes, or operations.
    amount: f64,
    /// Seconds for each launch, a batch to an entry.
    seconds: Vec<f64>,
}

impl Record {
    fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }

    /// Amount a second, in units of 10⁹.
    fn rate(&self) -> f64 {
        self.amount / self.median() / 1e9
    }
}

struct Bench {
    criterion: Criterion,
    client: Client,
    records: Vec<Record>,
}

impl Bench {
    /// Times `launch(i)`; `amount` is its bytes or operations.
    fn time(&mut self, shape: &str, kernel: &str, amount: f64, launch: &mut dyn FnMut(usize)) {
        let client = self.client.clone();
        let mut seconds = Vec::new();
        let mut warm = false;
        let mut group = self.criterion.benchmark_group(shape);
        group.throughput(Throughput::Bytes(amount as u64));
        group.sample_size(10);
        group.warm_up_time(Duration::from_millis(60));
        group.measurement_time(Duration::from_millis(250));
        group.bench_function(kernel, |bencher| {
            bencher.iter_custom(|iterations| {
                if !warm {
                    // Compilation and the memory pool's growth stay out of the samples.
                    (0..4).for_each(&mut *launch);
                    block_on(client.sync()).expect("a kernel failed");
                    warm = true;
                }
                // Shorter batches measure what goes before and after.
                let launches = iterations.max(32);
                let window = client.profile_start().expect("profiling");
                (0..launches as usize).for_each(&mut *launch);
                let profile = client.profile_end(window).expect("profiling");
                let ticks = block_on(profile.resolve()).expect("a measurement");
                let each = ticks.duration().as_secs_f64() / launches as f64;
                seconds.push(each);
                Duration::from_secs_f64(each * iterations as f64)
            });
        });
        group.finish();
        if !seconds.is_empty() {
            self.records.push(Record {
                shape: shape.into(),
                kernel: kernel.into(),
                amount,
                seconds,
            });
        }
    }

    /// The rate of the copy at `shape`.
    fn copy_rate(&self, shape: &str) -> Option<f64> {
        let copy = |record: &&Record| record.shape == shape && record.kernel == "copy";
        self.records.iter().find(copy).map(Record::rate)
    }
}

/// Matrices of the same shape, together larger than the L2 cache.
struct Inputs {
    sets: Vec<Matrix>,
    amax: cubecl::server::Handle,
    /// Of the columns after the RHT.
    transformed: cubecl::server::Handle,
    elements: f64,
}

impl Inputs {
    fn new(client: &Client, rows: usize, cols: usize) -> Self {
        let bytes = rows * cols * 2;
        // Finite values of mixed magnitude; contents do not matter to a memory-bound kernel.
        let host: Vec<u16> = (0..rows * cols)
            .map(|i| {
                let hash = (i as u32).wrapping_mul(0x9E37_79B9);
                (((hash >> 16) & 0x8000) | (0x3C00 + (hash & 0x3ff))) as u16
            })
            .collect();
        let sets: Vec<Matrix> = (0..(300usize << 20).div_ceil(bytes).max(2))
            .map(|_| {
                let handle = client.create_from_slice(bytemuck::cast_slice(&host));
                Matrix::new(handle, rows, cols, FloatKind::Bf16).unwrap()
            })
            .collect();
        let amax = ops::amax(client, &sets[0], None).unwrap();
        let request = AmaxRequest {
            rows: None,
            cols: Some((AmaxScope::Group, rht())),
        };
        let maxima = ops::amaxes(client, &sets[0], &Groups::One, &request).unwrap();
        Self {
            sets,
            amax,
            transformed: maxima.cols.unwrap(),
            elements: (rows * cols) as f64,
        }
    }

    fn get(&self, i: usize) -> &Matrix {
        &self.sets[i % self.sets.len()]
    }

    /// Bytes of the input with `copies` packed ones.
    fn bytes(&self, copies: f64) -> f64 {
        self.elements * (2.0 + copies * (0.5 + 1.0 / 16.0))
    }

    fn request(&self, rounding: DeviceRounding, hadamard: Option<Hadamard>) -> CopyRequest<'_> {
        CopyRequest {
            // Larger transforms than that of 16 have maxima of about the same size.
            amax: match hadamard {
                Some(_) => &self.transformed,
                None => &self.amax,
            },
            scope: AmaxScope::Group,
            copy: DeviceCopy {
                hadamard,
                ..DeviceCopy::new(rounding)
            },
        }
    }
}

const NEAREST: DeviceRounding = DeviceRounding::Nearest;

fn stochastic() -> DeviceRounding {
    DeviceRounding::Stochastic(RandomStream::new(1, 2, 3))
}

fn rht() -> Option<Hadamard> {
    Some(Hadamard::default())
}

fn copy(bench: &mut Bench, shape: &str, inputs: &Inputs) {
    let client = bench.client.clone();
    let bytes = inputs.get(0).len() * 2;
    let out = client.empty(bytes);
    bench.time(shape, "copy", 4.0 * inputs.elements, &mut |i| {
        let vectors = bytes / 16;
        // SAFETY: both buffers hold `vectors` vectors.
        unsafe {
            copy_kernel::launch_unchecked(
                &client,
                CubeCount::Static(vectors.div_ceil(256) as u32, 1, 1),
                CubeDim::new_1d(256),
                BufferArg::from_raw_parts(inputs.get(i).handle.clone(), vectors),
                BufferArg::from_raw_parts(out.clone(), vectors),
            );
        }
    });
}

/// What training does to activations and gradients.
fn activations(bench: &mut Bench, shape: &str, inputs: &Inputs) {
    let client = bench.client.clone();
    bench.time(shape, "amax", inputs.bytes(0.0), &mut |i| {
        ops::amax(&client, inputs.get(i), None).unwrap();
    });
    bench.time(
        shape,
        "amax plain + RHT, one read",
        inputs.bytes(0.0),
        &mut |i| {
            let request = AmaxRequest {
                rows: Some(AmaxScope::Group),
                cols: Some((AmaxScope::Group, rht())),
            };
            ops::amaxes(&client, inputs.get(i), &Groups::One, &request).unwrap();
        },
    );
    let mut pair = |name: &str, rounding: fn() -> DeviceRounding, hadamard| {
        bench.time(shape, name, inputs.bytes(2.0), &mut |i| {
            let row = inputs.request(NEAREST, None);
            let col = inputs.request(rounding(), hadamard);
            ops::quantize_both(&client, inputs.get(i), &Groups::One, &row, &col).unwrap();
        });
    };
    pair("row RN + col RN, one read", || NEAREST, None);
    pair("row RN + col RHT RN, one read", || NEAREST, rht());
    pair("row RN + col RHT SR, one read", stochastic, rht());
    for (name, rounding) in [("row RN", NEAREST), ("row SR", stochastic())] {
        bench.time(shape, name, inputs.bytes(1.0), &mut |i| {
            ops::quantize_row(&client, inputs.get(i), &inputs.amax, rounding.clone()).unwrap();
        });
    }
    for (name, rounding) in [("per token RN", NEAREST), ("per token SR", stochastic())] {
        bench.time(shape, name, inputs.bytes(1.0), &mut |i| {
            let copy = DeviceCopy::new(rounding.clone());
            ops::quantize_per_token(&client, inputs.get(i), &copy).unwrap();
        });
    }
}

/// What stands before a product, fused with quantization and one operation after the other. Rates of
/// chains count the bytes of the fused form, so that their times compare.
fn producers(bench: &mut Bench, shape: &str, (rows, cols): (usize, usize)) {
    let client = bench.client.clone();
    let (x, gate_up) = (
        Inputs::new(&client, rows, cols),
        Inputs::new(&client, rows, 2 * cols),
    );
    copy(bench, shape, &x);
    let gain = client.create_from_slice(bytemuck::cast_slice(&vec![1.0f32; cols]));
    let epsilon = 1e-6;
    let rstd = ops::rms_norm_rstd(&client, x.get(0), epsilon).unwrap();
    let norm = |i| Source::RmsNorm {
        x: x.get(i),
        rstd: &rstd,
        gain: &gain,
    };
    let gated = |i| Source::SwiGlu(Gated::SideBySide(gate_up.get(i)));
    let backward = |i| Source::SwiGluBackward {
        grad: x.get(i),
        inputs: Gated::SideBySide(gate_up.get(i)),
    };
    // Elements of the output, inputs of two bytes for each of them, and a packed copy.
    let (n, packed) = (x.elements, 9.0 / 16.0);
    let request = AmaxRequest {
        rows: Some(AmaxScope::Group),
        cols: Some((AmaxScope::Group, rht())),
    };
    let one = &Groups::One;
    let copy = DeviceCopy::new(NEAREST);
    bench.time(shape, "row factors of RMSNorm", 2.0 * n, &mut |i| {
        ops::rms_norm_rstd(&client, x.get(i), epsilon).unwrap();
    });
    bench.time(
        shape,
        "RMSNorm per token RN, one read",
        (2.0 + packed) * n,
        &mut |i| {
            ops::quantize_per_token_rms_norm(&client, x.get(i), &gain, epsilon, &copy).unwrap();
        },
    );
    bench.time(
        shape,
        "RMSNorm, then per token RN",
        (2.0 + packed) * n,
        &mut |i| {
            ops::rms_norm_rstd(&client, x.get(i), epsilon).unwrap();
            let y = ops::produce(&client, norm(i)).unwrap();
            ops::quantize_per_token(&client, &y, &copy).unwrap();
        },
    );
    bench.time(
        shape,
        "SwiGLU per token RN, one read",
        (4.0 + packed) * n,
        &mut |i| {
            ops::quantize_per_token(&client, gated(i), &copy).unwrap();
        },
    );
    bench.time(
        shape,
        "SwiGLU, then per token RN",
        (4.0 + packed) * n,
        &mut |i| {
            let y = ops::produce(&client, gated(i)).unwrap();
            ops::quantize_per_token(&client, &y, &copy).unwrap();
        },
    );
    type Make<'a> = &'a dyn Fn(usize) -> Source<'a>;
    // Name, source, bytes read for an input element, outputs for it, rounding of the copies.
    type Producer<'a> = (&'a str, Make<'a>, f64, f64, fn() -> DeviceRounding);
    let all: [Producer<'_>; 3] = [
        ("RMSNorm", &norm, 2.0, 1.0, || NEAREST),
        ("SwiGLU", &gated, 4.0, 1.0, || NEAREST),
        ("SwiGLU backward", &backward, 6.0, 2.0, stochastic),
    ];
    for (name, source, read, outputs, rounding) in all {
        let out = outputs * n;
        bench.time(shape, name, read * n + 2.0 * out, &mut |i| {
            ops::produce(&client, source(i)).unwrap();
        });
        let amaxes = "amax plain + RHT";
        bench.time(shape, &format!("{name}: {amaxes}"), read * n, &mut |i| {
            ops::amaxes(&client, source(i), one, &request).unwrap();
        });
        let bytes = read * n + 2.0 * out;
        bench.time(
            shape,
            &format!("{name} written, {amaxes}"),
            bytes,
            &mut |i| {
                ops::produce_with_amaxes(&client, source(i), one, &request).unwrap();
            },
        );
        let written = ops::produce(&client, source(0)).unwrap();
        let found = ops::amaxes(&client, &written, one, &request).unwrap();
        let bytes = read * n + 2.0 * packed * out;
        bench.time(shape, &format!("{name}: row + col RHT"), bytes, &mut |i| {
            both_copies(&client, source(i), &found, rounding())
        });
        // All that stands between the inputs and both copies, in three ways.
        let factors = |i| {
            if name == "RMSNorm" {
                ops::rms_norm_rstd(&client, x.get(i), epsilon).unwrap();
            }
        };
        bench.time(
            shape,
            &format!("{name}, all: computed twice"),
            bytes,
            &mut |i| {
                factors(i);
                let found = ops::amaxes(&client, source(i), one, &request).unwrap();
                both_copies(&client, source(i), &found, rounding());
            },
        );
        bench.time(
            shape,
            &format!("{name}, all: written with maxima"),
            bytes,
            &mut |i| {
                factors(i);
                let (y, found) =
                    ops::produce_with_amaxes(&client, source(i), one, &request).unwrap();
                both_copies(&client, &y, &found, rounding());
            },
        );
        bench.time(
            shape,
            &format!("{name}, all: one after the other"),
            bytes,
            &mut |i| {
                factors(i);
                let y = ops::produce(&client, source(i)).unwrap();
                let found = ops::amaxes(&client, &y, one, &request).unwrap();
                both_copies(&client, &y, &found, rounding());
            },
        );
    }
}

/// The row-wise copy and the transformed column-wise one, in one read.
fn both_copies<'a>(
    client: &Client,
    x: impl Into<Source<'a>>,
    found: &Amaxes,
    rounding: DeviceRounding,
) {
    let request = |amax, hadamard| CopyRequest {
        amax,
        scope: AmaxScope::Group,
        copy: DeviceCopy {
            hadamard,
            ..DeviceCopy::new(rounding.clone())
        },
    };
    let (row, col) = (found.rows.as_ref().unwrap(), found.cols.as_ref().unwrap());
    let (row, col) = (request(row, None), request(col, rht()));
    ops::quantize_both(client, x, &Groups::One, &row, &col).unwrap();
}

/// What training does to weights.
fn weights(bench: &mut Bench, shape: &str, inputs: &Inputs, groups: &Groups) {
    let client = bench.client.clone();
    for (name, scaling) in [
        ("16x16 tiles, both copies", BlockScaling::Standard),
        (
            "16x16 tiles, 4/6, both copies",
            BlockScaling::FourOverSix(ErrorNorm::Mae),
        ),
    ] {
        if !matches!(groups, Groups::One) && scaling != BlockScaling::Standard {
            continue;
        }
        let amax = client.create_from_slice(bytemuck::cast_slice(&vec![1.0f32; groups.count()]));
        bench.time(shape, name, inputs.bytes(2.0), &mut |i| {
            let layouts = [ScaleLayout::Compact; 2];
            let x = inputs.get(i);
            ops::quantize_tile_with(&client, x, groups, &amax, scaling, layouts).unwrap();
        });
    }
}

/// Everything else, at square shapes.
fn all_policies(bench: &mut Bench, shape: &str, inputs: &Inputs) {
    let client = bench.client.clone();
    let one = &Groups::One;
    let maxima = [
        ("amax of rows", Some(AmaxScope::Outer), None),
        ("amax of columns", None, Some((AmaxScope::Outer, None))),
        (
            "amax of rows + columns, one read",
            Some(AmaxScope::Outer),
            Some((AmaxScope::Outer, None)),
        ),
        (
            "amax RHT-128",
            None,
            Some((
                AmaxScope::Group,
                Some(Hadamard::seeded_with_size(HadamardSize::H128, 1)),
            )),
        ),
    ];
    for (name, rows, cols) in maxima {
        bench.time(shape, name, inputs.bytes(0.0), &mut |i| {
            let request = AmaxRequest { rows, cols };
            ops::amaxes(&client, inputs.get(i), one, &request).unwrap();
        });
    }
    let mut quantize = |name: &str, axis, request: CopyRequest<'_>| {
        bench.time(shape, name, inputs.bytes(1.0), &mut |i| {
            ops::quantize(&client, inputs.get(i), one, axis, &request).unwrap();
        });
    };
    let with = |change: &dyn Fn(&mut DeviceCopy)| {
        let mut request = inputs.request(NEAREST, None);
        change(&mut request.copy);
        request
    };
    let (cols, rows) = (PackedAxis::Cols, PackedAxis::Rows);
    let swizzled = with(&|copy| copy.layout = ScaleLayout::Swizzled128x4);
    quantize("row RN, 128x4 scales", cols, swizzled.clone());
    for (name, norm) in [
        ("row 4/6 MAE", ErrorNorm::Mae),
        ("row 4/6 MSE", ErrorNorm::Mse),
    ] {
        quantize(
            name,
            cols,
            with(&|copy| copy.scaling = BlockScaling::FourOverSix(norm)),
        );
    }
    quantize("row RHT SR", cols, inputs.request(stochastic(), rht()));
    quantize("col RN", rows, inputs.request(NEAREST, None));
    quantize("col RN, 128x4 scales", rows, swizzled);
    quantize("col SR", rows, inputs.request(stochastic(), None));
    quantize("col RHT RN", rows, inputs.request(NEAREST, rht()));
    quantize("col RHT SR", rows, inputs.request(stochastic(), rht()));
    for size in [HadamardSize::H32, HadamardSize::H64, HadamardSize::H128] {
        let hadamard = Some(Hadamard::seeded_with_size(size, 1));
        let name = format!("col RHT-{} SR", size.elements());
        quantize(&name, rows, inputs.request(stochastic(), hadamard));
    }
    bench.time(
        shape,
        "MXFP8 row",
        inputs.elements * (3.0 + 1.0 / 32.0),
        &mut |i| {
            ops::mx_quantize(&client, inputs.get(i), PackedAxis::Cols).unwrap();
        },
    );
    bench.time(
        shape,
        "MXFP8 col",
        inputs.elements * (3.0 + 1.0 / 32.0),
        &mut |i| {
            ops::mx_quantize(&client, inputs.get(i), PackedAxis::Rows).unwrap();
        },
    );
    let packed = [
        (
            "row",
            ops::quantize_row(&client, inputs.get(0), &inputs.amax, NEAREST).unwrap(),
        ),
        (
            "col",
            ops::quantize_col(&client, inputs.get(0), &inputs.amax, NEAREST, None).unwrap(),
        ),
    ];
    for (name, packed) in &packed {
        bench.time(
            shape,
            &format!("dequantize {name}"),
            inputs.bytes(1.0),
            &mut |_| {
                ops::dequantize(&client, packed, FloatKind::Bf16).unwrap();
            },
        );
        let bytes = inputs.elements * (0.5 + 1.0 / 16.0 + 1.0 + 1.0 / 32.0);
        bench.time(
            shape,
            &format!("NVFP4 {name} to MXFP8 row"),
            bytes,
            &mut |_| {
                ops::mx_requantize(&client, packed, PackedAxis::Cols, FloatKind::Bf16).unwrap();
            },
        );
    }
    let (rows, cols) = (inputs.get(0).rows as f64, inputs.get(0).cols as f64);
    if inputs.elements < 1e8 {
        let [(_, a), (_, b)] = &packed;
        bench.time(shape, "gemm", 2.0 * rows * cols * rows, &mut |_| {
            gemm::gemm(&client, a, b, None, FloatKind::Bf16).unwrap();
        });
    }
}

/// Tokens of experts: groups of equally many rows, with offsets in device memory.
fn grouped(bench: &mut Bench, shape: &str, inputs: &Inputs) {
    let client = bench.client.clone();
    let rows = inputs.get(0).rows;
    for count in [1usize, 8, 32, 64, 128, 256] {
        let offsets: Vec<u32> = (0..=count).map(|g| (g * rows / count) as u32).collect();
        let groups = Groups::Offsets {
            offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
            count,
        };
        let request = AmaxRequest {
            rows: Some(AmaxScope::Group),
            cols: Some((AmaxScope::Group, rht())),
        };
        let maxima = ops::amaxes(&client, inputs.get(0), &groups, &request).unwrap();
        let (amax, transformed) = (maxima.rows.unwrap(), maxima.cols.unwrap());
        let name = format!("row RN + col RHT SR, one read, {count} groups");
        bench.time(shape, &name, inputs.bytes(2.0), &mut |i| {
            let mut row = inputs.request(NEAREST, None);
            let mut col = inputs.request(stochastic(), rht());
            (row.amax, col.amax) = (&amax, &transformed);
            ops::quantize_both(&client, inputs.get(i), &groups, &row, &col).unwrap();
        });
        let name = format!("amax plain + RHT, one read, {count} groups");
        bench.time(shape, &name, inputs.bytes(0.0), &mut |i| {
            let request = AmaxRequest {
                rows: Some(AmaxScope::Group),
                cols: Some((AmaxScope::Group, rht())),
            };
            ops::amaxes(&client, inputs.get(i), &groups, &request).unwrap();
        });
        let mut request = inputs.request(NEAREST, None);
        request.amax = &amax;
        let (x, axis) = (inputs.get(0), PackedAxis::Rows);
        let packed = ops::quantize(&client, x, &groups, PackedAxis::Cols, &request).unwrap();
        let name = format!("NVFP4 row to MXFP8 col, {count} groups");
        let bytes = inputs.elements * (0.5 + 1.0 / 16.0 + 1.0 + 1.0 / 32.0);
        bench.time(shape, &name, bytes, &mut |_| {
            ops::mx_requantize(&client, &packed, axis, FloatKind::Bf16).unwrap();
        });
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 1);
        let amax = ops::ms_eden_amax(&client, &packed, axis, &hadamard).unwrap();
        let (target, stream) = (EdenTarget::Backward, RandomStream::new(1, 2, 0));
        let name = format!("MS-EDEN col of NVFP4 row, {count} groups");
        let bytes = inputs.elements * 2.0 * (0.5 + 1.0 / 16.0);
        bench.time(shape, &name, bytes, &mut |_| {
            ops::ms_eden(&client, &packed, axis, &amax, &hadamard, target, stream).unwrap();
        });
    }
}

fn report(bench: &Bench, device: &Capabilities) -> std::io::Result<()> {
    println!("\n{} (CubeCL {})", device.device, device.runtime);
    println!("| shape | kernel | us | GB/s | % of copy |\n|---|---|---|---|---|");
    let mut shapes: BTreeMap<&str, Vec<serde_json::Value>> = BTreeMap::new();
    for record in &bench.records {
        let Record { shape, kernel, .. } = record;
        let (us, rate) = (record.median() * 1e6, record.rate());
        let share = bench.copy_rate(shape).map(|copy| 100.0 * rate / copy);
        let entries = shapes.entry(shape).or_default();
        if kernel == "gemm" {
            println!(
                "| {shape} | {kernel} | {us:.1} | {:.1} TFLOP/s | |",
                rate / 1e3
            );
            entries.push(serde_json::json!({
                "kernel": kernel, "us": us, "tflops": rate / 1e3
            }));
        } else {
            let percent = share.map_or(String::new(), |share| format!("{share:.0}"));
            println!("| {shape} | {kernel} | {us:.1} | {rate:.0} | {percent} |");
            entries.push(serde_json::json!({
                "kernel": kernel, "us": us, "bytes": record.amount, "gbps": rate,
                "percent_of_copy": share, "batches": record.seconds.len()
            }));
        }
    }
    let summary = serde_json::json!({
        "device": device.device,
        "runtime": device.runtime,
        "version": env!("CARGO_PKG_VERSION"),
        "timing": "device events around batches of launches; medians",
        "shapes": shapes,
    });
    let path = std::env::var_os("NVFP4_BENCH_JSON").map_or_else(
        || std::path::Path::new("target").join("nvfp4-bench.json"),
        std::path::PathBuf::from,
    );
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&path, serde_json::to_string_pretty(&summary)?)?;
    println!("\n{}", path.display());
    Ok(())
}

/// Whether `NVFP4_BENCH_SHAPES`, where it is set, is a part of the name: criterion's own filter leaves out
/// measurements, but not what is made for them.
fn wanted(shape: &str) -> bool {
    std::env::var("NVFP4_BENCH_SHAPES").map_or(true, |part| shape.contains(&part))
}

fn main() {
    let client = cubecl::Device::Cuda(Default::default()).client();
    let capabilities = Capabilities::of(&client);
    let mut bench = Bench {
        criterion: Criterion::default().configure_from_args().without_plots(),
        client: client.clone(),
        records: Vec::new(),
    };
    for side in [1024, 4096, 8192, 16384] {
        let shape = format!("{side}x{side}");
        if !wanted(&shape) {
            continue;
        }
        let inputs = Inputs::new(&client, side, side);
        copy(&mut bench, &shape, &inputs);
        activations(&mut bench, &shape, &inputs);
        weights(&mut bench, &shape, &inputs, &Groups::One);
        if side >= 8192 {
            all_policies(&mut bench, &shape, &inputs);
        }
    }
    for (rows, cols) in [(8192, 4096), (8192, 8192), (16384, 8192)] {
        let shape = format!("producers {rows}x{cols}");
        if !wanted(&shape) {
            continue;
        }
        producers(&mut bench, &shape, (rows, cols));
    }
    for cols in [4096, 8192, 14336, 28672] {
        let shape = format!("Llama 2048x{cols}");
        if !wanted(&shape) {
            continue;
        }
        let inputs = Inputs::new(&client, 2048, cols);
        copy(&mut bench, &shape, &inputs);
        activations(&mut bench, &shape, &inputs);
    }
    for (rows, cols) in [(14336, 4096), (28672, 8192)] {
        let shape = format!("Llama weight {rows}x{cols}");
        if !wanted(&shape) {
            continue;
        }
        let inputs = Inputs::new(&client, rows, cols);
        copy(&mut bench, &shape, &inputs);
        weights(&mut bench, &shape, &inputs, &Groups::One);
    }
    let shape = "DeepSeek tokens 16384x7168";
    if wanted(shape) {
        let inputs = Inputs::new(&client, 16384, 7168);
        copy(&mut bench, shape, &inputs);
        activations(&mut bench, shape, &inputs);
        grouped(&mut bench, shape, &inputs);
    }
    for (experts, rows, cols) in [(8, 1408, 2048), (8, 2048, 7168), (8, 7168, 2048)] {
        let shape = format!("DeepSeek experts {experts}x{rows}x{cols}");
        if !wanted(&shape) {
            continue;
        }
        let inputs = Inputs::new(&client, experts * rows, cols);
        copy(&mut bench, &shape, &inputs);
        weights(&mut bench, &shape, &inputs, &Groups::Batch(experts));
    }
    bench.criterion.final_summary();
    report(&bench, &capabilities).expect("the summary could not be written");
}
