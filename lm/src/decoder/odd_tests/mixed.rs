//! Folders with layers in NVFP4, FP8 and bf16, in both dialects.

use std::fs;

use serde_json::{Value, json};

use super::*;
use crate::checkpoint::{read_json, write_json};
use crate::interchange::checkpoint::HF_QUANT_CONFIG;

const COMPRESSED: &str = "llama3-tiny-ct-mixed";
const MODELOPT: &str = "llama3-tiny-modelopt-mixed";

/// Sets the value at `pointer` of `quantization_config`.
fn at(pointer: &'static str, value: Value) -> Change {
    Box::new(move |it| {
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        let parent = format!("/quantization_config{parent}");
        it.json.pointer_mut(&parent).unwrap()[name] = value.clone();
    })
}

/// Moves group `from` of `config_groups` to the name `to`.
fn rename(from: &'static str, to: &'static str) -> Change {
    Box::new(move |it| {
        let groups = &mut it.json["quantization_config"]["config_groups"];
        let group = groups.as_object_mut().unwrap().remove(from).unwrap();
        groups[to] = group;
    })
}

#[test]
fn compressed_tensors() {
    let qkv = json!([
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "re:.*layers\\.1\\.self_attn\\..*_proj"
    ]);
    check(
        COMPRESSED,
        [
            // Names of groups say nothing.
            (
                all([rename("group_0", "z"), rename("group_2", "NVFP4")]),
                Same,
            ),
            (at("/config_groups/group_1/targets", qkv), Same),
            (
                at(
                    "/ignore",
                    json!(["re:.*lm_head", "re:.*layers\\.0\\..*o_proj$"]),
                ),
                Same,
            ),
            (
                at("/ignore", json!(null)),
                Refused("lm_head: is not quantized, but no exclusion names it"),
            ),
            (
                at("/ignore", json!(["lm_head", "re:.*(o_proj"])),
                Refused("(o_proj"),
            ),
            (at("/sparsity_config", json!({"format": "dense"})), Same),
            (at("/transform_config", json!(null)), Same),
            (at("/quantization_status", json!(null)), Same),
            (
                at("/quantization_status", json!("frozen")),
                Refused("quantization_status is \"frozen\""),
            ),
            (
                at("/config_groups/group_0/weights/observer", json!("mse")),
                Same,
            ),
            (
                at("/config_groups/group_0/weights/group_size", json!(32)),
                Refused("config_groups.group_0: weights: group_size is 32"),
            ),
            (
                at("/config_groups/group_0/weights/type", json!("int")),
                Refused("config_groups.group_0: weights: type is \"int\""),
            ),
            (
                at(
                    "/config_groups/group_1/output_activations",
                    json!({"num_bits": 8}),
                ),
                Refused("config_groups.group_1: output_activations is"),
            ),
            (
                at("/config_groups/group_1/weights/strategy", json!("tensor")),
                Refused("weight_scale"),
            ),
            (
                at("/config_groups/group_1/format", json!("int-quantized")),
                Refused("config_groups.group_1: format is \"int-quantized\""),
            ),
            (
                at("/config_groups/W4A16", json!(["Linear"])),
                Refused("config_groups.W4A16"),
            ),
            (
                at("/kv_cache_scheme", json!({"num_bits": 8, "type": "int"})),
                Refused("kv_cache_scheme"),
            ),
            (
                fill("model.layers.0.self_attn.q_proj.bias", &[96], 1.0),
                Refused("unknown: `model.layers.0.self_attn.q_proj.bias`"),
            ),
            (
                without(&["model.layers.0.mlp.up_proj.weight_global_scale"]),
                Refused("model.layers.0.mlp.up_proj"),
            ),
        ],
    );
}

#[test]
fn modelopt() {
    check(
        MODELOPT,
        [
            (at("/config_groups", json!(null)), Same),
            (at("/ignore", json!(null)), Same),
            (at("/quant_method", json!("modelopt_fp4")), Same),
            (at("/producer", json!(null)), Same),
            (at("/kv_cache_quant_algo", json!("FP8")), Same),
            (
                at("/kv_cache_quant_algo", json!("NVFP4")),
                Refused("kv_cache_quant_algo is \"NVFP4\""),
            ),
            (
                at("/quant_algo", json!("NVFP4")),
                Refused("but quant_algo is not MIXED_PRECISION"),
            ),
            (
                at("/quant_algo", json!("W4A8_AWQ")),
                Refused("quant_algo is \"W4A8_AWQ\""),
            ),
            (
                at("/quantized_layers", json!({})),
                Refused("quantized_layers is {}, but it must be an object of layers"),
            ),
            (
                at(
                    "/quantized_layers/model.layers.1.mlp.down_proj",
                    json!({"quant_algo": "NVFP4", "group_size": 16}),
                ),
                Refused("config_groups make model.layers.1.mlp.down_proj fp8"),
            ),
            (
                at(
                    "/quantized_layers/model.layers.1.mlp.up_proj",
                    json!({"quant_algo": "NVFP4", "group_size": 32}),
                ),
                Refused("quantized_layers.model.layers.1.mlp.up_proj: group_size is 32"),
            ),
            (
                without(&["model.layers.0.mlp.up_proj.input_scale"]),
                Refused("model.layers.0.mlp.up_proj.input_scale"),
            ),
            (
                without(&["model.layers.1.self_attn.k_proj.k_scale"]),
                Refused("there is no scale for its keys"),
            ),
        ],
    );
}

/// One of the two files of ModelOpt is enough; they must not contradict each other.
#[test]
fn files_of_modelopt() {
    let source = golden(MODELOPT);
    let plain = logits(&source).unwrap();
    let file: Value = read_json(&source.join(HF_QUANT_CONFIG)).unwrap();
    type File = fn(&mut Value);
    let cases: [(bool, File, Option<&str>); 7] = [
        // In hf_quant_config.json alone, with a list of exclusions, null, and none.
        (false, |_| {}, None),
        (false, |it| it["exclude_modules"] = json!(["lm_head"]), None),
        (false, |it| it["exclude_modules"] = json!(null), None),
        (true, |it| it["exclude_modules"] = json!([]), None),
        (
            true,
            |it| it["exclude_modules"] = json!(["lm_head"]),
            Some("excluded modules: `` and `lm_head`"),
        ),
        (
            true,
            |it| it["kv_cache_quant_algo"] = json!(null),
            Some("FP8 cache: `yes` and `no`"),
        ),
        (
            false,
            |it| it["quantized_layers"] = json!(null),
            Some("quantized_layers is null"),
        ),
    ];
    for (index, (has_inline, change, says)) in cases.into_iter().enumerate() {
        let (folder, mut variant) = (Scratch::new("odd-modelopt"), Variant::of(&source));
        if !has_inline {
            let json = variant.json.as_object_mut().unwrap();
            json.remove("quantization_config");
        }
        variant.write(&folder);
        let mut file = file.clone();
        change(&mut file["quantization"]);
        write_json(&folder.join(HF_QUANT_CONFIG), &file).unwrap();
        match (logits(&folder), says) {
            (Ok(found), None) => assert!(difference(&found, &plain) < 1e-5, "case {index}"),
            (Err(error), Some(says)) => {
                let error = format!("{error:#}");
                assert!(error.contains(says), "case {index}: {error}");
            }
            (found, _) => panic!("case {index}: {:?}", found.map(drop)),
        }
    }
    // config.json alone.
    let (folder, variant) = (Scratch::new("odd-modelopt"), Variant::of(&source));
    variant.write(&folder);
    fs::remove_file(folder.join(HF_QUANT_CONFIG)).unwrap();
    assert!(difference(&logits(&folder).unwrap(), &plain) < 1e-5);
}
