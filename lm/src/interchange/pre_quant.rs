//! Input feature scales that accompany a weight in ModelOpt's `NVFP4_AWQ`.

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;

use crate::hf::{StoredTensor, TensorWriter};

/// Scales by which a layer multiplies its input features before quantization, as stored in the
/// file.
#[derive(Debug, Clone, PartialEq)]
pub struct PreQuantScale {
    dtype: Dtype,
    bytes: Vec<u8>,
    values: Vec<f32>,
}

impl PreQuantScale {
    /// Reads `tensor` for a layer of `k` input features.
    ///
    /// # Errors
    /// Returns an error if it is not F32, BF16 or F16 of shape `[k]`, or if a scale is not positive
    /// and finite.
    pub fn read(tensor: &StoredTensor<'_>, k: usize) -> Result<Self> {
        ensure!(
            *tensor.shape == [k] && matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16),
            "{tensor} is {:?}{:?}, but it must be F32, BF16 or F16[{k}]",
            tensor.dtype,
            tensor.shape
        );
        let values = tensor.to_f32()?;
        if let Some(at) = (values.iter()).position(|value| !(value.is_finite() && *value > 0.0)) {
            bail!(
                "{tensor}: the factor of input feature {at} is {}, but it must be positive and \
                 finite",
                values[at]
            );
        }
        Ok(Self {
            dtype: tensor.dtype,
            bytes: tensor.bytes().to_vec(),
            values,
        })
    }

    /// Returns the scales.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the elements as stored in the file.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Adds the scales to `writer` under `name`.
    ///
    /// # Errors
    /// Returns the errors of [`TensorWriter::add`].
    pub fn write(&self, writer: &mut TensorWriter, name: &str) -> Result<()> {
        let written = writer.add(name, self.dtype, &[self.values.len()], &self.bytes);
        written.with_context(|| name.to_owned())
    }
}
