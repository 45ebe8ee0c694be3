//! Amax values of a matrix in strips of 16 rows, each in the registers of a unit: a column of vectors
//! of a block of rows. No shared memory, no barrier before the end: units load while others fold,
//! where cubes that share tiles all do the same at once.

use cubecl::prelude::*;

use super::fold::{AmaxOut, AmaxPlan, Maxima, fold_words, leave_group};
use crate::cube::hadamard::Signs;

/// Rows of a strip: those of a block down a column, and of the smallest transform.
pub(super) const STRIP: usize = 16;
/// The most words of a vector: four columns of 16 bits, for which a unit has 32 words in flight.
pub(super) const STRIP_WORDS: usize = 2;

/// The words of the strip of rows `row0` on at vector `vector` of rows of `row_vectors`, row by row:
/// zeros behind the last of `rows`.
#[cube]
fn load_strip<N: Size>(
    x: &[Vector<u32, N>],
    row0: usize,
    vector: usize,
    rows: usize,
    row_vectors: usize,
) -> Array<u32> {
    let width = N::value();
    let mut words = Array::<u32>::new(comptime!(STRIP * width));
    let first = row0 * row_vectors + vector;
    if row0 + STRIP <= rows {
        #[unroll]
        for i in 0..STRIP {
            let loaded = x[first + i * row_vectors];
            #[unroll]
            for w in 0..width {
                words[comptime!(i * width + w)] = loaded.extract(w);
            }
        }
    } else {
        #[unroll]
        for i in 0..STRIP {
            let mut loaded = Vector::<u32, N>::zero();
            if row0 + i < rows {
                loaded = x[first + i * row_vectors];
            }
            #[unroll]
            for w in 0..width {
                words[comptime!(i * width + w)] = loaded.extract(w);
            }
        }
    }
    words
}

/// One unit folds every `units`-th strip. They count from the end of the matrix, as the tiles of
/// [`amax_tiles_kernel`](super::amax_tiles_kernel) do.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_strips_kernel<N: Size>(
    x: &[Vector<u32, N>],
    mut out: AmaxOut,
    signs: Signs,
    rows: usize,
    row_vectors: usize,
    #[comptime] plan: AmaxPlan,
) {
    let width = N::value();
    let strips = rows.div_ceil(STRIP) * row_vectors;
    let mut maxima = Maxima::new();
    let mut index = ABSOLUTE_POS;
    while index < strips {
        let strip = strips - 1usize - index;
        let row0 = strip / row_vectors * STRIP;
        let vector = strip % row_vectors;
        let words = load_strip::<N>(x, row0, vector, rows, row_vectors);
        #[unroll]
        for w in 0..width {
            let mut column = Array::<u32>::new(STRIP);
            #[unroll]
            for i in 0..STRIP {
                column[i] = words[comptime!(i * width + w)];
            }
            let folded = fold_words(&column, &signs, 0usize, plan);
            maxima.include(&folded, plan);
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    leave_group(&mut out, 0usize, &maxima, plan);
}
