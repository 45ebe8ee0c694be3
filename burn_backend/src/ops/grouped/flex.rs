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
use nvfp4_kernels::reference::{self, Element};
use nvfp4_kernels::{Amax, BLOCK, CopyPolicy, Hadamard, PackedAxis, PackedTensor, ScaleLayout};

use super::super::flex::{matrix, narrow, trusted, with_elements};
use super::super::{
    Bias, CopySpec, Nvfp4Ops, Packed, PackedLayout, PackedPair, PairSpec, QuantizeSpec, copy_name,
    float_dtype, trace_op,
};
use super::{GroupPairSpec, Nvfp4GroupedOps, side_by_side_rows};

impl Nvfp4GroupedOps for Flex {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        let dims = stack(&w);
        trace_op("quantize", copy_name(spec.axis), dims[0] * dims[1], dims[2]);
        let copies = with_elements!(w, |values| each_matrix(
            values,
            dims,
            |values, rows, cols| {
                let (amax, policy) = (amax_of(values, rows, cols, None), policy(&spec.copy));
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
                let amax = amax_of(values, rows, cols, None);
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

    fn nvfp4_matmul_group_rows(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let tokens = a.layout.outer();
        let groups = ranges(&offsets, tokens);
        let columns = b.layout.outer() / groups.len();
        let parts = groups.iter().enumerate().map(|(group, rows)| {
            let bias = match &bias {
                Bias::Absent => Bias::Absent,
                Bias::Vector(bias) => Bias::Vector(row(bias.clone(), group, columns)),
            };
            let a = stored_rows(&a, rows.clone(), group);
            let b = stored_rows(&b, group * columns..(group + 1) * columns, group);
            Flex::nvfp4_matmul(a, b, bias, dtype)
        });
        with_rest(parts.collect(), tokens, columns, dtype)
    }

    fn nvfp4_matmul_group_depth(
        a: Packed<Self>,
        b: Packed<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (m, n) = (a.layout.outer(), b.layout.outer());
        let groups = ranges(&offsets, tokens);
        let blocks = block_ranges(&groups, a.layout.hadamard);
        let parts = blocks.iter().enumerate().map(|(group, blocks)| {
            let a = stored_blocks(&a, blocks.clone(), group);
            let b = stored_blocks(&b, blocks.clone(), group);
            Flex::nvfp4_matmul(a, b, Bias::Absent, dtype)
        });
        let stacked = Flex::float_cat(parts.collect(), 0);
        Flex::float_reshape(stacked, Shape::new([groups.len(), m, n]))
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

    fn nvfp4_float_group_rows(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        transposed: bool,
    ) -> FloatTensor<Self> {
        let (tokens, _) = matrix(&x);
        let dtype = float_dtype(x.dtype());
        let [_, d_in, d_out] = stack(&w);
        let columns = if transposed { d_in } else { d_out };
        let w = in_type(w, dtype);
        let groups = ranges(&offsets, tokens);
        let parts = groups.into_iter().enumerate().map(|(group, rows)| {
            let mut w = expert(w.clone(), group, [d_in, d_out]);
            if transposed {
                w = Flex::float_swap_dims(w, 0, 1);
            }
            let y = product(rows_of(x.clone(), rows), w);
            match &bias {
                Bias::Absent => y,
                Bias::Vector(bias) => {
                    let bias = in_type(row(bias.clone(), group, columns), dtype);
                    Flex::float_add(y, Flex::float_reshape(bias, Shape::new([1, columns])))
                }
            }
        });
        with_rest(parts.collect(), tokens, columns, dtype)
    }

    fn nvfp4_float_group_depth(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let ((tokens, m), (_, n)) = (matrix(&x), matrix(&dy));
        let groups = ranges(&offsets, tokens);
        let count = groups.len();
        let parts = groups.into_iter().map(|rows| {
            let x = Flex::float_swap_dims(rows_of(x.clone(), rows.clone()), 0, 1);
            product(x, rows_of(dy.clone(), rows))
        });
        let stacked = Flex::float_cat(parts.collect(), 0);
        in_type(
            Flex::float_reshape(stacked, Shape::new([count, m, n])),
            dtype,
        )
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

/// The blocks of each group in a column-wise copy.
fn block_ranges(groups: &[Range<usize>], hadamard: Option<Hadamard>) -> Vec<Range<usize>> {
    let unit = hadamard.map_or(BLOCK, |hadamard| hadamard.size().elements());
    let mut end = 0;
    groups
        .iter()
        .map(|rows| {
            let start = end;
            end += rows.len().next_multiple_of(unit) / BLOCK;
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

/// The largest magnitude for a copy, of the transformed values where there is a transform.
fn amax_of<T: Element>(values: &[T], rows: usize, cols: usize, hadamard: Option<Hadamard>) -> Amax {
    Amax::Tensor(match &hadamard {
        Some(hadamard) => reference::amax_rht(values, rows, cols, hadamard),
        None => reference::amax(values),
    })
}

/// What `copy` asks of the oracle.
fn policy(copy: &CopySpec) -> CopyPolicy {
    CopyPolicy {
        hadamard: copy.hadamard,
        scaling: copy.scaling,
        ..CopyPolicy::new(copy.rounding)
    }
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
    let layout = copy.layout(rows, cols, PackedAxis::Cols);
    let blocks = layout.blocks();
    let mut codes = vec![0; rows * blocks * 8];
    let mut scales = vec![0; rows * blocks];
    let mut maxima = Vec::with_capacity(groups.len());
    for group in groups {
        let part = &values[group.start * cols..group.end * cols];
        let amax = amax_of(part, group.len(), cols, None);
        maxima.push(amax.of(0));
        let policy = policy(copy);
        let first = group.start * blocks;
        let packed = trusted(reference::quantize(
            part,
            group.len(),
            cols,
            PackedAxis::Cols,
            &amax,
            &policy,
            first as u64,
        ));
        codes[first * 8..][..packed.codes().len()].copy_from_slice(packed.codes());
        scales[first..][..packed.scales().len()].copy_from_slice(packed.scales());
    }
    upload(codes, scales, maxima, layout)
}

/// The column-wise copies of the groups side by side; zeros behind the last.
fn quantize_columns<T: Element>(
    values: &[T],
    (rows, cols): (usize, usize),
    groups: &[Range<usize>],
    copy: &CopySpec,
) -> Packed<Flex> {
    let hadamard = copy.hadamard;
    let pitch = side_by_side_rows(rows, groups.len(), hadamard);
    let layout = copy.layout(pitch, cols, PackedAxis::Rows);
    let pitch = layout.blocks();
    let mut codes = vec![0; cols * pitch * 8];
    let mut scales = vec![0; cols * pitch];
    let mut maxima = Vec::with_capacity(groups.len());
    for (group, place) in groups.iter().zip(block_ranges(groups, hadamard)) {
        let part = &values[group.start * cols..group.end * cols];
        let amax = amax_of(part, group.len(), cols, hadamard);
        maxima.push(amax.of(0));
        let policy = policy(copy);
        let first = (cols * place.start) as u64;
        let packed = trusted(reference::quantize(
            part,
            group.len(),
            cols,
            PackedAxis::Rows,
            &amax,
            &policy,
            first,
        ));
        let blocks = place.len();
        for column in 0..cols {
            let (from, to) = (column * blocks, column * pitch + place.start);
            codes[to * 8..][..blocks * 8]
                .copy_from_slice(&packed.codes()[from * 8..][..blocks * 8]);
            scales[to..][..blocks].copy_from_slice(&packed.scales()[from..][..blocks]);
        }
    }
    upload(codes, scales, maxima, layout)
}

fn upload(codes: Vec<u8>, scales: Vec<u8>, amax: Vec<f32>, layout: PackedLayout) -> Packed<Flex> {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let groups = amax.len();
    let words: Vec<u32> = codes
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();
    Packed {
        codes: FlexTensor::from_data(TensorData::new(words, [outer, blocks * 2])),
        scales: FlexTensor::from_data(TensorData::new(scales, [outer, blocks])),
        amax: FlexTensor::from_data(TensorData::new(amax, [groups])),
        layout,
    }
}

/// Some stored rows of a row-wise copy, with the amax of their group.
fn stored_rows(packed: &Packed<Flex>, rows: Range<usize>, group: usize) -> Packed<Flex> {
    let blocks = packed.layout.blocks();
    Packed {
        codes: int_part(&packed.codes, rows.clone(), 0..blocks * 2),
        scales: int_part(&packed.scales, rows.clone(), 0..blocks),
        amax: amax_part(packed, group),
        layout: PackedLayout {
            rows: rows.len(),
            ..packed.layout
        },
    }
}

/// Some blocks of every stored row of a column-wise copy, with the amax of their group.
fn stored_blocks(packed: &Packed<Flex>, blocks: Range<usize>, group: usize) -> Packed<Flex> {
    let outer = packed.layout.outer();
    Packed {
        codes: int_part(&packed.codes, 0..outer, blocks.start * 2..blocks.end * 2),
        scales: int_part(&packed.scales, 0..outer, blocks.clone()),
        amax: amax_part(packed, group),
        layout: PackedLayout {
            rows: blocks.len() * BLOCK,
            ..packed.layout
        },
    }
}

fn int_part(tensor: &FlexTensor, rows: Range<usize>, cols: Range<usize>) -> FlexTensor {
    let slices = [Slice::from(rows), Slice::from(cols)];
    Flex::int_slice(tensor.clone(), &slices).to_contiguous()
}

fn amax_part(packed: &Packed<Flex>, group: usize) -> FlexTensor {
    let slices = [Slice::from(group..group + 1)];
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

/// Matrix `index` of a stack.
fn expert(w: FlexTensor, index: usize, [rows, cols]: [usize; 2]) -> FlexTensor {
    let slices = [index..index + 1, 0..rows, 0..cols].map(Slice::from);
    Flex::float_reshape(Flex::float_slice(w, &slices), Shape::new([rows, cols]))
}

/// `a · b`, also where it has no elements or no contraction.
fn product(a: FlexTensor, b: FlexTensor) -> FlexTensor {
    let ((m, k), (_, n)) = (matrix(&a), matrix(&b));
    if m * n * k == 0 {
        FlexTensor::zeros(Shape::new([m, n]), a.dtype())
    } else {
        Flex::float_matmul(a, b)
    }
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
