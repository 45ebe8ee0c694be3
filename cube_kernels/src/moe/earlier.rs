//! Groups of rows on other devices.

use cubecl::server::Handle;

use crate::{Nvfp4Error, memory::check_memory, reference::EARLIER_UNITS};

/// Groups of rows that precede those of a matrix in the logical tensor of all groups, such as the
/// tokens of earlier ranks' experts. The number of row units that they take is in device memory.
#[derive(Debug, Clone)]
pub struct EarlierGroups {
    /// Number of units for each unit size of [`EARLIER_UNITS`], with each group's number rounded
    /// up: consecutive `u32`.
    units: Handle,
}

impl EarlierGroups {
    /// Returns groups with these `units`, one number for each of [`EARLIER_UNITS`].
    ///
    /// # Errors
    /// Returns an error if the memory is smaller.
    pub fn new(units: Handle) -> Result<Self, Nvfp4Error> {
        check_memory("earlier", &units, EARLIER_UNITS.len() * 4)?;
        Ok(Self { units })
    }

    /// Returns the number of units of `rows` rows, one word.
    ///
    /// # Errors
    /// Returns an error if `rows` is not one of [`EARLIER_UNITS`].
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
