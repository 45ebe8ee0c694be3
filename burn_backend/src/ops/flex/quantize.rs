//! Quantization by the oracle, group by group.

use std::ops::Range;

use burn_core::backend::Flex;
use burn_core::tensor::{DType, FloatDType, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::{self, EARLIER_UNITS, EDEN_GROUP, EdenParams, Element};
use nvfp4_formats::{
    Amax, AmaxGranularity, BlockShape, Layout, QuantizedTensor, StoredForm, Usage,
};

use super::super::dequantize::{scaled, with_amax_per_row};
use super::super::kernels::activated;
use super::super::layout::GroupCount;
use super::super::spec::{QuantParams, QuantRounding};
use super::super::tensors::{
    ComputedAmax, GivenAmax, MaybeTensor, QuantizeRequest, QuantizeSource, QuantizedData,
    QuantizedMatrix, QuantizedPair, RowGroups,
};
use super::super::{trace_op, usage_name};
use super::gemm::StoredOperand;
use super::tensors::{
    amax_values, download, matrix, narrow, ranges, side_by_side, trusted, upload, with_elements,
};

/// Requested row-wise and column-wise tensor.
type Targets = [Option<(QuantParams, StoredForm)>; 2];

/// Implements [`nvfp4_quantize`](super::super::Nvfp4KernelOps::nvfp4_quantize).
pub(super) fn quantize(request: QuantizeRequest<Flex>) -> QuantizedPair<Flex> {
    let QuantizeRequest {
        source,
        groups,
        amax,
        rowwise,
        columnwise,
        unscaled,
    } = request;
    let targets = [rowwise, columnwise];
    let x = values_of(source, &groups, targets);
    let made = match amax {
        GivenAmax::Absent => quantize_values(x, &groups, targets),
        GivenAmax::Each {
            rowwise,
            columnwise,
        } => quantize_from_amax(x, [rowwise, columnwise], targets),
        GivenAmax::Entry(maxima, entry) => {
            let amax = amax_values(MaybeTensor::Present(maxima))[entry];
            let amax = FlexTensor::from_data(TensorData::new(vec![amax], [1]));
            quantize_from_amax(x, [amax.clone(), amax].map(MaybeTensor::Present), targets)
        }
    };
    if !unscaled {
        return made;
    }
    let packed = made.into_one();
    QuantizedPair::BothStorages {
        unscaled: stored_as(packed.clone(), StoredForm::Bf16Unscaled),
        packed,
    }
}

/// Implements [`nvfp4_amax`](super::super::Nvfp4KernelOps::nvfp4_amax).
pub(super) fn amax(request: QuantizeRequest<Flex>) -> ComputedAmax<Flex> {
    let QuantizeRequest {
        source,
        groups,
        rowwise,
        columnwise,
        ..
    } = request;
    let is_matrix = matches!(source, QuantizeSource::Matrix(_));
    let x = values_of(source, &groups, [rowwise, columnwise]);
    let amax = |made: Option<(QuantParams, StoredForm)>, usage| {
        let made = made.map(|(params, _)| {
            let amax = with_elements!(x, |values| amax_of(values, matrix(&x), usage, &params));
            let values = amax.values().to_vec();
            let len = values.len();
            FlexTensor::from_data(TensorData::new(values, [len]))
        });
        MaybeTensor::from(made)
    };
    ComputedAmax {
        rowwise: amax(rowwise, Usage::Rowwise),
        columnwise: amax(columnwise, Usage::Columnwise),
        values: (!is_matrix).then_some(x).into(),
    }
}

/// Returns the values of a source.
fn values_of(
    source: QuantizeSource<Flex>,
    groups: &RowGroups<Flex>,
    targets: Targets,
) -> FlexTensor {
    match source {
        QuantizeSource::Matrix(x) => x,
        QuantizeSource::Activation {
            x,
            grad,
            activation,
        } => activated::<Flex>(x, grad, activation),
        QuantizeSource::Quantized { tensor, via } => {
            let mut made = targets.into_iter().flatten();
            // MS-EDEN uses the exact values.
            let via = match made.any(|(params, _)| params.is_ms_eden()) {
                true => FloatDType::F32,
                false => via,
            };
            dequantize(tensor, groups, via)
        }
    }
}

/// Quantizes values in groups.
fn quantize_values(
    x: FlexTensor,
    groups: &RowGroups<Flex>,
    [rowwise, columnwise]: Targets,
) -> QuantizedPair<Flex> {
    let groups = GroupedRows::new(groups, matrix(&x));
    trace(&groups, [rowwise, columnwise]);
    let made = |usage, request: Option<(QuantParams, StoredForm)>, amax: Option<Amax>| {
        request.map(|(params, form)| {
            let packed = with_elements!(x, |values| {
                groups.quantize(values, usage, &params, &|_| amax.clone())
            });
            stored_as(packed, form)
        })
    };
    // One amax of the whole matrix serves both usages if neither is transformed (MS-EDEN is).
    let amax = match (rowwise, columnwise, groups.count) {
        (Some((row, _)), Some((col, _)), GroupCount::Whole)
            if row.shares_amax() && col.shares_amax() && row.format.has_global_scale() =>
        {
            Some(Amax::Tensor(with_elements!(x, |values| {
                reference::amax(values)
            })))
        }
        _ => None,
    };
    let rowwise = made(Usage::Rowwise, rowwise, amax.clone());
    QuantizedPair::new(rowwise, made(Usage::Columnwise, columnwise, amax))
}

/// Quantizes one matrix from known amax values.
fn quantize_from_amax(
    x: FlexTensor,
    [row_amax, col_amax]: [MaybeTensor<Flex>; 2],
    [rowwise, columnwise]: Targets,
) -> QuantizedPair<Flex> {
    let groups = GroupedRows::new(&RowGroups::Whole, matrix(&x));
    trace(&groups, [rowwise, columnwise]);
    let made = |usage, request: Option<(QuantParams, StoredForm)>, amax: MaybeTensor<Flex>| {
        request.map(|(params, _)| {
            let layout = (groups.count).layout(groups.shape, usage, &params, StoredForm::Rows);
            let known = Amax::new(&layout, amax_values(amax));
            with_elements!(x, |values| {
                groups.quantize(values, usage, &params, &|_| Some(known.clone()))
            })
        })
    };
    let rowwise = made(Usage::Rowwise, rowwise, row_amax);
    QuantizedPair::new(rowwise, made(Usage::Columnwise, columnwise, col_amax))
}

/// Returns the row-wise tensor of `x` by `params`, in NVFP4, with one amax per group of `groups`,
/// given in `amax`.
pub(in crate::ops) fn quantize_with_amax(
    x: FlexTensor,
    groups: &RowGroups<Flex>,
    params: &QuantParams,
    amax: &[f32],
) -> QuantizedMatrix<Flex> {
    let groups = GroupedRows::new(groups, matrix(&x));
    let (usage, (rows, cols)) = (Usage::Rowwise, groups.shape);
    trace_op("quantize", usage_name(usage), rows, cols);
    let known = |group: usize| Some(Amax::Tensor(amax[group]));
    with_elements!(x, |values| groups.quantize(values, usage, params, &known))
}

/// Reports one event where the CubeCL backend runs one kernel for both usages, otherwise one per
/// usage.
fn trace(groups: &GroupedRows, [rowwise, columnwise]: Targets) {
    let (rows, cols) = groups.shape;
    let op = |params: &QuantParams| match params {
        params if params.format.is_mx() => "mx_quantize",
        params if params.is_ms_eden() => "ms_eden",
        _ => "quantize",
    };
    match (rowwise, columnwise) {
        (Some((row, _)), Some((col, _))) if op(&row) == "quantize" && op(&col) == "quantize" => {
            trace_op("quantize", "pair", rows, cols);
        }
        (row, col) => {
            for (made, usage) in [(row, Usage::Rowwise), (col, Usage::Columnwise)] {
                if let Some((params, _)) = made {
                    trace_op(op(&params), usage_name(usage), rows, cols);
                }
            }
        }
    }
}

/// Converts `packed` to bf16 values if that is the given form; packed tensors are stored in rows.
fn stored_as(packed: QuantizedMatrix<Flex>, form: StoredForm) -> QuantizedMatrix<Flex> {
    if form.is_packed() {
        return packed;
    }
    let (amax, layout) = (packed.amax.clone(), packed.layout);
    let values = StoredOperand::quantized(packed).rows(&(0..layout.outer()));
    QuantizedMatrix {
        data: QuantizedData::Bf16Unscaled(narrow(values, FloatDType::BF16)),
        amax,
        layout: Layout { form, ..layout },
    }
}

/// Implements [`nvfp4_dequantize`](super::super::Nvfp4KernelOps::nvfp4_dequantize).
pub(super) fn dequantize(
    source: QuantizedMatrix<Flex>,
    groups: &RowGroups<Flex>,
    dtype: FloatDType,
) -> FlexTensor {
    let source = with_amax_per_row::<Flex>(source, groups);
    let layout = source.layout;
    if !layout.form.is_packed() {
        return scaled::<Flex>(source, dtype);
    }
    let Layout { rows, cols, .. } = layout;
    let is_mx = layout.format.is_mx();
    let op = if is_mx { "mx_dequantize" } else { "dequantize" };
    trace_op(op, usage_name(layout.usage), rows, cols);
    let packed = download(source);
    let values = match is_mx {
        true => reference::mx_dequantize(&packed),
        false => reference::dequantize(&packed),
    };
    narrow(
        FlexTensor::from_data(TensorData::new(values, [rows, cols])),
        dtype,
    )
}

/// Returns the amax values of a quantized matrix.
fn amax_of<T: Element>(
    values: &[T],
    (rows, cols): (usize, usize),
    usage: Usage,
    params: &QuantParams,
) -> Amax {
    if !params.format.has_global_scale() {
        return Amax::Absent;
    }
    if let (QuantRounding::MsEden(_), Some(hadamard)) = (params.rounding, &params.hadamard) {
        let amax = reference::ms_eden_amax(values, rows, cols, usage, hadamard);
        return Amax::Tensor(trusted(amax));
    }
    match (params.amax, usage, &params.hadamard) {
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

/// Quantizes one matrix, whose blocks are numbered from `first`.
fn quantize_one<T: Element>(
    values: &[T],
    (rows, cols): (usize, usize),
    usage: Usage,
    params: &QuantParams,
    amax: &Amax,
    first: u64,
) -> QuantizedTensor {
    if params.format.is_mx() {
        let format = params.format;
        return trusted(reference::mx_quantize(values, rows, cols, usage, format));
    }
    trusted(match (params.rounding, &params.hadamard, params.block) {
        (QuantRounding::MsEden(draw), Some(hadamard), _) => {
            let by = EdenParams {
                hadamard: *hadamard,
                stream: draw.stream,
            };
            // Numbered in groups of 128.
            let first = first / (EDEN_GROUP / params.format.block()) as u64;
            reference::ms_eden_at(values, rows, cols, usage, amax.of(0), &by, first)
        }
        (QuantRounding::MsEden(_), None, _) => unreachable!("MS-EDEN has a transform"),
        (_, _, BlockShape::Block2d) => {
            let scaling = params.scaling;
            reference::quantize_tile_copy(values, rows, cols, usage, amax, scaling)
        }
        (_, _, BlockShape::Block1d) => {
            reference::quantize(values, rows, cols, usage, amax, params, first)
        }
    })
}

/// Groups of the rows of a matrix.
struct GroupedRows {
    shape: (usize, usize),
    /// Rows of each group.
    ranges: Vec<Range<usize>>,
    /// Unit sizes, each with the number of units in the groups before these.
    earlier: Vec<(usize, usize)>,
    count: GroupCount,
}

impl GroupedRows {
    fn new(groups: &RowGroups<Flex>, (rows, cols): (usize, usize)) -> Self {
        let ranges = match groups {
            RowGroups::Whole => std::iter::once(0..rows).collect(),
            RowGroups::Batch(count) => {
                let each = rows / count;
                (0..*count).map(|g| g * each..(g + 1) * each).collect()
            }
            RowGroups::Offsets(offsets) | RowGroups::Window { offsets, .. } => {
                ranges(offsets, rows)
            }
        };
        let earlier = match groups {
            RowGroups::Window { earlier, .. } => {
                let earlier = earlier.to_contiguous();
                let units = earlier.storage::<u32>().iter().map(|&units| units as usize);
                EARLIER_UNITS.into_iter().zip(units).collect()
            }
            RowGroups::Whole | RowGroups::Batch(_) | RowGroups::Offsets(_) => Vec::new(),
        };
        Self {
            shape: (rows, cols),
            ranges,
            earlier,
            count: groups.count(),
        }
    }

    /// Number of rows of the groups before these, each group rounded up to a multiple of `unit`.
    fn rows_before(&self, unit: usize) -> usize {
        let units = self.earlier.iter().find(|(rows, _)| *rows == unit);
        units.map_or(0, |(rows, units)| rows * units)
    }

    /// Quantizes each group as a separate matrix, with its values in `amax`, if known.
    fn quantize<T: Element>(
        &self,
        values: &[T],
        usage: Usage,
        params: &QuantParams,
        amax: &dyn Fn(usize) -> Option<Amax>,
    ) -> QuantizedMatrix<Flex> {
        let layout = self
            .count
            .layout(self.shape, usage, params, StoredForm::Rows);
        if let GroupCount::Whole = self.count {
            let amax = amax(0).unwrap_or_else(|| amax_of(values, self.shape, usage, params));
            let made = quantize_one(values, self.shape, usage, params, &amax, 0);
            let (scales, amax) = (made.scales().to_vec(), made.amax().values().to_vec());
            return upload(made.codes(), scales, amax, layout);
        }
        let mut buffers = Buffers::new(&layout);
        let mut amax_values = vec![0.0; self.count.amax_len(&layout)];
        let (_, cols) = self.shape;
        for (group, place) in self.places(usage, params).iter().enumerate() {
            let part = &values[place.rows.start * cols..place.rows.end * cols];
            let shape = (place.rows.len(), cols);
            let amax = amax(group).unwrap_or_else(|| amax_of(part, shape, usage, params));
            let first = place.number as u64;
            let made = quantize_one(part, shape, usage, params, &amax, first);
            // MS-EDEN stores an amax other than that of the values.
            match (made.amax(), usage) {
                (Amax::Absent, _) => {}
                (Amax::Tensor(amax), _) => amax_values[group] = *amax,
                (Amax::PerRow(amax), Usage::Rowwise) => {
                    amax_values[place.rows.clone()].copy_from_slice(amax);
                }
                (Amax::PerRow(amax), Usage::Columnwise) => {
                    amax_values[group * cols..][..cols].copy_from_slice(amax);
                }
            }
            buffers.put(made.codes(), made.scales(), place);
        }
        upload(&buffers.codes, buffers.scales, amax_values, layout)
    }

    /// Positions of the quantized groups.
    fn places(&self, usage: Usage, params: &QuantParams) -> Vec<Place> {
        let (unit, block) = (params.unit(), params.format.block());
        let (_, cols) = self.shape;
        let padded = side_by_side(&self.ranges, unit);
        let groups = self.ranges.iter().zip(padded).enumerate();
        let places = groups.map(|(group, (rows, padded))| {
            let (row, start, len) = match (usage, self.count) {
                (Usage::Rowwise, _) => (rows.start, 0, cols.next_multiple_of(unit)),
                (Usage::Columnwise, GroupCount::Offsets(_)) => (0, padded.start, padded.len()),
                (Usage::Columnwise, _) => (group * cols, 0, padded.len()),
            };
            let before = match usage {
                Usage::Rowwise => (self.rows_before(1) + rows.start) * len,
                Usage::Columnwise => cols * (self.rows_before(unit) + padded.start),
            };
            Place {
                rows: rows.clone(),
                row,
                block: start / block,
                blocks: len / block,
                number: before / block,
            }
        });
        places.collect()
    }
}

/// Group, and position of its quantized tensor among those of all groups.
struct Place {
    /// Rows of the group.
    rows: Range<usize>,
    /// First stored row.
    row: usize,
    /// First block in a stored row.
    block: usize,
    /// Number of blocks in a stored row.
    blocks: usize,
    /// Number of the first block in the order of the random draws: group after group.
    number: usize,
}

/// Buffers of all groups, with zeros outside of the groups.
struct Buffers {
    codes: Vec<u8>,
    scales: Vec<u8>,
    /// Blocks per stored row.
    blocks: usize,
    /// Code bytes per block.
    block_bytes: usize,
}

impl Buffers {
    fn new(layout: &Layout) -> Self {
        Self {
            codes: vec![0; layout.code_bytes()],
            scales: vec![0; layout.scale_bytes()],
            blocks: layout.blocks(),
            block_bytes: layout.block_bytes(),
        }
    }

    /// Copies the bytes of one group to their position.
    fn put(&mut self, codes: &[u8], scales: &[u8], place: &Place) {
        let (width, bytes) = (place.blocks, self.block_bytes);
        let rows = scales.chunks_exact(width.max(1));
        let rows = rows.zip(codes.chunks_exact((width * bytes).max(1)));
        for (row, (scales, codes)) in rows.enumerate() {
            let at = (place.row + row) * self.blocks + place.block;
            self.scales[at..][..width].copy_from_slice(scales);
            self.codes[at * bytes..][..width * bytes].copy_from_slice(codes);
        }
    }
}
