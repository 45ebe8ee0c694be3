//! Server side of the store, on rank 0.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::PURPOSE;
use super::message::{LONGEST_MESSAGE, Request, Response};
use crate::activity::Snapshot;
use crate::error::{Failure, ParallelError, Result};
use crate::token::Token;
use crate::wire::{read_frame, write_frame};

/// Maximum bytes of all keys and values.
const MOST_BYTES: usize = 16 << 20;
/// Maximum number of concurrent handshakes; further connections are closed at once.
const MOST_HANDSHAKES: usize = 256;
/// Interval between checks for new connections and for the age of heartbeats.
const TICK: Duration = Duration::from_millis(20);

/// Time limits after which a rank is considered dead or hanging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum time without a heartbeat: after it, the rank has died or its machine is unreachable.
    pub silence: Duration,
    /// Maximum duration of a collective, including the wait for the slowest rank.
    pub operation: Duration,
}

/// Last known state of a rank.
#[derive(Debug)]
struct Pulse {
    heard: Instant,
    snapshot: Snapshot,
}

#[derive(Debug, Default)]
struct State {
    values: HashMap<String, Vec<u8>>,
    counters: HashMap<String, i64>,
    bytes: usize,
    failure: Option<Failure>,
    pulses: HashMap<usize, Pulse>,
    left: usize,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    world: usize,
    limits: Limits,
    closed: AtomicBool,
    handshakes: AtomicUsize,
}

/// Store of a run; see the [module above](super). It ends when it is dropped.
pub struct Store {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Listens only on `address` (port 0: any free port) for the ranks of a world of `world` ranks.
    ///
    /// # Errors
    /// Returns an error if the address is in use or does not belong to this machine.
    pub fn start(address: SocketAddr, token: Token, world: usize, limits: Limits) -> Result<Self> {
        let failed = |error: io::Error| {
            ParallelError::connection(address, "listening for the ranks of the run", error)
        };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            world,
            limits,
            closed: AtomicBool::new(false),
            handshakes: AtomicUsize::new(0),
        });
        let serving = shared.clone();
        let thread = thread::Builder::new()
            .name("store".into())
            .spawn(move || serve(&listener, &serving, &token))
            .map_err(failed)?;
        Ok(Self {
            address,
            shared,
            thread: Some(thread),
        })
    }

    /// Returns the address that the store listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the failure that ended the run, if any.
    pub fn failure(&self) -> Option<Failure> {
        self.shared.lock().failure.clone()
    }

    /// Ends the run; the first failure is kept.
    pub(crate) fn end(&self, failure: Failure) {
        self.shared.fail(failure);
    }

    /// Waits until `count` ranks have left or the run was ended, for at most `patience`.
    pub(crate) fn wait_for_leaving(&self, count: usize, patience: Duration) {
        let state = self.shared.lock();
        let going = |state: &mut State| state.left < count && state.failure.is_none();
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, patience, going);
        drop(waited);
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Remaining ranks would continue to send requests to the threads that answer them.
        let mut state = self.shared.lock();
        if state.left < self.shared.world {
            state.failure.get_or_insert_with(|| Failure {
                rank: 0,
                doing: String::new(),
                reason: "failed: it left the run, and the store with it".into(),
            });
        }
        drop(state);
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|held| held.into_inner())
    }

    /// Ends the run; the first failure is kept.
    fn fail(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// Ends the run if a rank is silent or an operation takes too long.
    fn watch(&self) {
        let mut state = self.lock();
        if state.failure.is_some() {
            return;
        }
        let silent = |pulse: &Pulse| pulse.heard.elapsed() > self.limits.silence;
        let pulses = &state.pulses;
        let failure = if let Some((rank, pulse)) = pulses.iter().find(|(_, pulse)| silent(pulse)) {
            let reason = format!("sent no heartbeat for {} s", self.limits.silence.as_secs());
            Some(pulse.failure(*rank, reason))
        } else if pulses
            .values()
            .any(|pulse| pulse.is_stuck(self.limits.operation))
        {
            // The others wait for the rank that has progressed least; on ties, for one that is not
            // in a collective.
            let last = pulses.iter().min_by_key(|(rank, pulse)| {
                (pulse.snapshot.sequence, pulse.snapshot.inside, **rank)
            });
            last.map(|(rank, pulse)| {
                let limit = self.limits.operation.as_secs();
                let since = pulse.snapshot.since.as_secs();
                let reason = format!(
                    "hangs: a collective has waited for more than {limit} s, and this rank has \
                     come least far, doing the same for {since} s"
                );
                pulse.failure(*rank, reason)
            })
        } else {
            None
        };
        if let Some(failure) = failure {
            state.failure = Some(failure);
            drop(state);
            self.changed.notify_all();
        }
    }

    fn answer(&self, rank: usize, request: Request) -> Response {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Response::Aborted(failure.clone());
        }
        match request {
            Request::Set { key, value } => {
                let before = state.values.get(&key).map(|old| key.len() + old.len());
                let bytes = state.bytes - before.unwrap_or(0) + key.len() + value.len();
                if bytes > MOST_BYTES {
                    return full();
                }
                state.bytes = bytes;
                state.values.insert(key, value);
                self.changed.notify_all();
                Response::Done
            }
            Request::Get { key } => match state.values.get(&key) {
                Some(value) => Response::Value(value.clone()),
                None => Response::Missing,
            },
            Request::Wait { key, patience } => {
                let going = |state: &mut State| {
                    let closed = self.closed.load(Ordering::Relaxed);
                    !closed && state.failure.is_none() && !state.values.contains_key(&key)
                };
                let waited = self.changed.wait_timeout_while(state, patience, going);
                let state = waited.unwrap_or_else(|held| held.into_inner()).0;
                match (&state.failure, state.values.get(&key)) {
                    (Some(failure), _) => Response::Aborted(failure.clone()),
                    (None, Some(value)) => Response::Value(value.clone()),
                    (None, None) => Response::Missing,
                }
            }
            Request::Add { key, amount } => {
                if !state.counters.contains_key(&key) {
                    let bytes = state.bytes + key.len() + size_of::<i64>();
                    if bytes > MOST_BYTES {
                        return full();
                    }
                    state.bytes = bytes;
                }
                let counter = state.counters.entry(key).or_default();
                match counter.checked_add(amount) {
                    Some(sum) => {
                        *counter = sum;
                        Response::Number(sum)
                    }
                    None => Response::Refused(format!("{counter} + {amount} overflows")),
                }
            }
            Request::Abort(failure) => {
                drop(state);
                self.fail(failure.clone());
                Response::Aborted(failure)
            }
            Request::Heartbeat(snapshot) => {
                let heard = Instant::now();
                state.pulses.insert(rank, Pulse { heard, snapshot });
                Response::Done
            }
            Request::Leave => {
                state.pulses.remove(&rank);
                state.left += 1;
                self.changed.notify_all();
                Response::Done
            }
        }
    }
}

impl Pulse {
    fn is_stuck(&self, limit: Duration) -> bool {
        self.snapshot.inside && self.snapshot.since + self.heard.elapsed() > limit
    }

    fn failure(&self, rank: usize, reason: String) -> Failure {
        Failure {
            rank,
            doing: self.snapshot.doing.clone(),
            reason,
        }
    }
}

fn full() -> Response {
    Response::Refused(format!(
        "all keys and values together have more than {MOST_BYTES} bytes"
    ))
}

/// Accepts connections until the store is dropped.
fn serve(listener: &TcpListener, shared: &Arc<Shared>, token: &Token) {
    while !shared.closed.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, peer)) => begin(stream, peer, shared, token),
            // `WouldBlock` if no peer connects; any other error concerns only one peer.
            Err(_) => {
                shared.watch();
                thread::sleep(TICK);
            }
        }
    }
}

/// Starts the thread of a connection, unless there are too many.
fn begin(stream: TcpStream, peer: SocketAddr, shared: &Arc<Shared>, token: &Token) {
    if shared.handshakes.fetch_add(1, Ordering::Relaxed) >= MOST_HANDSHAKES {
        shared.handshakes.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!("store: {peer} was disconnected: too many handshakes at a time");
        return;
    }
    let (shared, token) = (shared.clone(), token.clone());
    let count = shared.clone();
    let started = thread::Builder::new()
        .name("store peer".into())
        .spawn(move || {
            let rank = handshake(&stream, &shared, &token);
            shared.handshakes.fetch_sub(1, Ordering::Relaxed);
            match rank {
                Ok(rank) => converse(stream, rank, &shared),
                Err(error) => tracing::warn!("store: {peer} was disconnected: {error}"),
            }
        });
    if let Err(error) = started {
        count.handshakes.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!("store: {peer} was disconnected: {error}");
    }
}

fn handshake(stream: &TcpStream, shared: &Shared, token: &Token) -> io::Result<usize> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    let rank = token.accept(stream, PURPOSE)? as usize;
    if rank >= shared.world {
        let reason = format!("it says that it is rank {rank} of {}", shared.world);
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(rank)
}

/// Answers the requests of rank `rank` until it leaves or its connection ends.
fn converse(mut stream: TcpStream, rank: usize, shared: &Shared) {
    // The end of the connection with the heartbeats indicates that the rank has died.
    let mut beats = false;
    let end = loop {
        let body = match read_frame(&mut stream, LONGEST_MESSAGE) {
            Ok(body) => body,
            Err(error) => break error.to_string(),
        };
        let request = match Request::decode(&body) {
            Ok(request) => request,
            Err(error) => {
                let refused = Response::Refused(error.to_string());
                let _ = write_frame(&mut stream, &refused.encode());
                break error.to_string();
            }
        };
        beats |= matches!(request, Request::Heartbeat(_));
        let leaves = request == Request::Leave;
        let response = shared.answer(rank, request);
        if let Err(error) = write_frame(&mut stream, &response.encode()) {
            break error.to_string();
        }
        if leaves {
            return;
        }
    };
    if beats && !shared.closed.load(Ordering::Relaxed) {
        let state = shared.lock();
        let Some(pulse) = state.pulses.get(&rank) else {
            return;
        };
        let reason = format!("died: its connection to the store ended ({end})");
        let failure = pulse.failure(rank, reason);
        drop(state);
        shared.fail(failure);
    }
}
