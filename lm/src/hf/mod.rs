//! A folder of a Hugging Face model on disk.
//!
//! - [`tensors`]: memory-mapped tensors of `model.safetensors`, or of shards with an index.
//! - [`plan`]: plans such files, and [`writer`] and [`planned_writer`] write them atomically.
//! - [`config`]: `config.json` of transformers 4 and 5, and [`rope`], its rotary embedding.
//! - `fp8`: scales of weights in FP8.
//! - [`generation`]: sampling parameters, from `generation_config.json`.
//! - [`tokenizer`]: encodes and decodes text, by `tokenizer.json` and `tokenizer_config.json`.

pub mod config;
mod fields;
pub(crate) mod folder;
pub(crate) mod fp8;
pub mod generation;
mod header;
mod new_folder;
pub mod plan;
pub mod planned_writer;
pub mod rope;
pub mod tensors;
pub mod tokenizer;
mod tokenizer_config;
pub mod writer;

pub use config::{
    Biases, BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, LatentConfig,
    LayerConfig, Scoring,
};
pub(crate) use fields::is_neutral;
pub use generation::GenerationConfig;
pub use new_folder::NewFolder;
pub(crate) use new_folder::copy_file;
pub use plan::{ModelPlan, TensorSpec};
pub use planned_writer::PlannedWriter;
pub use rope::{Rope, RopeScaling};
pub use safetensors::Dtype;
pub use tensors::{StoredTensor, TensorFolder};
pub use tokenizer::Tokenizer;
pub(crate) use tokenizer_config::{TOKENIZER_CONFIG, TokenizerConfig};
pub use writer::{TensorSink, TensorWriter};

/// File of the configuration.
pub const CONFIG_FILE: &str = "config.json";
/// File of a model that is not sharded.
pub const WHOLE_FILE: &str = "model.safetensors";
/// File that assigns each tensor to a shard.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

#[cfg(test)]
pub(crate) mod variant;
