//! Linear layers of few tokens with what stands around them, in one kernel.
//!
//! In a step of decoding a kernel between two GEMMs takes longer to launch than to compute. The
//! kernel of small M therefore computes RMSNorm in front of it and SwiGLU behind it.

use cubecl::{client::Client, server::Handle};

use super::{
    Gemm, dispatch,
    epilogue::EpilogueArgs,
    kernels::small_m_launch::{Left, NormLeft, SmallMLaunch, queue, refuses_norm},
    materialize::{Reads, materialize},
    operand::{Operand, ScaleTiling},
    output::{Output, Target},
    problem::{GemmShape, Plan, Problem, Refusal},
};
use crate::{
    Nvfp4Error,
    capabilities::Capabilities,
    memory::check_memory,
    tensor::{FloatKind, Matrix},
};

/// RMSNorm in front of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct FusedNorm<'a> {
    /// What is added to `x` before, of its shape and type.
    pub residual: Option<&'a Matrix>,
    /// `f32[k]`.
    pub gain: &'a Handle,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// `swiglu(norm(x + residual) · weightᵀ + bias)`, or what is asked for of that.
///
/// The bits are those of [`norm`](crate::norm::norm()), [`gemm`](super::gemm()) into bf16 and
/// [`activation`](crate::activation::activation()), one after another.
#[derive(Debug, Clone, Copy)]
pub struct FusedLinear<'a> {
    /// bf16 `[m, k]`, K-major.
    pub x: &'a Matrix,
    /// What becomes of `x` before the GEMM.
    pub norm: Option<FusedNorm<'a>>,
    /// The right operand of the GEMM, `[n, k]`.
    pub weight: Operand<'a>,
    /// An `f32` for each row of the weight.
    pub bias: Option<&'a Matrix>,
    /// Whether the first half of the rows of the weight is the gate and the second half what it
    /// multiplies: the output is SwiGLU of both.
    pub swiglu: bool,
}

/// What a fused linear layer gives.
#[derive(Debug, Clone)]
pub struct FusedLinearOutput {
    /// The sum of `x` and the residual, rounded to bf16; `None` without a residual.
    pub sum: Option<Matrix>,
    /// bf16 `[m, n]`, or `[m, n / 2]` with SwiGLU.
    pub matrix: Matrix,
}

impl<'a> FusedLinear<'a> {
    /// The GEMM of it, by itself: of what has the shape of the normalised rows.
    fn gemm(&self) -> Gemm<'a> {
        Gemm::new(self.x, self.weight).bias(self.bias)
    }

    /// Fails when an operand does not fit.
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

    /// What the GEMM of it depends on.
    fn problem(&self, client: &Client) -> Result<Problem, Nvfp4Error> {
        let gemm = self.gemm();
        let GemmShape { m, n, .. } = gemm.shape();
        let output = Output::new(client, Target::New(FloatKind::Bf16), m, n)?;
        Ok(gemm.problem(&output))
    }

    /// Why no one kernel computes it on the device behind `client`; `None` where one does.
    ///
    /// # Errors
    /// When an operand does not fit.
    pub fn refusal(&self, client: &Client) -> Result<Option<Refusal>, Nvfp4Error> {
        self.check()?;
        let problem = self.problem(client)?;
        let GemmShape { m, n, .. } = problem.shape;
        if m * n == 0 {
            return Ok(Some(Refusal::Operands("the output is empty")));
        }
        if dispatch::choose(client, &problem)?.plan != Plan::SmallM {
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

/// Computes a linear layer with what stands around it in one kernel.
///
/// # Errors
/// When a shape, element type or buffer does not fit, or there is a
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
    let compact = |operand: &Operand, layout| {
        let reads = (Reads::COMPACT, ScaleTiling::Matrix);
        materialize(client, operand, 1, layout, reads, None)
    };
    let x = Operand::from(request.x);
    let (a, b) = (
        compact(&x, problem.a)?,
        compact(&request.weight, problem.b)?,
    );
    // What the epilogue does not read may be any memory.
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
    // Allocated right before the kernel is queued, as the output of a GEMM is.
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
