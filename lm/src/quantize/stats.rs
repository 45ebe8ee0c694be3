//! What calibration knows of the input of a layer.

use anyhow::{Result, ensure};
use rayon::prelude::*;

/// Second moments and the largest magnitude of the inputs `x` `[tokens, k]` of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct InputStats {
    k: usize,
    tokens: u64,
    amax: f32,
    squares: Vec<f64>,
    /// The lower triangle of Σ x xᵀ, row-major `[k, k]`.
    products: Option<Vec<f64>>,
}

impl InputStats {
    /// Of no tokens yet. `products` keeps Σ x xᵀ, which GPTQ needs and which takes 8 k² bytes.
    pub fn new(k: usize, products: bool) -> Self {
        Self {
            k,
            tokens: 0,
            amax: 0.0,
            squares: vec![0.0; k],
            products: products.then(|| vec![0.0; k * k]),
        }
    }

    /// Count the inputs `x` `[tokens, k]`.
    ///
    /// # Errors
    /// When the length is no multiple of `k`, or a value is not finite.
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
        self.amax = x.iter().fold(self.amax, |amax, x| amax.max(x.abs()));
        for row in x.chunks_exact(k) {
            for (sum, &x) in self.squares.iter_mut().zip(row) {
                *sum += f64::from(x) * f64::from(x);
            }
        }
        if let Some(products) = &mut self.products {
            products
                .par_chunks_mut(k)
                .enumerate()
                .for_each(|(i, sums)| {
                    for row in x.chunks_exact(k) {
                        let xi = f64::from(row[i]);
                        for (sum, &x) in sums[..=i].iter_mut().zip(row) {
                            *sum += xi * f64::from(x);
                        }
                    }
                });
        }
        Ok(())
    }

    /// Input features.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Tokens that were counted.
    pub const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The largest magnitude.
    pub const fn amax(&self) -> f32 {
        self.amax
    }

    /// `E[x²]` of each input feature; 1 each where no token was counted.
    pub fn mean_squares(&self) -> Vec<f32> {
        match self.tokens {
            0 => vec![1.0; self.k],
            tokens => {
                let mean = |sum: &f64| (sum / tokens as f64) as f32;
                self.squares.iter().map(mean).collect()
            }
        }
    }

    /// `E[x xᵀ]` `[k, k]`, where the products were kept and a token was counted.
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
