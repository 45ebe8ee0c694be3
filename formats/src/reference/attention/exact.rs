//! Attention in `f64`, and error bounds for kernels.
//!
//! Let `u` be the rounding unit of the operands' type, `g(n) = n 2⁻²²` for a sum of `n` terms, `s`
//! scaled scores, `m` the largest of a row, `P` weights, `|·|` element by element:
//!
//! - of a score: `λ = g(head) scale |q||k| + 2⁻²² (|s| + |m|)`; with a soft cap, `c 2⁻²⁰` more
//! - of a weight, relative: `ρ = λ + 2⁻²¹`, the largest of a row
//! - `|dO| <= (u + 2ρ + g) P|V| + u|O|` and `|dLSE| <= max λ + 2⁻²¹ (1 + |LSE|) + g`
//! - in the backward `ρ' = ρ + dLSE`, and the error of the gradient of a score is at most
//!   `E = P (ρ' |dP - Δ| + g |dO||V| + Σ |dO| (|O_err| + g |O|))`
//! - `|dV_err| <= (u + ρ' + g) Pᵀ|dO| + u|dV|`
//! - `|dQ_err| <= scale (E + (u + g) |dS|) |K| + u|dQ|`, and `dK` with `Eᵀ` and `|Q|`
//!
//! Kernels may round `P` and `dS` to the type of the operands before the second GEMM. In addition,
//! a weight, a gradient and an output may be wrong by half a step of the type's smallest numbers.

use rayon::prelude::*;

use super::{AttentionShape, HostHeads};
use crate::reference::Element;

/// Values, and the largest permitted error of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Bounded {
    /// Values in `f64`.
    pub value: Vec<f64>,
    /// Error bounds.
    pub error: Vec<f64>,
}

impl Bounded {
    fn zeros(len: usize) -> Self {
        Self {
            value: vec![0.0; len],
            error: vec![0.0; len],
        }
    }

    /// Returns the largest ratio of an error to its bound, and its index; `None` if nothing
    /// differs. If the value is not finite, `found` must be equal, or both NaN.
    pub fn worst(&self, found: impl IntoIterator<Item = f64>) -> Option<(usize, f64)> {
        let pairs = self.value.iter().zip(&self.error).zip(found).enumerate();
        pairs
            .filter_map(|(i, ((&value, &error), found))| {
                if value == found || value.is_nan() && found.is_nan() {
                    return None;
                }
                let distance = (found - value).abs();
                let ratio = match distance.is_finite() && error > 0.0 {
                    true => distance / error,
                    false => f64::INFINITY,
                };
                Some((i, ratio))
            })
            .max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Attention and its gradients, in `f64`, for operands that were rounded to their type.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionF64 {
    /// Output `[q_tokens, heads, head]`.
    pub out: Bounded,
    /// Log-sum-exp `[heads, q_tokens]`.
    pub lse: Bounded,
    /// Gradient of `q`, `[q_tokens, heads, head]`.
    pub dq: Bounded,
    /// Gradient of `k`, `[k_tokens, kv_heads, head]`.
    pub dk: Bounded,
    /// Gradient of `v`, `[k_tokens, kv_heads, head]`.
    pub dv: Bounded,
}

/// Rounding errors of an element type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Precision {
    /// Largest relative error.
    pub unit: f64,
    /// Largest error of the smallest numbers, including numbers that become 0 in `f32`.
    pub smallest: f64,
}

impl Precision {
    /// binary32.
    pub const F32: Self = Self {
        unit: 1.0 / (1u64 << 24) as f64,
        smallest: f32::MIN_POSITIVE as f64,
    };
    /// bfloat16.
    pub const BF16: Self = Self {
        unit: 1.0 / 256.0,
        smallest: f32::MIN_POSITIVE as f64,
    };
    /// binary16.
    pub const F16: Self = Self {
        unit: 1.0 / 2048.0,
        smallest: 1.0 / (1u64 << 25) as f64,
    };
}

/// Sums for one head of keys and values, `[k_tokens, head]`.
struct KeyGradients {
    dk: Bounded,
    dv: Bounded,
    /// Results of the heads of queries that read it.
    rows: Vec<RowResults>,
}

/// Results of one head of queries, `[q_tokens, head]`.
struct RowResults {
    out: Bounded,
    lse: Bounded,
    dq: Bounded,
}

/// Computes attention, and its gradients for the gradient `dout` of the output, for operands of a
/// type that rounds with `precision`.
///
/// # Panics
/// Panics if an operand does not contain its heads.
pub fn attention_f64<T: Element>(
    (q, k, v): (HostHeads<'_, T>, HostHeads<'_, T>, HostHeads<'_, T>),
    dout: HostHeads<'_, T>,
    shape: &AttentionShape<'_>,
    precision: Precision,
) -> AttentionF64 {
    let operands = Operands { q, k, v, dout };
    let found: Vec<KeyGradients> = (0..shape.kv_heads)
        .into_par_iter()
        .map(|kv| operands.of_key_head(kv, shape, precision))
        .collect();
    let keys = |of: fn(&KeyGradients) -> &Bounded| {
        let heads: Vec<&Bounded> = found.iter().map(of).collect();
        interleave(&heads, shape.k_tokens, shape.head)
    };
    let queries: Vec<&RowResults> = found.iter().flat_map(|found| &found.rows).collect();
    let rows = |of: fn(&RowResults) -> &Bounded| {
        let heads: Vec<&Bounded> = queries.iter().map(|row| of(row)).collect();
        interleave(&heads, shape.q_tokens, shape.head)
    };
    let concat = |of: fn(&Bounded) -> &Vec<f64>| {
        let heads = queries.iter().flat_map(|row| of(&row.lse));
        heads.copied().collect()
    };
    AttentionF64 {
        out: rows(|row| &row.out),
        dq: rows(|row| &row.dq),
        lse: Bounded {
            value: concat(|lse| &lse.value),
            error: concat(|lse| &lse.error),
        },
        dk: keys(|found| &found.dk),
        dv: keys(|found| &found.dv),
    }
}

fn interleave(heads: &[&Bounded], tokens: usize, head: usize) -> Bounded {
    let side = |of: fn(&Bounded) -> &Vec<f64>| {
        let rows = (0..tokens).flat_map(|token| heads.iter().map(move |heads| (token, *heads)));
        rows.flat_map(|(token, heads)| of(heads)[token * head..][..head].to_vec())
            .collect()
    };
    Bounded {
        value: side(|heads| &heads.value),
        error: side(|heads| &heads.error),
    }
}

struct Operands<'a, T> {
    q: HostHeads<'a, T>,
    k: HostHeads<'a, T>,
    v: HostHeads<'a, T>,
    dout: HostHeads<'a, T>,
}

/// One visible key of a row.
struct Score {
    key: usize,
    s: f64,
    /// Derivative of the soft cap.
    slope: f64,
    lambda: f64,
    weight: f64,
}

fn wide<T: Element>(heads: &HostHeads<'_, T>, tokens: usize, h: usize, head: usize) -> Vec<f64> {
    (0..tokens)
        .flat_map(|token| heads.head(token, h, head).iter().map(|x| x.to_f32() as f64))
        .collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn absolute_dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

/// Adds `factor · row`, and `error · |row|` to the bound.
fn add(to: &mut Bounded, at: usize, row: &[f64], factor: f64, error: f64) {
    let values = to.value[at..].iter_mut().zip(&mut to.error[at..]);
    for ((value, bound), x) in values.zip(row) {
        *value += factor * x;
        *bound += error * x.abs();
    }
}

impl<T: Element> Operands<'_, T> {
    fn of_key_head(
        &self,
        kv: usize,
        shape: &AttentionShape<'_>,
        precision: Precision,
    ) -> KeyGradients {
        let (head, group) = (shape.head, shape.group());
        let k = wide(&self.k, shape.k_tokens, kv, head);
        let v = wide(&self.v, shape.k_tokens, kv, head);
        let mut found = KeyGradients {
            dk: Bounded::zeros(k.len()),
            dv: Bounded::zeros(v.len()),
            rows: Vec::new(),
        };
        for h in kv * group..(kv + 1) * group {
            let q = wide(&self.q, shape.q_tokens, h, head);
            let dout = wide(&self.dout, shape.q_tokens, h, head);
            let mut rows = RowResults {
                out: Bounded::zeros(q.len()),
                lse: Bounded {
                    value: vec![f64::NEG_INFINITY; shape.q_tokens],
                    error: vec![0.0; shape.q_tokens],
                },
                dq: Bounded::zeros(q.len()),
            };
            for (q_range, k_range) in shape.sequences() {
                for (i, query) in q_range.clone().enumerate() {
                    let visible = shape.params.visible(i, q_range.len(), k_range.len());
                    let keys = visible.map(|j| k_range.start + j);
                    let row = Row {
                        query,
                        q: &q[query * head..][..head],
                        dout: &dout[query * head..][..head],
                        k: &k,
                        v: &v,
                        precision,
                        // Sums over queries have at most this many terms.
                        queries: (q_range.len() * group) as f64,
                    };
                    row.add(keys, shape, &mut rows, &mut found);
                }
            }
            found.rows.push(rows);
        }
        for gradient in [&mut found.dk, &mut found.dv] {
            for (value, error) in gradient.value.iter().zip(&mut gradient.error) {
                *error += precision.unit * value.abs() + precision.smallest;
            }
        }
        found
    }
}

/// One query of one head, and its inputs.
struct Row<'a> {
    query: usize,
    q: &'a [f64],
    dout: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    precision: Precision,
    queries: f64,
}

impl Row<'_> {
    fn scores(&self, keys: impl Iterator<Item = usize>, shape: &AttentionShape<'_>) -> Vec<Score> {
        let (params, head) = (&shape.params, shape.head);
        let scale = params.scale as f64;
        let sum_error = head as f64 * 2f64.powi(-22);
        keys.map(|key| {
            let k = &self.k[key * head..][..head];
            let scaled = dot(self.q, k) * scale;
            let mut lambda = sum_error * scale.abs() * absolute_dot(self.q, k);
            let (s, slope) = match params.softcap {
                None => (scaled, 1.0),
                Some(cap) => {
                    let cap = cap as f64;
                    lambda += cap * 2f64.powi(-20);
                    let t = (scaled / cap).tanh();
                    (cap * t, 1.0 - t * t)
                }
            };
            Score {
                key,
                s,
                slope,
                lambda,
                weight: 0.0,
            }
        })
        .collect()
    }

    fn add(
        &self,
        keys: impl Iterator<Item = usize>,
        shape: &AttentionShape<'_>,
        rows: &mut RowResults,
        found: &mut KeyGradients,
    ) {
        let (params, head) = (&shape.params, shape.head);
        let Precision { unit: u, smallest } = self.precision;
        let mut scores = self.scores(keys, shape);
        if scores.is_empty() {
            if params.quiet_softmax {
                rows.lse.value[self.query] = 0.0;
            }
            return;
        }
        // Scores in the sum: a quiet softmax has an additional one, 0.
        let quiet = params.quiet_softmax.then_some(0.0);
        let m = (scores.iter().map(|score| score.s))
            .chain(quiet)
            .fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = (scores.iter().map(|score| score.s))
            .chain(quiet)
            .map(|s| (s - m).exp())
            .sum();
        let mut lambda: f64 = 0.0;
        for score in &mut scores {
            score.weight = (score.s - m).exp() / sum;
            score.lambda += 2f64.powi(-22) * (score.s.abs() + m.abs());
            lambda = lambda.max(score.lambda);
        }
        let g = scores.len() as f64 * 2f64.powi(-22);
        let rho = lambda + 2f64.powi(-21);
        let lse = m + sum.ln();
        let lse_error = lambda + 2f64.powi(-21) * (1.0 + lse.abs()) + g;
        rows.lse.value[self.query] = lse;
        rows.lse.error[self.query] = lse_error;
        let at = self.query * head;
        for score in &scores {
            let v = &self.v[score.key * head..][..head];
            let error = (u + 2.0 * rho + g) * score.weight + smallest;
            add(&mut rows.out, at, v, score.weight, error);
        }
        let mut delta = 0.0;
        let mut delta_error = 0.0;
        for (d, dout) in self.dout.iter().enumerate() {
            let out = rows.out.value[at + d];
            rows.out.error[at + d] += u * out.abs() + smallest;
            delta += dout * out;
            delta_error +=
                dout.abs() * (rows.out.error[at + d] + head as f64 * 2f64.powi(-22) * out.abs());
        }
        let scale = params.scale as f64;
        let rho = rho + lse_error;
        let queries = self.queries * 2f64.powi(-22);
        for score in &scores {
            let (k, v) = (
                &self.k[score.key * head..][..head],
                &self.v[score.key * head..][..head],
            );
            let by_weight = dot(self.dout, v);
            let sum_error = head as f64 * 2f64.powi(-22) * absolute_dot(self.dout, v);
            let mut error =
                score.weight * (rho * (by_weight - delta).abs() + sum_error + delta_error);
            let mut by_score = score.weight * (by_weight - delta);
            if let Some(cap) = params.softcap {
                let slope_error = 2.0 * score.lambda / cap as f64 + 2f64.powi(-20);
                error = error * score.slope + by_score.abs() * slope_error;
                by_score *= score.slope;
            }
            let by_query = scale.abs() * (error + (u + g) * by_score.abs() + smallest);
            add(&mut rows.dq, at, k, scale * by_score, by_query);
            let by_key = scale.abs() * (error + (u + queries) * by_score.abs() + smallest);
            let to = score.key * head;
            add(&mut found.dk, to, self.q, scale * by_score, by_key);
            let by_value = (u + rho + queries) * score.weight + smallest;
            add(&mut found.dv, to, self.dout, score.weight, by_value);
        }
        for d in at..at + head {
            rows.dq.error[d] += u * rows.dq.value[d].abs() + smallest;
        }
    }
}
