//! The command, end to end, with models that train in a second.
//!
//! Runs that are resumed are on the device that `NVFP4_TEST_DEVICE` names: `flex` (the default),
//! `cpu` or `cuda`. All others are on Flex, but for those of what another device has.

#![cfg(feature = "flex")]

mod checkpoints;
mod cost;
#[cfg(feature = "cpu")]
mod decorate;
mod finetune;
mod generate;
mod input;
mod losses;
mod machine;
mod ranks;
mod resume;
mod study;
mod support;
mod train;
