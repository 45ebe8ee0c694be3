//! Amax values of a matrix in strips of 16 rows, each in the registers of a unit: a column of
//! vectors of a block of rows. Elements do not pass through shared memory, and units synchronize
//! rarely or only at the end. Some units therefore load while others fold, whereas in cubes that
//! share tiles all units do the same at the same time.

use cubecl::prelude::*;

use super::fold::{
    AmaxOut, AmaxPlan, Folded, Maxima, STRIP, fold_words, leave_group, with_factor, words_amax,
};
use crate::{
    cube::{
        codec::{Conversion, canonical},
        hadamard::Signs,
        plane::exchange,
        ptx::{cvta_to_global, ld_global_u32, max_nan_abs_bf16x2, max_nan_bf16x2, prmt},
    },
    tensor::FloatKind,
};

/// Maximum number of words per vector: four columns of 16 bits, for which a unit has 32 words in
/// flight.
pub(super) const STRIP_WORDS: usize = 2;

/// Fills `words` row by row with the strip that starts at row `row0`, at vector `vector` of rows of
/// `row_vectors`; zeros after the last of `rows`.
#[cube]
fn load_strip<N: Size>(
    x: &[Vector<u32, N>],
    words: &mut Array<u32>,
    row0: usize,
    vector: usize,
    rows: usize,
    row_vectors: usize,
) {
    let width = N::value();
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
}

/// Returns column `w` of the words of a strip with `width` words per row.
#[cube]
fn column_of(words: &Array<u32>, #[comptime] w: usize, #[comptime] width: usize) -> Array<u32> {
    let mut column = Array::<u32>::new(STRIP);
    #[unroll]
    for i in 0..STRIP {
        column[i] = words[comptime!(i * width + w)];
    }
    column
}

/// Each unit folds every `units`-th strip. Strips are counted from the end of the matrix, as in
/// `amax_tiles_kernel`.
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
    let mut words = Array::<u32>::new(comptime!(STRIP * width));
    let mut maxima = Maxima::new();
    let mut index = ABSOLUTE_POS;
    while index < strips {
        let strip = strips - 1usize - index;
        let row0 = strip / row_vectors * STRIP;
        let vector = strip % row_vectors;
        load_strip::<N>(x, &mut words, row0, vector, rows, row_vectors);
        #[unroll]
        for w in 0..width {
            let folded = fold_words(&column_of(&words, w, width), &signs, 0usize, plan);
            maxima.include(&folded, plan);
        }
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
    leave_group(&mut out, 0usize, &maxima, plan);
}

/// Each unit folds the same vector of every `CUBE_COUNT_Y`th strip, from the end of the matrix on,
/// so that the amax of a column stays in its registers. Planes compute an amax for each row, which
/// their cube raises together.
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
    // Units after the end of a row load its last vector, which changes no maximum.
    let loaded = min(vector, row_vectors - 1usize);
    let mut maxima = Maxima::new();
    let mut columns = Array::<u32>::new(comptime!(width * per_word));
    #[unroll]
    for i in 0..comptime!(width * per_word) {
        columns[i] = 0u32;
    }
    let own_rows = comptime!(plan.has_own_rows());
    let mut stage = LineStage::new(plan);
    let mut words = Array::<u32>::new(comptime!(STRIP * width));
    let mut index = CUBE_POS_Y as usize;
    let mut row0 = (strips - 1usize - min(index, strips - 1usize)) * STRIP;
    load_strip::<N>(x, &mut words, row0, loaded, rows, row_vectors);
    while index < strips {
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
        let mut lines = rows_of_unit(&words, width, plan);
        let this = row0;
        index += CUBE_COUNT_Y as usize;
        // Loads the next strip while planes reduce the rows of this one.
        if index < strips {
            row0 = (strips - 1usize - index) * STRIP;
            load_strip::<N>(x, &mut words, row0, loaded, rows, row_vectors);
        }
        if comptime!(own_rows && plan.planes) {
            stage.keep_rows(&mut lines, this, plan);
            if stage.turns == STAGED || index >= strips {
                stage.leave_rows(&mut out.rows, rows);
            }
        } else if comptime!(own_rows) {
            #[unroll]
            for line in 0..STRIP {
                if this + line < rows {
                    out.rows[this + line].fetch_max(canonical(lines[line]));
                }
            }
        }
    }
    leave_group(&mut out, 0usize, &maxima, plan);
    if comptime!(own_columns) {
        let count = comptime!(width * per_word);
        raise_columns(&columns, &mut out.cols, row_vectors * count, count, plan);
    }
}

/// Raises the amax values of the columns of a cube, `columns` of each unit, without the factor
/// of their transform. Neighbouring units take neighbouring columns, however many each has,
/// so that as few sectors of the L2 cache as possible are touched. All units of the cube must call
/// it.
#[cube]
fn raise_columns(
    columns: &Array<u32>,
    out: &mut Box<[Atomic<u32>]>,
    cols: usize,
    #[comptime] count: usize,
    #[comptime] plan: AmaxPlan,
) {
    let units = CUBE_DIM as usize;
    let mut staged: Shared<[u32]> = Shared::new_slice(comptime!(plan.units * count));
    #[unroll]
    for i in 0..count {
        staged[UNIT_POS as usize * count + i] = columns[i];
    }
    sync_cube();
    #[unroll]
    for i in 0..count {
        let at = UNIT_POS as usize + i * units;
        let column = CUBE_POS_X as usize * units * count + at;
        if column < cols {
            out[column].fetch_max(canonical(with_factor(staged[at], plan.hadamard)));
        }
    }
}

/// Returns true if the amax values of two rows of a strip are the halves of a word.
const fn rows_in_pairs(plan: &AmaxPlan) -> bool {
    matches!(plan.kind, FloatKind::Bf16) && plan.conversion.has_ptx()
}

/// Returns the magnitude bits of the largest of a unit's words in each row of a strip with `width`
/// words per row, [in pairs](rows_in_pairs) of rows or one by one. Empty if no row amax is
/// requested.
#[cube]
fn rows_of_unit(
    words: &Array<u32>,
    #[comptime] width: usize,
    #[comptime] plan: AmaxPlan,
) -> Array<u32> {
    let pairs = comptime!(rows_in_pairs(&plan));
    let per_row = comptime!(plan.has_own_rows());
    let mut lines = Array::<u32>::new(comptime!(if pairs { STRIP / 2 } else { STRIP }));
    if comptime!(per_row && pairs) {
        #[unroll]
        for pair in 0..comptime!(STRIP / 2) {
            let first = comptime!(2 * pair * width);
            let mut upper = words[first];
            let mut lower = words[comptime!(first + width)];
            #[unroll]
            for w in 1..width {
                upper = max_nan_abs_bf16x2(upper, words[comptime!(first + w)]);
                lower = max_nan_abs_bf16x2(lower, words[comptime!(first + width + w)]);
            }
            // The lower halves of the words of both rows, then the upper ones.
            let firsts = prmt(upper, lower, 0x5410u32);
            lines[pair] = max_nan_abs_bf16x2(firsts, prmt(upper, lower, 0x7632u32));
        }
    } else if comptime!(per_row) {
        #[unroll]
        for line in 0..STRIP {
            let mut row = Array::<u32>::new(width);
            #[unroll]
            for w in 0..width {
                row[w] = words[comptime!(line * width + w)];
            }
            lines[line] = words_amax(&row, width, plan.conversion, plan.kind);
        }
    }
    lines
}

/// Strips of a cube whose rows are raised at once.
const STAGED: usize = 16;

/// Amax values of the rows of a cube's last strips, by plane, before they are raised. All cubes
/// that share a row raise it; raising each plane's value separately would take eight times as many
/// atomics.
#[derive(CubeType)]
struct LineStage {
    /// First row of each strip.
    first_rows: Shared<[u32]>,
    /// Magnitude bits, by strip, plane and row.
    bits: Shared<[u32]>,
    /// Number of strips stored.
    turns: usize,
    /// Maximum number of planes.
    #[cube(comptime)]
    planes: usize,
}

#[cube]
impl LineStage {
    fn new(#[comptime] plan: AmaxPlan) -> LineStage {
        let stages = comptime!(plan.planes && plan.has_own_rows());
        let planes = comptime!(if stages { plan.units.div_ceil(32) } else { 1 });
        let strips = comptime!(if stages { STAGED } else { 1 });
        LineStage {
            first_rows: Shared::new_slice(strips),
            bits: Shared::new_slice(comptime!(strips * planes * STRIP)),
            turns: 0usize,
            planes,
        }
    }

    /// Stores the rows of the strip that starts at row `row0`; `lines` are each unit's results of
    /// [`rows_of_unit()`].
    fn keep_rows(&mut self, lines: &mut Array<u32>, row0: usize, #[comptime] plan: AmaxPlan) {
        let pairs = comptime!(rows_in_pairs(&plan));
        let unit = UNIT_POS % 32u32;
        let mut line = unit / 2u32;
        let mut first = unit & 1u32 == 0u32;
        let bits = if comptime!(pairs) {
            let both = reduce_scatter(lines, comptime!(STRIP / 2), true, plan.conversion);
            line = unit / 4u32 * 2u32 + unit % 2u32;
            first = unit % 4u32 < 2u32;
            select(unit & 1u32 == 0u32, both << 16u32, both & 0xFFFF_0000u32)
        } else {
            reduce_scatter(lines, STRIP, false, plan.conversion)
        };
        let plane = UNIT_POS as usize / 32usize;
        if first {
            self.bits[(self.turns * self.planes + plane) * STRIP + line as usize] = bits;
        }
        if UNIT_POS == 0u32 {
            self.first_rows[self.turns] = row0 as u32;
        }
        self.turns += 1usize;
    }

    /// Raises the amax values of the stored rows. All units of the cube must call it.
    fn leave_rows(&mut self, out: &mut Box<[Atomic<u32>]>, rows: usize) {
        sync_cube();
        let planes = CUBE_DIM as usize / 32usize;
        let mut item = UNIT_POS as usize;
        while item < self.turns * STRIP {
            let (turn, line) = (item / STRIP, item % STRIP);
            let mut bits = 0u32;
            for plane in 0..planes {
                bits = max(bits, self.bits[(turn * self.planes + plane) * STRIP + line]);
            }
            let row = self.first_rows[turn] as usize + line;
            if row < rows {
                out[row].fetch_max(canonical(bits));
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        self.turns = 0usize;
    }
}

/// Returns the larger of two magnitudes or, with `pairs`, the larger in each half of words of bf16.
#[cube]
fn larger(a: u32, b: u32, #[comptime] pairs: bool) -> u32 {
    if comptime!(pairs) {
        max_nan_bf16x2(a, b)
    } else {
        max(a, b)
    }
}

/// Reduces `count` words, a power of two, over the units of a plane by maximum, and returns word
/// number `unit * count / 32`. In each stage a unit keeps half of its words and sends the others to
/// the unit that keeps them. `redux.sync` takes one instruction per word, but two cycles of an SM.
#[cube]
fn reduce_scatter(
    words: &mut Array<u32>,
    #[comptime] count: usize,
    #[comptime] pairs: bool,
    #[comptime] conversion: Conversion,
) -> u32 {
    #[unroll]
    for stage in 0..5u32 {
        let distance = comptime!(16u32 >> stage);
        let kept = comptime!(count >> (stage + 1));
        if comptime!(kept > 0) {
            let keeps_upper = UNIT_POS & distance != 0u32;
            #[unroll]
            for i in 0..kept {
                let (low, high) = (words[i], words[comptime!(i + kept)]);
                let sent = select(keeps_upper, low, high);
                let own = select(keeps_upper, high, low);
                words[i] = larger(own, exchange_word(sent, distance, conversion), pairs);
            }
        } else {
            let own = words[0];
            words[0] = larger(own, exchange_word(own, distance, conversion), pairs);
        }
    }
    words[0]
}

/// [`exchange()`] for a word.
#[cube]
fn exchange_word(word: u32, #[comptime] distance: u32, #[comptime] conversion: Conversion) -> u32 {
    u32::reinterpret(exchange(f32::reinterpret(word), distance, conversion))
}

/// A strip of a matrix that a cube shares.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Strip {
    /// First row.
    pub row0: usize,
    /// Rows of the matrix.
    pub rows: usize,
    /// Words per row.
    pub row_words: usize,
}

/// Raises the amax values of the columns of word `word` of a row, if each column has one. Most
/// strips raise none of them, and a load costs less than an atomic.
#[cube]
fn raise_word(folded: &Folded, word: usize, out: &mut AmaxOut, #[comptime] plan: AmaxPlan) {
    if comptime!(plan.has_own_columns()) {
        let per_word = comptime!(4 / plan.kind.size());
        #[unroll]
        for half in 0..per_word {
            let bits = canonical(with_factor(folded.columns[half], plan.hadamard));
            let column = word * per_word + half;
            if bits > out.cols[column].load() {
                out.cols[column].fetch_max(bits);
            }
        }
    }
}

/// Folds a strip of `x` that the units of the cube have written, before a barrier: into `maxima`,
/// or into the amax values of the columns in `out`. Each unit takes columns of words. Rows consist
/// of whole vectors of words.
#[cube]
pub(crate) fn fold_strip<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    strip: &Strip,
    signs: &Signs,
    maxima: &mut Maxima,
    out: &mut AmaxOut,
    #[comptime] plan: AmaxPlan,
) {
    let width = N::value();
    let rows = min(strip.rows - strip.row0, STRIP);
    if comptime!(plan.conversion.has_ptx()) {
        // Loads words, which need fewer registers than vectors. A plain load might go through the
        // constant cache.
        let start = cvta_to_global::<Vector<F, N>>(unsafe { x.as_ptr_unchecked() })
            + u64::cast_from(strip.row0 * strip.row_words) * 4u64;
        let mut word = UNIT_POS as usize;
        while word < strip.row_words {
            let mut column = Array::<u32>::new(STRIP);
            #[unroll]
            for i in 0..STRIP {
                // After the end the last row is loaded again, and not used.
                let row = min(comptime!(i).runtime(), rows - 1usize);
                let at = start + u64::cast_from(row * strip.row_words + word) * 4u64;
                column[i] = select(i < rows, ld_global_u32(at), 0u32);
            }
            let folded = fold_words(&column, signs, 0usize, plan);
            maxima.include(&folded, plan);
            raise_word(&folded, word, out, plan);
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
                raise_word(&folded, vector * width + w, out, plan);
            }
            vector += CUBE_DIM as usize;
        }
    }
}
