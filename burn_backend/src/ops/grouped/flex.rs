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
use nvfp4_kernels::reference::{self, Element, padding::padded_bound};
use nvfp4_kernels::{Amax, BLOCK, MX_BLOCK, PackedAxis, PackedTensor, ScaleLayout};

use super::super::flex::{matrix, maxima, narrow, policy, trusted, with_elements};
use super::super::{
    Bias, CopySpec, GlobalScaling, MxLayout, MxPacked, Nvfp4Ops, Operand, Packed, PackedLayout,
    PackedPair, PairSpec, QuantizeSpec, copy_name, float_dtype, trace_op,
};
use super::operands::{NO_VALUES, unit};
use super::{GroupPairSpec, Nvfp4GroupedOps, side_by_side_rows};

impl Nvfp4GroupedOps for Flex {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let dims = stack(&w);
        trace_op("quantize", copy_name(spec.axis), dims[0] * dims[1], dims[2]);
        let copies = with_elements!(w, |values| each_matrix(
            values,
            dims,
            |values, rows, cols| {
                let amax = Amax::Tensor(reference::amax(values));
                let policy = policy(&spec.copy);
                trusted(reference::quantize(
                    values, rows, cols, spec.axis, &amax, &policy, 0,
                ))
            }
        ));
        one_below_the_other(
            &copies,
            PackedLayout::stack(dims, spec.axis, spec.copy.scaling),
        )
    }

    fn nvfp4_quantize_stack_pair(w: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let dims = stack(&w);
        trace_op("quantize", "pair", dims[0] * dims[1], dims[2]);
        let copies = with_elements!(w, |values| each_matrix(
            values,
            dims,
            |values, rows, cols| {
                let amax = Amax::Tensor(reference::amax(values));
                trusted(match spec {
                    PairSpec::Tile(scaling) => {
                        let compact = [ScaleLayout::Compact; 2];
                        reference::quantize_tile(values, rows, cols, &amax, scaling, compact)
                    }
                    PairSpec::Blocks { row, col } => {
                        let copy = |axis, copy: &CopySpec| {
                            let policy = policy(copy);
                            reference::quantize(values, rows, cols, axis, &amax, &policy, 0)
                        };
                        copy(PackedAxis::Cols, &row)
                            .and_then(|row| Ok((row, copy(PackedAxis::Rows, &col)?)))
                    }
                })
            }
        ));
        let (rows, cols): (Vec<_>, Vec<_>) = copies.into_iter().unzip();
        let [row, col] = spec.copies().map(|copy| copy.scaling);
        PackedPair {
            row: one_below_the_other(&rows, PackedLayout::stack(dims, PackedAxis::Cols, row)),
            col: one_below_the_other(&cols, PackedLayout::stack(dims, PackedAxis::Rows, col)),
        }
    }

    fn nvfp4_quantize_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: QuantizeSpec,
    ) -> Packed<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", copy_name(spec.axis), rows, cols);
        let groups = ranges(&offsets, rows);
        with_elements!(x, |values| match spec.axis {
            PackedAxis::Cols => quantize_rows(values, (rows, cols), &groups, &spec.copy),
            PackedAxis::Rows => quantize_columns(values, (rows, cols), &groups, &spec.copy),
        })
    }

    fn nvfp4_quantize_groups_pair(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: GroupPairSpec,
    ) -> PackedPair<Self> {
        let (rows, cols) = matrix(&x);
        trace_op("quantize", "pair", rows, cols);
        let groups = ranges(&offsets, rows);
        let GroupPairSpec { row, col } = &spec;
        with_elements!(x, |values| PackedPair {
            row: quantize_rows(values, (rows, cols), &groups, row),
            col: quantize_columns(values, (rows, cols), &groups, col),
        })
    }

    fn nvfp4_pad_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        unit: usize,
    ) -> FloatTensor<Self> {
        let (rows, cols) = matrix(&x);
        let groups = ranges(&offsets, rows);
        let bound = padded_bound(rows, groups.len(), unit);
        let mut out = vec![0f32; bound * cols];
        let dtype = float_dtype(x.dtype());
        let x = in_type(x, FloatDType::F32).to_contiguous();
        let values: &[f32] = x.storage();
        for (group, place) in groups.iter().zip(places(&groups, unit)) {
            out[place.start * cols..][..group.len() * cols]
                .copy_from_slice(&values[group.start * cols..group.end * cols]);
        }
        narrow(
            FlexTensor::from_data(TensorData::new(out, [bound, cols])),
            dtype,
        )
    }

    fn nvfp4_spread_groups(
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
            packed => places(&groups, unit(packed)),
        };
        let parts = places.iter().enumerate().map(|(group, place)| {
            let [a, b] = [&a, &b].map(|operand| stored_columns(operand, place, group));
            Flex::nvfp4_product(a, b, Bias::Absent, dtype)
        });
        let stacked = Flex::float_cat(parts.collect(), 0);
        Flex::float_reshape(stacked, Shape::new([places.len(), m, n]))
    }

    fn nvfp4_group_sums(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
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
fn places(groups: &[Range<usize>], unit: usize) -> Vec<Range<usize>> {
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

/// `[count, rows, cols]` of a stack.
fn stack(w: &FlexTensor) -> [usize; 3] {
    let shape = w.layout().shape();
    [shape[0], shape[1], shape[2]]
}

fn each_matrix<T: Element, R>(
    values: &[T],
    [count, rows, cols]: [usize; 3],
    pack: impl Fn(&[T], usize, usize) -> R,
) -> Vec<R> {
    (0..count)
        .map(|index| pack(&values[index * rows * cols..][..rows * cols], rows, cols))
        .collect()
}

/// Stacked copies as one packed matrix with an amax for each.
fn one_below_the_other(copies: &[PackedTensor], layout: PackedLayout) -> Packed<Flex> {
    let codes = copies.iter().flat_map(|copy| copy.codes()).copied();
    let scales = copies.iter().flat_map(|copy| copy.scales()).copied();
    let amax = copies.iter().map(|copy| copy.amax().of(0));
    upload(codes.collect(), scales.collect(), amax.collect(), layout)
}

/// The row-wise copy of each group; zeros for the rows of none.
fn quantize_rows<T: Element>(
    values: &[T],
    (rows, cols): (usize, usize),
    groups: &[Range<usize>],
    copy: &CopySpec,
) -> Packed<Flex> {
    let axis = PackedAxis::Cols;
    let layout = copy.layout(rows, cols, axis);
    let blocks = layout.blocks();
    let mut codes = vec![0; rows * blocks * 8];
    let mut scales = vec![0; rows * blocks];
    let mut all = vec![0.0; super::maxima(&layout, groups.len())];
    let policy = policy(copy);
    for (index, group) in groups.iter().enumerate() {
        let part = &values[group.start * cols..group.end * cols];
        let amax = maxima(part, group.len(), cols, axis, copy);
        match &amax {
            Amax::Tensor(amax) => all[index] = *amax,
            Amax::PerOuter(amax) => all[group.clone()].copy_from_slice(amax),
        }
        let first = group.start * blocks;
        let packed = trusted(reference::quantize(
            part,
            group.len(),
            cols,
            axis,
            &amax,
            &policy,
            first as u64,
        ));
        codes[first * 8..][..packed.codes().len()].copy_from_slice(packed.codes());
        scales[first..][..packed.scales().len()].copy_from_slice(packed.scales());
    }
    upload(codes, scales, all, layout)
}

/// The column-wise copies of the groups side by side; zeros behind the last.
fn quantize_columns<T: Element>(
    values: &[T],
    (rows, cols): (usize, usize),
    groups: &[Range<usize>],
    copy: &CopySpec,
) -> Packed<Flex> {
    let axis = PackedAxis::Rows;
    let pitch = side_by_side_rows(rows, groups.len(), copy.hadamard);
    let layout = copy.layout(pitch, cols, axis);
    let pitch = layout.blocks();
    let mut codes = vec![0; cols * pitch * 8];
    let mut scales = vec![0; cols * pitch];
    let mut all = Vec::with_capacity(super::maxima(&layout, groups.len()));
    let unit = copy
        .hadamard
        .map_or(BLOCK, |hadamard| hadamard.size().elements());
    let policy = policy(copy);
    for (group, place) in groups.iter().zip(places(groups, unit)) {
        let part = &values[group.start * cols..group.end * cols];
        let amax = maxima(part, group.len(), cols, axis, copy);
        match &amax {
            Amax::Tensor(amax) => all.push(*amax),
            Amax::PerOuter(amax) => all.extend_from_slice(amax),
        }
        let (start, blocks) = (place.start / BLOCK, place.len() / BLOCK);
        let packed = trusted(reference::quantize(
            part,
            group.len(),
            cols,
            axis,
            &amax,
            &policy,
            (cols * start) as u64,
        ));
        for column in 0..cols {
            let (from, to) = (column * blocks, column * pitch + start);
            codes[to * 8..][..blocks * 8]
                .copy_from_slice(&packed.codes()[from * 8..][..blocks * 8]);
            scales[to..][..blocks].copy_from_slice(&packed.scales()[from..][..blocks]);
        }
    }
    upload(codes, scales, all, layout)
}

fn upload(codes: Vec<u8>, scales: Vec<u8>, amax: Vec<f32>, layout: PackedLayout) -> Packed<Flex> {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let maxima = amax.len();
    let words: Vec<u32> = codes
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    Packed {
        codes: FlexTensor::from_data(TensorData::new(words, [outer, blocks * 2])),
        scales: FlexTensor::from_data(TensorData::new(scales, [outer, blocks])),
        amax: FlexTensor::from_data(TensorData::new(amax, [maxima])),
        layout,
    }
}

/// Stored rows of an operand.
fn stored_outer(operand: &Operand<Flex>) -> usize {
    match operand {
        Operand::Nvfp4(packed) => packed.layout.outer(),
        Operand::Mxfp8(packed) => packed.layout.outer(),
        Operand::Float(x, axis) => {
            let (rows, cols) = matrix(x);
            axis.stored_shape(rows, cols).0
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
                GlobalScaling::PerToken => rows.clone(),
                GlobalScaling::PerTensor => own_amax(packed, group),
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
        Operand::Float(x, axis) => Operand::Float(rows_of(x.clone(), rows), *axis),
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
                GlobalScaling::PerToken => group * outer..(group + 1) * outer,
                GlobalScaling::PerTensor => own_amax(packed, group),
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
        Operand::Float(x, axis) => Operand::Float(rows_of(x.clone(), place.clone()), *axis),
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

/// Where the amax of a group is: its own, or that of all groups.
fn own_amax(packed: &Packed<Flex>, group: usize) -> Range<usize> {
    match packed.amax.layout().shape()[0] {
        1 => 0..1,
        _ => group..group + 1,
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

fn in_type(x: FlexTensor, dtype: FloatDType) -> FlexTensor {
    if float_dtype(x.dtype()) == dtype {
        x
    } else {
        Flex::float_cast(x, dtype)
    }
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
