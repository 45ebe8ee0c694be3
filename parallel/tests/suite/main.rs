//! Collectives between threads and processes, the store with honest and other peers, the launcher.

mod collectives;
mod launch;
mod peers;
mod worlds;
