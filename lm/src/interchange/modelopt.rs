//! Names, types and shapes of NVIDIA Model Optimizer's checkpoints (`export_hf_checkpoint` of
//! modelopt 0.47).
//!
//! Global scales multiply: `weight_scale_2` and `input_scale` are about amax / 2688, F32 scalars of
//! shape `[]`. In checkpoints of `NVFP4_AWQ`, layers may have a `pre_quant_scale` `[k]` in the type
//! of the model: it multiplies the input before quantization, and the weight was divided by it. The
//! FP8 cache has `self_attn.k_proj.k_scale` and `self_attn.v_proj.v_scale`, amax / 448.

use anyhow::Result;

use super::GlobalScale;
use super::packed::PackedWeight;
use super::{Leaves, tensors};
use crate::hf::{TensorFolder, TensorSink};

/// Names of a layer's tensors.
pub const LEAVES: Leaves = Leaves {
    codes: "weight",
    scales: "weight_scale",
    global: "weight_scale_2",
    input: "input_scale",
    pre_quant: Some("pre_quant_scale"),
};

/// Shape of a global scale.
pub const SCALAR: &[usize] = &[];

/// Returns the name of the FP8 scale of the keys (`'k'`) or values (`'v'`) of the attention
/// `module`.
pub fn kv_scale(module: &str, which: char) -> String {
    format!("{module}.{which}_proj.{which}_scale")
}

/// Reads the weight of `module`.
///
/// # Errors
/// Returns an error that names a missing or wrong tensor.
pub fn read(tensors: &TensorFolder, module: &str) -> Result<PackedWeight> {
    tensors::read(tensors, (module, LEAVES), GlobalScale::Multiply)
}

/// Adds the tensors of `module`; see [`Dialect::write`](super::Dialect::write).
///
/// # Errors
/// Returns the errors of [`TensorSink::add`].
pub fn write(writer: &mut dyn TensorSink, module: &str, weight: &PackedWeight) -> Result<u32> {
    tensors::write(writer, (module, LEAVES, SCALAR), weight, |scale| {
        (scale.to_multiplier(), 0)
    })
}
