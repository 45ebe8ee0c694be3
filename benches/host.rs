//! Benchmark of the oracle on the host, which CPU training runs on: bytes per second compared with
//! a copy on the same cores, timed in the same process. `cargo bench --bench host`.
//!
//! Bytes are the minimum traffic: the input once, codes and scales once.

use std::{
    collections::BTreeMap, hint::black_box, sync::Mutex, thread, time::Duration, time::Instant,
};

use burn::tensor::bf16;
use criterion::{Criterion, Throughput};
use nvfp4::formats::{
    Amax, BlockScaling, ErrorNorm, Hadamard, HadamardSize, QuantParams, RandomStream, Rounding,
    Usage,
    reference::{self, Element},
};

const SIDE: usize = 4096;
const ELEMENTS: usize = SIDE * SIDE;

/// Bytes of codes and scales per element.
const PACKED: f64 = 0.5 + 1.0 / 16.0;

/// Bytes that a benchmark moves, and seconds of each call.
#[derive(Default)]
struct Record {
    bytes: f64,
    seconds: Vec<f64>,
}

impl Record {
    /// Median bytes per second.
    fn rate(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        self.bytes / seconds[seconds.len() / 2]
    }
}

static RECORDS: Mutex<BTreeMap<String, Record>> = Mutex::new(BTreeMap::new());

/// Times `call` under `name`; it moves `bytes` per element.
fn time(criterion: &mut Criterion, name: &str, bytes: f64, mut call: impl FnMut()) {
    let bytes = bytes * ELEMENTS as f64;
    let mut group = criterion.benchmark_group("host");
    group.throughput(Throughput::Bytes(bytes as u64));
    group.sample_size(10);
    group.warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_millis(1000));
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|iterations| {
            let start = Instant::now();
            (0..iterations).for_each(|_| call());
            let elapsed = start.elapsed();
            let mut records = RECORDS.lock().unwrap();
            let record = records.entry(name.to_string()).or_default();
            record.bytes = bytes;
            let seconds = elapsed.as_secs_f64() / iterations as f64;
            record.seconds.push(seconds);
            elapsed
        });
    });
    group.finish();
}

/// Copies with all cores.
fn copy(from: &[f32], to: &mut [f32]) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let chunk = from.len().div_ceil(cores);
    thread::scope(|scope| {
        for (from, to) in from.chunks(chunk).zip(to.chunks_mut(chunk)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

fn bench<T: Element>(criterion: &mut Criterion, kind: &str, x: &[T]) {
    let read = size_of::<T>() as f64;
    let nearest = Rounding::Nearest;
    let stochastic = Rounding::Stochastic(RandomStream::new(1, 2, 3));
    let plain = Amax::Tensor(reference::amax(x));
    let mut run = |what: &str, bytes: f64, call: &mut dyn FnMut()| {
        time(criterion, &format!("{kind} {what}"), bytes, call);
    };

    run("amax", read, &mut || {
        black_box(reference::amax(x));
    });
    for (name, rounding) in [("RN", &nearest), ("SR", &stochastic)] {
        run(&format!("row {name}"), read + PACKED, &mut || {
            black_box(reference::quantize_row(x, SIDE, SIDE, &plain, rounding).unwrap());
        });
        run(&format!("col {name}"), read + PACKED, &mut || {
            black_box(reference::quantize_col(x, SIDE, SIDE, &plain, rounding, None).unwrap());
        });
    }
    for size in [HadamardSize::H16, HadamardSize::H128] {
        let hadamard = Hadamard::seeded_with_size(size, 1);
        let name = format!("RHT-{}", size.elements());
        run(&format!("amax of {name}"), read, &mut || {
            black_box(reference::amax_rht(x, SIDE, SIDE, &hadamard));
        });
        let amax = Amax::Tensor(reference::amax_rht(x, SIDE, SIDE, &hadamard));
        let hadamard = Some(&hadamard);
        for (rounding_name, rounding) in [("RN", &nearest), ("SR", &stochastic)] {
            let what = format!("col {name} {rounding_name}");
            run(&what, read + PACKED, &mut || {
                let packed = reference::quantize_col(x, SIDE, SIDE, &amax, rounding, hadamard);
                black_box(packed.unwrap());
            });
        }
    }
    let policy = QuantParams {
        scaling: BlockScaling::FourOverSix(ErrorNorm::Mae),
        ..QuantParams::nvfp4(nearest)
    };
    run("row 4/6", read + PACKED, &mut || {
        let usage = Usage::Rowwise;
        black_box(reference::quantize(x, SIDE, SIDE, usage, &plain, &policy, 0).unwrap());
    });
    // The row-wise and the column-wise tensor each read the input.
    run("tile 16x16, both", 2.0 * (read + PACKED), &mut || {
        let scaling = BlockScaling::Standard;
        black_box(reference::quantize_tile(x, SIDE, SIDE, &plain, scaling).unwrap());
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args().without_plots();
    // Finite values of mixed magnitude.
    let x: Vec<f32> = (0..ELEMENTS as u32)
        .map(|i| {
            let hash = i.wrapping_mul(0x9E37_79B9) ^ i >> 7;
            f32::from_bits((hash & 0x8000_0000) | (0x3C00_0000 + (hash & 0x03FF_FFFF)))
        })
        .collect();
    let mut out = vec![0f32; ELEMENTS];
    time(&mut criterion, "copy", 8.0, || {
        copy(&x, black_box(&mut out));
    });
    bench(&mut criterion, "f32", &x);
    let amax = Amax::Tensor(reference::amax(&x));
    let row = reference::quantize_row(&x, SIDE, SIDE, &amax, &Rounding::Nearest).unwrap();
    time(&mut criterion, "decode to f32", PACKED + 4.0, || {
        reference::decode_blocks_into(row.codes(), row.scales(), black_box(&mut out));
    });
    let x: Vec<bf16> = x.iter().map(|value| bf16::from_f32(*value)).collect();
    bench(&mut criterion, "bf16", &x);
    criterion.final_summary();

    let records = RECORDS.lock().unwrap();
    let Some(copy) = records.get("copy").map(Record::rate) else {
        return;
    };
    println!("\n{SIDE}x{SIDE}\n| what | GB/s | % of copy |\n|---|---|---|");
    for (name, record) in records.iter() {
        let rate = record.rate();
        println!(
            "| {name} | {:.1} | {:.0} |",
            rate / 1e9,
            100.0 * rate / copy
        );
    }
}
