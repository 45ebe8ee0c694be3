//! `delta`, the sum of `dout · out` of each row, which the softmax backward subtracts from the
//! gradients of the weights. See [`reference::attention`](mod@crate::reference::attention) for the
//! summation order.

use cubecl::{prelude::*, server::Handle};

use super::{Heads, is_vectorized};
use crate::{
    capabilities::{conversion_of, is_cpu},
    cube::{
        codec::{Conversion, load},
        exact::fma,
        ptx,
    },
    launch::{buffer, grid},
    memory::{address_type, allocate},
    tensor::FloatKind,
};

/// Elements that one lane multiplies and sums sequentially.
const CHUNK: usize = 8;

/// Computes `f32[heads, tokens]` from checked operands of equal shape and type.
pub(super) fn delta(client: &Client, out: &Heads, dout: &Heads) -> Handle {
    let rows = out.heads * out.tokens;
    let delta = allocate(client, rows * 4);
    if rows == 0 {
        return delta;
    }
    let planes = !is_cpu(client);
    let lanes = out.head.div_ceil(CHUNK).next_power_of_two();
    let width = match [out, dout]
        .into_iter()
        .all(|heads| is_vectorized(heads, CHUNK))
    {
        true => 16 / out.dtype.size(),
        false => 1,
    };
    let (count, dim) = grid(client, if planes { rows * lanes } else { rows });
    let view = |heads: &Heads| DeltaViewLaunch::new(heads.offset / width, heads.row_stride / width);
    // SAFETY: the kernel stays below the rows.
    unsafe {
        delta_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(out.span().max(dout.span()).max(rows * lanes)),
            width,
            buffer(&out.handle, out.span() / width),
            buffer(&dout.handle, dout.span() / width),
            DeltaShapeLaunch::new(view(out), view(dout), out.tokens, out.heads, out.head),
            buffer(&delta, rows),
            DeltaPlan {
                lanes,
                planes,
                kind: out.dtype,
                conversion: conversion_of(client),
            },
            out.dtype.storage_type(),
        );
    }
    delta
}

/// Location of tokens in memory.
#[derive(CubeType, CubeLaunch)]
pub struct DeltaView {
    /// Vectors before the first token.
    pub offset: usize,
    /// Vectors from one token to the next.
    pub stride: usize,
}

/// Sizes of the operands.
#[derive(CubeType, CubeLaunch)]
pub struct DeltaShape {
    /// Location of the outputs.
    pub out: DeltaView,
    /// Location of the outputs' gradients.
    pub dout: DeltaView,
    /// Number of tokens.
    pub tokens: usize,
    /// Heads per token.
    pub heads: usize,
    /// Elements per head.
    pub head: usize,
}

/// Comptime choices of [`delta_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeltaPlan {
    /// Lanes per row, each with eight elements.
    pub lanes: usize,
    /// True if lanes are units of a plane; otherwise one unit processes all lanes.
    pub planes: bool,
    /// Type of the operands.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Returns the sum of one lane's eight products.
#[cube]
fn chunk_product<F: Numeric, N: Size>(
    out: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    out_at: usize,
    dout_at: usize,
    first: usize,
    head: usize,
    #[comptime] plan: DeltaPlan,
) -> f32 {
    let width = N::value();
    let mut sum = 0.0f32;
    #[unroll]
    for v in 0..comptime!(CHUNK / width) {
        let element = first + comptime!(v * width);
        if element < head {
            let a = out[out_at + element / width];
            let b = dout[dout_at + element / width];
            #[unroll]
            for e in 0..width {
                let a = load::<F>(a.extract(e), plan.kind);
                let b = load::<F>(b.extract(e), plan.kind);
                sum = fma(b, a, sum, plan.conversion);
            }
        }
    }
    sum
}

/// Computes the sums of rows, `[heads, tokens]`. The lanes of a row are adjacent; rows are
/// processed in memory order.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn delta_kernel<F: Numeric, N: Size>(
    out: &[Vector<F, N>],
    dout: &[Vector<F, N>],
    shape: DeltaShape,
    delta: &mut [f32],
    #[comptime] plan: DeltaPlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let lanes = comptime!(plan.lanes);
    let rows = shape.tokens * shape.heads;
    let mut here = 1usize;
    if comptime!(plan.planes) {
        here = comptime!(plan.lanes).runtime();
    }
    let mut item = ABSOLUTE_POS;
    // All units of a plane continue while one of them has a row.
    while item - (UNIT_POS_PLANE as usize) < rows * here {
        let row = item / here;
        let token = min(row, rows - 1usize) / shape.heads;
        let index = min(row, rows - 1usize) - token * shape.heads;
        let head_at = index * (shape.head / width);
        let out_at = shape.out.offset + token * shape.out.stride + head_at;
        let dout_at = shape.dout.offset + token * shape.dout.stride + head_at;
        let total = if comptime!(plan.planes) {
            let first = (item - row * here) * CHUNK;
            let mut total = chunk_product(out, dout, out_at, dout_at, first, shape.head, plan);
            #[unroll]
            for stage in 0..comptime!(plan.lanes.ilog2()) {
                let distance = comptime!(1u32 << stage);
                total += if comptime!(plan.conversion.has_ptx()) {
                    ptx::shfl_sync_bfly(total, distance)
                } else {
                    plane_shuffle_xor(total, distance)
                };
            }
            total
        } else {
            let mut sums = Array::<f32>::new(lanes);
            for lane in 0..lanes {
                let first = lane * CHUNK;
                sums[lane] = chunk_product(out, dout, out_at, dout_at, first, shape.head, plan);
            }
            let mut len = comptime!(plan.lanes / 2).runtime();
            while len > 0usize {
                for i in 0..len {
                    let sum = sums[2usize * i] + sums[2usize * i + 1usize];
                    sums[i] = sum;
                }
                len /= 2usize;
            }
            sums[0]
        };
        if row < rows && item == row * here {
            delta[index * shape.tokens + token] = total;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
