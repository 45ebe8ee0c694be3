//! `nvfp4 merge`.

use std::path::PathBuf;

use anyhow::Result;
use burn::tensor::FloatDType;
use clap::Args;
use nvfp4_lm::decoder::{Decoder, FrozenForm};
use nvfp4_lm::finetune::export::{export_merged, remove_unfinished};
use nvfp4_lm::hf::NewFolder;
use nvfp4_lm::interchange::{Dialect, Scheme};

use crate::adapter;
use crate::device::DeviceName;
use crate::layers::LayerBar;
use crate::options::shared::{OutFolder, SaveOption};

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
    /// Quantizes weights only (w4a16), rounded to nearest, as `finetune --export` does. For w4a4
    /// and other methods, merge without --export and run `nvfp4 quantize`.
    #[arg(long, value_name = "DIALECT", conflicts_with = "save_dtype")]
    export: Option<Dialect>,
}

impl Merge {
    pub(crate) fn run(self) -> Result<()> {
        if self.export.is_some() {
            remove_unfinished(&self.out)?;
        }
        // Fails before the model is loaded if the folder has files; nothing is kept.
        drop(NewFolder::create(&self.out)?);
        let adapter = adapter::read(&self.adapter, &self.model)?;
        let device = DeviceName::Flex.open()?.without_autodiff();
        // Packed weights are dequantized one at a time while the model is written.
        let form = FrozenForm::of(&self.model)?;
        let model = Decoder::load_frozen(&self.model, &device, FloatDType::F32, form)?;
        let model = model.with_adapter(&adapter)?;
        let written = match self.export {
            None => {
                model.save(&self.out, self.saved.save_dtype.into(), Some(&self.model))?;
                "merged model".to_owned()
            }
            Some(dialect) => {
                let mut bar = LayerBar::new("quantize");
                let show =
                    &mut |done: usize, total: usize, layer: &str| bar.show(done, total, layer);
                export_merged(model, &self.model, &self.out, dialect, show)?;
                bar.finish();
                format!("{} {}", dialect.name(), Scheme::W4a16.name())
            }
        };
        println!("{written} written to {}", self.out.display());
        Ok(())
    }
}
