//! Agreement between the ranks of a run.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use burn_nvfp4::parallel::ProcessGroup;
use nvfp4_parallel::{Buffer, BufferMut, Collective, Reduction};

use crate::progress;

/// Combines the results of all ranks. Each rank passes its own result and gets its own error, or an
/// error if another rank failed. Thus no rank waits for one that has given up.
///
/// # Errors
/// Returns an error if any rank has an error, or if the group fails.
pub fn agree<T>(group: &ProcessGroup, own: Result<T>) -> Result<T> {
    // Encoded as `size - rank`, so that the maximum is the lowest failed rank; 0 if none failed.
    let size = group.size() as u32;
    let mut first = [match &own {
        Ok(_) => 0,
        Err(_) => size - group.rank() as u32,
    }];
    let reduced = (group.collective()).all_reduce(BufferMut::U32(&mut first), Reduction::Max);
    // A rank's own error is more specific.
    let own = own?;
    reduced?;
    match first[0] {
        0 => Ok(own),
        rank => bail!("rank {} failed; its message says why", size - rank),
    }
}

/// Interval at which rank 0 signals that it is still working.
const STILL_AT_WORK: Duration = Duration::from_secs(1);

/// Runs `work` on rank 0 and returns its result there, none on the other ranks. These wait as long
/// as for any collective.
///
/// # Errors
/// Returns an error on all ranks if `work` fails, or if the group fails.
pub fn on_first<T>(group: &ProcessGroup, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    let made = (group.rank() == 0).then(work);
    agree(group, made.transpose())
}

/// Runs [`on_first`] for `work` that may exceed the time limit of a collective: it runs on a
/// separate thread while rank 0 keeps signalling the other ranks.
///
/// # Errors
/// Returns an error on all ranks if `work` fails, or if the group fails.
pub fn on_first_at_length<T: Send>(
    group: &ProcessGroup,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<Option<T>> {
    if group.size() == 1 {
        return work().map(Some);
    }
    if group.rank() != 0 {
        while any(group, false)? {}
        return agree(group, Ok(None));
    }
    thread::scope(|scope| {
        let (done, finished) = mpsc::channel();
        let listener = progress::listener();
        let worker = scope.spawn(move || {
            progress::listen(listener);
            let made = work();
            // There is no receiver if the group has failed.
            let _ = done.send(());
            made
        });
        loop {
            let waited = finished.recv_timeout(STILL_AT_WORK);
            if !any(group, waited == Err(RecvTimeoutError::Timeout))? {
                break;
            }
        }
        let made = worker.join();
        let made = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        agree(group, made.map(Some))
    })
}

/// Returns the text of rank 0 on all ranks.
///
/// # Errors
/// Returns an error if the group fails.
pub fn text_of_first(group: &ProcessGroup, own: &str) -> Result<String> {
    let collective = group.collective();
    let mut length = [own.len() as u32];
    collective.broadcast(BufferMut::U32(&mut length), 0)?;
    let mut bytes = own.as_bytes().to_vec();
    bytes.resize(length[0] as usize, 0);
    collective.broadcast(BufferMut::U8(&mut bytes), 0)?;
    Ok(String::from_utf8(bytes)?)
}

/// Returns true if `own` is true on any rank.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn any(group: &ProcessGroup, own: bool) -> Result<bool> {
    let mut all = [u32::from(own)];
    (group.collective()).all_reduce(BufferMut::U32(&mut all), Reduction::Max)?;
    Ok(all[0] != 0)
}

/// Returns the elementwise means over the ranks. All ranks pass the same count.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn means(group: &ProcessGroup, mut own: Vec<f32>) -> Result<Vec<f32>> {
    (group.collective()).all_reduce(BufferMut::F32(&mut own), Reduction::Avg)?;
    Ok(own)
}

/// Returns the elementwise sums over the ranks. All ranks pass the same count.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn sums(group: &ProcessGroup, mut own: Vec<f32>) -> Result<Vec<f32>> {
    (group.collective()).all_reduce(BufferMut::F32(&mut own), Reduction::Sum)?;
    Ok(own)
}

/// Returns the first `count` of numbers that are distributed round-robin: number `i` is number
/// `i / size` of rank `i % size`. All ranks pass the same count.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn in_turns(group: &ProcessGroup, own: &[f32], count: usize) -> Result<Vec<f32>> {
    let (rounds, size) = (own.len(), group.size());
    let mut all = vec![0.0; rounds * size];
    (group.collective()).all_gather(Buffer::F32(own), BufferMut::F32(&mut all))?;
    let turns = (0..count).map(|index| all[index % size * rounds + index / size]);
    Ok(turns.collect())
}

/// All-gathers the bytes of all ranks, in rank order. All ranks pass the same count.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn gathered_bytes<const N: usize>(
    group: &ProcessGroup,
    own: [u8; N],
) -> Result<Vec<[u8; N]>> {
    let all = gathered(group, &own)?;
    let parts = all.chunks_exact(N).map(<[u8; N]>::try_from);
    parts
        .map(|part| part.map_err(|error| anyhow!("{error}")))
        .collect()
}

/// All-gathers as [`gathered_bytes`] does, with a byte count known only at run time, and
/// concatenates the result in rank order.
///
/// # Errors
/// Returns an error if the group fails.
pub(crate) fn gathered(group: &ProcessGroup, own: &[u8]) -> Result<Vec<u8>> {
    let mut all = vec![0; own.len() * group.size()];
    (group.collective()).all_gather(Buffer::U8(own), BufferMut::U8(&mut all))?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn on_ranks<T: Send>(size: usize, body: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
        let body = &body;
        let groups = ProcessGroup::loopback(size, Duration::from_secs(20));
        thread::scope(|scope| {
            let threads = groups.iter().map(|group| scope.spawn(move || body(group)));
            let threads: Vec<_> = threads.collect();
            let results = threads.into_iter().map(|thread| thread.join());
            results.map(Result::unwrap).collect()
        })
    }

    #[test]
    fn an_error_of_one_rank_is_one_of_all() {
        let found = on_ranks(3, |group| {
            let own = match group.rank() {
                0 => Ok(7),
                rank => Err(anyhow!("the disk of {rank} is full")),
            };
            agree(group, own).unwrap_err().to_string()
        });
        assert_eq!(
            found,
            [
                "rank 1 failed; its message says why",
                "the disk of 1 is full",
                "the disk of 2 is full"
            ]
        );
        assert!(on_ranks(2, |group| agree(group, Ok(3)).unwrap()) == [3, 3]);
    }

    /// Work longer than the time limit of a collective.
    #[test]
    fn ranks_wait_for_the_first_one() {
        let patience = 2 * STILL_AT_WORK;
        let wait_for = |work: fn() -> Result<u32>| {
            let groups = ProcessGroup::loopback(3, patience);
            thread::scope(|scope| {
                let threads = groups.iter().map(|group| {
                    scope.spawn(move || {
                        on_first_at_length(group, || {
                            thread::sleep(2 * patience);
                            work()
                        })
                    })
                });
                let threads: Vec<_> = threads.collect();
                let results = threads.into_iter().map(|thread| thread.join());
                results.map(Result::unwrap).collect::<Vec<_>>()
            })
        };
        let made = wait_for(|| Ok(7)).into_iter().map(Result::unwrap);
        assert_eq!(made.collect::<Vec<_>>(), [Some(7), None, None]);
        let failed = wait_for(|| bail!("the disk is full")).into_iter();
        let failed: Vec<String> = failed.map(|made| made.unwrap_err().to_string()).collect();
        assert_eq!(failed[0], "the disk is full");
        assert!(
            failed[1..]
                .iter()
                .all(|error| error.starts_with("rank 0 failed"))
        );
    }

    #[test]
    fn ranks_share_what_they_know() {
        let found = on_ranks(3, |group| {
            let rank = group.rank();
            let stops = any(group, rank == 1).unwrap();
            assert!(!any(group, false).unwrap());
            let mean = means(group, vec![rank as f32, 3.0]).unwrap();
            assert_eq!(sums(group, vec![rank as f32, 2.0]).unwrap(), [3.0, 6.0]);
            // Five numbers round-robin; the sixth is not counted.
            let turns = in_turns(group, &[rank as f32, 3.0 + rank as f32], 5).unwrap();
            let bytes = gathered_bytes(group, [rank as u8, 9]).unwrap();
            let text = text_of_first(group, if rank == 0 { "päth" } else { "" }).unwrap();
            (stops, mean, turns, bytes, text)
        });
        for (stops, mean, turns, bytes, text) in found {
            assert!(stops);
            assert_eq!(mean, [1.0, 3.0]);
            assert_eq!(turns, [0.0, 1.0, 2.0, 3.0, 4.0]);
            assert_eq!(bytes, [[0, 9], [1, 9], [2, 9]]);
            assert_eq!(text, "päth");
        }
    }
}
