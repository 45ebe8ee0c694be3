//! Linear head and cross entropy, one chunk of tokens at a time.

use cubecl::{client::Client, server::Handle};

use super::{chunk_rows, cross_entropy_rows, sum_losses, target_scale};
use crate::{
    CrossEntropy, Nvfp4Error,
    gemm::{Gemm, Operand, Target, gemm},
    memory::{allocate, check_memory},
    tensor::{FloatKind, Matrix},
    zeroed::zeros,
};

/// Gradients of a head to compute, and the memory for its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearLossRequest {
    /// True to compute the gradient of the input.
    pub x: bool,
    /// True to compute the gradient of the weight.
    pub w: bool,
    /// Bytes for the logits of a chunk of tokens; see [`chunk_rows`].
    pub chunk_bytes: usize,
}

/// Loss of a head, and its gradients.
#[derive(Debug, Clone)]
pub struct LinearLoss {
    /// Loss, one `f32`.
    pub loss: Handle,
    /// Gradient of the input, bf16 `[rows, d]`.
    pub dx: Option<Matrix>,
    /// Gradient of the weight, `f32[d, vocab]`.
    pub dw: Option<Matrix>,
}

/// Computes the cross entropy of the logits `x w`, for bf16 `x` (`[rows, d]`) and `w`
/// (`[d, vocab]`) and `targets` (`i32[rows]`), with its gradients.
///
/// Rows are processed in chunks, one after another: a GEMM gives the chunk's bf16 logits, the loss
/// replaces them by their gradient in place, and GEMMs multiply that gradient with `w` and with
/// `x`. The latter adds to `dw` in `f32`. Memory never contains more than one chunk of logits, for
/// any number of rows.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, shapes or types do not fit, a size does
/// not fit 32 bits, or `params` fail [`CrossEntropy::check`].
pub fn linear_cross_entropy(
    client: &Client,
    x: &Matrix,
    w: &Matrix,
    targets: &Handle,
    params: &CrossEntropy,
    request: LinearLossRequest,
) -> Result<LinearLoss, Nvfp4Error> {
    params.check()?;
    x.check("x")?;
    w.check("w")?;
    let ((rows, d), vocab) = ((x.rows, x.cols), w.cols);
    check_memory("targets", targets, rows * 4)?;
    if w.rows != d {
        return Err(Nvfp4Error::shape(
            "w",
            format!("{} x {vocab}", w.rows),
            format!("{d} rows, the columns of `x`"),
        ));
    }
    let losses = allocate(client, rows * 4);
    let scale = target_scale(client, targets, rows, params)?;
    let with_gradient = request.x || request.w;
    let head = Head { x, w };
    let gradients = HeadGradients::new(client, head, request)?;
    let most = chunk_rows(vocab, FloatKind::Bf16, request.chunk_bytes).min(rows);
    let memory = Matrix::empty(client, most, vocab, FloatKind::Bf16);
    for start in (0..rows).step_by(most.max(1)) {
        let logits = rows_of(&memory, 0, most.min(rows - start));
        head.logits(client, start, &logits)?;
        cross_entropy_rows(
            client,
            &logits,
            &words_from(targets, start),
            &words_from(&losses, start),
            with_gradient.then_some(&scale),
            params,
        )?;
        gradients.add(client, head, start, &logits)?;
    }
    Ok(LinearLoss {
        loss: sum_losses(client, &losses, rows, &scale)?,
        dx: gradients.dx,
        dw: gradients.dw,
    })
}

/// Features and head of a model, whose GEMM gives its logits.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Features, bf16 `[rows, d]`.
    pub x: &'a Matrix,
    /// Head, bf16 `[d, vocab]`.
    pub w: &'a Matrix,
}

impl Head<'_> {
    /// Computes the logits of the rows from `start` on, as many as `out` has.
    pub(super) fn logits(
        &self,
        client: &Client,
        start: usize,
        out: &Matrix,
    ) -> Result<(), Nvfp4Error> {
        let part = rows_of(self.x, start, out.rows);
        let request = Gemm::new(&part, Operand::mn_major(self.w)).target(Target::Replace(out));
        gemm(client, &request)?;
        Ok(())
    }
}

/// Requested gradients of a head.
pub(super) struct HeadGradients {
    pub dx: Option<Matrix>,
    pub dw: Option<Matrix>,
}

impl HeadGradients {
    /// Allocates the gradients.
    pub fn new(
        client: &Client,
        head: Head<'_>,
        request: LinearLossRequest,
    ) -> Result<Self, Nvfp4Error> {
        let ((rows, d), vocab) = ((head.x.rows, head.x.cols), head.w.cols);
        let dw = match request.w {
            // With no rows, nothing is added to it.
            true if rows == 0 => {
                let zeros = zeros(client, d * vocab);
                Some(Matrix::new(zeros, d, vocab, FloatKind::F32)?)
            }
            true => Some(Matrix::empty(client, d, vocab, FloatKind::F32)),
            false => None,
        };
        Ok(Self {
            dx: (request.x).then(|| Matrix::empty(client, rows, d, FloatKind::Bf16)),
            dw,
        })
    }

    /// Adds the contribution of the rows from `start` on; `gradient` is that of their logits.
    pub fn add(
        &self,
        client: &Client,
        head: Head<'_>,
        start: usize,
        gradient: &Matrix,
    ) -> Result<(), Nvfp4Error> {
        if let Some(dx) = &self.dx {
            let dx = rows_of(dx, start, gradient.rows);
            let request = Gemm::new(gradient, head.w).target(Target::Replace(&dx));
            gemm(client, &request)?;
        }
        if let Some(dw) = &self.dw {
            let target = match start {
                0 => Target::Replace(dw),
                _ => Target::Accumulate(dw),
            };
            let part = rows_of(head.x, start, gradient.rows);
            let (a, b) = (Operand::mn_major(&part), Operand::mn_major(gradient));
            gemm(client, &Gemm::new(a, b).target(target))?;
        }
        Ok(())
    }
}

/// Returns `count` rows of `x` from row `start` on.
pub(super) fn rows_of(x: &Matrix, start: usize, count: usize) -> Matrix {
    let offset = start * x.cols * x.dtype.size();
    Matrix {
        handle: x.handle.clone().offset_start(offset as u64),
        rows: count,
        ..x.clone()
    }
}

/// Returns the words of `handle` from index `start` on.
pub(super) fn words_from(handle: &Handle, start: usize) -> Handle {
    handle.clone().offset_start(4 * start as u64)
}
