//! The product for any device, one unit for each output element: two packed operands are decoded on the
//! fly, exactly, and multiplied with `f32` accumulation. No decoded copy of an operand is ever in memory.

use cubecl::prelude::*;

use crate::{
    BLOCK,
    capabilities::Capabilities,
    cube::{
        codec::{decode_e2m1, decode_e4m3, store},
        ptx,
    },
    launch::grid,
    memory::address_type,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

/// Queues the kernel. The caller checked the operands.
pub(super) fn launch(
    client: &Client,
    capabilities: &Capabilities,
    a: &DeviceQuantized,
    b: &DeviceQuantized,
    bias: Option<&Matrix>,
    result: &Matrix,
) {
    let (m, n, blocks, out) = (a.outer(), b.outer(), a.blocks(), result.dtype);
    // `add.rn` where the compiler may contract, which is CUDA's; see `Epilogue::ordered_add`.
    let epilogue = Epilogue {
        bias: bias.is_some(),
        ordered_add: capabilities.runtime == "cuda",
    };
    let address = address_type((m.max(n) * blocks * BLOCK).max(result.len()));
    // SAFETY (of every argument): the caller checked the buffers against the shapes.
    let words = |packed: &DeviceQuantized| unsafe {
        BufferArg::from_raw_parts(packed.codes.clone(), packed.outer() * blocks)
    };
    let scales = |packed: &DeviceQuantized| unsafe {
        BufferArg::from_raw_parts(packed.scales.clone(), packed.outer() * blocks)
    };
    let amax =
        |packed: &DeviceQuantized| unsafe { BufferArg::from_raw_parts(packed.amax.clone(), 1) };
    let bias = match bias {
        Some(bias) => unsafe { BufferArg::from_raw_parts(bias.handle.clone(), n) },
        // Not read without a bias.
        None => amax(a),
    };
    let target = unsafe { BufferArg::from_raw_parts(result.handle.clone(), m * n) };
    let (count, dim) = grid(client, m * n);
    // SAFETY: the kernel stays below m * n.
    unsafe {
        scalar_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            words(a),
            scales(a),
            amax(a),
            words(b),
            scales(b),
            amax(b),
            bias,
            target,
            m,
            n,
            blocks,
            epilogue,
            out,
            out.storage_type(),
        );
    }
}

/// The comptime choices of the epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// Add a bias.
    pub bias: bool,
    /// Add it by an instruction that is never contracted with the multiplication before it: the
    /// specification rounds both.
    pub ordered_add: bool,
}

#[cube]
fn finish(
    sum: f32,
    alpha: f32,
    bias: &[f32],
    column: usize,
    #[comptime] epilogue: Epilogue,
) -> f32 {
    let scaled = sum * alpha;
    let mut value = scaled;
    if comptime!(epilogue.bias) {
        if comptime!(epilogue.ordered_add) {
            // `scaled`, not `value`: a mutable variable would reach the instruction as a pointer.
            value = ptx::add_rn(scaled, bias[column]);
        } else {
            value = scaled + bias[column];
        }
    }
    value
}

#[cube]
fn alpha(amax_a: &[f32], amax_b: &[f32]) -> f32 {
    (amax_a[0] / 2688.0f32) * (amax_b[0] / 2688.0f32)
}

/// One unit computes every `units`-th output element, `k` ascending.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn scalar_kernel<F: Numeric>(
    a_codes: &[Vector<u32, Const<2>>],
    a_scales: &[u8],
    a_amax: &[f32],
    b_codes: &[Vector<u32, Const<2>>],
    b_scales: &[u8],
    b_amax: &[f32],
    bias: &[f32],
    out: &mut [F],
    m: usize,
    n: usize,
    blocks: usize,
    #[comptime] epilogue: Epilogue,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let alpha = alpha(a_amax, b_amax);
    let mut item = ABSOLUTE_POS;
    while item < m * n {
        let a_row = (item / n) * blocks;
        let b_row = (item % n) * blocks;
        let mut sum = 0.0f32;
        for block in 0..blocks {
            let a_words = a_codes[a_row + block];
            let b_words = b_codes[b_row + block];
            let a_scale = decode_e4m3(u32::cast_from(a_scales[a_row + block]));
            let b_scale = decode_e4m3(u32::cast_from(b_scales[b_row + block]));
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let x = decode_e2m1(a_words.extract(comptime!(i / 8)) >> shift) * a_scale;
                let y = decode_e2m1(b_words.extract(comptime!(i / 8)) >> shift) * b_scale;
                // The product is exact, so a contraction of this sum changes nothing.
                sum += x * y;
            }
        }
        out[item] = store::<F>(finish(sum, alpha, bias, item % n, epilogue), kind);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
