//! KL divergence of a student's logits to its teacher's, with or without their heads.

use cubecl::{prelude::*, server::Handle};

use super::{
    LinearLoss, LinearLossRequest, RowLaunch, chunk_rows, has_rows,
    kl_kernel::{KlDivergenceArgsLaunch, KlDivergencePlan, kl_divergence_kernel},
    linear::{Head, HeadGradients, rows_of, words_from},
    row_plan, sum_losses,
};
use crate::{
    KlDivergence, Nvfp4Error,
    capabilities::conversion_of,
    launch::buffer,
    memory::{address_type, allocate, check_memory},
    tensor::{FloatKind, Matrix},
};

/// Writes the losses of the rows of `student` (`[rows, vocab]`), `f32[rows]`, to `losses`, not
/// scaled. If `scale` (one `f32`) is given, the student's logits are replaced by their gradient
/// times `scale`, in place. `teacher` has the shape and type of `student`; `targets` are
/// `i32[rows]`. See [`reference::kl_divergence_rows`](crate::reference::kl_divergence_rows).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, the teacher has another shape or type,
/// there are rows without a class, a size does not fit 32 bits, or `params` fail
/// [`KlDivergence::check`].
pub fn kl_divergence_rows(
    client: &Client,
    [student, teacher]: [&Matrix; 2],
    targets: &Handle,
    losses: &Handle,
    scale: Option<&Handle>,
    params: &KlDivergence,
) -> Result<(), Nvfp4Error> {
    params.check()?;
    student.check("student")?;
    teacher.check("teacher")?;
    let (rows, vocab) = (student.rows, student.cols);
    let shape = |x: &Matrix| format!("{} x {} of {:?}", x.rows, x.cols, x.dtype);
    if shape(student) != shape(teacher) {
        let allowed = format!("{}, as `student`", shape(student));
        return Err(Nvfp4Error::shape("teacher", shape(teacher), allowed));
    }
    if !has_rows("student", student, [targets, losses], scale)? {
        return Ok(());
    }
    // Both matrices are loaded by the words of the less aligned one.
    let (words, rows_plan) = [student, teacher]
        .map(row_plan)
        .into_iter()
        .min_by_key(|(words, _)| words.elem.size() * words.width)
        .expect("there are two");
    let RowLaunch {
        lanes,
        planes,
        units,
        cubes,
    } = RowLaunch::new(client, rows, vocab);
    let plan = KlDivergencePlan {
        lanes,
        planes,
        gradient: scale.is_some(),
        rows: rows_plan,
        conversion: conversion_of(client),
    };
    let row_vectors = vocab / (rows_plan.per_scalar() * words.width);
    let args = KlDivergenceArgsLaunch::new(
        rows,
        vocab,
        row_vectors,
        params.ignore as u32,
        params.temperature,
        1.0 / params.temperature,
    );
    let vectors = student.len() * student.dtype.size() / (words.elem.size() * words.width);
    // SAFETY: the buffers were checked, and the kernel stays below rows and classes.
    unsafe {
        kl_divergence_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(units as u32),
            address_type(student.len()),
            words.width,
            buffer(&student.handle, vectors),
            buffer(&teacher.handle, vectors),
            buffer(targets, rows),
            // Without a scale only the losses are written, and the gradient's factor is unused.
            buffer(scale.unwrap_or(losses), 1),
            buffer(losses, rows),
            args,
            plan,
            words.elem,
        );
    }
    Ok(())
}

/// A student, a teacher, and the gradients to compute.
#[derive(Debug, Clone, Copy)]
pub struct LinearKlRequest<'a> {
    /// Model whose gradients are computed.
    pub student: Head<'a>,
    /// Reference model; its width may differ.
    pub teacher: Head<'a>,
    /// Targets that select the rows to count: `i32[rows]`.
    pub targets: &'a Handle,
    /// Factor of losses and gradients, one `f32`.
    pub scale: &'a Handle,
    /// Temperature, and the target of ignored rows.
    pub params: KlDivergence,
    /// Gradients of the student to compute, and bytes for the logits of both models.
    pub gradients: LinearLossRequest,
}

/// Computes the KL divergence of the student's logits to the teacher's, summed over the rows that
/// count and multiplied by the scale, with its gradients with respect to the student's features and
/// head.
///
/// Rows are processed in chunks, as in [`linear_cross_entropy`](super::linear_cross_entropy).
/// Memory never contains more than one chunk of logits of either model.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, shapes or types do not fit, a size does
/// not fit 32 bits, or the parameters fail [`KlDivergence::check`].
pub fn linear_kl_divergence(
    client: &Client,
    request: &LinearKlRequest<'_>,
) -> Result<LinearLoss, Nvfp4Error> {
    let LinearKlRequest {
        student,
        teacher,
        targets,
        scale,
        params,
        gradients,
    } = *request;
    params.check()?;
    let (rows, d, vocab) = (student.x.rows, student.x.cols, student.w.cols);
    let shapes = [
        ("w", student.w, [d, vocab]),
        ("teacher.x", teacher.x, [rows, teacher.x.cols]),
        ("teacher.w", teacher.w, [teacher.x.cols, vocab]),
    ];
    student.x.check("x")?;
    for (name, matrix, [expected, cols]) in shapes {
        matrix.check(name)?;
        if [matrix.rows, matrix.cols] != [expected, cols] {
            return Err(Nvfp4Error::shape(
                name,
                format!("{} x {}", matrix.rows, matrix.cols),
                format!("{expected} x {cols}"),
            ));
        }
    }
    check_memory("targets", targets, rows * 4)?;
    check_memory("scale", scale, 4)?;
    let losses = allocate(client, rows * 4);
    let with_gradient = gradients.x || gradients.w;
    let found = HeadGradients::new(client, student, gradients)?;
    let most = chunk_rows(vocab, FloatKind::Bf16, gradients.chunk_bytes / 2).min(rows);
    let memory = [(); 2].map(|()| Matrix::empty(client, most, vocab, FloatKind::Bf16));
    for start in (0..rows).step_by(most.max(1)) {
        let count = most.min(rows - start);
        let [own, other] = memory.each_ref().map(|memory| rows_of(memory, 0, count));
        student.logits(client, start, &own)?;
        teacher.logits(client, start, &other)?;
        kl_divergence_rows(
            client,
            [&own, &other],
            &words_from(targets, start),
            &words_from(&losses, start),
            with_gradient.then_some(scale),
            &params,
        )?;
        found.add(client, student, start, &own)?;
    }
    Ok(LinearLoss {
        loss: sum_losses(client, &losses, rows, scale)?,
        dx: found.dx,
        dw: found.dw,
    })
}
