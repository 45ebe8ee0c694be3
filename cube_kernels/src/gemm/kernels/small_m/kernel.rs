//! The small-M GEMM, for 1 to 16 rows of `a` (decoding) and a packed `b`. It is memory-bound: it
//! reads the codes and scales of `b` once and expands them in registers, and memory holds no bf16
//! copy of `b`.
//!
//! `b` is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8 rows).
//! A lane takes 32 codes of a row from each 128 columns. The K order within an instruction is free
//! as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g` at `32 c`, and the
//! same columns of `a`. The warps of a cube share its rows and alternate along K; their sums are
//! added in warp order.
//!
//! The operations around such a GEMM take longer to launch than to compute, so they are fused:
//! SwiGLU as an epilogue, in cubes that have the rows of both gate and up, and RMSNorm as a
//! prologue, which every cube computes redundantly while its first weights are loaded.

use cubecl::prelude::*;

use super::{
    mainloop::{Source, mainloop, normed_place, stage_row, start_weights},
    output::{OutputColumns, write_columns},
    shape::{SmallMLeft, SmallMNorm, SmallMShape},
};
use crate::{
    cube::{
        codec::interleave_pairs,
        overlap::{let_next_begin, wait_for_previous, written_before},
        warp_sums::stage_sums,
        words::{pack, unpack},
    },
    gemm::{
        arguments::{MixedMatrix, PackedMatrix, ProblemShape},
        epilogue::Epilogue,
    },
    norm::{
        forward::{NormInputs, scaled},
        prologue::NormPrologue,
    },
};

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])` for the rows of `b` of
/// one cube, or SwiGLU of it if `b` has gate and up. If `a` is bf16, it is in units of eight
/// elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn small_m_kernel(
    a: MixedMatrix<u32, Vector<u32, Const<4>>>,
    b: PackedMatrix<u32>,
    problem: ProblemShape,
    epilogue: Epilogue,
    out: &mut [u32],
    #[comptime] shape: SmallMShape,
) {
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.warps * shape.warp_sums().floats()), 16usize);
    let mut staged: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(usize::max(shape.left.staged(), 1)), 16usize);
    let column = CUBE_POS as u32 * comptime!(shape.outputs() as u32);
    let_next_begin(shape.overlaps);
    if comptime!(shape.left != SmallMLeft::Packed) {
        written_before(&a.dense, shape.overlaps);
    }
    written_before(&epilogue.a_amax, shape.overlaps);
    written_before(&epilogue.c, shape.overlaps);
    // The amax of `b` belongs to a weight, but is treated the same way: it arrives before the sums
    // do.
    written_before(&epilogue.b_amax, shape.overlaps);
    let blocks = problem.k / 16u32;
    let weight = Source::new(&b.codes, &b.scales, blocks);
    let mut weights = start_weights(weight, column, problem.n, shape);
    // After the loads of weights, because the division would make them wait for the amax.
    let columns = OutputColumns {
        first: column,
        tile_factor: epilogue.b_tile_factor(0u32),
    };
    weights.decode(shape);
    // Weights were written long before; other inputs may be outputs of the previous kernel.
    wait_for_previous(shape.overlaps);
    let source = Source::new(&a.codes, &a.scales, blocks);
    let sums = if comptime!(shape.left.staged() > 0) {
        stage_row(&a.dense, &mut staged, shape);
        mainloop(source, &staged, problem.m, &mut weights, shape)
    } else {
        mainloop(source, &a.dense, problem.m, &mut weights, shape)
    };
    stage_sums(&sums, &mut exchange, comptime!(shape.warp_sums()));
    sync_cube();
    write_columns(&exchange, &problem, &columns, &epilogue, out, shape);
}

/// [`small_m_kernel()`] with the RMSNorm of the rows of `inputs`, in bf16, bit-identical to
/// [`norm`](crate::norm::norm()). The first cube writes the sums with the residual to `sum`, if
/// there is one: the other cubes still read the summands.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn small_m_norm_kernel(
    inputs: NormInputs<Vector<u32, Const<4>>, Vector<f32, Const<4>>>,
    sum: &mut [Vector<u32, Const<4>>],
    b: PackedMatrix<u32>,
    problem: ProblemShape,
    epilogue: Epilogue,
    out: &mut [u32],
    #[comptime] norm: SmallMNorm,
    #[comptime] shape: SmallMShape,
) {
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.warps * shape.warp_sums().floats()), 16usize);
    let mut normed: Shared<[Vector<u32, Const<4>>]> =
        Shared::new_aligned_slice(comptime!(norm.vectors()), 16usize);
    let column = CUBE_POS as u32 * comptime!(shape.outputs() as u32);
    let_next_begin(shape.overlaps);
    written_before(&inputs.x, shape.overlaps);
    written_before(&inputs.residual, shape.overlaps);
    // The amax of `b` belongs to a weight, but is treated the same way: it arrives before the sums
    // do.
    written_before(&epilogue.b_amax, shape.overlaps);
    let blocks = problem.k / 16u32;
    let weight = Source::new(&b.codes, &b.scales, blocks);
    let mut weights = start_weights(weight, column, problem.n, shape);
    // After the loads of weights, because the division would make them wait for the amax.
    let columns = OutputColumns {
        first: column,
        tile_factor: epilogue.b_tile_factor(0u32),
    };
    weights.decode(shape);
    norm_rows(&inputs, sum, &mut normed, &problem, norm);
    let sums = mainloop(weight, &normed, problem.m, &mut weights, shape);
    stage_sums(&sums, &mut exchange, comptime!(shape.warp_sums()));
    sync_cube();
    write_columns(&exchange, &problem, &columns, &epilogue, out, shape);
}

/// Normalizes all rows into `to`, in the layout from which fragments are read, after waiting for
/// the kernel that writes the rows.
///
/// The units that add up the squares of a row are those of [`norm`](crate::norm::norm()), with one
/// or several blocks per unit. The loaded elements pass through `to`, so that all units normalize,
/// and none needs many registers for it.
#[cube]
fn norm_rows(
    inputs: &NormInputs<Vector<u32, Const<4>>, Vector<f32, Const<4>>>,
    sum: &mut [Vector<u32, Const<4>>],
    to: &mut [Vector<u32, Const<4>>],
    problem: &ProblemShape,
    #[comptime] norm: SmallMNorm,
) {
    let plan = comptime!(norm.plan);
    let (cols, blocks) = (problem.k as usize, problem.k / 16u32);
    let slots = comptime!(plan.slots());
    let gains = load_gains(&inputs.gain, blocks, norm);
    let mut prologue = NormPrologue::new(plan);
    wait_for_previous(plan.overlaps);
    #[unroll]
    for step in 0..comptime!(norm.rows.div_ceil(slots)) {
        let row = prologue.place.slot + step * slots;
        let is_row = row < problem.m as usize;
        let is_writer = CUBE_POS == 0usize;
        let words = prologue.load_row(inputs, sum, row, is_row, is_writer, cols, plan);
        if is_row {
            #[unroll]
            for k in 0..plan.kept {
                let block = (prologue.place.unit + k * prologue.place.units) as u32;
                if block < blocks {
                    #[unroll]
                    for part in 0..2usize {
                        let mut vector = Vector::<u32, Const<4>>::new(0u32);
                        #[unroll]
                        for w in 0..4usize {
                            vector.insert(w, words[comptime!(8 * k + 4 * part + w)]);
                        }
                        // Vectors of two blocks have four words of eight elements.
                        let word = 2u32 * (block % 2u32) + comptime!(part as u32);
                        let place = normed_place(block / 2u32, blocks, word);
                        to[row * (cols / 8usize) + place] = vector;
                    }
                }
            }
        }
        prologue.add_squares(&words, cols, plan);
        #[unroll]
        for slot in 0..comptime!(usize::min(slots, norm.rows - step * slots)) {
            let row = comptime!(step * slots + slot) as u32;
            if row < problem.m {
                let rstd = prologue.rstd(slot, cols, inputs.epsilon, plan);
                normalize_row(to, row * (blocks * 2u32), &gains, rstd, blocks, norm);
            }
        }
    }
    sync_cube();
}

/// Loads the gains of the vectors that this unit normalizes in each row. The previous kernel does
/// not write gains, so they may be loaded before the wait.
#[cube]
fn load_gains(
    gain: &[Vector<f32, Const<4>>],
    blocks: u32,
    #[comptime] norm: SmallMNorm,
) -> Array<f32> {
    let mut gains = Array::<f32>::new(comptime!(8 * norm.unit_vectors()));
    #[unroll]
    for i in 0..comptime!(norm.unit_vectors()) {
        let place = UNIT_POS + comptime!((i * norm.units()) as u32);
        // After the end, the last vector is loaded but not used.
        let place = min(place, 2u32 * blocks - 1u32);
        // Column in the row of the vector at this position.
        let column = 4u32 * (place % (blocks / 2u32)) + place / (blocks / 2u32);
        #[unroll]
        for part in 0..2usize {
            let loaded = gain[(2u32 * column) as usize + part];
            #[unroll]
            for e in 0..4usize {
                gains[comptime!(8 * i + 4 * part + e)] = loaded.extract(e);
            }
        }
    }
    gains
}

/// Normalizes in place the row of `to` that starts at `first`, and arranges its elements for the
/// instructions.
#[cube]
fn normalize_row(
    to: &mut [Vector<u32, Const<4>>],
    first: u32,
    gains: &Array<f32>,
    rstd: f32,
    blocks: u32,
    #[comptime] norm: SmallMNorm,
) {
    let (kind, conversion) = comptime!((norm.plan.kind, norm.plan.conversion));
    #[unroll]
    for i in 0..comptime!(norm.unit_vectors()) {
        let place = UNIT_POS + comptime!((i * norm.units()) as u32);
        if place < 2u32 * blocks {
            let raw = to[(first + place) as usize];
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            #[unroll]
            for w in 0..4usize {
                let word = raw.extract(w);
                let at = comptime!(8 * i + 2 * w);
                let even = scaled(unpack(word, 0u32, kind), rstd, gains[at]);
                let odd = scaled(unpack(word, 1u32, kind), rstd, gains[comptime!(at + 1)]);
                vector.insert(w, pack(even, odd, kind, conversion));
            }
            to[(first + place) as usize] = interleave_pairs(vector);
        }
    }
}
