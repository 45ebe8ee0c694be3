//! Rotary positions: a pass over queries and keys, or over their gradients.

use cubecl::prelude::*;

use super::{Heads, Rope, TokenSequences, is_vectorized};
use crate::{
    Nvfp4Error,
    capabilities::conversion_of,
    cube::{
        codec::{Conversion, load, store},
        exact::fma,
    },
    launch::{buffer, grid},
    memory::address_type,
    moe::groups::find_group,
    tensor::FloatKind,
};

/// Direction of rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rotation {
    /// By the angle of the position: `(a cos - b sin, b cos + a sin)`.
    Forward,
    /// By the negative angle, for gradients.
    Inverse,
}

/// Heads that a unit rotates per load of its angles.
const HEADS_AT_ONCE: usize = 4;

/// Rotates the pairs of each head of `x` by its token's position in its sequence into `out`, which
/// may be `x` itself.
///
/// Adjacent heads of queries and keys can be rotated in one call. The results `fma(-b, sin, a cos)`
/// and `fma(a, sin, b cos)` are computed in `f32` and rounded once to the type of `x`.
///
/// # Errors
/// Returns an error if `out` differs from `x` in shape or type, the tables do not fit, or memory is
/// too small.
pub fn rope(
    client: &Client,
    x: &Heads,
    sequences: TokenSequences<'_>,
    rope: &Rope,
    rotation: Rotation,
    out: &Heads,
) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    out.check_like("out", "x", x)?;
    sequences.check("x", x.tokens)?;
    rope.check(x, sequences)?;
    rotate(client, x, sequences, rope, rotation, out);
    Ok(())
}

/// Computes [`rope()`] of checked operands.
pub(super) fn rotate(
    client: &Client,
    x: &Heads,
    sequences: TokenSequences<'_>,
    rope: &Rope,
    rotation: Rotation,
    out: &Heads,
) {
    if x.tokens == 0 {
        return;
    }
    let half = x.head / 2;
    let widest = 16 / x.dtype.size();
    let fits = half.is_multiple_of(widest) && is_vectorized(x, 8) && is_vectorized(out, 8);
    let width = if fits { widest } else { 1 };
    let (starts, count, offsets) = match sequences {
        TokenSequences::Equal(count) => (&rope.cos, count, false),
        TokenSequences::Offsets { starts, count } => (starts, count, true),
    };
    let chunks = half / width;
    let items = x.tokens * x.heads.div_ceil(HEADS_AT_ONCE) * chunks;
    let (cubes, dim) = grid(client, items);
    let table = rope.positions * half;
    // SAFETY: heads, tables and offsets were checked against their memory; the kernel stays below
    // the tokens and positions.
    unsafe {
        rope_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            address_type(x.span().max(out.span()).max(table).max(items)),
            width,
            buffer(&x.handle, x.span() / width),
            buffer(&out.handle, out.span() / width),
            RotationsLaunch::new(
                buffer(&rope.cos, table),
                buffer(&rope.sin, table),
                rope.positions,
                buffer(starts, if offsets { count + 1 } else { 1 }),
                count,
                offsets.into(),
            ),
            RopeShapeLaunch::new(
                x.tokens,
                x.heads,
                half / width,
                x.offset / width,
                x.row_stride / width,
                out.offset / width,
                out.row_stride / width,
            ),
            RopePlan {
                inverse: rotation == Rotation::Inverse,
                kind: x.dtype,
                conversion: conversion_of(client),
            },
            x.dtype.storage_type(),
        );
    }
}

/// Tables of angles, and sequence offsets.
#[derive(CubeType, CubeLaunch)]
pub struct Rotations {
    /// Cosines, `[positions, head / 2]`.
    pub cos: Box<[f32]>,
    /// Sines, `[positions, head / 2]`.
    pub sin: Box<[f32]>,
    /// Number of positions.
    pub positions: usize,
    /// Start of each sequence, and the end of the last one. Read only with `offsets`.
    pub starts: Box<[u32]>,
    /// Number of sequences.
    pub sequences: usize,
    /// 1 if sequences start at offsets, 0 if their lengths are equal.
    pub offsets: u32,
}

/// Sizes of the operands.
#[derive(CubeType, CubeLaunch)]
pub struct RopeShape {
    /// Number of tokens.
    pub tokens: usize,
    /// Heads per token.
    pub heads: usize,
    /// Vectors per half head.
    pub half: usize,
    /// Vectors before the first token of the input.
    pub from_offset: usize,
    /// Vectors from one token of the input to the next.
    pub from_stride: usize,
    /// Vectors before the first token of the result.
    pub to_offset: usize,
    /// Vectors from one token of the result to the next.
    pub to_stride: usize,
}

/// Comptime choices of [`rope_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RopePlan {
    /// True for the inverse rotation.
    pub inverse: bool,
    /// Type of the operands.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

/// Each unit rotates every `units`-th vector of the first halves, with its partner in the second
/// half, of four heads. Elements of `x` that a unit reads are written by it alone, so `out` may be
/// `x`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn rope_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Vector<F, N>],
    rotations: Rotations,
    shape: RopeShape,
    #[comptime] plan: RopePlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let blocks = shape.heads.div_ceil(HEADS_AT_ONCE);
    let mut item = ABSOLUTE_POS;
    while item < shape.tokens * blocks * shape.half {
        let of_heads = item / shape.half;
        let column = item - of_heads * shape.half;
        let token = of_heads / blocks;
        let first = (of_heads - token * blocks) * HEADS_AT_ONCE;
        let position = position(&rotations, token, shape.tokens);
        let angle = (position * shape.half + column) * width;
        let mut cos = Array::<f32>::new(width);
        let mut sin = Array::<f32>::new(width);
        #[unroll]
        for e in 0..width {
            cos[e] = rotations.cos[angle + e];
            let value = rotations.sin[angle + e];
            sin[e] = if comptime!(plan.inverse) {
                -value
            } else {
                value
            };
        }
        #[unroll]
        for h in 0..HEADS_AT_ONCE {
            let head = first + h;
            if head < shape.heads {
                let within = head * shape.half * 2usize + column;
                let from = shape.from_offset + token * shape.from_stride + within;
                let to = shape.to_offset + token * shape.to_stride + within;
                let near = x[from];
                let far = x[from + shape.half];
                let mut turned_near = Vector::<F, N>::empty();
                let mut turned_far = Vector::<F, N>::empty();
                #[unroll]
                for e in 0..width {
                    let a = load::<F>(near.extract(e), plan.kind);
                    let b = load::<F>(far.extract(e), plan.kind);
                    let first = fma(-b, sin[e], a * cos[e], plan.conversion);
                    let second = fma(a, sin[e], b * cos[e], plan.conversion);
                    turned_near.insert(e, store::<F>(first, plan.kind));
                    turned_far.insert(e, store::<F>(second, plan.kind));
                }
                out[to] = turned_near;
                out[to + shape.half] = turned_far;
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Returns the position of a token in its sequence, clamped to the table of angles.
#[cube]
fn position(rotations: &Rotations, token: usize, tokens: usize) -> usize {
    let start = if rotations.offsets == 1u32 {
        let index = find_group(&rotations.starts, rotations.sequences, token);
        min(rotations.starts[index] as usize, token)
    } else {
        let len = tokens / rotations.sequences;
        token / len * len
    };
    min(token - start, rotations.positions - 1usize)
}
