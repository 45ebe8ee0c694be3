//! The bits: codecs of the small floats, the block formats, and the quantized matrix on the host.

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

/// The most elements that a matrix may have with both sides padded to 128: no memory holds as many,
/// and no count of bytes, blocks or groups of so many overflows.
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

/// Fails for formats whose block scale is no power of two.
pub(crate) fn check_mx(format: Format) -> Result<(), Nvfp4Error> {
    if format.is_mx() {
        return Ok(());
    }
    let expected = "a microscaling format, whose block scales are powers of two";
    Err(Nvfp4Error::value("format", format!("{format:?}"), expected))
}
