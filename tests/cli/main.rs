//! End-to-end tests of the command, with models that train in a second.
//!
//! Resumed runs use the device in `NVFP4_TEST_DEVICE`: `flex` (the default), `cpu` or `cuda`. All
//! other runs use Flex, except tests of features of another device.

#![cfg(feature = "flex")]

mod checkpoints;
mod command;
mod cost;
#[cfg(feature = "cpu")]
mod decorate;
mod finetune;
mod generate;
mod input;
mod losses;
mod machine;
mod mistakes;
mod mixed;
mod quantize;
mod ranks;
mod resume;
mod study;
mod support;
mod train;
