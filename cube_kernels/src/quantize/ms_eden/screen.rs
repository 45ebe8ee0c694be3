//! Approximate amax values of a matrix after both transforms, from one read, by matrix
//! instructions. They determine the few tiles that the exact kernel has to process.
//!
//! `cp.async` loads a tile of 128 rows and columns to shared memory while planes process the
//! previous one: half of them along its rows, half across them, as `ldmatrix` reads it.
//!
//! A transform of 128 consists of a transform of 32 by multiplication with the Hadamard matrix,
//! which is exact up to the rounding of its sums, and two butterfly steps on the results in
//! registers. Of the last step only the larger magnitude matters, which is the sum of the
//! magnitudes of both operands. No step exchanges data between units.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::tile::{Shape, ShapeLaunch},
    arguments::EdenSigns,
    transform::EdenTransform,
};
use crate::{
    capabilities::Capabilities,
    cube::{eden::LINES, hadamard::Signs, ptx},
    launch::{buffer, multiprocessors},
    memory::{address_type, allocate},
    reference::EDEN_GROUP,
    tensor::{FloatKind, Matrix},
    zeroed::zeros_of_step,
};

/// Units per cube: four planes along the rows, four across them.
const UNITS: usize = 256;
/// Cubes per SM.
const RESIDENT_CUBES: usize = 2;
/// Rows and columns of the matrix that a cube processes at a time.
const SIDE: usize = EDEN_GROUP;
/// Lines per matrix multiplication.
const ROWS: usize = 16;
/// Elements in 16 bytes, the chunk of a row that a unit copies at once.
const PART: usize = 8;
/// Chunks per row of a tile. Chunk `p` of row `r` is stored at the position of chunk `p ^ (r % 8)`,
/// so that the same chunk of eight rows, which `ldmatrix` reads at a time, is in different banks.
const PARTS: usize = SIDE / PART;
/// Row pitch of a tile in shared memory, in bytes.
const PITCH: u32 = 16 * PARTS as u32;
/// Bytes per tile in shared memory.
const TILE: u32 = PITCH * SIDE as u32;
/// Sign bits of a pair of elements.
const SIGNS: u32 = 0x8000_8000;

/// Comptime configuration of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScreenPlan {
    /// Element type, of 16 bits.
    pub kind: FloatKind,
    /// True if the kernel draws the signs of the transforms: along rows, across them.
    pub redrawn_signs: [bool; 2],
}

/// Results for one transform.
#[derive(CubeType, CubeLaunch)]
pub struct ScreenOut {
    /// Largest magnitude of each tile of 128 positions by 32 lines.
    pub tiles: Box<[f32]>,
    /// Largest magnitude of the whole matrix, as bits: one word, initially zero.
    pub largest: Box<[Atomic<u32>]>,
}

#[cube]
impl ScreenOut {
    /// Stores the largest magnitude of a tile, reduced over the units of a plane, and returns it as
    /// bits.
    fn take(&mut self, tile: usize, found: f32) -> u32 {
        let bits = plane_max(u32::reinterpret(found));
        if UNIT_POS_PLANE == 0u32 {
            self.tiles[tile] = f32::reinterpret(bits);
        }
        bits
    }

    /// Raises the largest magnitude of the whole matrix to `bits`.
    fn raise(&mut self, bits: u32) {
        if UNIT_POS_PLANE == 0u32 && bits > self.largest[0].load() {
            self.largest[0].fetch_max(bits);
        }
    }
}

/// Approximate largest magnitudes of the transformed source, without the factor of the transform.
#[derive(CubeType, CubeLaunch)]
pub struct EdenScreen {
    /// Largest magnitude of the whole matrix.
    pub largest: Box<[f32]>,
    /// Largest magnitude of each tile.
    pub tiles: Box<[f32]>,
}

#[cube]
impl EdenScreen {
    /// Returns true if the largest magnitude may be in tile `index`.
    ///
    /// Sums of a tile are over 128 elements, none of them above `M`, its largest result: the
    /// largest magnitude grows in every butterfly step. Two matrix multiplications sum 32 of them,
    /// each with an error of at most `17 · 2⁻²² M`, however the sums are aligned and truncated. Two
    /// more steps multiply the error by at most four, and the rounding of the exact sums is
    /// smaller: the total is below `2⁻¹⁴ M`. Near the largest number, and with NaN or infinity,
    /// every tile is processed.
    pub(super) fn may_hold_largest(&self, index: usize) -> bool {
        let largest = self.largest[0];
        let usable = largest < comptime!(f32::MAX / 256.0);
        let below = self.tiles[index] < largest * comptime!(1.0f32 - 1.0 / 1024.0);
        !(usable && below)
    }
}

/// Returns the sign bit of position `position` in bit 15 of a word.
#[cube]
fn sign_bit(signs: &Signs, position: u32) -> u32 {
    let low = select(position < 32u32, signs.word0, signs.word1);
    let high = select(position < 96u32, signs.word2, signs.word3);
    let word = select(position < 64u32, low, high);
    ((word >> (position % 32u32)) & 1u32) << 15u32
}

/// A unit's fragments of the Hadamard matrix: for each multiplication the two registers of the
/// first eight columns, with the signs of their positions applied to the rows.
#[derive(CubeType)]
struct Operand {
    words: Array<u32>,
}

#[cube]
impl Operand {
    fn new(signs: &Signs, #[comptime] kind: FloatKind) -> Operand {
        let quad = UNIT_POS_PLANE % 4u32;
        let column = UNIT_POS_PLANE / 4u32;
        let one = comptime!(match kind {
            FloatKind::F16 => 0x3C00u32,
            _ => 0x3F80u32,
        });
        // Rows `2 quad` and `2 quad + 1`, and the same eight rows further.
        let even = (2u32 * quad) & column;
        let even = (even ^ (even >> 1u32) ^ (even >> 2u32)) & 1u32;
        let odd = even ^ (column & 1u32);
        let pair = (one | (even << 15u32)) | ((one | (odd << 15u32)) << 16u32);
        let mut words = Array::<u32>::new(16usize);
        #[unroll]
        for eight in 0..16u32 {
            let at = comptime!(8 * eight) + 2u32 * quad;
            let sign = sign_bit(signs, at) | (sign_bit(signs, at + 1u32) << 16u32);
            words[comptime!(eight as usize)] = pair ^ sign;
        }
        Operand { words }
    }

    /// Returns `sums` plus 16 lines, whose registers for eight multiplications are `lines`, times
    /// eight columns (the `upper` ones, or the lower) of the matrix in multiplication `product`;
    /// `negative` subtracts.
    fn add(
        &self,
        sums: Vector<f32, Const<4>>,
        lines: &Array<u32>,
        #[comptime] product: usize,
        #[comptime] upper: bool,
        #[comptime] negative: bool,
        #[comptime] kind: FloatKind,
    ) -> Vector<f32, Const<4>> {
        let mut low = self.words[comptime!(2 * product)];
        let mut high = self.words[comptime!(2 * product + 1)];
        if comptime!(negative) {
            low ^= SIGNS;
        }
        // The last eight rows have the opposite sign in the last eight columns.
        if comptime!(negative != upper) {
            high ^= SIGNS;
        }
        let at = comptime!(4 * product);
        multiply(
            sums,
            lines[at],
            lines[comptime!(at + 1)],
            lines[comptime!(at + 2)],
            lines[comptime!(at + 3)],
            u32::reinterpret(low),
            u32::reinterpret(high),
            kind,
        )
    }

    /// Returns the largest magnitude of this unit's results of 16 lines after the transform.
    /// `lines` are the four registers of each of eight multiplications.
    fn largest(&self, lines: &Array<u32>, #[comptime] kind: FloatKind) -> f32 {
        let mut most = 0.0f32;
        #[unroll]
        for columns in 0..2u32 {
            let upper = comptime!(columns == 1);
            // Sums of pairs of partial products, then their differences.
            let mut sums = Array::<f32>::new(32usize);
            #[unroll]
            for pair in 0..4usize {
                let (even, odd) = comptime!((2 * pair, 2 * pair + 1));
                let zero = Vector::<f32, Const<4>>::new(0.0f32);
                let first = self.add(zero, lines, even, upper, false, kind);
                let sum = self.add(first, lines, odd, upper, false, kind);
                let difference = self.add(first, lines, odd, upper, true, kind);
                #[unroll]
                for i in 0..4usize {
                    sums[comptime!(4 * pair + i)] = sum.extract(i);
                    sums[comptime!(16 + 4 * pair + i)] = difference.extract(i);
                }
            }
            #[unroll]
            for i in 0..32usize {
                if comptime!(i & 4 == 0) {
                    let a = sums[i];
                    let b = sums[comptime!(i + 4)];
                    sums[i] = a + b;
                    sums[comptime!(i + 4)] = a - b;
                }
            }
            #[unroll]
            for i in 0..32usize {
                if comptime!(i & 8 == 0) {
                    let larger = sums[i].abs() + sums[comptime!(i + 8)].abs();
                    most = ptx::max_nan_abs(most, larger);
                }
            }
        }
        most
    }
}

#[cube]
fn multiply(
    sums: Vector<f32, Const<4>>,
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
    #[comptime] kind: FloatKind,
) -> Vector<f32, Const<4>> {
    if comptime!(kind == FloatKind::F16) {
        ptx::mma_m16n8k16_f16(sums, a0, a1, a2, a3, b0, b1)
    } else {
        ptx::mma_m16n8k16_bf16(sums, a0, a1, a2, a3, b0, b1)
    }
}

/// Chunks that a unit copies of every tile: one chunk of each sixteenth row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct Copies {
    /// Address of the matrix.
    source: u64,
    /// Destination of the first chunk in the first tile in shared memory.
    target: u32,
    /// Row of the first chunk in a tile.
    row: usize,
    /// Index of the chunks within their rows.
    part: usize,
}

#[cube]
impl Copies {
    /// Copies from memory at `source` to tiles at `memory`.
    fn new(source: u64, memory: u32) -> Copies {
        let row = UNIT_POS / comptime!(PARTS as u32);
        let part = UNIT_POS % comptime!(PARTS as u32);
        Copies {
            source,
            target: memory + row * PITCH + (part ^ (row % 8u32)) * 16u32,
            row: row as usize,
            part: part as usize,
        }
    }

    /// Starts to copy the tile that begins at row `row0` and column `col0`, to an offset of
    /// `behind` bytes from the first tile in shared memory. Elements outside the matrix are zero.
    fn begin(&self, row0: usize, col0: usize, behind: u32, shape: &Shape) {
        let row = row0 + self.row;
        let col = col0 + self.part * PART;
        let pitch = shape.cols / PART;
        let first = row * pitch + col / PART;
        let target = self.target + behind;
        #[unroll]
        for i in 0..comptime!(SIDE * PARTS / UNITS) {
            let below = comptime!(i * UNITS / PARTS);
            let inside = row + below < shape.rows && col < shape.cols;
            ptx::cp_async_zfill(
                target + comptime!(below as u32 * PITCH),
                self.source + u64::cast_from(first + below * pitch) * 16u64,
                select(inside, 16u32, 0u32),
                16u32,
            );
        }
    }
}

/// Returns the registers of 16 lines for eight multiplications: rows of the tile at `tile` from row
/// `line` on or, if `is_across`, columns.
#[cube]
fn lines_of(tile: u32, line: u32, is_across: bool) -> Array<u32> {
    let mut lines = Array::<u32>::new(32usize);
    // Each unit addresses one row of one of four 8x8 matrices.
    let unit = UNIT_POS_PLANE;
    let row = unit % 8u32;
    if is_across {
        let part = line / comptime!(PART as u32) + unit / 8u32 % 2u32;
        let at = tile + (row + unit / 16u32 * 8u32) * PITCH + (part ^ row) * 16u32;
        #[unroll]
        for product in 0..8u32 {
            let words = ptx::ldmatrix_x4_trans(at + comptime!(product * ROWS as u32 * PITCH));
            #[unroll]
            for i in 0..4usize {
                lines[comptime!(4 * product as usize + i)] = words.extract(i);
            }
        }
    } else {
        let at = tile + (line + unit % 16u32) * PITCH;
        let part = ((unit / 16u32) ^ row) * 16u32;
        #[unroll]
        for product in 0..8u32 {
            let words = ptx::ldmatrix_x4(at + (part ^ comptime!(product * 32)));
            #[unroll]
            for i in 0..4usize {
                lines[comptime!(4 * product as usize + i)] = words.extract(i);
            }
        }
    }
    lines
}

/// Computes approximate largest magnitudes of a matrix of 16-bit elements after both transforms,
/// without their factor: of each tile of 128 positions by 32 lines along and across the rows, and
/// of the whole matrix. Rows must have a multiple of eight elements. There must be at most as many
/// cubes as tiles of 128 by 128.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_screen_kernel(
    x: &[Vector<u32, Const<4>>],
    shape: Shape,
    along: EdenSigns,
    across: EdenSigns,
    mut of_along: ScreenOut,
    mut of_across: ScreenOut,
    #[comptime] plan: ScreenPlan,
) {
    let memory =
        Shared::<[Vector<u32, Const<4>>]>::new_aligned_slice(comptime!(2 * SIDE * PARTS), 128usize);
    let memory = ptx::cvta_to_shared::<Vector<u32, Const<4>>>(memory.as_slice().as_ptr());
    let source = ptx::cvta_to_global::<Vector<u32, Const<4>>>(unsafe { x.as_ptr_unchecked() });
    let copies = Copies::new(source, memory);
    let wide = shape.cols.div_ceil(SIDE);
    let narrow = shape.cols.div_ceil(LINES);
    let tiles = shape.rows.div_ceil(SIDE) * wide;
    let mut tile = CUBE_POS;
    let mut row = tile / wide;
    let mut column = tile % wide;
    copies.begin(row * SIDE, column * SIDE, 0u32, &shape);
    ptx::cp_async_commit_group();
    let plane = UNIT_POS as usize / 32usize;
    let is_across = plane >= 4usize;
    let part = plane % 4usize;
    let end = select(is_across, shape.cols, shape.rows);
    let signs_along = along.resolve(plan.redrawn_signs[0]);
    let signs_across = across.resolve(plan.redrawn_signs[1]);
    let signs = Signs {
        word0: select(is_across, signs_across.word0, signs_along.word0),
        word1: select(is_across, signs_across.word1, signs_along.word1),
        word2: select(is_across, signs_across.word2, signs_along.word2),
        word3: select(is_across, signs_across.word3, signs_along.word3),
    };
    let operand = Operand::new(&signs, plan.kind);
    let mut behind = 0u32;
    let mut most = 0u32;
    while tile < tiles {
        let next = tile + CUBE_COUNT;
        let (next_row, next_column) = (next / wide, next % wide);
        if next < tiles {
            let (row0, col0) = (next_row * SIDE, next_column * SIDE);
            copies.begin(row0, col0, behind ^ TILE, &shape);
        }
        ptx::cp_async_commit_group();
        ptx::cp_async_wait_group(1u32);
        sync_cube();
        let line = select(is_across, column, row) * 4usize + part;
        if line * LINES < end {
            let mut found = 0.0f32;
            for half in 0..2u32 {
                let first = part as u32 * LINES as u32 + half * ROWS as u32;
                let lines = lines_of(memory + behind, first, is_across);
                found = ptx::max_nan_abs(found, operand.largest(&lines, plan.kind));
            }
            if is_across {
                most = max(most, of_across.take(row * narrow + line, found));
            } else {
                most = max(most, of_along.take(line * wide + column, found));
            }
        }
        // Before the next tile but one overwrites this one.
        sync_cube();
        behind ^= TILE;
        tile = next;
        row = next_row;
        column = next_column;
    }
    if is_across {
        of_across.raise(most);
    } else {
        of_along.raise(most);
    }
}

/// Screening result for one transform: `largest` of the whole matrix, and of each tile.
pub(super) struct Screen {
    largest: Handle,
    tiles: Handle,
    count: usize,
}

impl Screen {
    pub fn arg(&self) -> EdenScreenLaunch {
        // SAFETY: this many values were allocated.
        unsafe { EdenScreenLaunch::new(buffer(&self.largest, 1), buffer(&self.tiles, self.count)) }
    }

    fn out(&self) -> ScreenOutLaunch {
        // SAFETY: this many values were allocated.
        unsafe { ScreenOutLaunch::new(buffer(&self.tiles, self.count), buffer(&self.largest, 1)) }
    }
}

/// Returns true if a matrix of `rows` x `cols` can be screened: by the matrix instructions of
/// sm_80, in vectors of eight elements. Not on devices with E2M1 conversions (sm_100 and later), for
/// which ptxas spills a register.
pub(in crate::quantize) fn can_screen(
    capabilities: &Capabilities,
    (rows, cols): (usize, usize),
    (dtype, is_aligned): (FloatKind, bool),
) -> bool {
    capabilities.conversion.has_ptx()
        && !capabilities.conversion.has_nearest()
        && dtype.size() == 2
        && cols.is_multiple_of(8)
        && rows > 0
        && cols > 0
        && is_aligned
}

/// Screens a matrix for which [`can_screen`] is true, along and across its rows.
pub(super) fn screen(
    client: &Client,
    matrix: &Matrix,
    [along, across]: [&EdenTransform; 2],
) -> [Screen; 2] {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let (tall, wide) = (rows.div_ceil(SIDE), cols.div_ceil(SIDE));
    let found = |count: usize| Screen {
        largest: zeros_of_step(client, 1),
        tiles: allocate(client, count * 4),
        count,
    };
    let screens = [
        found(rows.div_ceil(LINES) * wide),
        found(tall * cols.div_ceil(LINES)),
    ];
    let [of_along, of_across] = &screens;
    // With enough tiles, a cube has more than one: it copies the next while it processes the
    // current one.
    let cubes = (tall * wide).min(RESIDENT_CUBES * multiprocessors(client));
    let plan = ScreenPlan {
        kind: matrix.dtype,
        redrawn_signs: [along, across].map(|transform| transform.redrawn.is_some()),
    };
    // SAFETY: the matrix was checked against its memory, the rest was allocated, and the kernel
    // masks every access by the shape.
    unsafe {
        ms_eden_screen_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            address_type(matrix.len()),
            buffer(&matrix.handle, matrix.len() / PART),
            ShapeLaunch::new(rows, cols, 1, wide),
            along.arg(&of_along.largest),
            across.arg(&of_across.largest),
            of_along.out(),
            of_across.out(),
            plan,
        );
    }
    screens
}
