//! Options that several commands share. Each is declared here once.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use anyhow::Result;
use burn::tensor::{Device, FloatDType};
use clap::{Args, ValueEnum};
use nvfp4_lm::decoder::{HeadPrecision, KvPrecision};
use nvfp4_lm::hf::Dtype;
use nvfp4_lm::interchange::Scheme;
use serde::{Deserialize, Serialize};

use super::listed::listed;
use crate::device::{ComputeType, DeviceName};

/// Device of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub(crate) struct DeviceOption {
    /// Run on this device [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE", value_parser = listed::<DeviceName>(DeviceName::values))]
    pub(crate) device: Option<DeviceName>,
}

impl DeviceOption {
    /// Returns the given device, or the first GPU, or the CPU.
    ///
    /// # Errors
    /// Returns an error if none is given and no backend was compiled in.
    pub(crate) fn name(self) -> Result<DeviceName> {
        self.device.map_or_else(DeviceName::best, Ok)
    }
}

/// File of options.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub(crate) struct ConfigOption {
    /// Read options from this JSON file; flags override it
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub(crate) config: Option<PathBuf>,
    /// Print the options in the form of a --config file, and do nothing else
    #[arg(long, conflicts_with = "resume")]
    pub(crate) print_config: bool,
}

/// End and records of a training run.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub(crate) struct SessionOptions {
    /// Stop after this step, with a checkpoint to resume [default: the last step]
    #[arg(long, value_name = "STEP")]
    pub(crate) stop_at: Option<u64>,
    /// Also write the losses, the learning rate and the speed to this folder, for TensorBoard
    #[arg(long, value_name = "DIR")]
    pub(crate) tensorboard: Option<PathBuf>,
}

/// Device and type of a command that does not train.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub(crate) struct ComputeOptions {
    /// Compute in this type [default: bf16 on a GPU, else f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<ComputeType>,
    #[command(flatten)]
    pub(crate) device: DeviceOption,
}

impl ComputeOptions {
    /// Opens the device without autodiff. Also returns its name, and the type to compute in.
    ///
    /// # Errors
    /// Returns an error if the device does not exist.
    pub(crate) fn open(self) -> Result<(DeviceName, Device, FloatDType)> {
        let name = self.device.name()?;
        let dtype = ComputeType::or_of(self.dtype, name);
        Ok((name, name.open()?.without_autodiff(), dtype))
    }
}

/// Arithmetic of a loaded model.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub(crate) struct InferenceOptions {
    /// Quantize weights only, or weights and activations: for quantized models [default: from the
    /// model's folder]
    #[arg(long, value_name = "SCHEME")]
    pub(crate) scheme: Option<Scheme>,
    #[command(flatten)]
    pub(crate) compute: ComputeOptions,
}

/// Storage and launches of decoding.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub(crate) struct DecodingOptions {
    /// Store keys and values in this format [default: fp8 if the model's folder quantizes the
    /// cache, else bf16]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv: Option<KvPrecision>,
    /// Compute the logits with the head in this precision; a lower one decodes faster and changes
    /// the logits slightly [default: stored]
    #[arg(long, value_name = "TYPE")]
    pub(crate) head: Option<HeadPrecision>,
    /// Launch the kernels of a step one by one on a GPU, instead of as a CUDA graph
    #[arg(long)]
    pub(crate) no_graph: bool,
}

impl DecodingOptions {
    /// Returns true if the steps on `device` run as a CUDA graph.
    pub(crate) fn graph(self, device: DeviceName) -> bool {
        matches!(device, DeviceName::Cuda(_)) && !self.no_graph
    }
}

/// Folder of a written model.
#[derive(Debug, Clone, Args)]
#[group(skip)]
pub(crate) struct OutFolder {
    /// Write the output to this folder; it must be empty or absent
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Deref for OutFolder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.out
    }
}

/// Type of written tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum SavedType {
    F32,
    Bf16,
    F16,
}

impl From<SavedType> for Dtype {
    fn from(saved: SavedType) -> Self {
        match saved {
            SavedType::F32 => Self::F32,
            SavedType::Bf16 => Self::BF16,
            SavedType::F16 => Self::F16,
        }
    }
}

/// Type of a written model.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub(crate) struct SaveOption {
    /// Save the model's tensors in this type
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub(crate) save_dtype: SavedType,
}

/// Form of a report.
#[derive(Debug, Clone, Copy, Args)]
#[group(skip)]
pub(crate) struct JsonOption {
    /// Print one JSON document instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

impl JsonOption {
    /// Prints `report`: as a JSON document, or as the lines that `describe` makes of it.
    ///
    /// # Errors
    /// Returns an error if the report cannot be serialized.
    pub(crate) fn print<R: Serialize>(
        self,
        report: &R,
        describe: impl FnOnce(&R) -> Vec<String>,
    ) -> Result<()> {
        match self.json {
            true => println!("{}", serde_json::to_string_pretty(report)?),
            false => describe(report).iter().for_each(|line| println!("{line}")),
        }
        Ok(())
    }
}
