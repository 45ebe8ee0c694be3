//! Conversion of operands to the form that a kernel reads: block scales in rows or in 128x4 tiles,
//! packed elements dequantized to bf16 (exactly and without the global scale), and MN-major
//! operands transposed.

use cubecl::{prelude::*, server::Handle};

use super::operand::{Elements, Operand, OperandLayout, ScaleTiling};
use crate::{
    BLOCK, Layout, Nvfp4Error, StoredForm,
    cube::{codec::decode_e2m1x8, unscaled::scale_pair},
    launch::tile_grid,
    memory::{address_type, allocate, is_aligned},
    moe::GroupOffsets,
    quantize,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// An operand in the form that a kernel reads.
#[derive(Debug, Clone)]
pub(crate) struct Materialized {
    /// Layout after conversion.
    pub layout: OperandLayout,
    /// Stored rows if rows run along K, otherwise stored columns.
    pub rows: usize,
    /// Matrices stacked along K: more than one only in an MN-major stack.
    pub stack: usize,
    /// Codes, or bf16 elements.
    pub elements: Handle,
    /// Block scales, if packed; otherwise any memory, which is not read.
    pub scales: Handle,
}

impl Materialized {
    pub fn is_packed(&self) -> bool {
        matches!(
            self.layout,
            OperandLayout::Packed | OperandLayout::PackedMnMajor
        )
    }

    pub fn is_mn_major(&self) -> bool {
        self.layout.is_mn_major()
    }

    /// Returns the number of elements in memory for a K dimension of `k`. Rows of an MN-major
    /// packed operand are padded to whole blocks.
    pub fn stored_len(&self, k: usize) -> usize {
        match self.layout {
            OperandLayout::PackedMnMajor => self.stack * k * self.rows.next_multiple_of(BLOCK),
            _ => self.stack * self.rows * k,
        }
    }

    /// Returns true if the bf16 elements begin at a multiple of 16 bytes.
    pub fn is_aligned(&self) -> bool {
        is_aligned(&self.elements)
    }
}

/// Converts `operand`, which stacks `stack` matrices along K, to `layout`, with block scales in 128x4
/// tiles or in rows. Buffers that it allocates live until the last kernel that reads them has run. If
/// `ends` has groups along K, elements after the last group are left undefined.
///
/// # Errors
/// Returns an error if the block scales cannot be converted to the other order.
pub(crate) fn materialize(
    client: &Client,
    operand: &Operand,
    stack: usize,
    layout: OperandLayout,
    (has_tiles, tiling): (bool, ScaleTiling),
    ends: Option<&GroupOffsets>,
) -> Result<Materialized, Nvfp4Error> {
    let rows = operand.outer();
    let dense = |layout, handle: &Handle| Materialized {
        layout,
        rows,
        stack: 1,
        elements: handle.clone(),
        scales: handle.clone(),
    };
    match operand.elements {
        Elements::Bf16(matrix) => Ok(dense(OperandLayout::KMajor, &matrix.handle)),
        Elements::Bf16MnMajor(matrix) if layout == OperandLayout::MnMajor => Ok(Materialized {
            stack,
            ..dense(OperandLayout::MnMajor, &matrix.handle)
        }),
        Elements::Bf16MnMajor(matrix) => {
            let (rows, cols) = (matrix.rows, matrix.cols);
            tracing::debug!(rows, cols, "gemm: a transposed copy of an operand");
            let copy = transposed(client, matrix, stack);
            Ok(Materialized {
                rows: copy.rows,
                ..dense(OperandLayout::KMajor, &copy.handle)
            })
        }
        // Kernels that take this layout read its codes and rows of scales.
        Elements::PackedMnMajor(packed) => Ok(Materialized {
            layout: OperandLayout::PackedMnMajor,
            rows,
            stack,
            elements: packed.codes.clone(),
            scales: block_scales(client, packed, false, tiling)?,
        }),
        Elements::Quantized(values) if !values.is_packed() => {
            Ok(dense(OperandLayout::KMajor, &values.codes))
        }
        Elements::Quantized(packed) => {
            let is_dense = layout == OperandLayout::KMajor;
            if is_dense && packed.layout.format.is_mx() {
                let values = decode_mx(client, packed, tiling)?;
                return Ok(dense(OperandLayout::KMajor, &values));
            }
            let scales = block_scales(client, packed, has_tiles, tiling)?;
            if is_dense {
                let values = decode_from(client, packed, &scales, ends);
                return Ok(dense(OperandLayout::KMajor, &values));
            }
            Ok(Materialized {
                layout,
                rows,
                stack: 1,
                elements: packed.codes.clone(),
                scales,
            })
        }
    }
}

/// Returns a bf16 copy of an MXFP8 or MXFP4 operand in stored orientation, including padding. An
/// E4M3 or E2M1 code times a power of two is exact in bf16.
fn decode_mx(
    client: &Client,
    packed: &DeviceQuantized,
    tiling: ScaleTiling,
) -> Result<Handle, Nvfp4Error> {
    let scales = block_scales(client, packed, false, tiling)?;
    let stored = DeviceQuantized {
        layout: Layout {
            form: StoredForm::Rows,
            ..packed.layout.stored()
        },
        scales,
        // Groups only affect the tiles of scales.
        groups: Groups::One,
        ..packed.clone()
    };
    Ok(quantize::dequantize(client, &stored, FloatKind::Bf16)?.handle)
}

/// Returns the block scales of `packed` in 128x4 tiles or in rows.
fn block_scales(
    client: &Client,
    packed: &DeviceQuantized,
    has_tiles: bool,
    tiling: ScaleTiling,
) -> Result<Handle, Nvfp4Error> {
    let (outer, blocks) = (packed.outer(), packed.blocks());
    match (packed.layout.form.has_tiles(), has_tiles) {
        (false, true) => match tiling {
            ScaleTiling::Matrix | ScaleTiling::WholeTiles => {
                quantize::swizzle(client, &packed.scales, outer, blocks)
            }
            ScaleTiling::Batch(count) => {
                let rows = outer / count;
                quantize::swizzle_batch(client, &packed.scales, count, rows, blocks)
            }
            ScaleTiling::RowGroups(groups) => {
                let scales = &packed.scales;
                let tiled = quantize::swizzle_row_groups(client, scales, outer, blocks, groups);
                tiled.map(|(scales, _)| scales)
            }
        },
        (true, false) => {
            tracing::debug!(outer, blocks, "gemm: block scales from tiles to rows");
            let scales = &packed.scales;
            match tiling {
                ScaleTiling::Matrix | ScaleTiling::WholeTiles => {
                    quantize::unswizzle(client, scales, outer, blocks)
                }
                ScaleTiling::Batch(count) => {
                    quantize::unswizzle_batch(client, scales, count, outer / count, blocks)
                }
                ScaleTiling::RowGroups(groups) => {
                    quantize::unswizzle_row_groups(client, scales, outer, blocks, groups)
                }
            }
        }
        (false, false) | (true, true) => Ok(packed.scales.clone()),
    }
}

/// Units per cube.
const UNITS: usize = 256;
/// Words that a unit decodes; it loads all before it stores the first.
const WORDS: usize = 4;

/// Converts each word of eight codes to 16 bytes of eight bf16: a warp reads 128 bytes of codes and
/// writes 512 at a time. If `bounded`, elements of each row of `row_words` words from `end` on (a
/// word in device memory) are neither read nor written.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_unscaled_kernel(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<u32, Const<4>>],
    end: &[u32],
    words: usize,
    row_words: usize,
    #[comptime] bounded: bool,
) {
    let first = CUBE_POS * comptime!(UNITS * WORDS) + UNIT_POS as usize;
    let mut loaded = Array::<u32>::new(WORDS);
    let mut bytes = Array::<u32>::new(WORDS);
    let mut inside = Array::<u32>::new(WORDS);
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        let mut is_inside = word < words;
        if comptime!(bounded) {
            is_inside = is_inside && word % row_words < (end[0] as usize).div_ceil(8usize);
        }
        inside[i] = u32::cast_from(is_inside);
        // Out-of-bounds units read the first word and store nothing.
        let word = select(is_inside, word, 0usize);
        loaded[i] = codes[word];
        bytes[i] = u32::cast_from(scales[word / 2usize]);
    }
    #[unroll]
    for i in 0..WORDS {
        let word = first + comptime!(i * UNITS);
        let scale = scale_pair(bytes[i]);
        if inside[i] == 1u32 {
            out[word] = decode_e2m1x8(u32::reinterpret(loaded[i]), scale);
        }
    }
}

/// Returns a bf16 copy of `packed`, `outer` rows of `blocks * 16` elements, without the factor of
/// its amax, with row-wise block scales from `scales`. If there are groups along the rows, stops at
/// the end of the last one. The copy lives until the last kernel that reads it has run.
pub(super) fn decode_from(
    client: &Client,
    packed: &DeviceQuantized,
    scales: &Handle,
    ends: Option<&GroupOffsets>,
) -> Handle {
    let row_words = packed.blocks() * 2;
    let words = packed.outer() * row_words;
    let out = allocate(client, words * 16);
    if words == 0 {
        return out;
    }
    // SAFETY: the operand was checked against its shape, and the kernel stays below `words`.
    unsafe {
        dequantize_unscaled_kernel::launch_unchecked(
            client,
            CubeCount::Static(words.div_ceil(UNITS * WORDS) as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(words * 8),
            BufferArg::from_raw_parts(packed.codes.clone(), words),
            BufferArg::from_raw_parts(scales.clone(), words / 2),
            BufferArg::from_raw_parts(out.clone(), words),
            // Not read without groups.
            ends.map_or_else(
                || BufferArg::from_raw_parts(out.clone(), 1),
                GroupOffsets::end,
            ),
            words,
            row_words,
            ends.is_some(),
        );
    }
    out
}

/// Rows and columns of a tile of [`transpose_kernel`].
const SIDE: usize = 64;
/// Column pitch of the tile in shared memory, in words: a word per two rows, plus one against bank
/// conflicts.
const PITCH: usize = SIDE / 2 + 1;

/// Transposes 16-bit elements: `out[s, j, i] = x[s, i, j]`, where `x` consists of `stack` matrices
/// of `rows` x `cols`. Vector lengths divide the rows of both matrices. Each tile passes through
/// shared memory with two rows of a column per word, so that reads and writes cover 128 bytes of a
/// row.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn transpose_kernel<R: Size, W: Size>(
    x: &[Vector<u16, R>],
    out: &mut [Vector<u16, W>],
    rows: usize,
    cols: usize,
    stack: usize,
) {
    let (read, written) = (R::value().comptime(), W::value().comptime());
    let mut words: Shared<[u32]> = Shared::new_slice(comptime!(SIDE * PITCH));
    let across = cols.div_ceil(SIDE);
    let tiles = rows.div_ceil(SIDE) * across;
    let mut tile = CUBE_POS;
    while tile < tiles * stack {
        let (row0, col0) = (tile % tiles / across * SIDE, tile % across * SIDE);
        let start = tile / tiles * rows * cols;
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
                    upper = x[(start + row * cols + col) / read];
                }
                if col < cols && row + 1usize < rows {
                    lower = x[(start + (row + 1usize) * cols + col) / read];
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
                    out[(start + col * rows + row) / written] = vector;
                }
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        tile += CUBE_COUNT;
    }
}

/// Returns a transposed copy of a bf16 matrix, or of each of its `stack` stacked matrices. The copy
/// lives until the last kernel that reads it has run.
pub fn transposed(client: &Client, matrix: &Matrix, stack: usize) -> Matrix {
    let Matrix { cols, dtype, .. } = *matrix;
    let rows = matrix.rows / stack;
    let out = Matrix::empty(client, stack * cols, rows, dtype);
    if out.is_empty() {
        return out;
    }
    let width = |len: usize, aligned: bool| match aligned {
        true => 1 << len.trailing_zeros().min(3),
        false => 1,
    };
    let (read, written) = (width(cols, is_aligned(&matrix.handle)), width(rows, true));
    let tiles = stack * rows.div_ceil(SIDE) * cols.div_ceil(SIDE);
    let (count, dim) = tile_grid(client, tiles);
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
            stack,
        );
    }
    out
}
