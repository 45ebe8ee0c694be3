//! Weights in `f32`, each decoded once.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::hf::{StoredTensor, TensorFolder};

/// Decoded weights of the decoder layer that is quantized. Smoothing reads them before they are
/// quantized.
pub(super) struct Decoded<'a> {
    tensors: &'a TensorFolder,
    values: BTreeMap<String, Vec<f32>>,
}

impl<'a> Decoded<'a> {
    /// Creates an empty set of weights of `tensors`.
    pub fn new(tensors: &'a TensorFolder) -> Self {
        Self {
            tensors,
            values: BTreeMap::new(),
        }
    }

    /// Returns the tensors as stored.
    pub fn tensors(&self) -> &'a TensorFolder {
        self.tensors
    }

    /// Returns the weight of `module`, which stays in memory until it is [taken](Self::take).
    ///
    /// # Errors
    /// Returns an error if there is no such weight, or its type is not a float.
    pub fn get(&mut self, module: &str) -> Result<(StoredTensor<'a>, &[f32])> {
        let (tensor, values) = self.take(module)?;
        let values = self.values.entry(module.to_owned()).or_insert(values);
        Ok((tensor, values))
    }

    /// Removes and returns the weight of `module`.
    ///
    /// # Errors
    /// Returns an error if there is no such weight, or its type is not a float.
    pub fn take(&mut self, module: &str) -> Result<(StoredTensor<'a>, Vec<f32>)> {
        let tensor = self.tensors.get(&format!("{module}.weight"))?;
        let values = match self.values.remove(module) {
            Some(values) => values,
            None => tensor.to_f32()?,
        };
        Ok((tensor, values))
    }
}
