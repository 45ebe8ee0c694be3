//! MS-EDEN: a matrix, or the dequantized NVFP4 operand of a forward product, rotated and quantized
//! without bias along either axis.
//!
//! The numbers are those of [`reference::ms_eden`](crate::reference::ms_eden) (specification, section
//! 9), byte for byte. Two kernels: one finds the largest magnitude of the rotated values, the other
//! rotates again and quantizes; nothing between them is in memory.

use cubecl::{prelude::*, server::Handle};

use super::{
    amax::zeros,
    packed_source::{PackedRows, PackedSource, SourcePlan},
    tile::{Grouping, ROWS, Shape, ShapeLaunch, group_place, map_tiles, tile_from},
};
use crate::launch::{buffer, tile_grid, vector_size};
use crate::{
    BLOCK, Hadamard, Layout, Nvfp4Error, RandomStream, ScaleLayout, Usage,
    capabilities::Capabilities,
    cube::{
        codec::{Conversion, canonical, load},
        eden::{
            EdenScale, LINES, SUMS, Signs, SignsLaunch, TASKS, TILE, correct_group, line_of,
            load_segment, quantize_block, segment_amax, segment_of, slot, store_segment,
            transform_between_segments, transform_segment,
        },
        philox::{Random, RandomLaunch},
        scale::swizzled_at,
    },
    memory::{address_type, allocate, check_memory},
    reference::{EDEN_GROUP, EdenTarget, check_eden_hadamard, padding::padded_bound},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// What MS-EDEN quantizes.
#[derive(Debug, Clone, Copy)]
pub enum EdenSource<'a> {
    /// A matrix: the gradient of an output.
    Matrix(&'a Matrix),
    /// A matrix whose rows are in groups.
    Grouped(&'a Matrix, &'a Groups),
    /// The values that an NVFP4 matrix, or groups of them, stand for: an operand of the forward product,
    /// packed along either axis.
    Packed(&'a DeviceQuantized),
}

impl<'a> From<&'a Matrix> for EdenSource<'a> {
    fn from(matrix: &'a Matrix) -> Self {
        Self::Matrix(matrix)
    }
}

impl<'a> From<&'a DeviceQuantized> for EdenSource<'a> {
    fn from(packed: &'a DeviceQuantized) -> Self {
        Self::Packed(packed)
    }
}

impl EdenSource<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix) | Self::Grouped(matrix, _) => (matrix.rows, matrix.cols),
            Self::Packed(packed) => (packed.rows(), packed.cols()),
        }
    }

    /// Which of its rows belong together.
    fn groups(&self) -> &Groups {
        match self {
            Self::Matrix(_) => &Groups::One,
            Self::Grouped(_, groups) => groups,
            Self::Packed(packed) => &packed.groups,
        }
    }
}

/// A source as it is stored.
enum Stored<'a> {
    Matrix(&'a Matrix, Groups),
    Packed(PackedSource<'a>),
}

impl<'a> Stored<'a> {
    fn new(source: EdenSource<'a>) -> Result<Self, Nvfp4Error> {
        Ok(match source {
            EdenSource::Matrix(matrix) | EdenSource::Grouped(matrix, _) => {
                matrix.check("source")?;
                source.groups().check(matrix.rows)?;
                Self::Matrix(matrix, source.groups().clone())
            }
            EdenSource::Packed(packed) => Self::Packed(PackedSource::even("source", packed)?),
        })
    }

    /// Stored rows and their length.
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix, _) => (matrix.rows, matrix.cols),
            Self::Packed(packed) => (packed.rows, packed.cols),
        }
    }

    /// Which stored rows belong together.
    fn groups(&self) -> &Groups {
        match self {
            Self::Matrix(_, groups) => groups,
            Self::Packed(packed) => &packed.groups,
        }
    }

    fn plan(&self) -> SourcePlan {
        match self {
            Self::Matrix(_, groups) => SourcePlan {
                per_row: false,
                swizzled: false,
                grouping: Grouping::of(groups),
            },
            Self::Packed(packed) => packed.plan,
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

/// The largest magnitude of `source` after the transform of 128 along `usage`, in device memory: one `f32`, or
/// one for each group of rows; 0 for an empty one. See
/// [`reference::ms_eden_amax`](crate::reference::ms_eden_amax).
///
/// # Errors
/// When a buffer is smaller than its shape, the groups do not fit, or the transform does not mix 128; for
/// groups with offsets that are packed along their rows.
pub fn ms_eden_amax<'a>(
    client: &Client,
    source: impl Into<EdenSource<'a>>,
    usage: Usage,
    hadamard: &Hadamard,
) -> Result<Handle, Nvfp4Error> {
    let source = source.into();
    let geometry = Geometry::new(client, source, usage, hadamard, None)?;
    let maxima = source.groups().count();
    let out = zeros(client, maxima);
    if geometry.tiles == 0 {
        return Ok(out);
    }
    // SAFETY: as many were allocated.
    let result = unsafe { buffer(&out, maxima) };
    let map = geometry.map(client, &out);
    let (count, dim, address) = geometry.launch();
    let signs = signs(hadamard);
    match &geometry.source {
        Stored::Matrix(matrix, _) => {
            let width = vector_size(matrix.dtype, matrix.cols);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                ms_eden_amax_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    buffer(&matrix.handle, matrix.len() / width),
                    map,
                    result,
                    signs,
                    geometry.shape(),
                    geometry.tile_rows,
                    geometry.policy,
                    matrix.dtype,
                    matrix.dtype.storage_type(),
                );
            }
        }
        Stored::Packed(packed) => {
            // SAFETY: as above.
            unsafe {
                ms_eden_amax_packed_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    packed.arg(),
                    map,
                    result,
                    signs,
                    geometry.shape(),
                    geometry.tile_rows,
                    geometry.policy,
                );
            }
        }
    }
    Ok(out)
}

/// `source` by MS-EDEN along `usage`, given the `amax` of its transformed values ([`ms_eden_amax`]).
///
/// The result is the transformed matrix: its contraction is padded to a multiple of 128, and its
/// `amax` is the one from which it decodes. Draw the signs of `hadamard` afresh for each backward
/// pass, the same for both operands of a product. See
/// [`reference::ms_eden`](crate::reference::ms_eden).
///
/// Each group of rows is a matrix of its own, with an amax of its own, but for the indices of random bits,
/// which go on from group to group
/// ([`reference::ms_eden_at`](crate::reference::ms_eden_at)). Along [`Usage::Columnwise`] it is padded to a
/// multiple of 128 rows. Copies of [`Groups::Batch`] then are such a batch again; those of
/// [`Groups::Offsets`] lie side by side, as
/// [`quantize_side_by_side`](super::quantize_side_by_side) leaves them: group `g` takes the elements from entry `g`
/// of [`GroupOffsets::aligned`](super::GroupOffsets::aligned)`(client, rows, 128)` on, there is room for
/// [`padded_bound`]`(rows, count, 128)`, and those behind the last group are not written.
///
/// # Errors
/// As [`ms_eden_amax`].
pub fn ms_eden<'a>(
    client: &Client,
    source: impl Into<EdenSource<'a>>,
    usage: Usage,
    amax: &Handle,
    hadamard: &Hadamard,
    target: EdenTarget,
    random: impl Into<EdenRandom>,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let layout = ScaleLayout::Compact;
    ms_eden_with(
        client, source, usage, amax, hadamard, target, random, layout,
    )
}

/// [`ms_eden`] with scales in `layout`. In 128x4 tiles those of every group of rows begin anew, and rows that pad
/// a tile are written, as zeros.
///
/// # Errors
/// As [`ms_eden_amax`], and for scales in 128x4 tiles of copies that lie side by side.
pub fn ms_eden_with<'a>(
    client: &Client,
    source: impl Into<EdenSource<'a>>,
    usage: Usage,
    amax: &Handle,
    hadamard: &Hadamard,
    target: EdenTarget,
    random: impl Into<EdenRandom>,
    layout: ScaleLayout,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let (source, random) = (source.into(), random.into());
    let geometry = Geometry::new(client, source, usage, hadamard, Some((&random, layout)))?;
    let maxima = source.groups().count();
    check_memory("amax", amax, maxima * 4)?;
    if geometry.tiles == 0 {
        // Empty matrices: their amax is 0, and so is the one to decode with.
        return Ok(result(client, &source, usage, amax, hadamard, layout));
    }
    let out_amax = allocate(client, maxima * 4);
    let out = result(client, &source, usage, &out_amax, hadamard, layout);
    let blocks = out.code_blocks();
    // Words of scales that are stored together.
    let stored = if geometry.policy.swizzled { 1 } else { 2 };
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let amax_arg = unsafe { buffer(amax, maxima) };
    let map = geometry.map(client, amax);
    let codes = unsafe { buffer(&out.codes, blocks) };
    let scales = unsafe { buffer(&out.scales, out.scale_bytes() / 4 / stored) };
    let out_amax = unsafe { buffer(&out.amax, maxima) };
    let offset = match &random.offset {
        Some(offset) => unsafe { buffer(offset, 2) },
        // Not read.
        None => unsafe { buffer(amax, 1) },
    };
    let key = random.stream.key();
    let stream = RandomLaunch::new(
        key[0],
        key[1],
        random.stream.offset as u32,
        (random.stream.offset >> 32) as u32,
    );
    let row_groups = out.blocks() * BLOCK / EDEN_GROUP;
    let (count, dim, address) = geometry.launch();
    let signs = signs(hadamard);
    match &geometry.source {
        Stored::Matrix(matrix, _) => {
            let width = vector_size(matrix.dtype, matrix.cols);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                ms_eden_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    stored,
                    buffer(&matrix.handle, matrix.len() / width),
                    map,
                    amax_arg,
                    codes,
                    scales,
                    out_amax,
                    offset,
                    stream,
                    signs,
                    geometry.shape(),
                    geometry.tile_rows,
                    row_groups,
                    target.amax_factor(),
                    target.block_factor(),
                    geometry.policy,
                    matrix.dtype,
                    matrix.dtype.storage_type(),
                );
            }
        }
        Stored::Packed(packed) => {
            // SAFETY: as above.
            unsafe {
                ms_eden_packed_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    stored,
                    packed.arg(),
                    map,
                    amax_arg,
                    codes,
                    scales,
                    out_amax,
                    offset,
                    stream,
                    signs,
                    geometry.shape(),
                    geometry.tile_rows,
                    row_groups,
                    target.amax_factor(),
                    target.block_factor(),
                    geometry.policy,
                );
            }
        }
    }
    Ok(out)
}

/// The result of [`ms_eden`], with undefined contents.
fn result(
    client: &Client,
    source: &EdenSource<'_>,
    usage: Usage,
    amax: &Handle,
    hadamard: &Hadamard,
    scale_layout: ScaleLayout,
) -> DeviceQuantized {
    let (rows, cols) = source.shape();
    let padded = |len: usize| len.next_multiple_of(EDEN_GROUP);
    let (shape, groups) = match (usage, source.groups()) {
        (Usage::Rowwise, groups) => ((rows, padded(cols)), groups.clone()),
        (Usage::Columnwise, Groups::One) => ((padded(rows), cols), Groups::One),
        (Usage::Columnwise, &Groups::Batch(count)) => {
            ((count * padded(rows / count), cols), Groups::Batch(count))
        }
        (Usage::Columnwise, Groups::Offsets { count, .. }) => {
            ((padded_bound(rows, *count, EDEN_GROUP), cols), Groups::One)
        }
    };
    let layout = Layout {
        scale_layout,
        hadamard: Some(*hadamard),
        ..Layout::nvfp4(shape.0, shape.1, usage)
    };
    DeviceQuantized::empty(client, layout, groups, amax)
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
struct Geometry<'a> {
    source: Stored<'a>,
    policy: EdenPolicy,
    /// Tiles of 128 rows that restart at every group: those of the map.
    map_rows: usize,
    tile_rows: usize,
    tile_cols: usize,
    tiles: usize,
    count: CubeCount,
    dim: CubeDim,
}

impl<'a> Geometry<'a> {
    fn new(
        client: &Client,
        source: EdenSource<'a>,
        usage: Usage,
        hadamard: &Hadamard,
        quantize: Option<(&EdenRandom, ScaleLayout)>,
    ) -> Result<Self, Nvfp4Error> {
        let across = match source {
            EdenSource::Packed(packed) => usage != packed.usage(),
            _ => usage == Usage::Columnwise,
        };
        let source = Stored::new(source)?;
        check_eden_hadamard(hadamard)?;
        let offset = quantize.and_then(|(random, _)| random.offset.as_ref());
        let swizzled = quantize.is_some_and(|(_, layout)| layout == ScaleLayout::Swizzled128x4);
        if let Some(offset) = offset {
            check_memory("random", offset, 8)?;
        }
        let (rows, cols) = source.shape();
        let map_rows = source.groups().units(rows, ROWS);
        let plan = source.plan();
        if swizzled && across && plan.grouping.side_by_side() {
            return Err(Nvfp4Error::value(
                "layout",
                "Swizzled128x4, of groups with offsets along their rows",
                "Compact: such copies lie side by side",
            ));
        }
        // Scales in 128x4 tiles are written for lines that pad a tile, too.
        let tiles_of = |lines: usize| match swizzled {
            true => lines.div_ceil(ROWS) * (ROWS / LINES),
            false => lines.div_ceil(LINES),
        };
        let (tile_rows, tile_cols) = match (across, plan.grouping) {
            (true, _) => (map_rows, tiles_of(cols)),
            (false, Grouping::One) => (tiles_of(rows), cols.div_ceil(EDEN_GROUP)),
            (false, _) => (map_rows * (ROWS / LINES), cols.div_ceil(EDEN_GROUP)),
        };
        let tiles = match rows * cols {
            0 => 0,
            _ => tile_rows * tile_cols,
        };
        let (count, dim) = tile_grid(client, tiles);
        let capabilities = Capabilities::of(client);
        Ok(Self {
            source,
            policy: EdenPolicy {
                across,
                source: plan,
                swizzled,
                device_offset: offset.is_some(),
                cuda: is_sm80(&capabilities),
                conversion: capabilities.conversion,
            },
            map_rows,
            tile_rows,
            tile_cols,
            tiles,
            count,
            dim,
        })
    }

    fn launch(&self) -> (CubeCount, CubeDim, AddressType) {
        let address = address_type(self.tiles * LINES * EDEN_GROUP);
        (self.count.clone(), self.dim, address)
    }

    fn shape(&self) -> ShapeLaunch {
        let (rows, cols) = self.source.shape();
        ShapeLaunch::new(rows, cols, self.source.groups().count(), self.tile_cols)
    }

    fn map(&self, client: &Client, unread: &Handle) -> BufferArg {
        let (shape, groups) = (self.source.shape(), self.source.groups());
        map_tiles(client, shape, groups, self.map_rows, EDEN_GROUP, unread)
    }
}

/// The comptime choices of MS-EDEN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EdenPolicy {
    /// The contraction runs across the stored rows.
    pub across: bool,
    /// How the source is stored; of one that is not packed, how its groups are given.
    pub source: SourcePlan,
    /// Scales are written in 128x4 tiles.
    pub swizzled: bool,
    /// The random offset has a part in device memory.
    pub device_offset: bool,
    /// The device is a CUDA GPU of sm_80 or later: it rounds to bf16 itself.
    pub cuda: bool,
    /// Who converts to E2M1.
    pub conversion: Conversion,
}

impl EdenPolicy {
    /// Whether there are no groups.
    fn plain(self) -> bool {
        self.source.grouping == Grouping::One
    }
}

/// A tile of a stored matrix, and its place in the result.
#[derive(CubeType, Clone, Copy)]
struct Position {
    /// Its first line.
    line0: usize,
    /// The line behind the last one.
    lines: usize,
    /// Its first position along the contraction.
    start: usize,
    /// The position behind the last one.
    end: usize,
    /// The number of its rotation group on line 0 in the result.
    first: usize,
    /// Rotation groups from one line to the next.
    pitch: usize,
    /// The same in the order in which random bits are drawn: one group of rows after another.
    drawn_first: usize,
    /// The pitch of that.
    drawn_pitch: usize,
    /// The group of rows.
    part: usize,
    /// Rotation groups of one line in the copies of earlier groups of rows, where these lie along the contraction.
    units_before: usize,
    /// What padding every group of rows to 128 adds to the numbers of the tile's stored rows.
    padding: usize,
}

/// Tile number `index`. Neighbouring cubes read neighbouring memory. `map` is what [`map_tiles()`] wrote,
/// `row_groups` the length of a line of the result where groups lie side by side.
#[cube]
fn tile_position(
    index: usize,
    map: &[Vector<u32, Const<4>>],
    shape: &Shape,
    row_groups: usize,
    #[comptime] policy: EdenPolicy,
) -> Position {
    let grouping = comptime!(policy.source.grouping);
    let row = index / shape.tile_cols;
    let column = index % shape.tile_cols;
    if comptime!(policy.across) {
        let line0 = column * comptime!(LINES);
        let tile = tile_from(map, row, line0, shape, 128usize, grouping);
        let side_by_side = comptime!(grouping.side_by_side());
        let place = group_place(&tile, shape.cols, row_groups, 128usize, side_by_side);
        let drawn = group_place(&tile, shape.cols, row_groups, 128usize, false);
        Position {
            line0,
            lines: shape.cols,
            start: tile.row0,
            end: tile.row_end,
            first: place.first + place.unit0,
            pitch: place.pitch,
            drawn_first: drawn.first + drawn.unit0,
            drawn_pitch: drawn.pitch,
            part: tile.group,
            units_before: tile.units_before,
            padding: row * 128usize - tile.row0,
        }
    } else if comptime!(policy.plain()) {
        Position {
            line0: row * comptime!(LINES),
            lines: shape.rows,
            start: column * 128usize,
            end: shape.cols,
            first: column,
            pitch: shape.tile_cols,
            drawn_first: column,
            drawn_pitch: shape.tile_cols,
            part: 0usize,
            units_before: 0usize,
            padding: 0usize,
        }
    } else {
        let parts = comptime!(ROWS / LINES);
        let row_tile = row / parts;
        let tile = tile_from(map, row_tile, 0usize, shape, 128usize, grouping);
        Position {
            line0: tile.row0 + (row - row_tile * parts) * comptime!(LINES),
            lines: tile.row_end,
            start: column * 128usize,
            end: shape.cols,
            first: column,
            pitch: shape.tile_cols,
            drawn_first: column,
            drawn_pitch: shape.tile_cols,
            part: tile.group,
            units_before: 0usize,
            padding: row_tile * 128usize - tile.row0,
        }
    }
}

/// Whether there is anything to do in a tile: where rows are in groups, not in all.
#[cube]
fn is_filled(at: &Position, #[comptime] policy: EdenPolicy) -> bool {
    if comptime!(!policy.swizzled) {
        at.line0 < at.lines && at.start < at.end
    } else if comptime!(policy.across) {
        at.start < at.end
    } else {
        // Lines that pad 128 of them have scales, too.
        at.line0 - (at.line0 + at.padding) % 128usize < at.lines
    }
}

/// The word, in scales in 128x4 tiles, of a tile's rotation group on line `line`: the bytes of its first four
/// blocks. Those of the others are [`TILE_OF_SCALES`] words behind.
#[cube]
fn swizzled_word(at: &Position, line: usize, #[comptime] across: bool) -> usize {
    let row = if comptime!(across) {
        line
    } else {
        line + at.padding
    };
    // Eight bytes for each rotation group, in tiles of four blocks.
    let before = at.lines.div_ceil(128) * 128usize * at.units_before * 2usize;
    let group = at.first - at.lines * at.units_before;
    before + swizzled_at(row, group * 8usize, at.pitch * 2usize) / 4usize
}

/// Words of a 128x4 tile of scales.
const TILE_OF_SCALES: usize = 128;

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

/// The values of block `block` of stored row `row`; zero where `inside` is false. The factor of the tile is
/// `own`.
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

/// Loads a tile of an NVFP4 matrix, whose factor is `own`, and transforms its segments; ends at a barrier.
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

/// Writes the maxima from which the result decodes: the one, where there is one, or those of the groups. Returns
/// the scale of the first group, or of all.
#[cube]
fn write_maxima(
    amax: &[f32],
    amax_factor: f32,
    block_factor: f32,
    shape: &Shape,
    out: &mut [f32],
    #[comptime] policy: EdenPolicy,
) -> KeptScale {
    let first = EdenScale::from_amax(amax[0], amax_factor, block_factor);
    if comptime!(policy.plain()) {
        if ABSOLUTE_POS == 0usize {
            out[0] = first.amax;
        }
    } else {
        let mut group = ABSOLUTE_POS;
        while group < shape.groups {
            out[group] = EdenScale::from_amax(amax[group], amax_factor, block_factor).amax;
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

/// Raises entry `index` of `out` to `bits`, compared as integers: the order of arrival does not matter. Once
/// for each plane on CUDA, and only where it is not as high already: atomics on one address take turns.
#[cube]
fn raise(out: &mut [Atomic<u32>], index: usize, bits: u32, #[comptime] cuda: bool) {
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

/// The amax, as bits, of the group that the cube's last tile was in. A cube's tiles follow each other through
/// the groups, so that one atomic operation for each group it leaves is enough.
#[derive(CubeType)]
struct KeptAmax {
    bits: u32,
    part: usize,
}

#[cube]
impl KeptAmax {
    /// Includes the amax of a tile of group `part`, after giving `out` that of the group which it leaves.
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
                raise(out, self.part, self.bits, policy.cuda);
                self.bits = 0u32;
                self.part = next;
            }
        }
        self.bits = max(self.bits, bits);
    }
}

/// The scale of the group that the cube's last tile was in: it costs divisions, so once for each group.
#[derive(CubeType)]
struct KeptScale {
    scale: EdenScale,
    part: usize,
}

#[cube]
impl KeptScale {
    /// Makes it the scale of group `part`.
    fn turn_to(
        &mut self,
        part: usize,
        amax: &[f32],
        amax_factor: f32,
        block_factor: f32,
        #[comptime] policy: EdenPolicy,
    ) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                let found = EdenScale::from_amax(amax[next], amax_factor, block_factor);
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
fn quantize_tile<W: Size>(
    tile: &[f32],
    sums: &mut BlockSums,
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, W>],
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
            codes[group * 8usize + segment] = result.codes;
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
            store_scales::<W>(found, scales, at, row, policy);
        } else if comptime!(policy.swizzled) {
            store_scales::<W>(Vector::new(0u32), scales, at, row, policy);
        }
        line += CUBE_DIM as usize;
    }
}

/// Stores the eight scale bytes of a tile's rotation group on line `line`: as they are, or in two 128x4 tiles.
#[cube]
fn store_scales<W: Size>(
    bytes: Vector<u32, Const<2>>,
    scales: &mut [Vector<u32, W>],
    at: &Position,
    line: usize,
    #[comptime] policy: EdenPolicy,
) {
    if comptime!(policy.swizzled) {
        let word = swizzled_word(at, line, policy.across);
        scales[word] = Vector::new(bytes.extract(0usize));
        scales[word + TILE_OF_SCALES] = Vector::new(bytes.extract(1usize));
    } else {
        let mut pair = Vector::<u32, W>::empty();
        pair.insert(0usize, bytes.extract(0usize));
        pair.insert(1usize, bytes.extract(1usize));
        scales[line * at.pitch + at.first] = pair;
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

/// The amax of the transformed values of a matrix, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    map: &[Vector<u32, Const<4>>],
    out: &mut [Atomic<u32>],
    signs: Signs,
    shape: Shape,
    row_tiles: usize,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut kept = KeptAmax {
        bits: 0u32,
        part: 0usize,
    };
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let at = tile_position(index, map, &shape, 0usize, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            load_matrix::<F, N>(x, &mut tile, &at, &signs, shape.cols, across, kind);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.include(tile_amax(&tile, across), at.part, out, policy);
            sync_cube();
        }
        index += CUBE_COUNT;
    }
    raise(out, kept.part, kept.bits, policy.cuda);
}

/// The amax of the transformed values of an NVFP4 matrix, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_amax_packed_kernel(
    source: PackedRows,
    map: &[Vector<u32, Const<4>>],
    out: &mut [Atomic<u32>],
    signs: Signs,
    shape: Shape,
    row_tiles: usize,
    #[comptime] policy: EdenPolicy,
) {
    let across = comptime!(policy.across);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let factor = source.factor();
    let mut kept = KeptAmax {
        bits: 0u32,
        part: 0usize,
    };
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let at = tile_position(index, map, &shape, 0usize, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            let plan = comptime!(policy.source);
            let own = source.factor_of(at.part, factor, plan);
            load_packed(&source, own, &mut tile, &at, &signs, across, plan);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.include(tile_amax(&tile, across), at.part, out, policy);
            sync_cube();
        }
        index += CUBE_COUNT;
    }
    raise(out, kept.part, kept.bits, policy.cuda);
}

/// MS-EDEN of a matrix, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_kernel<F: Numeric, N: Size, W: Size>(
    x: &[Vector<F, N>],
    map: &[Vector<u32, Const<4>>],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, W>],
    out_amax: &mut [f32],
    offset: &[u32],
    random: Random,
    signs: Signs,
    shape: Shape,
    row_tiles: usize,
    row_groups: usize,
    amax_factor: f32,
    block_factor: f32,
    #[comptime] policy: EdenPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let across = comptime!(policy.across);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut sums = BlockSums::new();
    let random = resolve(&random, offset, policy.device_offset);
    let mut kept = write_maxima(amax, amax_factor, block_factor, &shape, out_amax, policy);
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let at = tile_position(index, map, &shape, row_groups, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            load_matrix::<F, N>(x, &mut tile, &at, &signs, shape.cols, across, kind);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.turn_to(at.part, amax, amax_factor, block_factor, policy);
            quantize_tile::<W>(
                &tile,
                &mut sums,
                codes,
                scales,
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

/// MS-EDEN of an NVFP4 matrix, or of each of its groups of rows.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_packed_kernel<W: Size>(
    source: PackedRows,
    map: &[Vector<u32, Const<4>>],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [Vector<u32, W>],
    out_amax: &mut [f32],
    offset: &[u32],
    random: Random,
    signs: Signs,
    shape: Shape,
    row_tiles: usize,
    row_groups: usize,
    amax_factor: f32,
    block_factor: f32,
    #[comptime] policy: EdenPolicy,
) {
    let across = comptime!(policy.across);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(TILE));
    let mut sums = BlockSums::new();
    let random = resolve(&random, offset, policy.device_offset);
    let factor = source.factor();
    let mut kept = write_maxima(amax, amax_factor, block_factor, &shape, out_amax, policy);
    let mut index = CUBE_POS;
    while index < row_tiles * shape.tile_cols {
        let at = tile_position(index, map, &shape, row_groups, policy);
        if comptime!(policy.plain()) || is_filled(&at, policy) {
            let plan = comptime!(policy.source);
            let own = source.factor_of(at.part, factor, plan);
            load_packed(&source, own, &mut tile, &at, &signs, across, plan);
            transform_between_segments(&mut tile, across, policy.cuda);
            sync_cube();
            kept.turn_to(at.part, amax, amax_factor, block_factor, policy);
            quantize_tile::<W>(
                &tile,
                &mut sums,
                codes,
                scales,
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
