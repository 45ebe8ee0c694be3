//! The bits: codecs of the two small floats, and the packed matrix with its scale layouts.

pub mod e2m1;
pub mod e4m3;
pub mod mx;
pub mod packed;
pub mod ue8m0;

use crate::Nvfp4Error;

/// The most elements that a matrix may have with both sides padded to 128: no memory holds as many, and
/// no count of bytes, blocks or groups of so many overflows.
const MAX_ELEMENTS: usize = 1 << 44;

/// Fails for shapes whose sizes could overflow before they are compared with any memory.
pub(crate) fn check_extent(
    argument: &'static str,
    rows: usize,
    cols: usize,
) -> Result<(), Nvfp4Error> {
    let padded = |len: usize| len.max(1).checked_next_multiple_of(128);
    let elements = padded(rows)
        .zip(padded(cols))
        .and_then(|(rows, cols)| rows.checked_mul(cols));
    match elements {
        Some(elements) if elements <= MAX_ELEMENTS => Ok(()),
        _ => Err(Nvfp4Error::shape(
            argument,
            format!("{rows} x {cols}"),
            format!("at most {MAX_ELEMENTS} elements, padded to multiples of 128"),
        )),
    }
}
