//! Quantized all-gather of the tokens of all ranks.

use burn_core::backend::Dispatch;
use burn_core::tensor::Tensor;
use nvfp4_formats::{Hadamard, Nvfp4Error, Rounding, Usage};

use super::ProcessGroup;
use crate::functions::{Nvfp4Tensor, quantize_params, try_quantize};
use crate::ops::sharding::gathered_tokens;

/// Returns the tokens of all ranks, quantized along `usage`; each rank passes its rows `x`,
/// `[rows, cols]`. The exchange transfers the amax first, then 4-bit codes and block scales, 0.5625
/// bytes per element. The bytes are those of all rows quantized on one device, random bits
/// included. A constant for autodiff.
///
/// Row-wise storage concatenates the ranks' rows. In column-wise storage, which is transposed, the
/// tokens of a rank are a part of each stored row.
///
/// # Errors
/// Returns an error if the device or the dtype is not supported, `cols` is not a multiple of 16 for
/// [`Usage::Rowwise`], a transform is requested along it, or the number of rows is not a multiple
/// of 16 and of the size of the transform. Nothing has been exchanged then.
///
/// # Panics
/// If the group fails.
pub fn try_quantize_all_gather(
    x: Tensor<2>,
    usage: Usage,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
    group: &ProcessGroup,
) -> Result<Nvfp4Tensor, Nvfp4Error> {
    let params = quantize_params(&x, usage, rounding, hadamard)?;
    let (rows, unit) = (x.dims()[0], params.unit());
    if !rows.is_multiple_of(unit) {
        return Err(Nvfp4Error::shape(
            "x",
            format!("{rows} rows on each of {} ranks", group.size()),
            format!("a multiple of {unit}, the block along the tokens"),
        ));
    }
    if group.size() == 1 {
        return try_quantize(x, usage, rounding, hadamard);
    }
    let x = x.detach().set_require_grad(false).into_dispatch();
    let made = gathered_tokens::<Dispatch>(x, usage, params, group);
    Ok(Nvfp4Tensor::from_dispatch(made))
}
