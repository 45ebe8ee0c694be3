//! Transform parameters of MS-EDEN.

use cubecl::server::Handle;

use super::{super::target::TargetSpec, arguments::EdenSignsLaunch};
use crate::{
    Hadamard, Nvfp4Error, QuantRounding, cube::hadamard::signs_launch, launch::buffer,
    memory::check_memory, reference::check_eden_hadamard,
};

/// Transform of MS-EDEN, over 128 elements.
#[derive(Debug, Clone)]
pub struct EdenTransform {
    /// Transform. If signs are redrawn, its signs are those of an offset of zero.
    pub hadamard: Hadamard,
    /// Seed of the signs if a kernel draws them, and the offset in device memory.
    pub redrawn: Option<(u64, Handle)>,
}

impl EdenTransform {
    /// Returns the transform of a tensor by MS-EDEN; one that [`Self::check`] refuses if the tensor
    /// has none.
    pub fn of(target: &TargetSpec) -> Self {
        let seed = match target.params.rounding {
            QuantRounding::MsEden(draw) => draw.signs,
            QuantRounding::Elements(_) => None,
        };
        Self {
            hadamard: target.params.hadamard.unwrap_or_default(),
            redrawn: seed.zip(target.offset.clone()),
        }
    }

    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        check_eden_hadamard(&self.hadamard)?;
        let memory = self.redrawn.as_ref().map(|(_, offset)| offset);
        memory.map_or(Ok(()), |offset| check_memory("offset", offset, 8))
    }

    /// Returns the kernel argument; `unread` is a placeholder for a missing offset.
    pub(super) fn arg(&self, unread: &Handle) -> EdenSignsLaunch {
        let (words, offset) = match &self.redrawn {
            None => (self.hadamard.sign_words(), None),
            Some((seed, offset)) => {
                let seed = [*seed as u32, (*seed >> 32) as u32, 0, 0];
                (seed, Some(offset))
            }
        };
        // SAFETY: an offset was checked, and the kernel reads no other memory.
        let offset = match offset {
            Some(offset) => unsafe { buffer(offset, 2) },
            None => unsafe { buffer(unread, 1) },
        };
        EdenSignsLaunch::new(signs_launch(words), offset)
    }
}
