//! Products of the rows of two matrices, added to or subtracted from a matrix in `f64`: the update
//! of second moments, of Cholesky factors and inverses, and of the columns that GPTQ has not
//! reached.

use cubecl::{
    ir::{ElemType, FloatKind as CubeFloat},
    prelude::*,
    server::Handle,
};

use crate::{
    capabilities::{conversion_of, is_cpu},
    cube::{
        codec::Conversion,
        exact::{add_exact_product, product_f64},
    },
    launch::buffer,
    memory::address_type,
};

/// Each unit computes `MICRO` x `MICRO` elements.
const MICRO: usize = 4;
/// Units along a side of a tile on a GPU.
const SIDE: usize = 16;
/// Rows of the factors that are in shared memory at a time.
const DEPTH: usize = 16;

/// Rows of a matrix in device memory.
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    pub handle: &'a Handle,
    /// Number of elements of the matrix.
    pub len: usize,
    /// First element of the first row.
    pub first: usize,
    /// Elements from a row to the next.
    pub stride: usize,
}

/// Part of a matrix that a product changes.
pub(super) struct Target<'a> {
    pub handle: &'a Handle,
    /// Number of elements of the matrix.
    pub len: usize,
    /// First element of the part.
    pub first: usize,
    /// Elements from a row to the next.
    pub stride: usize,
    pub rows: usize,
    pub cols: usize,
    /// True if only the upper triangle of the part is used. Elements below it become undefined.
    pub upper: bool,
}

/// The sum over t < `depth` of `left[t, i] · right[t, j]`, for element (i, j) of `target`.
pub(super) struct Product<'a> {
    pub left: Factors<'a>,
    pub right: Factors<'a>,
    pub depth: usize,
    pub target: Target<'a>,
}

/// Adds products of `f32` factors, which are exact in `f64`, one after another.
pub(super) fn add_products(client: &Client, product: &Product<'_>) {
    launch(client, product, CubeFloat::F32, false);
}

/// Subtracts products of `f64` factors, each rounded, one after another.
pub(super) fn subtract_products(client: &Client, product: &Product<'_>) {
    launch(client, product, CubeFloat::F64, true);
}

fn launch(client: &Client, product: &Product<'_>, kind: CubeFloat, subtracts: bool) {
    let Product {
        left,
        right,
        depth,
        target,
    } = product;
    if target.rows == 0 || target.cols == 0 || *depth == 0 {
        return;
    }
    let side = if is_cpu(client) { 1 } else { SIDE };
    let plan = ProductPlan {
        side,
        subtracts,
        upper: target.upper,
        conversion: conversion_of(client),
    };
    let tile = side * MICRO;
    let [x, y] = [target.cols, target.rows].map(|len| len.div_ceil(tile) as u32);
    let elements = left.len.max(right.len).max(target.len);
    // SAFETY: the callers' factors and targets are within their memory, which they allocated or
    // checked; the kernel stays within them.
    unsafe {
        products_kernel::launch_unchecked(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d((side * side) as u32),
            address_type(elements),
            buffer(left.handle, left.len),
            buffer(right.handle, right.len),
            buffer(target.handle, target.len),
            ProductShapeLaunch::new(
                *depth,
                left.first,
                left.stride,
                right.first,
                right.stride,
                target.first,
                target.stride,
                target.rows,
                target.cols,
            ),
            plan,
            ElemType::Float(kind),
        );
    }
}

/// Comptime choices of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProductPlan {
    /// Units along a side of a tile.
    pub side: usize,
    /// True to subtract rounded products, false to add exact ones.
    pub subtracts: bool,
    /// True to compute tiles of the upper triangle only.
    pub upper: bool,
    /// Arithmetic of the device.
    pub conversion: Conversion,
}

/// [`Product`] in a kernel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ProductShape {
    depth: usize,
    left_first: usize,
    left_stride: usize,
    right_first: usize,
    right_stride: usize,
    first: usize,
    stride: usize,
    rows: usize,
    cols: usize,
}

/// Each cube computes a square tile. Units hold elements that lie `side` apart, so that neighbours
/// read neighbouring words of shared memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn products_kernel<T: Numeric>(
    left: &[T],
    right: &[T],
    out: &mut [f64],
    shape: ProductShape,
    #[comptime] plan: ProductPlan,
    #[define(T)] _factors: ElemType,
) {
    let side = comptime!(plan.side);
    let tile = comptime!(plan.side * MICRO);
    let first_row = CUBE_POS_Y as usize * tile;
    let first_col = CUBE_POS_X as usize * tile;
    let mut lefts = Shared::<[f64]>::new_slice(comptime!(DEPTH * plan.side * MICRO));
    let mut rights = Shared::<[f64]>::new_slice(comptime!(DEPTH * plan.side * MICRO));
    let mut is_used = true;
    if comptime!(plan.upper) {
        is_used = first_col + tile > first_row;
    }
    if is_used {
        let zero = f64::cast_from(0.0f32);
        let unit = UNIT_POS as usize;
        let unit_row = unit / side;
        let unit_col = unit % side;
        let mut sums = Array::<f64>::new(comptime!(MICRO * MICRO));
        #[unroll]
        for i in 0..MICRO {
            #[unroll]
            for j in 0..MICRO {
                let row = first_row + unit_row + comptime!(i * side);
                let col = first_col + unit_col + comptime!(j * side);
                sums[comptime!(i * MICRO + j)] = zero;
                if row < shape.rows && col < shape.cols {
                    sums[comptime!(i * MICRO + j)] = out[shape.first + row * shape.stride + col];
                }
            }
        }
        let mut begin = 0usize;
        while begin < shape.depth {
            let mut item = unit;
            while item < comptime!(DEPTH * plan.side * MICRO) {
                let t = begin + item / tile;
                let place = item % tile;
                let mut l = zero;
                let mut r = zero;
                if t < shape.depth {
                    if first_row + place < shape.rows {
                        let at = shape.left_first + t * shape.left_stride + first_row + place;
                        l = f64::cast_from(left[at]);
                    }
                    if first_col + place < shape.cols {
                        let at = shape.right_first + t * shape.right_stride + first_col + place;
                        r = f64::cast_from(right[at]);
                    }
                }
                lefts[item] = l;
                rights[item] = r;
                item += comptime!(plan.side * plan.side);
            }
            sync_cube();
            for t in 0..comptime!(DEPTH) {
                let row = t * tile;
                let mut l = Array::<f64>::new(MICRO);
                let mut r = Array::<f64>::new(MICRO);
                #[unroll]
                for i in 0..MICRO {
                    l[i] = lefts[row + unit_row + comptime!(i * side)];
                    r[i] = rights[row + unit_col + comptime!(i * side)];
                }
                #[unroll]
                for i in 0..MICRO {
                    #[unroll]
                    for j in 0..MICRO {
                        let at = comptime!(i * MICRO + j);
                        if comptime!(plan.subtracts) {
                            sums[at] -= product_f64(l[i], r[j], plan.conversion);
                        } else {
                            sums[at] = add_exact_product(l[i], r[j], sums[at], plan.conversion);
                        }
                    }
                }
            }
            sync_cube();
            begin += comptime!(DEPTH);
        }
        #[unroll]
        for i in 0..MICRO {
            #[unroll]
            for j in 0..MICRO {
                let row = first_row + unit_row + comptime!(i * side);
                let col = first_col + unit_col + comptime!(j * side);
                if row < shape.rows && col < shape.cols {
                    out[shape.first + row * shape.stride + col] = sums[comptime!(i * MICRO + j)];
                }
            }
        }
    }
}
