//! Folders with layers in NVFP4, FP8 and bf16: read, converted, and refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nvfp4_formats::format::e4m3;
use nvfp4_test_support::{Scratch, golden};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::checkpoint::{HF_QUANT_CONFIG, remark};
use super::tests::contents;
use super::*;
use crate::checkpoint::{read_json, write_json};
use crate::hf::TensorFolder;
use crate::hf::variant::Variant;

const MODELOPT: &str = "llama3-tiny-modelopt-mixed";
const COMPRESSED: &str = "llama3-tiny-ct-mixed";
const ATTENTION: &str = "model.layers.0.self_attn";
const DOWN: &str = "model.layers.1.mlp.down_proj";

fn fp8(scales: Fp8Scales, inputs: Fp8Inputs) -> LayerFormat {
    LayerFormat::Fp8(Fp8Format { scales, inputs })
}

/// Returns the names of the formats of the linear layers of a decoder layer, in order of the names.
fn formats(checkpoint: &Checkpoint, layer: usize) -> Vec<Option<LayerFormat>> {
    let names = ["q", "k", "v", "o"].map(|it| format!("self_attn.{it}_proj"));
    let mlp = ["gate", "up", "down"].map(|it| format!("mlp.{it}_proj"));
    let all = names.iter().chain(&mlp);
    all.map(|name| checkpoint.format(&format!("model.layers.{layer}.{name}")))
        .collect()
}

#[test]
fn every_layer_has_the_format_of_the_configuration() {
    let nvfp4 = |scheme| Some(LayerFormat::Nvfp4(scheme));
    let tensor = Some(fp8(Fp8Scales::Tensor, Fp8Inputs::Static));
    let channel = Some(fp8(Fp8Scales::Channel, Fp8Inputs::PerToken));
    let block = Some(fp8(Fp8Scales::Block([32; 2]), Fp8Inputs::Groups(32)));
    let (w4a4, w4a16) = (nvfp4(Scheme::W4a4), nvfp4(Scheme::W4a16));
    let modelopt = [
        [tensor, tensor, tensor, w4a4, w4a4, w4a4, w4a4],
        [w4a4, w4a4, w4a4, None, w4a4, w4a4, tensor],
    ];
    let compressed = [
        [channel, channel, channel, None, w4a16, w4a16, block],
        [channel, channel, channel, channel, w4a16, w4a16, block],
    ];
    for (name, expected) in [(MODELOPT, modelopt), (COMPRESSED, compressed)] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        for (layer, expected) in expected.iter().enumerate() {
            assert_eq!(formats(&checkpoint, layer), expected, "{name}, {layer}");
        }
        let plain: Vec<&str> = checkpoint.unquantized().collect();
        let plain_layer = if name == MODELOPT { 1 } else { 0 };
        let o_proj = format!("model.layers.{plain_layer}.self_attn.o_proj");
        assert_eq!(plain, ["lm_head", &o_proj]);
        assert_eq!(checkpoint.config().unwrap().kv_cache_fp8, name == MODELOPT);
        assert_eq!(
            checkpoint.kv_scales().len(),
            2 * usize::from(name == MODELOPT)
        );
        // What is not computed is said.
        let said = remark(&golden(name)).unwrap().unwrap();
        assert!(
            said.contains("fp8") && said.contains("not quantized"),
            "{said}"
        );
    }
    assert_eq!(remark(&golden("llama3-tiny-ct-nvfp4")).unwrap(), None);
    assert_eq!(remark(&golden("llama3-tiny")).unwrap(), None);
}

/// A value is the element times its scale, rounded once to `f32`.
#[test]
fn weights_in_fp8_are_elements_times_scales() {
    for name in [MODELOPT, COMPRESSED] {
        let folder = golden(name);
        let (checkpoint, raw) = (Checkpoint::open(&folder).unwrap(), contents(&folder));
        let mut count = 0;
        for (module, layer) in checkpoint.fp8_layers() {
            let weight = format!("{module}.weight");
            let (_, shape, codes) = &raw[&weight];
            let file = TensorFolder::open(&folder).unwrap();
            let scales = file.get(&format!("{module}.weight_scale")).unwrap();
            let scales = scales.to_f32().unwrap();
            let values = checkpoint.tensors().get(&weight).unwrap().to_f32().unwrap();
            assert_eq!(values.len(), codes.len());
            let (k, [rows, columns]) = (shape[1], layer.format.block([shape[0], shape[1]]));
            for (at, (value, code)) in values.iter().zip(codes).enumerate() {
                let block = (at / k) / rows * k.div_ceil(columns) + at % k / columns;
                let expected = e4m3::decode_element(*code) * scales[block];
                assert_eq!(value.to_bits(), expected.to_bits(), "{module}, {at}");
            }
            let leaves = ["weight", "weight_scale", "input_scale"];
            let parts = leaves.map(|leaf| raw.get(&format!("{module}.{leaf}")));
            let bytes = parts.iter().flatten().map(|(_, _, bytes)| bytes.len());
            assert_eq!(layer.bytes, bytes.sum::<usize>(), "{module}");
            count += 1;
        }
        assert_eq!(count, if name == MODELOPT { 4 } else { 9 });
    }
}

#[test]
fn mixed_folders_are_written_again_byte_for_byte() {
    for name in [MODELOPT, COMPRESSED] {
        let (folder, scratch) = (golden(name), Scratch::new(&format!("mixed-{name}")));
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let dialect = checkpoint.config().unwrap().dialect;
        let done = convert(&checkpoint, dialect, &scratch).unwrap();
        assert_eq!(done.layers, 13);
        assert_eq!(contents(&scratch), contents(&folder), "{name}");
        for file in ["config.json", HF_QUANT_CONFIG] {
            let read = |folder: &Path| fs::read_to_string(folder.join(file)).ok();
            let json = |folder: &Path| -> Option<Value> {
                Some(serde_json::from_str(&read(folder)?).unwrap())
            };
            assert_eq!(json(&scratch), json(&folder), "{name}: {file}");
        }
        // The fields that are written anew have the values of the tools.
        let config = checkpoint.config().unwrap();
        let again = json!({"quantization_config": config.inline()});
        let file = config.hf_quant_config();
        let again = QuantConfig::read(&again, file.as_ref()).unwrap().unwrap();
        assert_eq!(&again, config);
        if let Some(file) = file {
            assert_eq!(
                file,
                read_json::<Value>(&folder.join(HF_QUANT_CONFIG)).unwrap()
            );
        }
    }
}

/// Codes and scales keep their values in the other dialect, and all bytes on the way back.
#[test]
fn mixed_folders_are_converted_to_the_other_dialect() {
    let folder = golden(MODELOPT);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let (other, back) = (Scratch::new("mixed-other"), Scratch::new("mixed-back"));
    convert(&checkpoint, Dialect::CompressedTensors, &other).unwrap();
    let converted = Checkpoint::open(&other).unwrap();
    for layer in 0..2 {
        assert_eq!(formats(&converted, layer), formats(&checkpoint, layer));
    }
    for module in checkpoint.fp8_layers().keys() {
        let [ours, theirs] = [&converted, &checkpoint].map(|it| it.fp8_weight(module).unwrap());
        assert_eq!(ours, theirs, "{module}");
    }
    let scale = &contents(&other)[&format!("{DOWN}.weight_scale")];
    assert_eq!((scale.0, &scale.1[..]), (Dtype::F32, &[1][..]));
    assert_eq!(converted.kv_scales(), checkpoint.kv_scales());
    convert(&converted, Dialect::ModelOpt, &back).unwrap();
    let (old, new) = (contents(&folder), contents(&back));
    assert_eq!(old.len(), new.len());
    for (name, tensor) in &old {
        let is_global = name.ends_with("weight_scale_2") || name.ends_with("input_scale");
        // Multipliers of NVFP4 may move by one unit in the last place.
        assert!(is_global || new[name] == *tensor, "{name}");
    }
    let file: Value = read_json(&back.join(HF_QUANT_CONFIG)).unwrap();
    assert_eq!(
        file,
        read_json::<Value>(&folder.join(HF_QUANT_CONFIG)).unwrap()
    );

    // ModelOpt has no blocks with quantized inputs, and blocks of 128 only.
    let out = Scratch::new("mixed-refused");
    let compressed = Checkpoint::open(&golden(COMPRESSED)).unwrap();
    let error = convert(&compressed, Dialect::ModelOpt, &out)
        .unwrap_err()
        .to_string();
    for part in [
        "down_proj",
        "fp8 per block of 32 x 32",
        "modelopt has no name",
    ] {
        assert!(error.contains(part), "{error}");
    }
    // Per channel, with inputs per token, is in both; blocks of 128 without quantized inputs, too.
    let mut variant = Variant::of(&golden(COMPRESSED));
    let block = "/quantization_config/config_groups/group_2";
    let block = variant.json.pointer_mut(block).unwrap();
    block["input_activations"] = Value::Null;
    block["weights"]["block_structure"] = json!([128, 128]);
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.mlp.down_proj.weight_scale");
        let scales = variant.tensors.get_mut(&name).unwrap();
        *scales = (Dtype::BF16, vec![1, 2], scales.2[..4].to_vec());
    }
    let from = Scratch::new("mixed-blocks");
    variant.write(&from);
    let blocks = Checkpoint::open(&from).unwrap();
    convert(&blocks, Dialect::ModelOpt, &out).unwrap();
    let converted = Checkpoint::open(&out).unwrap();
    for module in blocks.fp8_layers().keys() {
        assert_eq!(
            converted.fp8_weight(module).unwrap(),
            blocks.fp8_weight(module).unwrap()
        );
    }
    let tensors = contents(&out);
    assert_eq!(tensors[&format!("{DOWN}.weight_scale")].1, [1, 1, 2, 1]);
    assert_eq!(tensors[&format!("{ATTENTION}.q_proj.weight_scale")].1, [96]);
    let file: Value = read_json(&out.join(HF_QUANT_CONFIG)).unwrap();
    let layers = &file["quantization"]["quantized_layers"];
    assert_eq!(layers[DOWN]["quant_algo"], "fp8_pb_wo");
    let q_proj = &layers[format!("{ATTENTION}.q_proj")];
    assert_eq!(q_proj["quant_algo"], "FP8_PER_CHANNEL_PER_TOKEN");
    assert!(layers.get(format!("{ATTENTION}.o_proj")).is_none());
}

/// A folder and its hf_quant_config.json, to be damaged.
struct Damaged {
    folder: Variant,
    file: Option<Value>,
}

impl Damaged {
    fn new(name: &str) -> Self {
        let folder = golden(name);
        let file = folder.join(HF_QUANT_CONFIG);
        let file = file.exists().then(|| read_json(&file).unwrap());
        let folder = Variant::of(&folder);
        Self { folder, file }
    }

    fn scalar(&mut self, name: &str, value: f32) {
        let tensor = self.folder.tensors.get_mut(name).unwrap();
        assert_eq!(tensor.0, Dtype::F32);
        tensor.2[..4].copy_from_slice(&value.to_le_bytes());
    }

    fn inline(&mut self, pointer: &str) -> &mut Value {
        let pointer = format!("/quantization_config{pointer}");
        self.folder.json.pointer_mut(&pointer).unwrap()
    }

    /// Changes ModelOpt's format of a layer in both files and in both places of the first.
    fn algo(&mut self, module: &str, algo: &Value) {
        self.inline("/quantized_layers")[module] = algo.clone();
        self.file.as_mut().unwrap()["quantization"]["quantized_layers"][module] = algo.clone();
        *self.inline("/config_groups") = Value::Null;
    }

    fn error(&self) -> String {
        let scratch = Scratch::new("mixed-damaged");
        self.folder.write(&scratch);
        if let Some(file) = &self.file {
            write_json(&scratch.join(HF_QUANT_CONFIG), file).unwrap();
        }
        format!("{:#}", Checkpoint::open(&scratch).unwrap_err())
    }
}

#[test]
fn faulty_folders_are_refused_by_name() {
    let q_proj = &*format!("{ATTENTION}.q_proj");
    let scale = &*format!("{q_proj}.weight_scale");
    let nvfp4 = &json!({"quant_algo": "NVFP4", "group_size": 16});
    let packed: &BTreeMap<_, _> = &Variant::of(&golden("llama3-tiny-modelopt-nvfp4")).tensors;
    type Change<'a> = &'a dyn Fn(&mut Damaged);
    let cases: &[(&str, Change<'_>, &[&str])] = &[
        (
            MODELOPT,
            &|it| drop(it.folder.tensors.remove(scale)),
            &[q_proj, "there is no", scale],
        ),
        (
            COMPRESSED,
            &|it| it.folder.tensors.get_mut(scale).unwrap().1 = vec![1, 96],
            &[scale, "[1, 96]", "[96, 1]", "fp8 per channel"],
        ),
        (
            COMPRESSED,
            &|it| {
                let name = format!("{DOWN}.weight_scale");
                it.folder.tensors.get_mut(&name).unwrap().1 = vec![5, 3];
            },
            &[DOWN, "[5, 3]", "[3, 5]"],
        ),
        (
            MODELOPT,
            &|it| it.algo(q_proj, &json!({"quant_algo": "W8A8_SQ_PER_CHANNEL"})),
            &[q_proj, "quant_algo is \"W8A8_SQ_PER_CHANNEL\""],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_2/targets/0") = json!("re:.*[qn]_proj$"),
            &[
                q_proj,
                "is in two groups",
                "fp8 per channel",
                "fp8 per block",
            ],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_2/targets/0") = json!("Linear"),
            &["Linear is in two groups"],
        ),
        (
            COMPRESSED,
            &|it| {
                let targets = it.inline("/config_groups/group_2/targets");
                targets.as_array_mut().unwrap().push(json!("re:.*fc1$"));
            },
            &["re:.*fc1$", "no layer is it"],
        ),
        (
            MODELOPT,
            &|it| it.algo("model.layers.7.mlp.down_proj", nvfp4),
            &["model.layers.7.mlp.down_proj", "no layer is it"],
        ),
        (
            MODELOPT,
            &|it| {
                it.algo(q_proj, nvfp4);
                for (name, tensor) in packed {
                    if name.starts_with(&format!("{q_proj}.")) {
                        it.folder.tensors.insert(name.clone(), tensor.clone());
                    }
                }
            },
            &[
                "is fp8 per tensor",
                "is nvfp4 w4a4",
                "readers fuse them",
                q_proj,
            ],
        ),
        (
            MODELOPT,
            &|it| it.algo(q_proj, nvfp4),
            &[q_proj, "is stored in FP8", "makes it nvfp4 w4a4"],
        ),
        (
            MODELOPT,
            &|it| {
                it.algo(
                    &format!("{ATTENTION}.o_proj"),
                    &json!({"quant_algo": "FP8"}),
                )
            },
            &["o_proj", "is stored in NVFP4", "fp8 per tensor"],
        ),
        (
            MODELOPT,
            &|it| it.file.as_mut().unwrap()["quantization"]["kv_cache_quant_algo"] = "NVFP4".into(),
            &["kv_cache_quant_algo", "NVFP4"],
        ),
        (
            MODELOPT,
            &|it| it.inline("/kv_cache_scheme")["num_bits"] = 4.into(),
            &["kv_cache_scheme", "num_bits is 4"],
        ),
        (
            MODELOPT,
            &|it| it.scalar(scale, 0.0),
            &[scale, "is 0", "positive"],
        ),
        (
            MODELOPT,
            &|it| it.scalar(scale, f32::NAN),
            &[scale, "is NaN"],
        ),
        (
            MODELOPT,
            &|it| it.scalar(&format!("{q_proj}.input_scale"), -1.0),
            &[q_proj, "input_scale", "is -1"],
        ),
        (
            MODELOPT,
            &|it| it.scalar(&format!("{q_proj}.input_scale"), 0.5),
            &["input_scale", "readers fuse them"],
        ),
        (
            MODELOPT,
            &|it| drop(it.folder.tensors.remove(&format!("{q_proj}.input_scale"))),
            &[q_proj, "input_scale is missing"],
        ),
        (
            COMPRESSED,
            &|it| {
                let scale = (Dtype::F32, vec![1], 1f32.to_le_bytes().to_vec());
                it.folder
                    .tensors
                    .insert(format!("{q_proj}.input_scale"), scale);
            },
            &[q_proj, "input_scale is there", "would be ignored"],
        ),
        (
            MODELOPT,
            &|it| {
                it.algo(
                    &format!("{ATTENTION}.o_proj"),
                    &json!({"quant_algo": "NVFP4"}),
                )
            },
            &["o_proj", "group_size is null, but must be 16"],
        ),
        (
            COMPRESSED,
            &|it| it.inline("/config_groups/group_0/weights")["group_size"] = 32.into(),
            &["group_0", "group_size is 32, but must be 16"],
        ),
        (
            MODELOPT,
            &|it| {
                let quantization = &mut it.file.as_mut().unwrap()["quantization"];
                let layers = quantization["quantized_layers"].as_object_mut().unwrap();
                layers.remove(DOWN).unwrap();
            },
            &[
                "config.json",
                "hf_quant_config.json",
                DOWN,
                "`not quantized`",
            ],
        ),
        (
            MODELOPT,
            &|it| {
                let targets = it.inline("/config_groups/group_1/targets");
                targets.as_array_mut().unwrap().push(q_proj.into());
            },
            &[
                "config_groups make",
                q_proj,
                "but quantized_layers make it fp8",
            ],
        ),
        (
            MODELOPT,
            &|it| *it.inline("/quant_algo") = "NVFP4".into(),
            &["quantized_layers", "but quant_algo is not MIXED_PRECISION"],
        ),
        (
            MODELOPT,
            &|it| *it.inline("/quantized_layers") = json!({}),
            &["quantized_layers is {}"],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/format") = "float-quantized".into(),
            &["format is \"float-quantized\"", "mixed-precision"],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_1/format") = "int-quantized".into(),
            &["group_1", "int-quantized", "float-quantized"],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_2/weights/block_structure") = Value::Null,
            &["group_2", "block_structure is null"],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_2/weights/block_structure/0") = 0.into(),
            &["group_2", "block_structure is [0,32]"],
        ),
        (
            COMPRESSED,
            &|it| {
                let rows = "/config_groups/group_2/weights/block_structure/0";
                *it.inline(rows) = ((1 << 20) + 1).into();
            },
            &["group_2", "block_structure is [1048577,32]"],
        ),
        (
            MODELOPT,
            &|it| it.scalar(scale, 1e36),
            &[scale, "scales must be positive and finite"],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_1/weights/strategy") = "token".into(),
            &["group_1", "strategy is \"token\""],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/config_groups/group_1/input_activations/dynamic") = false.into(),
            &[
                "group_1",
                "input_activations",
                "\"token\" with dynamic false",
            ],
        ),
        (
            COMPRESSED,
            &|it| *it.inline("/ignore") = json!(["lm_head"]),
            &["layers.0.self_attn.o_proj", "no exclusion names it"],
        ),
        (
            COMPRESSED,
            &|it| {
                it.folder
                    .tensors
                    .get_mut(&format!("{DOWN}.weight"))
                    .unwrap()
                    .2[3] = 0x7F
            },
            &[DOWN, "row 0, column 3 is NaN"],
        ),
        (
            COMPRESSED,
            &|it| {
                let zero = (Dtype::I64, vec![1], vec![0; 8]);
                it.folder
                    .tensors
                    .insert(format!("{DOWN}.weight_zero_point"), zero);
            },
            &[DOWN, "weight_zero_point", "would be ignored"],
        ),
    ];
    for (index, (name, change, expected)) in cases.iter().enumerate() {
        let mut damaged = Damaged::new(name);
        change(&mut damaged);
        let error = damaged.error();
        for part in *expected {
            assert!(error.contains(part), "case {index}: {error}\nnot: {part}");
        }
    }
}

/// Groups of one format are one; a file with FP8 only is read, too.
#[test]
fn formats_of_the_configuration() {
    let mut variant = Variant::of(&golden(COMPRESSED));
    let groups = &mut variant.json["quantization_config"]["config_groups"];
    let mut copy = groups["group_1"].clone();
    let first = copy["targets"][0].clone();
    copy["targets"] = json!([first, "model.layers.0.self_attn.q_proj"]);
    groups["group_3"] = copy;
    let folder = Scratch::new("mixed-one-format-twice");
    variant.write(&folder);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let groups = &checkpoint.config().unwrap().groups;
    assert_eq!(groups.len(), 3);
    let targets = [
        "re:.*self_attn.(q|k|v|o)_proj$",
        "model.layers.0.self_attn.q_proj",
    ];
    assert!(groups.iter().any(|group| group.targets == targets));
    let fp8 =
        json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"});
    let config = json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "naive-quantized", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": fp8}},
    }});
    let config = QuantConfig::read(&config, None).unwrap().unwrap();
    assert_eq!(config.formats(), "fp8 per block of 128 x 128");
    assert_eq!(config.scheme(), None);
    for exclude in [json!(["lm_head"]), json!([])] {
        let file = json!({"producer": {"name": "modelopt"}, "quantization": {
            "quant_algo": "FP8", "kv_cache_quant_algo": null, "exclude_modules": exclude,
        }});
        let config = QuantConfig::read(&json!({}), Some(&file)).unwrap().unwrap();
        assert_eq!(config.formats(), "fp8 per tensor, inputs static");
        let written = config.hf_quant_config().unwrap();
        assert_eq!(written["quantization"], file["quantization"]);
        assert_eq!(config.inline()["quant_algo"], "FP8");
    }
}

/// A name stands for the layers inside of a module in ModelOpt only.
#[test]
fn names_of_modules_are_targets_in_modelopt() {
    let format = fp8(Fp8Scales::Tensor, Fp8Inputs::Static);
    let targets = vec![ATTENTION.to_owned()];
    let groups = [Group { format, targets }];
    for (dialect, expected) in [
        (Dialect::ModelOpt, Some(format)),
        (Dialect::CompressedTensors, None),
    ] {
        let targets = Targets::new(dialect, &groups).unwrap();
        let found = targets.format(&format!("{ATTENTION}.q_proj")).unwrap();
        assert_eq!(found, expected, "{dialect:?}");
        assert_eq!(targets.format(ATTENTION).unwrap(), Some(format));
    }
}
