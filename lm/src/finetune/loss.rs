//! Loss of rows, and of the validation rows.

use anyhow::Result;
use burn::tensor::{Device, Int, Tensor};
use burn_nvfp4::loss::{CrossEntropy, Head, Reduction};
use burn_nvfp4::parallel::ProcessGroup;

use super::step::DeviceBatch;
use crate::decoder::{Decoder, PackedRows};
use crate::progress::{Unit, Work};
use crate::ranks::in_turns;
use crate::tokens::{RowBatch, Rows};

/// Sum over the targets that count.
pub(super) const SUM: CrossEntropy = CrossEntropy {
    ignore: -100,
    smoothing: 0.0,
    z_loss: 0.0,
    reduction: Reduction::Sum,
};

/// Returns the mean cross entropy of `model` on the first rows of `rows`, given the batch size and
/// the number of evaluation rows. The ranks of `world`, which all call this function, take the
/// batches round-robin.
pub(super) fn cross_entropy_of(
    model: &Decoder,
    rows: &Rows,
    [batch, most]: [usize; 2],
    device: &Device,
    world: &ProcessGroup,
) -> Result<f64> {
    let indices: Vec<usize> = (0..rows.len().min(most)).collect();
    let batches = indices.chunks(batch).map(|indices| rows.batch(indices));
    let batches: Vec<RowBatch> = batches.collect::<Result<_>>()?;
    let counted: usize = batches.iter().map(RowBatch::counted).sum();
    // All ranks run the same number of forward passes, as sharded models require; surplus passes
    // are not counted.
    let (rank, size) = (world.rank(), world.size());
    let rows_of_round = size * batch;
    let mut work = Work::begin("evaluate", Unit::Sequences, 0, indices.len());
    let sum_of = |round: usize| {
        let batch = &batches[(round * size + rank).min(batches.len() - 1)];
        let (inputs, targets, packed): (Tensor<2, Int>, _, PackedRows) = batch.tensors(device)?;
        let features = flat(model.features_packed(inputs, &packed)?);
        let sum = model.cross_entropy(features, targets, SUM)?;
        work.add(rows_of_round);
        anyhow::Ok(sum)
    };
    let sums = (0..batches.len().div_ceil(size)).map(sum_of);
    let sums = Tensor::cat(sums.collect::<Result<_>>()?, 0).into_data();
    let sums: Vec<f32> = sums.iter::<f32>().collect();
    let sums = in_turns(world, &sums, batches.len())?;
    Ok(sums.into_iter().map(f64::from).sum::<f64>() / counted as f64)
}

/// Returns the features and head of a teacher, as constants to autodiff.
pub(super) fn head(teacher: &Decoder, batch: &DeviceBatch) -> Result<Head> {
    let inputs = batch.inputs.clone().without_autodiff();
    let rows = batch.rows.without_autodiff();
    let features = flat(teacher.features_packed(inputs, &rows)?);
    Ok(Head {
        features: Tensor::from_inner(features),
        weight: Tensor::from_inner(teacher.head_weight()),
    })
}

/// Flattens the features of sequences to rows.
pub(super) fn flat(features: Tensor<3>) -> Tensor<2> {
    let [batch, time, width] = features.dims();
    features.reshape([batch * time, width])
}
