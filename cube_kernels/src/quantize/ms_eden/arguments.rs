//! The arguments of the kernels of MS-EDEN, and what units keep of them.

use cubecl::prelude::*;

use super::{
    super::{packed_source::PackedRows, tile::Shape},
    position::{EdenPolicy, Position, TILE_OF_SCALES, swizzled_word},
};
use crate::{
    cube::{
        codec::canonical,
        eden::EdenScale,
        hadamard::{Signs, seeded_signs},
        philox::{Position as BlockNumbers, Random},
    },
    policy::Hadamard,
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
    pub(super) fn factor(&self) -> f32 {
        #[comptime]
        match self {
            EdenStored::Matrix(_) => 1.0f32.runtime(),
            EdenStored::Packed(rows) => rows.factor(),
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
    pub(super) fn scale(&self, group: usize) -> EdenScale {
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

/// The elements of the result.
#[derive(CubeType, CubeLaunch)]
pub enum EdenValues {
    /// Codes, and scale bytes.
    Packed(EdenPacked),
    /// Codes times block scales in bf16, eight to an item, in the order that the policy says.
    Bf16Unscaled(Box<[Vector<u32, Const<4>>]>),
}

/// Codes, an item for each block, and scale bytes.
#[derive(CubeType, CubeLaunch)]
pub struct EdenPacked {
    /// The codes.
    pub codes: Box<[Vector<u32, Const<2>>]>,
    /// The scale bytes.
    pub scales: EdenScales,
}

/// Where the result is written.
#[derive(CubeType, CubeLaunch)]
pub struct EdenOut {
    /// Its elements.
    pub values: EdenValues,
    /// The amax values that it decodes with.
    pub amax: Box<[f32]>,
}

#[cube]
impl EdenScales {
    /// Stores the eight scale bytes of a tile's rotation group on line `line`.
    pub(super) fn store(
        &mut self,
        bytes: Vector<u32, Const<2>>,
        at: &Position,
        line: usize,
        #[comptime] policy: EdenPolicy,
    ) {
        #[comptime]
        match self {
            EdenScales::Compact(scales) => scales[line * at.pitch + at.first] = bytes,
            EdenScales::Swizzled(scales) => {
                let word = swizzled_word(at, line, policy);
                scales[word] = bytes.extract(0usize);
                scales[word + TILE_OF_SCALES] = bytes.extract(1usize);
            }
        }
    }
}

/// What is drawn at random.
#[derive(CubeType, CubeLaunch)]
pub struct EdenDraw {
    /// A further part of the random offset, where the policy says so: two words, low word first.
    pub offset: Box<[u32]>,
    /// Where random bits come from.
    pub random: Random,
    /// Where the rotation groups of the tensor stand, counted in these.
    pub position: BlockNumbers,
    /// The units of the groups of rows before those of the tensor, a word, where the policy says
    /// so.
    pub earlier: Box<[u32]>,
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
    pub(super) fn resolve(&self, #[comptime] redrawn: bool) -> Signs {
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
    pub(super) fn resolve(&self, #[comptime] device_offset: bool) -> Random {
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

/// Writes the amax values from which the result decodes: the one, where there is one, or those of
/// the groups. Returns the scale of the first group, or of all.
#[cube]
pub(super) fn write_amax(
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

/// Raises entry `index` of `out` to `bits`, compared as integers: the order of arrival does not
/// matter. Once for each plane on CUDA, and only where it is not as high already: atomics on one
/// address take turns.
#[cube]
pub(super) fn atomic_amax(
    out: &mut [Atomic<u32>],
    index: usize,
    bits: u32,
    #[comptime] policy: EdenPolicy,
) {
    let bits = canonical(bits);
    if comptime!(policy.conversion.has_ptx()) {
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
pub(super) struct KeptAmax {
    pub bits: u32,
    pub part: usize,
}

#[cube]
impl KeptAmax {
    /// Includes the amax of a tile of group `part`, after giving `out` that of the group which it
    /// leaves.
    pub fn include(
        &mut self,
        bits: u32,
        part: usize,
        out: &mut [Atomic<u32>],
        #[comptime] policy: EdenPolicy,
    ) {
        if comptime!(!policy.plain()) {
            let next = part;
            if next != self.part {
                atomic_amax(out, self.part, self.bits, policy);
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
pub(super) struct KeptScale {
    pub scale: EdenScale,
    pub part: usize,
}

#[cube]
impl KeptScale {
    /// Makes it the scale of group `part`.
    pub fn turn_to(&mut self, part: usize, from: &EdenInputs, #[comptime] policy: EdenPolicy) {
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
