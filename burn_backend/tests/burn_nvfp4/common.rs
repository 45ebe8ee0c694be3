//! Devices, data and the oracle's composition of a linear layer.

use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nvfp4::ops::LinearSpec;
use burn_nvfp4::{Hadamard, RandomStream, Rounding};
use half::{bf16, f16};
use nvfp4_kernels::reference::{self, Element};
use nvfp4_kernels::{Amax, BlockScaling, PackedTensor, ScaleLayout};

fn device_name() -> String {
    std::env::var("NVFP4_TEST_DEVICE").unwrap_or_else(|_| "flex".into())
}

/// The device under test.
pub fn device() -> Device {
    match device_name().as_str() {
        #[cfg(feature = "flex")]
        "flex" => Device::flex(),
        #[cfg(feature = "cpu")]
        "cpu" => Device::cpu(),
        #[cfg(feature = "cuda")]
        "cuda" => Device::cuda(0),
        other => panic!("NVFP4_TEST_DEVICE={other}: not a device of this build"),
    }
}

/// Whether the device under test is CubeCL's CPU runtime, which is for small checks only.
pub fn small_only() -> bool {
    device_name() == "cpu"
}

/// The type of activations: `bf16`, except on CubeCL's CPU runtime, where Burn's own `bf16`
/// arithmetic does not link (`__truncsfbf2` is missing) and its kernels silently do nothing.
pub fn activation() -> DType {
    if small_only() {
        DType::F32
    } else {
        DType::BF16
    }
}

/// Skip the test on CubeCL's CPU runtime.
macro_rules! skip_where_small_only {
    () => {
        if crate::common::small_only() {
            eprintln!("skipped: CubeCL's CPU runtime runs the small tests only");
            return;
        }
    };
}
pub(crate) use skip_where_small_only;

/// Skip the test except on Flex.
macro_rules! flex_only {
    () => {
        if std::env::var("NVFP4_TEST_DEVICE").is_ok_and(|name| name != "flex") {
            eprintln!("skipped: this test is about Flex or about no device at all");
            return;
        }
    };
}
pub(crate) use flex_only;

/// `len` values of a normal distribution, the same on every machine.
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

/// A matrix of the given element type, with its values as they are after rounding to it.
pub struct Matrix {
    pub values: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
}

/// Run `$body` on the elements of a [`Matrix`], in its own type.
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
    pub fn gaussian(rows: usize, cols: usize, dtype: DType, seed: u64) -> Self {
        let narrow = |value: f32| match dtype {
            DType::F32 => value,
            DType::BF16 => bf16::from_f32(value).to_f32(),
            DType::F16 => f16::from_f32(value).to_f32(),
            other => panic!("{other:?}"),
        };
        let values = gaussian(rows * cols, seed)
            .into_iter()
            .map(narrow)
            .collect();
        Self {
            values,
            rows,
            cols,
            dtype,
        }
    }

    pub fn tensor(&self, device: &Device) -> Tensor<2> {
        let data = TensorData::new(self.values.clone(), [self.rows, self.cols]);
        Tensor::from_data(data, (device, self.dtype))
    }

    pub fn row(&self, rounding: Rounding) -> PackedTensor {
        fn run<T: Element>(x: &[T], rows: usize, cols: usize, rounding: Rounding) -> PackedTensor {
            let amax = Amax::Tensor(reference::amax(x));
            reference::quantize_row(x, rows, cols, &amax, &rounding).unwrap()
        }
        in_dtype!(self, |values| run(values, self.rows, self.cols, rounding))
    }

    pub fn col(&self, rounding: Rounding, hadamard: Option<Hadamard>) -> PackedTensor {
        fn run<T: Element>(
            x: &[T],
            rows: usize,
            cols: usize,
            rounding: Rounding,
            hadamard: Option<Hadamard>,
        ) -> PackedTensor {
            let amax = Amax::Tensor(match &hadamard {
                Some(hadamard) => reference::amax_rht(x, rows, cols, hadamard),
                None => reference::amax(x),
            });
            reference::quantize_col(x, rows, cols, &amax, &rounding, hadamard.as_ref()).unwrap()
        }
        in_dtype!(self, |values| run(
            values, self.rows, self.cols, rounding, hadamard
        ))
    }

    pub fn tiles(&self) -> (PackedTensor, PackedTensor) {
        fn run<T: Element>(x: &[T], rows: usize, cols: usize) -> (PackedTensor, PackedTensor) {
            let amax = Amax::Tensor(reference::amax(x));
            let compact = [ScaleLayout::Compact; 2];
            reference::quantize_tile(x, rows, cols, &amax, BlockScaling::Standard, compact).unwrap()
        }
        in_dtype!(self, |values| run(values, self.rows, self.cols))
    }

    /// Both copies of a weight, as `spec` asks.
    pub fn weight(&self, spec: &LinearSpec) -> (PackedTensor, PackedTensor) {
        if spec.weight_2d {
            self.tiles()
        } else {
            (
                self.row(Rounding::Nearest),
                self.col(Rounding::Nearest, None),
            )
        }
    }
}

/// Everything on, drawing from stream `layer` at `offset`.
pub fn spec(layer: u64, offset: u64) -> LinearSpec {
    let stochastic = |role| Rounding::Stochastic(RandomStream::new(11, layer << 8 | role, offset));
    LinearSpec {
        weight_2d: true,
        hadamard: Some(Hadamard::default()),
        dgrad: stochastic(0),
        wgrad: stochastic(1),
    }
}

/// The values of a float tensor of any type.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.try_into_vec_as::<f32>().unwrap()
}

/// `out` must be the product of `a` and `b` up to the order of its sum and one rounding to `dtype`.
pub fn assert_product(
    what: &str,
    out: &[f32],
    a: &PackedTensor,
    b: &PackedTensor,
    bias: Option<&[f32]>,
    dtype: DType,
) {
    let exact = reference::gemm_f64(a, b, bias).unwrap();
    assert_eq!(out.len(), exact.len(), "{what}: number of elements");
    let depth = a.blocks() * 16;
    let (left, right) = (reference::decode_blocks(a), reference::decode_blocks(b));
    let alpha = f64::from(reference::alpha(a.amax().of(0), b.amax().of(0)));
    // One rounding to the output type: half a unit in the last place of 24, 8 and 11 bits.
    let narrow = match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        other => panic!("{other:?}"),
    };
    let columns = b.outer();
    for (index, (&found, &expected)) in out.iter().zip(&exact).enumerate() {
        let (m, n) = (index / columns, index % columns);
        let magnitude: f64 = left[m * depth..][..depth]
            .iter()
            .zip(&right[n * depth..][..depth])
            .map(|(x, y)| f64::from(x * y).abs())
            .sum();
        // Any order of `depth` additions, and the few operations after them.
        let bound = (depth as f64 + 8.0) * 2f64.powi(-24) * (magnitude * alpha + expected.abs())
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

/// Signal to quantization noise, in decibel.
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
