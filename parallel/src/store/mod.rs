//! The rendezvous of a run: keys with values, counters and heartbeats, served by rank 0.
//!
//! A [`Store`] listens on one address alone. A connection begins with a handshake in which both
//! sides prove that they know the [token](crate::token); without it nothing is read beyond 76 bytes.
//! Each connection has a thread of its own, so a peer that is slow, malformed or not authenticated
//! delays nobody, and it is disconnected. Lengths, the number of keys and all memory are bounded.
//!
//! Messages are a length (4 bytes, little endian) and a body; `message` in the source has the
//! fields.

mod client;
mod message;
mod server;

pub use client::StoreClient;
pub(crate) use message::{Request, Response};
pub use server::{Limits, Store};

/// What connections to the store are for, in the handshake.
pub(crate) const PURPOSE: &str = "store";
