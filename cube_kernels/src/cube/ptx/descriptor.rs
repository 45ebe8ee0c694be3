//! Descriptors of `tcgen05`: layouts of operands in shared memory, and operand types and shapes of
//! an instruction. Pure functions, for the host and for comptime values of kernels.

use cubecl::prelude::*;

use crate::format::block::Format;

/// Permutation of the 16-byte chunks of a row in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SharedSwizzle {
    /// No swizzle.
    None,
    /// Within 128 bytes: chunk `p` of row `r` is at `p ^ (r % 8)`, by absolute addresses.
    B128,
}

impl SharedSwizzle {
    /// Returns bits 61 to 63 of a descriptor.
    pub const fn bits(self) -> u64 {
        match self {
            Self::None => 0,
            Self::B128 => 2,
        }
    }
}

/// Layout of an operand in shared memory: its descriptor without the address.
///
/// PTX ISA "tcgen05: Shared Memory Descriptor":
///
/// | bits | field |
/// |---|---|
/// | 0-13 | address / 16 |
/// | 16-29 | leading dimension byte offset / 16 |
/// | 32-45 | stride dimension byte offset / 16 |
/// | 46-48 | the constant 1 |
/// | 49-51 | base offset, zero for tiles aligned to 1024 bytes |
/// | 52 | mode of the leading dimension: 0, an offset |
/// | 61-63 | swizzle |
///
/// Other bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedLayout {
    /// Offset of the leading dimension in bytes. Neither of the layouts here uses it.
    pub leading: u32,
    /// Bytes from one group of eight rows to the next.
    pub stride: u32,
    /// Swizzle.
    pub swizzle: SharedSwizzle,
}

impl SharedLayout {
    /// K-major codes: rows of 128 bytes, 256 codes of E2M1 or 128 of E4M3, with the 128-byte
    /// swizzle. An instruction reads 32 bytes of a row.
    pub const CODES: Self = Self {
        leading: 16,
        stride: 1024,
        swizzle: SharedSwizzle::B128,
    };
    /// Block scales in 128x4 tiles: 32 contiguous lines of 16 bytes.
    pub const SCALES: Self = Self {
        leading: 16,
        stride: 128,
        swizzle: SharedSwizzle::None,
    };

    /// Returns the descriptor at address 0.
    pub const fn bits(self) -> u64 {
        ((self.leading as u64 >> 4) << 16)
            | ((self.stride as u64 >> 4) << 32)
            | (1 << 46)
            | (self.swizzle.bits() << 61)
    }
}

/// Returns the descriptor of an operand at `address`, a multiple of 16 in the shared window.
#[cube]
pub fn tcgen05_descriptor(address: u32, #[comptime] layout: SharedLayout) -> u64 {
    u64::cast_from((address & 0x3_ffffu32) >> 4u32) | comptime!(layout.bits()).runtime()
}

/// Element and block scale types of a block-scaled `tcgen05.mma`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockScaled {
    /// `kind::mxf4nvf4` with `block16`: E2M1 with an E4M3 scale per 16 elements. NVFP4.
    Nvfp4,
    /// `kind::mxf8f6f4` with `block32`: E4M3 with a UE8M0 scale per 32 elements. MXFP8.
    Mxfp8,
}

impl BlockScaled {
    /// All kinds.
    pub const ALL: [Self; 2] = [Self::Nvfp4, Self::Mxfp8];

    /// Returns the format of the operands.
    pub const fn format(self) -> Format {
        match self {
            Self::Nvfp4 => Format::Nvfp4,
            Self::Mxfp8 => Format::Mxfp8,
        }
    }

    /// Returns the suffix that names the kind in descriptions of kernels: none for NVFP4.
    pub(crate) const fn suffix(self) -> &'static str {
        match self {
            Self::Nvfp4 => "",
            Self::Mxfp8 => " on MXFP8",
        }
    }

    /// Returns the columns per 128 bytes of codes, which the swizzle spans: 256 or 128.
    pub const fn tile_k(self) -> usize {
        1024 / self.format().code_bits()
    }

    /// Returns the columns per instruction, 32 bytes of codes: 64 or 32.
    pub const fn step_k(self) -> usize {
        256 / self.format().code_bits()
    }

    /// Returns the columns whose block scales are in one 128x4 tile: 64 or 128.
    pub const fn atom_k(self) -> usize {
        4 * self.format().block()
    }

    /// Returns the first byte of each word of scales that the instruction at column `column` of a
    /// 128x4 tile uses: `block16` uses all four bytes, `block32` one.
    pub const fn scale_id(self, column: usize) -> u32 {
        (column % self.atom_k() / self.format().block()) as u32
    }
}

/// Returns `idesc` with `id` as the first scale of a word for both operands: fields of two bits.
pub const fn with_scale_ids(idesc: u32, id: u32) -> u32 {
    assert!(id < 4);
    idesc | (id << 4) | (id << 29)
}

/// [`instruction_descriptor`] with a run-time `n`, a multiple of 8 from 8 to 256, which replaces
/// that of `idesc`.
#[cube]
pub fn tcgen05_instruction_descriptor(n: u32, #[comptime] idesc: u32) -> u32 {
    comptime!(idesc & !(0x3f << 17)).runtime() | ((n >> 3u32) << 17u32)
}

/// Returns the descriptor of a block-scaled `tcgen05.mma` of `m` x `n`. It is passed in a register,
/// so `n` may vary at run time. Both operands are K-major, dense, and not negated.
///
/// PTX ISA "tcgen05: Instruction descriptor", the tables for `kind::mxf4nvf4` and
/// `kind::mxf8f6f4`:
///
/// | bits | field |
/// |---|---|
/// | 2 | sparse |
/// | 4-5, 29-30 | index of the scales of a word that `b` and `a` use: 0, see [`with_scale_ids`] |
/// | 7-9 | type of `a`: 1 = E2M1 of `mxf4nvf4`, 0 = E4M3 of `mxf8f6f4` |
/// | 10-11 (10-12 of `mxf8f6f4`) | type of `b` |
/// | 13, 14, 15, 16 | negate `a`, `b`; transpose `a`, `b` |
/// | 17-22 | `n / 8` |
/// | 23 | type of the scales: 0 = UE4M3, 1 = UE8M0 |
/// | 27-28 | `m / 128` |
/// | 31 | K: 0 = 64, 1 = 96 of `mxf4nvf4` |
pub const fn instruction_descriptor(kind: BlockScaled, m: u32, n: u32) -> u32 {
    assert!(m.is_multiple_of(128) && m <= 256 && n.is_multiple_of(8) && n >= 8 && n <= 256);
    let (element, scale) = match kind {
        BlockScaled::Nvfp4 => (1, 0),
        BlockScaled::Mxfp8 => (0, 1),
    };
    (element << 7) | (element << 10) | ((n >> 3) << 17) | (scale << 23) | ((m >> 7) << 27)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Instruction descriptors of NVIDIA's NVFP4 kernel (CUTLASS's
    /// `dense_blockscaled_gemm_persistent`, compiled for sm_100a, values read from its PTX).
    #[test]
    fn instruction_descriptors_of_nvidia() {
        for (m, n, expected) in [
            (256, 256, 0x1040_0480),
            (256, 128, 0x1020_0480),
            (128, 256, 0x0840_0480),
            (128, 192, 0x0830_0480),
            (128, 128, 0x0820_0480),
            (128, 64, 0x0810_0480),
        ] {
            let found = instruction_descriptor(BlockScaled::Nvfp4, m, n);
            assert_eq!(found, expected, "{m} x {n}: {found:#010x}");
        }
    }

    /// Instruction descriptors of the same kernel, compiled for E4M3 elements with UE8M0 scales of
    /// 32.
    #[test]
    fn instruction_descriptors_of_nvidia_for_mxfp8() {
        for (m, n, expected) in [
            (256, 256, 0x10c0_0000),
            (128, 256, 0x08c0_0000),
            (128, 64, 0x0890_0000),
        ] {
            let found = instruction_descriptor(BlockScaled::Mxfp8, m, n);
            assert_eq!(found, expected, "{m} x {n}: {found:#010x}");
        }
    }

    /// With `block32` there is a scale per 32 columns: the four instructions of 128 columns use the
    /// bytes of a word one after another, as in NVIDIA's kernel, whose descriptors these are;
    /// `block16` uses whole words. That kernel also has the index in bits 30 and 31 of the address
    /// of the scales; DeepGEMM has it only in the descriptor, as here.
    #[test]
    fn scale_ids() {
        let idesc = instruction_descriptor(BlockScaled::Mxfp8, 128, 256);
        let of_steps = [0, 32, 64, 96].map(|column| {
            let id = BlockScaled::Mxfp8.scale_id(column);
            with_scale_ids(idesc, id)
        });
        let expected = [0x08c0_0000, 0x28c0_0010, 0x48c0_0020, 0x68c0_0030];
        assert_eq!(of_steps, expected, "{of_steps:#010x?}");
        for column in [0, 64, 128, 192] {
            assert_eq!(BlockScaled::Nvfp4.scale_id(column), 0);
        }
        // The ids have separate fields.
        for id in 0..4 {
            let found = with_scale_ids(0, id);
            assert_eq!((found >> 4 & 3, found >> 29 & 3), (id, id));
            assert_eq!(found & !(3 << 4 | 3 << 29), 0);
        }
    }

    /// Minimum width, for few rows of `b`, in both formats.
    #[test]
    fn instruction_descriptors_of_narrow_tiles() {
        let narrow = |kind| instruction_descriptor(kind, 128, 8);
        assert_eq!(narrow(BlockScaled::Nvfp4), 0x0802_0480);
        assert_eq!(narrow(BlockScaled::Mxfp8), 0x0882_0000);
    }

    /// Columns per row in shared memory, per instruction and per tile of scales.
    #[test]
    fn columns_of_both_formats() {
        let columns = |kind: BlockScaled| (kind.tile_k(), kind.step_k(), kind.atom_k());
        assert_eq!(columns(BlockScaled::Nvfp4), (256, 64, 64));
        assert_eq!(columns(BlockScaled::Mxfp8), (128, 32, 128));
    }

    /// Constants of NVIDIA's kernel for codes with the 128-byte swizzle and for scales: identical
    /// for both formats.
    #[test]
    fn shared_memory_descriptors_of_nvidia() {
        assert_eq!(SharedLayout::CODES.bits(), 0x4000_4040_0001_0000);
        assert_eq!(SharedLayout::SCALES.bits(), 0x0000_4008_0001_0000);
    }

    /// The address is in units of 16 bytes; 64 codes further is an increment of 2, as in NVIDIA's
    /// kernel.
    #[test]
    fn addresses_in_descriptors() {
        for address in [0, 1024, 1056, 0x3_8000, 0x3_fff0] {
            let descriptor = SharedLayout::CODES.at(address);
            assert_eq!(descriptor & 0x3fff, address as u64 / 16);
            assert_eq!(descriptor & !0x3fff, SharedLayout::CODES.bits());
        }
        let step = SharedLayout::CODES.at(1024 + 32) - SharedLayout::CODES.at(1024);
        assert_eq!(step, 2);
        // The shared window has addresses of 18 bits.
        assert_eq!(
            SharedLayout::SCALES.at(0x4_0000),
            SharedLayout::SCALES.at(0)
        );
    }

    #[test]
    fn swizzles_have_their_own_bits() {
        use SharedSwizzle::*;
        assert_eq!([None, B128].map(SharedSwizzle::bits), [0, 2]);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn instructions_are_no_wider_than_256() {
        instruction_descriptor(BlockScaled::Nvfp4, 128, 264);
    }
}
