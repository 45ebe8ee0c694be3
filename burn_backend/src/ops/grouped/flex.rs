//! Flex: a loop over groups, each by the oracle. Offsets are plain memory here.

use std::ops::Range;

use burn_core::backend::{
    Flex,
    ops::{FloatTensorOps, IntTensorOps},
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, FloatDType, Shape, Slice, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_kernels::reference::{self, EDEN_GROUP, Element};
use nvfp4_kernels::{Amax, BLOCK, BlockScaling, Format, MX_BLOCK, ScaleLayout, Usage};

use super::super::flex::{
    eden, matrix, maxima, mx_upload_parts, narrow, policy, trusted, upload_parts, with_elements,
};
use super::super::packed::unit_of;
use super::super::{
    AmaxGranularity, Bias, CopySpec, EdenSpec, MxLayout, MxPacked, Nvfp4Ops, Operand, Packed,
    PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name, trace_op,
};
use super::arrangement::Arrangement;
use super::operands::{NO_VALUES, unit, values};
use super::{GroupPairSpec, Nvfp4GroupedOps, RowGroups};

impl Nvfp4GroupedOps for Flex {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let groups = Grouped::stack(&w);
        let QuantizeSpec { usage, copy } = spec;
        trace_op("quantize", copy_name(usage), groups.rows, groups.cols);
        with_elements!(w, |values| quantize(values, &groups, usage, &copy))
    }

    fn nvfp4_quantize_stack_tiles(
        w: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        let groups = Grouped::stack(&w);
        trace_op("quantize", copy_name(usage), groups.rows, groups.cols);
        with_elements!(w, |values| quantize_tiles(values, &groups, usage, scaling))
    }

    fn nvfp4_quantize_stack_pair(w: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let groups = Grouped::stack(&w);
        trace_op("quantize", "pair", groups.rows, groups.cols);
        with_elements!(w, |values| match &spec {
            PairSpec::Tile(scaling) => PackedPair {
                row: quantize_tiles(values, &groups, Usage::Rowwise, *scaling),
                col: quantize_tiles(values, &groups, Usage::Columnwise, *scaling),
            },
            PairSpec::Blocks { row, col } => quantize_both(values, &groups, row, col),
        })
    }

    fn nvfp4_quantize_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: QuantizeSpec,
    ) -> Packed<Self> {
        let groups = Grouped::new(&RowGroups::Offsets(offsets), matrix(&x));
        let QuantizeSpec { usage, copy } = spec;
        trace_op("quantize", copy_name(usage), groups.rows, groups.cols);
        with_elements!(x, |values| quantize(values, &groups, usage, &copy))
    }

    fn nvfp4_quantize_groups_pair(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: GroupPairSpec,
    ) -> PackedPair<Self> {
        let groups = Grouped::new(&RowGroups::Offsets(offsets), matrix(&x));
        trace_op("quantize", "pair", groups.rows, groups.cols);
        let GroupPairSpec { row, col } = &spec;
        with_elements!(x, |values| quantize_both(values, &groups, row, col))
    }

    fn nvfp4_eden_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let groups = Grouped::new(&groups, matrix(&x));
        trace_op("ms_eden", copy_name(spec.usage), groups.rows, groups.cols);
        with_elements!(x, |values| eden_groups(values, &groups, &spec))
    }

    fn nvfp4_eden_groups_packed(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let x = values::<Self>(Operand::Nvfp4(packed), &groups, FloatDType::F32);
        Self::nvfp4_eden_groups(x, groups, spec)
    }

    fn nvfp4_mx_quantize_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
    ) -> MxPacked<Self> {
        let groups = Grouped::new(&groups, matrix(&x));
        trace_op("mx_quantize", copy_name(usage), groups.rows, groups.cols);
        with_elements!(x, |values| mx_groups(values, &groups, usage))
    }

    fn nvfp4_mx_requantize_groups(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        via: FloatDType,
    ) -> MxPacked<Self> {
        let x = values::<Self>(Operand::Nvfp4(packed), &groups, via);
        Self::nvfp4_mx_quantize_groups(x, groups, usage)
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = values.to_contiguous();
        let mut out = vec![0f32; rows];
        for (value, group) in values.storage::<f32>().iter().zip(ranges(&offsets, rows)) {
            out[group].fill(*value);
        }
        FlexTensor::from_data(TensorData::new(out, [rows]))
    }

    fn nvfp4_group_rows(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let tokens = stored_outer(&a);
        let groups = ranges(&offsets, tokens);
        let columns = stored_outer(&b) / groups.len();
        let parts = groups.iter().enumerate().map(|(group, rows)| {
            let bias = match &bias {
                Bias::Absent => Bias::Absent,
                Bias::Vector(bias) => Bias::Vector(row(bias.clone(), group, columns)),
            };
            let a = stored_rows(&a, rows.clone(), group);
            let b = stored_rows(&b, group * columns..(group + 1) * columns, group);
            Flex::nvfp4_product(a, b, bias, dtype)
        });
        with_rest(parts.collect(), tokens, columns, dtype)
    }

    fn nvfp4_group_depth(
        a: Operand<Self>,
        b: Operand<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (m, n) = (stored_outer(&a), stored_outer(&b));
        let groups = ranges(&offsets, tokens);
        let places = match &a {
            // Not padded.
            Operand::Float(..) => groups,
            packed => side_by_side(&groups, unit(packed)),
        };
        let parts = places.iter().enumerate().map(|(group, place)| {
            let [a, b] = [&a, &b].map(|operand| stored_columns(operand, place, group));
            Flex::nvfp4_product(a, b, Bias::Absent, dtype)
        });
        let stacked = Flex::float_cat(parts.collect(), 0);
        Flex::float_reshape(stacked, Shape::new([places.len(), m, n]))
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        let (tokens, cols) = matrix(&x);
        let x = Flex::float_cast(x, FloatDType::F32);
        let sums = ranges(&offsets, tokens).into_iter().map(|rows| {
            if rows.is_empty() {
                return FlexTensor::zeros(Shape::new([1, cols]), DType::F32);
            }
            Flex::float_sum_dim(rows_of(x.clone(), rows), 0)
        });
        Flex::float_cat(sums.collect(), 0)
    }
}

/// The rows of each group.
fn ranges(offsets: &FlexTensor, rows: usize) -> Vec<Range<usize>> {
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

/// Where the groups lie side by side, each padded to a multiple of `unit`.
fn side_by_side(groups: &[Range<usize>], unit: usize) -> Vec<Range<usize>> {
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

/// The groups of the rows of a `rows` x `cols` matrix.
struct Grouped {
    rows: usize,
    cols: usize,
    /// The rows of each group.
    ranges: Vec<Range<usize>>,
    arrangement: Arrangement,
}

impl Grouped {
    fn new(groups: &RowGroups<Flex>, (rows, cols): (usize, usize)) -> Self {
        let ranges = match groups {
            RowGroups::Batch(count) => {
                let each = rows / count;
                (0..*count).map(|g| g * each..(g + 1) * each).collect()
            }
            RowGroups::Offsets(offsets) => ranges(offsets, rows),
        };
        Self {
            rows,
            cols,
            ranges,
            arrangement: groups.arrangement(),
        }
    }

    /// Those of the stack `w`, its matrices one below the other.
    fn stack(w: &FlexTensor) -> Self {
        let shape = w.layout().shape();
        let groups = RowGroups::Batch(shape[0]);
        Self::new(&groups, (shape[0] * shape[1], shape[2]))
    }

    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// The copies along `usage` of all groups, in blocks of `block` elements and padded to a multiple of `unit`.
    fn places(&self, usage: Usage, unit: usize, block: usize) -> Vec<Place> {
        let padded = side_by_side(&self.ranges, unit);
        let groups = self.ranges.iter().zip(padded).enumerate();
        let places = groups.map(|(group, (rows, padded))| {
            let (row, start, len) = match (usage, self.arrangement) {
                (Usage::Rowwise, _) => (rows.start, 0, self.cols.next_multiple_of(unit)),
                (Usage::Columnwise, Arrangement::Batch(_)) => (group * self.cols, 0, padded.len()),
                (Usage::Columnwise, Arrangement::Offsets(_)) => (0, padded.start, padded.len()),
            };
            let before = match usage {
                Usage::Rowwise => rows.start * len,
                Usage::Columnwise => self.cols * padded.start,
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

/// A group, and where its copy lies among those of all groups.
struct Place {
    /// The rows of the group.
    rows: Range<usize>,
    /// The first stored row of the copy.
    row: usize,
    /// The first block of it in a stored row.
    block: usize,
    /// Blocks of it in a stored row.
    blocks: usize,
    /// The number of its first block in the order in which random bits are drawn: one group after another.
    number: usize,
}

impl Place {
    /// The elements of the group, in a matrix of `cols` columns, and its rows.
    fn part<'a, T>(&self, values: &'a [T], cols: usize) -> (&'a [T], usize) {
        let part = &values[self.rows.start * cols..self.rows.end * cols];
        (part, self.rows.len())
    }
}

/// The copies of groups in one matrix, zeros where there is none.
struct Copies {
    codes: Vec<u8>,
    scales: Vec<u8>,
    /// Blocks of a stored row.
    blocks: usize,
    /// Bytes of the codes of a block.
    block_bytes: usize,
}

impl Copies {
    fn new(rows: usize, blocks: usize, block_bytes: usize) -> Self {
        Self {
            codes: vec![0; rows * blocks * block_bytes],
            scales: vec![0; rows * blocks],
            blocks,
            block_bytes,
        }
    }

    /// Puts the copy with these bytes where it belongs.
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

/// The copy along `usage` of each group, in 1x16 blocks.
fn quantize<T: Element>(
    values: &[T],
    groups: &Grouped,
    usage: Usage,
    copy: &CopySpec,
) -> Packed<Flex> {
    let layout = groups.arrangement.copy(groups.shape(), usage, copy);
    let mut copies = Copies::new(layout.outer(), layout.blocks(), BLOCK / 2);
    let mut all = vec![0.0; super::maxima(&layout, groups.ranges.len())];
    let (cols, policy) = (groups.cols, policy(copy));
    let places = groups.places(usage, unit_of(copy.hadamard), BLOCK);
    for (group, place) in places.iter().enumerate() {
        let (part, rows) = place.part(values, cols);
        let amax = maxima(part, rows, cols, usage, copy);
        match (&amax, usage) {
            (Amax::Absent, _) => {}
            (Amax::Tensor(amax), _) => all[group] = *amax,
            (Amax::PerRow(amax), Usage::Rowwise) => {
                all[place.rows.clone()].copy_from_slice(amax);
            }
            (Amax::PerRow(amax), Usage::Columnwise) => {
                all[group * cols..][..cols].copy_from_slice(amax);
            }
        }
        let first = place.number as u64;
        let packed = reference::quantize(part, rows, cols, usage, &amax, &policy, first);
        let packed = trusted(packed);
        copies.put(packed.codes(), packed.scales(), place);
    }
    upload_parts(&copies.codes, copies.scales, all, layout)
}

fn quantize_both<T: Element>(
    values: &[T],
    groups: &Grouped,
    row: &CopySpec,
    col: &CopySpec,
) -> PackedPair<Flex> {
    PackedPair {
        row: quantize(values, groups, Usage::Rowwise, row),
        col: quantize(values, groups, Usage::Columnwise, col),
    }
}

/// One copy of each group, in 16x16 tiles.
fn quantize_tiles<T: Element>(
    values: &[T],
    groups: &Grouped,
    usage: Usage,
    scaling: BlockScaling,
) -> Packed<Flex> {
    let copy = CopySpec::of_tiles(scaling);
    let layout = groups.arrangement.copy(groups.shape(), usage, &copy);
    let mut copies = Copies::new(layout.outer(), layout.blocks(), BLOCK / 2);
    let mut all = Vec::with_capacity(groups.ranges.len());
    for place in &groups.places(usage, BLOCK, BLOCK) {
        let (part, rows) = place.part(values, groups.cols);
        let amax = reference::amax(part);
        all.push(amax);
        let (amax, compact) = (Amax::Tensor(amax), ScaleLayout::Compact);
        let packed =
            reference::quantize_tile_copy(part, rows, groups.cols, usage, &amax, scaling, compact);
        let packed = trusted(packed);
        copies.put(packed.codes(), packed.scales(), place);
    }
    upload_parts(&copies.codes, copies.scales, all, layout)
}

/// Each group by MS-EDEN.
fn eden_groups<T: Element>(values: &[T], groups: &Grouped, spec: &EdenSpec) -> Packed<Flex> {
    let layout = groups.arrangement.eden(groups.shape(), spec);
    let mut copies = Copies::new(layout.outer(), layout.blocks(), BLOCK / 2);
    let mut all = Vec::with_capacity(groups.ranges.len());
    for place in groups.places(spec.usage, EDEN_GROUP, BLOCK) {
        let (part, rows) = place.part(values, groups.cols);
        let first = place.number / (EDEN_GROUP / BLOCK);
        let packed = trusted(eden(part, rows, groups.cols, spec, first as u64));
        all.push(packed.amax().of(0));
        copies.put(packed.codes(), packed.scales(), &place);
    }
    upload_parts(&copies.codes, copies.scales, all, layout)
}

/// Each group in MXFP8.
fn mx_groups<T: Element>(values: &[T], groups: &Grouped, usage: Usage) -> MxPacked<Flex> {
    let layout = groups.arrangement.mx(groups.shape(), usage);
    let mut copies = Copies::new(layout.outer(), layout.blocks(), MX_BLOCK);
    for place in groups.places(usage, MX_BLOCK, MX_BLOCK) {
        let (part, rows) = place.part(values, groups.cols);
        let packed = trusted(reference::mx_quantize(
            part,
            rows,
            groups.cols,
            usage,
            Format::Mxfp8,
        ));
        copies.put(packed.codes(), packed.scales(), &place);
    }
    mx_upload_parts(copies.codes, copies.scales, layout)
}

/// Stored rows of an operand.
fn stored_outer(operand: &Operand<Flex>) -> usize {
    match operand {
        Operand::Nvfp4(packed) => packed.layout.outer(),
        Operand::Mxfp8(packed) => packed.layout.outer(),
        Operand::Float(x, usage) => {
            let (rows, cols) = matrix(x);
            usage.stored_shape(rows, cols).0
        }
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

/// Some rows of a row-wise operand, those of group `group`.
fn stored_rows(operand: &Operand<Flex>, rows: Range<usize>, group: usize) -> Operand<Flex> {
    match operand {
        Operand::Nvfp4(packed) => {
            let blocks = packed.layout.blocks();
            let own = match packed.layout.global {
                AmaxGranularity::PerRow => rows.clone(),
                AmaxGranularity::PerTensor => group..group + 1,
            };
            Operand::Nvfp4(Packed {
                codes: int_part(&packed.codes, rows.clone(), 0..blocks * 2),
                scales: int_part(&packed.scales, rows.clone(), 0..blocks),
                amax: amax_part(packed, own),
                layout: PackedLayout {
                    rows: rows.len(),
                    ..packed.layout
                },
            })
        }
        Operand::Mxfp8(packed) => {
            let blocks = packed.layout.blocks();
            Operand::Mxfp8(MxPacked {
                codes: int_part(&packed.codes, rows.clone(), 0..blocks * MX_BLOCK),
                scales: int_part(&packed.scales, rows.clone(), 0..blocks),
                layout: MxLayout {
                    rows: rows.len(),
                    ..packed.layout
                },
            })
        }
        Operand::Float(x, usage) => Operand::Float(rows_of(x.clone(), rows), *usage),
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

/// Of every stored row of a column-wise operand the part of group `group`, which has the elements
/// `place` of the contraction.
fn stored_columns(operand: &Operand<Flex>, place: &Range<usize>, group: usize) -> Operand<Flex> {
    match operand {
        Operand::Nvfp4(packed) => {
            let outer = packed.layout.outer();
            let blocks = place.start / BLOCK..place.end / BLOCK;
            let own = match packed.layout.global {
                AmaxGranularity::PerRow => group * outer..(group + 1) * outer,
                AmaxGranularity::PerTensor => group..group + 1,
            };
            Operand::Nvfp4(Packed {
                codes: int_part(&packed.codes, 0..outer, blocks.start * 2..blocks.end * 2),
                scales: int_part(&packed.scales, 0..outer, blocks),
                amax: amax_part(packed, own),
                layout: PackedLayout {
                    rows: place.len(),
                    ..packed.layout
                },
            })
        }
        Operand::Mxfp8(packed) => {
            let outer = packed.layout.outer();
            let blocks = place.start / MX_BLOCK..place.end / MX_BLOCK;
            Operand::Mxfp8(MxPacked {
                codes: int_part(&packed.codes, 0..outer, place.clone()),
                scales: int_part(&packed.scales, 0..outer, blocks),
                layout: MxLayout {
                    rows: place.len(),
                    ..packed.layout
                },
            })
        }
        Operand::Float(x, usage) => Operand::Float(rows_of(x.clone(), place.clone()), *usage),
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

fn int_part(tensor: &FlexTensor, rows: Range<usize>, cols: Range<usize>) -> FlexTensor {
    let slices = [Slice::from(rows), Slice::from(cols)];
    Flex::int_slice(tensor.clone(), &slices).to_contiguous()
}

fn amax_part(packed: &Packed<Flex>, own: Range<usize>) -> FlexTensor {
    let slices = [Slice::from(own)];
    Flex::float_slice(packed.amax.clone(), &slices).to_contiguous()
}

/// Some rows of a matrix.
fn rows_of(x: FlexTensor, rows: Range<usize>) -> FlexTensor {
    let (_, cols) = matrix(&x);
    Flex::float_slice(x, &[Slice::from(rows), Slice::from(0..cols)])
}

/// Row `index` of a matrix of `columns` columns, as a vector.
fn row(x: FlexTensor, index: usize, columns: usize) -> FlexTensor {
    Flex::float_reshape(rows_of(x, index..index + 1), Shape::new([columns]))
}

/// The rows of the groups one after another, and zeros up to `tokens`.
fn with_rest(
    mut parts: Vec<FlexTensor>,
    tokens: usize,
    columns: usize,
    dtype: FloatDType,
) -> FlexTensor {
    let found: usize = parts.iter().map(|part| matrix(part).0).sum();
    let zeros = FlexTensor::zeros(Shape::new([tokens - found, columns]), DType::F32);
    parts.push(narrow(zeros, dtype));
    Flex::float_cat(parts, 0)
}
