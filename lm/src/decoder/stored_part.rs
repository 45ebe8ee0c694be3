//! A stored weight that is a part of a parameter.

use anyhow::{Result, bail};
use burn::tensor::{DType, TensorData};

use crate::hf::{Dtype, StoredTensor};
use crate::interchange::{Arithmetic, PackedWeight};

/// Smallest magnitude that rounds to infinity in f16.
const F16_OVERFLOW: f32 = 65520.0;

/// A stored weight.
pub(super) enum Part<'a> {
    Plain(StoredTensor<'a>),
    Packed(PackedWeight),
}

impl Part<'_> {
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Plain(tensor) => tensor.shape.to_vec(),
            Self::Packed(weight) => vec![weight.n(), weight.k()],
        }
    }

    /// Returns its elements in f32.
    pub fn values(&self) -> Result<Vec<f32>> {
        match self {
            Self::Plain(tensor) => {
                tensor.check_finite()?;
                tensor.to_f32()
            }
            Self::Packed(weight) => Ok(weight.effective(Arithmetic::CodeTimesScale)),
        }
    }

    /// Appends its elements to `bytes`, converted to `dtype`, which is not f32.
    pub fn append(&self, bytes: &mut Vec<u8>, dtype: DType, name: &str) -> Result<()> {
        if let Self::Plain(tensor) = self {
            let is_same = matches!(
                (tensor.dtype, dtype),
                (Dtype::BF16, DType::BF16) | (Dtype::F16, DType::F16)
            );
            if is_same {
                tensor.check_finite()?;
                bytes.extend_from_slice(&tensor.bytes());
                return Ok(());
            }
        }
        let values = self.values()?;
        if dtype == DType::F16
            && let Some(value) = values.iter().find(|value| value.abs() >= F16_OVERFLOW)
        {
            bail!("`{name}` has the value {value:e}, which f16 does not hold: choose another type");
        }
        let count = values.len();
        let data = TensorData::new(values, [count]).convert_dtype(dtype);
        bytes.extend_from_slice(data.as_bytes());
        Ok(())
    }
}
