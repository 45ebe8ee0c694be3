//! Comptime plan and arguments of one launch of a quantization kernel.

use cubecl::{prelude::*, server::Handle};

use super::target::TargetSpec;
use crate::{
    BLOCK, BlockPosition, Hadamard, HadamardSize, Nvfp4Error, RandomStream, StoredForm, Usage,
    capabilities::conversion_of,
    cube::{
        block::{BlockPlan, Encoded, resolve_offset},
        codec::Conversion,
        hadamard::{Signs, signs_launch},
        philox::{Numbering, Position, Random, RandomLaunch},
        unscaled::{store_unscaled_block, unscaled_word},
    },
    format::swizzle::TILE_INNER,
    launch::buffer,
    memory::check_memory,
    moe::EarlierGroups,
    tensor::{AmaxGranularity, DeviceQuantized, Groups, Matrix, amax_len},
};

/// Comptime configuration of one quantized tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QuantPlan {
    /// Quantization of blocks.
    pub policy: BlockPlan,
    /// Transform along K.
    pub hadamard: Option<HadamardSize>,
    /// True if its signs are the default ones, which columnwise kernels then have built in.
    pub default_signs: bool,
    /// True if scales are written in the 128x4 layout.
    pub swizzled: bool,
    /// True if K of a columnwise tensor is padded to whole tiles of that layout, and its scales are
    /// those of one matrix, whatever groups it has.
    pub whole_tiles: bool,
    /// True if each stored row has its own amax.
    pub per_row: bool,
    /// True to write code times block scale instead of codes and scales.
    pub unscaled: bool,
}

impl QuantPlan {
    /// Returns the number of neighbouring units that write one block: one for its 8 bytes of codes,
    /// or two for its 32 of values.
    pub(crate) const fn writers(&self) -> usize {
        if self.unscaled { 2 } else { 1 }
    }
}

/// A tensor to be written: its plan, run-time arguments and memory.
pub(crate) struct QuantArgs {
    pub plan: QuantPlan,
    pub out: DeviceQuantized,
    /// Number of amax values of all groups, in any layout of the tensor.
    maxima: usize,
    stream: Option<RandomStream>,
    device_offset: Option<Handle>,
    /// Units of earlier groups of rows, one word.
    earlier: Option<Handle>,
}

/// Returns the units of `earlier` groups, of `unit` rows each, after which a tensor in `groups` is
/// numbered, and the tensor's position with the `blocks` of one unit.
///
/// # Errors
/// Returns an error if the groups have no offsets, if the tensor also has another position, or if
/// there are no such units.
pub(super) fn behind_earlier(
    earlier: &EarlierGroups,
    position: &BlockPosition,
    groups: &Groups,
    (unit, blocks): (usize, usize),
) -> Result<(Handle, BlockPosition), Nvfp4Error> {
    if !matches!(groups, Groups::Offsets { .. }) || !position.is_own() {
        return Err(Nvfp4Error::value(
            "earlier",
            format!("groups before {groups:?} at {position:?}"),
            "groups with offsets, at a position of their own",
        ));
    }
    let row_blocks = u32::try_from(blocks).map_err(|_| {
        Nvfp4Error::value(
            "earlier",
            format!("units of {blocks} blocks"),
            "fewer than 2^32",
        )
    })?;
    let position = BlockPosition {
        row_blocks: Some(row_blocks),
        ..*position
    };
    Ok((earlier.units_of(unit)?, position))
}

fn position_of(stream: Option<RandomStream>) -> BlockPosition {
    stream.map_or_else(BlockPosition::default, |stream| stream.position)
}

/// Returns the output buffers of all of `out`.
pub(super) fn memory_of(out: &DeviceQuantized) -> QuantOutArgs {
    let blocks = out.code_blocks();
    // SAFETY (of every argument): allocated for it.
    match out.layout.form.is_packed() {
        false => QuantOutArgs::Bf16Unscaled(unsafe { buffer(&out.codes, blocks * 2) }),
        true => {
            let codes = unsafe { buffer(&out.codes, blocks) };
            let scales = unsafe { buffer(&out.scales, out.scale_bytes()) };
            QuantOutArgs::Packed(PackedOutLaunch::new(codes, scales))
        }
    }
}

impl QuantArgs {
    /// Allocates the checked `target` along `usage` of `x`.
    ///
    /// # Errors
    /// Returns an error if the amax values of `target` do not fit, or if it cannot be numbered
    /// after earlier groups.
    pub fn new(
        client: &Client,
        x: &Matrix,
        groups: &Groups,
        usage: Usage,
        target: &TargetSpec,
    ) -> Result<Self, Nvfp4Error> {
        let TargetSpec { params, form, .. } = *target;
        let mut stream = params.stream();
        let device_offset = stream.and(target.offset.clone());
        let mut numbering = Numbering::of(&position_of(stream));
        let mut earlier = None;
        if let (Some(before), Some(stream)) = (&target.earlier, &mut stream) {
            let unit = params.unit();
            let unit = match usage {
                Usage::Rowwise => (1, x.cols / BLOCK),
                Usage::Columnwise => (unit, x.cols * unit / BLOCK),
            };
            let (units, behind) = behind_earlier(before, &stream.position, groups, unit)?;
            (numbering, earlier, stream.position) = (Numbering::Behind, Some(units), behind);
        }
        // Tensors of groups that are concatenated along the columns get their rows at launch.
        let whole_tiles = form == StoredForm::WholeTiles;
        let rows = match (whole_tiles, groups) {
            (true, Groups::One) => x.rows.next_multiple_of(TILE_INNER),
            _ => x.rows,
        };
        let layout = params.layout((rows, x.cols), usage, form);
        let amax = target.known_amax();
        let maxima = amax_len(&layout, groups);
        check_memory("amax", amax, maxima * 4)?;
        let out = DeviceQuantized::empty(client, layout, groups.clone(), amax);
        Ok(Self {
            maxima,
            plan: QuantPlan {
                policy: BlockPlan {
                    stochastic: stream.is_some(),
                    device_offset: device_offset.is_some(),
                    numbering,
                    scaling: params.scaling,
                    conversion: conversion_of(client),
                },
                hadamard: params.hadamard.map(|hadamard| hadamard.size()),
                default_signs: params.hadamard == Some(Hadamard::default()),
                swizzled: form.has_tiles(),
                whole_tiles,
                per_row: params.amax == AmaxGranularity::PerRow,
                unscaled: form == StoredForm::Bf16Unscaled,
            },
            out,
            stream,
            device_offset,
            earlier,
        })
    }

    /// Returns the kernel's inputs and outputs for this tensor.
    pub fn target(&self) -> QuantTargetLaunch {
        QuantTargetLaunch::new(self.amax(), self.draw(), self.memory())
    }

    /// Returns the inputs without outputs, for a kernel that uses this amax but only makes the
    /// other tensor.
    pub fn absent(&self) -> QuantTargetLaunch {
        QuantTargetLaunch::new(self.amax(), self.draw(), QuantOutArgs::Absent)
    }

    fn amax(&self) -> BufferArg {
        // SAFETY: checked in `new`.
        unsafe { buffer(&self.out.amax, self.maxima) }
    }

    /// Returns the output buffers of the tensor.
    pub fn memory(&self) -> QuantOutArgs {
        memory_of(&self.out)
    }

    /// Returns the random inputs of the tensor.
    pub fn draw(&self) -> DrawLaunch {
        let (key, offset) = (self.stream).map_or(([0; 2], 0), |own| (own.key(), own.offset));
        let random = RandomLaunch::of(key, offset);
        let hadamard = self.out.layout.hadamard;
        // Without an offset in device memory the amax is a placeholder, which is not read.
        let offset = match &self.device_offset {
            // SAFETY: checked in `new` to hold two words.
            Some(handle) => unsafe { buffer(handle, 2) },
            // SAFETY: there is at least one amax.
            None => unsafe { buffer(&self.out.amax, 1) },
        };
        let earlier = match &self.earlier {
            // SAFETY: a word of those that were checked.
            Some(handle) => unsafe { buffer(handle, 1) },
            // SAFETY: as above.
            None => unsafe { buffer(&self.out.amax, 1) },
        };
        let signs = signs_launch(hadamard.map_or([0; 4], |hadamard| hadamard.sign_words()));
        let position = position_of(self.stream).into();
        DrawLaunch::new(offset, random, position, earlier, signs)
    }
}

/// Random inputs of one quantized tensor.
#[derive(CubeType, CubeLaunch)]
pub struct Draw {
    /// Additional random offset, if the plan has one: two words, low word first.
    pub offset: Box<[u32]>,
    /// Source of random bits.
    pub random: Random,
    /// Position of the tensor's blocks.
    pub position: Position,
    /// Units of the groups of rows before those of the tensor, one word, if the plan has them.
    pub earlier: Box<[u32]>,
    /// Signs of the transform.
    pub signs: Signs,
}

#[cube]
impl Draw {
    /// Returns the random stream at its offset.
    pub fn resolve(&self, #[comptime] policy: BlockPlan) -> Random {
        resolve_offset(&self.random, &self.offset, policy)
    }

    /// Returns the number that selects the random bits of block `index`, in a tensor whose stored
    /// rows have `row_blocks` blocks.
    pub fn number(&self, index: usize, row_blocks: usize, #[comptime] policy: BlockPlan) -> u64 {
        self.position
            .number(index, row_blocks, &self.earlier, policy.numbering)
    }
}

/// Output buffers for codes and block scales.
#[derive(CubeType, CubeLaunch)]
pub struct PackedOut {
    /// Codes, one block per item.
    pub codes: Box<[Vector<u32, Const<2>>]>,
    /// Scale bytes.
    pub scales: Box<[u8]>,
}

/// Output of a quantized tensor. The variant agrees with the comptime plan.
#[derive(CubeType, CubeLaunch)]
#[allow(dead_code, reason = "its launch arguments make it")]
pub enum QuantOut {
    /// The tensor is not made.
    Absent,
    /// Codes and block scales.
    Packed(PackedOut),
    /// Code times block scale in bf16, half a block per item.
    Bf16Unscaled(Box<[Vector<u32, Const<4>>]>),
}

#[cube]
impl QuantOut {
    /// Writes the codes of block `at`.
    pub fn store_codes(&mut self, at: usize, codes: Vector<u32, Const<2>>) {
        #[comptime]
        match self {
            QuantOut::Packed(out) => out.codes[at] = codes,
            _ => {}
        }
    }

    /// Writes the scale byte at `at`.
    pub fn store_scale(&mut self, at: usize, scale: u32) {
        #[comptime]
        match self {
            QuantOut::Packed(out) => out.scales[at] = u8::cast_from(scale),
            _ => {}
        }
    }

    /// Writes the values of block `at` if it is `inside`; see [`store_unscaled_block()`].
    pub fn store_values(
        &mut self,
        at: usize,
        block: &Encoded,
        inside: bool,
        #[comptime] conversion: Conversion,
    ) {
        #[comptime]
        match self {
            QuantOut::Bf16Unscaled(out) => store_unscaled_block(out, at, block, inside, conversion),
            _ => {}
        }
    }

    /// Writes the values of eight codes to item `at`; `pair` holds their scale twice.
    pub fn store_word(
        &mut self,
        at: usize,
        codes: u32,
        pair: u32,
        #[comptime] conversion: Conversion,
    ) {
        #[comptime]
        match self {
            QuantOut::Bf16Unscaled(out) => out[at] = unscaled_word(codes, pair, conversion),
            _ => {}
        }
    }
}

/// A quantized tensor in the kernel that makes it: inputs and outputs.
#[derive(CubeType, CubeLaunch)]
pub struct QuantTarget {
    /// Amax values.
    pub amax: Box<[f32]>,
    /// Random inputs.
    pub draw: Draw,
    /// Output buffers.
    pub out: QuantOut,
}
