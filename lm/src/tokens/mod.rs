//! Tokenized data.
//!
//! - [`shard`]: tokens of documents in a memory-mapped file, with a loss mask where one is needed.
//! - [`encode`]: text files, JSON lines and conversations to documents; [`chat`] has the template of
//!   conversations.
//! - [`bpe`]: a tokenizer of texts.
//! - [`rows`]: several documents in a row of fixed length, and batches of rows.
//! - [`order`]: which row comes when: a permutation for each epoch.

pub mod bpe;
pub mod chat;
pub mod encode;
pub mod order;
pub mod rows;
pub mod shard;

pub use chat::ChatTemplate;
pub use encode::{Encoded, Encoder};
pub use order::{Order, Position};
pub use rows::{Cut, RowBatch, Rows};
pub use shard::{Document, Shard, ShardWriter, Vocabulary};
