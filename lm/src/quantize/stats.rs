//! Calibration statistics of layer inputs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use nvfp4_formats::ptq;
use nvfp4_formats::ptq::linalg::add_products;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::{cubecl::prelude::Client, ptq as kernels};

use super::engine::{Factor, NO_MOMENTS};

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
    /// Σ x xᵀ.
    pub(super) products: Option<Products>,
}

/// Second moments, where they were summed.
#[derive(Clone)]
pub(super) enum Products {
    /// Lower triangle, row-major `[k, k]`, with zeros above it.
    Host(Vec<f64>),
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Device(Client, Box<kernels::InputMoments>),
}

impl Products {
    /// Returns the lower triangle, row-major `[k, k]`, with zeros above it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn on_host(&self) -> Result<Cow<'_, [f64]>> {
        match self {
            Self::Host(products) => Ok(Cow::Borrowed(products)),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(client, moments) => Ok(Cow::Owned(moments.products_on_host(client)?)),
        }
    }
}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host(_) => "Host",
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(..) => "Device",
        })
    }
}

impl PartialEq for Products {
    fn eq(&self, other: &Self) -> bool {
        let values = [self, other].map(Self::on_host);
        matches!(values, [Ok(a), Ok(b)] if a == b)
    }
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
            products: products.then(|| Products::Host(vec![0.0; k * k])),
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
        if let Some(Products::Host(products)) = &mut self.products {
            add_products(products, x, k);
        }
        Ok(())
    }

    /// Returns the statistics that were summed on a device.
    ///
    /// # Errors
    /// Returns an error if an input was not finite, or the device fails.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(super) fn of_device(client: &Client, moments: Box<kernels::InputMoments>) -> Result<Self> {
        let sums = moments.features(client).context("an input is not finite")?;
        Ok(Self {
            k: moments.k(),
            tokens: moments.tokens(),
            amax: sums.amax,
            squares: sums.squares,
            products: (moments.has_products()).then(|| Products::Device(client.clone(), moments)),
        })
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
        self.mean_squares_of(None)
    }

    /// Returns [`mean_squares`](Self::mean_squares) of inputs whose features are divided by
    /// `columns`.
    pub(super) fn mean_squares_of(&self, columns: Option<&[f32]>) -> Vec<f32> {
        if self.tokens == 0 {
            return vec![1.0; self.k];
        }
        let squares = self.squares.iter().enumerate();
        let mean = |(j, sum): (usize, &f64)| {
            let s = divisor(columns, j);
            (sum / (s * s) / self.tokens as f64) as f32
        };
        squares.map(mean).collect()
    }

    /// Returns the factor of the inverse of `E[x xᵀ]` of inputs whose features are divided by
    /// `columns`, damped by `damping`.
    ///
    /// # Errors
    /// Returns an error if the products were not collected, no token was counted, or they are not
    /// those of finite inputs.
    pub(super) fn factor(&self, columns: Option<&[f32]>, damping: f64) -> Result<Factor> {
        let products = self.products.as_ref().filter(|_| self.tokens > 0);
        match products.context(NO_MOMENTS)? {
            Products::Host(products) => {
                let hessian = self.hessian(products, columns);
                let factor = ptq::InverseFactor::new(hessian, self.k, damping)?;
                Ok(Factor::Host(factor))
            }
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Products::Device(client, moments) => {
                let factor = kernels::InverseFactor::new(client, moments, columns, damping)?;
                Ok(Factor::Device(client.clone(), factor))
            }
        }
    }

    /// Returns `E[x xᵀ]` `[k, k]`.
    #[cfg(test)]
    pub(super) fn second_moments(&self) -> Vec<f64> {
        let products = self.products.as_ref().expect("products");
        self.hessian(&products.on_host().expect("a device that works"), None)
    }

    /// Returns `E[x xᵀ]` `[k, k]` from the lower triangle `products` of Σ x xᵀ.
    fn hessian(&self, products: &[f64], columns: Option<&[f32]>) -> Vec<f64> {
        let (k, tokens) = (self.k, self.tokens as f64);
        let mut hessian = vec![0.0; k * k];
        for i in 0..k {
            for j in 0..=i {
                let mean =
                    products[i * k + j] / (divisor(columns, i) * divisor(columns, j)) / tokens;
                hessian[i * k + j] = mean;
                hessian[j * k + i] = mean;
            }
        }
        hessian
    }
}

/// Returns the divisor of feature `j`.
fn divisor(columns: Option<&[f32]>, j: usize) -> f64 {
    columns.map_or(1.0, |columns| f64::from(columns[j]))
}
