//! Moments of a layer's input.

use std::ops::Range;

use cubecl::{prelude::*, server::Handle};

use super::products::{Factors, Product, Target, add_products};
use super::square::fill_diagonal;
use crate::{
    Nvfp4Error,
    cube::codec::MAGNITUDE,
    launch::{buffer, grid},
    memory::{address_type, allocate, download_values, upload},
    tensor::{FloatKind, Matrix},
};

/// Moments of the inputs `x` of a layer, summed over tokens in device memory.
#[derive(Debug, Clone)]
pub struct InputMoments {
    k: usize,
    tokens: u64,
    /// Bits of the amax of each feature, `u32[k]`.
    amax: Handle,
    /// Σ x² of each feature, `f64[k]`.
    squares: Handle,
    /// Upper triangle of Σ x xᵀ, `f64[k, k]`.
    products: Option<Handle>,
}

/// Sums of the features of an input, on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct FeatureSums {
    /// Largest magnitude of each feature.
    pub amax: Vec<f32>,
    /// Σ x² of each feature.
    pub squares: Vec<f64>,
}

impl InputMoments {
    /// Creates empty sums for inputs of `k` features. With `products` they include Σ x xᵀ, which
    /// GPTQ needs and which takes 8 k² bytes.
    pub fn new(client: &Client, k: usize, products: bool) -> Self {
        Self {
            k,
            tokens: 0,
            amax: upload(client, &vec![0; 4 * k]),
            squares: upload(client, &vec![0; 8 * k]),
            products: products.then(|| {
                let sums = allocate(client, 8 * k * k);
                fill_diagonal(client, &sums, k, 0.0);
                sums
            }),
        }
    }

    /// Returns the number of features.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Returns the number of tokens that were added.
    pub const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns true if Σ x xᵀ is collected.
    pub const fn has_products(&self) -> bool {
        self.products.is_some()
    }

    /// Returns the lower triangle of Σ x xᵀ, row-major `[k, k]`, with zeros above it; waits for the
    /// device.
    ///
    /// # Errors
    /// Returns an error if it is not collected, or a queued kernel failed.
    pub fn products_on_host(&self, client: &Client) -> Result<Vec<f64>, Nvfp4Error> {
        let k = self.k;
        let Some(products) = &self.products else {
            return Err(Nvfp4Error::value("moments", "no products", "products"));
        };
        let upper: Vec<f64> = download_values(client, products, k * k)?;
        let mut lower = vec![0.0; k * k];
        for (i, row) in lower.chunks_exact_mut(k).enumerate() {
            for (j, value) in row[..=i].iter_mut().enumerate() {
                *value = upper[j * k + i];
            }
        }
        Ok(lower)
    }

    /// Returns Σ x xᵀ, if it is collected.
    pub(super) fn products(&self) -> Option<&Handle> {
        self.products.as_ref()
    }

    /// Adds the `rows` of `x` (`f32[tokens, k]`), in order.
    ///
    /// # Errors
    /// Returns an error if `x` has another type or width, or no such rows.
    pub fn add(
        &mut self,
        client: &Client,
        x: &Matrix,
        rows: Range<usize>,
    ) -> Result<(), Nvfp4Error> {
        x.check("x")?;
        let k = self.k;
        if x.dtype != FloatKind::F32 || x.cols != k {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{:?} of width {}", x.dtype, x.cols),
                format!("F32 of width {k}"),
            ));
        }
        if rows.start > rows.end || rows.end > x.rows {
            return Err(Nvfp4Error::value(
                "rows",
                format!("{rows:?}"),
                format!("within 0..{}", x.rows),
            ));
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.tokens += rows.len() as u64;
        let (count, dim) = grid(client, k);
        // SAFETY: the kernel stays within the rows, which exist, and the columns.
        unsafe {
            feature_sums_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(x.len()),
                buffer(&x.handle, x.len()),
                buffer(&self.amax, k),
                buffer(&self.squares, k),
                rows.start,
                rows.end,
                k,
            );
        }
        if let Some(products) = &self.products {
            let own = Factors {
                handle: &x.handle,
                len: x.len(),
                first: rows.start * k,
                stride: k,
            };
            let product = Product {
                left: own,
                right: own,
                depth: rows.len(),
                target: Target {
                    handle: products,
                    len: k * k,
                    first: 0,
                    stride: k,
                    rows: k,
                    cols: k,
                    upper: true,
                },
            };
            add_products(client, &product);
        }
        Ok(())
    }

    /// Returns the sums of the features; waits for the device.
    ///
    /// # Errors
    /// Returns an error if an input was not finite, or a queued kernel failed.
    pub fn features(&self, client: &Client) -> Result<FeatureSums, Nvfp4Error> {
        let amax: Vec<f32> = download_values(client, &self.amax, self.k)?;
        match amax.iter().position(|amax| !amax.is_finite()) {
            None => Ok(FeatureSums {
                amax,
                squares: download_values(client, &self.squares, self.k)?,
            }),
            Some(feature) => Err(Nvfp4Error::value(
                "x",
                format!("{} in feature {feature}", amax[feature]),
                "finite",
            )),
        }
    }
}

/// Each unit adds the rows from `first` up to `end` of every `units`-th column. Squares are exact in
/// `f64`, so contraction does not matter. As integers, magnitudes are ordered, and NaN is largest.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn feature_sums_kernel(
    x: &[f32],
    amax: &mut [u32],
    squares: &mut [f64],
    first: usize,
    end: usize,
    cols: usize,
) {
    let mut column = ABSOLUTE_POS;
    while column < cols {
        let mut largest = amax[column];
        let mut sum = squares[column];
        let mut row = first;
        while row < end {
            let value = x[row * cols + column];
            largest = max(largest, u32::reinterpret(value) & MAGNITUDE);
            let wide = f64::cast_from(value);
            sum += wide * wide;
            row += 1usize;
        }
        amax[column] = largest;
        squares[column] = sum;
        column += CUBE_COUNT * CUBE_DIM as usize;
    }
}
