//! Group of processes, with a TCP connection between each pair.
//!
//! For runs on CPUs, for agreements between the ranks of a GPU run (whether to stop, the content of
//! a checkpoint), and for the tests of the launcher. Rank `r` listens on its own address, on the
//! interface through which it reaches the store, and publishes the address in the store; rank
//! `s > r` connects to it. Both prove that they know the token.
//!
//! A message consists of its kind (1 byte), its group (8 bytes), its length (8 bytes) and its
//! content. The machines of a run must be little endian.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Failure, ParallelError, Result};
use crate::inbox::{Absent, Inbox, Transport};
use crate::store::{Request, StoreClient};
use crate::token::{HANDSHAKE, Token};
use crate::wire::read_exactly;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "elements travel as they lie in memory"
);

const PURPOSE: &str = "mesh";
const DATA: u8 = 0;
/// Message kind whose content is a [`Failure`], as in [`Request::Abort`].
const ABORT: u8 = 1;
/// Maximum bytes of the content; [`crate::collective`] sends slightly less.
const LONGEST: u64 = (1 << 30) + 64;
const TICK: Duration = Duration::from_millis(10);

/// Connections of a rank to all others.
pub(crate) struct Mesh {
    rank: usize,
    /// Connection to each rank; `None` for this one.
    peers: Vec<Option<Mutex<TcpStream>>>,
    inbox: Arc<Inbox>,
}

impl Mesh {
    /// Connects rank `rank` of `world` to all others. All ranks call it.
    ///
    /// # Errors
    /// Returns an error if a rank does not connect within `patience` or does not know the token, or
    /// the run was ended.
    pub fn connect(
        store: &StoreClient,
        token: &Token,
        (rank, world): (usize, usize),
        patience: Duration,
    ) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let ip = store.local_ip();
        let failed = |address: SocketAddr, error: io::Error| {
            let operation = format!("rank {rank}: connecting to the other ranks");
            ParallelError::connection(address, operation, error)
        };
        let any = SocketAddr::new(ip, 0);
        let listener = TcpListener::bind(any).map_err(|error| failed(any, error))?;
        let address = listener.local_addr().map_err(|error| failed(any, error))?;
        store.set(&key(rank), address.to_string().as_bytes())?;

        let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
        for (peer, place) in streams.iter_mut().enumerate().take(rank) {
            let left = deadline.saturating_duration_since(Instant::now());
            let found = store.wait(&key(peer), left)?;
            let found = found.and_then(|text| String::from_utf8(text).ok()?.parse().ok());
            let Some(found) = found else {
                let reason = format!("rank {peer} did not come within {} s", patience.as_secs());
                return Err(ParallelError::connection(
                    ip,
                    format!("rank {rank}: joining"),
                    reason,
                ));
            };
            let stream = reach(found, token, rank).map_err(|error| failed(found, error))?;
            *place = Some(stream);
        }
        let missing = world - rank - 1;
        accept(
            &listener,
            token,
            (rank, world),
            missing,
            deadline,
            &mut streams,
        )
        .map_err(|error| failed(address, error))?;

        let inbox = Arc::new(Inbox::default());
        for (peer, stream) in streams.iter().enumerate() {
            let Some(stream) = stream else { continue };
            let stream = stream.try_clone().map_err(|error| failed(address, error))?;
            let inbox = inbox.clone();
            thread::Builder::new()
                .name("collective".into())
                .spawn(move || receive(stream, peer, &inbox))
                .map_err(|error| failed(address, error))?;
        }
        let peers = streams.into_iter().map(|stream| stream.map(Mutex::new));
        Ok(Self {
            rank,
            peers: peers.collect(),
            inbox,
        })
    }

    fn write(&self, to: usize, kind: u8, group: u64, message: &[u8]) -> io::Result<()> {
        let peer = self.peers[to].as_ref();
        let stream = peer.expect("a rank sends nothing to itself");
        let mut stream = stream.lock().unwrap_or_else(|held| held.into_inner());
        let mut header = [0; 17];
        header[0] = kind;
        header[1..9].copy_from_slice(&group.to_le_bytes());
        header[9..].copy_from_slice(&(message.len() as u64).to_le_bytes());
        stream.write_all(&header)?;
        stream.write_all(message)
    }
}

impl Transport for Mesh {
    fn send(&self, to: usize, group: u64, message: Vec<u8>) -> std::result::Result<(), Absent> {
        if let Some(failure) = self.inbox.failure() {
            return Err(Absent::Aborted(failure));
        }
        self.write(to, DATA, group, &message).map_err(|error| {
            // A message that the peer sent before it went gives the reason.
            match self.inbox.failure() {
                Some(failure) => Absent::Aborted(failure),
                None => Absent::Lost(error.to_string()),
            }
        })
    }

    fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    fn abort(&self, failure: &Failure) {
        if self.inbox.failure().is_some() {
            return;
        }
        self.inbox.abort(failure);
        let message = Request::Abort(failure.clone()).encode();
        for peer in (0..self.peers.len()).filter(|peer| *peer != self.rank) {
            // A peer whose connection is full or gone learns it from the store. Waiting for it here
            // could take forever.
            if let Some(Ok(stream)) = self.peers[peer].as_ref().map(Mutex::try_lock) {
                let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
                drop(stream);
                let _ = self.write(peer, ABORT, 0, &message);
            }
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            let stream = peer.lock().unwrap_or_else(|held| held.into_inner());
            // Also ends the thread that reads it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn key(rank: usize) -> String {
    format!("mesh/{rank}")
}

fn reach(address: SocketAddr, token: &Token, rank: usize) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, HANDSHAKE)?;
    stream.set_nodelay(true)?;
    token.connect(&stream, PURPOSE, rank as u32)?;
    // The handshake identifies the connecting rank; the accepting rank is known by its address.
    Ok(stream)
}

/// Accepts the `missing` ranks above `rank`. Other peers are disconnected. Each connection has a
/// separate thread until then.
fn accept(
    listener: &TcpListener,
    token: &Token,
    (rank, world): (usize, usize),
    mut missing: usize,
    deadline: Instant,
    streams: &mut [Option<TcpStream>],
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (sender, arrivals) = channel();
    while missing > 0 {
        if Instant::now() >= deadline {
            let absent: Vec<usize> = (rank + 1..world)
                .filter(|r| streams[*r].is_none())
                .collect();
            let reason = format!("ranks {absent:?} did not connect in time");
            return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
        }
        if let Ok((stream, peer)) = listener.accept() {
            greet(stream, peer, token, &sender)?;
        }
        if let Ok((peer, stream)) = arrivals.recv_timeout(TICK) {
            let free = (rank + 1..world).contains(&peer) && streams[peer].is_none();
            if free {
                streams[peer] = Some(stream);
                missing -= 1;
            } else {
                tracing::warn!("rank {rank}: a second connection as rank {peer} was closed");
            }
        }
    }
    Ok(())
}

fn greet(
    stream: TcpStream,
    peer: SocketAddr,
    token: &Token,
    sender: &Sender<(usize, TcpStream)>,
) -> io::Result<()> {
    let (token, sender) = (token.clone(), sender.clone());
    let body = move || {
        let greeted = || -> io::Result<u32> {
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            token.accept(&stream, PURPOSE)
        };
        match greeted() {
            Ok(rank) => drop(sender.send((rank as usize, stream))),
            Err(error) => tracing::warn!("{peer} was disconnected: {error}"),
        }
    };
    thread::Builder::new()
        .name("handshake".into())
        .spawn(body)?;
    Ok(())
}

/// Moves the messages of `peer` to the inbox until the connection ends.
fn receive(mut stream: TcpStream, peer: usize, inbox: &Inbox) {
    let end = loop {
        let mut header = [0; 17];
        if let Err(error) = stream.read_exact(&mut header) {
            break error.to_string();
        }
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let (kind, group, length) = (header[0], number(&header[1..9]), number(&header[9..]));
        if length > LONGEST {
            break format!("it sent a message of {length} bytes");
        }
        match read_exactly(&mut stream, length as usize) {
            Ok(message) if kind == DATA => inbox.push(peer, group, message),
            Ok(message) => match Request::decode(&message) {
                Ok(Request::Abort(failure)) if kind == ABORT => inbox.abort(&failure),
                _ => break "it sent a malformed message".into(),
            },
            Err(error) => break error.to_string(),
        }
    };
    inbox.lose(peer, end);
}

/// Resolves `name` to an address of this machine, to listen on, or of another machine.
///
/// # Errors
/// Returns an error if the name does not resolve.
pub(crate) fn resolve(name: &str, port: u16) -> Result<SocketAddr> {
    use std::net::ToSocketAddrs;
    let found = (name, port).to_socket_addrs();
    let addresses: Vec<SocketAddr> = found
        .map_err(|error| ParallelError::connection(name, "looking the address up", error))?
        .collect();
    // All machines must choose the same address.
    let first = addresses
        .iter()
        .find(|address| matches!(address.ip(), IpAddr::V4(_)))
        .or(addresses.first());
    first.copied().ok_or_else(|| {
        ParallelError::connection(name, "looking the address up", "it has no address")
    })
}
