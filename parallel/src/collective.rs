//! Operations of a group of ranks.

use std::fmt;
use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::activity::Activity;
use crate::buffer::{Buffer, BufferMut, DType};
use crate::call::{Call, Operation};
use crate::error::{Failure, ParallelError, Result};
use crate::inbox::{Absent, Transport};
use crate::meter::Meter;
use crate::reduction::Reduction;

/// Maximum bytes per message. Callers that exchange more split it, for example into gradient
/// buckets.
const MOST_BYTES: usize = 1 << 30;

/// Operations of a group of ranks over host memory.
///
/// All ranks of a group must make the same calls in the same order. A call that differs in
/// operation, dtype, length or root is an error on a rank that notices it, and ends the group's
/// calls on all ranks. A group cannot be used after an error.
///
/// # Errors
/// Every call returns an error if its arguments do not fit the group or each other, another rank
/// makes a different call, a rank is gone or does not answer in time, or after
/// [`abort`](Self::abort).
pub trait Collective: Send + Sync {
    /// This rank, less than [`size`](Self::size).
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Replaces the elements by their reduction over all ranks.
    fn all_reduce(&self, buffer: BufferMut<'_>, reduction: Reduction) -> Result<()>;

    /// Writes shard `rank` of the reduction of all inputs, each of which has `size` shards of the
    /// output's length.
    fn reduce_scatter(
        &self,
        input: Buffer<'_>,
        output: BufferMut<'_>,
        reduction: Reduction,
    ) -> Result<()>;

    /// Writes the inputs of all ranks in rank order.
    fn all_gather(&self, input: Buffer<'_>, output: BufferMut<'_>) -> Result<()>;

    /// Replaces the elements by those of rank `root`.
    fn broadcast(&self, buffer: BufferMut<'_>, root: usize) -> Result<()>;

    /// Sends to rank `to`, which must [receive](Self::receive) the same number of elements of the
    /// dtype.
    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<()>;

    /// Receives from rank `from`.
    fn receive(&self, buffer: BufferMut<'_>, from: usize) -> Result<()>;

    /// Sends `send_counts[r]` elements to each rank `r`, and receives `receive_counts[r]` elements
    /// from it. Parts are concatenated in rank order. Counts may be zero.
    fn all_to_all(
        &self,
        input: Buffer<'_>,
        send_counts: &[usize],
        output: BufferMut<'_>,
        receive_counts: &[usize],
    ) -> Result<()>;

    /// Waits until all ranks have called it.
    fn barrier(&self) -> Result<()>;

    /// Ends the current and later calls of all ranks, with [`ParallelError::Aborted`].
    fn abort(&self, reason: &str);
}

/// Returns the range of part `part` when `len` elements are divided into `parts`; lengths differ by
/// at most one.
pub fn share(len: usize, parts: usize, part: usize) -> Range<usize> {
    let (each, more) = (len / parts, len % parts);
    let start = part * each + part.min(more);
    start..start + each + usize::from(part < more)
}

/// [`Collective`] by messages between threads or processes.
///
/// An all-reduce is a reduce-scatter of equal parts followed by an all-gather: each rank sends and
/// receives `2 (n - 1) / n` times the buffer. Every part is reduced by one rank, in rank order.
pub struct HostGroup {
    transport: Arc<dyn Transport>,
    /// Ranks in the world.
    members: Arc<[usize]>,
    rank: usize,
    id: u64,
    /// Number of groups derived from this one.
    splits: AtomicU64,
    timeout: Duration,
    activity: Activity,
}

impl fmt::Debug for HostGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostGroup")
            .field("rank", &self.rank)
            .field("members", &self.members)
            .finish_non_exhaustive()
    }
}

impl HostGroup {
    /// Creates the group of all ranks of `transport`, for rank `rank`. A call waits for another
    /// rank for at most `timeout`.
    pub(crate) fn world(
        transport: Arc<dyn Transport>,
        (rank, size): (usize, usize),
        timeout: Duration,
        activity: Activity,
    ) -> Self {
        Self {
            transport,
            members: (0..size).collect(),
            rank,
            id: 0,
            splits: AtomicU64::new(0),
            timeout,
            activity,
        }
    }

    /// Returns the ranks of this group, numbered in the world.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the group of `members`, ranks of this group in ascending order, including this one.
    /// All members must call this at the same point of their program, and create all groups in the
    /// same order; nothing is exchanged.
    ///
    /// # Errors
    /// Returns an error if `members` is not ascending, contains a rank out of range, or lacks this
    /// rank.
    pub fn subgroup(&self, members: &[usize]) -> Result<Self> {
        let ascending = members.is_sorted_by(|one, next| one < next);
        let exist = members.iter().all(|member| *member < self.size());
        let place = members.iter().position(|member| *member == self.rank);
        let Some(rank) = place.filter(|_| ascending && exist) else {
            return Err(ParallelError::argument(
                "members",
                format!("{members:?}"),
                format!(
                    "ascending ranks below {}, with {} among them",
                    self.size(),
                    self.rank
                ),
            ));
        };
        let world: Arc<[usize]> = members.iter().map(|member| self.members[*member]).collect();
        // Groups of other members may have the same number of splits: their messages are
        // distinguished by the members.
        let mut hasher = std::hash::DefaultHasher::new();
        hasher.write_u64(self.id);
        hasher.write_u64(self.splits.fetch_add(1, Ordering::Relaxed));
        world.iter().for_each(|member| hasher.write_usize(*member));
        Ok(Self {
            transport: self.transport.clone(),
            members: world,
            rank,
            id: hasher.finish(),
            splits: AtomicU64::new(0),
            timeout: self.timeout,
            activity: self.activity.clone(),
        })
    }

    /// Sets the label of this rank's activity between collectives, for the watchdog.
    pub fn label(&self, doing: &str) {
        self.activity.label(doing);
    }

    /// Registers `probe`, which the watchdog calls every half second in its thread. The first error
    /// ends the run on all ranks, and names this rank and the error.
    pub fn watch(&self, probe: impl Fn() -> Result<()> + Send + 'static) {
        self.activity.watch(probe);
    }

    /// Returns the meter of this rank's collectives, in this group and all others.
    pub fn meter(&self) -> &Meter {
        self.activity.meter()
    }

    /// Number of collectives that this rank has begun so far, in this group and all others, over
    /// host memory and on devices.
    pub fn calls(&self) -> u64 {
        self.activity.snapshot().sequence
    }

    pub(crate) fn activity(&self) -> &Activity {
        &self.activity
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// Returns all other ranks, beginning with the next one, so that not all ranks send to the same
    /// rank first.
    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.size());
        (1..size).map(move |step| (rank + step) % size)
    }

    fn invalid(
        &self,
        call: &Call,
        argument: &'static str,
        found: impl fmt::Display,
        expected: impl fmt::Display,
    ) -> ParallelError {
        ParallelError::Call {
            rank: self.rank,
            call: call.to_string(),
            argument,
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }

    /// Returns an error if `argument` does not have `expected` elements of the dtype of `call`.
    fn check(
        &self,
        call: &Call,
        argument: &'static str,
        buffer: Buffer<'_>,
        expected: usize,
    ) -> Result<()> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        if dtype == call.dtype && len == expected {
            return Ok(());
        }
        let (found, expected) = (
            format!("{len} {dtype}"),
            format!("{expected} {}", call.dtype),
        );
        Err(self.invalid(call, argument, found, expected))
    }

    fn check_rank(&self, call: &Call, argument: &'static str, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(self.invalid(call, argument, rank, format!("less than {}", self.size())))
    }

    fn check_reduction(&self, call: &Call, reduction: Reduction) -> Result<()> {
        if call.dtype.supports(reduction) {
            return Ok(());
        }
        Err(self.invalid(call, "reduction", reduction, "sum, max or min of integers"))
    }

    /// Sends `payload` to `peer`, preceded by the encoded call.
    fn post(&self, call: &Call, peer: usize, payload: &[u8]) -> Result<()> {
        if payload.len() > MOST_BYTES {
            let found = format!("{} bytes", payload.len());
            return Err(self.invalid(
                call,
                "buffer",
                found,
                format!("at most {MOST_BYTES} a rank"),
            ));
        }
        let mut message = Vec::with_capacity(Call::BYTES + payload.len());
        message.extend(call.encode());
        message.extend(payload);
        let sent = self.transport.send(self.members[peer], self.id, message);
        sent.map_err(|absent| self.absent(call, peer, absent))
    }

    /// Receives the message of `peer` for `call`, with a payload of `bytes` bytes.
    fn collect(&self, call: &Call, peer: usize, bytes: usize) -> Result<Message> {
        let deadline = Instant::now() + self.timeout;
        let inbox = self.transport.inbox();
        let message = inbox
            .pop(self.members[peer], self.id, deadline)
            .map_err(|absent| self.absent(call, peer, absent))?;
        let other = message.get(..Call::BYTES).unwrap_or_default();
        let other = Call::decode(other).map(|other| other.to_string());
        let other = other.unwrap_or_else(|error| error.to_string());
        // Two calls are equal if their texts are: the text contains all fields.
        let error = if other != call.to_string() {
            ParallelError::Mismatch {
                rank: self.rank,
                call: call.to_string(),
                peer,
                other,
            }
        } else if message.len() - Call::BYTES != bytes {
            let size = call.dtype.size();
            let found = format!("{} for rank {peer}", bytes / size);
            let sent = (message.len() - Call::BYTES) / size;
            self.invalid(
                call,
                "receive_counts",
                found,
                format!("the {sent} that it sends"),
            )
        } else {
            return Ok(Message(message));
        };
        self.fail(call, format!("failed: {error}"));
        Err(error)
    }

    fn absent(&self, call: &Call, peer: usize, absent: Absent) -> ParallelError {
        let (rank, text) = (self.rank, call.to_string());
        let error = match absent {
            Absent::Aborted(failure) => return ParallelError::Aborted(failure),
            Absent::Late => ParallelError::Timeout {
                rank,
                call: text,
                peer,
                seconds: self.timeout.as_secs(),
            },
            Absent::Lost(reason) => ParallelError::Lost {
                rank,
                call: text,
                peer,
                reason,
            },
        };
        self.transport.abort(&Failure {
            rank: self.members[peer],
            doing: String::new(),
            reason: format!("failed: {error}"),
        });
        error
    }

    /// Ends the calls of all ranks because of this rank.
    fn fail(&self, call: &Call, reason: String) {
        self.transport.abort(&Failure {
            rank: self.members[self.rank],
            doing: call.to_string(),
            reason,
        });
    }

    /// Returns an error after [`Collective::abort`], also in groups of one rank.
    fn alive(&self) -> Result<()> {
        match self.transport.inbox().failure() {
            Some(failure) => Err(ParallelError::Aborted(failure)),
            None => Ok(()),
        }
    }

    /// Reduces this rank's part of all ranks' elements. `part(r)` is the range of rank `r` in
    /// `input`, and `out` receives this rank's part.
    fn reduce_parts(
        &self,
        call: &Call,
        reduction: Reduction,
        input: Buffer<'_>,
        part: impl Fn(usize) -> Range<usize>,
    ) -> Result<Vec<Message>> {
        for peer in self.peers() {
            self.post(call, peer, input.part(part(peer)))?;
        }
        let own = input.part(part(self.rank));
        self.check_reduction(call, reduction)?;
        (0..self.size())
            .map(|rank| match rank == self.rank {
                true => Ok(Message::own(own)),
                false => self.collect(call, rank, own.len()),
            })
            .collect()
    }

    /// Sends `part(rank)` of `buffer` to all other ranks, and receives theirs.
    fn gather_parts(
        &self,
        call: &Call,
        buffer: &mut BufferMut<'_>,
        part: impl Fn(usize) -> Range<usize>,
    ) -> Result<()> {
        for peer in self.peers() {
            self.post(call, peer, buffer.as_buffer().part(part(self.rank)))?;
        }
        for peer in self.peers() {
            let out = buffer.part_mut(part(peer));
            out.copy_from_slice(self.collect(call, peer, out.len())?.payload());
        }
        Ok(())
    }
}

/// Message that begins with the encoded call.
struct Message(Vec<u8>);

impl Message {
    /// Creates the message that this rank would send to itself.
    fn own(payload: &[u8]) -> Self {
        let mut message = vec![0; Call::BYTES];
        message.extend(payload);
        Self(message)
    }

    fn payload(&self) -> &[u8] {
        &self.0[Call::BYTES..]
    }
}

impl Collective for HostGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn all_reduce(&self, mut buffer: BufferMut<'_>, reduction: Reduction) -> Result<()> {
        let (len, size) = (buffer.len(), self.size());
        let call = Call {
            operation: Operation::AllReduce(reduction),
            dtype: buffer.dtype(),
            count: len,
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        self.check_reduction(&call, reduction)?;
        let part = |rank| share(len, size, rank);
        let parts = self.reduce_parts(&call, reduction, buffer.as_buffer(), part)?;
        let parts: Vec<&[u8]> = parts.iter().map(Message::payload).collect();
        buffer.reduce(part(self.rank), reduction, &parts);
        self.gather_parts(&call, &mut buffer, part)
    }

    fn reduce_scatter(
        &self,
        input: Buffer<'_>,
        mut output: BufferMut<'_>,
        reduction: Reduction,
    ) -> Result<()> {
        let count = output.len();
        let call = Call {
            operation: Operation::ReduceScatter(reduction),
            dtype: output.dtype(),
            count,
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        self.check(&call, "input", input, count * self.size())?;
        self.check_reduction(&call, reduction)?;
        let part = |rank: usize| rank * count..(rank + 1) * count;
        let parts = self.reduce_parts(&call, reduction, input, part)?;
        let parts: Vec<&[u8]> = parts.iter().map(Message::payload).collect();
        output.reduce(0..count, reduction, &parts);
        Ok(())
    }

    fn all_gather(&self, input: Buffer<'_>, mut output: BufferMut<'_>) -> Result<()> {
        let count = input.len();
        let call = Call {
            operation: Operation::AllGather,
            dtype: input.dtype(),
            count,
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        self.check(&call, "output", output.as_buffer(), count * self.size())?;
        let part = |rank: usize| rank * count..(rank + 1) * count;
        output
            .part_mut(part(self.rank))
            .copy_from_slice(input.bytes());
        self.gather_parts(&call, &mut output, part)
    }

    fn broadcast(&self, mut buffer: BufferMut<'_>, root: usize) -> Result<()> {
        let call = Call {
            operation: Operation::Broadcast { root },
            dtype: buffer.dtype(),
            count: buffer.len(),
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        self.check_rank(&call, "root", root)?;
        if root == self.rank {
            let bytes = buffer.as_buffer().bytes();
            return self
                .peers()
                .try_for_each(|peer| self.post(&call, peer, bytes));
        }
        let len = buffer.len();
        let out = buffer.part_mut(0..len);
        out.copy_from_slice(self.collect(&call, root, out.len())?.payload());
        Ok(())
    }

    fn send(&self, buffer: Buffer<'_>, to: usize) -> Result<()> {
        let call = Call {
            operation: Operation::Send { to },
            dtype: buffer.dtype(),
            count: buffer.len(),
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        self.check_rank(&call, "to", to)?;
        if to == self.rank {
            return Err(self.invalid(&call, "to", to, "another rank"));
        }
        self.post(&call, to, buffer.bytes())
    }

    fn receive(&self, mut buffer: BufferMut<'_>, from: usize) -> Result<()> {
        let call = Call {
            operation: Operation::Send { to: self.rank },
            dtype: buffer.dtype(),
            count: buffer.len(),
        };
        let _inside = self
            .activity
            .enter(format!("receive of a {call} from rank {from}"));
        self.alive()?;
        self.check_rank(&call, "from", from)?;
        if from == self.rank {
            return Err(self.invalid(&call, "from", from, "another rank"));
        }
        let len = buffer.len();
        let out = buffer.part_mut(0..len);
        out.copy_from_slice(self.collect(&call, from, out.len())?.payload());
        Ok(())
    }

    fn all_to_all(
        &self,
        input: Buffer<'_>,
        send_counts: &[usize],
        mut output: BufferMut<'_>,
        receive_counts: &[usize],
    ) -> Result<()> {
        let call = Call {
            operation: Operation::AllToAll,
            dtype: input.dtype(),
            count: 0,
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        let lists = [
            ("send_counts", send_counts),
            ("receive_counts", receive_counts),
        ];
        for (argument, counts) in lists {
            if counts.len() != self.size() {
                let found = format!("{} counts", counts.len());
                let expected = format!("{}, one for each rank", self.size());
                return Err(self.invalid(&call, argument, found, expected));
            }
        }
        self.check(&call, "input", input, send_counts.iter().sum())?;
        self.check(
            &call,
            "output",
            output.as_buffer(),
            receive_counts.iter().sum(),
        )?;
        let (kept, taken) = (send_counts[self.rank], receive_counts[self.rank]);
        if kept != taken {
            let expected = format!("send_counts[{}], which is {kept}", self.rank);
            return Err(self.invalid(&call, "receive_counts[rank]", taken, expected));
        }
        let part = |counts: &[usize], rank: usize| {
            let start = counts[..rank].iter().sum();
            start..start + counts[rank]
        };
        for peer in self.peers() {
            self.post(&call, peer, input.part(part(send_counts, peer)))?;
        }
        let own = input.part(part(send_counts, self.rank));
        output
            .part_mut(part(receive_counts, self.rank))
            .copy_from_slice(own);
        for peer in self.peers() {
            let out = output.part_mut(part(receive_counts, peer));
            out.copy_from_slice(self.collect(&call, peer, out.len())?.payload());
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        let call = Call {
            operation: Operation::Barrier,
            dtype: DType::U8,
            count: 0,
        };
        let _inside = self.activity.enter(call.to_string());
        self.alive()?;
        for peer in self.peers() {
            self.post(&call, peer, &[])?;
        }
        for peer in self.peers() {
            self.collect(&call, peer, 0)?;
        }
        Ok(())
    }

    fn abort(&self, reason: &str) {
        self.transport.abort(&Failure {
            rank: self.members[self.rank],
            doing: self.activity.snapshot().doing,
            reason: format!("ended the run: {reason}"),
        });
    }
}
