//! The groups of rows of other devices.

use cubecl::server::Handle;

use crate::{Nvfp4Error, memory::check_memory, reference::EARLIER_UNITS};

/// Groups of rows that stand before those of a matrix in the logical tensor of all groups, such as
/// the tokens of the experts of earlier ranks: how many units they take, in device memory.
#[derive(Debug, Clone)]
pub struct EarlierGroups {
    /// Units of each of [`EARLIER_UNITS`] rows, each group's rounded up: `u32`, one after the
    /// other.
    units: Handle,
}

impl EarlierGroups {
    /// The groups with these `units`, one number for each of [`EARLIER_UNITS`].
    ///
    /// # Errors
    /// When the memory is smaller.
    pub fn new(units: Handle) -> Result<Self, Nvfp4Error> {
        check_memory("earlier", &units, EARLIER_UNITS.len() * 4)?;
        Ok(Self { units })
    }

    /// The number of their units of `rows` rows, a word.
    ///
    /// # Errors
    /// When `rows` is none of [`EARLIER_UNITS`].
    pub(crate) fn units_of(&self, rows: usize) -> Result<Handle, Nvfp4Error> {
        let Some(entry) = EARLIER_UNITS.iter().position(|&unit| unit == rows) else {
            return Err(Nvfp4Error::value(
                "earlier",
                format!("units of {rows} rows"),
                format!("one of {EARLIER_UNITS:?}"),
            ));
        };
        let behind = EARLIER_UNITS.len() - entry - 1;
        let word = self.units.clone().offset_start(4 * entry as u64);
        Ok(word.offset_end(4 * behind as u64))
    }
}
