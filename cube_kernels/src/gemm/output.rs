//! Output of a GEMM.

use std::cell::OnceCell;

use cubecl::client::Client;

use crate::{
    Nvfp4Error,
    memory::is_aligned,
    tensor::{FloatKind, Matrix},
};

/// Destination of a GEMM's output.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// A new matrix of this type.
    New(FloatKind),
    /// Accumulate into an existing matrix (gradient accumulation). The sum of both is rounded once.
    Accumulate(&'a Matrix),
    /// Overwrite an existing matrix, for example some rows of a larger one.
    Replace(&'a Matrix),
}

/// The output matrix of a GEMM.
///
/// A new matrix is allocated on first use, which is right before the kernel that writes it is
/// queued and after the kernels that prepare its operands. The reason: CubeCL 0.11.3 makes a stream
/// wait for another stream's memory unless it has waited since the memory was *allocated*. If
/// another thread waited for this stream between allocation and launch (as Burn's gradient
/// averaging across GPUs does repeatedly), it would not wait for the GEMM and would read memory
/// before it is written.
pub(crate) struct Output<'a> {
    client: &'a Client,
    target: Target<'a>,
    rows: usize,
    cols: usize,
    matrix: OnceCell<Matrix>,
}

impl<'a> Output<'a> {
    /// Returns an error unless an existing target matrix is `rows` x `cols`.
    pub fn new(
        client: &'a Client,
        target: Target<'a>,
        rows: usize,
        cols: usize,
    ) -> Result<Self, Nvfp4Error> {
        if let Target::Accumulate(matrix) | Target::Replace(matrix) = target {
            matrix.check("target")?;
            if (matrix.rows, matrix.cols) != (rows, cols) {
                return Err(Nvfp4Error::shape(
                    "target",
                    format!("{} x {}", matrix.rows, matrix.cols),
                    format!("{rows} x {cols}"),
                ));
            }
        }
        Ok(Self {
            client,
            target,
            rows,
            cols,
            matrix: OnceCell::new(),
        })
    }

    /// Returns the matrix. Call this only right before the launch: otherwise a reader on another
    /// stream may not wait for the GEMM.
    pub fn matrix(&self) -> &Matrix {
        self.matrix.get_or_init(|| match self.target {
            Target::New(out) => Matrix::empty(self.client, self.rows, self.cols, out),
            Target::Accumulate(matrix) | Target::Replace(matrix) => matrix.clone(),
        })
    }

    pub fn into_matrix(self) -> Matrix {
        self.matrix();
        self.matrix.into_inner().expect("just made")
    }

    pub fn is_empty(&self) -> bool {
        self.rows * self.cols == 0
    }

    pub fn dtype(&self) -> FloatKind {
        match self.target {
            Target::New(out) => out,
            Target::Accumulate(matrix) | Target::Replace(matrix) => matrix.dtype,
        }
    }

    /// Returns true if the GEMM accumulates into the matrix.
    pub fn accumulates(&self) -> bool {
        matches!(self.target, Target::Accumulate(_))
    }

    /// Returns true if the memory is aligned as fast kernels need it. New memory is.
    pub fn is_aligned(&self) -> bool {
        match self.target {
            Target::New(_) => true,
            Target::Accumulate(matrix) | Target::Replace(matrix) => is_aligned(&matrix.handle),
        }
    }
}
