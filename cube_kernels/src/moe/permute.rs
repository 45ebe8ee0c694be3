//! Gathers rows by index: permutation of tokens before experts, and its weighted inverse after
//! them.
//!
//! Tokens are gathered for the experts that they are routed to, and each token's results are summed
//! with weights. Indices are `u32` in device memory. An index that is out of range names no row,
//! which is equivalent to a row of zeros; for any indices, no access is out of bounds.

use cubecl::{prelude::*, server::Handle};

use super::groups::to_u32;
use crate::launch::{Words, buffer, cubes, grid, per_word};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{conversion_of, is_cpu},
    cube::{
        codec::Conversion,
        exact::product,
        words::{pack, unpack},
    },
    memory::{address_type, allocate, check_memory, is_aligned},
    quantize::{
        AmaxRequest, Amaxes,
        amax::{amaxes, run_prologue_with_amaxes},
        prologue::Prologue,
    },
    tensor::{FloatKind, Groups, Matrix},
    zeroed::zeros,
};

/// Planes of a cube of the backward, if there are planes.
const PLANES_PER_CUBE: usize = 8;

/// Guarantee about indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Named {
    /// Every index names a row.
    All,
    /// Some indices name no row here: they belong to rows of another device.
    Some,
}

/// Computes `out[i] = x[numbers[i]]` for `rows` indices (`u32`). Rows whose index is out of range
/// are not written.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, the rows of `x` are not whole 32-bit
/// words, or a size does not fit 32 bits.
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

/// Computes [`moe_permute`], and the amax values in `request` of the result in `groups`, with the
/// results of a separate pass. If the rows of `x` are multiples of 16 elements, at multiples of 16
/// bytes, one kernel computes both. It does not write rows after the last group, and an index that
/// is out of range names the last row.
///
/// # Errors
/// Same as [`moe_permute`]; also returns an error if the groups do not fit.
pub fn moe_permute_with_amaxes(
    client: &Client,
    x: &Matrix,
    (numbers, rows): (&Handle, usize),
    groups: &Groups,
    request: &AmaxRequest,
) -> Result<(Matrix, Amaxes), Nvfp4Error> {
    let is_whole = x.cols.is_multiple_of(BLOCK) && is_aligned(&x.handle);
    if *request == AmaxRequest::default() || !is_whole || x.is_empty() || rows == 0 {
        let out = moe_permute(client, x, numbers, rows)?;
        let found = match *request == AmaxRequest::default() {
            true => Amaxes::default(),
            false => amaxes(client, &out, groups, request)?,
        };
        return Ok((out, found));
    }
    check_words("x", x)?;
    to_u32("rows", rows)?;
    let gather = Prologue::Gather { x, numbers, rows };
    run_prologue_with_amaxes(client, gather, groups, request)
}

/// Computes `out[i] = Σⱼ weights[i, j] · x[places[i, j]]` for `rows` rows `i` of `copies` places
/// each: products and sums in `f32`, in the order of `j`, rounded once to the type of `x`. Without
/// `weights` every weight is 1; if `copies` is 1 too, rows are only copied.
///
/// `places` is `u32[rows, copies]`, `weights` `f32[rows, copies]`.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, the rows of `x` are not whole 32-bit
/// words, or a size does not fit 32 bits.
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

/// Computes the gradients of [`moe_unpermute`] with weights in one read, from `grad`
/// (`[tokens, cols]`), the gradient of its output. Let `choice = choices[s]` be the place
/// `t * copies + j` that names row `s`. The gradient of row `s` of `x` is
/// `dx[s] = weights[choice] · grad[t]`, rounded to the type of `x`. The gradient of the weights
/// (`f32[tokens, copies]`) is `dw[choice] = Σ grad[t] · x[s]`.
///
/// Every place names a row of `x`, and no row is named twice. With [`Named::Some`], places may name
/// no row and rows may have no place: such rows of `dx` are not written, and such weights have a
/// gradient of 0.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, `grad` differs from `x` in columns or
/// type, `x` does not have `tokens * copies` rows, rows are not whole 32-bit words, or a size does
/// not fit 32 bits.
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

/// Returns an error unless the rows of `x` are within its memory, in whole words.
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

/// Returns the widest loads and stores that all of these matrices with the same columns allow.
fn words_of<const N: usize>(matrices: [&Matrix; N]) -> [Words; N] {
    let mut words = matrices.map(Words::of);
    let width = words.iter().map(|words| words.width).min().unwrap_or(1);
    for words in &mut words {
        words.width = width;
    }
    words
}

/// Returns the number of loads per row of `x`.
fn per_row(words: &Words, x: &Matrix) -> usize {
    x.cols / per_word(x.dtype) / words.width
}

/// Each unit copies every `units`-th vector of the `rows` rows of the result.
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

/// Rows named by index, with weights, in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct WeightedRows {
    /// Indices: rows of `x` by place, or in the backward places by row of `x`.
    pub numbers: Box<[u32]>,
    /// Weights of the places.
    pub weights: Box<[f32]>,
    /// Places per row of the output.
    pub copies: usize,
}

/// Comptime choices of [`moe_unpermute_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnpermutePlan {
    /// True if there are weights.
    pub weighted: bool,
    /// Element type of the matrices.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Each unit sums every `units`-th vector of the `rows` rows of the result.
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
            // Starting from -0 preserves the first addend, including zeros. (CubeCL writes the
            // literal as an integer, 0.)
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

/// Comptime choices of [`moe_unpermute_backward_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnpermuteBackwardPlan {
    /// True if there are planes.
    pub planes: bool,
    /// Element type of the matrices.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Each plane (or unit, without planes) computes every `planes`-th row of `x_grad`.
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

/// Returns element `index` of a vector of words.
#[cube]
fn element<N: Size>(
    vector: Vector<u32, N>,
    #[comptime] index: usize,
    #[comptime] kind: FloatKind,
) -> f32 {
    let word = vector.extract(comptime!(index / per_word(kind)));
    unpack(word, comptime!((index % per_word(kind)) as u32), kind)
}

/// Packs values into words, rounded to nearest even.
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
