//! Collectives on tensors, and their gradients.

use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nvfp4::parallel::{ProcessGroup, functions};
use nvfp4_parallel::Reduction;

use super::on_ranks;
use crate::support::{Matrix, activation, device, values};

const ROWS: usize = 4;
const COLS: usize = 6;

/// Returns the tensor of a rank.
fn part(rank: usize, rows: usize, cols: usize, dtype: DType) -> Tensor<2> {
    let device = device().autodiff();
    let tensor: Tensor<2> = Matrix::gaussian(rows, cols, dtype, 40 + rank as u64).tensor(&device);
    tensor.require_grad()
}

/// Returns the factor of a rank's result, which is its upstream gradient.
fn factor(rank: usize, rows: usize, cols: usize, dtype: DType) -> Tensor<2> {
    let device = device().autodiff();
    Matrix::gaussian(rows, cols, dtype, 90 + rank as u64).tensor(&device)
}

/// Returns the result of `forward` on each rank, and the gradient of its input.
fn run(
    size: usize,
    dtype: DType,
    forward: impl Fn(Tensor<2>, &ProcessGroup) -> Tensor<2> + Sync,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    on_ranks(size, |group| {
        let x = part(group.rank(), ROWS, COLS, dtype);
        let y = forward(x.clone(), &group);
        let [rows, cols] = y.dims();
        let loss = (y.clone() * factor(group.rank(), rows, cols, dtype)).sum();
        let gradients = loss.backward();
        (values(y), values(x.grad(&gradients).unwrap()))
    })
}

fn sum(size: usize, dtype: DType, of: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
    let mut sum = of(0);
    for rank in 1..size {
        let more = of(rank);
        sum.iter_mut()
            .zip(more)
            .for_each(|(sum, more)| *sum += more);
    }
    let round = |x: f32| match dtype {
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
        _ => x,
    };
    sum.into_iter().map(round).collect()
}

fn inputs(rank: usize, dtype: DType) -> Vec<f32> {
    values(part(rank, ROWS, COLS, dtype))
}

#[test]
fn copies_and_sums_are_each_others_gradients() {
    for dtype in [DType::F32, activation()] {
        for size in [1, 2, 4] {
            let factors = |rank| values(factor(rank, ROWS, COLS, dtype));
            let copied = run(size, dtype, functions::copy);
            let reduced = run(size, dtype, functions::reduce);
            for rank in 0..size {
                let (y, dx) = &copied[rank];
                assert_eq!(*y, inputs(rank, dtype));
                assert_eq!(*dx, sum(size, dtype, factors), "{size} ranks");
                let (y, dx) = &reduced[rank];
                assert_eq!(*y, sum(size, dtype, |rank| inputs(rank, dtype)));
                assert_eq!(*dx, factors(rank));
            }
        }
    }
}

#[test]
fn gathers_along_each_axis_have_their_gradients() {
    let dtype = DType::F32;
    for size in [2, 4] {
        for dim in 0..2 {
            let mut shape = [ROWS, COLS];
            shape[dim] *= size;
            let whole = |of: &dyn Fn(usize) -> Tensor<2>| {
                values(Tensor::cat((0..size).map(of).collect(), dim))
            };
            let expected = whole(&|rank| part(rank, ROWS, COLS, dtype));
            let own = |x: Tensor<2>, rank| {
                let each = shape[dim] / size;
                values(x.narrow(dim, rank * each, each))
            };
            let factors = |rank| factor(rank, shape[0], shape[1], dtype);
            let summed = sum(size, dtype, |rank| values(factors(rank)));
            let summed = || {
                let data = TensorData::new(summed.clone(), shape);
                Tensor::<2>::from_data(data, &device())
            };
            let sums = run(size, dtype, |x, group| functions::gather_sum(x, dim, group));
            let slices = run(size, dtype, |x, group| functions::gather(x, dim, group));
            for rank in 0..size {
                assert_eq!(sums[rank].0, expected);
                assert_eq!(sums[rank].1, own(summed(), rank));
                assert_eq!(slices[rank].0, expected);
                assert_eq!(slices[rank].1, own(factors(rank), rank));
            }
        }
    }
}

#[test]
fn parts_along_each_axis_have_their_gradients() {
    let dtype = DType::F32;
    let size = 2;
    for dim in 0..2 {
        let mut shape = [ROWS, COLS];
        shape[dim] /= size;
        let own = |x: Tensor<2>, rank| values(x.narrow(dim, rank * shape[dim], shape[dim]));
        let factors = |rank| factor(rank, shape[0], shape[1], dtype);
        let gathered = values(Tensor::cat((0..size).map(factors).collect(), dim));
        let total = sum(size, dtype, |rank| inputs(rank, dtype));
        let total = || {
            let data = TensorData::new(total.clone(), [ROWS, COLS]);
            Tensor::<2>::from_data(data, &device())
        };
        let sums = run(size, dtype, |x, group| {
            functions::reduce_scatter(x, dim, group)
        });
        let parts = run(size, dtype, |x, group| functions::scatter(x, dim, group));
        for rank in 0..size {
            assert_eq!(sums[rank].0, own(total(), rank));
            assert_eq!(sums[rank].1, gathered);
            assert_eq!(parts[rank].0, own(part(rank, ROWS, COLS, dtype), rank));
            assert_eq!(parts[rank].1, gathered);
        }
    }
}

/// Rank 0 sends its rows 1 and 3, rank 1 its rows 4 and 0, in rank order.
#[test]
fn rows_travel_to_other_ranks_and_back() {
    let dtype = DType::F32;
    let counts = [[1, 3], [4, 0]];
    let found = run(2, dtype, |x, group| {
        let rank = group.rank();
        let receive = [counts[0][rank], counts[1][rank]];
        functions::all_to_all(x, &counts[rank], &receive, group)
    });
    let [one, two] = [0, 1].map(|rank| inputs(rank, dtype));
    assert_eq!(found[0].0, [&one[..COLS], &two].concat());
    assert_eq!(found[1].0, one[COLS..]);
    let [first, second] = [5, 3].map(|rows| rows * COLS);
    let factors = [
        values(factor(0, 5, COLS, dtype)),
        values(factor(1, 3, COLS, dtype)),
    ];
    assert_eq!((factors[0].len(), factors[1].len()), (first, second));
    assert_eq!(found[0].1, [&factors[0][..COLS], &factors[1]].concat());
    assert_eq!(found[1].1, factors[0][COLS..]);
}

#[test]
fn integers_and_constants() {
    let found = on_ranks(2, |group| {
        let rank = group.rank();
        let device = device();
        let ints = |values: Vec<i32>, rows| {
            let data = TensorData::new(values, [rows, 1]);
            Tensor::<2, Int>::from_data(data, (&device, DType::I32))
        };
        let read = |x: Tensor<2, Int>| x.into_data().iter::<i32>().collect::<Vec<_>>();
        let gathered = read(group.all_gather_int(ints(vec![rank as i32, -7], 2)));
        let sent = ints(vec![10 + rank as i32, 20 + rank as i32], 2);
        let moved = read(group.all_to_all_int(sent, &[1, 1], &[1, 1]));
        let x = part(rank, 1, 2, DType::F32);
        let largest = group.all_reduce(x.clone(), Reduction::Max);
        assert!(!largest.is_tracked());
        let first = group.broadcast(x.clone(), 0);
        group.barrier().unwrap();
        (gathered, moved, values(largest), values(first), values(x))
    });
    for (rank, (gathered, moved, largest, first, _)) in found.iter().enumerate() {
        assert_eq!(*gathered, [0, -7, 1, -7]);
        let rank = rank as i32;
        assert_eq!(*moved, [10 * (rank + 1), 10 * (rank + 1) + 1]);
        let pairs = found[0].4.iter().zip(&found[1].4);
        assert_eq!(*largest, pairs.map(|(a, b)| a.max(*b)).collect::<Vec<_>>());
        assert_eq!(*first, found[0].4);
    }
}

#[test]
#[should_panic(expected = "found an axis of 3, expected a multiple of the 2 ranks")]
fn parts_that_are_not_equal_are_refused() {
    let groups = ProcessGroup::loopback(2, std::time::Duration::ZERO);
    functions::scatter(part(0, 3, 2, DType::F32), 0, &groups[0]);
}
