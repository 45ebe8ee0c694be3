//! The factor U of an input's inverse second moments: blocked Cholesky factorization and triangular
//! inverse in `f64`.
//!
//! With P the reversal of the order, P H P = Rᵀ R gives U = P R⁻ᵀ P. Both phases eliminate
//! [`PANEL`] rows at a time: they solve the panel with the factor of its diagonal block, and
//! subtract its products from the rows below.

use std::ops::Range;

use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::ptq::{gptq::damped_diagonal, linalg::check_pivot};

use super::moments::InputMoments;
use super::products::{Factors, Product, Target, subtract_products};
use super::square::{fill_diagonal, reverse};
use crate::{
    Nvfp4Error,
    capabilities::conversion_of,
    cube::{codec::Conversion, exact::product_f64},
    launch::{buffer, cubes, grid},
    memory::{address_type, allocate, download_values, upload},
};

/// Number of rows that are eliminated together.
const PANEL: usize = 64;
/// Number of rows that a unit holds in registers.
const ROWS: usize = 16;

/// The upper triangular factor U with H⁻¹ = Uᵀ U, where H are the damped second moments of an input
/// of `k` features; [`nvfp4_formats::ptq::InverseFactor`] on the device.
#[derive(Debug, Clone)]
pub struct InverseFactor {
    k: usize,
    /// `f64[k, k]`, row-major.
    upper: Handle,
}

impl InverseFactor {
    /// Computes the factor for inputs with `moments`, whose features are divided by `columns`, if
    /// given. `damping` times the mean of H's diagonal is added to the diagonal.
    ///
    /// # Errors
    /// Returns an error if the moments have no products or no tokens, the width is not a multiple
    /// of 16, `columns` has another length, or the damped H is not positive definite.
    pub fn new(
        client: &Client,
        moments: &InputMoments,
        columns: Option<&[f32]>,
        damping: f64,
    ) -> Result<Self, Nvfp4Error> {
        let k = moments.k();
        let (Some(products), 1..) = (moments.products(), moments.tokens()) else {
            let found = format!("{} tokens, without products", moments.tokens());
            return Err(Nvfp4Error::value("moments", found, "products of tokens"));
        };
        if !k.is_multiple_of(ROWS) {
            let expected = format!("a multiple of {ROWS}");
            return Err(Nvfp4Error::shape("moments", format!("width {k}"), expected));
        }
        let columns: Vec<f64> = match columns {
            None => vec![1.0; k],
            Some(columns) => columns.iter().copied().map(f64::from).collect(),
        };
        if columns.len() != k {
            let found = format!("{} divisors", columns.len());
            return Err(Nvfp4Error::shape("columns", found, k.to_string()));
        }
        let tokens = moments.tokens() as f64;
        let squares = moments.features(client)?.squares.into_iter().zip(&columns);
        let diagonal: Vec<f64> = squares.map(|(sum, s)| sum / (s * s) / tokens).collect();
        let diagonal = damped_diagonal(&diagonal, damping);
        let factor = allocate(client, 8 * k * k);
        let moments = Moments {
            products,
            columns: &upload(client, bytemuck::cast_slice(&columns)),
            diagonal: &upload(client, bytemuck::cast_slice(&diagonal)),
            tokens,
        };
        moments.reversed(client, &factor, k);
        let blocks = upper_factor(client, &factor, k)?;
        let inverse = inverse_of_transposed(client, &factor, &blocks, k);
        reverse(client, &inverse, &factor, k);
        Ok(Self { k, upper: factor })
    }

    /// Returns the number of features.
    pub const fn k(&self) -> usize {
        self.k
    }

    /// Returns the rows of U.
    pub(super) fn rows(&self) -> Factors<'_> {
        rows_of(&self.upper, self.k, 0, 0)
    }

    /// Returns U `[k, k]`, row-major; waits for the device.
    ///
    /// # Errors
    /// Returns an error if a queued kernel failed.
    pub fn to_host(&self, client: &Client) -> Result<Vec<f64>, Nvfp4Error> {
        download_values(client, &self.upper, self.k * self.k)
    }
}

/// Returns the rows of a `[k, k]` matrix from (`row`, `col`) on.
fn rows_of(handle: &Handle, k: usize, row: usize, col: usize) -> Factors<'_> {
    Factors {
        handle,
        len: k * k,
        first: row * k + col,
        stride: k,
    }
}

/// Second moments in device memory.
struct Moments<'a> {
    /// Upper triangle of Σ x xᵀ.
    products: &'a Handle,
    /// Divisors of the features, `f64[k]`.
    columns: &'a Handle,
    /// Damped diagonal of H, `f64[k]`.
    diagonal: &'a Handle,
    tokens: f64,
}

impl Moments<'_> {
    /// Writes the upper triangle of P H P to `out`.
    fn reversed(&self, client: &Client, out: &Handle, k: usize) {
        let (count, dim) = grid(client, k * k);
        // SAFETY: all matrices have k x k elements, all vectors k.
        unsafe {
            reversed_moments_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(k * k),
                buffer(self.products, k * k),
                buffer(self.columns, k),
                buffer(self.diagonal, k),
                buffer(out, k * k),
                k,
                self.tokens,
            );
        }
    }
}

/// Replaces the upper triangle of `a` by R with `a` = Rᵀ R. Returns the factors of the diagonal
/// blocks, `f64[panels, 64, 64]`.
fn upper_factor(client: &Client, a: &Handle, k: usize) -> Result<Handle, Nvfp4Error> {
    let panels = k.div_ceil(PANEL);
    let blocks = allocate(client, 8 * panels * PANEL * PANEL);
    let pivots = allocate(client, 8 * k);
    let panel = allocate(client, 8 * PANEL * k);
    let conversion = conversion_of(client);
    for (index, start) in (0..k).step_by(PANEL).enumerate() {
        let end = (start + PANEL).min(k);
        let (_, dim) = cubes(client, 1);
        // SAFETY: the block lies on the diagonal of `a`; `blocks` has one for each panel.
        unsafe {
            factor_block_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                dim,
                address_type(k * k),
                buffer(a, k * k),
                buffer(&blocks, panels * PANEL * PANEL),
                buffer(&pivots, k),
                k,
                start,
                end,
                conversion,
            );
        }
        if end == k {
            break;
        }
        let solve = Solve {
            blocks: &blocks,
            index,
            matrix: a,
            panel: &panel,
        };
        solve.launch(client, k, start..end, end..k);
        let own = Factors {
            handle: &panel,
            len: PANEL * k,
            first: end,
            stride: k,
        };
        let product = Product {
            left: own,
            right: own,
            depth: end - start,
            target: Target {
                handle: a,
                len: k * k,
                first: end * k + end,
                stride: k,
                rows: k - end,
                cols: k - end,
                upper: true,
            },
        };
        subtract_products(client, &product);
    }
    let pivots: Vec<f64> = download_values(client, &pivots, k)?;
    for (row, pivot) in pivots.into_iter().enumerate() {
        check_pivot(pivot, row, k)?;
    }
    Ok(blocks)
}

/// Computes the lower triangular R⁻ᵀ of the upper triangular `r`, whose diagonal blocks are also in
/// `blocks`.
fn inverse_of_transposed(client: &Client, r: &Handle, blocks: &Handle, k: usize) -> Handle {
    let inverse = allocate(client, 8 * k * k);
    fill_diagonal(client, &inverse, k, 1.0);
    let panel = allocate(client, 8 * PANEL * k);
    for (index, start) in (0..k).step_by(PANEL).enumerate() {
        let end = (start + PANEL).min(k);
        let solve = Solve {
            blocks,
            index,
            matrix: &inverse,
            panel: &panel,
        };
        solve.launch(client, k, start..end, 0..end);
        let product = Product {
            left: rows_of(r, k, start, end),
            right: Factors {
                handle: &panel,
                len: PANEL * k,
                first: 0,
                stride: k,
            },
            depth: end - start,
            target: Target {
                handle: &inverse,
                len: k * k,
                first: end * k,
                stride: k,
                rows: k - end,
                cols: end,
                upper: false,
            },
        };
        subtract_products(client, &product);
    }
    inverse
}

/// Solves rows of a matrix with the transposed factor of a diagonal block.
struct Solve<'a> {
    blocks: &'a Handle,
    /// Number of the block.
    index: usize,
    /// `f64[k, k]`.
    matrix: &'a Handle,
    /// Also gets the solved rows: `f64[64, k]`.
    panel: &'a Handle,
}

impl Solve<'_> {
    fn launch(&self, client: &Client, k: usize, rows: Range<usize>, columns: Range<usize>) {
        let panels = k.div_ceil(PANEL);
        let (count, dim) = grid(client, columns.len());
        // SAFETY: rows and columns are within the matrix, and the block exists.
        unsafe {
            solve_panel_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(k * k),
                buffer(self.blocks, panels * PANEL * PANEL),
                buffer(self.matrix, k * k),
                buffer(self.panel, PANEL * k),
                PanelRowsLaunch::new(
                    k,
                    rows.start,
                    rows.end,
                    self.index * PANEL * PANEL,
                    columns.start,
                    columns.end,
                ),
                conversion_of(client),
            );
        }
    }
}

/// Writes the damped second moments in reversed order: entries of the upper triangle.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn reversed_moments_kernel(
    products: &[f64],
    columns: &[f64],
    diagonal: &[f64],
    out: &mut [f64],
    k: usize,
    tokens: f64,
) {
    let mut item = ABSOLUTE_POS;
    while item < k * k {
        let row = item / k;
        let col = item % k;
        let a = k - 1usize - col;
        let b = k - 1usize - row;
        if row == col {
            out[item] = diagonal[a];
        } else if row < col {
            out[item] = products[a * k + b] / (columns[b] * columns[a]) / tokens;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One cube factors the block from `start` up to `end` on the diagonal of `a`, and writes its pivots
/// before the square root.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn factor_block_kernel(
    a: &mut [f64],
    blocks: &mut [f64],
    pivots: &mut [f64],
    k: usize,
    start: usize,
    end: usize,
    #[comptime] conversion: Conversion,
) {
    let mut block = Shared::<[f64]>::new_slice(comptime!(PANEL * PANEL));
    let unit = UNIT_POS as usize;
    let units = CUBE_DIM as usize;
    let len = end - start;
    let mut item = unit;
    while item < len * PANEL {
        let row = item / PANEL;
        let col = item % PANEL;
        if col >= row && col < len {
            block[item] = a[(start + row) * k + start + col];
        }
        item += units;
    }
    sync_cube();
    let mut m = 0usize;
    while m < len {
        let pivot = block[m * PANEL + m];
        let root = pivot.sqrt();
        let mut col = m + 1usize + unit;
        while col < len {
            block[m * PANEL + col] /= root;
            col += units;
        }
        sync_cube();
        if unit == 0usize {
            // All units have read the pivot.
            block[m * PANEL + m] = root;
            pivots[start + m] = pivot;
        }
        let rest = len - m - 1usize;
        let mut item = unit;
        while item < rest * rest {
            let row = m + 1usize + item / rest;
            let col = m + 1usize + item % rest;
            if col >= row {
                let left = block[m * PANEL + row];
                let right = block[m * PANEL + col];
                block[row * PANEL + col] -= product_f64(left, right, conversion);
            }
            item += units;
        }
        sync_cube();
        m += 1usize;
    }
    let first = start / PANEL * comptime!(PANEL * PANEL);
    let mut item = unit;
    while item < len * PANEL {
        let row = item / PANEL;
        let col = item % PANEL;
        if col >= row && col < len {
            a[(start + row) * k + start + col] = block[item];
            blocks[first + item] = block[item];
        }
        item += units;
    }
}

/// Rows and columns of a panel, and its diagonal block.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PanelRows {
    k: usize,
    start: usize,
    end: usize,
    /// First element of the block.
    block: usize,
    first_col: usize,
    end_col: usize,
}

/// Each unit solves a column: row m becomes itself minus the products of the rows before it with
/// column m of the block, divided by the block's diagonal. It holds [`ROWS`] rows in registers.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn solve_panel_kernel(
    blocks: &[f64],
    matrix: &mut [f64],
    panel: &mut [f64],
    shape: PanelRows,
    #[comptime] conversion: Conversion,
) {
    let k = shape.k;
    let len = shape.end - shape.start;
    let mut col = shape.first_col + ABSOLUTE_POS;
    while col < shape.end_col {
        let mut first = 0usize;
        while first < len {
            let mut x = Array::<f64>::new(ROWS);
            #[unroll]
            for i in 0..ROWS {
                x[i] = matrix[(shape.start + first + i) * k + col];
            }
            #[unroll]
            for i in 0..ROWS {
                let of_row = shape.block + (first + i) * PANEL + first;
                x[i] /= blocks[of_row + i];
                let solved = x[i];
                matrix[(shape.start + first + i) * k + col] = solved;
                panel[(first + i) * k + col] = solved;
                #[unroll]
                for later in comptime!(i + 1)..ROWS {
                    x[later] -= product_f64(blocks[of_row + later], solved, conversion);
                }
            }
            let mut row = first + ROWS;
            while row < len {
                let at = (shape.start + row) * k + col;
                let mut value = matrix[at];
                #[unroll]
                for i in 0..ROWS {
                    let factor = blocks[shape.block + (first + i) * PANEL + row];
                    value -= product_f64(factor, x[i], conversion);
                }
                matrix[at] = value;
                row += 1usize;
            }
            first += ROWS;
        }
        col += CUBE_COUNT * CUBE_DIM as usize;
    }
}
