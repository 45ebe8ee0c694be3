//! The NVFP4 kernel of data center Blackwell with its tensor core in software, on a Hopper GPU
//! (`NVFP4_TEST_DEVICE=cuda`). TMA, barriers, pipeline stages, the schedule and the epilogue are
//! those of the kernel, and the model uses the summation order of the scalar path. The two give the
//! same bits, unless data is read too early or from the wrong address.
//!
//! Seeds delay TMA and the model; with odd seeds scale copies overtake instructions, as the PTX ISA
//! permits.

use std::cell::Cell;

use crate::support::quantize;
use crate::support::{
    device::{assert_floats, read_f32, read_f32s, read_matrix, upload},
    epilogue::{Epilogue, check_epilogues},
    gemm::{multiply, multiply_amax},
    inputs::Generator,
    packed::{Packed, scaled},
};
use cubecl::prelude::*;
use nvfp4_formats::Nvfp4Error;
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Elements, Factor, Gemm, GroupedDim, Operand, OperandLayout, OutputAmax, Plan,
        Problem, Scale, Target,
        proof::{Device, Fault, Sm100Form, Sm100Tile, Tcgen05, TensorCore},
    },
    moe::GroupOffsets,
    proof::{codec::Conversion, ptx::BlockScaled},
    tensor::{FloatKind, Matrix},
};

/// Returns the kernel in software on one CTA, with `fault` and `seed`.
fn software(fault: Fault, seed: u32) -> Plan {
    in_form(Sm100Form::OneCta, fault, seed)
}

/// Returns the kernel in software in `form`.
fn in_form(form: Sm100Form, fault: Fault, seed: u32) -> Plan {
    Plan::from(Tcgen05(Sm100Tile {
        core: TensorCore::Software(fault),
        seed,
        ..Sm100Tile::instruction(BlockScaled::Nvfp4, form)
    }))
}

/// Returns the plain sums of `plan`.
fn sums(client: &Client, a: &Packed, b: &Packed, plan: Plan) -> Result<Vec<f32>, Nvfp4Error> {
    let (a, b) = (a.device(client), b.device(client));
    let request = Gemm::new(&a, &b).out(FloatKind::F32);
    let found = multiply(client, request.plan(plan))?;
    Ok(read_matrix(client, &found))
}

/// Returns the plain sums of the scalar kernel.
fn expected(client: &Client, a: &Packed, b: &Packed) -> Vec<f32> {
    let (a, b) = (a.device(client), b.device(client));
    let request = Gemm::new(&a, &b).out(FloatKind::F32);
    let found = multiply(client, request.backend(GemmBackend::Scalar)).unwrap();
    read_matrix(client, &found)
}

/// Tails of every kind: rows, columns within a tile of 256 and of 128, and K that ends within an
/// instruction, within a pipeline stage, and after the stages have wrapped around several times.
const SHAPES: [(usize, usize, usize); 12] = [
    (1, 8, 32),
    (128, 256, 64),
    (128, 256, 256),
    (127, 128, 288),
    (129, 136, 320),
    (256, 264, 96),
    (40, 120, 1024),
    (130, 512, 544),
    (300, 520, 224),
    (5, 1000, 160),
    (64, 248, 2080),
    (257, 256, 1312),
];

#[test]
fn dense_has_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05::dense_has_the_bits_of_the_scalar_kernel");
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let seed = 100 + 2 * i as u32;
        let (a, b) = (Packed::random(m, k, seed), Packed::random(n, k, seed + 1));
        let expected = expected(&client, &a, &b);
        assert!(expected.iter().any(|sum| *sum != 0.0));
        for seed in [0, 1, 2] {
            let found = sums(&client, &a, &b, software(Fault::None, seed)).unwrap();
            assert_floats(&found, &expected, &format!("{m} x {n} x {k}, seed {seed}"));
        }
    }
}

/// More tiles than SMs, and more pipeline stages than buffers: accumulators, barriers and buffers
/// are reused for each tile of a CTA.
#[test]
fn many_tiles_and_stages() {
    let client = hopper!("gemm_tcgen05::many_tiles_and_stages");
    for (m, n, k, seed) in [
        (2561, 2040, 352, 0),
        (2561, 2040, 352, 7),
        (128, 256, 8192, 5),
    ] {
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let found = sums(&client, &a, &b, software(Fault::None, seed)).unwrap();
        let what = format!("{m} x {n} x {k}, seed {seed}");
        assert_floats(&found, &expected(&client, &a, &b), &what);
    }
}

/// One NaN scale per operand makes its row and its column NaN, and nothing else: no padding and no
/// other row enters a sum.
#[test]
fn nan_scales_stay_in_their_row_and_column() {
    let client = hopper!("gemm_tcgen05::nan_scales_stay_in_their_row_and_column");
    let (m, n, k) = (140, 264, 352);
    let (mut a, mut b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
    a.scales[7 * a.blocks + a.blocks - 1] = 0x7f;
    b.scales[260 * b.blocks + 2] = 0x7f;
    let found = sums(&client, &a, &b, software(Fault::None, 3)).unwrap();
    for (i, value) in found.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        assert_eq!(
            value.is_nan(),
            row == 7 || column == 260,
            "({row}, {column})"
        );
    }
}

/// Factors per row and column, bias, accumulation and output types, dense and grouped: each derived
/// from the plain sums by the specified roundings.
#[test]
fn epilogues() {
    let client = hopper!("gemm_tcgen05::epilogues");
    let (m, n, k) = (141, 264, 96);
    let left = Packed::random(m, k, 5).device(&client);
    for sizes in [vec![m], vec![3, 0, 130, 8]] {
        let count = sizes.len();
        let right = Packed::random(count * n, k, 6).device(&client);
        let groups = offsets(&client, &sizes);
        let group_of: Vec<usize> = sizes
            .iter()
            .enumerate()
            .flat_map(|(group, size)| vec![group; *size])
            .collect();
        let product = |a_scale: Scale, b_scale: Scale, bias: Option<&Matrix>, target: Target| {
            let a = scaled(Elements::Quantized(&left), a_scale);
            let b = scaled(Elements::Quantized(&right), b_scale);
            let request = Gemm::new(a, b)
                .bias(bias)
                .target(target)
                .plan(software(Fault::None, 0));
            let request = match count {
                1 => request,
                _ => request.m_grouped(&groups),
            };
            multiply(&client, request).unwrap()
        };
        let what = format!("{count} groups");
        check_epilogues(&client, n, &group_of, &Epilogue::all(), &what, &product);
    }
}

/// Returns the offsets of groups of `sizes` rows.
fn offsets(client: &Client, sizes: &[usize]) -> GroupOffsets {
    let mut offsets = vec![0u32];
    for size in sizes {
        offsets.push(offsets.last().unwrap() + *size as u32);
    }
    GroupOffsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
        count: sizes.len(),
    }
}

/// Groups of rows, including empty ones, compared with the scalar kernel bit for bit. Rows after
/// the last group keep their contents.
#[test]
fn groups_have_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05::groups_have_the_bits_of_the_scalar_kernel");
    let mut random = Generator::new(3);
    let many = (0..64).map(|_| random.next_u32() as usize % 40).collect();
    for sizes in [
        vec![0, 1, 127, 128, 129, 0, 65],
        vec![0, 0],
        vec![300],
        many,
    ] {
        for (n, k, seed) in [(136, 224, 0), (264, 96, 1)] {
            let count = sizes.len();
            let m = sizes.iter().sum::<usize>() + 3;
            let (a, b) = (Packed::random(m, k, 1), Packed::random(count * n, k, 2));
            let (left, right) = (a.device(&client), b.device(&client));
            let groups = offsets(&client, &sizes);
            let held = vec![0.5f32; m * n];
            let run = |request: fn(Gemm<'_>, u32) -> Gemm<'_>| -> Vec<f32> {
                let target = upload(&client, &held, m, n);
                let gemm = Gemm::new(&left, &right)
                    .target(Target::Accumulate(&target))
                    .m_grouped(&groups);
                read_matrix(&client, &multiply(&client, request(gemm, seed)).unwrap())
            };
            let expected = run(|gemm, _| gemm.backend(GemmBackend::Scalar));
            let found = run(|gemm, seed| gemm.plan(software(Fault::None, seed)));
            let what = format!("{count} groups, n {n}, k {k}, seed {seed}");
            assert_floats(&found, &expected, &what);
            assert_eq!(found[(m - 3) * n..], held[(m - 3) * n..], "{what}");
        }
    }
}

/// Groups along K, including empty ones and tails, and K that ends within an instruction: compared
/// with the scalar kernel bit for bit, with factors and accumulation.
#[test]
fn groups_along_k_have_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05::groups_along_k_have_the_bits_of_the_scalar_kernel");
    let many: Vec<usize> = (0..40).map(|i| 64 * (i % 5)).collect();
    // Multiples of 64 are read in place, others are moved.
    for (sizes, alignment) in [
        (vec![64, 0, 320, 128], 64),
        (vec![0, 0], 64),
        (many, 64),
        (vec![16, 0, 80, 48, 0, 304], 16),
        (vec![1024, 32], 32),
    ] {
        for (m, n, seed) in [(130, 264, 0), (40, 136, 1)] {
            let (count, k) = (sizes.len(), sizes.iter().sum::<usize>().max(64));
            let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
            let (left, right) = (a.device(&client), b.device(&client));
            let groups = offsets(&client, &sizes);
            let amax = |rows: usize| {
                let values: Vec<f32> = (0..rows).map(|row| 900.0 + row as f32).collect();
                client.create_from_slice(bytemuck::cast_slice(&values))
            };
            let (a_amax, b_amax) = (amax(count * m), amax(count * n));
            let held: Vec<f32> = (0..count * m * n).map(|i| (i % 7) as f32).collect();
            let run = |request: fn(Gemm<'_>, u32) -> Gemm<'_>| -> Vec<f32> {
                let target = upload(&client, &held, count * m, n);
                let a = scaled(Elements::Quantized(&left), Scale::PerRow(&a_amax, 2688.0));
                let b = scaled(Elements::Quantized(&right), Scale::PerRow(&b_amax, 2688.0));
                let gemm = Gemm::new(a, b)
                    .target(Target::Accumulate(&target))
                    .k_grouped(&groups)
                    .k_alignment(alignment);
                read_matrix(&client, &multiply(&client, request(gemm, seed)).unwrap())
            };
            let expected = run(|gemm, _| gemm.backend(GemmBackend::Scalar));
            let found = run(|gemm, seed| gemm.plan(software(Fault::None, seed)));
            let what = format!("columns {sizes:?}, {m} x {n}, seed {seed}");
            assert_floats(&found, &expected, &what);
        }
    }
}

/// Computed while the kernel writes, for the whole output and for each group.
#[test]
fn amax_of_the_output() {
    let client = hopper!("gemm_tcgen05::amax_of_the_output");
    let (m, n, k) = (200, 264, 96);
    let left = Packed::random(m, k, 5).device(&client);
    let right = Packed::random(n, k, 6).device(&client);
    for out in [FloatKind::F32, FloatKind::Bf16, FloatKind::F16] {
        let request = Gemm::new(&left, &right).out(out).amax(OutputAmax::Whole);
        let request = request.plan(software(Fault::None, 0));
        let (found, amax) = multiply_amax(&client, request).unwrap();
        let expected = read_f32(&client, &quantize::amax(&client, &found, None).unwrap());
        let amax = read_f32(&client, &amax);
        assert_eq!(amax.to_bits(), expected.to_bits(), "{out:?}");
        assert_ne!(amax, 0.0);
    }
    let sizes = [70, 0, 130];
    let right = Packed::random(3 * n, k, 6).device(&client);
    let groups = offsets(&client, &sizes);
    let request = Gemm::new(&left, &right)
        .out(FloatKind::F32)
        .amax(OutputAmax::PerGroup)
        .m_grouped(&groups)
        .plan(software(Fault::None, 0));
    let (found, amax) = multiply_amax(&client, request).unwrap();
    let values: Vec<f32> = read_matrix(&client, &found);
    let mut row = 0;
    for (size, amax) in sizes.into_iter().zip(read_f32s(&client, &amax, 3)) {
        let own = &values[row * n..(row + size) * n];
        let expected = own.iter().fold(0f32, |amax, value| amax.max(value.abs()));
        assert_eq!(amax, expected, "{size} rows");
        row += size;
    }
}

/// Memory after the output is not written.
#[test]
fn memory_behind_the_output_is_untouched() {
    let client = hopper!("gemm_tcgen05::memory_behind_the_output_is_untouched");
    for (m, n, k) in [(130, 264, 96), (3, 72, 64)] {
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let (a, b) = (a.device(&client), b.device(&client));
        let guard = 4096;
        let mut held = vec![0f32; m * n];
        held.extend(vec![12345.0; guard]);
        let memory = client.create_from_slice(bytemuck::cast_slice(&held));
        let matrix = Matrix::new(memory.clone(), m, n, FloatKind::F32).unwrap();
        let request = Gemm::new(&a, &b).target(Target::Replace(&matrix));
        multiply(&client, request.plan(software(Fault::None, 0))).unwrap();
        let whole = Matrix::new(memory, 1, m * n + guard, FloatKind::F32).unwrap();
        let found: Vec<f32> = read_matrix(&client, &whole);
        assert!(found[m * n..].iter().all(|value| *value == 12345.0));
        assert!(found[..m * n].iter().any(|value| *value != 0.0));
    }
}

/// Expected effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Caught {
    /// Bits that differ from the scalar kernel's.
    Wrong,
    /// An error that names the violation.
    Violation(&'static str),
}

/// Each fault with normal operands is detected: by the bits of the result, or because a command
/// violates the PTX ISA. K takes more pipeline stages than there are buffers, so that a buffer that
/// is released too early is refilled.
pub fn check_faults(client: &Client, form: Sm100Form) {
    let (m, n, k) = (128 * form.ctas(), 256, 2560);
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    let expected = expected(client, &a, &b);
    let of_pairs = match form.ctas() {
        1 => &[][..],
        _ => &Fault::OF_PAIRS[..],
    };
    let of_pairs = of_pairs.iter().map(|fault| (*fault, 0, Caught::Wrong));
    let of_all = [
        (Fault::NoFullWait, 0, Caught::Wrong),
        (Fault::NoAccumulatorWait, 0, Caught::Wrong),
        (Fault::EarlyStageReuse, 0, Caught::Wrong),
        (Fault::WrongSwizzle, 0, Caught::Wrong),
        (Fault::WrongScaleColumn, 0, Caught::Wrong),
        // Only if a copy overtakes an instruction.
        (Fault::SharedScaleColumns, 1, Caught::Wrong),
        (
            Fault::WrongInstructionDescriptor,
            0,
            Caught::Violation("instruction descriptors"),
        ),
        (
            Fault::WrongStride,
            0,
            Caught::Violation("shared-memory descriptors"),
        ),
        (
            Fault::WrongScaleId,
            0,
            Caught::Violation("instruction descriptors"),
        ),
    ];
    assert_eq!(of_all.map(|(fault, ..)| fault), Fault::INJECTED);
    for (fault, seed, caught) in of_all.into_iter().chain(of_pairs) {
        let found = sums(client, &a, &b, in_form(form, fault, seed));
        match (caught, found) {
            (Caught::Wrong, Ok(found)) => {
                let same = |(x, y): (&f32, &f32)| x.to_bits() == y.to_bits();
                assert!(
                    !found.iter().zip(&expected).all(same),
                    "{fault:?} goes unnoticed"
                );
            }
            (Caught::Violation(what), Err(error)) => {
                assert!(error.to_string().contains(what), "{fault:?}: {error}");
            }
            // A wrong column may also be outside tensor memory.
            (Caught::Wrong, Err(error)) => {
                assert!(
                    error.to_string().contains("tensor-memory"),
                    "{fault:?}: {error}"
                );
            }
            (Caught::Violation(what), Ok(_)) => panic!("{fault:?}: no violation of {what}"),
        }
    }
    // In issue order, copies to shared columns are harmless: only the other order detects them.
    let in_order = in_form(form, Fault::SharedScaleColumns, 0);
    let found = sums(client, &a, &b, in_order).unwrap();
    assert_floats(&found, &expected, "shared columns in order");
}

#[test]
fn injected_faults_are_caught() {
    let client = hopper!("gemm_tcgen05::injected_faults_are_caught");
    check_faults(&client, Sm100Form::OneCta);
}

/// Data center Blackwell: grouped and per-token GEMMs choose the kernel by default, if its
/// self-check passes; dense ones use cuBLASLt, without a check.
#[test]
fn the_self_check_decides() {
    let blackwell = Capabilities {
        device: "a GPU".into(),
        runtime: "cuda",
        compute_capability: Some(100),
        conversion: Conversion::Hardware,
        gemm: GemmBackend::CublasLt,
    };
    let checks = Cell::new(0);
    let chosen = |problem: Problem, verdict: Result<(), String>| {
        let tcgen05 = |_| {
            checks.set(checks.get() + 1);
            verdict.clone()
        };
        let device = Device {
            capabilities: &blackwell,
            sms: 148,
            cublaslt: &|_| Ok(()),
            tcgen05: &tcgen05,
        };
        gemm::proof::plan(&device, &problem).unwrap()
    };
    let dense = Problem::new([OperandLayout::Packed; 2], (4096, 4096, 4096));
    let mut per_token = dense;
    (per_token.epilogue.a, per_token.epilogue.b) = (Factor::PerRow, Factor::PerRow);
    let along_k = dense.grouped(GroupedDim::K, 8);
    let wrong = || Err("row 3".to_owned());
    for problem in [dense.grouped(GroupedDim::M, 8), per_token, along_k] {
        let right = chosen(problem, Ok(()));
        assert_eq!(right.backend, GemmBackend::Sm100Tcgen05, "{problem:?}");
        let other = chosen(problem, wrong());
        assert_eq!(other.backend, GemmBackend::Cmma, "{problem:?}");
        let (kernel, refusal) = &other.refusals[0];
        assert_eq!(*kernel, "sm100_block_scaled");
        assert!(refusal.to_string().contains("row 3"), "{refusal}");
    }
    // If the check passes, the plan asks again, which a device answers from its cache; if the
    // two-CTA check fails, one CTA is checked.
    assert_eq!(checks.get(), 11);
    // Problems that the kernel does not support, cuBLASLt's problems, and explicit requests are not
    // checked.
    let narrow = Problem::new([OperandLayout::Packed; 2], (4096, 4100, 4096));
    let narrow = narrow.grouped(GroupedDim::K, 8);
    assert_eq!(chosen(narrow, Ok(())).backend, GemmBackend::Cmma);
    assert_eq!(chosen(dense, Ok(())).backend, GemmBackend::CublasLt);
    let asked = Problem {
        backend: Some(GemmBackend::Sm100Tcgen05),
        ..per_token
    };
    let choice = chosen(asked, wrong());
    assert_eq!(choice.backend, GemmBackend::Sm100Tcgen05);
    assert_eq!(checks.get(), 11);
}

/// A device that lacks the instructions returns an error, and the kernel names unsupported
/// problems.
#[test]
fn errors_name_what_is_missing() {
    let client = client!("gemm_tcgen05::errors_name_what_is_missing");
    let capabilities = Capabilities::of(&client);
    let a = Packed::random(32, 64, 1).device(&client);
    let asked = |capabilities: &Capabilities, b: Operand| {
        let request = Gemm::new(&a, b).backend(GemmBackend::Sm100Tcgen05);
        let error = multiply(&client, request.capabilities(capabilities));
        error.unwrap_err().to_string()
    };
    let is_blackwell = [GemmBackend::CublasLt, GemmBackend::Sm100Tcgen05];
    if !is_blackwell.contains(&capabilities.gemm) {
        let error = asked(capabilities, Operand::from(&a));
        assert!(error.contains("compute capability 10.0"), "{error}");
    }
    let blackwell = Capabilities {
        compute_capability: Some(100),
        gemm: GemmBackend::CublasLt,
        ..capabilities.clone()
    };
    let odd = Packed::random(9, 64, 1).device(&client);
    let error = asked(&blackwell, Operand::from(&odd));
    assert!(error.contains("multiple of 8"), "{error}");
    let half = Matrix::empty(&client, 32, 64, FloatKind::Bf16);
    let error = asked(&blackwell, Operand::from(&half));
    assert!(error.contains("packed operands of one format"), "{error}");
}
