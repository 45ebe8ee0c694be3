use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use half::bf16;
use nvfp4_formats::format::e2m1;
use serde_json::json;

use super::Decoder;
use super::fused::open_tensors;
use crate::hf::tensors::mxfp4_scale;
use crate::hf::variant::Variant;
use crate::hf::{DecoderConfig, Dtype, TensorFolder};
use nvfp4_test_support::{Scratch, golden};

fn load(folder: &Path) -> anyhow::Result<Decoder> {
    Decoder::load(folder, &Device::flex(), FloatDType::F32)
}

fn logits(model: &Decoder) -> Vec<f32> {
    let ids: Vec<i32> = (0..20).map(|i| (i * 37 + 5) % 288).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 20]), &model.device());
    model
        .forward(ids)
        .unwrap()
        .into_data()
        .try_to_vec()
        .unwrap()
}

/// Returns the golden mixture `name` as transformers 5 writes it if asked not to split experts.
fn fused(name: &str) -> Variant {
    let mut variant = Variant::of(&golden(name));
    let separate = variant.tensors.clone();
    let of = |name: &str| separate[name].clone();
    for layer in 0..2 {
        let path = format!("model.layers.{layer}");
        let (moe, [gate, up, down]) = match name {
            "mixtral-tiny" => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        for (fused, parts) in [
            ("gate_up_proj", &[gate, up][..]),
            ("down_proj", &[down][..]),
        ] {
            let names = (0..4).flat_map(|expert| {
                let name = |part| format!("{path}.{moe}.experts.{expert}.{part}.weight");
                parts.iter().map(name).collect::<Vec<_>>()
            });
            let names: Vec<String> = names.collect();
            let (dtype, shape, _) = of(&names[0]);
            let shape = vec![4, parts.len() * shape[0], shape[1]];
            let bytes = names.iter().flat_map(|name| of(name).2).collect();
            let name = format!("{path}.mlp.experts.{fused}");
            variant.tensors.insert(name, (dtype, shape, bytes));
            variant.tensors.retain(|name, _| !names.contains(name));
        }
        let router = variant.tensors.remove(&format!("{path}.{moe}.gate.weight"));
        let name = format!("{path}.mlp.gate.weight");
        variant.tensors.insert(name, router.unwrap());
    }
    variant
}

/// Experts in one tensor are those of separate tensors, bit for bit, and are saved as these.
#[test]
fn experts_in_one_tensor_are_read_and_saved_as_separate_ones() {
    for name in ["qwen3moe-tiny", "mixtral-tiny"] {
        let scratch = Scratch::new(&format!("fused-{name}"));
        let (folder, saved) = (scratch.join("fused"), scratch.join("saved"));
        fused(name).write(&folder);
        let (model, separate) = (load(&folder).unwrap(), load(&golden(name)).unwrap());
        assert_eq!(logits(&model), logits(&separate), "{name}");
        model.save(&saved, Dtype::BF16, Some(&folder)).unwrap();
        let (found, expected) = (
            TensorFolder::open(&saved).unwrap(),
            TensorFolder::open(&golden(name)).unwrap(),
        );
        assert!(found.names().eq(expected.names()), "{name}");
        for (found, expected) in found.iter().zip(expected.iter()) {
            assert!(found.bytes() == expected.bytes(), "{name}: {found}");
        }
    }
}

/// MXFP4 experts have the values of their codes and scales, in every type; saved, they are in bf16
/// and in one tensor.
#[test]
fn mxfp4_experts_are_decoded_exactly() {
    let source = golden("gptoss-tiny-mxfp4");
    let config = DecoderConfig::read(&source).unwrap();
    let tensors = open_tensors(&source, &config).unwrap();
    let stored = TensorFolder::open(&source).unwrap();
    let path = "model.layers.1.mlp.experts";
    let [codes, scales] = ["blocks", "scales"].map(|leaf| {
        let tensor = stored.get(&format!("{path}.gate_up_proj_{leaf}")).unwrap();
        tensor.bytes().to_vec()
    });
    for (index, part) in ["gate_proj", "up_proj"].into_iter().enumerate() {
        let tensor = tensors.get(&format!("{path}.3.{part}.weight")).unwrap();
        assert_eq!((tensor.dtype, tensor.shape), (Dtype::BF16, &[96, 64][..]));
        assert_eq!(tensor.stored_bytes(), 96 * (32 + 2));
        for (i, value) in tensor.to_f32().unwrap().into_iter().enumerate() {
            let (row, column) = (3 * 192 + 2 * (i / 64) + index, i % 64);
            let byte = codes[row * 32 + column / 2];
            let code = byte >> (4 * (column % 2)) & 0xF;
            let expected = e2m1::decode(code) * mxfp4_scale(scales[row * 2 + column / 32]);
            assert_eq!(value.to_bits(), expected.to_bits());
        }
    }
    let scratch = Scratch::new("mxfp4-saved");
    let model = load(&source).unwrap();
    model
        .save(&scratch.join("bf16"), Dtype::BF16, Some(&source))
        .unwrap();
    let saved = load(&scratch.join("bf16")).unwrap();
    assert_eq!(logits(&saved), logits(&model));
    let saved = TensorFolder::open(&scratch.join("bf16")).unwrap();
    let names = TensorFolder::open(&golden("gptoss-tiny")).unwrap();
    assert!(saved.names().eq(names.names()));
}

/// Small and large scales keep the values of their codes; those beyond `f32` are named.
#[test]
fn scales_at_the_ends_of_the_range_are_exact_or_refused() {
    let source = golden("gptoss-tiny-mxfp4");
    let (name, scratch) = (
        "model.layers.0.mlp.experts.down_proj",
        Scratch::new("mxfp4-ends"),
    );
    let with = |scale: u8, codes: u8| {
        let mut variant = Variant::of(&source);
        let of = |leaf: &str| format!("{name}_{leaf}");
        variant.tensors.get_mut(&of("scales")).unwrap().2[0] = scale;
        variant.tensors.get_mut(&of("blocks")).unwrap().2[..16].fill(codes);
        variant.write(&scratch);
        let tensors = open_tensors(&scratch, &DecoderConfig::read(&scratch).unwrap()).unwrap();
        let name = "model.layers.0.mlp.experts.0.down_proj.weight";
        let value = tensors.get(name).unwrap().to_f32().unwrap()[0];
        (value, load(&scratch).map(drop))
    };
    let (value, loaded) = with(0, 0x11);
    assert_eq!(value, f32::from_bits(1 << 21), "2^-128");
    loaded.unwrap();
    let (value, loaded) = with(252, 0x77);
    assert_eq!(value, 6.0 * 2f32.powi(125));
    loaded.unwrap();
    for scale in [254, 255] {
        let error = format!("{:#}", with(scale, 0x77).1.unwrap_err());
        let place = "experts.0.down_proj.weight`: the value of row 0, column 0 is";
        assert!(error.contains(place), "{error}");
    }
}

/// Folders of mixtures that do not fit are refused by the names of their tensors and fields.
#[test]
fn misfits_are_named() {
    type Change = fn(&mut Variant);
    const GATE_UP: &str = "model.layers.0.mlp.experts.gate_up_proj";
    fn shape(variant: &mut Variant, name: &str, shape: &[usize]) {
        variant.tensors.get_mut(name).unwrap().1 = shape.to_vec();
    }
    fn copy(variant: &mut Variant, from: &str, to: &str) {
        let tensor = variant.tensors[from].clone();
        variant.tensors.insert(to.to_owned(), tensor);
    }
    let qwen = || fused("qwen3moe-tiny");
    let plain = || Variant::of(&golden("gptoss-tiny"));
    let mxfp4 = || Variant::of(&golden("gptoss-tiny-mxfp4"));
    let cases: [(Variant, Change, &str); 17] = [
        (
            qwen(),
            |it| shape(it, GATE_UP, &[4, 48, 192]),
            "gate_up_proj` is [4, 48, 192], but must be [4, 96, 96]",
        ),
        (
            qwen(),
            |it| it.json["moe_intermediate_size"] = json!(32),
            "gate_up_proj` is [4, 96, 96], but must be [4, 64, 96]",
        ),
        (
            qwen(),
            |it| drop(it.tensors.remove(GATE_UP)),
            "missing: `model.layers.0.mlp.experts.0.gate_proj.weight` [48, 96]",
        ),
        (
            qwen(),
            |it| {
                it.fill(
                    "model.layers.0.mlp.experts.2.up_proj.weight",
                    &[48, 96],
                    1.0,
                )
            },
            "`model.layers.0.mlp.experts.2.up_proj.weight` is stored twice",
        ),
        (
            qwen(),
            |it| it.fill(&format!("{GATE_UP}_bias"), &[4, 96], 1.0),
            "unknown: `model.layers.0.mlp.experts.gate_up_proj_bias`",
        ),
        (
            plain(),
            |it| shape(it, GATE_UP, &[4, 192, 64]),
            "gate_up_proj` is [4, 192, 64], but must be [4, 64, 192]",
        ),
        (
            plain(),
            |it| drop(it.tensors.remove(&format!("{GATE_UP}_bias"))),
            "missing: `model.layers.0.mlp.experts.0.gate_proj.bias` [96]",
        ),
        (
            plain(),
            |it| drop(it.tensors.remove("model.layers.1.self_attn.sinks")),
            "missing: `model.layers.1.self_attn.sinks` [4]",
        ),
        (
            plain(),
            |it| drop(it.tensors.remove("model.layers.1.mlp.router.bias")),
            "missing: `model.layers.1.mlp.router.bias` [4]",
        ),
        (
            plain(),
            |it| it.json["num_local_experts"] = json!(3),
            "gate_up_proj` is [4, 64, 192], but must be [3, 64, 192]",
        ),
        (
            plain(),
            |it| it.json["attention_bias"] = json!(false),
            "unknown: `model.layers.0.self_attn.k_proj.bias`",
        ),
        (
            mxfp4(),
            |it| drop(it.tensors.remove(&format!("{GATE_UP}_scales"))),
            "gate_up_proj_blocks` and `model.layers.0.mlp.experts.gate_up_proj_scales` belong",
        ),
        (
            mxfp4(),
            |it| copy(it, "model.layers.0.mlp.experts.down_proj_bias", GATE_UP),
            "are the same experts: delete one",
        ),
        (
            mxfp4(),
            |it| shape(it, &format!("{GATE_UP}_scales"), &[4, 2, 192]),
            "gate_up_proj_scales` is [4, 2, 192], but must be [4, 192, 2]",
        ),
        (
            mxfp4(),
            |it| copy(it, &format!("{GATE_UP}_bias"), &format!("{GATE_UP}_blocks")),
            "gate_up_proj_blocks` is of type BF16, but must be one of [U8]",
        ),
        (
            mxfp4(),
            |it| it.json["quantization_config"]["group_size"] = json!(16),
            "`quantization_config.group_size` is 16",
        ),
        (
            mxfp4(),
            |it| it.json["quantization_config"]["quant_method"] = json!("awq"),
            "quant_method is \"awq\"",
        ),
    ];
    let scratch = Scratch::new("fused-misfits");
    for (mut variant, change, says) in cases {
        change(&mut variant);
        variant.write(&scratch);
        let error = Decoder::load_for_inference(&scratch, &Device::flex(), FloatDType::F32, None);
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains(says), "{error}\nnot: {says}");
    }
}

/// A model in f16 cannot hold every MXFP4 value.
#[test]
fn values_beyond_f16_are_refused() {
    let mut variant = Variant::of(&golden("gptoss-tiny-mxfp4"));
    let scales = "model.layers.0.mlp.experts.down_proj_scales";
    variant.tensors.get_mut(scales).unwrap().2[0] = 127 + 15;
    let scratch = Scratch::new("mxfp4-f16");
    variant.write(&scratch);
    let error = Decoder::load(&scratch, &Device::flex(), FloatDType::F16).unwrap_err();
    let error = format!("{error:#}");
    assert!(error.contains("which f16 does not hold"), "{error}");
    assert!(bf16::from_f32(6.0 * 2f32.powi(15)).is_finite());
}
