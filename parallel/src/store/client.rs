//! Client side of the store, for each rank.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use super::message::{LONGEST_KEY, LONGEST_MESSAGE, LONGEST_VALUE};
use super::{PURPOSE, Request, Response};
use crate::error::{Failure, ParallelError, Result};
use crate::token::Token;
use crate::wire::{read_frame, write_frame};

/// Maximum response time of the store, in addition to a requested wait.
const ANSWER: Duration = Duration::from_secs(10);
/// Interval between attempts to connect.
const RETRY: Duration = Duration::from_millis(50);

/// Connection to the store of a run.
#[derive(Debug)]
pub struct StoreClient {
    stream: Mutex<TcpStream>,
    address: SocketAddr,
    local: IpAddr,
}

impl StoreClient {
    /// Connects as `rank`. The store need not listen yet: the attempt is repeated for `patience`.
    ///
    /// # Errors
    /// Returns an error if no store listens in time, or the token differs.
    pub fn connect(
        address: SocketAddr,
        token: &Token,
        rank: usize,
        patience: Duration,
    ) -> Result<Self> {
        let deadline = Instant::now() + patience;
        let failed = |error: io::Error| {
            ParallelError::connection(address, format!("rank {rank}: joining the store"), error)
        };
        loop {
            match attempt(address, token, rank) {
                Ok((stream, local)) => {
                    return Ok(Self {
                        stream: Mutex::new(stream),
                        address,
                        local,
                    });
                }
                // A peer that refuses the token will do so again.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(failed(error));
                }
                Err(error) if Instant::now() >= deadline => return Err(failed(error)),
                Err(_) => thread::sleep(RETRY),
            }
        }
    }

    /// Returns the address of this machine in the network of the store.
    pub(crate) fn local_ip(&self) -> IpAddr {
        self.local
    }

    pub(crate) fn ask(&self, request: &Request) -> Result<Response> {
        let patience = match request {
            Request::Wait { patience, .. } => ANSWER + *patience,
            _ => ANSWER,
        };
        let mut stream = self.stream.lock().unwrap_or_else(|held| held.into_inner());
        let mut exchange = || {
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(ANSWER))?;
            write_frame(&mut *stream, &request.encode())?;
            read_frame(&mut *stream, LONGEST_MESSAGE)
        };
        let body = exchange().map_err(|error| self.failed("asking the store", error))?;
        match Response::decode(&body)? {
            Response::Refused(reason) => Err(self.failed("asking the store", reason)),
            response => Ok(response),
        }
    }

    fn failed(&self, operation: &str, reason: impl std::fmt::Display) -> ParallelError {
        ParallelError::connection(self.address, operation, reason)
    }

    fn unexpected(&self, response: Response) -> ParallelError {
        match response {
            Response::Aborted(failure) => ParallelError::Aborted(failure),
            other => self.failed("asking the store", format!("it answered {other:?}")),
        }
    }

    /// Sets `key`.
    ///
    /// # Errors
    /// Returns an error if the key has more than 256 bytes or the value more than 64 KiB, the store
    /// is full or gone, or the run was ended.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        if value.len() > LONGEST_VALUE {
            let expected = format!("at most {LONGEST_VALUE} bytes");
            return Err(ParallelError::argument("value", value.len(), expected));
        }
        let (key, value) = (key.to_owned(), value.to_vec());
        match self.ask(&Request::Set { key, value })? {
            Response::Done => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Returns the value of `key`, if it is set.
    ///
    /// # Errors
    /// Returns an error if the store is gone or the run was ended.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        match self.ask(&Request::Get { key: key.into() })? {
            Response::Value(value) => Ok(Some(value)),
            Response::Missing => Ok(None),
            other => Err(self.unexpected(other)),
        }
    }

    /// Waits until `key` is set, and returns its value, or `None` after `patience`. Other requests
    /// of this connection wait for this one.
    ///
    /// # Errors
    /// Returns an error if the store is gone or the run was ended.
    pub fn wait(&self, key: &str, patience: Duration) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        let key = key.to_owned();
        match self.ask(&Request::Wait { key, patience })? {
            Response::Value(value) => Ok(Some(value)),
            Response::Missing => Ok(None),
            other => Err(self.unexpected(other)),
        }
    }

    /// Adds `amount` to the counter `key`, which begins at zero, and returns its new value.
    ///
    /// # Errors
    /// Returns an error if it overflows, the store is full or gone, or the run was ended.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        check_key(key)?;
        let key = key.to_owned();
        match self.ask(&Request::Add { key, amount })? {
            Response::Number(sum) => Ok(sum),
            other => Err(self.unexpected(other)),
        }
    }

    /// Waits until `count` ranks have called this with the same `name`, which must not be reused.
    ///
    /// # Errors
    /// Returns an error if not all ranks have called it within `patience`, the store is gone, or
    /// the run was ended.
    pub fn barrier(&self, name: &str, count: usize, patience: Duration) -> Result<()> {
        let arrived = self.add(&format!("barrier/{name}"), 1)?;
        let open = format!("barrier/{name}/open");
        if arrived == count as i64 {
            return self.set(&open, &[]);
        }
        match self.wait(&open, patience)? {
            Some(_) => Ok(()),
            None => Err(self.failed(
                &format!("barrier {name}"),
                format!(
                    "fewer than {count} ranks came within {} s",
                    patience.as_secs()
                ),
            )),
        }
    }

    /// Ends the run on all ranks.
    ///
    /// # Errors
    /// Returns an error if the store is gone.
    pub fn abort(&self, failure: Failure) -> Result<()> {
        match self.ask(&Request::Abort(failure))? {
            Response::Aborted(_) => Ok(()),
            other => Err(self.unexpected(other)),
        }
    }
}

fn check_key(key: &str) -> Result<()> {
    if key.len() > LONGEST_KEY {
        let found = format!("{} bytes long", key.len());
        let expected = format!("at most {LONGEST_KEY} bytes long");
        return Err(ParallelError::argument("key", found, expected));
    }
    Ok(())
}

fn attempt(address: SocketAddr, token: &Token, rank: usize) -> io::Result<(TcpStream, IpAddr)> {
    let stream = TcpStream::connect_timeout(&address, crate::token::HANDSHAKE)?;
    stream.set_nodelay(true)?;
    let local = stream.local_addr()?.ip();
    token.connect(&stream, PURPOSE, rank as u32)?;
    Ok((stream, local))
}
