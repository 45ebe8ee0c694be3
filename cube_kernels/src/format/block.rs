//! The block formats: their elements, scales and rules.

use serde::{Deserialize, Serialize};

use super::{e2m1, e4m3};

/// A block format, chosen at run time. Each is a type that implements [`BlockFormat`], too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// [`Nvfp4`].
    #[default]
    Nvfp4,
    /// [`Mxfp8`].
    Mxfp8,
}

/// The type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementFormat {
    /// 4 bits, magnitudes up to 6.
    E2m1,
    /// 8 bits, magnitudes up to 448.
    E4m3,
}

impl ElementFormat {
    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2m1 => 4,
            Self::E4m3 => 8,
        }
    }

    /// The largest magnitude.
    pub const fn max(self) -> f32 {
        match self {
            Self::E2m1 => e2m1::MAX,
            Self::E4m3 => e4m3::MAX,
        }
    }
}

/// The type of a block scale, one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// E4M3 without a sign.
    E4m3,
    /// A power of two.
    Ue8m0,
}

/// What a block format is made of: elements, and a scale for each block of them.
pub trait BlockFormat {
    /// The run-time name.
    const FORMAT: Format;
    /// Elements that share one scale.
    const BLOCK: usize;
    /// The type of an element.
    const ELEMENT: ElementFormat;
    /// The type of a block scale.
    const SCALE: ScaleFormat;
    /// Whether an amax, from which a global scale derives, belongs to the tensor.
    const GLOBAL_SCALE: bool;
    /// Bits of a code.
    const CODE_BITS: usize = Self::ELEMENT.bits();
}

/// Blocks of 16 E2M1 elements, an E4M3 scale each, and a global scale.
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4;

impl BlockFormat for Nvfp4 {
    const FORMAT: Format = Format::Nvfp4;
    const BLOCK: usize = 16;
    const ELEMENT: ElementFormat = ElementFormat::E2m1;
    const SCALE: ScaleFormat = ScaleFormat::E4m3;
    const GLOBAL_SCALE: bool = true;
}

/// A block format of the OCP microscaling specification: 32 elements and a UE8M0 scale.
pub trait MxFormat: BlockFormat {
    /// The code of a scaled value, rounded to nearest even and saturating.
    fn encode(value: f32) -> u8;
    /// The value of a code.
    fn decode(code: u8) -> f32;
}

/// Blocks of 32 E4M3 elements and a UE8M0 scale each.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp8;

impl BlockFormat for Mxfp8 {
    const FORMAT: Format = Format::Mxfp8;
    const BLOCK: usize = MX_BLOCK;
    const ELEMENT: ElementFormat = ElementFormat::E4m3;
    const SCALE: ScaleFormat = ScaleFormat::Ue8m0;
    const GLOBAL_SCALE: bool = false;
}

impl MxFormat for Mxfp8 {
    #[inline(always)]
    fn encode(value: f32) -> u8 {
        e4m3::encode_element(value)
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        e4m3::decode_element(code)
    }
}

/// Elements of an NVFP4 block.
pub const BLOCK: usize = Nvfp4::BLOCK;

/// Elements of a block of a microscaling format.
pub const MX_BLOCK: usize = 32;

/// The constants of a [`BlockFormat`] as values.
struct Constants {
    block: usize,
    element: ElementFormat,
    scale: ScaleFormat,
    global_scale: bool,
}

impl Constants {
    const fn of<F: BlockFormat>() -> Self {
        Self {
            block: F::BLOCK,
            element: F::ELEMENT,
            scale: F::SCALE,
            global_scale: F::GLOBAL_SCALE,
        }
    }
}

impl Format {
    const fn constants(self) -> Constants {
        match self {
            Self::Nvfp4 => Constants::of::<Nvfp4>(),
            Self::Mxfp8 => Constants::of::<Mxfp8>(),
        }
    }

    /// [`BlockFormat::BLOCK`].
    pub const fn block(self) -> usize {
        self.constants().block
    }

    /// [`BlockFormat::ELEMENT`].
    pub const fn element(self) -> ElementFormat {
        self.constants().element
    }

    /// [`BlockFormat::SCALE`].
    pub const fn scale(self) -> ScaleFormat {
        self.constants().scale
    }

    /// [`BlockFormat::CODE_BITS`].
    pub const fn code_bits(self) -> usize {
        self.element().bits()
    }

    /// [`BlockFormat::GLOBAL_SCALE`].
    pub const fn has_global_scale(self) -> bool {
        self.constants().global_scale
    }

    /// Whether it is a microscaling format: its scales are powers of two.
    pub const fn is_mx(self) -> bool {
        matches!(self.scale(), ScaleFormat::Ue8m0)
    }
}
