//! Training of decoders in Hugging Face folders on tokenized data.
//!
//! - [`config`]: what to train, and the checks on its values.
//! - [`data`]: files of text or tokens to rows for training and validation.
//! - [`run`]: one run as a state machine: step, evaluate, save, resume.
//! - [`memory`]: what a run needs of its device, before the model is loaded.
//! - [`export`]: what was trained, as a quantized folder.
//! - [`init`]: a model folder of random weights.
//! - `loss`: the loss of rows, and of the validation rows.
//! - `ranks`: the processes of a run, each with a part of the rows.
//! - `step`: what a step reads, and steps as a CUDA graph.
//! - `parameters`: the trained parameters of a model as a file.

pub mod config;
pub mod data;
pub mod export;
pub mod init;
mod loss;
pub mod memory;
mod parameters;
mod ranks;
pub mod run;
mod step;

pub use config::{FinetuneConfig, Objective};
pub use data::TrainingData;
pub use run::Finetune;

#[cfg(all(test, feature = "flex"))]
mod frozen_tests;
#[cfg(all(test, feature = "flex", any(feature = "cpu", feature = "cuda")))]
mod graph_tests;
#[cfg(all(test, feature = "flex"))]
mod kept_tests;
#[cfg(all(test, feature = "flex"))]
mod ranks_tests;
#[cfg(all(test, feature = "flex"))]
mod tests;
