//! Flex: the oracle's arithmetic on plain slices.
//!
//! Nothing numeric is written here. Operands are quantized by
//! [`reference`], which is parallel and vectorised; the product decodes them (exactly) to `f32` and
//! runs Flex's own matmul, whose sum is the oracle's up to its order.

use burn_core::backend::{Flex, ops::FloatTensorOps, tensor::FloatTensor};
use burn_core::tensor::{DType, Element as BurnElement, FloatDType, Shape, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_kernels::reference::{self, Element};
use nvfp4_kernels::{
    Amax, BLOCK, BlockScaling, Nvfp4Error, Origin, PackedAxis, PackedTensor, Rounding, ScaleLayout,
};
use rayon::prelude::*;

use super::{
    Bias, Nvfp4Ops, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name, trace_op,
};

/// Run `$body` with `$values` bound to the contiguous elements of the float tensor `$x`.
macro_rules! with_elements {
    ($x:expr, |$values:ident| $body:expr) => {{
        let x: FlexTensor = $x.to_contiguous();
        match x.dtype() {
            DType::F32 => {
                let $values: &[f32] = x.storage();
                $body
            }
            DType::BF16 => {
                let $values: &[bf16] = x.storage();
                $body
            }
            DType::F16 => {
                let $values: &[f16] = x.storage();
                $body
            }
            other => panic!("element type {other:?}: expected F32, BF16 or F16"),
        }
    }};
}
pub(super) use with_elements;

impl Nvfp4Ops for Flex {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", copy_name(spec.axis), rows, cols);
        let packed = with_elements!(x, |values| match spec.axis {
            PackedAxis::Cols => {
                let amax = Amax::Tensor(reference::amax(values));
                reference::quantize_row(values, rows, cols, &amax, &spec.rounding)
            }
            PackedAxis::Rows => quantize_col(values, rows, cols, &spec),
        });
        upload(&trusted(packed))
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", "pair", rows, cols);
        let pair = with_elements!(x, |values| match spec {
            PairSpec::Tile => {
                let amax = Amax::Tensor(reference::amax(values));
                let compact = [ScaleLayout::Compact; 2];
                let scaling = BlockScaling::Standard;
                reference::quantize_tile(values, rows, cols, &amax, scaling, compact)
            }
            PairSpec::Blocks { row, col, hadamard } => {
                let amax = Amax::Tensor(reference::amax(values));
                let col = match hadamard {
                    // The maximum of the untransformed values is known already.
                    None => reference::quantize_col(values, rows, cols, &amax, &col, None),
                    hadamard => quantize_col(
                        values,
                        rows,
                        cols,
                        &QuantizeSpec {
                            axis: PackedAxis::Rows,
                            rounding: col,
                            hadamard,
                        },
                    ),
                };
                reference::quantize_row(values, rows, cols, &amax, &row)
                    .and_then(|row| Ok((row, col?)))
            }
        });
        let (row, col) = trusted(pair);
        PackedPair {
            row: upload(&row),
            col: upload(&col),
        }
    }

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("dequantize", copy_name(packed.layout.axis), rows, cols);
        let values = reference::dequantize(&download(packed));
        narrow(
            FlexTensor::from_data(TensorData::new(values, [rows, cols])),
            dtype,
        )
    }

    fn nvfp4_matmul(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (m, n) = (a.layout.outer(), b.layout.outer());
        let depth = a.layout.blocks() * BLOCK;
        trace_op("matmul", "", m, n);
        let alpha = reference::alpha(amax(&a), amax(&b));
        let mut out = if m * n * depth == 0 {
            FlexTensor::zeros(Shape::new([m, n]), DType::F32)
        } else {
            Flex::float_matmul(decode(&a), Flex::float_swap_dims(decode(&b), 0, 1))
        };
        let bias = match bias {
            Bias::Absent => None,
            Bias::Vector(bias) => Some(Flex::float_cast(bias, FloatDType::F32).to_contiguous()),
        };
        let bias = bias.as_ref().map(|bias| bias.storage::<f32>());
        // A product is nobody else's yet, so this writes in place.
        out.storage_mut::<f32>()
            .par_chunks_mut(n.max(1))
            .with_min_len(1 + 8192 / n.max(1))
            .for_each(|row| match bias {
                Some(bias) => row
                    .iter_mut()
                    .zip(bias)
                    .for_each(|(y, b)| *y = *y * alpha + b),
                None => row.iter_mut().for_each(|y| *y *= alpha),
            });
        narrow(out, dtype)
    }
}

fn quantize_col<T: Element>(
    values: &[T],
    rows: usize,
    cols: usize,
    spec: &QuantizeSpec,
) -> Result<PackedTensor, Nvfp4Error> {
    let amax = match &spec.hadamard {
        Some(hadamard) => reference::amax_rht(values, rows, cols, hadamard),
        None => reference::amax(values),
    };
    let amax = Amax::Tensor(amax);
    reference::quantize_col(
        values,
        rows,
        cols,
        &amax,
        &spec.rounding,
        spec.hadamard.as_ref(),
    )
}

/// The operand of a product, `f32[outer, blocks * 16]`: without the global scale, and exact.
fn decode(packed: &Packed<Flex>) -> FlexTensor {
    let (outer, depth) = (packed.layout.outer(), packed.layout.blocks() * BLOCK);
    let mut values = vec![0.0; outer * depth];
    let scales = packed.scales.to_contiguous();
    reference::decode_blocks_into(&code_bytes(&packed.codes), scales.storage(), &mut values);
    FlexTensor::from_data(TensorData::new(values, [outer, depth]))
}

fn amax(packed: &Packed<Flex>) -> f32 {
    packed.amax.to_contiguous().storage::<f32>()[0]
}

/// Rows and columns of a matrix.
pub(super) fn matrix(x: &FlexTensor) -> (usize, usize) {
    let shape = x.layout().shape();
    (shape[0], shape[1])
}

/// What the oracle computed from arguments that were checked before.
pub(super) fn trusted<T>(result: Result<T, Nvfp4Error>) -> T {
    result.unwrap_or_else(|error| panic!("nvfp4 on Flex: {error}"))
}

fn upload(packed: &PackedTensor) -> Packed<Flex> {
    let layout = PackedLayout {
        rows: packed.rows(),
        cols: packed.cols(),
        axis: packed.axis(),
        hadamard: packed.origin().hadamard,
    };
    let (outer, blocks) = (packed.outer(), packed.blocks());
    let words: Vec<u32> = packed
        .codes()
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    Packed {
        codes: FlexTensor::from_data(TensorData::new(words, [outer, blocks * 2])),
        scales: FlexTensor::from_data(TensorData::new(packed.scales().to_vec(), [outer, blocks])),
        amax: FlexTensor::from_data(TensorData::new(vec![packed.amax().of(0)], [1])),
        layout,
    }
}

fn download(packed: Packed<Flex>) -> PackedTensor {
    let PackedLayout {
        rows,
        cols,
        axis,
        hadamard,
    } = packed.layout;
    let amax = Amax::Tensor(amax(&packed));
    let codes = code_bytes(&packed.codes);
    let scales = packed.scales.to_contiguous().storage::<u8>().to_vec();
    // How the codes were rounded does not matter any more.
    let origin = Origin::one_by_16(Rounding::Nearest, hadamard);
    trusted(PackedTensor::from_parts(
        (rows, cols),
        axis,
        codes,
        (ScaleLayout::Compact, scales),
        amax,
        origin,
    ))
}

/// The bytes of code words: the first code in the low half of the first byte.
fn code_bytes(codes: &FlexTensor) -> Vec<u8> {
    codes
        .to_contiguous()
        .storage::<u32>()
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}

/// An `f32` matrix with each element rounded once to `dtype`. Flex's own cast runs on one core.
pub(super) fn narrow(x: FlexTensor, dtype: FloatDType) -> FlexTensor {
    fn rounded<T: BurnElement>(x: &FlexTensor, round: fn(f32) -> T) -> FlexTensor {
        let values: Vec<T> = x
            .storage::<f32>()
            .par_iter()
            .with_min_len(8192)
            .map(|value| round(*value))
            .collect();
        FlexTensor::from_data(TensorData::new(values, x.layout().shape().clone()))
    }
    match dtype {
        FloatDType::F32 => x,
        FloatDType::BF16 => rounded(&x, bf16::from_f32),
        FloatDType::F16 => rounded(&x, f16::from_f32),
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}
