//! Tokenized data.
//!
//! - [`shard`]: memory-mapped file with the tokens of documents and an optional loss mask.
//! - [`encode`]: converts text files, JSON lines and conversations to documents; [`chat`] renders
//!   chat templates; [`line`](mod@line) parses lines of JSON.
//! - [`whole`]: reads texts whole, for calibration and evaluation.
//! - [`bpe`]: trains a tokenizer.
//! - [`rows`]: packs documents into rows of fixed length, and batches rows.
//! - [`order`]: shuffles the rows in each epoch.

pub mod bpe;
pub mod chat;
pub mod encode;
pub mod line;
pub mod order;
pub mod rows;
pub mod shard;
pub mod whole;

pub use chat::ChatTemplate;
pub use encode::{Encoded, Encoder};
pub use order::{Order, Position};
pub use rows::{Cut, RowBatch, Rows};
pub use shard::{Document, Shard, ShardWriter, Vocabulary};
pub use whole::{TextFile, Texts};
