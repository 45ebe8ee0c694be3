//! The largest magnitudes of a matrix after both transforms, nearly: from one read, and by matrix
//! instructions. What they find decides which tiles the exact kernel has to look at, which are few.
//!
//! A transform of 128 is one of 16 by a product with the Hadamard matrix, which is exact up to the
//! rounding of its sums, and three steps of the butterfly on what that leaves in registers. Of the
//! last step only the larger magnitude counts, which is the sum of those of both operands. In all
//! 4 instructions an element, and none between units, where the exact sums take 12.

use cubecl::{prelude::*, server::Handle};

use super::{
    super::tile::{Shape, ShapeLaunch},
    arguments::EdenSigns,
    transform::EdenTransform,
};
use crate::{
    capabilities::Capabilities,
    cube::{eden::LINES, hadamard::Signs, ptx},
    launch::{buffer, tile_cubes},
    memory::{address_type, allocate, is_aligned},
    reference::EDEN_GROUP,
    tensor::{FloatKind, Matrix},
    zeroed::zeros_of_step,
};

/// Units of a cube: four planes along the rows, four across them.
const UNITS: usize = 256;
/// Rows and columns of the matrix that a cube has at a time.
const SIDE: usize = EDEN_GROUP;
/// Lines of one product.
const ROWS: usize = 16;

/// The comptime choices of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScreenPlan {
    /// The type of the elements: one of 16 bits.
    pub kind: FloatKind,
    /// The signs of the transforms are drawn by the kernel: along rows, across them.
    pub redrawn_signs: [bool; 2],
}

/// What is found of one transform.
#[derive(CubeType, CubeLaunch)]
pub struct ScreenOut {
    /// The largest magnitude of each tile of 128 positions by 32 lines.
    pub tiles: Box<[f32]>,
    /// That of the whole, as bits: one word, zero before.
    pub largest: Box<[Atomic<u32>]>,
}

#[cube]
impl ScreenOut {
    /// Takes the largest magnitude of a tile as the units of a plane see it; returns it as bits.
    fn take(&mut self, tile: usize, found: f32) -> u32 {
        let bits = plane_max(u32::reinterpret(found));
        if UNIT_POS_PLANE == 0u32 {
            self.tiles[tile] = f32::reinterpret(bits);
        }
        bits
    }

    /// Raises the largest magnitude of the whole to `bits`.
    fn raise(&mut self, bits: u32) {
        if UNIT_POS_PLANE == 0u32 && bits > self.largest[0].load() {
            self.largest[0].fetch_max(bits);
        }
    }
}

/// What a screening found of the transformed source, nearly and without the factor of the
/// transform.
#[derive(CubeType, CubeLaunch)]
pub struct EdenScreen {
    /// The largest magnitude.
    pub largest: Box<[f32]>,
    /// That of each tile.
    pub tiles: Box<[f32]>,
}

#[cube]
impl EdenScreen {
    /// Whether the largest magnitude may be in tile `index`.
    ///
    /// Sums of a tile are of 128 elements, none of them above `M`, its largest result: at every
    /// step of a butterfly the largest magnitude grows. A product sums 16 of them with an error of
    /// at most `16 · 2⁻²² M`, however the sums are aligned and cut off, three more steps make eight
    /// times as much of it at most, and the exact sums round by less: all is below `2⁻¹⁴ M`. Near
    /// the largest number, and where there is a NaN or an infinity, every tile is looked at.
    pub(super) fn may_hold_largest(&self, index: usize) -> bool {
        let largest = self.largest[0];
        let usable = largest < comptime!(f32::MAX / 256.0);
        let below = self.tiles[index] < largest * comptime!(1.0f32 - 1.0 / 1024.0);
        !(usable && below)
    }
}

/// What a unit multiplies by, and the signs that it gives to what it loads.
#[derive(CubeType)]
struct Operand {
    /// Its pair of the Hadamard matrix: rows `2t` and `2t + 1`, column `g`.
    b: u32,
    /// The sign bits of its pairs of positions: for each of eight products the lower, the upper.
    signs: Array<u32>,
}

/// The sign bit of position `position` in bit 15 of a word.
#[cube]
fn sign_bit(signs: &Signs, position: u32) -> u32 {
    let low = select(position < 32u32, signs.word0, signs.word1);
    let high = select(position < 96u32, signs.word2, signs.word3);
    let word = select(position < 64u32, low, high);
    ((word >> (position % 32u32)) & 1u32) << 15u32
}

/// The lower of the two positions of word `half` of product `product` in a unit of a quad: along
/// rows as vectors of eight elements lie, across them 16 rows to a product.
#[cube]
fn position_of(
    quad: u32,
    #[comptime] product: u32,
    #[comptime] half: u32,
    #[comptime] across: bool,
) -> u32 {
    if comptime!(across) {
        comptime!(16 * product + 8 * half) + 2u32 * quad
    } else {
        let vector = quad + comptime!(4 * (product / 2));
        vector * 8u32 + comptime!(4 * (product % 2) + 2 * half)
    }
}

#[cube]
impl Operand {
    fn new(signs: &Signs, #[comptime] across: bool, #[comptime] kind: FloatKind) -> Operand {
        let quad = UNIT_POS_PLANE % 4u32;
        let column = UNIT_POS_PLANE / 4u32;
        let one = comptime!(match kind {
            FloatKind::F16 => 0x3C00u32,
            _ => 0x3F80u32,
        });
        let even = (2u32 * quad) & column;
        let even = (even ^ (even >> 1u32) ^ (even >> 2u32)) & 1u32;
        let odd = even ^ (column & 1u32);
        let mut masks = Array::<u32>::new(16usize);
        #[unroll]
        for product in 0..8u32 {
            #[unroll]
            for half in 0..2u32 {
                let at = position_of(quad, product, half, across);
                let sign = sign_bit(signs, at) | (sign_bit(signs, at + 1u32) << 16u32);
                masks[comptime!((2 * product + half) as usize)] = sign;
            }
        }
        Operand {
            b: (one | (even << 15u32)) | ((one | (odd << 15u32)) << 16u32),
            signs: masks,
        }
    }

    /// The largest magnitude of 16 lines after the transform, of those that this unit has results
    /// of. `words` are the four registers of each of eight products.
    fn largest(&self, words: &Array<u32>, #[comptime] kind: FloatKind) -> f32 {
        let mut most = 0.0f32;
        #[unroll]
        for columns in 0..2u32 {
            // Row 8 and column 8 of the matrix have a sign in common.
            let upper = if comptime!(columns == 1) {
                self.b ^ 0x8000_8000u32
            } else {
                self.b
            };
            let mut sums = Array::<f32>::new(32usize);
            #[unroll]
            for product in 0..8usize {
                let at = comptime!(4 * product);
                let low = self.signs[comptime!(2 * product)];
                let high = self.signs[comptime!(2 * product + 1)];
                let found = multiply(
                    words[at] ^ low,
                    words[comptime!(at + 1)] ^ low,
                    words[comptime!(at + 2)] ^ high,
                    words[comptime!(at + 3)] ^ high,
                    self.b,
                    upper,
                    kind,
                );
                #[unroll]
                for i in 0..4usize {
                    sums[comptime!(at + i)] = found.extract(i);
                }
            }
            #[unroll]
            for stage in 0..2u32 {
                let distance = comptime!(4usize << stage);
                #[unroll]
                for i in 0..32usize {
                    if comptime!(i & distance == 0) {
                        let a = sums[i];
                        let b = sums[comptime!(i + distance)];
                        sums[i] = a + b;
                        sums[comptime!(i + distance)] = a - b;
                    }
                }
            }
            #[unroll]
            for i in 0..16usize {
                let larger = sums[i].abs() + sums[comptime!(i + 16)].abs();
                most = ptx::max_nan_abs(most, larger);
            }
        }
        most
    }
}

#[cube]
fn multiply(
    a0: u32,
    a1: u32,
    a2: u32,
    a3: u32,
    b0: u32,
    b1: u32,
    #[comptime] kind: FloatKind,
) -> Vector<f32, Const<4>> {
    let zero = Vector::<f32, Const<4>>::new(0.0f32);
    if comptime!(kind == FloatKind::F16) {
        ptx::mma_m16n8k16_f16(zero, a0, a1, a2, a3, b0, b1)
    } else {
        ptx::mma_m16n8k16_bf16(zero, a0, a1, a2, a3, b0, b1)
    }
}

/// The registers of 16 rows from `row0` on, along the columns from `col0` on.
#[cube]
fn load_along(x: &[Vector<u32, Const<4>>], row0: usize, col0: usize, shape: &Shape) -> Array<u32> {
    let mut words = Array::<u32>::new(32usize);
    let row = row0 + UNIT_POS_PLANE as usize / 4usize;
    let col = col0 + UNIT_POS_PLANE as usize % 4usize * 8usize;
    let vectors = shape.cols / 8usize;
    #[unroll]
    for load in 0..4usize {
        #[unroll]
        for lower in 0..2usize {
            let row = row + comptime!(lower * 8);
            let col = col + comptime!(load * 32);
            let mut vector = Vector::<u32, Const<4>>::new(0u32);
            if row < shape.rows && col < shape.cols {
                vector = x[row * vectors + col / 8usize];
            }
            #[unroll]
            for i in 0..4usize {
                // Two products to a vector; of each the words of the lower position first.
                let at = comptime!(4 * (2 * load + i / 2) + 2 * (i % 2) + lower);
                words[at] = vector.extract(i);
            }
        }
    }
    words
}

/// The registers of 16 columns from `col0` on, along the rows from `row0` on. A unit has two
/// neighbouring columns, as lines `g` and `g + 8` of the product.
#[cube]
fn load_across(x: &[u32], row0: usize, col0: usize, shape: &Shape) -> Array<u32> {
    let mut words = Array::<u32>::new(32usize);
    if row0 + SIDE <= shape.rows && col0 + ROWS <= shape.cols {
        fill_across(&mut words, x, row0, col0, shape, false);
    } else {
        fill_across(&mut words, x, row0, col0, shape, true);
    }
    words
}

/// [`load_across()`]; what is not in the matrix is zero, if that is `checked`.
#[cube]
fn fill_across(
    words: &mut Array<u32>,
    x: &[u32],
    row0: usize,
    col0: usize,
    shape: &Shape,
    #[comptime] checked: bool,
) {
    let quad = UNIT_POS_PLANE % 4u32;
    let col = col0 + UNIT_POS_PLANE as usize / 4usize * 2usize;
    let pitch = shape.cols / 2usize;
    #[unroll]
    for product in 0..8u32 {
        #[unroll]
        for half in 0..2u32 {
            let row = row0 + position_of(quad, product, half, true) as usize;
            let mut first = 0u32;
            let mut second = 0u32;
            if comptime!(checked) {
                if row < shape.rows && col < shape.cols {
                    first = x[row * pitch + col / 2usize];
                }
                if row + 1usize < shape.rows && col < shape.cols {
                    second = x[(row + 1usize) * pitch + col / 2usize];
                }
            } else {
                first = x[row * pitch + col / 2usize];
                second = x[(row + 1usize) * pitch + col / 2usize];
            }
            let at = comptime!((4 * product + 2 * half) as usize);
            words[at] = ptx::prmt(first, second, 0x5410u32);
            words[comptime!(at + 1)] = ptx::prmt(first, second, 0x7632u32);
        }
    }
}

/// Finds the largest magnitudes of a matrix of 16-bit elements after both transforms, nearly and
/// without their factor: of each tile of 128 positions by 32 lines along the rows and across them,
/// and of the whole. `vectors` and `pairs` are the same memory, whose rows have a multiple of eight
/// elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn ms_eden_screen_kernel(
    vectors: &[Vector<u32, Const<4>>],
    pairs: &[u32],
    shape: Shape,
    along: EdenSigns,
    across: EdenSigns,
    mut of_along: ScreenOut,
    mut of_across: ScreenOut,
    #[comptime] plan: ScreenPlan,
) {
    let plane = UNIT_POS as usize / 32usize;
    let part = plane % 4usize;
    let wide = shape.cols.div_ceil(SIDE);
    let narrow = shape.cols.div_ceil(LINES);
    let tiles = shape.rows.div_ceil(SIDE) * wide;
    let mut most = 0u32;
    let mut tile = CUBE_POS;
    if plane < 4usize {
        let signs = along.resolve(plan.redrawn_signs[0]);
        let operand = Operand::new(&signs, false, plan.kind);
        while tile < tiles {
            let line = tile / wide * 4usize + part;
            if line * LINES < shape.rows {
                let (row0, col0) = (line * LINES, tile % wide * SIDE);
                let mut found = 0.0f32;
                for half in 0..2usize {
                    let words = load_along(vectors, row0 + half * ROWS, col0, &shape);
                    found = ptx::max_nan_abs(found, operand.largest(&words, plan.kind));
                }
                most = max(most, of_along.take(line * wide + tile % wide, found));
            }
            tile += CUBE_COUNT;
        }
        of_along.raise(most);
    } else {
        let signs = across.resolve(plan.redrawn_signs[1]);
        let operand = Operand::new(&signs, true, plan.kind);
        while tile < tiles {
            let column = tile % wide * 4usize + part;
            if column * LINES < shape.cols {
                let (row0, col0) = (tile / wide * SIDE, column * LINES);
                let mut found = 0.0f32;
                for half in 0..2usize {
                    let words = load_across(pairs, row0, col0 + half * ROWS, &shape);
                    found = ptx::max_nan_abs(found, operand.largest(&words, plan.kind));
                }
                most = max(most, of_across.take(tile / wide * narrow + column, found));
            }
            tile += CUBE_COUNT;
        }
        of_across.raise(most);
    }
}

/// What the screening found of one transform: `largest` of the whole, and of each tile.
pub(super) struct Screen {
    largest: Handle,
    tiles: Handle,
    count: usize,
}

impl Screen {
    pub fn arg(&self) -> EdenScreenLaunch {
        // SAFETY: as many were allocated.
        unsafe { EdenScreenLaunch::new(buffer(&self.largest, 1), buffer(&self.tiles, self.count)) }
    }

    fn out(&self) -> ScreenOutLaunch {
        // SAFETY: as many were allocated.
        unsafe { ScreenOutLaunch::new(buffer(&self.tiles, self.count), buffer(&self.largest, 1)) }
    }
}

/// Whether `matrix` can be screened: by the matrix instructions of sm_80, in vectors of eight
/// elements. Not where E2M1 has conversions (sm_100 and later), for which ptxas spills a register.
pub(super) fn can_screen(client: &Client, matrix: &Matrix) -> bool {
    let capabilities = Capabilities::of(client);
    capabilities.conversion.has_ptx()
        && !capabilities.conversion.has_nearest()
        && matrix.dtype.size() == 2
        && matrix.cols.is_multiple_of(8)
        && matrix.rows > 0
        && matrix.cols > 0
        && is_aligned(&matrix.handle)
}

/// Screens a matrix of which [`can_screen`] holds, along and across its rows.
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
    let (count, _) = tile_cubes(client, tall * wide);
    let plan = ScreenPlan {
        kind: matrix.dtype,
        redrawn_signs: [along, across].map(|transform| transform.redrawn.is_some()),
    };
    // SAFETY: the matrix was checked against its memory, the rest was allocated, and the kernel
    // masks every access by the shape.
    unsafe {
        ms_eden_screen_kernel::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(UNITS as u32),
            address_type(matrix.len()),
            buffer(&matrix.handle, matrix.len() / 8),
            buffer(&matrix.handle, matrix.len() / 2),
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
