//! Linear layers for small M with fused RMSNorm and SwiGLU, in one kernel.
//!
//! In a decoding step, a kernel between two GEMMs takes longer to launch than to run. The small-M
//! kernel therefore computes RMSNorm in its prologue and SwiGLU in its epilogue.

use cubecl::{client::Client, server::Handle};

use super::{
    Gemm, choose,
    epilogue::EpilogueArgs,
    kernels::small_m::{Left, NormLeft, SmallM, SmallMLaunch, queue, refuses_norm},
    materialize::materialize,
    operand::{Operand, OperandLayout, ScaleTiling},
    output::{Output, Target},
    plan::GemmPlan,
    problem::{GemmShape, Problem, Refusal},
};
use crate::{
    Nvfp4Error,
    capabilities::Capabilities,
    memory::check_memory,
    tensor::{FloatKind, Matrix},
};

/// RMSNorm prologue of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct FusedNorm<'a> {
    /// Residual added to `x` before the norm, of the same shape and type.
    pub residual: Option<&'a Matrix>,
    /// Gain, `f32[k]`.
    pub gain: &'a Handle,
    /// Epsilon, added to the mean square.
    pub epsilon: f32,
}

/// A fused linear layer: `swiglu(norm(x + residual) · weightᵀ + bias)`, with optional norm,
/// residual, bias and SwiGLU.
///
/// The result is bit-identical to running [`norm`](crate::norm::norm()), [`gemm`](super::gemm())
/// into bf16 and [`activation`](crate::activation::activation()) in sequence.
#[derive(Debug, Clone, Copy)]
pub struct FusedLinear<'a> {
    /// Input, bf16 `[m, k]`, K-major.
    pub x: &'a Matrix,
    /// RMSNorm of `x` before the GEMM.
    pub norm: Option<FusedNorm<'a>>,
    /// Right operand of the GEMM, `[n, k]`.
    pub weight: Operand<'a>,
    /// Bias: an `f32` per row of the weight.
    pub bias: Option<&'a Matrix>,
    /// True to output SwiGLU: the first half of the weight's rows is the gate, the second half the
    /// factor that it multiplies (up).
    pub swiglu: bool,
}

/// Result of a fused linear layer.
#[derive(Debug, Clone)]
pub struct FusedLinearOutput {
    /// Sum of `x` and the residual, rounded to bf16; `None` without a residual.
    pub sum: Option<Matrix>,
    /// Output, bf16 `[m, n]`, or `[m, n / 2]` with SwiGLU.
    pub matrix: Matrix,
}

impl<'a> FusedLinear<'a> {
    /// Returns its GEMM without prologue and epilogue. `x` stands in for the normalized rows, which
    /// have the same shape.
    fn gemm(&self) -> Gemm<'a> {
        Gemm::new(self.x, self.weight).bias(self.bias)
    }

    /// Returns an error if an operand does not fit.
    fn check(&self) -> Result<(), Nvfp4Error> {
        let x = self.x;
        self.gemm().check()?;
        let n = self.weight.outer();
        if self.swiglu && !n.is_multiple_of(2) {
            return Err(Nvfp4Error::shape(
                "weight",
                format!("{n} rows"),
                "an even number of rows: gate and up, concatenated",
            ));
        }
        let Some(FusedNorm { residual, gain, .. }) = self.norm else {
            return Ok(());
        };
        check_memory("gain", gain, x.cols * 4)?;
        let Some(residual) = residual else {
            return Ok(());
        };
        residual.check("residual")?;
        if (residual.rows, residual.cols, residual.dtype) != (x.rows, x.cols, x.dtype) {
            return Err(Nvfp4Error::shape(
                "residual",
                format!(
                    "{} x {} of {:?}",
                    residual.rows, residual.cols, residual.dtype
                ),
                format!("{} x {} of {:?}, as `x`", x.rows, x.cols, x.dtype),
            ));
        }
        Ok(())
    }

    /// Returns the GEMM's inputs of the kernel choice.
    fn problem(&self, client: &Client) -> Result<Problem, Nvfp4Error> {
        let gemm = self.gemm();
        let GemmShape { m, n, .. } = gemm.shape();
        let output = Output::new(client, Target::New(FloatKind::Bf16), m, n)?;
        Ok(gemm.problem(&output))
    }

    /// Returns why this request cannot be fused into one kernel on the device of `client`, or
    /// `None` if it can.
    ///
    /// # Errors
    /// Returns an error if an operand does not fit.
    pub fn refusal(&self, client: &Client) -> Result<Option<Refusal>, Nvfp4Error> {
        self.check()?;
        let problem = self.problem(client)?;
        let GemmShape { m, n, .. } = problem.shape;
        if m * n == 0 {
            return Ok(Some(Refusal::Operands("the output is empty")));
        }
        if !choose(client, &problem)?.plan.is::<SmallM>() {
            return Ok(Some(Refusal::Operands("the GEMM is not of small M")));
        }
        if self.swiglu && !n.is_multiple_of(4) {
            return Ok(Some(Refusal::Operands("n is no multiple of 4")));
        }
        Ok(self.norm.and_then(|norm| {
            let FusedNorm { residual, gain, .. } = norm;
            refuses_norm(client, self.x, residual, gain, n)
        }))
    }
}

/// Computes a linear layer with its norm and activation in one kernel.
///
/// # Errors
/// Returns an error if a shape, element type or buffer does not fit, or if there is a
/// [refusal](FusedLinear::refusal).
pub fn fused_linear(
    client: &Client,
    request: &FusedLinear,
) -> Result<FusedLinearOutput, Nvfp4Error> {
    let refusal = request.refusal(client)?;
    let problem = request.problem(client)?;
    let GemmShape { m, n, k } = problem.shape;
    if let Some(refusal) = refusal {
        return Err(Nvfp4Error::value(
            "request",
            format!("{m} x {n} x {k}: {refusal}"),
            "a linear layer that one kernel computes",
        ));
    }
    tracing::debug!(
        m,
        n,
        k,
        norm = request.norm.is_some(),
        request.swiglu,
        "fused linear"
    );
    let read = |operand: &Operand, layout: OperandLayout| {
        let scales = (SmallM.reads().has_tiles(), ScaleTiling::Matrix);
        materialize(client, operand, 1, SmallM.layout_read(layout), scales, None)
    };
    let x = Operand::from(request.x);
    let (a, b) = (read(&x, problem.a)?, read(&request.weight, problem.b)?);
    // Placeholder for the buffers that the epilogue does not read.
    let unread = &request.x.handle;
    let (_, b_amax, b_range) = request.weight.factor();
    let epilogue = EpilogueArgs {
        kind: problem.epilogue,
        a_amax: unread.clone(),
        b_amax: b_amax.unwrap_or_else(|| unread.clone()),
        ranges: [1.0, b_range],
        bias: request.bias.map_or(unread, |bias| &bias.handle).clone(),
        amax: unread.clone(),
    };
    // Allocated right before the kernel is queued, like the output of a GEMM.
    let empty = |cols| Matrix::empty(client, m, cols, FloatKind::Bf16);
    let out = empty(if request.swiglu { n / 2 } else { n });
    let residual = request.norm.and_then(|norm| norm.residual);
    let sum = residual.map(|_| empty(k));
    queue(&SmallMLaunch {
        client,
        capabilities: Capabilities::of(client),
        shape: problem.shape,
        left: match request.norm {
            None => Left::Operand(&a),
            Some(norm) => Left::Norm(NormLeft {
                x: request.x,
                residual: residual.zip(sum.as_ref()),
                gain: norm.gain,
                epsilon: norm.epsilon,
            }),
        },
        b: &b,
        epilogue: &epilogue,
        swiglu: request.swiglu,
        out: &out.handle,
    });
    Ok(FusedLinearOutput { sum, matrix: out })
}
