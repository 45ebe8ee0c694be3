//! What a GEMM writes.

use std::cell::OnceCell;

use cubecl::client::Client;

use crate::{
    Nvfp4Error,
    memory::is_aligned,
    tensor::{FloatKind, Matrix},
};

/// What a GEMM writes, and where.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// A new matrix of this type.
    New(FloatKind),
    /// Add to an existing matrix (gradient accumulation): sum and addend are rounded once,
    /// together.
    Accumulate(&'a Matrix),
    /// Replace what an existing matrix holds, for example some rows of a larger one.
    Replace(&'a Matrix),
}

/// The matrix that a GEMM writes. A new one is allocated when it is first asked for, which is right
/// before the kernel that writes it is queued, behind those that prepare its operands: CubeCL
/// 0.11.3 has a stream wait for another one's memory unless it has waited since the memory was
/// *allocated*. Where another thread waits for this stream between the two (as Burn's averaging of
/// gradients over GPUs does, over and over), it would not wait for the GEMM, and would read memory
/// that is not written yet.
pub(crate) struct Output<'a> {
    client: &'a Client,
    target: Target<'a>,
    rows: usize,
    cols: usize,
    matrix: OnceCell<Matrix>,
}

impl<'a> Output<'a> {
    /// Fails unless the matrix to add to, if there is one, is `rows` x `cols`.
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

    /// The matrix. Asked for too early, what reads it on another stream may not wait for the GEMM.
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

    /// Whether the GEMM adds to what is there.
    pub fn accumulates(&self) -> bool {
        matches!(self.target, Target::Accumulate(_))
    }

    /// Whether it begins where fast kernels need it to. New memory does.
    pub fn is_aligned(&self) -> bool {
        match self.target {
            Target::New(_) => true,
            Target::Accumulate(matrix) | Target::Replace(matrix) => is_aligned(&matrix.handle),
        }
    }
}
