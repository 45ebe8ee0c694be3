//! The GEMM of small M, 1 to 16 rows of `a` (decoding), with a packed `b`: bound by reading the
//! codes and scales of `b` once. They are expanded in registers, and no bf16 copy of `b` is in
//! memory.
//!
//! `b` is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8 rows).
//! A lane takes 32 codes of a row from each 128: the order of the contraction inside an instruction
//! is free as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g` at `32 c`,
//! and the same columns of `a`. The warps of a cube share its rows and take turns along the
//! contraction; their sums are added in the order of the warps.
//!
//! What stands around such a GEMM takes longer to launch than to compute, so that it is part of it:
//! SwiGLU behind it, where a cube has the rows of gate and of up, and RMSNorm in front of it, which
//! every cube computes for itself while its first weights are on their way.

use cubecl::prelude::*;

use super::{
    small_m_mainloop::{Source, mainloop, normed_place, stage_row, start_weights},
    small_m_output::{OutputColumns, write_columns},
    small_m_shape::{SmallMLeft, SmallMNorm, SmallMShape},
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
/// one cube, or, with gate and up in `b`, SwiGLU of it. `a`, where it is bf16, is in units of eight
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
    // A weight's as well: it is here before the sums are.
    written_before(&epilogue.b_amax, shape.overlaps);
    let blocks = problem.k / 16u32;
    let weight = Source::new(&b.codes, &b.scales, blocks);
    let mut weights = start_weights(weight, column, problem.n, shape);
    // Behind the loads of weights, which the division would have wait for the amax.
    let columns = OutputColumns {
        first: column,
        tile_factor: epilogue.b_tile_factor(0u32),
    };
    weights.decode(shape);
    // A weight is written long before; what else is read may be the output of the last kernel.
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

/// [`small_m_kernel()`] of the RMSNorm of the rows of `inputs`, in bf16, the bits of which are
/// those of [`norm`](crate::norm::norm()). The first cube writes the sums with the residual to
/// `sum`, if there is one: the others still read what was added.
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
    // A weight's as well: it is here before the sums are.
    written_before(&epilogue.b_amax, shape.overlaps);
    let blocks = problem.k / 16u32;
    let weight = Source::new(&b.codes, &b.scales, blocks);
    let mut weights = start_weights(weight, column, problem.n, shape);
    // Behind the loads of weights, which the division would have wait for the amax.
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

/// Normalises all rows into `to`, as fragments are read from there, behind the wait for the kernel
/// that writes them.
///
/// The units that add up the squares of a row are those of [`norm`](crate::norm::norm()), one for a
/// block or for several. What they loaded goes through `to`, so that all units normalise, and none
/// has many registers for it.
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

/// The gains of the vectors that this unit normalises of each row. Nothing in front of this kernel
/// writes them, so that they may be loaded before the wait.
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
        // Behind the end the last one is loaded, and not used.
        let place = min(place, 2u32 * blocks - 1u32);
        // Where the row has what lies there.
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

/// Normalises the row of `to` that starts at `first`, in place, and arranges its elements for the
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
