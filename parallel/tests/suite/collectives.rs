//! Tests every operation on 1 to 4 ranks of the loopback against the same arithmetic on one rank.

use std::time::{Duration, Instant};

use half::bf16;
use nvfp4_parallel::collective::share;
use nvfp4_parallel::{
    Buffer, BufferMut, Collective, HostGroup, ParallelError, Reduction, Result, loopback,
};

const PATIENCE: Duration = Duration::from_secs(10);

fn on<T: Send>(size: usize, body: impl Fn(HostGroup) -> Result<T> + Sync) -> Vec<T> {
    let results = loopback::run(loopback::groups(size, PATIENCE), body);
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// Values of a rank, whose sums depend on their order.
fn values(rank: usize, len: usize) -> Vec<f32> {
    let value =
        |index: usize| ((index * 37 + rank * 101) % 97) as f32 * 1e3f32.powi(rank as i32 - 1);
    (0..len).map(value).collect()
}

fn reduced(size: usize, len: usize, reduction: Reduction) -> Vec<f32> {
    let all: Vec<_> = (0..size).map(|rank| values(rank, len)).collect();
    let one = |index: usize| {
        let of_ranks = all.iter().map(|values| values[index]);
        match reduction {
            Reduction::Sum => of_ranks.reduce(|a, b| a + b).unwrap(),
            Reduction::Avg => of_ranks.reduce(|a, b| a + b).unwrap() / size as f32,
            Reduction::Max => of_ranks.fold(f32::MIN, f32::max),
            Reduction::Min => of_ranks.fold(f32::MAX, f32::min),
        }
    };
    (0..len).map(one).collect()
}

const ALL: [Reduction; 4] = [
    Reduction::Sum,
    Reduction::Avg,
    Reduction::Max,
    Reduction::Min,
];

#[test]
fn all_reduce_is_the_sum_in_the_order_of_ranks() {
    for (size, len) in [(1, 5), (2, 7), (3, 100), (4, 3), (4, 0), (4, 1001)] {
        for reduction in ALL {
            let all = on(size, |group| {
                let mut buffer = values(group.rank(), len);
                group.all_reduce(BufferMut::F32(&mut buffer), reduction)?;
                Ok(buffer)
            });
            for found in all {
                assert_eq!(
                    found,
                    reduced(size, len, reduction),
                    "{reduction} of {len} on {size}"
                );
            }
        }
    }
}

#[test]
fn bf16_and_integers() {
    let all = on(3, |group| {
        let rank = group.rank();
        let mut halves = [bf16::from_f32(1.0), bf16::from_f32(rank as f32)];
        group.all_reduce(BufferMut::Bf16(&mut halves), Reduction::Avg)?;
        let mut counts = [rank as u32, u32::MAX];
        group.all_reduce(BufferMut::U32(&mut counts), Reduction::Max)?;
        let mut bytes = [rank as u8 + 1];
        group.all_reduce(BufferMut::U8(&mut bytes), Reduction::Sum)?;
        Ok((halves.map(bf16::to_f32), counts, bytes))
    });
    assert!(
        all.iter()
            .all(|found| *found == ([1.0, 1.0], [2, u32::MAX], [6])),
        "{all:?}"
    );
    let error = loopback::run(loopback::groups(1, PATIENCE), |group| {
        group.all_reduce(BufferMut::U32(&mut [1]), Reduction::Avg)
    });
    let error = error[0].clone().unwrap_err().to_string();
    assert!(error.contains("reduction is avg"), "{error}");
}

/// A reduce-scatter followed by an all-gather equals an all-reduce bit for bit; ZeRO-1 relies on
/// it.
#[test]
fn scattered_parts_are_those_of_the_whole() {
    for size in [1, 2, 4] {
        let len = 6;
        let all = on(size, |group| {
            let whole = values(group.rank(), len * size);
            let mut part = vec![0.0; len];
            group.reduce_scatter(
                Buffer::F32(&whole),
                BufferMut::F32(&mut part),
                Reduction::Avg,
            )?;
            let mut gathered = vec![0.0; len * size];
            group.all_gather(Buffer::F32(&part), BufferMut::F32(&mut gathered))?;
            let mut reduced = whole;
            group.all_reduce(BufferMut::F32(&mut reduced), Reduction::Avg)?;
            Ok((gathered, reduced))
        });
        for (gathered, reduced) in all {
            assert_eq!(gathered, reduced);
        }
    }
}

#[test]
fn broadcast_send_and_receive() {
    let all = on(4, |group| {
        let rank = group.rank();
        let mut buffer = [rank as u32 * 10, 7];
        group.broadcast(BufferMut::U32(&mut buffer), 2)?;
        // A ring: each rank forwards what it received.
        let mut got = [0u8; 2];
        let sent = [rank as u8, 9];
        group.send(Buffer::U8(&sent), (rank + 1) % 4)?;
        group.receive(BufferMut::U8(&mut got), (rank + 3) % 4)?;
        group.barrier()?;
        Ok((buffer, got))
    });
    for (rank, found) in all.into_iter().enumerate() {
        assert_eq!(found, ([20, 7], [(rank as u8 + 3) % 4, 9]));
    }
}

/// Rank `s` sends `(s + r) % 3` elements to rank `r`; some counts are zero.
#[test]
fn all_to_all_of_unequal_counts() {
    for size in [1, 2, 3, 4] {
        let count = |from: usize, to: usize| (from + to) % 3;
        let all = on(size, |group| {
            let rank = group.rank();
            let sends: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
            let receives: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
            let tagged = |to: usize| vec![(rank * 10 + to) as f32; sends[to]];
            let input: Vec<f32> = (0..size).flat_map(tagged).collect();
            let mut output = vec![-1.0; receives.iter().sum()];
            let (from, to) = (Buffer::F32(&input), BufferMut::F32(&mut output));
            group.all_to_all(from, &sends, to, &receives)?;
            Ok(output)
        });
        for (rank, found) in all.into_iter().enumerate() {
            let part = |from: usize| vec![(from * 10 + rank) as f32; count(from, rank)];
            let expected: Vec<f32> = (0..size).flat_map(part).collect();
            assert_eq!(found, expected, "rank {rank} of {size}");
        }
    }
}

/// A 2x2 grid: concurrent operations on rows and columns, whose messages never mix.
#[test]
fn subgroups() {
    let all = on(4, |group| {
        let rank = group.rank();
        let row = group.subgroup(&[rank / 2 * 2, rank / 2 * 2 + 1])?;
        let column = group.subgroup(&[rank % 2, rank % 2 + 2])?;
        assert_eq!((row.rank(), column.rank()), (rank % 2, rank / 2));
        let mut in_row = [rank as f32];
        let mut in_column = [rank as f32];
        // The odd ranks are late in their rows, after sending in their columns.
        if rank % 2 == 1 {
            column.all_reduce(BufferMut::F32(&mut in_column), Reduction::Sum)?;
            row.all_reduce(BufferMut::F32(&mut in_row), Reduction::Sum)?;
        } else {
            row.all_reduce(BufferMut::F32(&mut in_row), Reduction::Sum)?;
            column.all_reduce(BufferMut::F32(&mut in_column), Reduction::Sum)?;
        }
        assert!(group.subgroup(&[rank, rank]).is_err());
        assert!(group.subgroup(&[(rank + 1) % 4]).is_err());
        assert!(group.subgroup(&[rank, 4]).is_err());
        Ok((in_row[0], in_column[0]))
    });
    assert_eq!(all, [(1.0, 2.0), (1.0, 4.0), (5.0, 2.0), (5.0, 4.0)]);
}

#[test]
fn parts_of_any_length() {
    for len in 0..20 {
        for parts in 1..6 {
            let shares: Vec<_> = (0..parts).map(|part| share(len, parts, part)).collect();
            let joined: Vec<usize> = shares.iter().cloned().flatten().collect();
            assert_eq!(joined, (0..len).collect::<Vec<_>>());
            let lens = shares.iter().map(|share| share.len());
            assert!(lens.clone().max().unwrap() - lens.min().unwrap() <= 1);
        }
    }
}

/// Two ranks make different calls; both soon get an error, and so does a third that made the same
/// call as the first.
fn differing(calls: impl Fn(&HostGroup) -> Result<()> + Sync, names: &[&str]) {
    let began = Instant::now();
    let results = loopback::run(loopback::groups(3, PATIENCE), |group| calls(&group));
    assert!(
        began.elapsed() < PATIENCE / 2,
        "a rank waited for its time to be over"
    );
    let errors: Vec<_> = results.into_iter().map(Result::unwrap_err).collect();
    let mismatch = errors
        .iter()
        .find(|error| !matches!(error, ParallelError::Aborted(_)));
    let mismatch = mismatch.expect("one rank notices it itself").to_string();
    for name in names {
        assert!(mismatch.contains(name), "{mismatch}");
    }
}

#[test]
fn differing_calls_are_errors() {
    differing(
        |group| match group.rank() {
            2 => group.barrier(),
            _ => group.all_reduce(BufferMut::F32(&mut [0.0; 4]), Reduction::Sum),
        },
        &[
            "barrier",
            "all-reduce(sum, 4 f32)",
            "the same calls in the same order",
        ],
    );
    differing(
        |group| {
            let mut buffer = vec![0.0; 4 + group.rank() / 2];
            group.all_reduce(BufferMut::F32(&mut buffer), Reduction::Sum)
        },
        &["4 f32", "5 f32"],
    );
    differing(
        |group| {
            let reduction = if group.rank() == 1 {
                Reduction::Max
            } else {
                Reduction::Sum
            };
            group.all_reduce(BufferMut::F32(&mut [0.0; 4]), reduction)
        },
        &["(max,", "(sum,"],
    );
    // Ranks disagree on the number of elements.
    differing(
        |group| {
            let counts = [1, 1, 1];
            let mut receives = counts;
            if group.rank() == 1 {
                receives[2] = 2;
            }
            let mut output = vec![0u8; receives.iter().sum()];
            group.all_to_all(
                Buffer::U8(&[0; 3]),
                &counts,
                BufferMut::U8(&mut output),
                &receives,
            )?;
            group.barrier()
        },
        &[
            "receive_counts",
            "rank 1",
            "2 for rank 2",
            "the 1 that it sends",
        ],
    );
}

#[test]
fn arguments_are_checked() {
    type Check = fn(&HostGroup) -> Result<()>;
    let checks: [(&str, Check); 7] = [
        ("output is 5 f32, but must be 6 f32", |group| {
            group.all_gather(Buffer::F32(&[0.0; 3]), BufferMut::F32(&mut [0.0; 5]))
        }),
        ("output is 6 u32, but must be 6 f32", |group| {
            group.all_gather(Buffer::F32(&[0.0; 3]), BufferMut::U32(&mut [0; 6]))
        }),
        ("input is 5 f32, but must be 6 f32", |group| {
            let output = BufferMut::F32(&mut [0.0; 3]);
            group.reduce_scatter(Buffer::F32(&[0.0; 5]), output, Reduction::Sum)
        }),
        ("root is 2, but must be less than 2", |group| {
            group.broadcast(BufferMut::U8(&mut [0]), 2)
        }),
        ("but must be another rank", |group| {
            group.send(Buffer::U8(&[0]), group.rank())
        }),
        ("from is 9", |group| {
            group.receive(BufferMut::U8(&mut [0]), 9)
        }),
        ("send_counts is 1 counts", |group| {
            group.all_to_all(Buffer::U8(&[0]), &[1], BufferMut::U8(&mut [0]), &[1, 0])
        }),
    ];
    for (name, check) in checks {
        for error in loopback::run(loopback::groups(2, PATIENCE), |group| check(&group)) {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("rank "), "{error}");
        }
    }
}

#[test]
fn a_rank_that_is_gone_or_late_is_named() {
    let gone = loopback::run(loopback::groups(2, PATIENCE), |group| match group.rank() {
        0 => group.barrier(),
        _ => Ok(()),
    });
    let error = gone[0].clone().unwrap_err().to_string();
    assert!(error.contains("rank 1 ended: its thread ended"), "{error}");

    let short = Duration::from_millis(100);
    let late = loopback::run(loopback::groups(3, short), |group| match group.rank() {
        2 => {
            std::thread::sleep(short * 5);
            group.barrier()
        }
        _ => group.barrier(),
    });
    let errors: Vec<String> = late
        .into_iter()
        .map(|late| late.unwrap_err().to_string())
        .collect();
    assert!(errors[0].contains("rank 2"), "{errors:?}");
    // The late rank learns that the others gave up.
    assert!(
        errors[2].contains("the run was ended: rank 2 failed"),
        "{errors:?}"
    );
}

#[test]
fn abort_ends_the_calls_of_all() {
    let results = loopback::run(loopback::groups(3, PATIENCE), |group| {
        if group.rank() == 1 {
            group.label("reading data");
            group.abort("the disk is full");
        }
        group.barrier()
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        let expected = "the run was ended: rank 1 ended the run: the disk is full (it was doing: \
                        reading data)";
        assert_eq!(error, expected);
    }
}
