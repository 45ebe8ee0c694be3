//! Operands as kernels want them: packed ones as bf16, exactly and without the factor of the
//! tensor, and bf16 ones transposed.

use cubecl::{prelude::*, server::Handle};

use super::{
    arguments::{MixedMatrix, MixedMatrixLaunch},
    product::Operand,
    scheduler::{GroupArgs, Schedule, schedule_groups},
};
use crate::{
    BLOCK,
    cube::{
        codec::{decode_e2m1_pair, decode_e2m1x8, decode_e4m3x2},
        unscaled::scale_pair,
    },
    launch::tile_grid,
    memory::{address_type, allocate, is_aligned},
    tensor::{DeviceQuantized, Matrix},
};

/// Units of a cube.
const UNITS: usize = 256;
/// Words that a unit decodes, all loaded before the first is stored.
const WORDS: usize = 4;

/// One word of eight codes becomes 16 bytes of eight bf16: a warp reads 128 bytes of codes and
/// writes 512 at a time.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn decode_kernel(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<u32, Const<4>>],
    words: usize,
) {
    let first = CUBE_POS * comptime!(UNITS * WORDS) + UNIT_POS as usize;
    let mut loaded = Array::<u32>::new(WORDS);
    let mut bytes = Array::<u32>::new(WORDS);
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        // What lies outside reads the first word and is not stored.
        let word = select(word < words, word, 0usize);
        loaded[i] = codes[word];
        bytes[i] = u32::cast_from(scales[word / 2usize]);
    }
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        let scale = scale_pair(bytes[i]);
        if word < words {
            out[word] = decode_e2m1x8(u32::reinterpret(loaded[i]), scale);
        }
    }
}

/// A bf16 copy of `packed`: `outer` rows of `blocks * 16` elements, without the factor of its
/// maximum. It lives until the last product that reads it has run.
pub fn decode(client: &Client, packed: &DeviceQuantized) -> Handle {
    let words = packed.outer() * packed.blocks() * 2;
    let out = allocate(client, words * 16);
    if words == 0 {
        return out;
    }
    // SAFETY: the operand was checked against its shape, and the kernel stays below `words`.
    unsafe {
        decode_kernel::launch_unchecked(
            client,
            CubeCount::Static(words.div_ceil(UNITS * WORDS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(words / 2 * BLOCK),
            BufferArg::from_raw_parts(packed.codes.clone(), words),
            BufferArg::from_raw_parts(packed.scales.clone(), words / 2),
            BufferArg::from_raw_parts(out.clone(), words),
            words,
        );
    }
    out
}

/// Columns that the order of the fused product changes together.
pub const SPAN: usize = 128;

/// Vectors of eight elements that a unit of [`arrange_kernel`] writes.
const VECTORS: usize = 2;

/// How much [`arrange_kernel`] reads and writes.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ArrangeSize {
    /// Words of eight columns in a row of `a`.
    pub words: u32,
    /// Vectors of eight elements of the output.
    pub vectors: u32,
    /// Groups of rows.
    pub groups: u32,
}

/// `a` as the W4A16 kernel reads it
/// ([`sm90_mainloop_w4a16`](crate::cube::ptx::sm90_mainloop_w4a16)): rows of whole `SPAN`s, zeros
/// beyond `words` words of eight columns, packed elements times 2^-8. In a span vector `8 h + 4 w +
/// j` holds, for `q` from 0 to 3, columns `c + j` and `c + j + 4` with `c = 32 q + 16 h + 8 w`. The
/// first cube also writes the schedule of a product in groups (`sm90_fused::schedule_groups`).
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn arrange_kernel(
    a: MixedMatrix<u32, u16>,
    out: &mut [Vector<u32, Const<4>>],
    offsets: &[u32],
    schedule: &mut [Vector<u32, Const<4>>],
    size: ArrangeSize,
    #[comptime] packed: bool,
    #[comptime] grouped: Option<Schedule>,
) {
    let words = size.words;
    let vectors = size.vectors;
    let first = CUBE_POS as u32 * comptime!((UNITS * VECTORS) as u32) + UNIT_POS;
    // Vectors of a row.
    let width = words.div_ceil(comptime!(SPAN as u32 / 8)) * comptime!(SPAN as u32 / 8);
    if comptime!(grouped.is_some()) {
        let rows = vectors / width;
        schedule_groups(
            offsets,
            schedule,
            size.groups,
            rows,
            comptime!(grouped.unwrap()),
        );
    }
    let mut pairs = Array::<u32>::new(comptime!(4 * VECTORS));
    let mut bytes = Array::<u32>::new(comptime!(4 * VECTORS));
    #[unroll]
    for i in 0..VECTORS {
        let vector = first + comptime!((i * UNITS) as u32);
        let row = vector / width;
        let within = vector % width;
        #[unroll]
        for q in 0..4usize {
            let slot = comptime!(4 * i + q);
            let word = (within & !15u32)
                + comptime!(4 * q as u32)
                + ((within / 8u32) & 1u32) * 2u32
                + ((within / 4u32) & 1u32);
            let inside = vector < vectors && word < words;
            let at = row as usize * words as usize + word as usize;
            pairs[slot] = 0u32;
            bytes[slot] = 0u32;
            if inside {
                if comptime!(packed) {
                    pairs[slot] = a.codes[at];
                    bytes[slot] = u32::cast_from(a.scales[at / 2usize]);
                } else {
                    let at = at * 8usize + (within % 4u32) as usize;
                    pairs[slot] = u32::cast_from(a.dense[at])
                        | (u32::cast_from(a.dense[at + 4usize]) << 16u32);
                }
            }
        }
    }
    #[unroll]
    for i in 0..VECTORS {
        let vector = first + comptime!((i * UNITS) as u32);
        let mut eight = Vector::<u32, Const<4>>::new(0u32);
        #[unroll]
        for q in 0..4usize {
            let slot = comptime!(4 * i + q);
            if comptime!(packed) {
                let scale = decode_e4m3x2(u16::cast_from(bytes[slot]));
                let pair = (pairs[slot] >> ((vector % 4u32) * 4u32)) & 0x000f_000fu32;
                eight.insert(
                    q,
                    decode_e2m1_pair(u32::reinterpret(pair), scale.extract(0usize)),
                );
            } else {
                eight.insert(q, pairs[slot]);
            }
        }
        if vector < vectors {
            out[vector as usize] = eight;
        }
    }
}

/// `operand` in bf16 in the order of [`arrange_kernel`], rows padded to whole [`SPAN`]s. With it,
/// where there is one, the schedule of `entries` of a product in `groups` of rows. Both live until
/// the last product that reads them has run. There are rows, and columns.
pub(super) fn arrange(
    client: &Client,
    operand: &Operand,
    groups: &GroupArgs,
    entries: usize,
    order: Option<Schedule>,
) -> (Handle, Handle) {
    let words = operand.stored() / 8;
    let vectors = operand.outer() * words.next_multiple_of(SPAN / 8);
    let (out, schedule) = (
        allocate(client, vectors * 16),
        allocate(client, entries * 16),
    );
    let parts = operand.parts(&out);
    let read = operand.outer() * words;
    // SAFETY: the operand was checked against its shape, there are entries for a tile at the end of
    // each group, and the kernel masks what it reads and writes.
    unsafe {
        arrange_kernel::launch_unchecked(
            client,
            CubeCount::Static(vectors.div_ceil(UNITS * VECTORS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(vectors * 8),
            MixedMatrixLaunch::new(
                BufferArg::from_raw_parts(parts.codes, read),
                BufferArg::from_raw_parts(parts.scales, read / 2),
                BufferArg::from_raw_parts(parts.dense, read * 8),
            ),
            BufferArg::from_raw_parts(out.clone(), vectors),
            BufferArg::from_raw_parts(groups.offsets.clone(), groups.groups + 1),
            BufferArg::from_raw_parts(schedule.clone(), entries),
            ArrangeSizeLaunch::new(words as u32, vectors as u32, groups.groups as u32),
            parts.packed,
            order,
        );
    }
    (out, schedule)
}

/// Rows and columns of a tile that [`transpose_kernel`] transposes at a time.
const SIDE: usize = 64;
/// Words from one column of the tile to the next in shared memory: a word for each two rows, and
/// one that spreads columns over the banks.
const PITCH: usize = SIDE / 2 + 1;

/// `out[j, i] = x[i, j]` for elements of 16 bits, `x` being `rows` x `cols`. Vectors divide the
/// rows of either matrix. A tile at a time waits in shared memory, two rows of a column in a word:
/// 128 bytes of a row are read side by side, and as many written.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn transpose_kernel<R: Size, W: Size>(
    x: &[Vector<u16, R>],
    out: &mut [Vector<u16, W>],
    rows: usize,
    cols: usize,
) {
    let (read, written) = (R::value().comptime(), W::value().comptime());
    let mut words: Shared<[u32]> = Shared::new_slice(comptime!(SIDE * PITCH));
    let across = cols.div_ceil(SIDE);
    let tiles = rows.div_ceil(SIDE) * across;
    let mut tile = CUBE_POS;
    while tile < tiles {
        let (row0, col0) = (tile / across * SIDE, tile % across * SIDE);
        // Eight columns of two rows.
        let mut item = UNIT_POS as usize;
        while item < comptime!(SIDE / 2 * (SIDE / 8)) {
            let (pair, eight) = (item / 8usize, item % 8usize);
            let row = row0 + 2usize * pair;
            #[unroll]
            for i in 0..comptime!(8 / read) {
                let within = 8usize * eight + comptime!(i * read);
                let col = col0 + within;
                let mut upper = Vector::<u16, R>::new(0u16);
                let mut lower = Vector::<u16, R>::new(0u16);
                if col < cols && row < rows {
                    upper = x[(row * cols + col) / read];
                }
                if col < cols && row + 1usize < rows {
                    lower = x[((row + 1usize) * cols + col) / read];
                }
                #[unroll]
                for j in 0..read {
                    words[(within + j) * PITCH + pair] = u32::cast_from(upper.extract(j))
                        | (u32::cast_from(lower.extract(j)) << 16u32);
                }
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        // Eight rows of a column.
        let mut item = UNIT_POS as usize;
        while item < comptime!(SIDE * (SIDE / 8)) {
            let (column, eight) = (item / 8usize, item % 8usize);
            let col = col0 + column;
            #[unroll]
            for i in 0..comptime!(8 / written) {
                let row = row0 + 8usize * eight + comptime!(i * written);
                if col < cols && row < rows {
                    let mut vector = Vector::<u16, W>::empty();
                    #[unroll]
                    for j in 0..written {
                        let element = comptime!(i * written + j);
                        let word = words[column * PITCH + 4usize * eight + comptime!(element / 2)];
                        let bits = (word >> comptime!(element as u32 % 2 * 16)) & 0xFFFFu32;
                        vector.insert(j, u16::cast_from(bits));
                    }
                    out[(col * rows + row) / written] = vector;
                }
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        tile += CUBE_COUNT;
    }
}

/// A transposed copy of a bf16 matrix. It lives until the last product that reads it has run.
pub fn transposed(client: &Client, matrix: &Matrix) -> Matrix {
    let Matrix {
        rows, cols, dtype, ..
    } = *matrix;
    let out = Matrix::empty(client, cols, rows, dtype);
    if out.is_empty() {
        return out;
    }
    let width = |len: usize, aligned: bool| match aligned {
        true => 1 << len.trailing_zeros().min(3),
        false => 1,
    };
    let (read, written) = (width(cols, is_aligned(&matrix.handle)), width(rows, true));
    let (count, dim) = tile_grid(client, rows.div_ceil(SIDE) * cols.div_ceil(SIDE));
    // SAFETY: the caller checked the memory against the shape, and the kernel masks by it.
    unsafe {
        transpose_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(matrix.len()),
            read,
            written,
            BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len() / read),
            BufferArg::from_raw_parts(out.handle.clone(), matrix.len() / written),
            rows,
            cols,
        );
    }
    out
}
