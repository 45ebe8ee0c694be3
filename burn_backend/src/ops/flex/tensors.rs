//! Conversions between Flex tensors, slices and the oracle's quantized tensors.

use std::ops::Range;

use burn_core::backend::Flex;
use burn_core::tensor::{DType, Element as BurnElement, FloatDType, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::{Amax, Layout, Nvfp4Error, Origin, QuantizedTensor};
use rayon::prelude::*;

use super::super::layout::code_words;
use super::super::tensors::{MaybeTensor, QuantizedData, QuantizedMatrix};

/// Runs `$body` with `$values` bound to the contiguous elements of the float tensor `$x`.
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
pub(in crate::ops) use with_elements;

/// Returns rows and columns of a matrix.
pub(in crate::ops) fn matrix(x: &FlexTensor) -> (usize, usize) {
    let shape = x.layout().shape();
    (shape[0], shape[1])
}

/// Converts offsets to the rows of each group.
pub(super) fn ranges(offsets: &FlexTensor, rows: usize) -> Vec<Range<usize>> {
    let offsets = offsets.to_contiguous();
    let offsets: &[u32] = offsets.storage();
    offsets
        .windows(2)
        .map(|pair| {
            let (start, end) = ((pair[0] as usize).min(rows), (pair[1] as usize).min(rows));
            start..end.max(start)
        })
        .collect()
}

/// Returns the range of each group when all groups are concatenated, each padded to a multiple of
/// `unit`.
pub(super) fn side_by_side(groups: &[Range<usize>], unit: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    groups
        .iter()
        .map(|rows| {
            let start = end;
            end += rows.len().next_multiple_of(unit);
            start..end
        })
        .collect()
}

/// Unwraps the oracle's result for arguments that were checked before.
pub(super) fn trusted<T>(result: Result<T, Nvfp4Error>) -> T {
    result.unwrap_or_else(|error| panic!("nvfp4 on Flex: {error}"))
}

/// Creates a quantized matrix from bytes and amax values.
pub(super) fn upload(
    codes: &[u8],
    scales: Vec<u8>,
    amax: Vec<f32>,
    layout: Layout,
) -> QuantizedMatrix<Flex> {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let (width, dtype) = code_words(&layout);
    let codes = match dtype {
        DType::U32 => {
            let words = codes.chunks_exact(4);
            let words: Vec<u32> = words
                .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
                .collect();
            TensorData::new(words, [outer, width])
        }
        _ => TensorData::new(codes.to_vec(), [outer, width]),
    };
    let amax = match layout.format.has_global_scale() {
        true => {
            let len = amax.len();
            MaybeTensor::Present(FlexTensor::from_data(TensorData::new(amax, [len])))
        }
        false => MaybeTensor::Absent,
    };
    QuantizedMatrix {
        data: QuantizedData::Packed {
            codes: FlexTensor::from_data(codes),
            scales: FlexTensor::from_data(TensorData::new(scales, [outer, blocks])),
        },
        amax,
        layout,
    }
}

/// Returns the oracle's view of a packed matrix. The rounding of its codes is not recorded.
pub(super) fn download(packed: QuantizedMatrix<Flex>) -> QuantizedTensor {
    let layout = packed.layout;
    let amax = amax_values(packed.amax.clone());
    let (codes, scales) = packed.into_packed();
    let scales = scales.to_contiguous().storage::<u8>().to_vec();
    let (amax, origin) = (Amax::new(&layout, amax), Origin::default());
    trusted(QuantizedTensor::from_parts(
        layout,
        code_bytes(&codes),
        scales,
        amax,
        origin,
    ))
}

/// Returns the amax values; empty for a format without a global scale.
pub(in crate::ops) fn amax_values(amax: MaybeTensor<Flex>) -> Vec<f32> {
    let amax = amax.into_option();
    amax.map_or_else(Vec::new, |amax| {
        amax.to_contiguous().storage::<f32>().to_vec()
    })
}

/// Returns the bytes of codes; for 4-bit codes, the first code is in the low half of the first
/// byte.
fn code_bytes(codes: &FlexTensor) -> Vec<u8> {
    let codes = codes.to_contiguous();
    match codes.dtype() {
        DType::U32 => bytes_of(codes.storage::<u32>()),
        _ => codes.storage::<u8>().to_vec(),
    }
}

/// Returns the bytes of words of codes.
pub(in crate::ops) fn bytes_of(words: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0u8; 4 * words.len()];
    for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

/// Rounds each element of an `f32` matrix once to `dtype`. Flex's own cast runs on one core.
pub(in crate::ops) fn narrow(x: FlexTensor, dtype: FloatDType) -> FlexTensor {
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
