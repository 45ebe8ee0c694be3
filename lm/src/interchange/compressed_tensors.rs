//! Names, types and shapes of compressed-tensors' `nvfp4-pack-quantized` checkpoints (0.19, 0.20).
//!
//! Global scales divide: `weight_global_scale` and `input_global_scale` are about 2688 / amax, F32
//! of shape `[1]`. The FP8 cache has `self_attn.k_scale` and `self_attn.v_scale`, amax / 448, in
//! the type of the model.

use anyhow::Result;

use super::GlobalScale;
use super::packed::PackedWeight;
use super::{Leaves, tensors};
use crate::hf::{TensorFolder, TensorSink};

/// Names of a layer's tensors.
pub const LEAVES: Leaves = Leaves {
    codes: "weight_packed",
    scales: "weight_scale",
    global: "weight_global_scale",
    input: "input_global_scale",
    pre_quant: None,
};

/// Shape of a global scale.
pub const SCALAR: &[usize] = &[1];

/// Returns the name of the FP8 scale of the keys (`'k'`) or values (`'v'`) of the attention
/// `module`.
pub fn kv_scale(module: &str, which: char) -> String {
    format!("{module}.{which}_scale")
}

/// Reads the weight of `module`.
///
/// # Errors
/// Returns an error that names a missing or wrong tensor.
pub fn read(tensors: &TensorFolder, module: &str) -> Result<PackedWeight> {
    tensors::read(tensors, (module, LEAVES), GlobalScale::Divide)
}

/// Adds the tensors of `module`; see [`Dialect::write`](super::Dialect::write).
///
/// # Errors
/// Returns the errors of [`TensorSink::add`].
pub fn write(writer: &mut dyn TensorSink, module: &str, weight: &PackedWeight) -> Result<u32> {
    tensors::write(
        writer,
        (module, LEAVES, SCALAR),
        weight,
        GlobalScale::to_divisor,
    )
}
