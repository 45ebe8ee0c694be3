//! Shared support of the test modules: devices, data and the oracle's composition of a linear
//! layer.

pub mod counted;
pub mod own_process;
#[path = "../../../../cube_kernels/tests/suite/support/process.rs"]
pub mod process;

use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::ops::{
    AmaxGranularity, BlockShape, LinearSpec, OperandSpec, QuantParams, QuantRounding,
};
use burn_nvfp4::{Hadamard, RandomStream, Rounding, Usage};
use half::{bf16, f16};
use nvfp4_formats::reference::{self, EdenParams, Element};
use nvfp4_formats::{Amax, BLOCK, BlockScaling, Format, MX_BLOCK, QuantizedTensor};
#[cfg(feature = "cuda")]
use nvfp4_kernels::bring_up::match_random_bits;

fn device_name() -> String {
    std::env::var("NVFP4_TEST_DEVICE").unwrap_or_else(|_| "flex".into())
}

/// Returns the error of Burn's own `f32` matmul relative to the largest element, for tests that
/// compare with it or use it through an operation: on CUDA GPUs tensor cores round its operands to
/// 11 bits.
pub fn burn_matmul_error(elsewhere: f32) -> f32 {
    match device_name().as_str() {
        "cuda" => 4e-3,
        _ => elsewhere,
    }
}

/// Returns the device under test.
pub fn device() -> Device {
    match device_name().as_str() {
        #[cfg(feature = "flex")]
        "flex" => Device::flex(),
        #[cfg(feature = "cpu")]
        "cpu" => nvfp4_test_support::cpu_runtime(Device::cpu),
        #[cfg(feature = "cuda")]
        "cuda" => {
            let client = cubecl::Device::Cuda(Default::default()).client();
            match_random_bits(&client).expect("the device's order of random bits");
            Device::cuda(0)
        }
        other => panic!("NVFP4_TEST_DEVICE={other}: not a device of this build"),
    }
}

/// Returns true if the device under test is CubeCL's CPU runtime, which is for small checks only.
pub fn small_only() -> bool {
    device_name() == "cpu"
}

/// Returns the dtype of activations: `bf16`, except on CubeCL's CPU runtime, where Burn's own
/// `bf16` arithmetic does not link (`__truncsfbf2` is missing) and its kernels silently do nothing.
pub fn activation() -> DType {
    if small_only() {
        DType::F32
    } else {
        DType::BF16
    }
}

/// Returns true if the order of summation of grouped `f32` GEMMs depends on the position of a
/// group's rows: on a GPU Burn multiplies floats other than bf16 with masks over all rows.
pub fn float_sums_depend_on_rows() -> bool {
    device_name() == "cuda"
}

/// Skips the test on CubeCL's CPU runtime, where it takes long; it runs on Flex.
macro_rules! skip_where_small_only {
    () => {
        if crate::support::small_only() {
            nvfp4_test_support::elsewhere!(Flex);
        }
    };
}
pub(crate) use skip_where_small_only;

/// Skips the test on devices other than Flex: it is about Flex, or about no device.
macro_rules! flex_only {
    () => {
        if std::env::var("NVFP4_TEST_DEVICE").is_ok_and(|name| name != "flex") {
            nvfp4_test_support::elsewhere!(Flex);
        }
    };
}
pub(crate) use flex_only;

/// Skips the test on devices other than CubeCL's, which have kernels, memory pools and graphs.
#[cfg(any(feature = "cpu", feature = "cuda"))]
macro_rules! cube_only {
    () => {
        if !std::env::var("NVFP4_TEST_DEVICE").is_ok_and(|name| name != "flex") {
            nvfp4_test_support::elsewhere!(Cube);
        }
    };
}
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use cube_only;

/// Skips the test on devices other than CUDA GPUs.
macro_rules! gpu_only {
    () => {
        if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
            nvfp4_test_support::skip!(NoGpu);
        }
    };
}
pub(crate) use gpu_only;

/// Returns `len` normally distributed values, the same on every machine.
pub fn gaussian(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(0xD1B5_4A32_D192_ED03);
    let mut uniform = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    };
    (0..len)
        .map(|_| {
            let (u, v) = (uniform(), uniform());
            ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
        })
        .collect()
}

/// A matrix of the given dtype, with its values after rounding to it.
#[derive(Clone)]
pub struct Matrix {
    pub values: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
}

/// Runs `$body` on the elements of a [`Matrix`], in its own dtype.
macro_rules! in_dtype {
    ($matrix:expr, |$values:ident| $body:expr) => {
        match $matrix.dtype {
            DType::F32 => {
                let $values = &$matrix.values[..];
                $body
            }
            DType::BF16 => {
                let narrow: Vec<bf16> = $matrix.values.iter().map(|v| bf16::from_f32(*v)).collect();
                let $values = &narrow[..];
                $body
            }
            DType::F16 => {
                let narrow: Vec<f16> = $matrix.values.iter().map(|v| f16::from_f32(*v)).collect();
                let $values = &narrow[..];
                $body
            }
            other => panic!("{other:?}"),
        }
    };
}

impl Matrix {
    /// Creates a matrix of `values`, rounded to `dtype`.
    pub fn new(values: Vec<f32>, rows: usize, cols: usize, dtype: DType) -> Self {
        let narrow = |value: f32| match dtype {
            DType::F32 => value,
            DType::BF16 => bf16::from_f32(value).to_f32(),
            DType::F16 => f16::from_f32(value).to_f32(),
            other => panic!("{other:?}"),
        };
        Self {
            values: values.into_iter().map(narrow).collect(),
            rows,
            cols,
            dtype,
        }
    }

    pub fn gaussian(rows: usize, cols: usize, dtype: DType, seed: u64) -> Self {
        Self::new(gaussian(rows * cols, seed), rows, cols, dtype)
    }

    pub fn tensor(&self, device: &Device) -> Tensor<2> {
        let data = TensorData::new(self.values.clone(), [self.rows, self.cols]);
        Tensor::from_data(data, (device, self.dtype))
    }

    pub fn row(&self, rounding: Rounding) -> QuantizedTensor {
        self.copy(Usage::Rowwise, &QuantParams::nvfp4(rounding))
    }

    pub fn col(&self, rounding: Rounding, hadamard: Option<Hadamard>) -> QuantizedTensor {
        let params = QuantParams {
            hadamard,
            ..QuantParams::nvfp4(rounding)
        };
        self.copy(Usage::Columnwise, &params)
    }

    /// Returns the NVFP4 tensor in 1x16 blocks with this usage.
    pub fn copy(&self, usage: Usage, params: &QuantParams) -> QuantizedTensor {
        self.copy_from(usage, params, 0)
    }

    /// Returns the NVFP4 tensor with blocks numbered from `first`.
    pub fn copy_from(&self, usage: Usage, params: &QuantParams, first: usize) -> QuantizedTensor {
        fn run<T: Element>(
            x: &[T],
            (rows, cols): (usize, usize),
            usage: Usage,
            params: &QuantParams,
            first: usize,
        ) -> QuantizedTensor {
            let hadamard = params.hadamard.as_ref();
            let amax = match (params.amax, usage, hadamard) {
                (AmaxGranularity::PerTensor, _, None) => Amax::Tensor(reference::amax(x)),
                (AmaxGranularity::PerTensor, _, Some(hadamard)) => {
                    Amax::Tensor(reference::amax_rht(x, rows, cols, hadamard))
                }
                (AmaxGranularity::PerRow, Usage::Rowwise, _) => {
                    Amax::PerRow(reference::amax_rows(x, rows, cols))
                }
                (AmaxGranularity::PerRow, Usage::Columnwise, None) => {
                    Amax::PerRow(reference::amax_cols(x, rows, cols))
                }
                (AmaxGranularity::PerRow, Usage::Columnwise, Some(hadamard)) => {
                    Amax::PerRow(reference::amax_rht_cols(x, rows, cols, hadamard))
                }
            };
            reference::quantize(x, rows, cols, usage, &amax, params, first as u64).unwrap()
        }
        let shape = (self.rows, self.cols);
        in_dtype!(self, |values| run(values, shape, usage, params, first))
    }

    pub fn tiles(&self, scaling: BlockScaling) -> (QuantizedTensor, QuantizedTensor) {
        fn run<T: Element>(
            x: &[T],
            rows: usize,
            cols: usize,
            scaling: BlockScaling,
        ) -> (QuantizedTensor, QuantizedTensor) {
            let amax = Amax::Tensor(reference::amax(x));
            reference::quantize_tile(x, rows, cols, &amax, scaling).unwrap()
        }
        in_dtype!(self, |values| run(values, self.rows, self.cols, scaling))
    }

    pub fn mx(&self, usage: Usage, format: Format) -> QuantizedTensor {
        in_dtype!(self, |values| reference::mx_quantize(
            values, self.rows, self.cols, usage, format
        )
        .unwrap())
    }

    /// Returns the tensor by MS-EDEN, with its groups of 128 numbered from `first`.
    pub fn eden_from(&self, usage: Usage, params: &QuantParams, first: usize) -> QuantizedTensor {
        fn run<T: Element>(
            x: &[T],
            (rows, cols): (usize, usize),
            usage: Usage,
            params: &QuantParams,
            first: u64,
        ) -> QuantizedTensor {
            let (QuantRounding::MsEden(draw), Some(hadamard)) = (params.rounding, &params.hadamard)
            else {
                panic!("{params:?}");
            };
            let amax = reference::ms_eden_amax(x, rows, cols, usage, hadamard).unwrap();
            let by = EdenParams {
                hadamard: *hadamard,
                stream: draw.stream,
            };
            reference::ms_eden_at(x, rows, cols, usage, amax, &by, first).unwrap()
        }
        let shape = (self.rows, self.cols);
        let first = first as u64;
        in_dtype!(self, |values| run(values, shape, usage, params, first))
    }

    /// Returns the operand by `spec`, with K along `usage`; `dtype` is that of the activations.
    pub fn operand(&self, spec: &OperandSpec, usage: Usage, dtype: DType) -> Operand {
        let Some(params) = spec.params() else {
            let cast = Self::new(self.values.clone(), self.rows, self.cols, dtype);
            return Operand::Float(cast, usage);
        };
        match params {
            params if params.format.is_mx() => Operand::Mx(self.mx(usage, params.format)),
            params if params.is_ms_eden() => Operand::Nvfp4(self.eden_from(usage, params, 0)),
            params if params.block == BlockShape::Block2d => {
                let (row, col) = self.tiles(params.scaling);
                Operand::Nvfp4(match usage {
                    Usage::Rowwise => row,
                    Usage::Columnwise => col,
                })
            }
            params => Operand::Nvfp4(self.copy(usage, params)),
        }
    }
}

/// Operand of a GEMM, by the oracle.
pub enum Operand {
    Nvfp4(QuantizedTensor),
    Mx(QuantizedTensor),
    Float(Matrix, Usage),
}

impl Operand {
    /// Quantizes the dequantized values of this operand by `spec`.
    pub fn again(&self, spec: &OperandSpec, usage: Usage, dtype: DType) -> Operand {
        let (values, rows, cols) = match self {
            Self::Nvfp4(packed) => (reference::dequantize(packed), packed.rows(), packed.cols()),
            Self::Mx(packed) => (
                reference::mx_dequantize(packed),
                packed.rows(),
                packed.cols(),
            ),
            Self::Float(matrix, _) => (matrix.values.clone(), matrix.rows, matrix.cols),
        };
        // MS-EDEN reads the exact values, everything else reads them in the dtype of the
        // activations.
        let via = match spec.params() {
            Some(params) if params.is_ms_eden() => DType::F32,
            _ => dtype,
        };
        Matrix::new(values, rows, cols, via).operand(spec, usage, dtype)
    }
}

/// Values that a GEMM multiplies: one row per stored row, without the global scales.
struct Stored {
    values: Vec<f32>,
    outer: usize,
    depth: usize,
    /// Global scale of each stored row.
    factors: Vec<f32>,
}

impl From<&QuantizedTensor> for Stored {
    fn from(packed: &QuantizedTensor) -> Self {
        let range = packed.range();
        Self {
            values: reference::decode_blocks(packed),
            outer: packed.outer(),
            depth: packed.blocks() * BLOCK,
            factors: (0..packed.outer())
                .map(|outer| packed.amax().of(outer) / range)
                .collect(),
        }
    }
}

impl From<&Operand> for Stored {
    fn from(operand: &Operand) -> Self {
        match operand {
            Operand::Nvfp4(packed) => packed.into(),
            Operand::Mx(packed) => {
                let (outer, depth) = (packed.outer(), packed.blocks() * MX_BLOCK);
                let (codes, scales) = (packed.codes().to_vec(), packed.scales().to_vec());
                let layout = packed.layout().stored();
                let (amax, origin) = (Amax::Absent, *packed.origin());
                let stored =
                    QuantizedTensor::from_parts(layout, codes, scales, amax, origin).unwrap();
                Self {
                    values: reference::mx_dequantize(&stored),
                    outer,
                    depth,
                    factors: vec![1.0; outer],
                }
            }
            Operand::Float(matrix, usage) => {
                let (rows, cols) = (matrix.rows, matrix.cols);
                let (outer, depth) = usage.stored_shape(rows, cols);
                let at = |i: usize, j: usize| match usage {
                    Usage::Rowwise => matrix.values[i * cols + j],
                    Usage::Columnwise => matrix.values[j * cols + i],
                };
                Self {
                    values: (0..outer)
                        .flat_map(|i| (0..depth).map(move |j| (i, j)))
                        .map(|(i, j)| at(i, j))
                        .collect(),
                    outer,
                    depth,
                    factors: vec![1.0; outer],
                }
            }
        }
    }
}

/// Returns a spec with all options on, drawing from stream `layer` at `offset`.
pub fn spec(layer: u64, offset: u64) -> LinearSpec {
    let stochastic = |role| Rounding::Stochastic(RandomStream::new(11, layer << 8 | role, offset));
    LinearSpec::nvidia(Some(Hadamard::default()), stochastic(0), stochastic(1))
}

/// Returns `spec` with weights in 1x16 blocks.
pub fn one_by_16(spec: LinearSpec) -> LinearSpec {
    let w = OperandSpec::nvfp4(Rounding::Nearest);
    LinearSpec {
        fprop_w: w,
        dgrad_w: w,
        ..spec
    }
}

/// Returns the values of a float tensor of any dtype.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

/// Asserts that `out` is the GEMM of `a` and `b` up to the order of its sums and one rounding to
/// `dtype`.
pub fn assert_product(
    what: &str,
    out: &[f32],
    a: &QuantizedTensor,
    b: &QuantizedTensor,
    bias: Option<&[f32]>,
    dtype: DType,
) {
    assert_stored(what, out, &a.into(), &b.into(), bias, dtype, 0.0);
}

/// Version of [`assert_product`] for operands of any format.
pub fn assert_operands(
    what: &str,
    out: &[f32],
    a: &Operand,
    b: &Operand,
    bias: Option<&[f32]>,
    dtype: DType,
) {
    let is_f32 = |operand: &Operand| matches!(operand, Operand::Float(matrix, _) if matrix.dtype == DType::F32);
    // Burn multiplies unquantized operands other than bf16, in TF32 on NVIDIA GPUs: operands keep
    // only 10 bits, rounded in a hardware-dependent way.
    let on_cuda = std::env::var("NVFP4_TEST_DEVICE").as_deref() == Ok("cuda");
    let multiplied = if on_cuda && (is_f32(a) || is_f32(b)) {
        2.0 * 2f64.powi(-10)
    } else {
        0.0
    };
    assert_stored(what, out, &a.into(), &b.into(), bias, dtype, multiplied);
}

/// `multiplied` is the relative error of each multiplication of two elements.
fn assert_stored(
    what: &str,
    out: &[f32],
    a: &Stored,
    b: &Stored,
    bias: Option<&[f32]>,
    dtype: DType,
    multiplied: f64,
) {
    assert_eq!(out.len(), a.outer * b.outer, "{what}: number of elements");
    assert_eq!(a.depth, b.depth, "{what}: contraction");
    // One rounding to the output dtype: half a unit in the last place of 24, 8 and 11 bits.
    let narrow = match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        other => panic!("{other:?}"),
    };
    let (columns, depth) = (b.outer, a.depth);
    for (index, &found) in out.iter().enumerate() {
        let (m, n) = (index / columns, index % columns);
        let terms = a.values[m * depth..][..depth]
            .iter()
            .zip(&b.values[n * depth..][..depth])
            .map(|(x, y)| f64::from(*x) * f64::from(*y));
        let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), v| (s + v, a + v.abs()));
        let alpha = f64::from(a.factors[m] * b.factors[n]);
        let expected = sum * alpha + bias.map_or(0.0, |bias| f64::from(bias[n]));
        // Any order of `depth` additions, and the few operations after them.
        let bound = (depth as f64 + 8.0) * 2f64.powi(-24) * (magnitude * alpha + expected.abs())
            + multiplied * magnitude * alpha.abs()
            + narrow * expected.abs()
            + if dtype == DType::F16 {
                2f64.powi(-25)
            } else {
                0.0
            };
        let error = (f64::from(found) - expected).abs();
        assert!(
            error <= bound,
            "{what}[{m}, {n}]: found {found}, expected {expected}, error {error:e} > {bound:e}"
        );
    }
}

/// Returns the signal to quantization noise ratio in decibels.
pub fn sqnr(exact: &[f32], found: &[f32]) -> f64 {
    let power = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let signal = power(&mut exact.iter().map(|&v| f64::from(v)));
    let noise = power(
        &mut exact
            .iter()
            .zip(found)
            .map(|(&e, &f)| f64::from(e) - f64::from(f)),
    );
    10.0 * (signal / noise).log10()
}
