//! Quantized tensors to make of a source.

use cubecl::server::Handle;

use super::amax::AmaxRequest;
use crate::{
    BlockScaling, BlockShape, Format, Hadamard, Nvfp4Params, RandomStream, Rounding, ScaleLayout,
    Storage, Usage, moe::EarlierGroups, policy::AmaxGranularity,
};

/// Rounding of a quantized tensor, with the random offset on the host or on the device.
#[derive(Debug, Clone)]
pub enum DeviceRounding {
    /// Elements to nearest, ties to even.
    Nearest,
    /// Elements stochastically, with the offset of the stream as a plain argument.
    Stochastic(RandomStream),
    /// Elements stochastically, at the offset of the stream plus the one in device memory (two
    /// `u32`, low word first). A captured graph that advances the buffer draws fresh bits at each
    /// replay.
    StochasticAt(RandomStream, Handle),
    /// MS-EDEN: elements to nearest; block scales are corrected and rounded stochastically.
    MsEden(EdenRandom),
}

impl From<Rounding> for DeviceRounding {
    fn from(rounding: Rounding) -> Self {
        match rounding {
            Rounding::Nearest => Self::Nearest,
            Rounding::Stochastic(stream) => Self::Stochastic(stream),
        }
    }
}

/// Random bits of one quantization by MS-EDEN.
#[derive(Debug, Clone)]
pub struct EdenRandom {
    /// Seed, stream and offset.
    pub stream: RandomStream,
    /// Additional offset in device memory, added to that of the stream: two `u32`, low word first.
    /// A captured graph that advances it draws fresh bits at each replay.
    pub offset: Option<Handle>,
    /// Source of the transform's signs if a kernel draws them. The signs of
    /// [`TargetSpec::hadamard`] are then those of an offset of zero.
    pub redrawn: Option<RedrawnSigns>,
}

impl From<RandomStream> for EdenRandom {
    fn from(stream: RandomStream) -> Self {
        Self {
            stream,
            offset: None,
            redrawn: None,
        }
    }
}

/// Signs drawn by a kernel: those of [`Hadamard::seeded_with_size`] for `seed` plus
/// [`Hadamard::SEED_STEP`] times an offset in device memory. A captured graph that advances the
/// offset draws fresh signs at each replay.
#[derive(Debug, Clone)]
pub struct RedrawnSigns {
    /// Seed for an offset of zero.
    pub seed: u64,
    /// Offset: two `u32`, low word first.
    pub offset: Handle,
}

/// One quantized tensor to make of a source, along either axis.
#[derive(Debug, Clone)]
pub struct TargetSpec {
    /// Block format.
    pub format: Format,
    /// Rounding of elements, or MS-EDEN; MX formats round to nearest. Four over six rounds to
    /// nearest only.
    pub rounding: DeviceRounding,
    /// Transform along the contraction before quantization, if any. The amax of a columnwise tensor
    /// is that of the transformed values; a rowwise tensor supports 16 elements and is scaled by
    /// the amax of the values before the transform. MS-EDEN requires 128 elements, along either
    /// axis.
    pub hadamard: Option<Hadamard>,
    /// Rule for block scales of NVFP4.
    pub scaling: BlockScaling,
    /// Block shape: elements that share one block scale.
    pub block: BlockShape,
    /// Granularity of the amax, in a format with a global scale.
    pub granularity: AmaxGranularity,
    /// Amax values, `f32` in device memory, if they are known. Otherwise the request computes them.
    pub amax: Option<Handle>,
    /// Order in which the block scales are stored.
    pub scale_layout: ScaleLayout,
    /// True to pad the contraction of a columnwise tensor with zeros to whole 128x4 tiles of
    /// scales, 64 elements, so that FP4 tensor cores accept any number of tokens. The result equals
    /// that of a matrix with as many extra rows of zeros, except that random bits are numbered as
    /// in the unpadded matrix. Requires [`ScaleLayout::Swizzled128x4`].
    pub whole_tiles: bool,
    /// Storage: codes and block scales, or code times block scale in bf16.
    pub storage: Storage,
    /// Groups of rows that precede those of the source in the logical tensor, for groups with
    /// offsets: stochastic rounding numbers the tensor's blocks after those of these groups.
    pub earlier: Option<EarlierGroups>,
}

impl TargetSpec {
    /// Returns an NVFP4 tensor in 1x16 blocks with `rounding`, and otherwise defaults.
    pub fn new(rounding: impl Into<DeviceRounding>) -> Self {
        Self {
            rounding: rounding.into(),
            ..Self::from(Format::Nvfp4)
        }
    }

    /// Returns an NVFP4 tensor in 16x16 tiles, rounded to nearest.
    pub fn tiles(scaling: BlockScaling) -> Self {
        Self {
            scaling,
            block: BlockShape::Block2d,
            ..Self::from(Format::Nvfp4)
        }
    }

    /// Returns an NVFP4 tensor by MS-EDEN, after `hadamard` of 128 elements. Draw its signs anew
    /// for each backward pass, identical for both operands of a GEMM, or let the kernel draw them
    /// ([`EdenRandom::redrawn`]).
    pub fn ms_eden(hadamard: Hadamard, random: impl Into<EdenRandom>) -> Self {
        Self {
            rounding: DeviceRounding::MsEden(random.into()),
            hadamard: Some(hadamard),
            ..Self::from(Format::Nvfp4)
        }
    }

    /// Sets the amax values.
    pub fn amax(self, amax: &Handle) -> Self {
        Self {
            amax: Some(amax.clone()),
            ..self
        }
    }

    /// Sets the granularity of the amax.
    pub fn granularity(self, granularity: AmaxGranularity) -> Self {
        Self {
            granularity,
            ..self
        }
    }

    /// Sets the order of the block scales.
    pub fn scale_layout(self, scale_layout: ScaleLayout) -> Self {
        Self {
            scale_layout,
            ..self
        }
    }

    /// Sets the storage.
    pub fn storage(self, storage: Storage) -> Self {
        Self { storage, ..self }
    }

    /// Selects block scales in 128x4 tiles, and pads the contraction of a columnwise tensor to
    /// whole tiles: see [`Self::whole_tiles`].
    pub fn in_whole_tiles(self) -> Self {
        Self {
            scale_layout: ScaleLayout::Swizzled128x4,
            whole_tiles: true,
            ..self
        }
    }

    /// Returns true if the tensor is quantized by MS-EDEN.
    pub fn is_ms_eden(&self) -> bool {
        matches!(self.rounding, DeviceRounding::MsEden(_))
    }

    /// Returns true if the tensor can be quantized directly from the codes of another one.
    pub(super) fn is_made_from_codes(&self) -> bool {
        self.is_ms_eden() || self.format.is_mx()
    }

    /// Returns the amax values.
    ///
    /// # Panics
    /// Panics if they are not known.
    pub(super) fn known_amax(&self) -> &Handle {
        let amax = self.amax.as_ref();
        amax.expect("an earlier step computed the amax values")
    }

    /// Returns true if the tensor has 16x16 tiles.
    pub(super) fn is_2d(&self) -> bool {
        self.block == BlockShape::Block2d
    }

    /// Returns the amax values of a tensor along `usage`.
    pub(super) fn amax_along(&self, usage: Usage) -> AmaxRequest {
        AmaxRequest::along(usage, self.granularity, self.hadamard)
    }

    /// Returns true if one amax of the untransformed matrix is sufficient.
    pub(super) fn shares_amax(&self) -> bool {
        !self.is_made_from_codes()
            && self.granularity == AmaxGranularity::PerTensor
            && self.hadamard.is_none()
    }
}

/// Converts from a format: a packed tensor in blocks along the contraction, rounded to nearest,
/// with one amax, standard scales in rows and no transform.
impl From<Format> for TargetSpec {
    fn from(format: Format) -> Self {
        Self {
            format,
            rounding: DeviceRounding::Nearest,
            hadamard: None,
            scaling: BlockScaling::Standard,
            block: BlockShape::Block1d,
            granularity: AmaxGranularity::PerTensor,
            amax: None,
            scale_layout: ScaleLayout::Compact,
            whole_tiles: false,
            storage: Storage::Packed,
            earlier: None,
        }
    }
}

impl From<Nvfp4Params> for TargetSpec {
    fn from(params: Nvfp4Params) -> Self {
        Self {
            hadamard: params.hadamard,
            scaling: params.scaling,
            scale_layout: params.layout,
            ..Self::new(params.rounding)
        }
    }
}
