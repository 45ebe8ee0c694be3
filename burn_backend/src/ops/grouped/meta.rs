//! Shapes and types of the results, for Fusion, which needs them before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::{DType, FloatDType, Shape};
use nvfp4_kernels::{BlockScaling, Usage};

use super::super::packed::{
    BiasMetadata, MxPackedMetadata, OperandMetadata, PackedMetadata, PackedPairMetadata, mx_with,
    stored_rows,
};
use super::super::{CopySpec, EdenSpec, PackedLayout, PairSpec, QuantizeSpec};
use super::arrangement::Arrangement;
use super::{GroupPairSpec, RowGradientsMetadata, RowGroupsMetadata, maxima};

fn packed(layout: PackedLayout, groups: usize) -> PackedMetadata {
    let (outer, blocks) = (layout.outer(), layout.blocks());
    let maxima = maxima(&layout, groups);
    PackedMetadata {
        codes: TensorSpec::new(Shape::new([outer, blocks * 2]), DType::U32),
        scales: TensorSpec::new(Shape::new([outer, blocks]), DType::U8),
        amax: TensorSpec::new(Shape::new([maxima]), DType::F32),
        layout,
    }
}

fn stack(w: &TensorSpec, usage: Usage, copy: &CopySpec) -> PackedMetadata {
    let dims = [w.shape[0], w.shape[1], w.shape[2]];
    packed(PackedLayout::stack(dims, usage, copy.scaling), dims[0])
}

fn groups(x: &TensorSpec, offsets: &TensorSpec, usage: Usage, copy: &CopySpec) -> PackedMetadata {
    let arrangement = Arrangement::Offsets(offsets.shape[0] - 1);
    let layout = arrangement.copy((x.shape[0], x.shape[1]), usage, copy);
    packed(layout, arrangement.count())
}

pub(super) fn stack_meta(w: &TensorSpec, spec: &QuantizeSpec) -> PackedMetadata {
    stack(w, spec.usage, &spec.copy)
}

pub(super) fn stack_tiles_meta(
    w: &TensorSpec,
    usage: &Usage,
    scaling: &BlockScaling,
) -> PackedMetadata {
    stack(w, *usage, &CopySpec::of_tiles(*scaling))
}

pub(super) fn stack_pair_meta(w: &TensorSpec, spec: &PairSpec) -> PackedPairMetadata {
    let [row, col] = spec.copies();
    PackedPairMetadata {
        row: stack(w, Usage::Rowwise, &row),
        col: stack(w, Usage::Columnwise, &col),
    }
}

pub(super) fn group_meta(
    x: &TensorSpec,
    offsets: &TensorSpec,
    spec: &QuantizeSpec,
) -> PackedMetadata {
    groups(x, offsets, spec.usage, &spec.copy)
}

pub(super) fn group_pair_meta(
    x: &TensorSpec,
    offsets: &TensorSpec,
    spec: &GroupPairSpec,
) -> PackedPairMetadata {
    PackedPairMetadata {
        row: groups(x, offsets, Usage::Rowwise, &spec.row),
        col: groups(x, offsets, Usage::Columnwise, &spec.col),
    }
}

pub(super) fn eden_groups_meta(
    x: &TensorSpec,
    groups: &RowGroupsMetadata,
    spec: &EdenSpec,
) -> PackedMetadata {
    let arrangement = groups.arrangement();
    let layout = arrangement.eden((x.shape[0], x.shape[1]), spec);
    packed(layout, arrangement.count())
}

pub(super) fn eden_groups_packed_meta(
    source: &PackedMetadata,
    groups: &RowGroupsMetadata,
    spec: &EdenSpec,
) -> PackedMetadata {
    let PackedLayout { rows, cols, .. } = source.layout;
    let arrangement = groups.arrangement();
    packed(arrangement.eden((rows, cols), spec), arrangement.count())
}

pub(super) fn mx_groups_meta(
    x: &TensorSpec,
    groups: &RowGroupsMetadata,
    usage: &Usage,
) -> MxPackedMetadata {
    mx_with(groups.arrangement().mx((x.shape[0], x.shape[1]), *usage))
}

pub(super) fn mx_groups_packed_meta(
    source: &PackedMetadata,
    groups: &RowGroupsMetadata,
    usage: &Usage,
    _via: &FloatDType,
) -> MxPackedMetadata {
    let PackedLayout { rows, cols, .. } = source.layout;
    mx_with(groups.arrangement().mx((rows, cols), *usage))
}

pub(super) fn spread_meta(_values: &TensorSpec, _offsets: &TensorSpec, rows: &usize) -> TensorSpec {
    TensorSpec::new(Shape::new([*rows]), DType::F32)
}

pub(super) fn rows_meta(
    a: &OperandMetadata,
    b: &OperandMetadata,
    _bias: &BiasMetadata,
    offsets: &TensorSpec,
    dtype: &FloatDType,
) -> TensorSpec {
    let columns = stored_rows(b) / (offsets.shape[0] - 1);
    TensorSpec::new(Shape::new([stored_rows(a), columns]), (*dtype).into())
}

pub(super) fn depth_meta(
    a: &OperandMetadata,
    b: &OperandMetadata,
    offsets: &TensorSpec,
    _tokens: &usize,
    dtype: &FloatDType,
) -> TensorSpec {
    let shape = [offsets.shape[0] - 1, stored_rows(a), stored_rows(b)];
    TensorSpec::new(Shape::new(shape), (*dtype).into())
}

pub(super) fn sums_meta(x: &TensorSpec, offsets: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([offsets.shape[0] - 1, x.shape[1]]), DType::F32)
}

pub(super) fn add_rows_meta(x: &TensorSpec, places: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([places.shape[0], x.shape[1]]), x.dtype)
}

pub(super) fn weigh_rows_meta(
    x: &TensorSpec,
    _weights: &TensorSpec,
    places: &TensorSpec,
) -> TensorSpec {
    add_rows_meta(x, places)
}

pub(super) fn weigh_rows_backward_meta(
    _dout: &TensorSpec,
    y: &TensorSpec,
    weights: &TensorSpec,
    _places: &TensorSpec,
    _choices: &TensorSpec,
) -> RowGradientsMetadata {
    RowGradientsMetadata {
        rows: TensorSpec::new(y.shape.clone(), y.dtype),
        weights: TensorSpec::new(weights.shape.clone(), DType::F32),
    }
}
