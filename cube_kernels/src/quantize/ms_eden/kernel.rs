//! The kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    super::{
        packed_source::{PackedRows, SourcePlan},
        tile::Shape,
    },
    position::{
        EdenPolicy, EdenTiles, Position, TILE_OF_SCALES, is_filled, swizzled_word, tile_position,
    },
};
use crate::{
    cube::{
        codec::{canonical, load},
        eden::{
            EdenScale, LINES, SUMS, TASKS, TILE, correct_group, line_of, load_segment,
            quantize_block, segment_amax, segment_of, slot, store_segment,
            transform_between_segments, transform_segment,
        },
        hadamard::{Signs, seeded_signs},
        philox::Random,
    },
    policy::Hadamard,
    tensor::FloatKind,
};

/// A source in memory: the elements of a matrix, or the codes and scales of an NVFP4 tensor, which
/// leave `F` and `N` without a meaning.
#[derive(CubeType, CubeLaunch)]
pub enum EdenStored<F: Numeric, N: Size> {
    /// A matrix.
    Matrix(Box<[Vector<F, N>]>),
    /// An NVFP4 tensor.
    Packed(PackedRows),
}

#[cube]
impl<F: Numeric, N: Size> EdenStored<F, N> {
    /// The factor of a packed source with one amax.
    fn factor(&self) -> f32 {
        #[comptime]
        match self {
            EdenStored::Matrix(_) => 1.0f32.runtime(),
            EdenStored::Packed(rows) => rows.factor(),
        }
    }

    /// Loads a tile and transforms its segments; ends at a barrier. `factor` is that of the source,
    /// `cols` its columns where it is a matrix, `kind` then their type.
    fn load(
        &self,
        tile: &mut [f32],
        at: &Position,
        signs: &Signs,
        factor: f32,
        cols: usize,
        #[comptime] policy: EdenPolicy,
        #[comptime] kind: FloatKind,
    ) {
        let (across, plan) = comptime!((policy.across, policy.source));
        #[comptime]
        match self {
            EdenStored::Matrix(x) => load_matrix::<F, N>(x, tile, at, signs, cols, across, kind),
            EdenStored::Packed(rows) => {
                let own = rows.factor_of(at.part, factor, plan);
                load_packed(rows, own, tile, at, signs, across, plan);
            }
        }
    }
}

/// From what the scales derive.
#[derive(CubeType, CubeLaunch)]
pub struct EdenInputs {
    /// The amax values of the transformed source.
    pub amax: Box<[f32]>,
    /// What one is multiplied by to give the one that the result decodes with.
    pub amax_factor: f32,
    /// What block scales are multiplied by.
    pub block_factor: f32,
}

#[cube]
impl EdenInputs {
    fn scale(&self, group: usize) -> EdenScale {
        EdenScale::from_amax(self.amax[group], self.amax_factor, self.block_factor)
    }
}

/// Scale bytes of a rotation group: eight.
#[derive(CubeType, CubeLaunch)]
pub enum EdenScales {
    /// Contiguous: an item for each rotation group.
    Compact(Box<[Vector<u32, Const<2>>]>),
    /// In 128x4 tiles: two words, [`TILE_OF_SCALES`] apart.
    Swizzled(Box<[u32]>),
}

/// Where the result is written.
#[derive(CubeType, CubeLaunch)]
pub struct EdenOut {
    /// The codes.
    pub codes: Box<[Vector<u32, Const<2>>]>,
    /// The scale bytes.
    pub scales: EdenScales,
    /// The amax values that it decodes with.
    pub amax: Box<[f32]>,
}

/// What is drawn at random.
#[derive(CubeType, CubeLaunch)]
pub struct EdenDraw {
    /// A further part of the random offset, where the policy says so: two words, low word first.
    pub offset: Box<[u32]>,
    /// Where random bits come from.
    pub random: Random,
    /// The signs of the transform.
    pub signs: EdenSigns,
}

/// The signs of the transform, as the host knows them.
#[derive(CubeType, CubeLaunch)]
pub struct EdenSigns {
    /// The signs, or, where the policy says that they are redrawn, in the first two words their
    /// seed.
    pub words: Signs,
    /// What the seed is advanced by, where they are redrawn: two words, low word first.
    pub offset: Box<[u32]>,
}

#[cube]
impl EdenSigns {
    /// The signs.
    fn resolve(&self, #[comptime] redrawn: bool) -> Signs {
        let mut signs = Signs {
            word0: self.words.word0,
            word1: self.words.word1,
            word2: self.words.word2,
            word3: self.words.word3,
        };
        if comptime!(redrawn) {
            let seed = word64(self.words.word0, self.words.word1);
            let offset = word64(self.offset[0], self.offset[1]);
            let drawn = seeded_signs(seed + offset * comptime!(Hadamard::SEED_STEP));
            signs.word0 = drawn.word0;
            signs.word1 = drawn.word1;
            signs.word2 = drawn.word2;
            signs.word3 = drawn.word3;
        }
        signs
    }
}

#[cube]
fn word64(low: u32, high: u32) -> u64 {
    u64::cast_from(low) | (u64::cast_from(high) << 32u64)
}

#[cube]
impl EdenDraw {
    /// The stream with the part of its offset that is in device memory.
    fn resolve(&self, #[comptime] device_offset: bool) -> Random {
        let mut low = self.random.offset_low;
        let mut high = self.random.offset_high;
        if comptime!(device_offset) {
            low += self.offset[0];
            // Unsigned addition wrapped exactly when the sum is below a summand.
            high += self.offset[1] + u32::cast_from(low < self.random.offset_low);
        }
        Random {
            key_low: self.random.key_low,
            key_high: self.random.key_high,
            offset_low: low,
            offset_high: high,
        }
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
            let row = at.start + k;
            let col = at.line0 + line;
            let mut vector = Vector::<F, N>::new(F::from_int(0));
            if row < at.end && col < at.lines {
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
            let first = at.start + segment * 16usize;
            let mut block = Array::<f32>::new(16usize);
            #[unroll]
            for v in 0..comptime!(16 / width) {
                let col = first + comptime!(v * width);
                let mut vector = Vector::<F, N>::new(F::from_int(0));
                if row < at.lines && col < at.end {
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

/// The values of block `block` of stored row `row`; zero where `inside` is false. The factor of the
/// tile is `own`.
#[cube]
fn decode_block(
    source: &PackedRows,
    own: f32,
    row: usize,
    block: usize,
    at: &Position,
    inside: bool,
    #[comptime] plan: SourcePlan,
) -> Array<f32> {
    let packed = source.load(row, row + at.padding, block, own, inside, plan);
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        let code = packed.words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
        values[i] = packed.factors.decode(code);
    }
    values
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

/// Loads a tile of an NVFP4 matrix, whose factor is `own`, and transforms its segments; ends at a
/// barrier.
#[cube]
fn load_packed(
    source: &PackedRows,
    own: f32,
    tile: &mut [f32],
    at: &Position,
    signs: &Signs,
    #[comptime] across: bool,
    #[comptime] plan: SourcePlan,
) {
    if comptime!(across) {
        let mut item = UNIT_POS as usize;
        while item < comptime!(TASKS) {
            let k = item / 2usize;
            let line = (item % 2usize) * 16usize;
            let row = at.start + k;
            let col = at.line0 + line;
            let inside = row < at.end && col < at.lines;
            let mut block = decode_block(source, own, row, col / 16usize, at, inside, plan);
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
            let first = at.start + segment * 16usize;
            let inside = row < at.lines && first < at.end;
            let mut block = decode_block(source, own, row, first / 16usize, at, inside, plan);
            mask_block(&mut block, first, at.end);
            transform_segment(&mut block, signs, segment);
            store_segment(&block, tile, segment, line, across);
            task += CUBE_DIM as usize;
        }
    }
    sync_cube();
}

/// Writes the amax values from which the result decodes: the one, where there is one, or those of
/// the groups. Returns the scale of the first group, or of all.
#[cube]
fn write_amax(
    from: &EdenInputs,
    shape: &Shape,
    out: &mut EdenOut,
    #[comptime] policy: EdenPolicy,
) -> KeptScale {
    let first = from.scale(0usize);
    if comptime!(policy.plain()) {
        if ABSOLUTE_POS == 0usize {
            out.amax[0] = first.amax;
        }
    } else {
        let mut group = ABSOLUTE_POS;
        while group < shape.groups {
            out.amax[group] = from.scale(group).amax;
            group += CUBE_COUNT * CUBE_DIM as usize;
        }
    }
    KeptScale {
        scale: first,
        part: 0usize,
    }
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

/// Raises entry `index` of `out` to `bits`, compared as integers: the order of arrival does not
/// matter. Once for each plane on CUDA, and only where it is not as high already: atomics on one
/// address take turns.
#[cube]
fn atomic_amax(out: &mut [Atomic<u32>], index: usize, bits: u32, #[comptime] cuda: bool) {
    let bits = canonical(bits);
    if comptime!(cuda) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 && plane > out[index].load() {
            out[index].fetch_max(plane);
        }
    } else {
        out[index].fetch_max(bits);
    }
}

/// The amax, as bits, of the group that the cube's last tile was in. A cube's tiles follow each
/// other through the groups, so that one atomic operation for each group it leaves is enough.
#[derive(CubeType)]
struct KeptAmax {
    bits: u32,
    part: usize,
}

#[cube]
impl KeptAmax {
    /// Includes the amax of a tile of group `part`, after giving `out` that of the group which it
    /// leaves.
    fn include(
        &mut self,
        bits: u32,
        part: usize,
        out: &mut [Atomic<u32>],
        #[comptime] policy: EdenPolicy,
    ) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                atomic_amax(out, self.part, self.bits, policy.cuda);
                self.bits = 0u32;
                self.part = next;
            }
        }
        self.bits = max(self.bits, bits);
    }
}

/// The scale of the group that the cube's last tile was in: it costs divisions, so once for each
/// group.
#[derive(CubeType)]
struct KeptScale {
    scale: EdenScale,
    part: usize,
}

#[cube]
impl KeptScale {
    /// Makes it the scale of group `part`.
    fn turn_to(&mut self, part: usize, from: &EdenInputs, #[comptime] policy: EdenPolicy) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                let found = from.scale(next);
                self.scale.amax = found.amax;
                self.scale.block = found.block;
                self.scale.decode = found.decode;
                self.part = next;
            }
        }
    }
}

/// What the correction of a rotation group asks of the blocks of a tile.
#[derive(CubeType)]
struct BlockSums {
    xx: Shared<[f32]>,
    xq: Shared<[f32]>,
    /// Scale bytes before the correction.
    scales: Shared<[u32]>,
}

#[cube]
impl BlockSums {
    fn new() -> BlockSums {
        BlockSums {
            xx: Shared::new_slice(comptime!(LINES * SUMS)),
            xq: Shared::new_slice(comptime!(LINES * SUMS)),
            scales: Shared::new_slice(comptime!(LINES * SUMS)),
        }
    }
}

/// Quantizes a transformed tile: codes and sums by blocks, then scale bytes by groups.
#[cube]
fn quantize_tile(
    tile: &[f32],
    sums: &mut BlockSums,
    out: &mut EdenOut,
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
        sums.xx[slot] = result.xx;
        sums.xq[slot] = result.xq;
        sums.scales[slot] = scale;
        if at.line0 + line < at.lines {
            let group = (at.line0 + line) * at.pitch + at.first;
            out.codes[group * 8usize + segment] = result.codes;
        }
        task += CUBE_DIM as usize;
    }
    sync_cube();
    let mut line = UNIT_POS as usize;
    while line < comptime!(LINES) {
        let row = at.line0 + line;
        if row < at.lines {
            let index = u64::cast_from(row * at.drawn_pitch + at.drawn_first);
            let found = correct_group(&sums.xx, &sums.xq, &sums.scales, line, index, random);
            out.scales.store(found, at, row, policy.across);
        } else if comptime!(policy.swizzled) {
            out.scales.store(Vector::new(0u32), at, row, policy.across);
        }
        line += CUBE_DIM as usize;
    }
}

#[cube]
impl EdenScales {
    /// Stores the eight scale bytes of a tile's rotation group on line `line`.
    fn store(
        &mut self,
        bytes: Vector<u32, Const<2>>,
        at: &Position,
        line: usize,
        #[comptime] across: bool,
    ) {
        #[comptime]
        match self {
            EdenScales::Compact(scales) => scales[line * at.pitch + at.first] = bytes,
            EdenScales::Swizzled(scales) => {
                let word = swizzled_word(at, line, across);
                scales[word] = bytes.extract(0usize);
                scales[word + TILE_OF_SCALES] = bytes.extract(1usize);
            }
        }
    }
}

/// The amax of the transformed values of a source, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_kernel<F: Numeric, N: Size>(
    source: EdenStored<F, N>,
    tiles: EdenTiles,
    out: &mut [Atomic<u32>],
    signs: EdenSigns,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let shape = &tiles.shape;
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let factor = source.factor();
    let signs = signs.resolve(policy.redrawn_signs);
    let mut kept = KeptAmax {
        bits: 0u32,
        part: 0usize,
    };
    let mut index = CUBE_POS;
    while index < tiles.row_tiles * shape.tile_cols {
        let at = tile_position(index, &tiles, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            source.load(&mut tile, &at, &signs, factor, shape.cols, policy, kind);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.include(tile_amax(&tile, across), at.part, out, policy);
            sync_cube();
        }
        index += CUBE_COUNT;
    }
    atomic_amax(out, kept.part, kept.bits, policy.cuda);
}

/// MS-EDEN of a source, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_kernel<F: Numeric, N: Size>(
    source: EdenStored<F, N>,
    tiles: EdenTiles,
    from: EdenInputs,
    mut out: EdenOut,
    draw: EdenDraw,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let shape = &tiles.shape;
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut sums = BlockSums::new();
    let random = draw.resolve(policy.device_offset);
    let signs = draw.signs.resolve(policy.redrawn_signs);
    let factor = source.factor();
    let mut kept = write_amax(&from, shape, &mut out, policy);
    let mut index = CUBE_POS;
    while index < tiles.row_tiles * shape.tile_cols {
        let at = tile_position(index, &tiles, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            source.load(&mut tile, &at, &signs, factor, shape.cols, policy, kind);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.turn_to(at.part, &from, policy);
            quantize_tile(
                &tile,
                &mut sums,
                &mut out,
                &at,
                &kept.scale,
                &random,
                policy,
            );
            sync_cube();
        }
        index += CUBE_COUNT;
    }
}
