//! KL divergence of rows of logits to those of a teacher, and its gradient.
//!
//! Rows are split into blocks and lanes as in the [cross entropy](super::loss). A lane has a
//! running maximum and a sum for each of teacher and student, and the sum of the teacher's
//! exponentials times the differences of the logits, which is rescaled with the teacher's sum.

use rayon::prelude::*;

use super::loss::{BLOCK, Lane, cross_entropy_lanes, exponentials, ln, tree};
use super::{Element, exp_of_negative, simd::with_fma};

/// KL divergence of a student to its teacher, computed from their logits.
///
/// With `p = softmax(teacher / T)` and `q = softmax(student / T)`, the loss of a row is
/// `T² Σ p (ln p - ln q)`, and its gradient with respect to the student's logits is `T (q - p)`.
/// The factor `T²` keeps the magnitude of gradients when the temperature changes (Hinton et al.,
/// arXiv 1503.02531). A class whose teacher probability rounds to 0 adds nothing. A row whose
/// target is [`ignore`](Self::ignore) has a loss and a gradient of 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlDivergence {
    /// Target of rows that are ignored.
    pub ignore: i32,
    /// Temperature `T`.
    pub temperature: f32,
}

impl Default for KlDivergence {
    /// Returns a temperature of 1; targets of -100 are ignored.
    fn default() -> Self {
        Self {
            ignore: -100,
            temperature: 1.0,
        }
    }
}

impl KlDivergence {
    /// Checks the temperature.
    ///
    /// # Errors
    /// Returns an error unless the temperature is finite and positive.
    pub fn check(&self) -> Result<(), crate::Nvfp4Error> {
        let t = self.temperature;
        if t.is_finite() && t > 0.0 {
            return Ok(());
        }
        let allowed = "a finite number above 0";
        Err(crate::Nvfp4Error::value(
            "temperature",
            format!("{t}"),
            allowed,
        ))
    }
}

/// Computes the losses of the rows of `student`, not scaled. If `scale` is given, the student's
/// logits are replaced by their gradient times `scale`.
///
/// # Panics
/// Panics if a matrix does not have one element per target and class, or there are rows without a
/// class.
pub fn kl_divergence_rows<T: Element>(
    student: &mut [T],
    teacher: &[T],
    targets: &[i32],
    params: &KlDivergence,
    scale: Option<f32>,
) -> Vec<f32> {
    assert_eq!(
        student.len(),
        teacher.len(),
        "`student` and `teacher` must have as many elements"
    );
    if targets.is_empty() {
        return Vec::new();
    }
    let vocab = student.len() / targets.len();
    assert!(
        vocab > 0 && vocab * targets.len() == student.len(),
        "`student` must hold rows * vocab elements"
    );
    student
        .par_chunks_mut(vocab)
        .zip(teacher.par_chunks(vocab))
        .zip(targets)
        .map(|((row, teacher), target)| {
            if *target != params.ignore {
                return row_of(row, teacher, params.temperature, scale);
            }
            if scale.is_some() {
                row.fill(T::from_f32(0.0));
            }
            0.0
        })
        .collect()
}

with_fma!(
    fn row_of[T: Element](
        student: &mut [T],
        teacher: &[T],
        temperature: f32,
        scale: Option<f32>,
    ) -> f32 = row_of_body
);

#[inline(always)]
fn row_of_body<T: Element>(
    student: &mut [T],
    teacher: &[T],
    temperature: f32,
    scale: Option<f32>,
) -> f32 {
    let inverse = 1.0 / temperature;
    let (q, p) = fold_rows(student, teacher, inverse);
    let lse = |lane: Lane| lane.max + ln(lane.sum);
    let inverse_p = 1.0 / p.sum;
    let loss = (temperature * temperature) * p.total.mul_add(inverse_p, lse(q) - lse(p));
    if let Some(scale) = scale {
        let size = temperature * scale;
        let (of_q, of_p) = (size * (1.0 / q.sum), size * inverse_p);
        for (own, other) in student.iter_mut().zip(teacher) {
            let e_q = exp_of_negative(own.to_f32() * inverse - q.max);
            let e_p = exp_of_negative(other.to_f32() * inverse - p.max);
            *own = T::from_f32(e_q.mul_add(of_q, -(e_p * of_p)));
        }
    }
    loss
}

/// Returns student and teacher of a row; the teacher's total is the sum of its exponentials times
/// the differences of the logits.
#[inline(always)]
fn fold_rows<T: Element>(student: &[T], teacher: &[T], inverse: f32) -> (Lane, Lane) {
    let count = cross_entropy_lanes(student.len());
    let start = Lane {
        max: f32::MIN,
        sum: 0.0,
        total: 0.0,
    };
    let mut lanes = vec![(start, start); count];
    let blocks = student.chunks(BLOCK).zip(teacher.chunks(BLOCK));
    for (b, (own, other)) in blocks.enumerate() {
        let (q, p) = &mut lanes[b % count];
        let block = |x: &[T]| {
            let mut values = [f32::NEG_INFINITY; BLOCK];
            for (value, x) in values.iter_mut().zip(x) {
                *value = x.to_f32() * inverse;
            }
            values
        };
        let (own, other) = (block(own), block(other));
        let max = own.iter().fold(q.max, |max, value| max.max(*value));
        let sum = tree(&mut exponentials(own, max));
        q.sum = q.sum.mul_add(exp_of_negative(q.max - max), sum);
        q.max = max;
        let max = other.iter().fold(p.max, |max, value| max.max(*value));
        let kept = exp_of_negative(p.max - max);
        let mut terms = exponentials(other, max);
        let mut products = terms;
        for (product, (own, other)) in products.iter_mut().zip(own.iter().zip(&other)) {
            if *product != 0.0 {
                *product *= other - own;
            }
        }
        p.sum = p.sum.mul_add(kept, tree(&mut terms));
        p.total = p.total.mul_add(kept, tree(&mut products));
        p.max = max;
    }
    let [q, p] = [0, 1].map(|which| {
        let lanes = lanes.iter().map(|(q, p)| if which == 0 { *q } else { *p });
        lanes.collect::<Vec<Lane>>()
    });
    (combined(&q), combined(&p))
}

/// Combines the lanes of a row.
#[inline(always)]
fn combined(lanes: &[Lane]) -> Lane {
    let max = lanes.iter().fold(f32::MIN, |max, lane| max.max(lane.max));
    let (mut sums, mut totals) = (vec![0f32; lanes.len()], vec![0f32; lanes.len()]);
    for ((sum, total), lane) in sums.iter_mut().zip(&mut totals).zip(lanes) {
        let factor = exp_of_negative(lane.max - max);
        *sum = lane.sum * factor;
        *total = lane.total * factor;
    }
    Lane {
        max,
        sum: tree(&mut sums),
        total: tree(&mut totals),
    }
}
