//! Rendezvous of a run: keys with values, counters and heartbeats, served by rank 0.
//!
//! A [`Store`] listens on a single address. A connection begins with a handshake in which both
//! sides prove that they know the [token](crate::token); without it, nothing beyond 76 bytes is
//! read. Each connection has a separate thread, so a peer that is slow, malformed or not
//! authenticated delays no other peer, and is disconnected. Lengths, the number of keys and all
//! memory are bounded.
//!
//! Messages consist of a length (4 bytes, little endian) and a body; the source file `message`
//! documents the fields.

mod client;
mod message;
mod server;

pub use client::StoreClient;
pub(crate) use message::{Request, Response};
pub use server::{Limits, Store};

/// Purpose of connections to the store, for the handshake.
pub(crate) const PURPOSE: &str = "store";
