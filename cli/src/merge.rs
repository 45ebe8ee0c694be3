//! `nvfp4 merge`.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use burn::tensor::FloatDType;
use clap::Args;
use nvfp4_lm::decoder::{Decoder, FrozenForm};
use nvfp4_lm::finetune::export::{export_merged, remove_unfinished};
use nvfp4_lm::hf::NewFolder;
use nvfp4_lm::interchange::{Checkpoint, Dialect, QuantConfig, Scheme};

use crate::adapter;
use crate::device::DeviceName;
use crate::options::shared::{OutFolder, SaveOption};
use crate::terminal::{warn, warn_of, without_tokenizer};

#[derive(Args)]
pub(crate) struct Merge {
    /// Merge into the model in this folder, in high precision or quantized to NVFP4
    #[arg(value_name = "MODEL")]
    model: PathBuf,
    /// Merge the LoRA adapters in this folder, in PEFT's format
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,
    #[command(flatten)]
    out: OutFolder,
    #[command(flatten)]
    saved: SaveOption,
    /// Write the model quantized to NVFP4, in this dialect, instead of in high precision
    ///
    /// Quantizes weights only (w4a16), rounded to nearest, as `finetune --export` does. For w4a4,
    /// also of a MODEL that is w4a4, and for other methods, merge without --export and run `nvfp4
    /// quantize`.
    #[arg(long, value_name = "DIALECT", conflicts_with = "save_dtype")]
    export: Option<Dialect>,
}

impl Merge {
    /// Refuses to write the model of W4A4 layers without the quantization of their activations:
    /// their static scales are those of the model without the adapters.
    fn check_export(&self, dialect: Dialect) -> Result<()> {
        let checkpoint = Checkpoint::scan(&self.model)?;
        let scheme = checkpoint.config().and_then(QuantConfig::scheme);
        ensure!(
            scheme != Some(Scheme::W4a4),
            "export is {}, but {} is w4a4 and merge writes w4a16: merge without --export, then run \
             `nvfp4 quantize` with --scheme w4a4 and --calibration on the merged model (or with \
             --scheme w4a16)",
            dialect.name(),
            self.model.display()
        );
        Ok(())
    }

    pub(crate) fn run(self) -> Result<()> {
        if let Some(dialect) = self.export {
            self.check_export(dialect)?;
            remove_unfinished(&self.out)?;
        }
        // Fails before the model is loaded if the folder has files; nothing is kept.
        drop(NewFolder::create(&self.out)?);
        let adapter = adapter::read(&self.adapter, &self.model)?;
        let device = DeviceName::Flex.open()?.without_autodiff();
        // Packed weights are dequantized one at a time while the model is written.
        let form = FrozenForm::of(&self.model)?;
        warn_of(&self.model)?;
        without_tokenizer(&self.model).into_iter().for_each(warn);
        let model = Decoder::load_frozen(&self.model, &device, FloatDType::F32, form)?;
        let model = model.with_adapter(&adapter)?;
        let written = match self.export {
            None => {
                model.save(&self.out, self.saved.save_dtype.into(), Some(&self.model))?;
                "merged model".to_owned()
            }
            Some(dialect) => {
                export_merged(model, &self.model, &self.out, dialect)?;
                format!("{} {}", dialect.name(), Scheme::W4a16.name())
            }
        };
        println!("{written} written to {}", self.out.display());
        Ok(())
    }
}
