//! Attention, `softmax(mask(scale · q kᵀ)) v`, forward and backward, without storing a matrix of
//! tokens by tokens.
//!
//! - [`forward`] returns the output and the log-sum-exp of each row of scores, from which
//!   [`backward`] recomputes the weights block by block.
//! - [`decode`](mod@decode) attends to a cache of keys and values, and writes to it.
//! - [`rope()`] rotates queries and keys by their positions, or back.
//! - `mma` has matrix-instruction kernels for CUDA GPUs, bf16 and f16. `scalar` has kernels for
//!   every device and type, which mirror [`reference::attention`](crate::reference::attention).
//!
//! The order of every sum depends on the operands' shapes alone: results repeat bit for bit, and a
//! sequence has the same bits in any batch that the same kernels compute. The formulas are in the
//! chapter "Attention" of the book.

#[allow(missing_docs)]
pub mod decode;
#[allow(missing_docs)]
mod delta;
#[cfg(feature = "proof")]
pub(crate) mod instances;
// `#[cube]` generates public items that cannot carry documentation.
pub(crate) mod family;
#[allow(missing_docs)]
mod mma;
#[cfg(feature = "proof")]
pub mod proof;
mod request;
#[allow(missing_docs)]
mod rope;
#[allow(missing_docs)]
mod scalar;
#[allow(missing_docs)]
mod sm90;

use cubecl::client::Client;

use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    describe::CodePath,
    environment::Environment,
    quantize::{AmaxRequest, Amaxes, amax::amaxes},
    tensor::{Groups, Matrix},
};

use family::AttentionKernel;
pub use request::{
    Attention, AttentionGradients, AttentionOutput, Heads, Rope, Sequences, TokenSequences,
};
pub(crate) use request::{Backward, MAX_HEAD, MAX_TOKENS, is_vectorized};
pub use rope::{Rotation, rope};

/// Computes attention.
///
/// A row that sees no keys has output 0 and log-sum-exp `-inf` (0 with `quiet_softmax`). NaN in a
/// query, or in a key or value that it sees, gives NaN in the query's row, and in no other.
///
/// # Errors
/// Returns an error if [`Attention::check`] fails.
pub fn forward(client: &Client, attention: &Attention) -> Result<AttentionOutput, Nvfp4Error> {
    attention.check()?;
    let output = AttentionOutput::empty(client, attention);
    forward_into(client, attention, &output)?;
    Ok(output)
}

/// Computes [`forward`], and the amax values in `request` of the output as a matrix,
/// `[tokens, heads * head]`, with the results of a separate pass.
///
/// The kernel for Hopper computes amax values of the whole matrix while it writes the output,
/// if the transform mixes 16 tokens and sequence lengths are multiples of 16. In all other cases a
/// separate pass computes them; this includes column amax values with [`Sequences::Offsets`], whose
/// lengths the host does not know.
///
/// # Errors
/// Returns an error if [`Attention::check`] fails.
pub fn forward_with_amaxes(
    client: &Client,
    attention: &Attention,
    request: &AmaxRequest,
) -> Result<(AttentionOutput, Amaxes), Nvfp4Error> {
    attention.check()?;
    let output = AttentionOutput::empty(client, attention);
    let q = &attention.q;
    let plan = match kernel(client, attention) {
        AttentionKernel::Sm90 => sm90::amax_plan(client, attention, request),
        AttentionKernel::Mma | AttentionKernel::Scalar => None,
    };
    if let Some(plan) = plan {
        let found = (
            plan,
            request.zeros(client, [1, usize::from(request.cols.is_some())]),
        );
        sm90::forward(client, attention, &output, (request, Some(&found)))?;
        return Ok((output, found.1));
    }
    forward_into(client, attention, &output)?;
    let matrix = Matrix::new(
        output.out.handle.clone(),
        q.tokens,
        q.heads * q.head,
        q.dtype,
    )?;
    let found = amaxes(client, &matrix, &Groups::One, request)?;
    Ok((output, found))
}

/// Computes [`forward`] into existing memory, which tests fill with NaN.
///
/// # Errors
/// Returns an error if [`Attention::check`] fails, or the memory does not match
/// [`AttentionOutput::empty`].
fn forward_into(
    client: &Client,
    attention: &Attention,
    output: &AttentionOutput,
) -> Result<(), Nvfp4Error> {
    attention.check()?;
    output.check(attention)?;
    if attention.q.tokens == 0 {
        return Ok(());
    }
    match kernel(client, attention) {
        AttentionKernel::Sm90 => {
            let nothing = (&AmaxRequest::default(), None);
            sm90::forward(client, attention, output, nothing)?;
        }
        AttentionKernel::Mma => mma::forward(client, attention, output),
        AttentionKernel::Scalar => scalar::forward(client, attention, output),
    }
    Ok(())
}

/// Computes the gradients of the operands of `attention` from `saved`, the result of [`forward`],
/// and `dout`, the gradient of its output.
///
/// With `rope`, `q` and `k` are rotated operands, and their gradients are rotated back: `dq` and
/// `dk` are the gradients of the unrotated queries and keys.
///
/// # Errors
/// Returns an error if [`Attention::check`] fails, or `dout`, `saved`, `rope` or the memory of the
/// gradients does not fit the operands.
pub fn backward(
    client: &Client,
    attention: &Attention,
    saved: &AttentionOutput,
    dout: &Heads,
    rope: Option<&Rope>,
    gradients: &AttentionGradients,
) -> Result<(), Nvfp4Error> {
    let Attention {
        q, k, v, sequences, ..
    } = attention;
    attention.check()?;
    saved.check(attention)?;
    dout.check_like("dout", "q", q)?;
    gradients.dq.check_like("dq", "q", q)?;
    gradients.dk.check_like("dk", "k", k)?;
    gradients.dv.check_like("dv", "v", v)?;
    if let Some(rope) = rope {
        rope.check(q, sequences.of_q())?;
        rope.check(k, sequences.of_k())?;
    }
    let delta = &delta::delta(client, &saved.out, dout);
    let backward = Backward {
        saved,
        dout,
        delta,
        rope,
        gradients,
    };
    let written = [&gradients.dq, &gradients.dk, &gradients.dv];
    let vectorized = mma::is_vectorized(dout) && written.into_iter().all(mma::is_vectorized);
    match kernel(client, attention) {
        AttentionKernel::Sm90 if vectorized => sm90::backward(client, attention, &backward)?,
        AttentionKernel::Mma if vectorized => mma::backward(client, attention, &backward),
        _ => scalar::backward(client, attention, &backward),
    }
    Ok(())
}

/// Returns the first [`AttentionKernel`] that supports `attention`. The environment variable
/// `NVFP4_ATTENTION` (`sm90`, `mma`, `scalar`) excludes the kernels before the one that it names.
fn kernel(client: &Client, attention: &Attention) -> AttentionKernel {
    let first = Environment::get().attention;
    if first == AttentionKernel::Sm90 && sm90::supports(client, attention).is_ok() {
        return AttentionKernel::Sm90;
    }
    if first != AttentionKernel::Scalar && mma::supports(client, attention).is_ok() {
        return AttentionKernel::Mma;
    }
    AttentionKernel::Scalar
}

/// Describes how attention runs on a device with these capabilities.
pub fn describe(capabilities: &Capabilities) -> Vec<CodePath> {
    let row =
        |operation, kernel: &str, reason: &str| CodePath::new(operation, "CubeCL", kernel, reason);
    let scalar = "online softmax, a group of threads for each row";
    let (kernel, why) = match (capabilities.gemm, capabilities.conversion.has_ptx()) {
        (GemmBackend::Sm90Wgmma, _) => (
            "online softmax, wgmma and TMA; mma.sync.m16n8k16 for f16, and other heads than of 64 \
             and 128",
            "compute capability 9.0",
        ),
        (_, true) => (
            "online softmax, mma.sync.m16n8k16",
            "compute capability 8.0 and later; heads of a multiple of 16, aligned to 16 bytes",
        ),
        (_, false) => (scalar, "the device has no matrix instructions of PTX"),
    };
    vec![
        row("attention, bf16 and f16", kernel, why),
        row(
            "attention, f32",
            scalar,
            "matrix instructions have no operands of this precision",
        ),
    ]
}
