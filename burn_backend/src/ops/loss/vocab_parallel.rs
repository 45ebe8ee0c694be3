//! Cross entropy of an output head with a sharded vocabulary, in chunks of tokens.

use burn_core::backend::Dispatch;
use burn_core::tensor::{FloatDType, IndexingUpdateOp, Int, Slice, Tensor};
use nvfp4_formats::CrossEntropy;
use nvfp4_parallel::Reduction;

use super::chunks::{ChunkedHead, HeadSums};
use super::{LinearLossRequest, LossOps};
use crate::parallel::ProcessGroup;

/// Targets of tokens, on one rank.
pub(crate) struct VocabTargets {
    /// Column of each target on this rank, or -1 if another rank has it.
    pub own: Tensor<1, Int>,
    /// Factor of each token's loss: 0 if the token is ignored.
    pub weights: Tensor<1>,
}

/// Parameters of the loss, and its ranks.
pub(crate) struct VocabLoss<'a> {
    pub params: CrossEntropy,
    /// Ranks that the vocabulary is sharded over equally.
    pub group: &'a ProcessGroup,
    /// Maximum bytes of logits per chunk of tokens on this rank.
    pub chunk_bytes: usize,
}

/// Computes the loss, `f32[1]` and the same on all ranks, of the logits of `x` (`[tokens, d]`, the
/// same on all ranks) and `w` (`[d, vocab / ranks]`), differentiable by both. Gradients are
/// computed in the forward: that of `x` is this rank's summand of a sum over the ranks.
///
/// For each chunk, ranks exchange the maximum logit per token, and then sums over the classes.
pub(crate) fn vocab_parallel_cross_entropy(
    [x, w]: [Tensor<2>; 2],
    targets: VocabTargets,
    of: VocabLoss<'_>,
) -> Tensor<1> {
    let request = LinearLossRequest {
        x: x.is_tracked(),
        w: w.is_tracked(),
        chunk_bytes: of.chunk_bytes,
    };
    let ([tokens, _], [_, cols]) = (x.dims(), w.dims());
    let [inner_x, inner_w] = [&x, &w].map(|it| it.clone().without_autodiff().into_dispatch());
    let head = ChunkedHead::<Dispatch>::new(inner_x, inner_w, request);
    let mut found = HeadSums::default();
    // Logits in their own dtype, and `f32` logits, exponentials and gradients.
    let most = (of.chunk_bytes / (16 * cols)).max(128);
    for start in (0..tokens).step_by(most) {
        let rows = start..tokens.min(start + most);
        let (part, logits) = head.logits(Slice::from(rows.clone()));
        let targets = VocabTargets {
            own: targets.own.clone().slice(rows.clone()),
            weights: targets.weights.clone().slice(rows),
        };
        let logits = Tensor::<2>::from_dispatch(logits).cast(FloatDType::F32);
        let (loss, gradient) = of.chunk(logits, targets);
        let gradient = (request.x || request.w).then(|| {
            let gradient = gradient().cast(head.dtype());
            (part, gradient.into_dispatch())
        });
        found.add(&head, loss.into_dispatch(), gradient);
    }
    let found = found.of(&head);
    let lifted = |it| Tensor::<2>::from_inner(Tensor::from_dispatch(it)).into_dispatch();
    if !(request.x || request.w) {
        return Tensor::from_dispatch(found.loss);
    }
    let loss = Tensor::<1>::from_inner(Tensor::from_dispatch(found.loss));
    let [dx, dw] = [found.dx, found.dw].map(|it| it.into_option().map(lifted).into());
    Tensor::from_dispatch(Dispatch::loss_with_gradients(
        x.into_dispatch(),
        w.into_dispatch(),
        loss.into_dispatch(),
        dx,
        dw,
    ))
}

impl VocabLoss<'_> {
    /// Computes the sum of the losses of a chunk, `f32[1]`, and, if requested, its gradient by the
    /// rank's `logits` (`f32[rows, vocab / ranks]`).
    ///
    /// With `p = exp(l - lse)`, smoothing `s`, `z` of the z-loss, `V` classes and the token's
    /// weight `c`, the gradient is `c (p (1 + 2 z lse) - (1 - s) onehot - s / V)`.
    fn chunk(
        &self,
        logits: Tensor<2>,
        targets: VocabTargets,
    ) -> (Tensor<1>, impl FnOnce() -> Tensor<2>) {
        let CrossEntropy {
            smoothing, z_loss, ..
        } = self.params;
        let [rows, cols] = logits.dims();
        let classes = (cols * self.group.size()) as f32;
        let weights = targets.weights.reshape([rows, 1]);
        let largest = self
            .group
            .all_reduce(logits.clone().max_dim(1), Reduction::Max);
        let exponentials = (logits.clone() - largest.clone()).exp();
        // The logit of the target is on one rank; the others add zeros.
        let absent = targets.own.clone().equal_elem(-1).reshape([rows, 1]);
        let place = targets.own.reshape([rows, 1]).mask_fill(absent.clone(), 0);
        let of_target = logits.clone().gather(1, place.clone());
        let of_target = of_target.mask_fill(absent.clone(), 0);
        let mut sums = vec![exponentials.clone().sum_dim(1), of_target];
        if smoothing > 0.0 {
            sums.push(logits.sum_dim(1));
        }
        let sums = self.group.all_reduce(Tensor::cat(sums, 1), Reduction::Sum);
        let sum = |at: usize| sums.clone().narrow(1, at, 1);
        let lse = sum(0).log() + largest;
        let mut losses = (lse.clone() - sum(1)).mul_scalar(1.0 - smoothing);
        if smoothing > 0.0 {
            let mean = sum(2).div_scalar(classes);
            losses = losses + (lse.clone() - mean).mul_scalar(smoothing);
        }
        if z_loss > 0.0 {
            losses = losses + lse.clone().square().mul_scalar(z_loss);
        }
        let loss = (losses * weights.clone()).sum();
        let of_sum = sum(0);
        let gradient = move || {
            let mut factor = weights.clone() / of_sum;
            if z_loss > 0.0 {
                factor = factor * lse.mul_scalar(2.0 * z_loss).add_scalar(1.0);
            }
            let mut gradient = exponentials * factor;
            if smoothing > 0.0 {
                gradient = gradient - weights.clone().mul_scalar(smoothing / classes);
            }
            let of_target = weights.mul_scalar(smoothing - 1.0).mask_fill(absent, 0);
            gradient.scatter(1, place, of_target, IndexingUpdateOp::Add)
        };
        (loss, gradient)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use burn_core::tensor::{DType, Device, Distribution, TensorData};

    use super::*;
    use crate::loss::linear_cross_entropy;
    use crate::ops::context::tests::device;

    fn values<const D: usize>(x: Tensor<D>) -> Vec<f32> {
        x.into_data().try_to_vec().unwrap()
    }

    fn ids(ids: Vec<i32>, device: &Device) -> Tensor<1, Int> {
        let len = ids.len();
        Tensor::from_data(TensorData::new(ids, [len]), (device, DType::I32))
    }

    /// Returns the maximum difference relative to the maximum magnitude.
    fn distance(found: &[f32], expected: &[f32]) -> f32 {
        assert_eq!(found.len(), expected.len());
        let scale = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        errors.fold(0f32, f32::max) / scale
    }

    /// Three chunks, the last one partial: loss and gradients equal those of one device.
    #[test]
    fn chunks_are_those_of_one_device() {
        let (tokens, width, vocab, ranks) = (300, 32, 64, 2);
        let (plain, ..) = device();
        let device = plain.clone().autodiff();
        let normal = Distribution::Normal(0.0, 1.0);
        let random = |shape: [usize; 2]| Tensor::<2>::random(shape, normal, &plain);
        let (x, w) = (random([tokens, width]), random([width, vocab]));
        let targets: Vec<i32> = (0..tokens).map(|i| (i * 37 % vocab) as i32).collect();
        let params = CrossEntropy {
            smoothing: 0.1,
            z_loss: 1e-2,
            ..CrossEntropy::default()
        };
        let leaf = |it: &Tensor<2>| Tensor::<2>::from_inner(it.clone()).require_grad();
        let (own_x, own_w) = (leaf(&x), leaf(&w));
        let all = ids(targets.clone(), &device);
        let loss = linear_cross_entropy(own_x.clone(), own_w.clone(), all, params);
        let gradients = loss.clone().backward();
        let expected = [
            values(loss),
            values(own_x.grad(&gradients).unwrap()),
            values(own_w.grad(&gradients).unwrap()),
        ];
        let cols = vocab / ranks;
        let found: Vec<[Vec<f32>; 3]> = thread::scope(|scope| {
            let groups = ProcessGroup::loopback(ranks, Duration::from_secs(60));
            let threads = groups.into_iter().map(|group| {
                let (x, w) = (
                    leaf(&x),
                    leaf(&w.clone().narrow(1, group.rank() * cols, cols)),
                );
                let own = targets.iter().map(|target| {
                    let column = target - (group.rank() * cols) as i32;
                    if (0..cols as i32).contains(&column) {
                        column
                    } else {
                        -1
                    }
                });
                let targets = VocabTargets {
                    own: ids(own.collect(), &plain),
                    weights: Tensor::<1>::full([tokens], 1.0 / tokens as f32, &plain),
                };
                scope.spawn(move || {
                    let of = VocabLoss {
                        params,
                        group: &group,
                        chunk_bytes: 1,
                    };
                    let operands = [x.clone(), w.clone()];
                    let loss = vocab_parallel_cross_entropy(operands, targets, of);
                    // The upstream gradient scales both.
                    let gradients = loss.clone().mul_scalar(3.0).backward();
                    let of = |it: Tensor<2>| values(it.grad(&gradients).unwrap().div_scalar(3.0));
                    [values(loss), of(x), of(w)]
                })
            });
            let threads: Vec<_> = threads.collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let mut dx = found[0][1].clone();
        dx.iter_mut()
            .zip(&found[1][1])
            .for_each(|(sum, more)| *sum += more);
        assert!(distance(&dx, &expected[1]) < 2e-6);
        for (rank, [loss, _, dw]) in found.iter().enumerate() {
            assert!(distance(loss, &expected[0]) < 1e-6);
            let own = expected[2].chunks(vocab);
            let own: Vec<f32> = own
                .flat_map(|row| row[rank * cols..][..cols].to_vec())
                .collect();
            assert!(distance(dw, &own) < 2e-6);
        }
    }
}
