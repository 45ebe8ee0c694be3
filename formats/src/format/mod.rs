//! Codecs of the small floats, block formats, and the quantized matrix on the host.

pub mod block;
pub mod e2m1;
pub mod e4m3;
pub mod layout;
pub mod padding;
pub mod swizzle;
pub mod tensor;
pub mod ue8m0;

use block::Format;

use crate::error::Nvfp4Error;

/// Largest number of elements of a matrix with both dimensions padded to 128. No memory is that
/// large, and no number of bytes, blocks or groups of such a matrix overflows.
const MAX_ELEMENTS: usize = 1 << 44;

/// Returns an error for shapes whose sizes could overflow before they are compared with a buffer.
pub fn check_extent(argument: &'static str, rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
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

/// Returns an error for formats whose block scales are not powers of two.
pub fn check_mx(format: Format) -> Result<(), Nvfp4Error> {
    if format.is_mx() {
        return Ok(());
    }
    let expected = "a microscaling format, whose block scales are powers of two";
    Err(Nvfp4Error::value("format", format!("{format:?}"), expected))
}
