//! Kernels that look up rows and that sum their gradients; see
//! [`reference::embedding_gradient`](crate::reference::embedding_gradient).

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::Conversion,
        overlap::let_next_begin,
        row_blocks::{ROW_BLOCK, RowPlan, block_values, block_vector, vector_index},
    },
    reference::EMBEDDING_RUN,
};

/// Rows that are loaded before the first one is added.
const IN_FLIGHT: usize = 4;

/// Ids and sizes of a lookup.
#[derive(CubeType, CubeLaunch)]
pub struct LookUp {
    /// Row numbers.
    pub ids: Box<[u32]>,
    /// Number of ids.
    pub tokens: usize,
    /// Number of the first row of the shard.
    pub first: usize,
    /// Number of rows of the shard.
    pub rows: usize,
    /// Number of rows of the whole table.
    pub vocab: usize,
    /// Elements per row.
    pub cols: usize,
}

/// Comptime choices of [`embedding_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LookUpPlan {
    /// Rows of the table.
    pub from: RowPlan,
    /// Rows of the output.
    pub to: RowPlan,
    /// Conversion method.
    pub conversion: Conversion,
    /// True if the next kernel can start before this one has ended.
    pub overlaps: bool,
}

/// Each unit looks up every `units`-th block of 8.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn embedding_kernel<F: Numeric, N: Size, G: Numeric, M: Size>(
    table: &[Vector<F, N>],
    look_up: LookUp,
    out: &mut [Vector<G, M>],
    #[comptime] plan: LookUpPlan,
    #[define(F)] _table_elem: ElemType,
    #[define(G)] _out_elem: ElemType,
) {
    let (from, to, conversion) = comptime!((plan.from, plan.to, plan.conversion));
    let_next_begin(plan.overlaps);
    let (in_width, out_width) = (N::value(), M::value());
    let in_vectors = comptime!(from.vectors(in_width));
    let out_vectors = comptime!(to.vectors(out_width));
    let cols = look_up.cols;
    let in_row = cols / comptime!(from.per_scalar() * in_width);
    let out_row = cols / comptime!(to.per_scalar() * out_width);
    let blocks = (cols + comptime!(ROW_BLOCK - 1)) / ROW_BLOCK;
    let nan = f32::reinterpret(0x7FC0_0000u32.runtime());
    let mut item = ABSOLUTE_POS;
    while item < look_up.tokens * blocks {
        let token = item / blocks;
        let block = item - token * blocks;
        let id = look_up.ids[token] as usize;
        let known = id >= look_up.first && id < look_up.first + look_up.rows;
        let own = select(known, id - look_up.first, 0usize);
        let other = select(id < look_up.vocab, 0.0f32, nan);
        let row = own * in_row;
        let mut loaded = Array::<Vector<F, N>>::new(in_vectors);
        #[unroll]
        for v in 0..in_vectors {
            loaded[v] = table[vector_index(row, block, v, in_row, in_vectors, from)];
        }
        let left = cols - block * ROW_BLOCK;
        let mut values = block_values::<F, N>(&loaded, 0usize, left, 0.0f32, from);
        #[unroll]
        for i in 0..ROW_BLOCK {
            values[i] = select(known, values[i], other);
        }
        #[unroll]
        for v in 0..out_vectors {
            let index = block * out_vectors + v;
            if comptime!(to.whole) || index < out_row {
                out[token * out_row + index] = block_vector::<G, M>(&values, v, conversion, to);
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Tokens sorted by id.
#[derive(CubeType, CubeLaunch)]
pub struct SortedTokens {
    /// Ids, ascending; `vocab` for ids that are not a row.
    pub keys: Box<[u32]>,
    /// Indices of the tokens.
    pub order: Box<[u32]>,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of rows of the table.
    pub vocab: usize,
    /// Elements per row.
    pub cols: usize,
}

/// Writes 8 sums to a row of `f32` that starts at vector `row`.
#[cube]
fn store_sums<M: Size>(
    out: &mut [Vector<f32, M>],
    sums: &Array<f32>,
    row: usize,
    block: usize,
    cols: usize,
) {
    let width = M::value();
    #[unroll]
    for v in 0..comptime!(ROW_BLOCK / width) {
        let column = block * ROW_BLOCK + comptime!(v * width);
        if column < cols {
            let mut vector = Vector::<f32, M>::empty();
            #[unroll]
            for k in 0..width {
                vector.insert(k, sums[comptime!(v * width + k)]);
            }
            out[row + column / width] = vector;
        }
    }
}

/// Each unit sums a block of 8 columns over [`EMBEDDING_RUN`] tokens. If all tokens of an id are in
/// one run, their sum is written to the table. If an id spans several runs, the sum of its first
/// run is entry `2 run + 1` of `partial`, and those of the other runs are entries `2 run`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn sum_runs_kernel<F: Numeric, N: Size, M: Size>(
    grad: &[Vector<F, N>],
    sorted: SortedTokens,
    table: &mut [Vector<f32, M>],
    partial: &mut [Vector<f32, M>],
    #[comptime] plan: RowPlan,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let vectors = comptime!(plan.vectors(width));
    let cols = sorted.cols;
    let row_vectors = cols / comptime!(plan.per_scalar() * width);
    let out_width = M::value();
    let out_row = cols / out_width;
    let blocks = (cols + comptime!(ROW_BLOCK - 1)) / ROW_BLOCK;
    let runs = (sorted.tokens + comptime!(EMBEDDING_RUN - 1)) / EMBEDDING_RUN;
    let mut item = ABSOLUTE_POS;
    while item < runs * blocks {
        let run = item / blocks;
        let block = item - run * blocks;
        let left = cols - block * ROW_BLOCK;
        let start = run * EMBEDDING_RUN;
        let end = min(start + EMBEDDING_RUN, sorted.tokens);
        let mut continued = false;
        if start > 0usize {
            continued = sorted.keys[start - 1usize] == sorted.keys[start];
        }
        let mut sums = Array::<f32>::new(ROW_BLOCK);
        #[unroll]
        for i in 0..ROW_BLOCK {
            sums[i] = 0.0f32;
        }
        let mut position = start;
        while position < end {
            let mut loaded = Array::<Vector<F, N>>::new(comptime!(IN_FLIGHT * vectors));
            #[unroll]
            for j in 0..IN_FLIGHT {
                let token = sorted.order[min(position + j, end - 1usize)] as usize;
                #[unroll]
                for v in 0..vectors {
                    let row = token * row_vectors;
                    let index = vector_index(row, block, v, row_vectors, vectors, plan);
                    loaded[comptime!(j * vectors + v)] = grad[index];
                }
            }
            #[unroll]
            for j in 0..IN_FLIGHT {
                let here = position + j;
                if here < end {
                    let first = comptime!(j * vectors);
                    let values = block_values::<F, N>(&loaded, first, left, 0.0f32, plan);
                    #[unroll]
                    for i in 0..ROW_BLOCK {
                        sums[i] += values[i];
                    }
                    let key = sorted.keys[here];
                    let next = min(here + 1usize, sorted.tokens - 1usize);
                    let goes_on = here + 1usize < sorted.tokens && sorted.keys[next] == key;
                    if !goes_on || here + 1usize == end {
                        if continued || goes_on {
                            let entry = 2usize * run + usize::cast_from(!continued);
                            store_sums::<M>(partial, &sums, entry * out_row, block, cols);
                        } else if (key as usize) < sorted.vocab {
                            let row = key as usize * out_row;
                            store_sums::<M>(table, &sums, row, block, cols);
                        }
                        continued = false;
                        #[unroll]
                        for i in 0..ROW_BLOCK {
                            sums[i] = 0.0f32;
                        }
                    }
                }
            }
            position += IN_FLIGHT;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each unit adds a vector of the partial sums of an id whose tokens span several runs.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn join_runs_kernel<M: Size>(
    partial: &[Vector<f32, M>],
    sorted: SortedTokens,
    table: &mut [Vector<f32, M>],
) {
    let width = M::value();
    let row = sorted.cols / width;
    let tokens = sorted.tokens;
    let runs = (tokens + comptime!(EMBEDDING_RUN - 1)) / EMBEDDING_RUN;
    let mut item = ABSOLUTE_POS;
    while item < runs * row {
        let run = item / row;
        let column = item - run * row;
        let start = run * EMBEDDING_RUN;
        let mut end = min(start + EMBEDDING_RUN, tokens);
        let key = sorted.keys[end - 1usize];
        let mut begins = false;
        if end < tokens && (key as usize) < sorted.vocab {
            begins = sorted.keys[end] == key;
            if start > 0usize && sorted.keys[start - 1usize] == key {
                begins = false;
            }
        }
        if begins {
            let mut sum = partial[(2usize * run + 1usize) * row + column];
            let mut next = run + 1usize;
            while end < tokens {
                if sorted.keys[end] == key {
                    sum += partial[2usize * next * row + column];
                    next += 1usize;
                    end += EMBEDDING_RUN;
                } else {
                    end = tokens;
                }
            }
            table[key as usize * row + column] = sum;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
