//! MS-EDEN: a matrix, or the dequantized NVFP4 operand of a forward product, rotated and quantized
//! without bias along either axis.
//!
//! The numbers are those of [`reference::ms_eden`](crate::reference::ms_eden) (specification, section
//! 9), byte for byte. Two kernels: one finds the largest magnitude of the rotated values, the other
//! rotates again and quantizes; nothing between them is in memory.

use cubecl::{prelude::*, server::Handle};

use super::{
    groups::check_bytes,
    launch::{tile_grid, vector_size},
};
use crate::{
    Hadamard, Nvfp4Error, PackedAxis, RandomStream,
    cube::{
        codec::{BlockFactors, Conversion, canonical, load},
        eden::{
            EdenScale, LINES, SUMS, Signs, SignsLaunch, TASKS, TILE, correct_group, line_of,
            load_segment, quantize_block, segment_amax, segment_of, slot, store_segment,
            transform_between_segments, transform_segment,
        },
        philox::{Random, RandomLaunch},
    },
    device::{Capabilities, DevicePacked, FloatKind, Matrix, address_type, allocate},
    reference::{EDEN_GROUP, EdenTarget, check_eden_hadamard},
};

/// What MS-EDEN quantizes.
#[derive(Debug, Clone, Copy)]
pub enum EdenSource<'a> {
    /// A matrix: the gradient of an output.
    Matrix(&'a Matrix),
    /// The values that an NVFP4 matrix stands for: an operand of the forward product, packed along
    /// either axis.
    Packed(&'a DevicePacked),
}

impl<'a> From<&'a Matrix> for EdenSource<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a> From<&'a DevicePacked> for EdenSource<'a> {
    fn from(packed: &'a DevicePacked) -> Self {
        Self::Packed(packed)
    }
}

impl EdenSource<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix) => (matrix.rows, matrix.cols),
            Self::Packed(packed) => (packed.rows, packed.cols),
        }
    }

    fn check(&self) -> Result<(), Nvfp4Error> {
        match self {
            Self::Matrix(matrix) => matrix.check("source"),
            Self::Packed(packed) => packed
                .check("source")
                .and_then(|()| packed.check_one_amax("source")),
        }
    }

    /// Rows and columns as they are stored.
    fn stored(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix) => (matrix.rows, matrix.cols),
            Self::Packed(packed) => (packed.outer(), packed.inner()),
        }
    }

    /// Whether a contraction along `axis` runs across the stored rows.
    fn across(&self, axis: PackedAxis) -> bool {
        match self {
            Self::Matrix(_) => axis == PackedAxis::Rows,
            Self::Packed(packed) => axis != packed.axis,
        }
    }
}

/// The random bits of one use.
#[derive(Debug, Clone)]
pub struct EdenRandom {
    /// Seed, stream and offset.
    pub stream: RandomStream,
    /// A further part of the offset in device memory, added to that of the stream: two `u32`, low
    /// word first. A captured graph that advances it draws fresh bits at each replay.
    pub offset: Option<Handle>,
}

impl From<RandomStream> for EdenRandom {
    fn from(stream: RandomStream) -> Self {
        Self {
            stream,
            offset: None,
        }
    }
}

/// The largest magnitude of `source` after the transform of 128 along `axis`, one `f32` in device
/// memory; 0 for an empty matrix. See
/// [`reference::ms_eden_amax`](crate::reference::ms_eden_amax).
///
/// # Errors
/// When a buffer is smaller than its shape, or the transform does not mix 128.
pub fn ms_eden_amax<'a>(
    client: &Client,
    source: impl Into<EdenSource<'a>>,
    axis: PackedAxis,
    hadamard: &Hadamard,
) -> Result<Handle, Nvfp4Error> {
    let source = source.into();
    let geometry = Geometry::new(client, source, axis, hadamard)?;
    let out = allocate(client, 4);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let result = || unsafe { BufferArg::from_raw_parts(out.clone(), 1) };
    // A kernel and not a copy from the host, so that a graph can capture it.
    let (one_cube, one_unit) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(1));
    // SAFETY: the buffer holds one word.
    unsafe { zero_kernel::launch_unchecked(client, one_cube, one_unit, result()) };
    if geometry.tiles == 0 {
        return Ok(out);
    }
    let Geometry { count, dim, .. } = geometry.clone();
    let signs = signs(hadamard);
    let cuda = is_sm80(&Capabilities::of(client));
    match source {
        EdenSource::Matrix(matrix) => {
            let width = geometry.width(matrix);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                ms_eden_amax_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    geometry.address,
                    width,
                    BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len() / width),
                    result(),
                    signs,
                    geometry.rows,
                    geometry.cols,
                    geometry.across,
                    cuda,
                    matrix.dtype,
                    matrix.dtype.storage_type(),
                );
            }
        }
        EdenSource::Packed(packed) => {
            let blocks = packed.outer() * packed.blocks();
            // SAFETY: as above.
            unsafe {
                ms_eden_amax_packed_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    geometry.address,
                    BufferArg::from_raw_parts(packed.codes.clone(), blocks),
                    BufferArg::from_raw_parts(packed.scales.clone(), blocks),
                    BufferArg::from_raw_parts(packed.amax.clone(), 1),
                    result(),
                    signs,
                    geometry.rows,
                    geometry.cols,
                    packed.scaling.range(),
                    geometry.across,
                    cuda,
                );
            }
        }
    }
    Ok(out)
}

/// `source` by MS-EDEN along `axis`, given the `amax` of its transformed values ([`ms_eden_amax`]).
///
/// The result is the transformed matrix: its contraction is padded to a multiple of 128, and its
/// `amax` is the one from which it decodes. Draw the signs of `hadamard` afresh for each backward
/// pass, the same for both operands of a product. See
/// [`reference::ms_eden`](crate::reference::ms_eden).
///
/// # Errors
/// When a buffer is smaller than its shape, or the transform does not mix 128.
pub fn ms_eden<'a>(
    client: &Client,
    source: impl Into<EdenSource<'a>>,
    axis: PackedAxis,
    amax: &Handle,
    hadamard: &Hadamard,
    target: EdenTarget,
    random: impl Into<EdenRandom>,
) -> Result<DevicePacked, Nvfp4Error> {
    let (source, random) = (source.into(), random.into());
    let geometry = Geometry::new(client, source, axis, hadamard)?;
    check_bytes("amax", amax, 4)?;
    if let Some(offset) = &random.offset {
        check_bytes("random", offset, 8)?;
    }
    let (rows, cols) = source.shape();
    let shape = match axis {
        PackedAxis::Cols => (rows, cols.next_multiple_of(EDEN_GROUP)),
        PackedAxis::Rows => (rows.next_multiple_of(EDEN_GROUP), cols),
    };
    if geometry.tiles == 0 {
        // An empty matrix: its amax is 0, and so is the one to decode with.
        return Ok(DevicePacked::undefined(client, shape, axis, amax));
    }
    let out = DevicePacked::undefined(client, shape, axis, &allocate(client, 4));
    let blocks = out.outer() * out.blocks();
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let amax_arg = unsafe { BufferArg::from_raw_parts(amax.clone(), 1) };
    let codes = unsafe { BufferArg::from_raw_parts(out.codes.clone(), blocks) };
    let scales = unsafe { BufferArg::from_raw_parts(out.scales.clone(), blocks / 8) };
    let out_amax = unsafe { BufferArg::from_raw_parts(out.amax.clone(), 1) };
    let offset = match &random.offset {
        Some(offset) => unsafe { BufferArg::from_raw_parts(offset.clone(), 2) },
        // Not read.
        None => unsafe { BufferArg::from_raw_parts(amax.clone(), 1) },
    };
    let key = random.stream.key();
    let stream = RandomLaunch::new(
        key[0],
        key[1],
        random.stream.offset as u32,
        (random.stream.offset >> 32) as u32,
    );
    let capabilities = Capabilities::of(client);
    let policy = EdenPolicy {
        across: geometry.across,
        device_offset: random.offset.is_some(),
        cuda: is_sm80(&capabilities),
        conversion: capabilities.conversion,
    };
    let Geometry { count, dim, .. } = geometry.clone();
    let signs = signs(hadamard);
    match source {
        EdenSource::Matrix(matrix) => {
            let width = geometry.width(matrix);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                ms_eden_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    geometry.address,
                    width,
                    BufferArg::from_raw_parts(matrix.handle.clone(), matrix.len() / width),
                    amax_arg,
                    codes,
                    scales,
                    out_amax,
                    offset,
                    stream,
                    signs,
                    geometry.rows,
                    geometry.cols,
                    target.amax_factor(),
                    target.block_factor(),
                    policy,
                    matrix.dtype,
                    matrix.dtype.storage_type(),
                );
            }
        }
        EdenSource::Packed(packed) => {
            let blocks = packed.outer() * packed.blocks();
            // SAFETY: as above.
            unsafe {
                ms_eden_packed_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    geometry.address,
                    BufferArg::from_raw_parts(packed.codes.clone(), blocks),
                    BufferArg::from_raw_parts(packed.scales.clone(), blocks),
                    BufferArg::from_raw_parts(packed.amax.clone(), 1),
                    amax_arg,
                    codes,
                    scales,
                    out_amax,
                    offset,
                    stream,
                    signs,
                    geometry.rows,
                    geometry.cols,
                    packed.scaling.range(),
                    target.amax_factor(),
                    target.block_factor(),
                    policy,
                );
            }
        }
    }
    Ok(out)
}

fn is_sm80(capabilities: &Capabilities) -> bool {
    let capability = capabilities.compute_capability;
    capability.is_some_and(|capability| capability >= 80)
}

fn signs(hadamard: &Hadamard) -> SignsLaunch {
    let [word0, word1, word2, word3] = hadamard.sign_words();
    SignsLaunch::new(word0, word1, word2, word3)
}

/// The launch of either kernel.
#[derive(Clone)]
struct Geometry {
    rows: usize,
    cols: usize,
    across: bool,
    tiles: usize,
    count: CubeCount,
    dim: CubeDim,
    address: AddressType,
}

impl Geometry {
    fn new(
        client: &Client,
        source: EdenSource,
        axis: PackedAxis,
        hadamard: &Hadamard,
    ) -> Result<Self, Nvfp4Error> {
        source.check()?;
        check_eden_hadamard(hadamard)?;
        let (rows, cols) = source.stored();
        let across = source.across(axis);
        let (lines, length) = if across { (cols, rows) } else { (rows, cols) };
        let tiles = lines.div_ceil(LINES) * length.div_ceil(EDEN_GROUP);
        let (count, dim) = tile_grid(client, tiles);
        Ok(Self {
            rows,
            cols,
            across,
            tiles,
            count,
            dim,
            address: address_type(tiles * LINES * EDEN_GROUP),
        })
    }

    /// Elements of one load: what divides the columns, and a segment.
    fn width(&self, matrix: &Matrix) -> usize {
        vector_size(matrix.dtype, matrix.cols)
    }
}

/// The comptime choices of MS-EDEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EdenPolicy {
    /// The contraction runs across the stored rows.
    pub across: bool,
    /// The random offset has a part in device memory.
    pub device_offset: bool,
    /// The device is a CUDA GPU of sm_80 or later: it rounds to bf16 itself.
    pub cuda: bool,
    /// Who converts to E2M1.
    pub conversion: Conversion,
}

/// The tile at `index` of a stored matrix: its first line and its group. Neighbouring cubes read
/// neighbouring memory.
#[derive(CubeType, Clone, Copy)]
struct Position {
    line0: usize,
    group: usize,
    lines: usize,
    length: usize,
    groups: usize,
}

#[cube]
fn tile_position(index: usize, rows: usize, cols: usize, #[comptime] across: bool) -> Position {
    if comptime!(across) {
        let columns = cols.div_ceil(LINES);
        Position {
            line0: (index % columns) * comptime!(LINES),
            group: index / columns,
            lines: cols,
            length: rows,
            groups: rows.div_ceil(128),
        }
    } else {
        let groups = cols.div_ceil(128);
        Position {
            line0: (index / groups) * comptime!(LINES),
            group: index % groups,
            lines: rows,
            length: cols,
            groups,
        }
    }
}

#[cube]
fn tile_count(rows: usize, cols: usize, #[comptime] across: bool) -> usize {
    if comptime!(across) {
        cols.div_ceil(LINES) * rows.div_ceil(128)
    } else {
        rows.div_ceil(LINES) * cols.div_ceil(128)
    }
}

/// Loads a tile of a matrix and transforms its segments; ends at a barrier.
#[cube]
fn load_matrix<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    tile: &mut [f32],
    at: &Position,
    signs: &Signs,
    cols: usize,
    #[comptime] across: bool,
    #[comptime] kind: FloatKind,
) {
    let width = N::value();
    let vectors = cols / width;
    if comptime!(across) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(LINES * 128 / width) {
            let k = item / comptime!(LINES / width);
            let line = (item % comptime!(LINES / width)) * width;
            let row = at.group * 128usize + k;
            let col = at.line0 + line;
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if row < at.length && col < at.lines {
                vector = x[row * vectors + col / width];
            }
            let base = slot(k, line, across);
            #[unroll]
            for i in 0..width {
                tile[base + i] = load::<F>(vector.extract(i), kind);
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        transform_segments(tile, signs, across);
    } else {
        let mut task = UNIT_POS as usize;
        while task < comptime!(TASKS) {
            let segment = segment_of(task);
            let line = line_of(task);
            let row = at.line0 + line;
            let first = at.group * 128usize + segment * 16usize;
            let mut block = Array::<f32>::new(16usize);
            #[unroll]
            for v in 0..comptime!(16 / width) {
                let col = first + comptime!(v * width);
                let mut vector = Vector::<F, N>::new(F::from_int(0));
                if row < at.lines && col < at.length {
                    vector = x[row * vectors + col / width];
                }
                #[unroll]
                for i in 0..width {
                    block[comptime!(v * width + i)] = load::<F>(vector.extract(i), kind);
                }
            }
            transform_segment(&mut block, signs, segment);
            store_segment(&block, tile, segment, line, across);
            task += CUBE_DIM as usize;
        }
    }
    sync_cube();
}

/// The values of an NVFP4 block, zero where `inside` is false.
#[cube]
fn decode_block(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    index: usize,
    factor: f32,
    inside: bool,
) -> Array<f32> {
    let mut words = Vector::<u32, Const<2>>::new(0u32);
    let mut scale = 0u32;
    let mut factor = factor;
    if inside {
        words = codes[index];
        scale = u32::cast_from(scales[index]);
    } else {
        // The factor may be infinite or NaN.
        factor = 0.0f32;
    }
    let factors = BlockFactors::new(scale, factor);
    let mut block = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        let code = words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
        block[i] = factors.decode(code);
    }
    block
}

/// Zero from position `end` on: what pads the last block of a stored row is no part of the matrix,
/// and not zero where that copy was transformed.
#[cube]
fn mask_block(block: &mut Array<f32>, first: usize, end: usize) {
    if first + 16usize > end {
        #[unroll]
        for i in 0..16usize {
            block[i] = select(first + i < end, block[i], 0.0f32);
        }
    }
}

/// Loads a tile of an NVFP4 matrix and transforms its segments; ends at a barrier.
#[cube]
fn load_packed(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    factor: f32,
    tile: &mut [f32],
    at: &Position,
    signs: &Signs,
    cols: usize,
    #[comptime] across: bool,
) {
    let blocks = cols.div_ceil(16);
    if comptime!(across) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(TASKS) {
            let k = item / 2usize;
            let line = (item % 2usize) * 16usize;
            let row = at.group * 128usize + k;
            let col = at.line0 + line;
            let inside = row < at.length && col < at.lines;
            let index = row * blocks + col / 16usize;
            let mut block = decode_block(codes, scales, index, factor, inside);
            mask_block(&mut block, col, at.lines);
            let base = slot(k, line, across);
            #[unroll]
            for i in 0..16usize {
                tile[base + i] = block[i];
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        transform_segments(tile, signs, across);
    } else {
        let mut task = UNIT_POS as usize;
        while task < comptime!(TASKS) {
            let segment = segment_of(task);
            let line = line_of(task);
            let row = at.line0 + line;
            let first = at.group * 128usize + segment * 16usize;
            let inside = row < at.lines && first < at.length;
            let index = row * blocks + first / 16usize;
            let mut block = decode_block(codes, scales, index, factor, inside);
            mask_block(&mut block, first, at.length);
            transform_segment(&mut block, signs, segment);
            store_segment(&block, tile, segment, line, across);
            task += CUBE_DIM as usize;
        }
    }
    sync_cube();
}

#[cube]
fn transform_segments(tile: &mut [f32], signs: &Signs, #[comptime] across: bool) {
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let mut block = load_segment(&*tile, segment_of(task), line_of(task), across);
        transform_segment(&mut block, signs, segment_of(task));
        store_segment(&block, tile, segment_of(task), line_of(task), across);
        task += CUBE_DIM as usize;
    }
}

/// The largest magnitude of a transformed tile, as each unit sees its part. What lies outside the
/// matrix is zero.
#[cube]
fn tile_amax(tile: &[f32], #[comptime] across: bool) -> u32 {
    let mut bits = 0u32;
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let block = load_segment(tile, segment_of(task), line_of(task), across);
        bits = max(bits, segment_amax(&block));
        task += CUBE_DIM as usize;
    }
    bits
}

/// Raises `out` to `bits`, compared as integers: the order of arrival does not matter. Once for each
/// plane on CUDA, and only where it is not as high already: atomics on one address take turns.
#[cube]
fn raise(out: &mut [Atomic<u32>], bits: u32, #[comptime] cuda: bool) {
    let bits = canonical(bits);
    if comptime!(cuda) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 && plane > out[0].load() {
            out[0].fetch_max(plane);
        }
    } else {
        out[0].fetch_max(bits);
    }
}

/// Quantizes a transformed tile: codes and sums by blocks, then scale bytes by groups.
#[cube]
fn quantize_tile(
    tile: &[f32],
    sums_xx: &mut [f32],
    sums_xq: &mut [f32],
    bytes: &mut [u32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, Const<2>>],
    at: &Position,
    global: &EdenScale,
    random: &Random,
    #[comptime] policy: EdenPolicy,
) {
    let mut task = UNIT_POS as usize;
    while task < comptime!(TASKS) {
        let segment = segment_of(task);
        let line = line_of(task);
        let block = load_segment(tile, segment, line, policy.across);
        let scale = global.block_scale(f32::reinterpret(segment_amax(&block)));
        let multiplier = global.encode_multiplier(scale);
        let result = quantize_block(&block, multiplier, policy.conversion);
        let slot = line * comptime!(SUMS) + segment;
        sums_xx[slot] = result.xx;
        sums_xq[slot] = result.xq;
        bytes[slot] = scale;
        if at.line0 + line < at.lines {
            let group = (at.line0 + line) * at.groups + at.group;
            codes[group * 8usize + segment] = result.codes;
        }
        task += CUBE_DIM as usize;
    }
    sync_cube();
    let mut line = UNIT_POS as usize;
    while line < comptime!(LINES) {
        if at.line0 + line < at.lines {
            let group = (at.line0 + line) * at.groups + at.group;
            let index = u64::cast_from(group);
            scales[group] = correct_group(&*sums_xx, &*sums_xq, &*bytes, line, index, random);
        }
        line += CUBE_DIM as usize;
    }
}

/// The stream with the part of its offset that is in device memory.
#[cube]
fn resolve(random: &Random, offset: &[u32], #[comptime] device_offset: bool) -> Random {
    let mut low = random.offset_low;
    let mut high = random.offset_high;
    if comptime!(device_offset) {
        low += offset[0];
        // Unsigned addition wrapped exactly when the sum is below a summand.
        high += offset[1] + u32::cast_from(low < random.offset_low);
    }
    Random {
        key_low: random.key_low,
        key_high: random.key_high,
        offset_low: low,
        offset_high: high,
    }
}

#[cube(launch_unchecked)]
fn zero_kernel(out: &mut [u32]) {
    out[0] = 0u32;
}

/// The amax of the transformed values of a matrix.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    out: &mut [Atomic<u32>],
    signs: Signs,
    rows: usize,
    cols: usize,
    #[comptime] across: bool,
    #[comptime] cuda: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut bits = 0u32;
    let mut index = CUBE_POS;
    while index < tile_count(rows, cols, across) {
        let at = tile_position(index, rows, cols, across);
        load_matrix::<F, N>(x, &mut tile, &at, &signs, cols, across, kind);
        transform_between_segments(&mut tile, across, cuda);
        sync_cube();
        bits = max(bits, tile_amax(&tile, across));
        sync_cube();
        index += CUBE_COUNT;
    }
    raise(out, bits, cuda);
}

/// The amax of the transformed values of an NVFP4 matrix.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_packed_kernel(
    source_codes: &[Vector<u32, Const<2>>],
    source_scales: &[u8],
    source_amax: &[f32],
    out: &mut [Atomic<u32>],
    signs: Signs,
    rows: usize,
    cols: usize,
    range: f32,
    #[comptime] across: bool,
    #[comptime] cuda: bool,
) {
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let factor = source_amax[0] / range;
    let mut bits = 0u32;
    let mut index = CUBE_POS;
    while index < tile_count(rows, cols, across) {
        let at = tile_position(index, rows, cols, across);
        load_packed(
            source_codes,
            source_scales,
            factor,
            &mut tile,
            &at,
            &signs,
            cols,
            across,
        );
        transform_between_segments(&mut tile, across, cuda);
        sync_cube();
        bits = max(bits, tile_amax(&tile, across));
        sync_cube();
        index += CUBE_COUNT;
    }
    raise(out, bits, cuda);
}

/// MS-EDEN of a matrix.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, Const<2>>],
    out_amax: &mut [f32],
    offset: &[u32],
    random: Random,
    signs: Signs,
    rows: usize,
    cols: usize,
    amax_factor: f32,
    block_factor: f32,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut xx = Shared::<[f32]>::new_slice(comptime!(LINES * SUMS));
    let mut xq = Shared::<[f32]>::new_slice(comptime!(LINES * SUMS));
    let mut bytes = Shared::<[u32]>::new_slice(comptime!(LINES * SUMS));
    let global = EdenScale::from_amax(amax[0], amax_factor, block_factor);
    let random = resolve(&random, offset, policy.device_offset);
    if ABSOLUTE_POS == 0usize {
        out_amax[0] = global.amax;
    }
    let mut index = CUBE_POS;
    while index < tile_count(rows, cols, policy.across) {
        let at = tile_position(index, rows, cols, policy.across);
        load_matrix::<F, N>(x, &mut tile, &at, &signs, cols, policy.across, kind);
        transform_between_segments(&mut tile, policy.across, policy.cuda);
        sync_cube();
        quantize_tile(
            &tile, &mut xx, &mut xq, &mut bytes, codes, scales, &at, &global, &random, policy,
        );
        sync_cube();
        index += CUBE_COUNT;
    }
}

/// MS-EDEN of an NVFP4 matrix.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_packed_kernel(
    source_codes: &[Vector<u32, Const<2>>],
    source_scales: &[u8],
    source_amax: &[f32],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, Const<2>>],
    out_amax: &mut [f32],
    offset: &[u32],
    random: Random,
    signs: Signs,
    rows: usize,
    cols: usize,
    range: f32,
    amax_factor: f32,
    block_factor: f32,
    #[comptime] policy: EdenPolicy,
) {
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut xx = Shared::<[f32]>::new_slice(comptime!(LINES * SUMS));
    let mut xq = Shared::<[f32]>::new_slice(comptime!(LINES * SUMS));
    let mut bytes = Shared::<[u32]>::new_slice(comptime!(LINES * SUMS));
    let global = EdenScale::from_amax(amax[0], amax_factor, block_factor);
    let random = resolve(&random, offset, policy.device_offset);
    let factor = source_amax[0] / range;
    if ABSOLUTE_POS == 0usize {
        out_amax[0] = global.amax;
    }
    let mut index = CUBE_POS;
    while index < tile_count(rows, cols, policy.across) {
        let at = tile_position(index, rows, cols, policy.across);
        load_packed(
            source_codes,
            source_scales,
            factor,
            &mut tile,
            &at,
            &signs,
            cols,
            policy.across,
        );
        transform_between_segments(&mut tile, policy.across, policy.cuda);
        sync_cube();
        quantize_tile(
            &tile, &mut xx, &mut xq, &mut bytes, codes, scales, &at, &global, &random, policy,
        );
        sync_cube();
        index += CUBE_COUNT;
    }
}
