//! Block formats: their elements, scales and rules.

use serde::{Deserialize, Serialize};

use super::{e2m1, e4m3};

/// A block format, chosen at run time. Each one also has a type that implements [`BlockFormat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// [`Nvfp4`].
    #[default]
    Nvfp4,
    /// [`Mxfp8`].
    Mxfp8,
    /// [`Mxfp4`].
    Mxfp4,
}

/// Type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementFormat {
    /// 4 bits, magnitudes up to 6.
    E2m1,
    /// 8 bits, magnitudes up to 448.
    E4m3,
}

impl ElementFormat {
    /// Returns the number of bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2m1 => 4,
            Self::E4m3 => 8,
        }
    }

    /// Returns the largest magnitude.
    pub const fn max(self) -> f32 {
        match self {
            Self::E2m1 => e2m1::MAX,
            Self::E4m3 => e4m3::MAX,
        }
    }
}

/// Type of a block scale, one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleFormat {
    /// E4M3 without a sign.
    E4m3,
    /// A power of two.
    Ue8m0,
}

/// A block format: elements, and one scale per block of them.
pub trait BlockFormat {
    /// Run-time name.
    const FORMAT: Format;
    /// Number of elements that share one scale.
    const BLOCK: usize;
    /// Type of an element.
    const ELEMENT: ElementFormat;
    /// Type of a block scale.
    const SCALE: ScaleFormat;
    /// True if the tensor has an amax, from which a global scale derives.
    const GLOBAL_SCALE: bool;
    /// Number of bits of a code.
    const CODE_BITS: usize = Self::ELEMENT.bits();
}

/// Blocks of 16 E2M1 elements with one E4M3 scale each, and a global scale.
#[derive(Debug, Clone, Copy)]
pub struct Nvfp4;

impl BlockFormat for Nvfp4 {
    const FORMAT: Format = Format::Nvfp4;
    const BLOCK: usize = 16;
    const ELEMENT: ElementFormat = ElementFormat::E2m1;
    const SCALE: ScaleFormat = ScaleFormat::E4m3;
    const GLOBAL_SCALE: bool = true;
}

/// Blocks of 32 E4M3 elements with one UE8M0 scale each.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp8;

impl BlockFormat for Mxfp8 {
    const FORMAT: Format = Format::Mxfp8;
    const BLOCK: usize = MX_BLOCK;
    const ELEMENT: ElementFormat = ElementFormat::E4m3;
    const SCALE: ScaleFormat = ScaleFormat::Ue8m0;
    const GLOBAL_SCALE: bool = false;
}

/// Blocks of 32 E2M1 elements with one UE8M0 scale each.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4;

impl BlockFormat for Mxfp4 {
    const FORMAT: Format = Format::Mxfp4;
    const BLOCK: usize = MX_BLOCK;
    const ELEMENT: ElementFormat = ElementFormat::E2m1;
    const SCALE: ScaleFormat = ScaleFormat::Ue8m0;
    const GLOBAL_SCALE: bool = false;
}

/// Number of elements of an NVFP4 block.
pub const BLOCK: usize = Nvfp4::BLOCK;

/// Number of elements of a block of a microscaling format.
pub const MX_BLOCK: usize = 32;

/// Constants of a [`BlockFormat`] as values.
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
            Self::Mxfp4 => Constants::of::<Mxfp4>(),
        }
    }

    /// Returns [`BlockFormat::BLOCK`].
    pub const fn block(self) -> usize {
        self.constants().block
    }

    /// Returns [`BlockFormat::ELEMENT`].
    pub const fn element(self) -> ElementFormat {
        self.constants().element
    }

    /// Returns [`BlockFormat::SCALE`].
    pub const fn scale(self) -> ScaleFormat {
        self.constants().scale
    }

    /// Returns [`BlockFormat::CODE_BITS`].
    pub const fn code_bits(self) -> usize {
        self.element().bits()
    }

    /// Returns [`BlockFormat::GLOBAL_SCALE`].
    pub const fn has_global_scale(self) -> bool {
        self.constants().global_scale
    }

    /// True for a microscaling format, whose scales are powers of two.
    pub const fn is_mx(self) -> bool {
        matches!(self.scale(), ScaleFormat::Ue8m0)
    }
}
