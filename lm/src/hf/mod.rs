//! A folder of a Hugging Face model on disk.
//!
//! - [`tensors`]: memory-mapped tensors of `model.safetensors`, or of shards with an index.
//! - [`writer`]: writes such files atomically.
//! - [`config`]: `config.json` of transformers 4 and 5, and [`rope`], its rotary embedding.
//! - [`generation`]: sampling parameters, from `generation_config.json`.
//! - [`tokenizer`]: encodes and decodes text, by `tokenizer.json` and `tokenizer_config.json`.
//! - [`gguf`]: converts a GGUF file to such a folder.

pub mod config;
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

pub use config::{
    Biases, BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, LayerConfig,
};
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

/// File of the configuration.
pub const CONFIG_FILE: &str = "config.json";
/// File of a model that is not sharded.
pub const WHOLE_FILE: &str = "model.safetensors";
/// File that assigns each tensor to a shard.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

#[cfg(test)]
pub(crate) mod variant;
