//! Amax values of a matrix in strips of 16 rows, each in the registers of a unit: a column of vectors
//! of a block of rows. No shared memory, no barrier before the end: units load while others fold,
//! where cubes that share tiles all do the same at once.

use cubecl::prelude::*;

use super::fold::{
    AmaxOut, AmaxPlan, Maxima, STRIP, fold_words, leave_group, with_factor, words_amax,
};
use crate::{
    cube::{
        codec::canonical,
        hadamard::Signs,
        ptx::{cvta_to_global, ld_global_u32, max_nan_abs_bf16x2, prmt, redux_sync_max},
    },
    tensor::{AmaxGranularity, FloatKind},
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

/// Column `w` of the words of a strip, of `width` words a row.
#[cube]
fn column_of(words: &Array<u32>, #[comptime] w: usize, #[comptime] width: usize) -> Array<u32> {
    let mut column = Array::<u32>::new(STRIP);
    #[unroll]
    for i in 0..STRIP {
        column[i] = words[comptime!(i * width + w)];
    }
    column
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
            let folded = fold_words(&column_of(&words, w, width), &signs, 0usize, plan);
            maxima.include(&folded, plan);
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    leave_group(&mut out, 0usize, &maxima, plan);
}

/// One unit folds the same vector of every `CUBE_COUNT_Y`th strip, from the end of the matrix on, so
/// that the amax of a column stays in its registers. Planes have a maximum of each row.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn amax_lines_kernel<N: Size>(
    x: &[Vector<u32, N>],
    mut out: AmaxOut,
    signs: Signs,
    rows: usize,
    row_vectors: usize,
    #[comptime] plan: AmaxPlan,
) {
    let width = N::value();
    let per_word = comptime!(4 / plan.kind.size());
    let own_columns = comptime!(plan.has_own_columns());
    let strips = rows.div_ceil(STRIP);
    let vector = CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize;
    // Units behind the end of a row take its last vector, which changes no maximum.
    let loaded = min(vector, row_vectors - 1usize);
    let mut maxima = Maxima::new();
    let mut columns = Array::<u32>::new(comptime!(width * per_word));
    #[unroll]
    for i in 0..comptime!(width * per_word) {
        columns[i] = 0u32;
    }
    let mut index = CUBE_POS_Y as usize;
    while index < strips {
        let row0 = (strips - 1usize - index) * STRIP;
        let words = load_strip::<N>(x, row0, loaded, rows, row_vectors);
        #[unroll]
        for w in 0..width {
            let folded = fold_words(&column_of(&words, w, width), &signs, 0usize, plan);
            maxima.include(&folded, plan);
            if comptime!(own_columns) {
                #[unroll]
                for half in 0..per_word {
                    let at = comptime!(w * per_word + half);
                    columns[at] = max(columns[at], folded.columns[half]);
                }
            }
        }
        if comptime!(plan.rows == Some(AmaxGranularity::PerRow)) {
            raise_rows(&words, &mut out.rows, row0, rows, width, plan);
        }
        index += CUBE_COUNT_Y as usize;
    }
    leave_group(&mut out, 0usize, &maxima, plan);
    if comptime!(own_columns) {
        let count = comptime!(width * per_word);
        raise_columns(&columns, &mut out.cols, vector, row_vectors, count, plan);
    }
}

/// Raises the amax values of the `count` columns of vector `vector`, if rows have as many, to
/// maxima without the factor of their transform.
#[cube]
fn raise_columns(
    columns: &Array<u32>,
    out: &mut Box<[Atomic<u32>]>,
    vector: usize,
    row_vectors: usize,
    #[comptime] count: usize,
    #[comptime] plan: AmaxPlan,
) {
    if vector < row_vectors {
        #[unroll]
        for i in 0..count {
            let bits = canonical(with_factor(columns[i], plan.hadamard));
            out[vector * count + i].fetch_max(bits);
        }
    }
}

/// Raises the amax values of the rows of a strip, of which each unit has `width` words of each row:
/// of a plane at once, where there are planes.
#[cube]
fn raise_rows(
    words: &Array<u32>,
    out: &mut Box<[Atomic<u32>]>,
    row0: usize,
    rows: usize,
    #[comptime] width: usize,
    #[comptime] plan: AmaxPlan,
) {
    let (conversion, kind) = comptime!((plan.conversion, plan.kind));
    let pairs = comptime!(conversion.has_ptx() && kind == FloatKind::Bf16);
    let mut own = 0u32;
    #[unroll]
    for pair in 0..comptime!(STRIP / 2) {
        let mut both = Array::<u32>::new(2usize);
        if comptime!(pairs) {
            let first = comptime!(2 * pair * width);
            let mut upper = words[first];
            let mut lower = words[comptime!(first + width)];
            #[unroll]
            for w in 1..width {
                upper = max_nan_abs_bf16x2(upper, words[comptime!(first + w)]);
                lower = max_nan_abs_bf16x2(lower, words[comptime!(first + width + w)]);
            }
            // The first halves of the words of both rows, and the second ones.
            let firsts = prmt(upper, lower, 0x5410u32);
            let largest = max_nan_abs_bf16x2(firsts, prmt(upper, lower, 0x7632u32));
            both[0] = redux_sync_max(largest << 16u32);
            // The half below changes no order, and goes.
            both[1] = redux_sync_max(largest) & 0xFFFF_0000u32;
        } else {
            #[unroll]
            for i in 0..2usize {
                let mut row = Array::<u32>::new(width);
                #[unroll]
                for w in 0..width {
                    row[w] = words[comptime!((2 * pair + i) * width + w)];
                }
                let largest = words_amax(&row, width, conversion, kind);
                both[i] = if comptime!(conversion.has_ptx()) {
                    redux_sync_max(largest)
                } else if comptime!(plan.planes) {
                    plane_max(largest)
                } else {
                    largest
                };
            }
        }
        #[unroll]
        for i in 0..2usize {
            let line = comptime!(2 * pair + i);
            if comptime!(plan.planes) {
                own = select(UNIT_POS_PLANE as usize == line, both[i], own);
            } else if row0 + line < rows {
                out[row0 + line].fetch_max(canonical(both[i]));
            }
        }
    }
    if comptime!(plan.planes) {
        let row = row0 + UNIT_POS_PLANE as usize;
        if (UNIT_POS_PLANE as usize) < STRIP && row < rows {
            out[row].fetch_max(canonical(own));
        }
    }
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
