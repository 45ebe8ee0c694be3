//! Empty; see `Cargo.toml`.
