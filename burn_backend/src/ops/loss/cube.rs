//! Cube: launches of the CubeCL kernels. Runs on the fusion server's thread where fusion is on.

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

use super::super::cube::tensors::{
    Source, float_kind, launched, matrix, new_tensor, owned, result,
};
use super::super::{MaybeTensor, float_dtype, trace_op};
use super::chunks;
use super::{CrossEntropy, LinearLoss, LinearLossRequest, LossAndGradient, LossOps, TablePart};

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
        let (rows, d) = x.shape();
        trace_op("linear_cross_entropy", "", rows, vocab);
        let found = launched(loss::linear_cross_entropy(
            &client,
            &x.matrix,
            &w.matrix,
            &targets.handle,
            &params,
            loss::LinearLossRequest {
                x: request.x,
                w: request.w,
                chunk_bytes: request.chunk_bytes,
            },
        ));
        let like = &x.tensor;
        let dw = found.dw.map(|dw| {
            let dw = new_tensor(like, dw.handle, Shape::new([d, vocab]), DType::F32);
            cast(dw, w_dtype)
        });
        LinearLoss {
            loss: new_tensor(like, found.loss, Shape::new([1]), DType::F32),
            dx: found.dx.map(|dx| result(like, dx)).into(),
            dw: MaybeTensor::from(dw),
        }
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

/// Numbers as the kernels take them: of 32 bits. A negative one stays what it is.
fn numbers(tensor: CubeTensor) -> CubeTensor {
    let tensor = match tensor.dtype {
        DType::I32 | DType::U32 => tensor,
        _ => CubeBackend::int_cast(tensor, IntDType::I32),
    };
    into_contiguous(tensor)
}
