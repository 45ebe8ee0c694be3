//! Collectives between threads and processes, the store with valid and invalid peers, the launcher.

mod collectives;
mod launch;
mod peers;
mod worlds;
