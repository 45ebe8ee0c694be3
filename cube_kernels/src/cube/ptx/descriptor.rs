//! The descriptors of `tcgen05`: how operands lie in shared memory, and what an instruction
//! multiplies. Pure functions, for the host and for comptime values of kernels.

use cubecl::prelude::*;

/// How the 16-byte parts of a row are exchanged in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SharedSwizzle {
    /// Not at all.
    None,
    /// Within 32 bytes.
    B32,
    /// Within 64 bytes.
    B64,
    /// Within 128 bytes: part `p` of row `r` is at `p ^ (r % 8)`, by absolute addresses.
    B128,
}

impl SharedSwizzle {
    /// Bits 61 to 63 of a descriptor.
    pub const fn bits(self) -> u64 {
        match self {
            Self::None => 0,
            Self::B128 => 2,
            Self::B64 => 4,
            Self::B32 => 6,
        }
    }
}

/// How an operand lies in shared memory: all of its descriptor but the address.
///
/// PTX ISA "tcgen05: Shared Memory Descriptor":
///
/// | bits | field |
/// |---|---|
/// | 0-13 | address / 16 |
/// | 16-29 | leading dimension byte offset / 16 |
/// | 32-45 | stride dimension byte offset / 16 |
/// | 46-48 | the constant 1 |
/// | 49-51 | base offset, zero where tiles are aligned to 1024 bytes |
/// | 52 | mode of the leading dimension: 0, an offset |
/// | 61-63 | swizzle |
///
/// Other bits are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedLayout {
    /// Bytes of the leading dimension's offset. Neither of the layouts here uses it.
    pub leading: u32,
    /// Bytes from eight rows to the next eight.
    pub stride: u32,
    /// The swizzle.
    pub swizzle: SharedSwizzle,
}

impl SharedLayout {
    /// K-major codes: rows of 128 bytes, 256 codes, with the 128-byte swizzle; 64 codes are 32
    /// bytes.
    pub const CODES: Self = Self {
        leading: 16,
        stride: 1024,
        swizzle: SharedSwizzle::B128,
    };
    /// Block scales in 128x4 tiles: 32 lines of 16 bytes, one behind the other.
    pub const SCALES: Self = Self {
        leading: 16,
        stride: 128,
        swizzle: SharedSwizzle::None,
    };

    /// The descriptor at address 0.
    pub const fn bits(self) -> u64 {
        ((self.leading as u64 >> 4) << 16)
            | ((self.stride as u64 >> 4) << 32)
            | (1 << 46)
            | (self.swizzle.bits() << 61)
    }

    /// The descriptor of an operand at `address`, a multiple of 16 in the shared window.
    pub const fn at(self, address: u32) -> u64 {
        self.bits() | ((address & 0x3_ffff) >> 4) as u64
    }
}

/// [`SharedLayout::at`] in a kernel.
#[cube]
pub fn tcgen05_descriptor(address: u32, #[comptime] layout: SharedLayout) -> u64 {
    u64::cast_from((address & 0x3_ffffu32) >> 4u32) | comptime!(layout.bits()).runtime()
}

/// The elements and block scales of a block-scaled `tcgen05.mma`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockScaled {
    /// `kind::mxf4nvf4` with `block16`: E2M1, an E4M3 scale for each 16. NVFP4.
    Nvfp4,
    /// `kind::mxf8f6f4` with `block32`: E4M3, a UE8M0 scale for each 32. MXFP8.
    Mxfp8,
}

/// The descriptor of a block-scaled `tcgen05.mma` of `m` x `n`, which is a register: `n` may vary
/// at run time. Both operands are K-major, dense, and not negated.
///
/// PTX ISA "tcgen05: Instruction descriptor", the tables for `kind::mxf4nvf4` and
/// `kind::mxf8f6f4`:
///
/// | bits | field |
/// |---|---|
/// | 2 | sparse |
/// | 4-5, 29-30 | which scales of a word `b` and `a` use: 0 |
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
    /// `dense_blockscaled_gemm_persistent`, compiled for sm_100a and read in its PTX).
    #[test]
    fn instruction_descriptors_of_nvidia() {
        for (m, n, expected) in [
            (256, 256, 0x1040_0480),
            (256, 128, 0x1020_0480),
            (128, 256, 0x0840_0480),
            (128, 192, 0x0830_0480),
            (128, 128, 0x0820_0480),
        ] {
            let found = instruction_descriptor(BlockScaled::Nvfp4, m, n);
            assert_eq!(found, expected, "{m} x {n}: {found:#010x}");
        }
    }

    /// By the table of the PTX ISA alone.
    #[test]
    fn instruction_descriptor_of_mxfp8() {
        let found = instruction_descriptor(BlockScaled::Mxfp8, 128, 256);
        assert_eq!(found, (1 << 27) | (1 << 23) | (32 << 17), "{found:#010x}");
        assert_eq!(found, 0x08c0_0000);
    }

    /// The constants of NVIDIA's kernel, for codes with the 128-byte swizzle and for scales.
    #[test]
    fn shared_memory_descriptors_of_nvidia() {
        assert_eq!(SharedLayout::CODES.bits(), 0x4000_4040_0001_0000);
        assert_eq!(SharedLayout::SCALES.bits(), 0x0000_4008_0001_0000);
    }

    /// The address is in units of 16 bytes; 64 codes on it is 2 more, as in NVIDIA's kernel.
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
        let bits = [None, B128, B64, B32].map(SharedSwizzle::bits);
        assert_eq!(bits, [0, 2, 4, 6]);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn instructions_are_no_wider_than_256() {
        instruction_descriptor(BlockScaled::Nvfp4, 128, 264);
    }
}
