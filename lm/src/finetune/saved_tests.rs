//! Compares the losses of saved models with those of the training.

use burn::tensor::{Device, FloatDType};
use burn_nvfp4::parallel::ProcessGroup;

use super::frozen_tests::some_adapters;
use super::loss::cross_entropy_of;
use super::saved::saved_loss;
use super::tests::{config, data, finished, valid_losses};
use super::*;
use crate::decoder::Decoder;
use crate::hf::Dtype;
use crate::interchange::{Dialect, Scheme};
use nvfp4_test_support::{Scratch, golden};

#[test]
fn a_saved_model_computes_without_the_recipe() {
    let folder = Scratch::new("finetune-saved");
    let config = config(&golden("llama3-tiny"), &folder, "weight_only_qat");
    let data = data(&config);
    let run = finished(&config, &data, &folder.join("run"));
    let trained = *valid_losses(&run).last().unwrap();
    let device = Device::flex();

    // In high precision, the loss is not that of the quantized forward.
    let high = folder.join("model");
    run.save_model(&high, Dtype::F32).unwrap();
    let found = saved_loss(&config, &data, &high, None, &device).unwrap();
    let loaded = Decoder::load(&high, &device, FloatDType::F32).unwrap();
    let (sizes, alone) = ([config.batch, config.eval_rows], ProcessGroup::single());
    let expected = cross_entropy_of(&loaded, &data.valid, sizes, &device, &alone).unwrap();
    assert_eq!(found, expected);
    assert!((found - trained).abs() > 1e-6, "{found}, {trained}");

    // The exported folder has the weights of the training's forward.
    let quantized = folder.join("nvfp4");
    // An interrupted export is replaced.
    std::fs::create_dir_all(quantized.join(".nvfp4_quantize/part-00000")).unwrap();
    std::fs::create_dir_all(folder.join("nvfp4.f32")).unwrap();
    let dialect = Dialect::CompressedTensors;
    run.export(&quantized, dialect, Scheme::W4a16).unwrap();
    let found = saved_loss(&config, &data, &quantized, None, &device).unwrap();
    assert!((found - trained).abs() < 1e-3, "{found}, {trained}");
}

#[test]
fn saved_adapters_compute_on_the_folder_of_the_model() {
    let folder = Scratch::new("finetune-saved-adapters");
    let config = FinetuneConfig {
        lora: Some(some_adapters()),
        lr: 2e-2,
        ..config(&golden("llama3-tiny"), &folder, "fwd_nvfp4_bwd_bf16")
    };
    let data = data(&config);
    let run = finished(&config, &data, &folder.join("run"));
    let adapters = run.adapters().unwrap();
    let device = Device::flex();
    let saved = |adapters| saved_loss(&config, &data, &config.model, adapters, &device).unwrap();
    let (before, after) = (saved(None), saved(Some(adapters)));
    assert!(after < before, "{after}, {before}");

    // The same model, with the adapters merged.
    let merged = folder.join("model");
    run.save_model(&merged, Dtype::F32).unwrap();
    let found = saved_loss(&config, &data, &merged, None, &device).unwrap();
    assert!((found - after).abs() < 1e-3, "{found}, {after}");
    // The recipe quantizes the frozen weights at each use; the folder does not.
    let trained = *valid_losses(&run).last().unwrap();
    assert!((trained - after).abs() > 1e-6, "{trained}, {after}");
}
