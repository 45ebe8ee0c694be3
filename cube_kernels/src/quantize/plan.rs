//! What one launch of a quantization kernel is asked for, decided at compile time, and given.

use cubecl::{prelude::*, server::Handle};

use crate::{
    BLOCK, Hadamard, HadamardSize, Layout, Nvfp4Error, ScaleLayout, Storage,
    cube::{block::BlockPlan, codec::Conversion, hadamard::SignsLaunch, philox::RandomLaunch},
    launch::buffer,
    memory::check_memory,
    policy::BlockScaling,
    tensor::{
        AmaxGranularity, DeviceQuantParams, DeviceQuantized, DeviceRounding, Groups, Matrix,
        amax_len,
    },
};

/// The comptime choices for one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantPlan {
    /// How blocks become codes.
    pub policy: BlockPlan,
    /// The transform along the packed axis.
    pub hadamard: Option<HadamardSize>,
    /// Whether its signs are the default ones, which column-wise kernels then have built in.
    pub default_signs: bool,
    /// Whether scales are written in the 128x4 layout.
    pub swizzled: bool,
    /// Whether each stored row has its own amax.
    pub per_row: bool,
    /// Whether values are written, and neither codes nor scales.
    pub decoded: bool,
}

impl QuantPlan {
    /// Units that write one block, side by side: one its 8 bytes of codes, or two its 32 of values.
    pub(crate) const fn writers(&self) -> usize {
        if self.decoded { 2 } else { 1 }
    }
}

/// What a copy is made from and how: the amax, what it stands for, and the policy.
#[derive(Debug, Clone)]
pub struct QuantRequest<'a> {
    /// The largest magnitudes, `f32` in device memory; of the transformed values where there is a
    /// transform.
    pub amax: &'a Handle,
    /// What one of them stands for.
    pub scope: AmaxGranularity,
    /// How the copy is made.
    pub copy: DeviceQuantParams,
}

/// One copy to be written: its plan, its run-time arguments, its memory.
pub(crate) struct QuantArgs {
    pub plan: QuantPlan,
    pub out: DeviceQuantized,
    /// Values of the amax, of all groups however the copy is laid out.
    maxima: usize,
    key: [u32; 2],
    offset: u64,
    device_offset: Option<Handle>,
    signs: [u32; 4],
}

impl QuantArgs {
    /// Checks the request for a copy of `x` along `usage` and allocates the copy.
    pub fn new(
        client: &Client,
        x: &Matrix,
        groups: &Groups,
        usage: crate::Usage,
        request: &QuantRequest<'_>,
        form: Storage,
        conversion: Conversion,
    ) -> Result<Self, Nvfp4Error> {
        let QuantRequest { amax, scope, copy } = request;
        let (stream, device_offset) = match &copy.rounding {
            DeviceRounding::Nearest => (None, None),
            DeviceRounding::Stochastic(stream) => (Some(*stream), None),
            DeviceRounding::StochasticAt(stream, offset) => {
                check_memory("offset", offset, 8)?;
                (Some(*stream), Some(offset.clone()))
            }
        };
        if stream.is_some() && matches!(copy.scaling, BlockScaling::FourOverSix(_)) {
            return Err(Nvfp4Error::value(
                "rounding",
                "stochastic, with four over six",
                "to nearest: four over six chooses by the error of rounding to nearest",
            ));
        }
        let layout = Layout {
            scale_layout: copy.layout,
            scaling: copy.scaling,
            amax: *scope,
            hadamard: copy.hadamard,
            storage: form,
            ..Layout::nvfp4(x.rows, x.cols, usage)
        };
        let decoded = form == Storage::Bf16Unscaled;
        if decoded && copy.layout != ScaleLayout::Compact {
            return Err(Nvfp4Error::value(
                "layout",
                format!("{:?} for decoded values", copy.layout),
                "Compact: there are no scales to swizzle",
            ));
        }
        let maxima = amax_len(&layout, groups);
        check_memory("amax", amax, maxima * 4)?;
        let out = DeviceQuantized::empty(client, layout, groups.clone(), amax);
        Ok(Self {
            maxima,
            plan: QuantPlan {
                policy: BlockPlan {
                    stochastic: stream.is_some(),
                    device_offset: device_offset.is_some(),
                    scaling: copy.scaling,
                    conversion,
                },
                hadamard: copy.hadamard.map(|hadamard| hadamard.size()),
                default_signs: copy.hadamard == Some(Hadamard::default()),
                swizzled: copy.layout == ScaleLayout::Swizzled128x4,
                per_row: *scope == AmaxGranularity::PerRow,
                decoded,
            },
            out,
            key: stream.map_or([0; 2], |stream| stream.key()),
            offset: stream.map_or(0, |stream| stream.offset),
            device_offset,
            signs: copy
                .hadamard
                .map_or([0; 4], |hadamard| hadamard.sign_words()),
        })
    }

    pub fn amax(&self) -> BufferArg {
        // SAFETY: checked in `new`.
        unsafe { buffer(&self.out.amax, self.maxima) }
    }

    /// The codes, a block to an item, or the values, half a block.
    pub fn codes(&self) -> BufferArg {
        let items = self.out.code_blocks() * self.plan.writers();
        // SAFETY: allocated for it.
        unsafe { buffer(&self.out.codes, items) }
    }

    /// Words of an item of [`Self::codes`].
    pub fn width(&self) -> usize {
        if self.plan.decoded { 4 } else { 2 }
    }

    /// The scales; where there are none the values, which the kernel does not write as such.
    pub fn scales(&self) -> BufferArg {
        let len = match self.plan.decoded {
            true => 1,
            false => self.out.scale_bytes(),
        };
        // SAFETY: allocated for it; memory is never empty.
        unsafe { buffer(&self.out.scales, len) }
    }

    pub fn random(&self) -> RandomLaunch {
        RandomLaunch::new(
            self.key[0],
            self.key[1],
            self.offset as u32,
            (self.offset >> 32) as u32,
        )
    }

    pub fn signs(&self) -> SignsLaunch {
        signs_launch(self.signs)
    }

    /// The offset in device memory; where there is none the amax, which the kernel does not read as
    /// one.
    pub fn offset(&self) -> BufferArg {
        match &self.device_offset {
            // SAFETY: checked in `new` to hold two words.
            Some(handle) => unsafe { buffer(handle, 2) },
            // SAFETY: there is at least one amax.
            None => unsafe { buffer(&self.out.amax, 1) },
        }
    }
}

pub(crate) fn signs_launch(words: [u32; 4]) -> SignsLaunch {
    SignsLaunch::new(words[0], words[1], words[2], words[3])
}

/// The signs of an optional transform.
pub(crate) fn signs_of(hadamard: Option<Hadamard>) -> SignsLaunch {
    signs_launch(hadamard.map_or([0; 4], |hadamard| hadamard.sign_words()))
}

pub(crate) fn check_packed_cols(x: &Matrix) -> Result<(), Nvfp4Error> {
    if x.cols.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "x",
        format!("{} x {}", x.rows, x.cols),
        "columns, the packed axis, in a multiple of 16",
    ))
}
