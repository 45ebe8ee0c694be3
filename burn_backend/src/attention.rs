//! Attention on plain tensors, for any Burn model. No tokens × tokens matrix is ever in memory,
//! forward or backward.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn_core::tensor::{Device, Distribution, Tensor};
//! use burn_nvfp4::attention::{AttentionParams, Sequences, attention};
//!
//! let device = Device::flex().autodiff();
//! let random = |heads| Tensor::<3>::random([12, heads, 8], Distribution::Default, &device);
//! // Two sequences of six tokens; four heads of queries share two of keys and values.
//! let (q, k, v) = (random(4).require_grad(), random(2), random(2));
//! let out = attention(q.clone(), k, v, &Sequences::Equal(2), AttentionParams::causal(8));
//! assert_eq!(out.dims(), [12, 4, 8]);
//! let gradients = out.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [12, 4, 8]);
//! # }
//! ```
//!
//! [`attention`] takes queries, keys and values. [`attention_qkv`] takes the output of one fused
//! projection, rotates queries and keys, and returns the gradient in one buffer. Scores, attention
//! weights and accumulators are `f32`. The output, the gradients and (with tensor-core
//! instructions) the attention weights of a block are rounded to the dtype of the operands.
//! Autodiff keeps the operands, the output, and one `f32` per row and head. Results are bitwise
//! reproducible, and those of a sequence do not depend on other sequences in the call.
//!
//! A row that sees no key has output 0 and gradient 0.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use nvfp4_formats::Nvfp4Error;

pub use nvfp4_formats::AttentionParams;

use crate::functions::or_panic;
use crate::ops::attention::{
    AttentionInputs, AttentionOps, AttentionRope, AttentionSequences, AttentionSpec,
};
use crate::ops::layers::OutputAmax;
use crate::validate;

/// Maximum head size.
pub const MAX_HEAD: usize = 256;

/// Grouping of tokens into sequences; queries see only keys of their own sequence. Positions count
/// from 0 in every sequence.
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a tensor's handle, cloned once a call"
)]
pub enum Sequences {
    /// This number of sequences of equal length, concatenated. The lengths of queries and keys may
    /// differ.
    Equal(usize),
    /// Sequences of any lengths, including 0: `u32[count + 1]`, token indices that ascend from 0.
    /// Sequence `s` is the tokens from entry `s` to entry `s + 1`. Tokens after the last entry
    /// belong to no sequence; their outputs and gradients are 0. The host does not read the
    /// offsets.
    Offsets {
        /// Offsets of queries.
        q: Tensor<1, Int>,
        /// Offsets of keys and values.
        k: Tensor<1, Int>,
    },
}

impl Sequences {
    /// Creates sequences of tokens that are queries, keys and values.
    pub fn packed(offsets: Tensor<1, Int>) -> Self {
        Self::Offsets {
            k: offsets.clone(),
            q: offsets,
        }
    }

    pub(crate) fn check(&self, device: &Device, q: usize, k: usize) -> Result<(), Nvfp4Error> {
        match self {
            Self::Equal(count) => {
                for (name, tokens) in [("q", q), ("k", k)] {
                    if *count == 0 || !tokens.is_multiple_of(*count) {
                        return Err(Nvfp4Error::value(
                            "sequences",
                            format!("{count} of equal length"),
                            format!("a divisor of {tokens}, the tokens of `{name}`"),
                        ));
                    }
                }
                Ok(())
            }
            Self::Offsets { q, k } => {
                for (name, offsets) in [("sequences.q", q), ("sequences.k", k)] {
                    validate::same_device(("q", device), (name, &offsets.device()))?;
                    if offsets.dtype() != DType::U32 {
                        return Err(Nvfp4Error::DType {
                            argument: name,
                            found: format!("{:?}", offsets.dtype()),
                            expected: "U32".into(),
                        });
                    }
                }
                let ([q], [k]) = (q.dims(), k.dims());
                if q < 2 || q != k {
                    return Err(Nvfp4Error::shape(
                        "sequences",
                        format!("{q} offsets for queries and {k} for keys"),
                        "one more than sequences, of which there is one at least, for both",
                    ));
                }
                Ok(())
            }
        }
    }

    fn into_dispatch(self) -> AttentionSequences<Dispatch> {
        match self {
            Self::Equal(count) => AttentionSequences::Equal(count),
            Self::Offsets { q, k } => AttentionSequences::Offsets {
                q: q.into_dispatch(),
                k: k.into_dispatch(),
            },
        }
    }
}

/// Tables of rotary positions: elements `i` and `i + head / 2` of a head form a pair, which
/// position `p` rotates by the angle of entry `(p, i)`.
#[derive(Clone, Debug)]
pub struct RotaryTables {
    /// Cosines, `f32[positions, head / 2]`.
    cos: Tensor<2>,
    /// Sines, `f32[positions, head / 2]`.
    sin: Tensor<2>,
}

impl RotaryTables {
    /// Converts to tables of the backend.
    pub(crate) fn into_dispatch(tables: Option<Self>) -> AttentionRope<Dispatch> {
        match tables {
            None => AttentionRope::Absent,
            Some(Self { cos, sin }) => AttentionRope::Tables {
                cos: cos.into_dispatch(),
                sin: sin.into_dispatch(),
            },
        }
    }

    /// Computes tables in which position `p` rotates pair `i` by `p · base^(-2i / head)`.
    ///
    /// # Errors
    /// Returns an error if there is no position, `head` is not even, or `base` is not positive.
    pub fn try_new(
        positions: usize,
        head: usize,
        base: f64,
        device: &Device,
    ) -> Result<Self, Nvfp4Error> {
        if positions == 0 {
            return Err(Nvfp4Error::value("positions", "0", "at least 1"));
        }
        if head == 0 || !head.is_multiple_of(2) {
            return Err(Nvfp4Error::value(
                "head",
                head.to_string(),
                "an even size, for rotary positions",
            ));
        }
        if base.is_nan() || base <= 0.0 {
            return Err(Nvfp4Error::value(
                "rotary",
                base.to_string(),
                "a positive base",
            ));
        }
        let half = head / 2;
        let angles = (0..positions).flat_map(|position| {
            (0..half).map(move |i| position as f64 * base.powf(-(2.0 * i as f64) / head as f64))
        });
        let (sin, cos): (Vec<f32>, Vec<f32>) = angles
            .map(|angle| (angle.sin() as f32, angle.cos() as f32))
            .unzip();
        let table = |values| {
            let options = (device, DType::F32);
            Tensor::<2>::from_data(TensorData::new(values, [positions, half]), options)
        };
        Ok(Self {
            cos: table(cos),
            sin: table(sin),
        })
    }

    /// Creates tables from existing tensors.
    ///
    /// # Errors
    /// Returns an error if a table is not `f32` or is empty, or the tables differ in shape or
    /// device.
    pub fn try_from_parts(cos: Tensor<2>, sin: Tensor<2>) -> Result<Self, Nvfp4Error> {
        let [positions, half] = cos.dims();
        validate::buffer("cos", &cos, [positions.max(1), half.max(1)], DType::F32)?;
        validate::buffer("sin", &sin, [positions, half], DType::F32)?;
        validate::same_device(("cos", &cos.device()), ("sin", &sin.device()))?;
        Ok(Self { cos, sin })
    }

    /// Number of positions.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Returns cosines and sines.
    pub(crate) fn into_parts(self) -> (Tensor<2>, Tensor<2>) {
        (self.cos, self.sin)
    }

    pub(crate) fn check(
        &self,
        device: &Device,
        head: usize,
        longest: usize,
    ) -> Result<(), Nvfp4Error> {
        validate::same_device(("q", device), ("rotary", &self.cos.device()))?;
        let [positions, half] = self.cos.dims();
        if 2 * half != head || positions < longest {
            return Err(Nvfp4Error::shape(
                "rotary",
                format!("{positions} positions for heads of {}", 2 * half),
                format!("at least {longest} for heads of {head}"),
            ));
        }
        Ok(())
    }
}

/// Computes `softmax(mask(scale · q kᵀ)) v` within each of `sequences`, differentiable by `q`, `k`
/// and `v`.
///
/// # Shapes
///
/// - `q`: `[q_tokens, heads, head]`, `k` and `v`: `[k_tokens, kv_heads, head]`, of one dtype,
///   `f32`, `bf16` or `f16`. Head `h` of `q` reads head `h / (heads / kv_heads)` of `k` and `v`.
/// - output: same as `q`
///
/// # Errors
/// Returns an error if the device has no implementation, devices, dtypes or shapes do not fit, a
/// head is wider than [`MAX_HEAD`], or a parameter is out of range.
pub fn try_attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    sequences: &Sequences,
    params: AttentionParams,
) -> Result<Tensor<3>, Nvfp4Error> {
    try_attention_with_sinks([q, k, v], sequences, None, params)
}

/// Version of [`try_attention`] in which every row also sees a sink if `sinks` (`[heads]`, of any
/// float dtype) are given: a logit of its head that joins the softmax and has no value.
/// Differentiable by the sinks, too.
///
/// # Errors
/// Returns the errors of [`try_attention`], and an error if the sinks do not fit.
pub fn try_attention_with_sinks(
    [q, k, v]: [Tensor<3>; 3],
    sequences: &Sequences,
    sinks: Option<Tensor<1>>,
    params: AttentionParams,
) -> Result<Tensor<3>, Nvfp4Error> {
    validate::operand("q", &q)?;
    let device = q.device();
    for (name, x) in [("k", &k), ("v", &v)] {
        validate::same_device(("q", &device), (name, &x.device()))?;
        validate::same_dtype(("q", q.dtype()), (name, x.dtype()))?;
    }
    let ([q_tokens, heads, head], [k_tokens, kv_heads, k_head]) = (q.dims(), k.dims());
    if k_head != head {
        return Err(Nvfp4Error::shape(
            "k",
            format!("heads of {k_head}"),
            format!("{head}, as `q`"),
        ));
    }
    validate::shape("v", v.dims(), k.dims(), || "as `k`".into())?;
    let spec = checked_spec([heads, kv_heads, head], params)?;
    sequences.check(&device, q_tokens, k_tokens)?;
    if let Some(sinks) = &sinks {
        check_sinks(sinks, &device, heads)?;
    }
    let inputs = AttentionInputs::Separate {
        q: q.into_dispatch(),
        k: k.into_dispatch(),
        v: v.into_dispatch(),
    };
    let (sequences, rope) = (sequences.clone().into_dispatch(), AttentionRope::Absent);
    let out = match sinks {
        None => Dispatch::nvfp4_attention(inputs, sequences, rope, spec),
        Some(sinks) => {
            let sinks = sinks.into_dispatch();
            Dispatch::nvfp4_attention_with_sinks(inputs, sequences, rope, sinks, spec)
        }
    };
    Ok(Tensor::<2>::from_dispatch(out).reshape([q_tokens, heads, head]))
}

fn check_sinks(sinks: &Tensor<1>, device: &Device, heads: usize) -> Result<(), Nvfp4Error> {
    validate::operand("sinks", sinks)?;
    validate::same_device(("q", device), ("sinks", &sinks.device()))?;
    validate::shape("sinks", sinks.dims(), [heads], || "one per head".into())
}

/// Panicking version of [`try_attention`].
#[track_caller]
pub fn attention(
    q: Tensor<3>,
    k: Tensor<3>,
    v: Tensor<3>,
    sequences: &Sequences,
    params: AttentionParams,
) -> Tensor<3> {
    or_panic("attention", try_attention(q, k, v, sequences, params))
}

/// Computes attention from the output of one fused projection, with rotary positions if tables are
/// given. Queries and keys are rotated in place if nothing else holds `qkv`. The gradient of `qkv`
/// is one buffer, rotated back.
///
/// # Shapes
///
/// - `qkv`: `[tokens, (heads + 2 kv_heads) head]`, of dtype `f32`, `bf16` or `f16`: the heads of
///   queries, of keys, of values. The numbers of heads are `heads` and `kv_heads`.
/// - output: `[tokens, heads head]`, in the dtype of `qkv`
///
/// Queries and keys must have the same sequences: both offsets of [`Sequences::Offsets`] must be
/// equal, as created by [`Sequences::packed`].
///
/// # Errors
/// Returns an error if the device has no implementation, devices, dtypes or shapes do not fit, a
/// head is wider than [`MAX_HEAD`], a sequence of known length is longer than the tables, or a
/// parameter is out of range.
pub fn try_attention_qkv(
    qkv: Tensor<2>,
    [heads, kv_heads]: [usize; 2],
    sequences: &Sequences,
    rotary: Option<&RotaryTables>,
    params: AttentionParams,
) -> Result<Tensor<2>, Nvfp4Error> {
    try_attention_qkv_with_amax(qkv, [heads, kv_heads], sequences, rotary, params, None)
}

/// Version of [`try_attention_qkv`] with sinks, as in [`try_attention_with_sinks`].
///
/// # Errors
/// Returns the errors of [`try_attention_qkv`], and an error if the sinks do not fit.
pub fn try_attention_qkv_with_sinks(
    qkv: Tensor<2>,
    heads: [usize; 2],
    (sequences, rotary): (&Sequences, Option<&RotaryTables>),
    sinks: Tensor<1>,
    params: AttentionParams,
) -> Result<Tensor<2>, Nvfp4Error> {
    let spec = checked_qkv(&qkv, heads, (sequences, rotary), params)?;
    check_sinks(&sinks, &qkv.device(), spec.heads)?;
    let rope = RotaryTables::into_dispatch(rotary.cloned());
    let inputs = AttentionInputs::Qkv(qkv.into_dispatch());
    let (sequences, sinks) = (sequences.clone().into_dispatch(), sinks.into_dispatch());
    Ok(Tensor::from_dispatch(Dispatch::nvfp4_attention_with_sinks(
        inputs, sequences, rope, sinks, spec,
    )))
}

/// Version of [`try_attention_qkv`] that also computes the amax values that the next layer needs.
///
/// # Errors
/// Same as [`try_attention_qkv`].
pub(crate) fn try_attention_qkv_with_amax(
    qkv: Tensor<2>,
    heads: [usize; 2],
    sequences: &Sequences,
    rotary: Option<&RotaryTables>,
    params: AttentionParams,
    amax: Option<OutputAmax>,
) -> Result<Tensor<2>, Nvfp4Error> {
    let spec = checked_qkv(&qkv, heads, (sequences, rotary), params)?;
    Ok(attention_qkv_unchecked(
        qkv,
        sequences.clone(),
        rotary.cloned(),
        AttentionSpec { amax, ..spec },
    ))
}

/// Checks the arguments of [`try_attention_qkv`].
fn checked_qkv(
    qkv: &Tensor<2>,
    [heads, kv_heads]: [usize; 2],
    (sequences, rotary): (&Sequences, Option<&RotaryTables>),
    params: AttentionParams,
) -> Result<AttentionSpec, Nvfp4Error> {
    validate::operand("qkv", qkv)?;
    let ([tokens, width], device) = (qkv.dims(), qkv.device());
    let parts = heads + 2 * kv_heads;
    if parts == 0 || !width.is_multiple_of(parts) {
        return Err(Nvfp4Error::shape(
            "qkv",
            format!("{width} columns"),
            format!("a multiple of {parts}, heads + 2 kv_heads"),
        ));
    }
    let spec = checked_spec([heads, kv_heads, width / parts], params)?;
    sequences.check(&device, tokens, tokens)?;
    let longest = match sequences {
        Sequences::Equal(count) => tokens / count,
        // Lengths are not known here: positions beyond the tables are rotated like the last one.
        Sequences::Offsets { .. } => 1,
    };
    if let Some(rotary) = rotary {
        rotary.check(&device, spec.head, longest)?;
    }
    Ok(spec)
}

/// Panicking version of [`try_attention_qkv`].
#[track_caller]
pub fn attention_qkv(
    qkv: Tensor<2>,
    heads: [usize; 2],
    sequences: &Sequences,
    rotary: Option<&RotaryTables>,
    params: AttentionParams,
) -> Tensor<2> {
    let found = try_attention_qkv(qkv, heads, sequences, rotary, params);
    or_panic("attention_qkv", found)
}

/// Runs [`try_attention_qkv`] on checked arguments.
fn attention_qkv_unchecked(
    qkv: Tensor<2>,
    sequences: Sequences,
    rotary: Option<RotaryTables>,
    spec: AttentionSpec,
) -> Tensor<2> {
    let rope = RotaryTables::into_dispatch(rotary);
    let inputs = AttentionInputs::Qkv(qkv.into_dispatch());
    let sequences = sequences.into_dispatch();
    Tensor::from_dispatch(Dispatch::nvfp4_attention(inputs, sequences, rope, spec))
}

pub(crate) fn checked_spec(
    [heads, kv_heads, head]: [usize; 3],
    params: AttentionParams,
) -> Result<AttentionSpec, Nvfp4Error> {
    if head == 0 || head > MAX_HEAD {
        return Err(Nvfp4Error::shape(
            "q",
            format!("heads of {head}"),
            format!("1 to {MAX_HEAD}"),
        ));
    }
    if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(Nvfp4Error::shape(
            "k",
            format!("{kv_heads} heads"),
            format!("a divisor of {heads}, the heads of queries"),
        ));
    }
    params.check()?;
    Ok(AttentionSpec {
        heads,
        kv_heads,
        head,
        params,
        amax: None,
    })
}
