//! Casts the experts of a gpt-oss in MXFP4 to NVFP4.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use regex::Regex;

use super::tests::options;
use super::*;
use crate::decoder::Decoder;
use crate::decoder::feed_forward::FeedForward;
use crate::decoder::fused::open_tensors;
use crate::hf::DecoderConfig;
use crate::interchange::{Checkpoint, Dialect, Scheme};
use nvfp4_test_support::{Scratch, golden_with_tokenizer};

/// Experts in MXFP4 keep their codes and scales where NVFP4 has them, whatever the method; the model
/// then computes the same, except for the blocks that are counted.
#[test]
fn mxfp4_experts_are_cast() {
    let model = golden_with_tokenizer("gptoss-tiny-mxfp4");
    let config = DecoderConfig::read(&model).unwrap();
    let tensors = open_tensors(&model, &config).unwrap();
    for (dialect, method) in [
        (Dialect::ModelOpt, Method::Rtn),
        (Dialect::CompressedTensors, Method::Search),
    ] {
        let scratch = Scratch::new(&format!("quantize-mxfp4-{}", dialect.name()));
        let options = options(dialect, Scheme::W4a16, method);
        let none = Default::default();
        let done = quantize_folder(&model, &scratch, &options, &none).unwrap();
        let experts: Vec<_> = done.layers.iter().filter_map(|l| l.cast).collect();
        assert_eq!((done.layers.len(), experts.len()), (32, 24));
        let blocks: usize = experts.iter().map(|cast| cast.blocks).sum();
        let inexact: usize = experts.iter().map(|cast| cast.inexact_blocks).sum();
        // 3 % of the blocks of 32 have a scale that is 2^-24 times smaller.
        assert_eq!(blocks, 2 * 4 * 3 * 96 * 64 / 16);
        assert!((blocks / 50..blocks / 20).contains(&inexact), "{inexact}");
        for layer in done.layers.iter().filter(|layer| layer.cast.is_some()) {
            let cast = layer.cast.unwrap();
            assert!(cast.largest_error < 2f32.powi(-20), "{layer:?}");
            assert!(layer.sqnr > 100.0, "{layer:?}");
            assert_eq!(
                layer.bytes_before,
                layer.shape.iter().product::<usize>() * 17 / 32
            );
        }
        let checkpoint = Checkpoint::open(&scratch).unwrap();
        for module in checkpoint
            .layers()
            .keys()
            .filter(|name| name.contains("experts"))
        {
            let ours = checkpoint.weight(module).unwrap();
            let theirs = tensors.get(&format!("{module}.weight")).unwrap();
            let values = theirs.to_f32().unwrap();
            let found = ours.dequantize(dialect.arithmetic());
            let same = values.iter().zip(&found).filter(|(a, b)| a == b).count();
            assert!(same * 20 > values.len() * 19, "{module}: {same}");
            let block = theirs.mxfp4().unwrap();
            assert_eq!(ours.codes().len(), block.codes.len());
        }
    }
}

/// If only experts are quantized, the model computes what the one in MXFP4 does.
#[test]
fn cast_experts_compute_the_same() {
    let model = golden_with_tokenizer("gptoss-tiny-mxfp4");
    let scratch = Scratch::new("quantize-mxfp4-experts");
    let mut options = options(Dialect::CompressedTensors, Scheme::W4a16, Method::Rtn);
    options.exclude = vec![Regex::new("self_attn").unwrap()];
    let none = Default::default();
    quantize_folder(&model, &scratch, &options, &none).unwrap();
    let load = |folder: &Path| {
        Decoder::load_for_inference(folder, &Device::flex(), FloatDType::F32, None).unwrap()
    };
    let logits = |model: &Decoder| -> Vec<f32> {
        let ids: Vec<i32> = (0..20).map(|i| (i * 37 + 5) % 288).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 20]), &model.device());
        let logits = model.forward(ids).unwrap();
        logits.into_data().try_to_vec().unwrap()
    };
    let (packed, stored) = (load(&scratch), load(&model));
    for layer in &packed.layers {
        let FeedForward::Moe(moe) = &layer.feed_forward else {
            panic!("a mixture")
        };
        assert!(moe.gate_up.is_packed() && moe.down.is_packed());
        assert!(moe.gate_up.bias().is_some() && !layer.attention.qkv.is_packed());
    }
    let (found, expected) = (logits(&packed), logits(&stored));
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(&expected) {
        let error = (found - expected).abs();
        assert!(error < 1e-5 * largest, "{found}, not {expected}");
    }
}
