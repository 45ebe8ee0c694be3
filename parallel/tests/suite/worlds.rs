//! Tests whole runs over TCP, in threads of this process: this way a hanging rank can be tested
//! without ending the test.

use std::thread;
use std::time::{Duration, Instant};

use nvfp4_parallel::token::Token;
use nvfp4_parallel::world::Settings;
use nvfp4_parallel::{BufferMut, Collective, Environment, ParallelError, Reduction, Result, World};

const SETTINGS: Settings = Settings {
    join: Duration::from_secs(10),
    operation: Duration::from_secs(10),
    silence: Duration::from_secs(5),
    grace: None,
};

fn run<T: Send>(
    size: usize,
    settings: Settings,
    body: impl Fn(World) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let body = &body;
    thread::scope(|scope| {
        let rank = |rank| {
            let environment = Environment {
                launcher: "test",
                rank,
                local_rank: rank,
                world: size,
                address: "127.0.0.1".into(),
                port,
                token: Token::new("the token of this run").unwrap(),
            };
            scope.spawn(move || body(World::join(environment, settings)?))
        };
        let ranks: Vec<_> = (0..size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn collectives_over_tcp() {
    for size in [1, 2, 4] {
        let results = run(size, SETTINGS, |world| {
            let group = world.group().clone();
            // More than the socket buffers hold, in both directions at once.
            let mut buffer = vec![group.rank() as f32; 3_000_001];
            group.all_reduce(BufferMut::F32(&mut buffer), Reduction::Sum)?;
            let expected = (size * (size - 1) / 2) as f32;
            assert!(buffer.iter().all(|value| *value == expected));
            let pair = group.subgroup(&[group.rank()])?;
            pair.barrier()?;
            world.leave()
        });
        for result in results {
            result.unwrap();
        }
    }
}

/// The error names the missing rank, and its activity.
#[test]
fn a_rank_that_hangs_ends_all() {
    let settings = Settings {
        operation: Duration::from_secs(1),
        ..SETTINGS
    };
    let began = Instant::now();
    let results = run(3, settings, |world| {
        let group = world.group().clone();
        group.barrier()?;
        if group.rank() == 1 {
            group.label("reading data");
            while world.failure().is_none() {
                thread::sleep(Duration::from_millis(20));
            }
        }
        group.barrier()
    });
    assert!(began.elapsed() < Duration::from_secs(8));
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        // The store, or a waiting rank if it is first, names rank 1.
        assert!(error.contains("rank 1"), "rank {rank}: {error}");
    }
}

#[test]
fn a_rank_that_fails_ends_all() {
    let results = run(3, SETTINGS, |world| {
        let group = world.group().clone();
        if group.rank() == 2 {
            group.label("reading data");
            world.fail("no such file");
        }
        // Rank 0 is in no collective, and learns of the failure from its watchdog.
        while group.rank() == 0 && world.failure().is_none() {
            thread::sleep(Duration::from_millis(20));
        }
        group.barrier()
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        let expected =
            "the run was ended: rank 2 failed: no such file (it was doing: reading data)";
        assert_eq!(error, expected);
    }
}

/// An error that a device reports while its rank waits in a collective reaches all ranks.
#[test]
fn an_error_that_the_watchdog_finds_ends_all() {
    let results = run(3, SETTINGS, |world| {
        let group = world.group().clone();
        if group.rank() == 1 {
            let broken = || {
                Err(ParallelError::Library {
                    library: "NCCL",
                    operation: "an operation of NCCL".into(),
                    reason: "remote process exited (status 6)".into(),
                })
            };
            group.watch(broken);
            while world.failure().is_none() {
                thread::sleep(Duration::from_millis(20));
            }
        }
        group.barrier()
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("rank 1 failed"), "{error}");
        assert!(error.contains("remote process exited"), "{error}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let settings = Settings {
        join: Duration::from_secs(1),
        ..SETTINGS
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let environment = Environment {
        launcher: "test",
        rank: 0,
        local_rank: 0,
        world: 2,
        address: "127.0.0.1".into(),
        port,
        token: Token::new("the token of this run").unwrap(),
    };
    let error = World::join(environment.clone(), settings)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("ranks [1] did not connect"), "{error}");
    // A rank without rank 0 finds no store.
    let environment = Environment {
        rank: 1,
        ..environment
    };
    let error = World::join(environment, settings)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("rank 1: joining the store"), "{error}");
}
