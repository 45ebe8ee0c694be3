//! A small language model and its training, the basis of the command `nvfp4 train`.
//!
//! - [`config`]: options of a run, presets, and checks.
//! - [`model`]: a decoder-only transformer over bytes whose block projections are
//!   [`Nvfp4Linear`](burn_nvfp4::Nvfp4Linear) layers, and the trait of language models.
//! - [`encoder`]: a model of unmodified Burn layers, to be decorated.
//! - [`data`]: loads text files into a corpus, splits it, and draws batches that depend only on
//!   seed and step.
//! - [`optim`]: AdamW and Muon with global-norm clipping, and the learning-rate schedule.
//! - [`train`]: the trainer of all commands: steps, evaluation, checkpoints, resuming.
//! - [`ranks`]: agreement between the processes of a run.
//! - [`groups`]: process groups, by kind of parallelism.
//! - [`checkpoint`]: reads and writes checkpoints.
//! - [`memory`]: device memory that a run needs, and the out-of-memory error.
//! - [`metrics`]: losses and speed over the steps of a run.
//! - [`progress`]: progress of loading, quantizing, evaluating and other long work.
//! - [`sampling`]: selection of the next token.
//! - [`text`]: incremental text output.
//! - [`bytes`]: text generation with a trained byte model.
//! - [`hf`]: folders of Hugging Face models.
//! - [`decoder`]: Llama, Mistral, Qwen, Mixtral and Gemma models loaded from such folders.
//! - [`interchange`]: reads, checks, converts and writes NVFP4 checkpoints of other tools.
//! - [`quantize`]: post-training quantization of a model folder.
//! - [`tokens`]: tokenized data: shards on disk, packed rows, and their order.
//! - [`finetune`]: trains decoders on such data.
//! - [`cost`]: time, memory and kernels of a training step.
//! - [`decode_cost`]: time and kernels of prefill and decoding.
//! - `fuzz`: entry points of every parser for the fuzz targets.
//!
//! On one device and with one number of threads, a run is a function of its configuration and its
//! data: it uses no clock, address or global counter. A resumed run therefore produces the same
//! bytes as an uninterrupted one. Only the event files of TensorBoard contain the time.

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
pub mod progress;
pub mod quantize;
pub mod ranks;
pub mod sampling;
mod tensorboard;
pub mod text;
pub mod tokens;
pub mod train;

#[cfg(all(test, feature = "flex"))]
mod gap;
mod random;
