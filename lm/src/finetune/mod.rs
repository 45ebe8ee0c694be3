//! Trains decoders from Hugging Face folders on tokenized data.
//!
//! - [`config`]: the configuration and its checks.
//! - [`data`]: loads files of text or tokens as rows for training and validation.
//! - [`run`]: one run as a state machine: step, evaluate, save, resume.
//! - [`memory`]: estimates the device memory of a run before the model is loaded.
//! - [`export`]: exports the trained model as a quantized folder.
//! - [`init`]: writes a model folder with random weights.
//! - `loss`: loss of rows, and of the validation rows.
//! - `ranks`: the processes of a run, each with a share of the rows.
//! - `step`: inputs of a step, and steps as a CUDA graph.
//! - `parameters`: serializes the trained parameters of a model.

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
