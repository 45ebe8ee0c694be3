//! Cross entropy, with or without the output head, and embeddings, on plain tensors.
//!
//! As in [`functions`](crate::functions), `try_*` returns an error that names the argument, and the
//! plain name panics with its message. If a check fails, nothing has been queued.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, FloatDType, Int, Tensor};
use nvfp4_formats::Nvfp4Error;
pub use nvfp4_formats::{CrossEntropy, KlDivergence, Reduction};

use crate::functions::or_panic;
use crate::ops::loss::{LinearKl, LinearLossRequest, LossOps, TablePart};
use crate::validate;

/// Default limit for the logits of a chunk of tokens, in bytes. With a vocabulary of 131072 in bf16
/// it is 2048 tokens; at that size, accumulating the weight's gradient in `f32` makes its GEMM a
/// sixth slower.
pub const CHUNK_BYTES: usize = 1 << 29;

/// Computes the cross entropy, `f32[1]`, of `logits` (`[rows, vocab]`; `f32`, `bf16` or `f16`)
/// against `targets` (`[rows]`), differentiable by the logits. It is computed in `f32`. The
/// gradient has the dtype of the logits, and reuses their memory if nothing else holds it.
///
/// Rows whose target is [`CrossEntropy::ignore`] are excluded. The host does not read the targets:
/// any other target that is no class makes the loss, and the gradient of its row, NaN.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// a shape does not fit, there are rows but no class, or [`CrossEntropy::check`] fails.
pub fn try_cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    params: CrossEntropy,
) -> Result<Tensor<1>, Nvfp4Error> {
    validate::operand("logits", &logits)?;
    let [rows, vocab] = logits.dims();
    params.check()?;
    check_targets(&logits, "logits", &targets, (rows, vocab))?;
    let loss = Dispatch::cross_entropy(logits.into_dispatch(), targets.into_dispatch(), params);
    Ok(Tensor::from_dispatch(loss))
}

/// Panicking version of [`try_cross_entropy`].
#[track_caller]
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    params: CrossEntropy,
) -> Tensor<1> {
    or_panic("cross_entropy", try_cross_entropy(logits, targets, params))
}

/// Computes the cross entropy, `f32[1]`, of the logits `x w`, for `x` (`[rows, d]`), `w`
/// (`[d, vocab]`) and `targets` (`[rows]`), as by [`try_cross_entropy`]; differentiable by `x` and
/// `w`.
///
/// `w` is rounded to the dtype of `x`, which is also that of the logits; sums are in `f32`. Rows
/// are processed in chunks whose logits take at most `chunk_bytes` (or 128 rows), for any number of
/// rows; [`CHUNK_BYTES`] is a good value. If gradients are required, they are computed in the
/// forward and kept for the backward, in the dtypes of `x` and `w`.
///
/// # Errors
/// Same as [`try_cross_entropy`]; also if `chunk_bytes` is 0.
pub fn try_linear_cross_entropy(
    x: Tensor<2>,
    w: Tensor<2>,
    targets: Tensor<1, Int>,
    params: CrossEntropy,
    chunk_bytes: usize,
) -> Result<Tensor<1>, Nvfp4Error> {
    validate::operand("x", &x)?;
    validate::operand("w", &w)?;
    validate::same_device(("x", &x.device()), ("w", &w.device()))?;
    let ([rows, d], [w_rows, vocab]) = (x.dims(), w.dims());
    if w_rows != d {
        return Err(Nvfp4Error::shape(
            "w",
            format!("[{w_rows}, {vocab}]"),
            format!("{d} rows, the last axis of `x` [{rows}, {d}]"),
        ));
    }
    params.check()?;
    check_targets(&x, "w", &targets, (rows, vocab))?;
    if chunk_bytes == 0 {
        return Err(Nvfp4Error::value("chunk_bytes", "0", "at least 1"));
    }
    let loss = Dispatch::linear_cross_entropy(
        x.into_dispatch(),
        w.into_dispatch(),
        targets.into_dispatch(),
        params,
        chunk_bytes,
    );
    Ok(Tensor::from_dispatch(loss))
}

/// Panicking version of [`try_linear_cross_entropy`] with [`CHUNK_BYTES`].
#[track_caller]
pub fn linear_cross_entropy(
    x: Tensor<2>,
    w: Tensor<2>,
    targets: Tensor<1, Int>,
    params: CrossEntropy,
) -> Tensor<1> {
    let loss = try_linear_cross_entropy(x, w, targets, params, CHUNK_BYTES);
    or_panic("linear_cross_entropy", loss)
}

/// Features and output head of a model, with logits `features · weight`.
#[derive(Debug, Clone)]
pub struct Head {
    /// Features, `[rows, d]`.
    pub features: Tensor<2>,
    /// Weight of the head, `[d, vocab]`.
    pub weight: Tensor<2>,
}

/// Computes the KL divergence, `f32[1]`, of the logits of `student` to those of `teacher`, as
/// defined by [`KlDivergence`]: summed over the rows whose `targets` (`[rows]`) are not ignored,
/// times `scale` (`f32[1]`). Differentiable by the student's features and weight. Teacher and scale
/// are constants; the width of the teacher may differ.
///
/// The weights and the teacher's features are rounded to the dtype of the student's features, which
/// is also that of the logits; sums are in `f32`. Rows are processed in chunks whose logits, of
/// both models together, take at most `chunk_bytes` (or 128 rows), for any number of rows.
/// Gradients are computed in the forward, as by [`try_linear_cross_entropy`].
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// a shape does not fit, there are rows but no class, `chunk_bytes` is 0, or
/// [`KlDivergence::check`] fails.
pub fn try_linear_kl_divergence(
    student: Head,
    teacher: Head,
    targets: Tensor<1, Int>,
    scale: Tensor<1>,
    params: KlDivergence,
    chunk_bytes: usize,
) -> Result<Tensor<1>, Nvfp4Error> {
    params.check()?;
    let Head {
        features: x,
        weight: w,
    } = student;
    let Head {
        features: teacher_x,
        weight: teacher_w,
    } = teacher;
    let device = x.device();
    for (name, tensor) in [
        ("student.features", &x),
        ("student.weight", &w),
        ("teacher.features", &teacher_x),
        ("teacher.weight", &teacher_w),
    ] {
        validate::operand(name, tensor)?;
        validate::same_device(("student.features", &device), (name, &tensor.device()))?;
    }
    let ([rows, d], [_, vocab]) = (x.dims(), w.dims());
    let width = teacher_x.dims()[1];
    for (name, found, expected) in [
        ("student.weight", w.dims(), [d, vocab]),
        ("teacher.features", teacher_x.dims(), [rows, width]),
        ("teacher.weight", teacher_w.dims(), [width, vocab]),
    ] {
        validate::shape(name, found, expected, || {
            format!("student.features are [{rows}, {d}]")
        })?;
    }
    check_targets(&x, "student.weight", &targets, (rows, vocab))?;
    if scale.dims() != [1] {
        let found = format!("{:?}", scale.dims());
        return Err(Nvfp4Error::shape("scale", found, "[1]"));
    }
    if chunk_bytes == 0 {
        return Err(Nvfp4Error::value("chunk_bytes", "0", "at least 1"));
    }
    let gradients = LinearLossRequest {
        x: false,
        w: false,
        chunk_bytes,
    };
    let loss = Dispatch::linear_kl_divergence(
        x.into_dispatch(),
        w.into_dispatch(),
        teacher_x.into_dispatch(),
        teacher_w.into_dispatch(),
        targets.into_dispatch(),
        scale.into_dispatch(),
        LinearKl { params, gradients },
    );
    Ok(Tensor::from_dispatch(loss))
}

/// Looks up the rows `ids` (`[tokens]`) of `table` (`[vocab, d]`), rounded to `dtype`:
/// `[tokens, d]`. Differentiable by the table; its gradient is accumulated in `f32` in an order
/// that depends only on the ids.
///
/// The host does not read the ids: an id out of range gives a row of NaN, and is ignored in the
/// gradient.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// or there are ids but the table is empty.
pub fn try_embedding(
    table: Tensor<2>,
    ids: Tensor<1, Int>,
    dtype: FloatDType,
) -> Result<Tensor<2>, Nvfp4Error> {
    let whole = TablePart::whole(table.dims()[0]);
    try_embedding_part(table, whole, ids, dtype)
}

/// Version of [`try_embedding`] for a `table` that is the shard `part` of a larger one: rows
/// outside the shard are zero.
pub(crate) fn try_embedding_part(
    table: Tensor<2>,
    part: TablePart,
    ids: Tensor<1, Int>,
    dtype: FloatDType,
) -> Result<Tensor<2>, Nvfp4Error> {
    validate::operand("table", &table)?;
    validate::float("dtype", dtype.into())?;
    validate::same_device(("table", &table.device()), ("ids", &ids.device()))?;
    check_numbers("ids", &ids)?;
    let ([vocab, d], [tokens]) = (table.dims(), ids.dims());
    if vocab == 0 && tokens > 0 {
        return Err(Nvfp4Error::shape(
            "table",
            format!("[0, {d}]"),
            "at least one row",
        ));
    }
    let rows = Dispatch::embedding_rows(table.into_dispatch(), part, ids.into_dispatch(), dtype);
    Ok(Tensor::from_dispatch(rows))
}

/// Panicking version of [`try_embedding`].
#[track_caller]
pub fn embedding(table: Tensor<2>, ids: Tensor<1, Int>, dtype: FloatDType) -> Tensor<2> {
    or_panic("embedding", try_embedding(table, ids, dtype))
}

/// Returns an error if `targets` and `params` do not match `rows` rows of `vocab` classes;
/// `argument` names the argument for messages.
pub(crate) fn check_targets(
    like: &Tensor<2>,
    argument: &'static str,
    targets: &Tensor<1, Int>,
    (rows, vocab): (usize, usize),
) -> Result<(), Nvfp4Error> {
    validate::same_device((argument, &like.device()), ("targets", &targets.device()))?;
    check_numbers("targets", targets)?;
    validate::shape("targets", targets.dims(), [rows], || {
        "a target for each row".into()
    })?;
    if (vocab == 0 && rows > 0) || i32::try_from(vocab).is_err() {
        return Err(Nvfp4Error::shape(
            argument,
            format!("{vocab} classes"),
            format!("1 to {}", i32::MAX),
        ));
    }
    Ok(())
}

/// Returns an error if the kernels do not support the dtype of `numbers`.
fn check_numbers(argument: &'static str, numbers: &Tensor<1, Int>) -> Result<(), Nvfp4Error> {
    match numbers.dtype() {
        DType::I64 | DType::I32 | DType::U32 | DType::U8 => Ok(()),
        other => Err(Nvfp4Error::DType {
            argument,
            found: format!("{other:?}"),
            expected: "I64, I32, U32 or U8".into(),
        }),
    }
}
