//! Rows by number, with the operations that every backend has.

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType, Scalar, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape, Slice};

use super::super::operands::cast;
use super::float_dtype;

/// The gradients of a weighted sum of rows.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct RowGradients<B: Backend> {
    /// By the rows, of their shape and type.
    pub rows: FloatTensor<B>,
    /// By the weights, `f32[tokens, copies]`.
    pub weights: FloatTensor<B>,
}

/// See [`nvfp4_add_rows`](super::Nvfp4GroupedOps::nvfp4_add_rows).
pub(super) fn add<B: Backend>(x: FloatTensor<B>, places: IntTensor<B>) -> FloatTensor<B> {
    let [rows, copies] = [places.shape()[0], places.shape()[1]];
    if copies == 1 {
        return B::float_select(x, 0, B::int_reshape(places, Shape::new([rows])));
    }
    let dtype = float_dtype(x.dtype());
    let sum = (0..copies)
        .map(|copy| rows_at::<B>(x.clone(), places.clone(), copy))
        .reduce(B::float_add)
        .expect("a row has a copy");
    cast::<B>(sum, dtype)
}

/// See [`nvfp4_weigh_rows`](super::Nvfp4GroupedOps::nvfp4_weigh_rows).
pub(super) fn weigh<B: Backend>(
    x: FloatTensor<B>,
    weights: FloatTensor<B>,
    places: IntTensor<B>,
) -> FloatTensor<B> {
    let dtype = float_dtype(x.dtype());
    let sum = (0..places.shape()[1])
        .map(|copy| {
            let picked = rows_at::<B>(x.clone(), places.clone(), copy);
            B::float_mul(picked, column::<B>(weights.clone(), copy))
        })
        .reduce(B::float_add)
        .expect("a row has a copy");
    cast::<B>(sum, dtype)
}

/// See [`nvfp4_weigh_rows_backward`](super::Nvfp4GroupedOps::nvfp4_weigh_rows_backward).
pub(super) fn weigh_backward<B: Backend>(
    dout: FloatTensor<B>,
    y: FloatTensor<B>,
    weights: FloatTensor<B>,
    places: IntTensor<B>,
    choices: IntTensor<B>,
) -> RowGradients<B> {
    let dtype = float_dtype(y.dtype());
    let dout = cast::<B>(dout, FloatDType::F32);
    let [tokens, copies] = [places.shape()[0], places.shape()[1]];
    // Each slot went to one token, with one weight.
    let weights = B::float_reshape(weights, Shape::new([tokens * copies, 1]));
    let weights = B::float_select(weights, 0, choices.clone());
    let token = B::int_div_scalar(choices, Scalar::from(copies as i64));
    let rows = B::float_select(dout.clone(), 0, token);
    let columns = (0..copies).map(|copy| {
        let picked = rows_at::<B>(y.clone(), places.clone(), copy);
        B::float_sum_dim(B::float_mul(picked, dout.clone()), 1)
    });
    RowGradients {
        rows: cast::<B>(B::float_mul(rows, weights), dtype),
        weights: B::float_cat(columns.collect(), 1),
    }
}

/// The rows of `x` at column `copy` of `places` (`[tokens, copies]`), in `f32`.
fn rows_at<B: Backend>(x: FloatTensor<B>, places: IntTensor<B>, copy: usize) -> FloatTensor<B> {
    let tokens = places.shape()[0];
    let slices = [Slice::from(0..tokens), Slice::from(copy..copy + 1)];
    let places = B::int_reshape(B::int_slice(places, &slices), Shape::new([tokens]));
    cast::<B>(B::float_select(x, 0, places), FloatDType::F32)
}

/// Column `index` of a matrix, `[rows, 1]`.
fn column<B: Backend>(x: FloatTensor<B>, index: usize) -> FloatTensor<B> {
    let rows = x.shape()[0];
    B::float_slice(x, &[Slice::from(0..rows), Slice::from(index..index + 1)])
}
