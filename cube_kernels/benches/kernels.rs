//! Every kernel on a GPU: bytes a second against a copy timed in the same process, and the GEMM in
//! operations a second. `cargo bench --features cuda --bench kernels`.
//!
//! Inputs rotate among sets that together exceed the L2 cache; a sample is a batch of launches
//! between two synchronisations.

use std::{collections::BTreeMap, sync::Mutex, time::Duration, time::Instant};

use criterion::{Criterion, Throughput};
use cubecl::prelude::*;
use nvfp4_kernels::{
    BlockScaling, ErrorNorm, Hadamard, PackedAxis, RandomStream, ScaleLayout,
    device::{AmaxScope, Capabilities, DeviceCopy, DeviceRounding, FloatKind, Groups, Matrix},
    gemm,
    ops::{self, CopyRequest},
};

/// What a benchmark moves or computes, and its seconds for each launch.
#[derive(Default)]
struct Record {
    amount: f64,
    seconds: Vec<f64>,
}

static RECORDS: Mutex<BTreeMap<String, Record>> = Mutex::new(BTreeMap::new());

#[cube(launch_unchecked)]
fn copy_kernel(from: &[Vector<u32, Const<4>>], to: &mut [Vector<u32, Const<4>>]) {
    let i = ABSOLUTE_POS;
    if i < to.len() {
        to[i] = from[i];
    }
}

/// Times `launch(i)` under `name`; `amount` is its bytes or operations.
fn time(
    criterion: &mut Criterion,
    client: &Client,
    name: String,
    amount: f64,
    mut launch: impl FnMut(usize),
) {
    let sync = || {
        futures_lite::future::block_on(client.sync()).expect("a kernel failed");
    };
    let mut warm = false;
    let mut group = criterion.benchmark_group("kernels");
    group.throughput(Throughput::Bytes(amount as u64));
    group.sample_size(20);
    group.warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_millis(800));
    group.bench_function(&name, |bencher| {
        bencher.iter_custom(|iterations| {
            if !warm {
                // Compilation and the memory pool's growth stay out of the samples.
                (0..8).for_each(&mut launch);
                warm = true;
            }
            sync();
            let start = Instant::now();
            (0..iterations as usize).for_each(&mut launch);
            sync();
            let elapsed = start.elapsed();
            // Short batches measure the synchronisation.
            if iterations >= 10 {
                let mut records = RECORDS.lock().unwrap();
                let record = records.entry(name.clone()).or_default();
                record.amount = amount;
                record
                    .seconds
                    .push(elapsed.as_secs_f64() / iterations as f64);
            }
            elapsed
        });
    });
    group.finish();
}

fn main() {
    let client = cubecl::Device::Cuda(Default::default()).client();
    let capabilities = Capabilities::of(&client);
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    for side in [4096usize, 8192, 16384] {
        let elements = (side * side) as f64;
        let bytes = side * side * 2;
        let sets = (512usize << 20).div_ceil(bytes).max(2);
        // Finite values of mixed magnitude; contents do not matter to a memory-bound kernel.
        let host: Vec<u16> = (0..side * side)
            .map(|i| {
                let hash = (i as u32).wrapping_mul(0x9E37_79B9);
                (((hash >> 16) & 0x8000) | (0x3C00 + (hash & 0x3ff))) as u16
            })
            .collect();
        let inputs: Vec<Matrix> = (0..sets)
            .map(|_| {
                let handle = client.create_from_slice(bytemuck::cast_slice(&host));
                Matrix::new(handle, side, side, FloatKind::Bf16).unwrap()
            })
            .collect();
        let input = |i: usize| &inputs[i % sets];
        let amax = ops::amax(&client, input(0), None).unwrap();
        let rht = Some(Hadamard::default());
        let sr = || DeviceRounding::Stochastic(RandomStream::new(1, 2, 3));
        let nearest = || DeviceRounding::Nearest;
        let packed = elements * (0.5 + 1.0 / 16.0);
        let mut bench = |what: &str, bytes: f64, launch: &mut dyn FnMut(usize)| {
            time(
                &mut criterion,
                &client,
                format!("{side}/{what}"),
                bytes,
                launch,
            );
        };
        let out = client.empty(bytes);
        bench("copy", 4.0 * elements, &mut |i| {
            let vectors = bytes / 16;
            // SAFETY: both buffers hold `vectors` vectors.
            unsafe {
                copy_kernel::launch_unchecked(
                    &client,
                    CubeCount::Static(vectors.div_ceil(256) as u32, 1, 1),
                    CubeDim::new_1d(256),
                    BufferArg::from_raw_parts(input(i).handle.clone(), vectors),
                    BufferArg::from_raw_parts(out.clone(), vectors),
                );
            }
        });
        bench("amax", 2.0 * elements, &mut |i| {
            ops::amax(&client, input(i), None).unwrap();
        });
        bench("amax RHT", 2.0 * elements, &mut |i| {
            ops::amax(&client, input(i), rht).unwrap();
        });
        let one = 2.0 * elements + packed;
        bench("row RN", one, &mut |i| {
            ops::quantize_row(&client, input(i), &amax, nearest()).unwrap();
        });
        bench("row SR", one, &mut |i| {
            ops::quantize_row(&client, input(i), &amax, sr()).unwrap();
        });
        bench("col RN", one, &mut |i| {
            ops::quantize_col(&client, input(i), &amax, nearest(), None).unwrap();
        });
        bench("col RHT RN", one, &mut |i| {
            ops::quantize_col(&client, input(i), &amax, nearest(), rht).unwrap();
        });
        bench("col RHT SR", one, &mut |i| {
            ops::quantize_col(&client, input(i), &amax, sr(), rht).unwrap();
        });
        let request = |rounding: DeviceRounding, hadamard| CopyRequest {
            amax: &amax,
            scope: AmaxScope::Group,
            copy: DeviceCopy {
                hadamard,
                ..DeviceCopy::new(rounding)
            },
        };
        bench("row RN + col RHT SR, one read", one + packed, &mut |i| {
            let (row, col) = (request(nearest(), None), request(sr(), rht));
            ops::quantize_both(&client, input(i), &Groups::One, &row, &col).unwrap();
        });
        bench("row RN + col RN, one read", one + packed, &mut |i| {
            let (row, col) = (request(nearest(), None), request(nearest(), None));
            ops::quantize_both(&client, input(i), &Groups::One, &row, &col).unwrap();
        });
        bench("amaxes plain + RHT", 2.0 * elements, &mut |i| {
            let request = ops::AmaxRequest {
                rows: Some(AmaxScope::Group),
                cols: Some((AmaxScope::Group, rht)),
            };
            ops::amaxes(&client, input(i), &Groups::One, &request).unwrap();
        });
        bench("amaxes rows + cols", 2.0 * elements, &mut |i| {
            let request = ops::AmaxRequest {
                rows: Some(AmaxScope::Outer),
                cols: Some((AmaxScope::Outer, None)),
            };
            ops::amaxes(&client, input(i), &Groups::One, &request).unwrap();
        });
        let scaling = BlockScaling::FourOverSix(ErrorNorm::Mae);
        bench("row 4/6", one, &mut |i| {
            let mut request = request(nearest(), None);
            request.copy.scaling = scaling;
            let x = input(i);
            ops::quantize(&client, x, &Groups::One, PackedAxis::Cols, &request).unwrap();
        });
        bench("row RN, swizzled", one, &mut |i| {
            let mut request = request(nearest(), None);
            request.copy.layout = ScaleLayout::Swizzled128x4;
            let x = input(i);
            ops::quantize(&client, x, &Groups::One, PackedAxis::Cols, &request).unwrap();
        });
        bench("per-token RN, one read", one, &mut |i| {
            ops::quantize_per_token(&client, input(i), &DeviceCopy::new(nearest())).unwrap();
        });
        bench("tile 16x16, both", one + packed, &mut |i| {
            ops::quantize_tile(&client, input(i), &amax).unwrap();
        });
        let row = ops::quantize_row(&client, input(0), &amax, nearest()).unwrap();
        let col = ops::quantize_col(&client, input(0), &amax, nearest(), None).unwrap();
        bench("dequantize row", one, &mut |_| {
            ops::dequantize(&client, &row, FloatKind::Bf16).unwrap();
        });
        bench("dequantize col", one, &mut |_| {
            ops::dequantize(&client, &col, FloatKind::Bf16).unwrap();
        });
        if side <= 8192 {
            let operations = 2.0 * elements * side as f64;
            bench("gemm", operations, &mut |_| {
                gemm::gemm(&client, &row, &col, None, FloatKind::Bf16).unwrap();
            });
        }
    }
    criterion.final_summary();

    println!(
        "\n{} (CubeCL {})",
        capabilities.device, capabilities.runtime
    );
    println!("| size | kernel | us | GB/s | % of copy |\n|---|---|---|---|---|");
    let records = RECORDS.lock().unwrap();
    let median = |record: &Record| {
        let mut seconds = record.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    };
    for (name, record) in records.iter() {
        let (size, kernel) = name.split_once('/').unwrap();
        let seconds = median(record);
        let rate = record.amount / seconds / 1e9;
        if kernel == "gemm" {
            println!(
                "| {size} | {kernel} | {:.1} | {:.1} TFLOP/s | |",
                seconds * 1e6,
                rate / 1e3
            );
        } else {
            let share = records.get(&format!("{size}/copy")).map_or(f64::NAN, |copy| {
                100.0 * rate / (copy.amount / median(copy) / 1e9)
            });
            println!(
                "| {size} | {kernel} | {:.1} | {rate:.0} | {share:.0} |",
                seconds * 1e6
            );
        }
    }
}
