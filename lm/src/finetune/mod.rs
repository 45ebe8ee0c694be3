//! Trains decoders from Hugging Face folders on tokenized data.
//!
//! - [`config`]: the configuration and its checks.
//! - [`cost`]: measures a step with random weights.
//! - [`data`]: loads files of text or tokens as rows for training and validation.
//! - `task`: the [task](crate::train::Task) of a run: model, teacher, data and loss.
//! - [`memory`]: estimates the device memory of a run before the model is loaded.
//! - [`export`]: writes the trained model: as a folder, as adapters, and quantized.
//! - [`saved`]: evaluates models in the form in which they were saved.
//! - [`init`]: writes a model folder with random weights.
//! - `loss`: loss of rows, and of the validation rows.
//! - `step`: inputs of a step on the device.
//! - `parameters`: serializes the trained parameters of a model.

pub mod config;
pub mod cost;
pub mod data;
pub mod export;
pub mod init;
mod loss;
pub mod memory;
mod parameters;
pub mod saved;
mod step;
mod task;

pub use config::{FinetuneConfig, Objective};
pub use data::TrainingData;
pub use task::{FinetuneRun, FinetuneTask};

/// A run of the command: its model, its optimizer, and its progress.
pub type Finetune<'a> = crate::train::Trainer<FinetuneTask<'a>>;

#[cfg(all(test, feature = "flex"))]
mod frozen_tests;
#[cfg(all(test, feature = "flex", any(feature = "cpu", feature = "cuda")))]
mod graph_tests;
#[cfg(all(test, feature = "flex"))]
mod kept_tests;
#[cfg(all(test, feature = "flex"))]
mod ranks_tests;
#[cfg(all(test, feature = "flex"))]
mod saved_tests;
#[cfg(all(test, feature = "flex"))]
mod tests;
