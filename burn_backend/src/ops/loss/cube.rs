//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread if fusion is on.

use burn_core::backend::{
    ops::IntTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, FloatDType, IntDType, Shape};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use nvfp4_kernels::capabilities::{Capabilities, GemmBackend};
use nvfp4_kernels::tensor::Matrix;
use nvfp4_kernels::{embedding, loss};

use super::super::cube::tensors::{Source, launched, matrix, new_tensor, owned, result};
use super::super::dtype::float_kind;
use super::super::{MaybeTensor, float_dtype, trace_op};
use super::chunks;
use super::{
    CrossEntropy, KlDivergence, LinearKl, LinearLoss, LinearLossRequest, LossAndGradient, LossOps,
    TablePart,
};

impl LossOps for CubeBackend {
    fn cross_entropy_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        let (logits, targets) = (Source::new(logits), numbers(targets));
        let like = &logits.tensor;
        let (logits, targets) = (&logits.matrix, &targets.handle);
        let loss = loss::cross_entropy(&like.client, logits, targets, false, &params);
        new_tensor(like, launched(loss), Shape::new([1]), DType::F32)
    }

    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> LossAndGradient<Self> {
        let logits = owned("cross_entropy", logits);
        let targets = numbers(targets);
        let (source, targets) = (matrix(&logits), &targets.handle);
        trace_op("cross_entropy", "", source.rows, source.cols);
        let loss = loss::cross_entropy(&logits.client, &source, targets, true, &params);
        LossAndGradient {
            loss: new_tensor(&logits, launched(loss), Shape::new([1]), DType::F32),
            gradient: logits,
        }
    }

    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        request: LinearLossRequest,
    ) -> LinearLoss<Self> {
        let targets = numbers(targets);
        let (client, vocab) = (x.client.clone(), w.meta.shape()[1]);
        let has_kernels = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        if x.dtype != DType::BF16 || !has_kernels {
            let rows = targets.meta.shape()[0];
            let counted = launched(loss::target_scale(&client, &targets.handle, rows, &params));
            let counted = new_tensor(&x, counted, Shape::new([1]), DType::F32);
            let kind = float_kind(float_dtype(x.dtype));
            let most = loss::chunk_rows(vocab, kind, request.chunk_bytes);
            return chunks::linear_cross_entropy::<Self>(
                x,
                w,
                targets,
                params,
                request,
                (most, counted),
            );
        }
        let w_dtype = w.dtype;
        let (x, w) = (Source::new(x), Source::new(cast(w, DType::BF16)));
        trace_op("linear_cross_entropy", "", x.matrix.rows, vocab);
        let found = launched(loss::linear_cross_entropy(
            &client,
            &x.matrix,
            &w.matrix,
            &targets.handle,
            &params,
            gradients(request),
        ));
        linear_loss(&x.tensor, found, w_dtype)
    }

    fn kl_divergence_gradient(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        params: KlDivergence,
    ) -> LossAndGradient<Self> {
        let student = owned("kl_divergence", student);
        let (teacher, targets) = (Source::new(teacher), numbers(targets));
        let scale = into_contiguous(cast(scale, DType::F32));
        let (client, source) = (&student.client, matrix(&student));
        trace_op("kl_divergence", "", source.rows, source.cols);
        let losses = client.empty(source.rows.max(1) * 4);
        launched(loss::kl_divergence_rows(
            client,
            [&source, &teacher.matrix],
            &targets.handle,
            &losses,
            Some(&scale.handle),
            &params,
        ));
        let sum = loss::sum_losses(client, &losses, source.rows, &scale.handle);
        LossAndGradient {
            loss: new_tensor(&student, launched(sum), Shape::new([1]), DType::F32),
            gradient: student,
        }
    }

    fn linear_kl_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        teacher_x: FloatTensor<Self>,
        teacher_w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        request: LinearKl,
    ) -> LinearLoss<Self> {
        let (client, vocab) = (x.client.clone(), w.meta.shape()[1]);
        let has_kernels = Capabilities::of(&client).gemm != GemmBackend::Scalar;
        if x.dtype != DType::BF16 || !has_kernels {
            let kind = float_kind(float_dtype(x.dtype));
            // Logits of both models.
            let most = loss::chunk_rows(vocab, kind, request.gradients.chunk_bytes / 2);
            let (own, teacher) = ([x, w], [teacher_x, teacher_w]);
            return chunks::linear_kl::<Self>(own, teacher, targets, scale, request, most);
        }
        let w_dtype = w.dtype;
        let targets = numbers(targets);
        let scale = into_contiguous(cast(scale, DType::F32));
        let [x, w, teacher_x, teacher_w] =
            [x, w, teacher_x, teacher_w].map(|it| Source::new(cast(it, DType::BF16)));
        trace_op("linear_kl_divergence", "", x.matrix.rows, vocab);
        let found = launched(loss::linear_kl_divergence(
            &client,
            &loss::LinearKlRequest {
                student: loss::Head {
                    x: &x.matrix,
                    w: &w.matrix,
                },
                teacher: loss::Head {
                    x: &teacher_x.matrix,
                    w: &teacher_w.matrix,
                },
                targets: &targets.handle,
                scale: &scale.handle,
                params: request.params,
                gradients: gradients(request.gradients),
            },
        ));
        linear_loss(&x.tensor, found, w_dtype)
    }

    fn scale_gradient(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = owned("cross_entropy", x);
        let factor = into_contiguous(cast(factor, DType::F32));
        let len = x.meta.shape().num_elements();
        let flat = Matrix::new(x.handle.clone(), 1, len, float_kind(float_dtype(x.dtype)));
        launched(loss::scale(&x.client, &launched(flat), &factor.handle));
        x
    }

    fn embedding_rows(
        table: FloatTensor<Self>,
        part: TablePart,
        ids: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (table, ids) = (Source::new(table), numbers(ids));
        let tokens = ids.meta.shape()[0];
        let found = embedding::embedding(
            &table.tensor.client,
            (&table.matrix, part),
            &ids.handle,
            tokens,
            float_kind(dtype),
        );
        result(&table.tensor, launched(found))
    }

    fn embedding_gradient(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab: usize,
    ) -> FloatTensor<Self> {
        let (dy, ids) = (Source::new(dy), numbers(ids));
        let (client, grad) = (&dy.tensor.client, &dy.matrix);
        let found = embedding::embedding_gradient(client, grad, &ids.handle, vocab);
        result(&dy.tensor, launched(found))
    }
}

fn gradients(request: LinearLossRequest) -> loss::LinearLossRequest {
    loss::LinearLossRequest {
        x: request.x,
        w: request.w,
        chunk_bytes: request.chunk_bytes,
    }
}

/// Returns the results of a head and its loss on the device of `like`; the gradient of the weight
/// is cast to `w_dtype`.
fn linear_loss(
    like: &CubeTensor,
    found: loss::LinearLoss,
    w_dtype: DType,
) -> LinearLoss<CubeBackend> {
    let dw = found.dw.map(|dw| cast(result(like, dw), w_dtype));
    LinearLoss {
        loss: new_tensor(like, found.loss, Shape::new([1]), DType::F32),
        dx: found.dx.map(|dx| result(like, dx)).into(),
        dw: MaybeTensor::from(dw),
    }
}

/// Converts indices to 32 bits for the kernels. Negative indices stay negative.
fn numbers(tensor: CubeTensor) -> CubeTensor {
    let tensor = match tensor.dtype {
        DType::I32 | DType::U32 => tensor,
        _ => CubeBackend::int_cast(tensor, IntDType::I32),
    };
    into_contiguous(tensor)
}
