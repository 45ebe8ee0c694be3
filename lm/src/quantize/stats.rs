//! Calibration statistics of layer inputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use nvfp4_formats::ptq::linalg::add_products;

/// Calibration statistics of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Calibration {
    /// Statistics of the input of each linear layer, by its name.
    pub inputs: BTreeMap<String, Arc<InputStats>>,
    /// Amax of the keys (after the rotary embedding) and values in each attention's cache, by its
    /// name.
    pub caches: BTreeMap<String, [f32; 2]>,
}

impl Calibration {
    /// Creates empty statistics.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if there are no statistics.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty() && self.caches.is_empty()
    }

    /// Returns the number of tokens read, if inputs were counted.
    pub fn tokens(&self) -> Option<u64> {
        self.inputs.values().map(|stats| stats.tokens()).max()
    }
}

/// Second moments and amax of the inputs `x` `[tokens, k]` of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct InputStats {
    k: usize,
    pub(super) tokens: u64,
    /// Amax of each feature.
    pub(super) amax: Vec<f32>,
    /// Σ x² of each feature.
    pub(super) squares: Vec<f64>,
    /// Lower triangle of Σ x xᵀ, row-major `[k, k]`, with zeros above it.
    pub(super) products: Option<Vec<f64>>,
}

impl InputStats {
    /// Creates empty statistics. With `products` they include Σ x xᵀ, which GPTQ needs and which
    /// takes 8 k² bytes.
    pub fn new(k: usize, products: bool) -> Self {
        Self {
            k,
            tokens: 0,
            amax: vec![0.0; k],
            squares: vec![0.0; k],
            products: products.then(|| vec![0.0; k * k]),
        }
    }

    /// Adds the inputs `x` `[tokens, k]`.
    ///
    /// # Errors
    /// Returns an error if the length is not a multiple of `k`, or a value is not finite.
    pub fn add(&mut self, x: &[f32]) -> Result<()> {
        let k = self.k;
        ensure!(
            x.len().is_multiple_of(k),
            "{} inputs of a layer that has {k} input features",
            x.len()
        );
        let finite = x.iter().all(|value| value.is_finite());
        ensure!(finite, "an input is not finite");
        self.tokens += (x.len() / k) as u64;
        for row in x.chunks_exact(k) {
            let sums = self.squares.iter_mut().zip(&mut self.amax);
            for ((sum, amax), &x) in sums.zip(row) {
                *sum += f64::from(x) * f64::from(x);
                *amax = amax.max(x.abs());
            }
        }
        if let Some(products) = &mut self.products {
            add_products(products, x, k);
        }
        Ok(())
    }

    /// Returns the statistics of inputs whose features are divided by `columns`.
    pub(super) fn divided(&self, columns: &[f32]) -> Self {
        let mut divided = self.clone();
        let columns: Vec<f64> = columns.iter().map(|&s| f64::from(s)).collect();
        for (j, &s) in columns.iter().enumerate() {
            divided.amax[j] = (f64::from(divided.amax[j]) / s) as f32;
            divided.squares[j] /= s * s;
        }
        if let Some(products) = &mut divided.products {
            for (i, row) in products.chunks_mut(self.k).enumerate() {
                let sums = row.iter_mut().zip(&columns);
                sums.for_each(|(sum, s)| *sum /= columns[i] * s);
            }
        }
        divided
    }

    /// Returns the number of input features.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Returns the number of counted tokens.
    pub const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the largest magnitude.
    pub fn amax(&self) -> f32 {
        self.amax.iter().fold(0.0, |amax, x| amax.max(*x))
    }

    /// Returns `E[x²]` of each input feature; 1 for each if no token was counted.
    pub fn mean_squares(&self) -> Vec<f32> {
        match self.tokens {
            0 => vec![1.0; self.k],
            tokens => {
                let mean = |sum: &f64| (sum / tokens as f64) as f32;
                self.squares.iter().map(mean).collect()
            }
        }
    }

    /// Returns `E[x xᵀ]` `[k, k]`, if the products were collected and a token was counted.
    pub fn hessian(&self) -> Option<Vec<f64>> {
        let products = self.products.as_ref().filter(|_| self.tokens > 0)?;
        let (k, tokens) = (self.k, self.tokens as f64);
        let mut hessian = vec![0.0; k * k];
        for i in 0..k {
            for j in 0..=i {
                let mean = products[i * k + j] / tokens;
                hessian[i * k + j] = mean;
                hessian[j * k + i] = mean;
            }
        }
        Some(hessian)
    }
}
