//! A folder of a Hugging Face model on disk.
//!
//! - [`tensors`]: the tensors of `model.safetensors`, or of shards with an index, memory-mapped.
//! - [`writer`]: such files written, whole or not at all.
//! - [`config`]: `config.json` of transformers 4 and 5, and [`rope`], its rotary positions.
//! - [`generation`]: how to sample, from `generation_config.json`.
//! - [`tokenizer`]: text to tokens and back, by `tokenizer.json` and `tokenizer_config.json`.
//! - [`gguf`]: a GGUF file, turned into such a folder.

pub mod config;
mod config_json;
mod fields;
pub mod generation;
pub mod gguf;
mod header;
mod new_folder;
pub mod rope;
pub mod tensors;
pub mod tokenizer;
mod tokenizer_config;
pub mod writer;

pub use config::{DecoderConfig, Family, FeedForwardConfig, LayerConfig};
pub(crate) use fields::is_neutral;
pub use generation::GenerationConfig;
pub use new_folder::NewFolder;
pub(crate) use new_folder::copy_file;
pub use rope::{Rope, RopeScaling};
pub use safetensors::Dtype;
pub use tensors::{StoredTensor, TensorFolder};
pub use tokenizer::Tokenizer;
pub(crate) use tokenizer_config::TokenizerConfig;
pub use writer::TensorWriter;

/// The file of a model in one piece.
pub const WHOLE_FILE: &str = "model.safetensors";
/// The file that says which shard each tensor is in.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

#[cfg(test)]
pub(crate) mod variant;
