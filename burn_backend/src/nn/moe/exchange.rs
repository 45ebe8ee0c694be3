//! All-to-all exchange of tokens with the ranks that hold their experts.
//!
//! Each rank sorts its choices by expert, so that the rows for a rank are contiguous. They arrive
//! as `[source rank][expert][token]`. The experts take them as `[expert][source rank][token]`: the
//! order in which a single rank with the tokens of all ranks, in rank order, sorts them. Each
//! expert therefore sees the same matrix as on a single rank: amax values, blocks along the tokens
//! and sums over tokens are the same.

use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use nvfp4_formats::Nvfp4Error;

use crate::experts::{ExpertOffsets, moe_permute, permute_to_experts};
use crate::ops::layers::OutputAmax;
use crate::parallel::functions::Steps;
use crate::parallel::{Pending, ProcessGroup};

/// Send and receive counts of the exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Plan {
    /// Rows to send to each rank.
    send: Vec<usize>,
    /// Rows to receive from each rank.
    receive: Vec<usize>,
    /// Rows of each expert of this rank, from each rank.
    held: Vec<Vec<usize>>,
}

/// Permutation of the received rows.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Order {
    /// Received row at each position in expert order.
    rows: Vec<i32>,
    /// Position in expert order of each received row.
    places: Vec<i32>,
}

/// Number of choices that go to the experts of rank `of`, given the `counts` of one rank.
fn sent(counts: &[usize], of: usize, size: usize) -> usize {
    let held = counts.len() / size;
    counts[of * held..][..held].iter().sum()
}

impl Plan {
    /// Computes the plan of rank `rank` from the choices per expert on each rank: `counts` is
    /// `size` rows, each with a multiple of `size` experts.
    ///
    /// # Errors
    /// Returns an error on all ranks if one of them would receive 2^31 rows or more.
    fn try_new(counts: &[usize], rank: usize, size: usize) -> Result<Self, Nvfp4Error> {
        let experts = counts.len() / size;
        let sources: Vec<&[usize]> = counts.chunks_exact(experts).collect();
        for to in 0..size {
            let rows: usize = sources.iter().map(|from| sent(from, to, size)).sum();
            if i32::try_from(rows).is_err() {
                return Err(Nvfp4Error::shape(
                    "x",
                    format!("{rows} choices of the experts of rank {to}"),
                    "fewer than 2^31",
                ));
            }
        }
        let held = experts / size;
        let own = rank * held..(rank + 1) * held;
        let of_expert = |expert| sources.iter().map(|source| source[expert]).collect();
        Ok(Self {
            send: (0..size).map(|to| sent(sources[rank], to, size)).collect(),
            receive: sources.iter().map(|from| sent(from, rank, size)).collect(),
            held: own.map(of_expert).collect(),
        })
    }

    /// Rows of each expert of this rank, from all ranks.
    fn rows_of_experts(&self) -> Vec<usize> {
        self.held.iter().map(|from| from.iter().sum()).collect()
    }

    /// Computes the permutation of the rows that this rank receives.
    fn order(&self) -> Order {
        let ranks = self.receive.len();
        // Index of the first received row of each expert of each source.
        let mut starts = vec![vec![0; ranks]; self.held.len()];
        let mut next = 0;
        for source in 0..ranks {
            for (starts, from) in starts.iter_mut().zip(&self.held) {
                starts[source] = next;
                next += from[source];
            }
        }
        let mut rows = Vec::with_capacity(next);
        for (starts, from) in starts.iter().zip(&self.held) {
            for (&start, &count) in starts.iter().zip(from) {
                rows.extend((start..start + count).map(|row| row as i32));
            }
        }
        let mut places = vec![0; rows.len()];
        for (place, &row) in rows.iter().enumerate() {
            places[row as usize] = place as i32;
        }
        Order { rows, places }
    }
}

/// Exchange of the choices of one forward.
#[derive(Debug)]
pub(super) struct ExpertExchange {
    group: ProcessGroup,
    plan: Plan,
    /// Number of choices of each expert on all ranks.
    totals: Vec<usize>,
}

/// Order of the rows that arrived at this rank's experts.
#[derive(Debug)]
pub(super) struct Arrived {
    /// Experts of this rank, with the offsets of their tokens.
    pub experts: ExpertOffsets,
    /// [`Order::rows`] and [`Order::places`].
    rows: Tensor<1, Int>,
    places: Tensor<1, Int>,
}

impl ExpertExchange {
    /// Creates the exchange for tokens that chose experts `counts` (`[experts]`, a multiple of the
    /// number of ranks) times each. All ranks call it together. The host waits for the counts of
    /// all ranks, because the shapes of what it receives depend on them.
    ///
    /// # Errors
    /// Returns an error on all ranks if one of them would receive 2^31 rows or more.
    pub fn try_new(counts: &Tensor<1, Int>, group: &ProcessGroup) -> Result<Self, Nvfp4Error> {
        let [experts] = counts.dims();
        let all = gather_counts(counts, group);
        let plan = Plan::try_new(&all, group.rank(), group.size())?;
        Ok(Self {
            group: group.clone(),
            totals: total_counts(&all, experts),
            plan,
        })
    }

    /// Token counts of the experts of earlier ranks.
    pub fn earlier(&self) -> &[usize] {
        &self.totals[..self.group.rank() * self.plan.held.len()]
    }

    /// Number of choices of each expert on all ranks.
    pub fn totals(&self) -> &[usize] {
        &self.totals
    }

    /// Sends this rank's tokens, in expert order, and returns those of this rank's experts from all
    /// ranks, in expert order, for which it computes the `amax` values. With `logits`, exchanges
    /// overlap: that of the gradient with the backward of the router, which computed these logits.
    /// Differentiable.
    ///
    /// The exchange is queued first: the device was idle while the host waited for the counts, and
    /// the host computes the receive order during the exchange.
    pub fn dispatch(
        &self,
        (sorted, amax): (Tensor<2>, Option<OutputAmax>),
        logits: Option<&Tensor<2>>,
    ) -> (Tensor<2>, Arrived) {
        let Plan { send, receive, .. } = &self.plan;
        let device = sorted.device();
        let steps = Steps::all_to_all(send, receive);
        let received = Pending::begin(sorted, steps, &self.group, logits.is_some());
        let Order { rows, places } = self.plan.order();
        let (rows, places) = (ints(&rows, &device), ints(&places, &device));
        let received = received.end(logits);
        let experts = ExpertOffsets::of_counts(&self.plan.rows_of_experts(), &device);
        let tokens = match self.is_in_order() {
            true => received,
            false => {
                let places = (rows.clone(), column(&places));
                permute_to_experts(received, places, &experts, amax)
            }
        };
        let arrived = Arrived {
            experts,
            rows,
            places,
        };
        (tokens, arrived)
    }

    /// Inverse of [`dispatch`](Self::dispatch), for the results of the rows that `arrived`. If
    /// `overlaps`, the exchange runs concurrently with kernels. Differentiable.
    pub fn combine(&self, results: Tensor<2>, arrived: &Arrived, overlaps: bool) -> Pending {
        let Plan { send, receive, .. } = &self.plan;
        let results = match self.is_in_order() {
            true => results,
            false => moe_permute(results, arrived.places.clone(), column(&arrived.rows)),
        };
        let steps = Steps::all_to_all(receive, send);
        Pending::begin(results, steps, &self.group, overlaps)
    }

    /// Returns true if rows arrive in expert order. The permutation is skipped only for a single
    /// rank, independently of the data: ranks with different graphs would run their exchanges in
    /// different orders in the backward.
    fn is_in_order(&self) -> bool {
        self.group.size() == 1
    }
}

/// Returns the positions of each row, of which there is one.
fn column(positions: &Tensor<1, Int>) -> Tensor<2, Int> {
    let [rows] = positions.dims();
    positions.clone().reshape([rows, 1])
}

/// Gathers the choices per expert of each rank of `group`, in rank order, given those of this rank.
/// The host waits for them.
fn gather_counts(counts: &Tensor<1, Int>, group: &ProcessGroup) -> Vec<usize> {
    let all = group.all_gather_int(counts.clone()).into_data();
    all.iter::<i64>().map(|count| count as usize).collect()
}

/// Sums the choices of each of `experts` over all ranks, given the counts per rank.
fn total_counts(all: &[usize], experts: usize) -> Vec<usize> {
    let total = |expert: usize| all.iter().skip(expert).step_by(experts).sum();
    (0..experts).map(total).collect()
}

pub(super) fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (device, DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks with two experts each. Rank 1 chose only the second expert of rank 0; no rank
    /// chose the last expert.
    #[test]
    fn rows_are_ordered_by_expert_then_source() {
        let counts = [2, 1, 3, 0, 0, 2, 1, 0];
        let plan = |rank| Plan::try_new(&counts, rank, 2).unwrap();
        let expected = Plan {
            send: vec![3, 3],
            receive: vec![3, 2],
            held: vec![vec![2, 0], vec![1, 2]],
        };
        assert_eq!(plan(0), expected);
        assert_eq!(plan(0).rows_of_experts(), [2, 3]);
        let expected = Plan {
            send: vec![2, 1],
            receive: vec![3, 1],
            held: vec![vec![3, 1], vec![0, 0]],
        };
        assert_eq!(plan(1), expected);
        assert_eq!(plan(1).rows_of_experts(), [4, 0]);
        let order = |plan: Plan| {
            let Order { rows, places } = plan.order();
            (rows, places)
        };
        assert_eq!(order(plan(0)), (vec![0, 1, 2, 3, 4], vec![0, 1, 2, 3, 4]));
        assert_eq!(order(plan(1)), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]));
        // Both experts of rank 0 have rows from both ranks: blocks per rank first, then blocks per
        // expert.
        let plan = Plan::try_new(&[2, 1, 1, 2], 0, 1).unwrap();
        assert_eq!(plan.rows_of_experts(), [2, 1, 1, 2]);
        assert_eq!(plan.receive, [6]);
        let plan = Plan::try_new(&[2, 1, 0, 0, 1, 2, 0, 0], 0, 2).unwrap();
        assert_eq!(
            order(plan),
            (vec![0, 1, 3, 2, 4, 5], vec![0, 1, 3, 2, 4, 5])
        );
        let plan = Plan::try_new(&[1, 2, 0, 0, 2, 1, 0, 0], 0, 2).unwrap();
        assert_eq!(
            order(plan),
            (vec![0, 3, 4, 1, 2, 5], vec![0, 3, 4, 1, 2, 5])
        );
        let plan = Plan::try_new(&[2, 2, 0, 0, 1, 1, 0, 0], 0, 2).unwrap();
        assert_eq!(
            order(plan),
            (vec![0, 1, 4, 2, 3, 5], vec![0, 1, 3, 4, 2, 5])
        );
    }

    /// Both ranks return the error, though one would receive few rows.
    #[test]
    fn too_many_rows_are_an_error_on_all_ranks() {
        let most = i32::MAX as usize;
        for rank in 0..2 {
            let error = Plan::try_new(&[0, most, 1, 1], rank, 2).unwrap_err();
            let expected = "2147483648 choices of the experts of rank 1";
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
