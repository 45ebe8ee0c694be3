//! GEMMs by cuBLASLt: arguments of its calls, its selection, and, on a CUDA GPU
//! (`NVFP4_TEST_DEVICE=cuda`), bf16 and FP8 GEMMs through the code that FP4 uses.
//!
//! GEMMs of small integers have exact sums in any order and are compared bit for bit; random ones
//! are compared within a bound that each test states.

use crate::support::device::{read_matrix, read_u32, upload};
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::inputs::Generator;
use crate::support::packed::Packed;
use crate::support::quantize;
use crate::support::{device, inputs};
use cubecl::{client::Client, prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{Layout, Nvfp4Error, StoredForm, format::e4m3, reference};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Choice, Elements, Gemm, GroupedDim, Operand, OperandLayout, OutputAmax, Plan,
        Problem, Scale, Target,
        proof::{
            CublasLtPlan, Device, SmallM, add_rows_kernel,
            cublaslt::{self, CublasLtFormat, CublasLtGemm, CublasLtOperand, CublasLtProblem},
            factors_kernel,
        },
    },
    tensor::{DeviceQuantized, FloatKind, Matrix},
};
use nvfp4_test_support::Skip;
use std::{
    fmt::Write,
    sync::{Arc, Barrier, Mutex},
};

/// Returns the client of a CUDA GPU that has the library, or returns early.
macro_rules! cublaslt {
    ($test:literal) => {{
        let client = on_gpu!($test, "cuBLASLt");
        if let Some(reason) = missing(&client) {
            Skip::NoCublasLt.print($test, reason);
            return;
        }
        client
    }};
}

fn problem(format: CublasLtFormat, (m, n, k): (usize, usize, usize)) -> CublasLtProblem {
    CublasLtProblem {
        format,
        m,
        n,
        k,
        out: FloatKind::Bf16,
        alpha: false,
        bias: false,
        accumulate: false,
        alignment: 256,
    }
}

/// Returns the reason why cuBLASLt is missing, if it is. A library that refuses bf16 is a failure.
fn missing(client: &Client) -> Option<String> {
    let bf16 = problem(CublasLtFormat::Bf16, (128, 128, 128));
    match cublaslt::supports(client, &bf16) {
        Ok(()) => None,
        Err(error) if error.to_string().contains("not found") => Some(error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

fn argument_of(error: Nvfp4Error) -> &'static str {
    match error {
        Nvfp4Error::Shape { argument, .. } | Nvfp4Error::Value { argument, .. } => argument,
        other => panic!("{other}"),
    }
}

#[test]
fn problems_are_checked() {
    let good = [
        problem(CublasLtFormat::Bf16, (1, 8, 8)),
        problem(CublasLtFormat::E4m3, (3, 8, 16)),
        problem(CublasLtFormat::Nvfp4, (5, 8, 32)),
        CublasLtProblem {
            out: FloatKind::F32,
            alignment: 16,
            ..problem(CublasLtFormat::Nvfp4, (7, 4, 96))
        },
    ];
    for problem in good {
        problem.check().unwrap();
    }
    let f32_out = |n| CublasLtProblem {
        out: FloatKind::F32,
        ..problem(CublasLtFormat::Bf16, (1, n, 8))
    };
    let unaligned = CublasLtProblem {
        alignment: 8,
        ..good[0]
    };
    let bad = [
        (
            problem(CublasLtFormat::Bf16, (1, 8, 12)),
            "k",
            "multiple of 8",
        ),
        (
            problem(CublasLtFormat::E4m3, (1, 8, 24)),
            "k",
            "multiple of 16",
        ),
        (
            problem(CublasLtFormat::Nvfp4, (1, 8, 48)),
            "k",
            "multiple of 32",
        ),
        (
            problem(CublasLtFormat::Nvfp4, (1, 8, 0)),
            "k",
            "multiple of 32",
        ),
        (
            problem(CublasLtFormat::Bf16, (1, 12, 8)),
            "n",
            "multiple of 8",
        ),
        (f32_out(6), "n", "multiple of 4"),
        (problem(CublasLtFormat::Bf16, (0, 8, 8)), "m", "from 1"),
        (
            problem(CublasLtFormat::Bf16, (1 << 31, 8, 8)),
            "m",
            "to 2^31 - 1",
        ),
        (unaligned, "alignment", "multiples of 16 bytes"),
    ];
    for (problem, argument, expected) in bad {
        let error = problem.check().unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(argument_of(error), argument, "{problem}");
    }
}

/// Memory of every operand of a GEMM, of the required size.
struct Memory {
    a: Handle,
    b: Handle,
    scales: Option<(Handle, Handle)>,
    alpha: Option<Handle>,
    bias: Option<Matrix>,
    out: Matrix,
}

impl Memory {
    fn new(client: &Client, problem: &CublasLtProblem) -> Self {
        let CublasLtProblem { m, n, k, .. } = *problem;
        let bytes = |rows: usize| rows * k * problem.format.bits() / 8;
        let scale = |rows: usize| match problem.format {
            CublasLtFormat::Bf16 => 0,
            CublasLtFormat::E4m3 => 4,
            CublasLtFormat::Nvfp4 => reference::swizzle::padded_len(rows, k / 16),
        };
        let scales = (problem.format != CublasLtFormat::Bf16)
            .then(|| (client.empty(scale(m)), client.empty(scale(n))));
        Self {
            a: client.empty(bytes(m)),
            b: client.empty(bytes(n)),
            scales,
            alpha: problem.alpha.then(|| client.empty(8)),
            bias: problem
                .bias
                .then(|| Matrix::empty(client, 1, n, problem.format.bias(problem.out))),
            out: Matrix::empty(client, m, n, problem.out),
        }
    }

    fn product(&self, problem: &CublasLtProblem) -> CublasLtGemm<'_> {
        let (a, b) = match &self.scales {
            Some((a, b)) => (Some(a), Some(b)),
            None => (None, None),
        };
        let side = |rows, data, scale| CublasLtOperand { rows, data, scale };
        CublasLtGemm {
            format: problem.format,
            k: problem.k,
            a: side(problem.m, &self.a, a),
            b: side(problem.n, &self.b, b),
            alpha: self.alpha.as_ref(),
            bias: self.bias.as_ref(),
            out: &self.out,
            accumulate: problem.accumulate,
        }
    }
}

#[test]
fn products_are_checked() {
    let client = client!("products_are_checked");
    for format in [
        CublasLtFormat::Bf16,
        CublasLtFormat::E4m3,
        CublasLtFormat::Nvfp4,
    ] {
        let problem = CublasLtProblem {
            alpha: true,
            bias: true,
            ..problem(format, (5, 24, 96))
        };
        let memory = Memory::new(&client, &problem);
        let good = memory.product(&problem);
        good.check().unwrap();
        assert_eq!(good.problem(), problem);
        let small = client.empty(3);
        let narrow = Matrix::empty(&client, 1, 16, FloatKind::Bf16);
        let wide = Matrix::empty(&client, 1, 24, FloatKind::F32);
        let flat = Matrix::empty(&client, 24, 5, FloatKind::Bf16);
        let (a, b) = (good.a, good.b);
        let mut bad: Vec<(CublasLtGemm, &str)> = vec![
            (
                CublasLtGemm {
                    a: CublasLtOperand { data: &small, ..a },
                    ..good
                },
                "a",
            ),
            (
                CublasLtGemm {
                    b: CublasLtOperand { data: &small, ..b },
                    ..good
                },
                "b",
            ),
            (
                CublasLtGemm {
                    alpha: Some(&small),
                    ..good
                },
                "alpha",
            ),
            (
                CublasLtGemm {
                    bias: Some(&narrow),
                    ..good
                },
                "bias",
            ),
            (
                CublasLtGemm {
                    bias: Some(&wide),
                    ..good
                },
                "bias",
            ),
            (CublasLtGemm { out: &flat, ..good }, "out"),
            (CublasLtGemm { k: 100, ..good }, "k"),
        ];
        if format == CublasLtFormat::Bf16 {
            let scaled = CublasLtOperand {
                scale: Some(&small),
                ..a
            };
            bad.push((CublasLtGemm { a: scaled, ..good }, "a.scale"));
        } else {
            bad.push((
                CublasLtGemm {
                    a: CublasLtOperand { scale: None, ..a },
                    ..good
                },
                "a.scale",
            ));
            let short = CublasLtOperand {
                scale: Some(&small),
                ..b
            };
            bad.push((CublasLtGemm { b: short, ..good }, "b.scale"));
        }
        for (product, argument) in bad {
            assert_eq!(
                argument_of(product.check().unwrap_err()),
                argument,
                "{format:?}"
            );
        }
        // A view that begins at 8 bytes.
        let view = memory.a.clone().offset_start(8);
        let product = CublasLtGemm {
            a: CublasLtOperand {
                rows: 4,
                data: &view,
                ..a
            },
            ..good
        };
        assert_eq!(product.problem().alignment, 8);
        assert_eq!(argument_of(product.check().unwrap_err()), "alignment");
    }
}

/// Without the library, as on CubeCL's CPU runtime, the error names the request and the library.
#[cfg(feature = "cpu")]
#[test]
fn no_library_is_an_error() {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let problem = problem(CublasLtFormat::Nvfp4, (64, 64, 64));
    let error = cublaslt::supports(&client, &problem).unwrap_err();
    assert!(matches!(
        error,
        Nvfp4Error::Unsupported {
            library: "cuBLASLt",
            ..
        }
    ));
    assert!(
        error.to_string().contains("64 x 64 x 64, Nvfp4 to Bf16"),
        "{error}"
    );
    let a = Packed::random(64, 64, 1).device(&client);
    let path = GemmBackend::CublasLt;
    let error = multiply(
        &client,
        Gemm::new(&a, &a).out(FloatKind::Bf16).backend(path),
    )
    .unwrap_err();
    assert!(matches!(error, Nvfp4Error::Unsupported { .. }), "{error}");
}

/// Kernel choices for shapes on a B200 and a B300, without such a GPU, and on other devices.
#[test]
fn choice_on_blackwell() {
    let client = client!("choice_on_blackwell");
    let device = |capability: u32, gemm| Capabilities {
        device: format!("sm_{capability}"),
        runtime: "cuda",
        compute_capability: Some(capability),
        gemm,
        ..Capabilities::of(&client).clone()
    };
    let asked = Mutex::new(Vec::new());
    let yes = |problem: &CublasLtProblem| {
        problem.check()?;
        asked.lock().unwrap().push(*problem);
        Ok(())
    };
    let no = |problem: &CublasLtProblem| {
        Err(Nvfp4Error::Unsupported {
            library: "cuBLASLt",
            problem: problem.to_string(),
            reason: "NOT_SUPPORTED".into(),
        })
    };
    let (packed, dense) = (OperandLayout::Packed, OperandLayout::KMajor);
    let (both, mixed, bf16) = ([packed; 2], [packed, dense], [dense; 2]);
    for blackwell in [
        device(100, GemmBackend::CublasLt),
        device(103, GemmBackend::CublasLt),
    ] {
        let of = |layouts, shape, groups| chosen(&blackwell, 148, layouts, shape, groups, &yes);
        for (packed, format) in [
            (both, CublasLtFormat::Nvfp4),
            (mixed, CublasLtFormat::Bf16),
            (bf16, CublasLtFormat::Bf16),
        ] {
            for m in [1, 64, 8192] {
                let choice = of(packed, (m, 4096, 14336), 1);
                assert_eq!(choice.backend, GemmBackend::CublasLt);
                assert_eq!(choice.plan, Plan::from(CublasLtPlan(format)));
                assert_eq!(asked.lock().unwrap().pop().unwrap().format, format);
            }
        }
        // A packed weight with bf16 rows is read directly at small M, otherwise decoded for the
        // library.
        let weight_only = [dense, packed];
        for m in [1, 16] {
            let choice = of(weight_only, (m, 4096, 14336), 1);
            let found = (choice.backend, choice.plan);
            assert_eq!(found, (GemmBackend::Cmma, Plan::from(SmallM)));
        }
        assert!(asked.lock().unwrap().is_empty());
        assert_eq!(
            of(weight_only, (17, 4096, 14336), 1).backend,
            GemmBackend::CublasLt
        );
        assert_eq!(
            asked.lock().unwrap().pop().unwrap().format,
            CublasLtFormat::Bf16
        );
        // Code rows or output rows that are not multiples of 16 bytes, and groups, use the portable
        // path.
        let portable = GemmBackend::Cmma;
        assert_eq!(of(both, (64, 4096, 48), 1).backend, portable);
        assert_eq!(of(both, (64, 4100, 64), 1).backend, portable);
        for (packed, shape, groups) in [
            (bf16, (64, 4096, 40), 1),
            (mixed, (64, 4100, 64), 1),
            (both, (8192, 4096, 7168), 8),
        ] {
            let choice = of(packed, shape, groups);
            assert_ne!(choice.backend, GemmBackend::CublasLt);
            assert!(!choice.plan.is::<CublasLtPlan>(), "{choice:?}");
        }
        assert!(asked.lock().unwrap().is_empty());
        let choice = chosen(&blackwell, 148, both, (64, 64, 64), 1, &no);
        assert_eq!(choice.backend, portable);
        let reasons = choice.refusals.iter().map(|refusal| refusal.1.to_string());
        assert!(
            reasons
                .into_iter()
                .any(|reason| reason.contains("NOT_SUPPORTED"))
        );
    }
    for (capability, gemm) in [
        (80, GemmBackend::Cmma),
        (90, GemmBackend::Sm90Wgmma),
        (120, GemmBackend::Cmma),
    ] {
        let other = device(capability, gemm);
        let shape = (64, 4096, 4096);
        let choice = chosen(&other, 132, both, shape, 1, &yes);
        assert_eq!(choice.backend, gemm);
    }
    assert!(asked.lock().unwrap().is_empty());
}

/// Returns the choice on a device with this many SMs, for which cuBLASLt answers by `cublaslt`.
fn chosen(
    capabilities: &Capabilities,
    sms: usize,
    layouts: [OperandLayout; 2],
    shape: (usize, usize, usize),
    groups: usize,
    cublaslt: &dyn Fn(&CublasLtProblem) -> Result<(), Nvfp4Error>,
) -> Choice {
    let device = Device {
        capabilities,
        sms,
        cublaslt,
        tcgen05: &|_| Ok(()),
    };
    let problem = Problem::new(layouts, shape);
    let problem = match groups {
        1 => problem,
        groups => problem.grouped(GroupedDim::M, groups),
    };
    gemm::proof::plan(&device, &problem).unwrap()
}

/// Returns the operand with its block scales in 128x4 tiles.
fn swizzled(client: &Client, packed: &DeviceQuantized) -> DeviceQuantized {
    let (outer, blocks) = (packed.outer(), packed.blocks());
    DeviceQuantized {
        scales: quantize::swizzle(client, &packed.scales, outer, blocks).unwrap(),
        layout: Layout {
            form: StoredForm::Tiles,
            ..packed.layout
        },
        ..packed.clone()
    }
}

/// Paths that read row-major scales accept tiled ones, too.
#[test]
fn tiles_of_scales_become_rows() {
    let client = client!("tiles_of_scales_become_rows");
    let (m, n, k) = (33, 24, 80);
    let a = Packed::random(m, k, 1).device(&client);
    let b = Packed::random(n, k, 2).device(&client);
    let expected = multiply(&client, Gemm::new(&a, &b).out(FloatKind::F32)).unwrap();
    let expected = read_matrix::<f32>(&client, &expected);
    let (a_tiles, b_tiles) = (swizzled(&client, &a), swizzled(&client, &b));
    for (a, b) in [(&a_tiles, &b), (&a, &b_tiles), (&a_tiles, &b_tiles)] {
        let found = multiply(&client, Gemm::new(a, b).out(FloatKind::F32)).unwrap();
        device::assert_floats(&read_matrix::<f32>(&client, &found), &expected, "product");
    }
}

/// `alpha` is rounded as specified, and so is the bias if the library requires it.
#[test]
fn factors_and_bias() {
    let client = client!("factors_and_bias");
    let mut random = Generator::new(5);
    let bias: Vec<f32> = (0..24).map(|_| random.normal()).collect();
    let (a, b) = (1234.5f32, 77.7f32);
    let memory = |x: &[f32]| client.create_from_slice(bytemuck::cast_slice(x));
    let (a_amax, b_amax, bias_memory) = (memory(&[a]), memory(&[b]), memory(&bias));
    let factors = client.empty(8);
    use gemm::proof::Factor;
    for (kinds, expected) in [
        ((Factor::Tensor, Factor::Tensor), reference::alpha(a, b)),
        ((Factor::One, Factor::Tensor), b / 2688.0),
        ((Factor::One, Factor::One), 1.0),
    ] {
        // SAFETY: every buffer has the length that is said.
        unsafe {
            factors_kernel::launch_unchecked(
                &client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                BufferArg::from_raw_parts(a_amax.clone(), 1),
                BufferArg::from_raw_parts(b_amax.clone(), 1),
                BufferArg::from_raw_parts(factors.clone(), 2),
                2688.0,
                2688.0,
                1.0,
                kinds.0,
                kinds.1,
            );
        }
        let found = read_u32(&client, &factors, 2);
        assert_eq!(found, [expected.to_bits(), 1.0f32.to_bits()]);
    }
    let spread = |out: &Matrix, add: bool| unsafe {
        // SAFETY: as above.
        add_rows_kernel::launch_unchecked(
            &client,
            CubeCount::Static(3, 1, 1),
            CubeDim::new_1d(1),
            AddressType::U32,
            BufferArg::from_raw_parts(bias_memory.clone(), 24),
            BufferArg::from_raw_parts(out.handle.clone(), out.len()),
            out.len(),
            24,
            add,
            out.dtype,
            out.dtype.storage_type(),
        );
    };
    let rounded = Matrix::empty(&client, 1, 24, FloatKind::Bf16);
    spread(&rounded, false);
    let expected: Vec<bf16> = bias.iter().map(|&x| bf16::from_f32(x)).collect();
    assert_eq!(read_matrix::<bf16>(&client, &rounded), expected);
    let held: Vec<f32> = (0..5 * 24).map(|_| random.normal()).collect();
    let out = upload(&client, &held, 5, 24);
    spread(&out, true);
    let expected: Vec<f32> = held
        .iter()
        .enumerate()
        .map(|(i, x)| bias[i % 24] + x)
        .collect();
    device::assert_floats(&read_matrix::<f32>(&client, &out), &expected, "added");
}

/// One operand on the host, with values that its format represents exactly.
struct Host {
    format: CublasLtFormat,
    rows: usize,
    values: Vec<f32>,
    scale: f32,
}

impl Host {
    /// Returns integers from -2 to 2, with a power-of-two scale.
    fn integers(format: CublasLtFormat, rows: usize, k: usize, seed: u32) -> Self {
        let mut random = Generator::new(seed);
        let mut next = || (random.next_u32() % 5) as f32 - 2.0;
        Self {
            format,
            rows,
            values: (0..rows * k).map(|_| next()).collect(),
            scale: if format == CublasLtFormat::E4m3 {
                0.25
            } else {
                1.0
            },
        }
    }

    /// Returns normal values, rounded to the format.
    fn normal(format: CublasLtFormat, rows: usize, k: usize, seed: u32) -> Self {
        let mut random = Generator::new(seed);
        let mut next = || match format {
            CublasLtFormat::E4m3 => {
                e4m3::decode_element(e4m3::encode_element(8.0 * random.normal()))
            }
            _ => bf16::from_f32(random.normal()).to_f32(),
        };
        Self {
            format,
            rows,
            values: (0..rows * k).map(|_| next()).collect(),
            scale: if format == CublasLtFormat::E4m3 {
                0.3
            } else {
                1.0
            },
        }
    }

    fn upload(&self, client: &Client) -> (Handle, Option<Handle>) {
        if self.format == CublasLtFormat::E4m3 {
            let bytes: Vec<u8> = self
                .values
                .iter()
                .map(|&x| e4m3::encode_element(x))
                .collect();
            let scale = client.create_from_slice(&self.scale.to_ne_bytes());
            return (client.create_from_slice(&bytes), Some(scale));
        }
        let values: Vec<bf16> = self.values.iter().map(|&x| bf16::from_f32(x)).collect();
        (
            client.create_from_slice(bytemuck::cast_slice(&values)),
            None,
        )
    }

    fn row(&self, row: usize) -> &[f32] {
        let k = self.values.len() / self.rows;
        &self.values[row * k..][..k]
    }
}

/// Operations of an epilogue.
#[derive(Debug, Clone, Copy)]
struct Epilogue {
    /// `alpha` on the device, if any.
    alpha: Option<f32>,
    bias: bool,
    accumulate: bool,
}

const EPILOGUES: [Epilogue; 6] = {
    const fn epilogue(alpha: Option<f32>, bias: bool, accumulate: bool) -> Epilogue {
        Epilogue {
            alpha,
            bias,
            accumulate,
        }
    }
    [
        epilogue(None, false, false),
        epilogue(Some(0.5), false, false),
        epilogue(None, true, false),
        epilogue(None, false, true),
        epilogue(Some(-2.0), true, false),
        epilogue(Some(0.5), true, true),
    ]
};

/// Previous contents of the output, the bias, and the new contents.
struct Outcome {
    before: Vec<f32>,
    bias: Vec<f32>,
    found: Vec<f32>,
}

/// Runs a GEMM with new memory.
fn run(
    client: &Client,
    a: &Host,
    b: &Host,
    out: FloatKind,
    epilogue: Epilogue,
) -> Result<Outcome, Nvfp4Error> {
    let (m, n, k) = (a.rows, b.rows, a.row(0).len());
    let mut random = Generator::new(17);
    let mut integers = |len: usize, nan: bool| -> Vec<f32> {
        let mut next = || (random.next_u32() % 33) as f32 - 16.0;
        (0..len)
            .map(|_| if nan { f32::NAN } else { next() })
            .collect()
    };
    // Without accumulation the output must not be read, so it contains NaN.
    let before = integers(m * n, !epilogue.accumulate);
    let bias = integers(n, false);
    let matrix = |x: &[f32], rows: usize, kind: FloatKind| {
        let cols = x.len() / rows;
        match kind {
            FloatKind::F32 => upload(client, x, rows, cols),
            FloatKind::F16 => upload(client, &inputs::convert::<f16>(x), rows, cols),
            FloatKind::Bf16 => upload(client, &inputs::convert::<bf16>(x), rows, cols),
        }
    };
    let result = matrix(&before, m, out);
    let bias_matrix = epilogue.bias.then(|| matrix(&bias, 1, a.format.bias(out)));
    let factors = epilogue.alpha.map(|alpha| {
        let before = if epilogue.accumulate { 1.0f32 } else { 0.0 };
        client.create_from_slice(bytemuck::cast_slice(&[alpha, before]))
    });
    let ((a_data, a_scale), (b_data, b_scale)) = (a.upload(client), b.upload(client));
    let side = |rows, data, scale| CublasLtOperand { rows, data, scale };
    let product = CublasLtGemm {
        format: a.format,
        k,
        a: side(m, &a_data, a_scale.as_ref()),
        b: side(n, &b_data, b_scale.as_ref()),
        alpha: factors.as_ref(),
        bias: bias_matrix.as_ref(),
        out: &result,
        accumulate: epilogue.accumulate,
    };
    cublaslt::gemm(client, &product)?;
    let found = match out {
        FloatKind::F32 => read_matrix::<f32>(client, &result),
        FloatKind::F16 => widen(&read_matrix::<f16>(client, &result)),
        FloatKind::Bf16 => widen(&read_matrix::<bf16>(client, &result)),
    };
    Ok(Outcome {
        before,
        bias,
        found,
    })
}

fn widen<T: inputs::TestElement>(x: &[T]) -> Vec<f32> {
    x.iter().map(|value| value.to_f32()).collect()
}

fn rounded(value: f64, out: FloatKind) -> f32 {
    match out {
        FloatKind::F32 => value as f32,
        FloatKind::F16 => f16::from_f64(value).to_f32(),
        FloatKind::Bf16 => bf16::from_f64(value).to_f32(),
    }
}

/// Integers, every epilogue, every output: bit for bit the rounded exact sum. Requests that the
/// library refuses are collected, and must all be known limitations.
#[test]
fn integers_are_exact() {
    let client = cublaslt!("integers_are_exact");
    let mut refused = String::new();
    for format in [CublasLtFormat::Bf16, CublasLtFormat::E4m3] {
        for (m, n, k) in [
            (1, 16, 16),
            (7, 48, 80),
            (33, 272, 96),
            (129, 144, 1040),
            (304, 640, 304),
        ] {
            let a = Host::integers(format, m, k, 3);
            let b = Host::integers(format, n, k, 4);
            for out in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
                for epilogue in EPILOGUES {
                    let what = format!("{m} x {n} x {k}, {format:?} to {out:?}, {epilogue:?}");
                    let Outcome {
                        before,
                        bias,
                        found,
                    } = match run(&client, &a, &b, out, epilogue) {
                        Ok(results) => results,
                        Err(error) => {
                            assert!(matches!(error, Nvfp4Error::Unsupported { .. }), "{error}");
                            // The library has no f16 output for bf16 operands.
                            assert!(
                                (format, out) == (CublasLtFormat::Bf16, FloatKind::F16),
                                "{error}"
                            );
                            writeln!(refused, "{error}").unwrap();
                            continue;
                        }
                    };
                    let alpha = (epilogue.alpha.unwrap_or(1.0) * a.scale * b.scale) as f64;
                    for i in 0..m {
                        for j in 0..n {
                            let terms = a.row(i).iter().zip(b.row(j));
                            let sum: f64 = terms.map(|(a, b)| (a * b) as f64).sum();
                            let mut expected = alpha * sum;
                            if epilogue.bias {
                                expected += bias[j] as f64;
                            }
                            let mut twice = expected;
                            if epilogue.accumulate {
                                // The library may round to 16 bits before it adds to the output.
                                let held = before[i * n + j] as f64;
                                twice = rounded(expected, out) as f64 + held;
                                expected += held;
                            }
                            let found = found[i * n + j];
                            assert!(
                                found == rounded(expected, out) || found == rounded(twice, out),
                                "{what}: ({i}, {j}): {found} instead of {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
    println!(
        "refused: {} of them, such as {:?}",
        refused.lines().count(),
        refused.lines().next()
    );
}

/// Random operands within `bound · alpha · Σ |a b|` plus half an ulp of the output. The bound is 2
/// (k + 2) ε for bf16, with `f32` sums in any order, and 2^-11 for FP8, whose sums Hopper
/// accumulates with fewer bits.
#[test]
fn random_within_the_bound() {
    let client = cublaslt!("random_within_the_bound");
    for format in [CublasLtFormat::Bf16, CublasLtFormat::E4m3] {
        for (m, n, k) in [(1, 512, 4096), (130, 272, 1040), (64, 128, 16384)] {
            let (a, b) = (Host::normal(format, m, k, 5), Host::normal(format, n, k, 6));
            for out in [FloatKind::F32, FloatKind::Bf16] {
                let epilogue = Epilogue {
                    alpha: Some(0.7),
                    bias: false,
                    accumulate: false,
                };
                let found = run(&client, &a, &b, out, epilogue).unwrap().found;
                let alpha = 0.7f32 as f64 * a.scale as f64 * b.scale as f64;
                let (relative, unit) = match (format, out) {
                    (CublasLtFormat::Bf16, _) => {
                        (2.0 * (k as f64 + 2.0) * f32::EPSILON as f64, 0.0)
                    }
                    _ => (2f64.powi(-11), 0.0),
                };
                let unit = if out == FloatKind::Bf16 {
                    2f64.powi(-8)
                } else {
                    unit
                };
                let mut worst = 0.0f64;
                for i in 0..m {
                    for j in 0..n {
                        let terms = || {
                            a.row(i)
                                .iter()
                                .zip(b.row(j))
                                .map(|(a, b)| *a as f64 * *b as f64)
                        };
                        let expected = alpha * terms().sum::<f64>();
                        let magnitude = alpha * terms().map(f64::abs).sum::<f64>();
                        let error = (found[i * n + j] as f64 - expected).abs();
                        let bound = relative * magnitude + unit * expected.abs();
                        assert!(
                            error <= bound,
                            "{m} x {n} x {k}, {format:?} to {out:?}: ({i}, {j}): error {error:e}, bound {bound:e}"
                        );
                        worst = worst.max(error / magnitude);
                    }
                }
                println!(
                    "{m} x {n} x {k}, {format:?} to {out:?}: error {worst:.2e} of the sum of magnitudes"
                );
            }
        }
    }
}

/// [`gemm::gemm`] on this backend compared with the exact result: alpha from amax values on the
/// device, `f32` biases, accumulation, and decoded packed operands.
#[test]
fn products_of_operands() {
    let client = cublaslt!("products_of_operands");
    let (m, n, k) = (133, 272, 320);
    let integers = |rows: usize, seed| {
        let mut packed = Packed::random(rows, k, seed);
        packed.codes.iter_mut().for_each(|byte| *byte &= 0xcc);
        packed.scales.iter_mut().for_each(|byte| *byte = 0x38);
        packed.amax = 2688.0 / 4.0;
        packed
    };
    let (a, b) = (integers(m, 3), integers(n, 4));
    let (x, y) = (a.decoded(), b.decoded());
    let dense = |values: &[f32], rows| upload(&client, &inputs::convert::<bf16>(values), rows, k);
    let (a_dense, b_dense) = (dense(&x, m), dense(&y, n));
    let (a_packed, b_packed) = (a.device(&client), b.device(&client));
    let b_tiles = swizzled(&client, &b_packed);
    let mut random = Generator::new(8);
    // Not exact in bf16: an f32 output must preserve it.
    let bias: Vec<f32> = (0..n)
        .map(|_| 1.0 + (random.next_u32() % 999) as f32 / 1024.0)
        .collect();
    let bias_matrix = upload(&client, &bias, 1, n);
    let scaled = |elements| Operand {
        elements,
        scale: Scale::Tensor(&a_packed.amax, 2688.0),
    };
    let cases: [(Operand, Operand, f64); 5] = [
        (Operand::from(&a_dense), Operand::from(&b_dense), 1.0),
        (Operand::from(&a_packed), Operand::from(&b_dense), 0.25),
        (Operand::from(&a_dense), Operand::from(&b_tiles), 0.25),
        (
            scaled(Elements::Bf16(&a_dense)),
            Operand::from(&b_packed),
            0.0625,
        ),
        (
            scaled(Elements::Bf16(&a_dense)),
            Operand::from(&b_dense),
            0.25,
        ),
    ];
    let path = Some(GemmBackend::CublasLt);
    for (case, (a, b, alpha)) in cases.iter().enumerate() {
        for out in [FloatKind::F32, FloatKind::Bf16] {
            for (biased, accumulate) in [(false, false), (true, false), (false, true), (true, true)]
            {
                let before: Vec<f32> = (0..m * n).map(|i| (i % 61) as f32 - 30.0).collect();
                let held = match out {
                    FloatKind::F32 => upload(&client, &before, m, n),
                    _ => upload(&client, &inputs::convert::<bf16>(&before), m, n),
                };
                let target = if accumulate {
                    Target::Accumulate(&held)
                } else {
                    Target::New(out)
                };
                let bias_of = biased.then_some(&bias_matrix);
                let (found, amax) = multiply_amax(
                    &client,
                    Gemm::new(a, b)
                        .bias(bias_of)
                        .target(target)
                        .amax(OutputAmax::Whole)
                        .backend(path),
                )
                .unwrap();
                let found = match out {
                    FloatKind::F32 => read_matrix::<f32>(&client, &found),
                    _ => widen(&read_matrix::<bf16>(&client, &found)),
                };
                for i in 0..m {
                    for j in 0..n {
                        let terms = x[i * k..][..k].iter().zip(&y[j * k..][..k]);
                        let mut expected = alpha * terms.map(|(a, b)| (a * b) as f64).sum::<f64>();
                        if biased {
                            // The library takes a bias in the output's type.
                            let whole = accumulate || out == FloatKind::F32;
                            let bias = bias[j] as f64;
                            expected += if whole {
                                bias
                            } else {
                                rounded(bias, out) as f64
                            };
                        }
                        if accumulate {
                            expected += before[i * n + j] as f64;
                        }
                        let (found, expected) = (found[i * n + j], rounded(expected, out));
                        assert_eq!(
                            found, expected,
                            "case {case} to {out:?}, bias {biased}, accumulated {accumulate}: ({i}, {j})"
                        );
                    }
                }
                let largest = found.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                assert_eq!(device::read_f32(&client, &amax), largest, "amax");
            }
        }
    }
    // Unsupported forms are refused before anything runs.
    let rows = client.create_from_slice(bytemuck::cast_slice(&vec![1.0f32; m]));
    let per_row = Operand {
        elements: Elements::Bf16(&a_dense),
        scale: Scale::PerRow(&rows, 2688.0),
    };
    let new = Target::New(FloatKind::Bf16);
    let error = multiply(
        &client,
        Gemm::new(per_row, &b_dense).target(new).backend(path),
    )
    .unwrap_err();
    assert_eq!(argument_of(error), "a");
}

/// Collects tracing events of one thread.
struct Events(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Events {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A GPU without FP4 whose capabilities claim a B200: the library refuses, an event reports it, and
/// the portable kernel computes the GEMM.
#[test]
fn fp4_is_refused_visibly() {
    let client = cublaslt!("fp4_is_refused_visibly");
    let here = Capabilities::of(&client);
    if here.compute_capability >= Some(100) {
        Skip::OtherGpu.print("fp4_is_refused_visibly", "has FP4");
        return;
    }
    let (m, n, k) = (128, 256, 320);
    let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
    let (a, b) = (a.device(&client), b.device(&client));
    let path = GemmBackend::CublasLt;
    let error = multiply(
        &client,
        Gemm::new(&a, &b).out(FloatKind::Bf16).backend(path),
    )
    .unwrap_err();
    println!("{error}");
    assert!(
        matches!(
            error,
            Nvfp4Error::Unsupported {
                library: "cuBLASLt",
                ..
            }
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("128 x 256 x 320, Nvfp4 to Bf16"),
        "{error}"
    );
    let pretended = Capabilities {
        gemm: path,
        ..here.clone()
    };
    let events = Arc::new(Mutex::new(Vec::new()));
    // With two subscribers, `tracing` asks both about a call site that another test reached without
    // any, instead of caching that nobody listened.
    let _second = tracing::Dispatch::new(Events(Arc::default()));
    let found = tracing::subscriber::with_default(Events(events.clone()), || {
        let (a, b) = (Operand::from(&a), Operand::from(&b));
        let new = Target::New(FloatKind::F32);
        multiply(
            &client,
            Gemm::new(a, b).target(new).capabilities(&pretended),
        )
        .unwrap()
    });
    let events = events.lock().unwrap().join("\n");
    println!("{events}");
    assert!(
        events.contains("gemm without FP4 or FP8 tensor cores"),
        "{events}"
    );
    assert!(events.contains("Cmma"), "{events}");
    let portable = GemmBackend::Cmma;
    let expected = multiply(
        &client,
        Gemm::new(&a, &b).out(FloatKind::F32).backend(portable),
    )
    .unwrap();
    let (found, expected) = (
        read_matrix(&client, &found),
        read_matrix(&client, &expected),
    );
    device::assert_floats::<f32>(&found, &expected, "portable");
    // A bf16 GEMM uses the library there.
    let x = upload(&client, &vec![bf16::ONE; m * k], m, k);
    let new = Target::New(FloatKind::F32);
    let found = multiply(
        &client,
        Gemm::new(&x, &x).target(new).capabilities(&pretended),
    )
    .unwrap();
    assert!(
        read_matrix::<f32>(&client, &found)
            .iter()
            .all(|&x| x == k as f32)
    );
    // But at small M with a packed operand, a kernel that does not decode it is used.
    let few = upload(&client, &vec![bf16::ONE; 8 * k], 8, k);
    let events = Arc::new(Mutex::new(Vec::new()));
    let found = tracing::subscriber::with_default(Events(events.clone()), || {
        multiply(
            &client,
            Gemm::new(&few, &b).target(new).capabilities(&pretended),
        )
        .unwrap()
    });
    let events = events.lock().unwrap().join("\n");
    assert!(events.contains("small M"), "{events}");
    let (path, few, b) = (Some(portable), Operand::from(&few), Operand::from(&b));
    let expected = multiply(&client, Gemm::new(few, b).target(new).backend(path)).unwrap();
    let (found, expected): (Vec<f32>, Vec<f32>) = (
        read_matrix(&client, &found),
        read_matrix(&client, &expected),
    );
    // The summation order differs: with 320 terms, by a few ulps of the largest.
    let largest = expected
        .iter()
        .fold(0.0f32, |largest, x| largest.max(x.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        assert!(
            (found - expected).abs() <= 1e-5 * largest,
            "{found} {expected}"
        );
    }
}

/// Writes `value` to all of `out`.
#[cube(launch_unchecked)]
fn fill(out: &mut [u16], value: u32) {
    let mut item = ABSOLUTE_POS;
    while item < out.len() {
        out[item] = u16::cast_from(value);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Counts the elements of `found` that are not `expected`.
#[cube(launch_unchecked)]
fn compare(found: &[f32], expected: f32, len: usize, wrong: &mut [Atomic<u32>]) {
    let mut item = ABSOLUTE_POS;
    while item < len {
        if found[item] != expected {
            wrong[0].fetch_add(1u32);
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// A chain of `steps` GEMMs of constant matrices. A kernel overwrites the operands immediately
/// before each GEMM, and another one reads the result immediately after it. If any two run in
/// another order, or concurrently, elements are wrong; these are counted on the device.
struct Chain {
    client: Client,
    a: Matrix,
    b: Matrix,
    wrong: Handle,
}

impl Chain {
    const M: usize = 192;
    const N: usize = 256;

    fn new(client: &Client, k: usize) -> Self {
        Self {
            client: client.clone(),
            a: Matrix::empty(client, Self::M, k, FloatKind::Bf16),
            b: Matrix::empty(client, Self::N, k, FloatKind::Bf16),
            wrong: client.create_from_slice(&[0; 4]),
        }
    }

    fn fill(&self, matrix: &Matrix, value: f32) {
        let bits = bf16::from_f32(value).to_bits() as u32;
        // SAFETY: the kernel stays below the length.
        unsafe {
            fill::launch_unchecked(
                &self.client,
                CubeCount::Static(64, 1, 1),
                CubeDim::new_1d(256),
                BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len()),
                bits,
            );
        }
    }

    /// Counts the elements of a GEMM that differ from `expected`.
    fn compare(&self, found: &Matrix, expected: f32) {
        // SAFETY: as above.
        unsafe {
            compare::launch_unchecked(
                &self.client,
                CubeCount::Static(64, 1, 1),
                CubeDim::new_1d(256),
                BufferArg::from_raw_parts(found.handle.clone(), found.len()),
                expected,
                found.len(),
                BufferArg::from_raw_parts(self.wrong.clone(), 1),
            );
        }
    }

    fn product(&self, a: &Matrix, b: &Matrix) -> Matrix {
        let new = Target::New(FloatKind::F32);
        let path = Some(GemmBackend::CublasLt);
        multiply(&self.client, Gemm::new(a, b).target(new).backend(path)).unwrap()
    }

    fn step(&self, i: usize) {
        let (x, y) = ((i % 15) as f32 - 7.0, (i % 7) as f32 + 1.0);
        self.fill(&self.a, x);
        self.fill(&self.b, y);
        let found = self.product(&self.a, &self.b);
        self.compare(&found, x * y * self.a.cols as f32);
    }

    fn wrong(&self) -> u32 {
        read_u32(&self.client, &self.wrong, 1)[0]
    }
}

/// Thousands of GEMMs between CubeCL kernels, with run times from a few microseconds to longer than
/// their submission.
#[test]
fn ordered_with_kernels() {
    let client = cublaslt!("ordered_with_kernels");
    for (k, steps) in [(64, 6000), (1024, 3000), (16384, 1500)] {
        let chain = Chain::new(&client, k);
        (0..steps).for_each(|i| chain.step(i));
        assert_eq!(chain.wrong(), 0, "k = {k}");
        // The count is not stuck at zero.
        chain.compare(&chain.product(&chain.a, &chain.b), 0.5);
        assert_eq!(chain.wrong() as usize, Chain::M * Chain::N);
    }
}

/// Eight streams at once, and operands that another stream writes.
#[test]
fn ordered_between_streams() {
    let client = cublaslt!("ordered_between_streams");
    let threads = 8;
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (client, barrier) = (client.clone(), &barrier);
            scope.spawn(move || {
                // Each thread has a separate stream.
                let chain = Chain::new(&client, 16384);
                barrier.wait();
                (0..1000).for_each(|i| chain.step(i));
                assert_eq!(chain.wrong(), 0, "thread {thread}");
            });
        }
    });
    // One thread fills new operands, the other multiplies them; neither waits for the device.
    let (sender, receiver) = std::sync::mpsc::sync_channel::<(Matrix, Matrix, f32)>(32);
    std::thread::scope(|scope| {
        let producer = client.clone();
        scope.spawn(move || {
            let k = 32768;
            for i in 0..1500 {
                let chain = Chain::new(&producer, k);
                let (x, y) = ((i % 15) as f32 - 7.0, (i % 7) as f32 + 1.0);
                chain.fill(&chain.a, x);
                chain.fill(&chain.b, y);
                sender.send((chain.a, chain.b, x * y * k as f32)).unwrap();
            }
        });
        let chain = Chain::new(&client, 8);
        for (a, b, expected) in receiver {
            chain.compare(&chain.product(&a, &b), expected);
        }
        assert_eq!(chain.wrong(), 0, "operands of another stream");
    });
}
