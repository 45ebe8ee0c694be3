//! Rows by number: what a mixture of experts does to tokens before and after its experts.
//!
//! Tokens are gathered for the experts that they go to, and each token's results are added up with
//! weights. Numbers are `u32` in device memory. A number that is not below the rows of its matrix
//! names no row, which is as good as one of zeros; whatever the numbers are, nothing else is read
//! or written.

use cubecl::{prelude::*, server::Handle};

use super::groups::to_u32;
use crate::launch::{Words, buffer, cubes, grid, per_word};
use crate::{
    Nvfp4Error,
    capabilities::{conversion_of, is_cpu},
    cube::{
        codec::Conversion,
        exact::product,
        words::{pack, unpack},
    },
    memory::{address_type, allocate, check_memory},
    tensor::{FloatKind, Matrix},
    zeroed::zeros,
};

/// Units that share a row of the backward's sums, where there are planes.
const PLANES_PER_CUBE: usize = 8;

/// Whether every number names a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Named {
    /// Every one does.
    All,
    /// Some name none: that of a row of another device.
    Some,
}

/// `out[i] = x[numbers[i]]`, for `rows` numbers (`u32`). Rows whose number names no row of `x` are
/// not written.
///
/// # Errors
/// When a buffer is smaller than its shape, the rows of `x` are not whole words of 32 bits, or a
/// size does not fit 32 bits.
pub fn moe_permute(
    client: &Client,
    x: &Matrix,
    numbers: &Handle,
    rows: usize,
) -> Result<Matrix, Nvfp4Error> {
    check_words("x", x)?;
    to_u32("rows", rows)?;
    check_memory("numbers", numbers, rows * 4)?;
    let out = Matrix::empty(client, rows, x.cols, x.dtype);
    if out.is_empty() {
        return Ok(out);
    }
    let [from, to] = words_of([x, &out]);
    let per_row = per_row(&from, x);
    let (count, dim) = grid(client, rows * per_row);
    // SAFETY: `numbers` was checked; the kernel stays below the rows of both matrices.
    unsafe {
        moe_permute_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(out.len())),
            from.width,
            from.arg(),
            buffer(numbers, rows),
            to.arg(),
            x.rows,
            rows,
            per_row,
        );
    }
    Ok(out)
}

/// `out[i] = Σⱼ weights[i, j] · x[places[i, j]]` for `rows` rows `i` of `copies` places each:
/// products and sums in `f32`, in the order of `j`, rounded once to the type of `x`. Without
/// `weights` they are 1; with one copy besides, rows are only moved.
///
/// `places` is `u32[rows, copies]`, `weights` `f32[rows, copies]`.
///
/// # Errors
/// When a buffer is smaller than its shape, the rows of `x` are not whole words of 32 bits, or a
/// size does not fit 32 bits.
pub fn moe_unpermute(
    client: &Client,
    x: &Matrix,
    places: &Handle,
    weights: Option<&Handle>,
    (rows, copies): (usize, usize),
) -> Result<Matrix, Nvfp4Error> {
    check_words("x", x)?;
    to_u32("rows", rows * copies)?;
    check_memory("places", places, rows * copies * 4)?;
    if let Some(weights) = weights {
        check_memory("weights", weights, rows * copies * 4)?;
    }
    let out = Matrix::empty(client, rows, x.cols, x.dtype);
    if out.is_empty() {
        return Ok(out);
    }
    let [from, to] = words_of([x, &out]);
    let per_row = per_row(&from, x);
    let (count, dim) = grid(client, rows * per_row);
    let weighted = weights.is_some();
    // SAFETY: `places` and `weights` were checked; the kernel stays below the rows of both
    // matrices.
    unsafe {
        moe_unpermute_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len().max(out.len())),
            from.width,
            from.arg(),
            WeightedRowsLaunch::new(
                buffer(places, rows * copies),
                buffer(weights.unwrap_or(places), rows * copies),
                copies,
            ),
            to.arg(),
            x.rows,
            rows,
            per_row,
            UnpermutePlan {
                weighted,
                kind: x.dtype,
                conversion: conversion_of(client),
            },
        );
    }
    Ok(out)
}

/// The gradients of [`moe_unpermute`] with weights, given that of its output, `grad` (`[tokens,
/// cols]`), in one read: by the rows of `x`, `choice = choices[s]` being the place `t * copies + j`
/// that names row `s`, `dx[s] = weights[choice] · grad[t]`, rounded to the type of `x`; and by the
/// weights, `f32[tokens, copies]`, `dw[choice] = Σ grad[t] · x[s]`.
///
/// Every place names a row of `x`, and no row twice; with [`Named::Some`] places and rows may name
/// none: such rows of `dx` are not written, and such weights have a gradient of 0.
///
/// # Errors
/// When a buffer is smaller than its shape, `grad` has other columns or another type than `x`, `x`
/// has not `tokens * copies` rows, rows are not whole words of 32 bits, or a size does not fit 32
/// bits.
pub fn moe_unpermute_backward(
    client: &Client,
    grad: &Matrix,
    x: &Matrix,
    choices: &Handle,
    weights: &Handle,
    (copies, named): (usize, Named),
) -> Result<(Matrix, Handle), Nvfp4Error> {
    check_words("grad", grad)?;
    check_words("x", x)?;
    let slots = grad.rows * copies;
    if (x.rows, x.cols, x.dtype) != (slots, grad.cols, grad.dtype) {
        return Err(Nvfp4Error::shape(
            "x",
            format!("{} x {} {:?}", x.rows, x.cols, x.dtype),
            format!(
                "{slots} x {} {:?}: {copies} rows for each of `grad`",
                grad.cols, grad.dtype
            ),
        ));
    }
    to_u32("x", slots)?;
    check_memory("choices", choices, slots * 4)?;
    check_memory("weights", weights, slots * 4)?;
    let out = Matrix::empty(client, slots, x.cols, x.dtype);
    let by_weights = match named {
        Named::All => allocate(client, slots * 4),
        Named::Some => zeros(client, slots),
    };
    if slots == 0 {
        return Ok((out, by_weights));
    }
    let [from, rows, to] = words_of([grad, x, &out]);
    let per_row = per_row(&from, x);
    let planes = !is_cpu(client);
    let (count, dim) = cubes(client, slots.div_ceil(PLANES_PER_CUBE));
    // SAFETY: the buffers were checked; the kernel stays below the rows of the matrices.
    unsafe {
        moe_unpermute_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            from.width,
            from.arg(),
            rows.arg(),
            WeightedRowsLaunch::new(buffer(choices, slots), buffer(weights, slots), copies),
            to.arg(),
            buffer(&by_weights, slots),
            slots,
            per_row,
            UnpermuteBackwardPlan {
                planes,
                kind: x.dtype,
                conversion: conversion_of(client),
            },
        );
    }
    Ok((out, by_weights))
}

/// Fail unless the rows of `x` lie in its memory, in whole words.
fn check_words(argument: &'static str, x: &Matrix) -> Result<(), Nvfp4Error> {
    x.check(argument)?;
    to_u32(argument, x.rows)?;
    if x.cols.is_multiple_of(per_word(x.dtype)) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        argument,
        format!("{} columns of {:?}", x.cols, x.dtype),
        "rows of whole words of 32 bits: an even number of 16-bit elements",
    ))
}

/// How matrices with the same columns are loaded and stored: as wide as all of them allow.
fn words_of<const N: usize>(matrices: [&Matrix; N]) -> [Words; N] {
    let mut words = matrices.map(Words::of);
    let width = words.iter().map(|words| words.width).min().unwrap_or(1);
    for words in &mut words {
        words.width = width;
    }
    words
}

/// Loads that a row of `x` takes.
fn per_row(words: &Words, x: &Matrix) -> usize {
    x.cols / per_word(x.dtype) / words.width
}

/// One unit moves every `units`-th vector of the `rows` rows of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn moe_permute_kernel<N: Size>(
    x: &[Vector<u32, N>],
    numbers: &[u32],
    out: &mut [Vector<u32, N>],
    x_rows: usize,
    rows: usize,
    per_row: usize,
) {
    let mut item = ABSOLUTE_POS;
    while item < rows * per_row {
        let row = item / per_row;
        let number = numbers[row] as usize;
        if number < x_rows {
            out[item] = x[number * per_row + item - row * per_row];
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Rows that are named by number, with weights, in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct WeightedRows {
    /// The numbers: of the rows of `x` by places, or in the backward of the places by rows of `x`.
    pub numbers: Box<[u32]>,
    /// The weights of the places.
    pub weights: Box<[f32]>,
    /// Places of a row of the output.
    pub copies: usize,
}

/// The comptime choices of [`moe_unpermute_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnpermutePlan {
    /// Whether there are weights.
    pub weighted: bool,
    /// The element type of the matrices.
    pub kind: FloatKind,
    /// Who converts.
    pub conversion: Conversion,
}

/// One unit adds up every `units`-th vector of the `rows` rows of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn moe_unpermute_kernel<N: Size>(
    x: &[Vector<u32, N>],
    from: WeightedRows,
    out: &mut [Vector<u32, N>],
    x_rows: usize,
    rows: usize,
    per_row: usize,
    #[comptime] plan: UnpermutePlan,
) {
    let (weighted, kind, conversion) = comptime!((plan.weighted, plan.kind, plan.conversion));
    let copies = from.copies;
    let width = N::value();
    let elements = comptime!(width * per_word(kind));
    let mut item = ABSOLUTE_POS;
    while item < rows * per_row {
        let row = item / per_row;
        let column = item - row * per_row;
        let mut sums = Array::<f32>::new(elements);
        #[unroll]
        for i in 0..elements {
            // What is added to -0 stays as it is, zeros included. (CubeCL writes the literal as an
            // integer, 0.)
            sums[i] = f32::reinterpret(0x8000_0000u32);
        }
        for copy in 0..copies {
            let place = row * copies + copy;
            let number = from.numbers[place] as usize;
            if number < x_rows {
                let vector = x[number * per_row + column];
                let mut weight = 1.0f32;
                if comptime!(weighted) {
                    weight = from.weights[place];
                }
                #[unroll]
                for i in 0..elements {
                    let value = element(vector, i, kind);
                    if comptime!(weighted) {
                        sums[i] += product(weight, value, conversion);
                    } else {
                        sums[i] += value;
                    }
                }
            }
        }
        out[item] = packed::<N>(&sums, kind, conversion);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// The comptime choices of [`moe_unpermute_backward_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnpermuteBackwardPlan {
    /// Whether there are planes.
    pub planes: bool,
    /// The element type of the matrices.
    pub kind: FloatKind,
    /// Who converts.
    pub conversion: Conversion,
}

/// One plane, or one unit where there are none, makes every `planes`-th row of `x_grad`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn moe_unpermute_backward_kernel<N: Size>(
    grad: &[Vector<u32, N>],
    x: &[Vector<u32, N>],
    choices: WeightedRows,
    x_grad: &mut [Vector<u32, N>],
    weight_grads: &mut [f32],
    slots: usize,
    per_row: usize,
    #[comptime] plan: UnpermuteBackwardPlan,
) {
    let (planes, kind, conversion) = comptime!((plan.planes, plan.kind, plan.conversion));
    let width = N::value();
    let elements = comptime!(width * per_word(kind));
    let mut lane = 0usize;
    let mut lanes = 1usize;
    if comptime!(planes) {
        lane = UNIT_POS_PLANE as usize;
        lanes = PLANE_DIM as usize;
    }
    let mut slot = ABSOLUTE_POS / lanes;
    while slot < slots {
        let choice = choices.numbers[slot] as usize;
        let named = choice < slots;
        let mut sum = 0.0f32;
        if named {
            let token = choice / choices.copies;
            let weight = choices.weights[choice];
            let mut column = lane;
            while column < per_row {
                let from = grad[token * per_row + column];
                let own = x[slot * per_row + column];
                let mut scaled = Array::<f32>::new(elements);
                #[unroll]
                for i in 0..elements {
                    let value = element(from, i, kind);
                    scaled[i] = weight * value;
                    sum += value * element(own, i, kind);
                }
                x_grad[slot * per_row + column] = packed::<N>(&scaled, kind, conversion);
                column += lanes;
            }
        }
        if comptime!(planes) {
            sum = plane_sum(sum);
        }
        if named && lane == 0 {
            weight_grads[choice] = sum;
        }
        slot += CUBE_COUNT * CUBE_DIM as usize / lanes;
    }
}

/// Element `index` of the words of a vector.
#[cube]
fn element<N: Size>(
    vector: Vector<u32, N>,
    #[comptime] index: usize,
    #[comptime] kind: FloatKind,
) -> f32 {
    let word = vector.extract(comptime!(index / per_word(kind)));
    unpack(word, comptime!((index % per_word(kind)) as u32), kind)
}

/// The words of as many values as they hold, rounded to nearest even.
#[cube]
fn packed<N: Size>(
    values: &Array<f32>,
    #[comptime] kind: FloatKind,
    #[comptime] conversion: Conversion,
) -> Vector<u32, N> {
    let width = N::value();
    let mut words = Vector::<u32, N>::empty();
    #[unroll]
    for word in 0..width {
        let first = comptime!(word * per_word(kind));
        let second = comptime!(first + per_word(kind) - 1);
        words.insert(word, pack(values[first], values[second], kind, conversion));
    }
    words
}
