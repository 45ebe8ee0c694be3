//! Nothing: see `tests`.
