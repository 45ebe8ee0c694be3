//! Permutation of rows of tokens between batch order and expert order.

use burn_core::backend::ops::IntTensorOps;
use burn_core::tensor::{DType, IntDType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use nvfp4_kernels::moe;

use super::super::rows;
use super::super::tensors::{GatherSpec, MaybeTensor, Named, RowGroups, UnpermuteGradients};
use super::found_amax;
use super::tensors::{Source, device_groups, group_offsets, launched, matrix, new_tensor, result};

pub(super) fn broadcast_group_values(
    values: CubeTensor,
    offsets: CubeTensor,
    rows: usize,
) -> CubeTensor {
    let values = into_contiguous(values);
    let groups = group_offsets(offsets);
    let (client, handle) = (&values.client, &values.handle);
    let spread = launched(moe::broadcast_group_values(client, handle, &groups, rows));
    new_tensor(&values, spread, Shape::new([rows]), DType::F32)
}

pub(super) fn segment_sum(x: CubeTensor, offsets: CubeTensor) -> CubeTensor {
    let (x, groups) = (Source::new(x), group_offsets(offsets));
    let sums = launched(moe::segment_sum(&x.tensor.client, &x.matrix, &groups));
    result(&x.tensor, sums)
}

pub(super) fn column_sums(x: CubeTensor) -> CubeTensor {
    let Source { tensor, matrix } = Source::new(x);
    let sums = launched(moe::column_sums(&tensor.client, &matrix));
    new_tensor(&tensor, sums.handle, Shape::new([sums.cols]), DType::F32)
}

pub(super) fn sum_rows(
    x: CubeTensor,
    weights: MaybeTensor<CubeBackend>,
    places: CubeTensor,
    named: Named,
) -> CubeTensor {
    if !has_whole_words(&x) {
        return rows::sum::<CubeBackend>(x, weights, places, named);
    }
    let (x, places) = (into_contiguous(x), numbers(places));
    let weights = weights.into_option().map(into_contiguous);
    let shape = places.meta.shape();
    let found = launched(moe::moe_unpermute(
        &x.client,
        &matrix(&x),
        &places.handle,
        weights.as_ref().map(|weights| &weights.handle),
        (shape[0], shape[1]),
    ));
    result(&x, found)
}

pub(super) fn unpermute_backward(
    dout: CubeTensor,
    y: CubeTensor,
    weights: CubeTensor,
    (places, choices): (CubeTensor, CubeTensor),
    named: Named,
) -> UnpermuteGradients<CubeBackend> {
    if !has_whole_words(&y) {
        let numbers = (places, choices);
        return rows::unpermute_backward::<CubeBackend>(dout, y, weights, numbers, named);
    }
    let [dout, y, weights] = [dout, y, weights].map(into_contiguous);
    let choices = numbers(choices);
    let shape = weights.meta.shape().clone();
    let (by_rows, by_weights) = launched(moe::moe_unpermute_backward(
        &y.client,
        &matrix(&dout),
        &matrix(&y),
        &choices.handle,
        &weights.handle,
        (shape[1], device_named(named)),
    ));
    UnpermuteGradients {
        rows: result(&y, by_rows),
        weights: new_tensor(&y, by_weights, shape, DType::F32),
    }
}

pub(super) fn gather_rows(
    x: CubeTensor,
    index: CubeTensor,
    groups: RowGroups<CubeBackend>,
    spec: GatherSpec,
) -> CubeTensor {
    if !has_whole_words(&x) {
        return rows::gather::<CubeBackend>(x, index, spec.named);
    }
    let (x, index) = (into_contiguous(x), numbers(index));
    let count = index.meta.shape()[0];
    let (groups, request) = (device_groups(groups), found_amax::request(spec.amax));
    let (found, amax) = launched(moe::moe_permute_with_amaxes(
        &x.client,
        &matrix(&x),
        (&index.handle, count),
        &groups,
        &request,
    ));
    found_amax::remember((&found, &groups), request, amax);
    result(&x, found)
}

fn device_named(named: Named) -> moe::Named {
    match named {
        Named::All => moe::Named::All,
        Named::Some => moe::Named::Some,
    }
}

/// Returns true if the rows of `x` are whole words, as the permutation kernels require.
fn has_whole_words(x: &CubeTensor) -> bool {
    (x.meta.shape()[1] * x.dtype.size()).is_multiple_of(4)
}

/// Converts row indices to the kernels' form.
fn numbers(tensor: CubeTensor) -> CubeTensor {
    let tensor = match tensor.dtype {
        // The same bits: no index is negative.
        DType::I32 | DType::U32 => tensor,
        _ => CubeBackend::int_cast(tensor, IntDType::U32),
    };
    into_contiguous(tensor)
}
