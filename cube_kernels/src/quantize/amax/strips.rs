//! Amax values of a matrix in strips of 16 rows, each in the registers of a unit: a column of vectors
//! of a block of rows. No shared memory, no barrier before the end: units load while others fold,
//! where cubes that share tiles all do the same at once.

use cubecl::prelude::*;

use super::fold::{AmaxOut, AmaxPlan, Maxima, STRIP, fold_words, leave_group};
use crate::cube::{
    hadamard::Signs,
    ptx::{cvta_to_global, ld_global_u32},
};

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
/// `amax_tiles_kernel` do.
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

/// A strip of a matrix that a cube shares.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Strip {
    /// Its first row.
    pub row0: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Words of a row.
    pub row_words: usize,
}

/// Folds a strip of `x` that the units of the cube have written, before a barrier: each takes
/// columns of words. Rows are whole vectors of words.
#[cube]
pub(crate) fn fold_strip<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    strip: &Strip,
    signs: &Signs,
    maxima: &mut Maxima,
    #[comptime] plan: AmaxPlan,
) {
    let width = N::value();
    let rows = min(strip.rows - strip.row0, STRIP);
    if comptime!(plan.conversion.has_ptx()) {
        // Words, which need fewer registers than vectors. A load that is no instruction of its own
        // might come from the cache of constants.
        let start = cvta_to_global::<Vector<F, N>>(unsafe { x.as_ptr_unchecked() })
            + u64::cast_from(strip.row0 * strip.row_words) * 4u64;
        let mut word = UNIT_POS as usize;
        while word < strip.row_words {
            let mut column = Array::<u32>::new(STRIP);
            #[unroll]
            for i in 0..STRIP {
                // Behind the end the last row is loaded again, and not used.
                let row = min(comptime!(i).runtime(), rows - 1usize);
                let at = start + u64::cast_from(row * strip.row_words + word) * 4u64;
                column[i] = select(i < rows, ld_global_u32(at), 0u32);
            }
            let folded = fold_words(&column, signs, 0usize, plan);
            maxima.include(&folded, plan);
            word += CUBE_DIM as usize;
        }
    } else {
        let row_vectors = strip.row_words / width;
        let mut vector = UNIT_POS as usize;
        while vector < row_vectors {
            let mut words = Array::<u32>::new(comptime!(STRIP * width));
            for i in 0..STRIP {
                let mut loaded = Vector::<F, N>::zero();
                if i < rows {
                    loaded = x[(strip.row0 + i) * row_vectors + vector];
                }
                #[unroll]
                for w in 0..width {
                    words[w * STRIP + i] = u32::cast_from(loaded.extract(w));
                }
            }
            #[unroll]
            for w in 0..width {
                let mut column = Array::<u32>::new(STRIP);
                #[unroll]
                for i in 0..STRIP {
                    column[i] = words[comptime!(w * STRIP + i)];
                }
                let folded = fold_words(&column, signs, 0usize, plan);
                maxima.include(&folded, plan);
            }
            vector += CUBE_DIM as usize;
        }
    }
}
