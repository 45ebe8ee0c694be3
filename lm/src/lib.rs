//! A small language model and its training, on which the command `nvfp4 train` is built.
//!
//! - [`config`]: what to train; presets, and the checks on their values.
//! - [`model`]: a decoder-only transformer over bytes whose block projections are
//!   [`Nvfp4Linear`](burn_nvfp4::Nvfp4Linear) layers, and the trait of language models.
//! - [`encoder`]: a model of Burn's own layers, unmodified, which is decorated.
//! - [`data`]: text files to a corpus, its split, and batches that depend on seed and step alone.
//! - [`optim`]: AdamW and Muon with global-norm clipping, and the learning-rate schedule.
//! - [`train`]: one training run as a state machine: step, evaluate, save, resume.
//! - [`ranks`]: what the processes of a run agree on.
//! - [`groups`]: their groups, by kind of parallelism.
//! - [`checkpoint`]: a run on disk.
//! - [`memory`]: the device memory that a run needs, and the error when there is too little.
//! - [`metrics`]: losses and speed over the steps of a run.
//! - [`sampling`]: which token comes next.
//! - [`text`]: text that comes in pieces.
//! - [`bytes`]: text from a trained byte model.
//! - [`hf`]: folders of Hugging Face models.
//! - [`decoder`]: Llama, Mistral, Qwen3 and Mixtral from such folders.
//! - [`interchange`]: NVFP4 checkpoints of other tools: read, checked, converted, written.
//! - [`quantize`]: post-training quantization of a model folder.
//! - [`tokens`]: tokenized data: shards on disk, packed rows, their order.
//! - [`finetune`]: training of decoders on such data.
//! - [`cost`]: time, memory and kernels of a training step.
//! - [`decode_cost`]: time and kernels of prefill and decoding.
//! - `fuzz`: every parser, for the fuzz targets.
//!
//! On one device and with one number of threads, a run is a function of its configuration and its
//! data: it uses no clock, no address and no global counter. So a resumed run reaches the same
//! bytes as an uninterrupted one.

pub mod bytes;
mod capture;
pub mod checkpoint;
pub mod config;
pub mod cost;
pub mod data;
pub mod decode_cost;
pub mod decoder;
pub mod encoder;
pub mod eval;
pub mod finetune;
#[doc(hidden)]
pub mod fuzz;
pub mod groups;
pub mod hf;
pub mod interchange;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod optim;
pub mod quantize;
pub mod ranks;
pub mod sampling;
pub mod text;
pub mod tokens;
pub mod train;

#[cfg(all(test, feature = "flex"))]
mod gap;
mod random;
