//! Sums of indexed rows, with backend-independent operations.

use burn_core::backend::{
    Backend, Scalar, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape, Slice};

use super::dtype::cast;
use super::float_dtype;
use super::tensors::{MaybeTensor, Named, UnpermuteGradients};

/// Implements [`nvfp4_sum_rows`](super::Nvfp4KernelOps::nvfp4_sum_rows).
pub(super) fn sum<B: Backend>(
    x: FloatTensor<B>,
    weights: MaybeTensor<B>,
    places: IntTensor<B>,
    named: Named,
) -> FloatTensor<B> {
    let x = with_none::<B>(x, named);
    let [rows, copies] = [places.shape()[0], places.shape()[1]];
    let weights = weights.into_option();
    if copies == 1 && weights.is_none() {
        return B::float_select(x, 0, B::int_reshape(places, Shape::new([rows])));
    }
    let dtype = float_dtype(x.dtype());
    let sum = (0..copies)
        .map(|copy| {
            let picked = rows_at::<B>(x.clone(), places.clone(), copy);
            match &weights {
                Some(weights) => B::float_mul(picked, column::<B>(weights.clone(), copy)),
                None => picked,
            }
        })
        .reduce(B::float_add)
        .expect("a row has a copy");
    cast::<B>(sum, dtype)
}

/// Implements
/// [`nvfp4_moe_unpermute_backward`](super::Nvfp4KernelOps::nvfp4_moe_unpermute_backward).
pub(super) fn unpermute_backward<B: Backend>(
    dout: FloatTensor<B>,
    y: FloatTensor<B>,
    weights: FloatTensor<B>,
    (places, choices): (IntTensor<B>, IntTensor<B>),
    named: Named,
) -> UnpermuteGradients<B> {
    let dtype = float_dtype(y.dtype());
    let dout = cast::<B>(dout, FloatDType::F32);
    let y = with_none::<B>(y, named);
    let [tokens, copies] = [places.shape()[0], places.shape()[1]];
    // Each slot went to one token, with one weight.
    let weights = B::float_reshape(weights, Shape::new([tokens * copies, 1]));
    let weights = B::float_select(with_none::<B>(weights, named), 0, choices.clone());
    let token = B::int_div_scalar(choices, Scalar::from(copies as i64));
    let rows = B::float_select(with_none::<B>(dout.clone(), named), 0, token);
    let columns = (0..copies).map(|copy| {
        let picked = rows_at::<B>(y.clone(), places.clone(), copy);
        B::float_sum_dim(B::float_mul(picked, dout.clone()), 1)
    });
    UnpermuteGradients {
        rows: cast::<B>(B::float_mul(rows, weights), dtype),
        weights: B::float_cat(columns.collect(), 1),
    }
}

/// Implements [`nvfp4_gather_rows`](super::Nvfp4KernelOps::nvfp4_gather_rows).
pub(super) fn gather<B: Backend>(
    x: FloatTensor<B>,
    numbers: IntTensor<B>,
    named: Named,
) -> FloatTensor<B> {
    B::float_select(with_none::<B>(x, named), 0, numbers)
}

/// Appends a row of zeros to `x` for indices out of range, which equal the number of rows.
fn with_none<B: Backend>(x: FloatTensor<B>, named: Named) -> FloatTensor<B> {
    match named {
        Named::All => x,
        Named::Some => {
            let (cols, dtype) = (x.shape()[1], float_dtype(x.dtype()));
            let zeros = B::float_zeros(Shape::new([1, cols]), &x.device(), dtype);
            B::float_cat(vec![x, zeros], 0)
        }
    }
}

/// Returns the rows of `x` at column `copy` of `places` (`[tokens, copies]`), in `f32`.
fn rows_at<B: Backend>(x: FloatTensor<B>, places: IntTensor<B>, copy: usize) -> FloatTensor<B> {
    let tokens = places.shape()[0];
    let slices = [Slice::from(0..tokens), Slice::from(copy..copy + 1)];
    let places = B::int_reshape(B::int_slice(places, &slices), Shape::new([tokens]));
    cast::<B>(B::float_select(x, 0, places), FloatDType::F32)
}

/// Returns column `index` of a matrix, `[rows, 1]`.
fn column<B: Backend>(x: FloatTensor<B>, index: usize) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_slice(x, &[Slice::from(0..rows), Slice::from(index..index + 1)])
}
