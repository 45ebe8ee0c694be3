//! Flex: the oracle's arithmetic on plain slices.
//!
//! Nothing numeric is written here. Operands are quantized by
//! [`reference`], which is parallel and vectorised; the product decodes them (exactly) to `f32`, a panel
//! of rows at a time, and runs Flex's own matmul, whose sum is the oracle's up to its order.

use std::ops::Range;

use burn_core::backend::{Flex, ops::FloatTensorOps, tensor::FloatTensor};
use burn_core::tensor::{DType, Element as BurnElement, FloatDType, Shape, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_kernels::reference::{self, EdenTarget, Element};
use nvfp4_kernels::{
    Amax, BLOCK, BlockScaling, Format, Layout, MX_BLOCK, Nvfp4Error, Origin, QuantParams,
    QuantizedTensor, ScaleLayout, Storage, Usage,
};
use rayon::prelude::*;

use super::{
    AmaxGranularity, Bias, CopySpec, Decoded, EdenSpec, MxLayout, MxPacked, Nvfp4Ops, Operand,
    OperandPair, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name, float_dtype,
    trace_op,
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
        let QuantizeSpec { usage, copy } = spec;
        trace_op("quantize", copy_name(usage), rows, cols);
        let packed = with_elements!(x, |values| {
            let amax = maxima(values, rows, cols, usage, &copy);
            reference::quantize(values, rows, cols, usage, &amax, &policy(&copy), 0)
        });
        upload(&trusted(packed))
    }

    fn nvfp4_quantize_tiles(
        x: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", copy_name(usage), rows, cols);
        let packed = with_elements!(x, |values| {
            let amax = Amax::Tensor(reference::amax(values));
            let compact = ScaleLayout::Compact;
            reference::quantize_tile_copy(values, rows, cols, usage, &amax, scaling, compact)
        });
        upload(&trusted(packed))
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", "pair", rows, cols);
        let pair = with_elements!(x, |values| match spec {
            PairSpec::Tile(scaling) => {
                let amax = Amax::Tensor(reference::amax(values));
                let compact = [ScaleLayout::Compact; 2];
                reference::quantize_tile(values, rows, cols, &amax, scaling, compact)
            }
            PairSpec::Blocks { row, col } => {
                let row_amax = maxima(values, rows, cols, Usage::Rowwise, &row);
                let is_one = |copy: &CopySpec| {
                    copy.global == AmaxGranularity::PerTensor && copy.hadamard.is_none()
                };
                let col_amax = if is_one(&row) && is_one(&col) {
                    row_amax.clone()
                } else {
                    maxima(values, rows, cols, Usage::Columnwise, &col)
                };
                let copy = |usage, amax, copy| {
                    reference::quantize(values, rows, cols, usage, amax, &policy(copy), 0)
                };
                copy(Usage::Rowwise, &row_amax, &row)
                    .and_then(|row| Ok((row, copy(Usage::Columnwise, &col_amax, &col)?)))
            }
        });
        let (row, col) = trusted(pair);
        PackedPair {
            row: upload(&row),
            col: upload(&col),
        }
    }

    fn nvfp4_quantize_decoded(x: FloatTensor<Self>, spec: QuantizeSpec) -> Decoded<Self> {
        decoded(Self::nvfp4_quantize(x, spec))
    }

    fn nvfp4_quantize_forms(
        x: FloatTensor<Self>,
        (row, row_form): (CopySpec, Storage),
        (col, col_form): (CopySpec, Storage),
    ) -> OperandPair<Self> {
        let pair = Self::nvfp4_quantize_pair(x, PairSpec::Blocks { row, col });
        let operand = |packed, form| match form {
            Storage::Packed => Operand::Nvfp4(packed),
            Storage::Bf16Unscaled => Operand::Decoded(decoded(packed)),
        };
        OperandPair {
            row: operand(pair.row, row_form),
            col: operand(pair.col, col_form),
        }
    }

    fn nvfp4_eden(x: FloatTensor<Self>, spec: EdenSpec) -> Packed<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("ms_eden", copy_name(spec.usage), rows, cols);
        upload(&trusted(with_elements!(x, |values| eden(
            values, rows, cols, &spec, 0
        ))))
    }

    fn nvfp4_eden_packed(packed: Packed<Self>, spec: EdenSpec) -> Packed<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("ms_eden", copy_name(spec.usage), rows, cols);
        let values = reference::dequantize(&download(packed));
        upload(&trusted(eden(&values, rows, cols, &spec, 0)))
    }

    fn nvfp4_mx_quantize(x: FloatTensor<Self>, usage: Usage) -> MxPacked<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("mx_quantize", copy_name(usage), rows, cols);
        mx_upload(&trusted(with_elements!(x, |values| {
            reference::mx_quantize(values, rows, cols, usage, Format::Mxfp8)
        })))
    }

    fn nvfp4_mx_requantize(packed: Packed<Self>, usage: Usage, via: FloatDType) -> MxPacked<Self> {
        Self::nvfp4_mx_quantize(Self::nvfp4_dequantize(packed, via), usage)
    }

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let PackedLayout { rows, cols, .. } = packed.layout;
        trace_op("dequantize", copy_name(packed.layout.usage), rows, cols);
        let values = reference::dequantize(&download(packed));
        narrow(
            FlexTensor::from_data(TensorData::new(values, [rows, cols])),
            dtype,
        )
    }

    fn nvfp4_mx_dequantize(packed: MxPacked<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let MxLayout { rows, cols, usage } = packed.layout;
        trace_op("mx_dequantize", copy_name(usage), rows, cols);
        let values = reference::mx_dequantize(&mx_download(packed));
        narrow(
            FlexTensor::from_data(TensorData::new(values, [rows, cols])),
            dtype,
        )
    }

    fn nvfp4_product(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b) = (Stored::new(a), Stored::new(b));
        let (m, n) = (a.outer, b.outer);
        trace_op("matmul", "", m, n);
        let mut out = sums(&a, &b, reference::panels);
        let bias = match bias {
            Bias::Absent => None,
            Bias::Vector(bias) => Some(Flex::float_cast(bias, FloatDType::F32).to_contiguous()),
        };
        let bias = bias.as_ref().map(|bias| bias.storage::<f32>());
        if let (Factors::One, Factors::One, None) = (&a.factors, &b.factors, bias) {
            return narrow(out, dtype);
        }
        // A product is nobody else's yet, so this writes in place.
        out.storage_mut::<f32>()
            .par_chunks_mut(n.max(1))
            .with_min_len(1 + 8192 / n.max(1))
            .enumerate()
            .for_each(|(m, row)| {
                let left = a.factors.of(m);
                for (n, y) in row.iter_mut().enumerate() {
                    let scaled = *y * (left * b.factors.of(n));
                    *y = bias.map_or(scaled, |bias| scaled + bias[n]);
                }
            });
        narrow(out, dtype)
    }
}

/// The maxima that a copy along `usage` needs.
pub(super) fn maxima<T: Element>(
    values: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    copy: &CopySpec,
) -> Amax {
    match (copy.global, usage, &copy.hadamard) {
        (AmaxGranularity::PerTensor, Usage::Columnwise, Some(hadamard)) => {
            Amax::Tensor(reference::amax_rht(values, rows, cols, hadamard))
        }
        (AmaxGranularity::PerTensor, ..) => Amax::Tensor(reference::amax(values)),
        (AmaxGranularity::PerRow, Usage::Rowwise, _) => {
            Amax::PerRow(reference::amax_rows(values, rows, cols))
        }
        (AmaxGranularity::PerRow, Usage::Columnwise, None) => {
            Amax::PerRow(reference::amax_cols(values, rows, cols))
        }
        (AmaxGranularity::PerRow, Usage::Columnwise, Some(hadamard)) => {
            Amax::PerRow(reference::amax_rht_cols(values, rows, cols, hadamard))
        }
    }
}

pub(super) fn policy(copy: &CopySpec) -> QuantParams {
    QuantParams {
        hadamard: copy.hadamard,
        scaling: copy.scaling,
        ..QuantParams::new(copy.rounding)
    }
}

/// A matrix by MS-EDEN, its groups of 128 numbered from `first` on.
pub(super) fn eden<T: Element>(
    values: &[T],
    rows: usize,
    cols: usize,
    spec: &EdenSpec,
    first: u64,
) -> Result<QuantizedTensor, Nvfp4Error> {
    let EdenSpec {
        usage,
        hadamard,
        stream,
    } = spec;
    let amax = reference::ms_eden_amax(values, rows, cols, *usage, hadamard)?;
    let target = EdenTarget::Backward;
    reference::ms_eden_at(
        values, rows, cols, *usage, amax, hadamard, target, stream, first,
    )
}

/// The products of all rows of `a` and `b`, without factors: `f32[a.outer, b.outer]`.
///
/// Packed operands are decoded a panel of rows at a time (as `panels` divides `outer` rows of `depth`
/// elements), so that what is decoded stays bounded however large they are. Each output is summed within
/// one panel of either: with the panels of [`reference::panels`], which are never so few rows that Flex
/// would take other loops, it has the bits of an undivided product.
fn sums<P: Iterator<Item = Range<usize>> + ExactSizeIterator>(
    a: &Stored,
    b: &Stored,
    panels: impl Fn(usize, usize) -> P,
) -> FlexTensor {
    let (m, n) = (a.outer, b.outer);
    if m * n * a.depth == 0 {
        return FlexTensor::zeros(Shape::new([m, n]), DType::F32);
    }
    let parts = |operand: &Stored| match &operand.elements {
        // Not decoded: as it is.
        Elements::Float(_) => std::iter::once(0..operand.outer).collect::<Vec<_>>(),
        _ => panels(operand.outer, operand.depth).collect(),
    };
    let (rows, columns) = (parts(a), parts(b));
    let product = |left, right: &FlexTensor| {
        Flex::float_matmul(left, Flex::float_swap_dims(right.clone(), 0, 1))
    };
    if let ([rows], [columns]) = (rows.as_slice(), columns.as_slice()) {
        return product(a.rows(rows), &b.rows(columns));
    }
    let mut out = vec![0f32; m * n];
    for columns in &columns {
        let right = b.rows(columns);
        for rows in &rows {
            let part = product(a.rows(rows), &right);
            let part = part.storage::<f32>().par_chunks(columns.len());
            out[rows.start * n..rows.end * n]
                .par_chunks_mut(n)
                .with_min_len(1 + 8192 / columns.len())
                .zip(part)
                .for_each(|(out, part)| out[columns.clone()].copy_from_slice(part));
        }
    }
    FlexTensor::from_data(TensorData::new(out, [m, n]))
}

/// An operand in stored orientation, `outer` rows of `depth` elements, without its global scales.
struct Stored {
    elements: Elements,
    outer: usize,
    depth: usize,
    factors: Factors,
}

/// The elements of an operand: contiguous tensors as they are packed, or `f32`.
enum Elements {
    Nvfp4 {
        codes: FlexTensor,
        scales: FlexTensor,
    },
    Mxfp8 {
        codes: FlexTensor,
        scales: FlexTensor,
    },
    Float(FlexTensor),
}

/// What the sums are multiplied by.
enum Factors {
    One,
    Tensor(f32),
    PerRow(Vec<f32>),
}

impl Factors {
    /// Those of a packed matrix with the maxima `amax`.
    fn new(amax: FlexTensor, layout: &PackedLayout) -> Self {
        let (amax, range) = (amax.to_contiguous(), layout.scaling.range());
        let factors = amax.storage::<f32>().iter().map(|amax| amax / range);
        let factors: Vec<f32> = factors.collect();
        match layout.global {
            AmaxGranularity::PerTensor => Self::Tensor(factors[0]),
            AmaxGranularity::PerRow => Self::PerRow(factors),
        }
    }

    fn of(&self, outer: usize) -> f32 {
        match self {
            Self::One => 1.0,
            Self::Tensor(factor) => *factor,
            Self::PerRow(factors) => factors[outer],
        }
    }
}

impl Stored {
    fn new(operand: Operand<Flex>) -> Self {
        match operand {
            Operand::Nvfp4(packed) => Self {
                outer: packed.layout.outer(),
                depth: packed.layout.blocks() * BLOCK,
                factors: Factors::new(packed.amax, &packed.layout),
                elements: Elements::Nvfp4 {
                    codes: packed.codes.to_contiguous(),
                    scales: packed.scales.to_contiguous(),
                },
            },
            Operand::Decoded(decoded) => Self {
                factors: Factors::new(decoded.amax, &decoded.layout),
                ..Self::new(Operand::Float(decoded.values, Usage::Rowwise))
            },
            Operand::Mxfp8(packed) => Self {
                outer: packed.layout.outer(),
                depth: packed.layout.blocks() * MX_BLOCK,
                factors: Factors::One,
                elements: Elements::Mxfp8 {
                    codes: packed.codes.to_contiguous(),
                    scales: packed.scales.to_contiguous(),
                },
            },
            Operand::Float(x, usage) => {
                let x = if float_dtype(x.dtype()) == FloatDType::F32 {
                    x
                } else {
                    Flex::float_cast(x, FloatDType::F32)
                };
                let x = match usage {
                    Usage::Rowwise => x,
                    Usage::Columnwise => Flex::float_swap_dims(x, 0, 1),
                };
                let (outer, depth) = matrix(&x);
                Self {
                    elements: Elements::Float(x),
                    outer,
                    depth,
                    factors: Factors::One,
                }
            }
        }
    }

    /// Some rows in `f32`, exactly; all of them where they are no packed ones.
    fn rows(&self, rows: &Range<usize>) -> FlexTensor {
        let values = match &self.elements {
            Elements::Nvfp4 { codes, scales } => {
                let blocks = self.depth / BLOCK;
                let mut values = vec![0.0; rows.len() * self.depth];
                let words = &codes.storage::<u32>()[2 * blocks * rows.start..2 * blocks * rows.end];
                let scales = &scales.storage::<u8>()[blocks * rows.start..blocks * rows.end];
                reference::decode_blocks_into(&bytes_of(words), scales, &mut values);
                values
            }
            Elements::Mxfp8 { codes, scales } => {
                let blocks = self.depth / MX_BLOCK;
                let part = |tensor: &FlexTensor, width: usize| {
                    tensor.storage::<u8>()[width * rows.start..width * rows.end].to_vec()
                };
                // Each stored row, padding included, as one of a row-wise matrix.
                let shape = (rows.len(), self.depth);
                let layout = Layout::new(Format::Mxfp8, shape, Usage::Rowwise);
                let (codes, scales) = (part(codes, self.depth), part(scales, blocks));
                let origin = Origin::default();
                let packed =
                    QuantizedTensor::from_parts(layout, codes, scales, Amax::Absent, origin);
                reference::mx_dequantize(&trusted(packed))
            }
            Elements::Float(x) => {
                debug_assert_eq!(*rows, 0..self.outer);
                return x.clone();
            }
        };
        FlexTensor::from_data(TensorData::new(values, [rows.len(), self.depth]))
    }
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

fn upload(packed: &QuantizedTensor) -> Packed<Flex> {
    let amax = packed.amax().values().to_vec();
    let layout = PackedLayout {
        rows: packed.rows(),
        cols: packed.cols(),
        usage: packed.usage(),
        hadamard: packed.layout().hadamard,
        scaling: packed.layout().scaling,
        global: packed.layout().amax,
    };
    upload_parts(packed.codes(), packed.scales().to_vec(), amax, layout)
}

/// A packed matrix of these bytes and maxima.
pub(super) fn upload_parts(
    codes: &[u8],
    scales: Vec<u8>,
    amax: Vec<f32>,
    layout: PackedLayout,
) -> Packed<Flex> {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let words: Vec<u32> = codes
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    let maxima = amax.len();
    Packed {
        codes: FlexTensor::from_data(TensorData::new(words, [outer, blocks * 2])),
        scales: FlexTensor::from_data(TensorData::new(scales, [outer, blocks])),
        amax: FlexTensor::from_data(TensorData::new(amax, [maxima])),
        layout,
    }
}

fn download(packed: Packed<Flex>) -> QuantizedTensor {
    let PackedLayout {
        rows,
        cols,
        usage,
        hadamard,
        scaling,
        global,
    } = packed.layout;
    let amax = packed.amax.to_contiguous().storage::<f32>().to_vec();
    let layout = Layout {
        hadamard,
        scaling,
        amax: global,
        ..Layout::nvfp4(rows, cols, usage)
    };
    let codes = code_bytes(&packed.codes);
    let scales = packed.scales.to_contiguous().storage::<u8>().to_vec();
    // How the codes were rounded does not matter any more.
    let (amax, origin) = (Amax::new(&layout, amax), Origin::default());
    trusted(QuantizedTensor::from_parts(
        layout, codes, scales, amax, origin,
    ))
}

/// The values of a packed matrix.
fn decoded(packed: Packed<Flex>) -> Decoded<Flex> {
    let (amax, layout) = (packed.amax.clone(), packed.layout);
    let stored = Stored::new(Operand::Nvfp4(packed));
    let values = stored.rows(&(0..layout.outer()));
    Decoded {
        values: narrow(values, FloatDType::BF16),
        amax,
        layout,
    }
}

fn mx_upload(packed: &QuantizedTensor) -> MxPacked<Flex> {
    let layout = MxLayout {
        rows: packed.rows(),
        cols: packed.cols(),
        usage: packed.usage(),
    };
    mx_upload_parts(packed.codes().to_vec(), packed.scales().to_vec(), layout)
}

/// A matrix in MXFP8 of these bytes.
pub(super) fn mx_upload_parts(codes: Vec<u8>, scales: Vec<u8>, layout: MxLayout) -> MxPacked<Flex> {
    let bytes = |bytes: Vec<u8>, width| {
        FlexTensor::from_data(TensorData::new(bytes, [layout.outer(), width]))
    };
    MxPacked {
        codes: bytes(codes, layout.blocks() * MX_BLOCK),
        scales: bytes(scales, layout.blocks()),
        layout,
    }
}

fn mx_download(packed: MxPacked<Flex>) -> QuantizedTensor {
    let MxLayout { rows, cols, usage } = packed.layout;
    let bytes = |tensor: FlexTensor| tensor.to_contiguous().storage::<u8>().to_vec();
    let (codes, scales) = (bytes(packed.codes), bytes(packed.scales));
    let layout = Layout::new(Format::Mxfp8, (rows, cols), usage);
    let (amax, origin) = (Amax::Absent, Origin::default());
    trusted(QuantizedTensor::from_parts(
        layout, codes, scales, amax, origin,
    ))
}

/// The bytes of code words: the first code in the low half of the first byte.
fn code_bytes(codes: &FlexTensor) -> Vec<u8> {
    bytes_of(codes.to_contiguous().storage::<u32>())
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_kernels::Rounding;

    /// `outer` rows of `depth` elements, packed; data that fills the codes.
    fn packed(outer: usize, depth: usize, seed: u32) -> Operand<Flex> {
        let mut state = seed | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state
        };
        let values: Vec<f32> = (0..outer * depth)
            .map(|_| next() as f32 / u32::MAX as f32 - 0.5)
            .collect();
        let amax = Amax::Tensor(reference::amax(&values));
        let policy = QuantParams::new(Rounding::Nearest);
        let usage = Usage::Rowwise;
        let packed = reference::quantize(&values, outer, depth, usage, &amax, &policy, 0);
        Operand::Nvfp4(upload(&trusted(packed)))
    }

    fn whole(outer: usize, _: usize) -> std::iter::Once<Range<usize>> {
        std::iter::once(0..outer)
    }

    /// Panels of either operand change no bit.
    #[test]
    fn products_in_panels_are_those_of_whole_operands() {
        for (m, n, depth) in [
            (1, 1300, 16384),
            (3, 1500, 16384),
            (70, 1281, 14336),
            (1290, 40, 16384),
            (700, 1300, 14336),
        ] {
            let count = reference::panels(n, depth).len() * reference::panels(m, depth).len();
            assert!(count > 1, "{m} x {n} x {depth}");
            let (a, b) = (
                Stored::new(packed(m, depth, 1)),
                Stored::new(packed(n, depth, 2)),
            );
            let found = sums(&a, &b, reference::panels);
            let expected = sums(&a, &b, whole);
            let bits = |x: &FlexTensor| -> Vec<u32> {
                x.storage::<f32>().iter().map(|x| x.to_bits()).collect()
            };
            assert!(bits(&found) == bits(&expected), "{m} x {n} x {depth}");
            assert!(found.storage::<f32>().iter().any(|x| *x != 0.0));
        }
    }

    /// Every kind of operand, in panels of a few rows: integers, whose sums are exact in any order.
    #[test]
    fn panels_of_every_kind_of_operand() {
        let few = |outer: usize, _: usize| {
            let starts: Vec<usize> = (0..outer).step_by(3).collect();
            let parts = starts
                .into_iter()
                .map(|start| start..(start + 3).min(outer));
            parts.collect::<Vec<_>>().into_iter()
        };
        let (m, n, depth) = (7, 11, 64);
        let values = |outer: usize, step: usize| -> FlexTensor {
            let values: Vec<f32> = (0..outer * depth)
                .map(|i| match i % depth {
                    // Block scales, and the scale of the tensor, become powers of two.
                    i if i % 16 == 0 => 6.0,
                    _ => [0.0, 1.0, -2.0, 4.0][i * step % 7 % 4],
                })
                .collect();
            FlexTensor::from_data(TensorData::new(values, [outer, depth]))
        };
        let nvfp4 = |x: FlexTensor| {
            let (outer, depth) = matrix(&x);
            let amax = Amax::Tensor(2688.0);
            let policy = QuantParams::new(Rounding::Nearest);
            let usage = Usage::Rowwise;
            let values = x.storage::<f32>();
            let packed = reference::quantize(values, outer, depth, usage, &amax, &policy, 0);
            Operand::Nvfp4(upload(&trusted(packed)))
        };
        let mxfp8 = |x| Operand::Mxfp8(Flex::nvfp4_mx_quantize(x, Usage::Rowwise));
        let float = |x| Operand::Float(x, Usage::Rowwise);
        let kinds: [&dyn Fn(FlexTensor) -> Operand<Flex>; 3] = [&nvfp4, &mxfp8, &float];
        let (x, y) = (values(m, 5), values(n, 3));
        let expected = Flex::float_matmul(x.clone(), Flex::float_swap_dims(y.clone(), 0, 1));
        for left in kinds {
            for right in kinds {
                let (a, b) = (Stored::new(left(x.clone())), Stored::new(right(y.clone())));
                let found = sums(&a, &b, few);
                assert_eq!(found.storage::<f32>(), expected.storage::<f32>());
            }
        }
    }
}
