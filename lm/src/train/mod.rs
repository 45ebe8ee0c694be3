//! Trains a model: the loop that `nvfp4 train`, `finetune` and `pretrain` share.
//!
//! - `task`: the trait [`Task`], which is what differs between the commands: model, data, loss,
//!   and contents of a checkpoint; and its [`Settings`].
//! - `trainer`: the [`Trainer`] of a task: steps, evaluation, rows, checkpoints, resuming.
//! - `rank`: a rank with its model and optimizer: gradients, their reduction, and CUDA graphs.
//! - `bytes`: the task of `nvfp4 train`, a language model over bytes. The task of the other commands
//!   is in [`finetune`](crate::finetune).
//! - [`telemetry`]: statistics of quantization over the steps of a run.
//! - `digest`: checks that ranks agree on the values of their parameters.

pub(crate) mod bytes;
pub(crate) mod digest;
#[cfg(all(test, feature = "flex"))]
mod parallel_tests;
pub(crate) mod rank;
#[cfg(all(test, feature = "flex"))]
mod schedule_tests;
mod task;
pub mod telemetry;
mod trainer;

pub use bytes::{ByteRun, ByteTask, Checkpoint};
pub use task::{GraphInput, LossReduction, Settings, Sharding, StepInput, Task};
pub use trainer::{MEASURED_EVERY, Observer, Outcome, Trainer};
