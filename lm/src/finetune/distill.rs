//! The KL divergence of a model to its teacher, on logits, in chunks of tokens.
//!
//! With the temperature `T`, `p = softmax(teacher / T)` and `q = softmax(student / T)`, the loss of
//! a token is `T² Σ p (ln p - ln q)`, and its gradient in the student's logits `T (q - p)`. The
//! factor `T²` keeps the size of gradients where the temperature changes (Hinton et al., arXiv
//! 1503.02531).
//!
//! Logits and their gradients exist for one chunk of tokens at a time: gradients of features and
//! head are computed beside the loss, and what autodiff sees is [`Distilled::surrogate`].

use anyhow::{Result, ensure};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_nvfp4::loss::{CHUNK_BYTES, CrossEntropy};

use crate::model::cast;

/// Tensors of a chunk's logits that are in memory at a time.
const COPIES: usize = 6;

/// Features and head of one model: their product is its logits.
#[derive(Debug, Clone)]
pub struct Head {
    /// `[rows, d_model]`.
    pub features: Tensor<2>,
    /// `[d_model, vocab]`.
    pub weight: Tensor<2>,
}

/// A loss and its gradient.
#[derive(Debug, Clone)]
pub struct Distilled {
    /// The loss, `f32[1]`, without autodiff.
    pub loss: Tensor<1>,
    /// `f32[1]`: its gradient is that of the loss, its value has no meaning.
    pub surrogate: Tensor<1>,
}

/// The sum over all rows that count of the KL divergence of `student` to `teacher`, times `scale`
/// (`f32[1]`, without autodiff). A row counts unless its target (`[rows]`) is the one that [`CrossEntropy::default`] ignores.
///
/// Differentiable in the student's features and weight, which are on a device of autodiff; the
/// teacher's are on the same device without it. Products are of the type of the features, the
/// softmax is `f32`, and sums of chunks for the gradient of the weight are, too.
///
/// # Errors
/// When numbers of rows or classes differ, or the temperature is not positive.
pub fn kl_divergence(
    student: Head,
    teacher: &Head,
    targets: Tensor<1, Int>,
    temperature: f64,
    scale: &Tensor<1>,
) -> Result<Distilled> {
    let [_, vocab] = student.weight.dims();
    let rows = (CHUNK_BYTES / (4 * COPIES * vocab)).max(1);
    kl_divergence_in(student, teacher, targets, (temperature, scale), rows)
}

/// [`kl_divergence`] in chunks of `chunk` rows, with temperature and scale.
pub(super) fn kl_divergence_in(
    student: Head,
    teacher: &Head,
    targets: Tensor<1, Int>,
    (temperature, scale): (f64, &Tensor<1>),
    chunk: usize,
) -> Result<Distilled> {
    let ([rows, width], [_, vocab]) = (student.features.dims(), student.weight.dims());
    ensure!(
        teacher.features.dims()[0] == rows && targets.dims()[0] == rows,
        "the student has {rows} rows, the teacher {} and the targets {}, but they must be equal",
        teacher.features.dims()[0],
        targets.dims()[0]
    );
    ensure!(
        teacher.weight.dims()[1] == vocab,
        "the teacher has {} classes, but the student has {vocab}",
        teacher.weight.dims()[1]
    );
    ensure!(
        temperature.is_finite() && temperature > 0.0,
        "temperature is {temperature}, but it must be a positive number"
    );
    let (x, w) = (
        student.features.clone().inner(),
        student.weight.clone().inner(),
    );
    let dtype: FloatDType = x.dtype().into();
    let (w, teacher_w) = (cast(w, dtype), cast(teacher.weight.clone(), dtype));
    let device = x.device();
    let ignore = CrossEntropy::default().ignore;
    let targets = targets.without_autodiff();
    let counts = targets.not_equal_elem(ignore).float().cast(FloatDType::F32);
    let mut loss = Tensor::<1>::zeros([1], (&device, DType::F32));
    let mut dw = Tensor::<2>::zeros([width, vocab], (&device, DType::F32));
    let mut dx = Vec::new();
    for begin in (0..rows).step_by(chunk) {
        let count = chunk.min(rows - begin);
        let part = |x: &Tensor<2>| x.clone().narrow(0, begin, count);
        let logs = |x: Tensor<2>, w: &Tensor<2>| {
            let logits = cast(x.matmul(w.clone()), FloatDType::F32);
            log_softmax(logits.div_scalar(temperature), 1)
        };
        let own = part(&x);
        let ln_q = logs(own.clone(), &w);
        let ln_p = logs(cast(part(&teacher.features), dtype), &teacher_w);
        let counts: Tensor<2> = counts.clone().narrow(0, begin, count).reshape([count, 1]);
        let p = ln_p.clone().exp();
        let kl = (p.clone() * (ln_p - ln_q.clone())).sum_dim(1) * counts.clone();
        loss = loss + kl.sum().mul_scalar(temperature * temperature) * scale.clone();
        let weights = counts.mul_scalar(temperature) * scale.clone().unsqueeze();
        let d = (ln_q.exp() - p) * weights;
        let d = cast(d, dtype);
        dw = dw + cast(own.transpose().matmul(d.clone()), FloatDType::F32);
        dx.push(d.matmul(w.clone().transpose()));
    }
    // A product with a constant: its gradient in x is that constant.
    let through = |x: Tensor<2>, gradient: Tensor<2>| {
        let x = cast(x, FloatDType::F32);
        let gradient = Tensor::from_inner(cast(gradient, FloatDType::F32));
        (x * gradient).sum()
    };
    let surrogate = through(student.features, Tensor::cat(dx, 0)) + through(student.weight, dw);
    Ok(Distilled { loss, surrogate })
}
