//! Flex: the oracle's arithmetic on plain slices; GEMMs by Flex's own matmul.

use burn_core::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, Element as BurnElement, FloatDType, Shape, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::{self, Element};

use super::super::flex::tensors::{matrix, narrow, with_elements};
use super::super::trace_op;
use super::chunks;
use super::{
    CrossEntropy, KlDivergence, LinearKl, LinearLoss, LinearLossRequest, LossAndGradient, LossOps,
    TablePart,
};

impl LossOps for Flex {
    fn cross_entropy_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        let (_, vocab) = matrix(&logits);
        let targets = numbers(&targets);
        let scale = reference::target_scale(&targets, &params);
        let rows = with_elements!(logits, |values| {
            let mut values = values.to_vec();
            reference::cross_entropy_rows(&mut values, &targets, vocab, &params, None)
        });
        one(reference::sum_losses(&rows, scale))
    }

    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> LossAndGradient<Self> {
        fn found<T: Element + BurnElement + Default>(
            values: &[T],
            targets: &[i32],
            (rows, vocab): (usize, usize),
            params: &CrossEntropy,
        ) -> LossAndGradient<Flex> {
            let found = reference::cross_entropy(values, targets, vocab, params);
            let gradient = TensorData::new(found.gradient, [rows, vocab]);
            LossAndGradient {
                loss: one(found.loss),
                gradient: FlexTensor::from_data(gradient),
            }
        }
        let shape = matrix(&logits);
        trace_op("cross_entropy", "", shape.0, shape.1);
        let targets = numbers(&targets);
        with_elements!(logits, |values| found(values, &targets, shape, &params))
    }

    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        request: LinearLossRequest,
    ) -> LinearLoss<Self> {
        let (_, vocab) = matrix(&w);
        let counted = one(reference::target_scale(&numbers(&targets), &params));
        let row = (vocab * x.dtype().size()).max(1);
        let most = (request.chunk_bytes / row).max(128);
        chunks::linear_cross_entropy::<Self>(x, w, targets, params, request, (most, counted))
    }

    fn kl_divergence_gradient(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        params: KlDivergence,
    ) -> LossAndGradient<Self> {
        fn found<T: Element + BurnElement>(
            student: &[T],
            teacher: &FlexTensor,
            (targets, scale): (&[i32], f32),
            params: &KlDivergence,
        ) -> (f32, Vec<T>) {
            // Exact: the dtype is the same.
            let same = |value: f32| T::from_f32(value);
            let teacher = with_elements!(teacher, |values| {
                let values = values.iter().map(|x| same(Element::to_f32(*x)));
                values.collect::<Vec<T>>()
            });
            let mut gradient = student.to_vec();
            let scaled = Some(scale);
            let rows =
                reference::kl_divergence_rows(&mut gradient, &teacher, targets, params, scaled);
            (reference::sum_losses(&rows, scale), gradient)
        }
        let (rows, vocab) = matrix(&student);
        trace_op("kl_divergence", "", rows, vocab);
        let scale = with_elements!(scale, |values| Element::to_f32(values[0]));
        let given = (&numbers(&targets)[..], scale);
        with_elements!(student, |values| {
            let (loss, gradient) = found(values, &teacher, given, &params);
            LossAndGradient {
                loss: one(loss),
                gradient: FlexTensor::from_data(TensorData::new(gradient, [rows, vocab])),
            }
        })
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
        let (_, vocab) = matrix(&w);
        // Logits of both models.
        let row = (2 * vocab * x.dtype().size()).max(1);
        let most = (request.gradients.chunk_bytes / row).max(128);
        let (own, teacher) = ([x, w], [teacher_x, teacher_w]);
        chunks::linear_kl::<Self>(own, teacher, targets, scale, request, most)
    }

    fn scale_gradient(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
        fn scaled<T: Element + BurnElement>(values: &[T], shape: Shape, by: f32) -> FlexTensor {
            let scaled = values.iter().map(|x| T::from_f32(Element::to_f32(*x) * by));
            FlexTensor::from_data(TensorData::new(scaled.collect::<Vec<T>>(), shape))
        }
        let by = with_elements!(factor, |values| Element::to_f32(values[0]));
        if by == 1.0 {
            return x;
        }
        let shape = x.layout().shape().clone();
        with_elements!(x, |values| scaled(values, shape, by))
    }

    fn embedding_rows(
        table: FloatTensor<Self>,
        part: TablePart,
        ids: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (_, cols) = matrix(&table);
        let ids: Vec<u32> = numbers(&ids).into_iter().map(|id| id as u32).collect();
        let rows = with_elements!(table, |values| {
            let rows = reference::embedding(values, part, &ids, cols);
            rows.into_iter().map(Element::to_f32).collect::<Vec<f32>>()
        });
        let rows = FlexTensor::from_data(TensorData::new(rows, [ids.len(), cols]));
        narrow(rows, dtype)
    }

    fn embedding_gradient(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab: usize,
    ) -> FloatTensor<Self> {
        let (_, cols) = matrix(&dy);
        let ids: Vec<u32> = numbers(&ids).into_iter().map(|id| id as u32).collect();
        let sums = with_elements!(dy, |values| {
            reference::embedding_gradient(values, &ids, vocab, cols)
        });
        FlexTensor::from_data(TensorData::new(sums, [vocab, cols]))
    }
}

/// Creates a tensor of one `f32`.
fn one(value: f32) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(vec![value], [1]))
}

/// Converts indices to 32 bits; those that do not fit are no class of any vocabulary.
fn numbers(tensor: &FlexTensor) -> Vec<i32> {
    let tensor = tensor.to_contiguous();
    let narrow = |number: i64| i32::try_from(number).unwrap_or(i32::MAX);
    match tensor.dtype() {
        DType::I64 => tensor.storage::<i64>().iter().map(|n| narrow(*n)).collect(),
        DType::I32 => tensor.storage::<i32>().to_vec(),
        DType::U32 => tensor.storage::<u32>().iter().map(|n| *n as i32).collect(),
        DType::U8 => tensor
            .storage::<u8>()
            .iter()
            .map(|n| i32::from(*n))
            .collect(),
        other => panic!("element type {other:?}: expected I64, I32, U32 or U8"),
    }
}
