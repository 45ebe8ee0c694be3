//! Tests golden exports of both tools, and checkpoints that must be refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use nvfp4_formats::format::{e2m1, e4m3};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::*;
use crate::hf::{TensorFolder, TensorWriter};
use nvfp4_test_support::{Scratch, golden};

/// Every export of the golden folder: dialect, scheme, number of quantized layers, and presence of
/// FP8 scales.
const EXPORTS: [(&str, Dialect, Scheme, usize, bool); 9] = {
    use Dialect::{CompressedTensors as Ct, ModelOpt as Mo};
    use Scheme::{W4a4, W4a16};
    [
        ("llama3-tiny-ct-nvfp4", Ct, W4a4, 14, false),
        ("llama3-tiny-ct-nvfp4-f32", Ct, W4a4, 14, false),
        ("llama3-tiny-ct-nvfp4-kvfp8", Ct, W4a4, 14, true),
        ("llama3-tiny-ct-nvfp4a16", Ct, W4a16, 14, false),
        ("llama3-tiny-modelopt-nvfp4", Mo, W4a4, 14, false),
        ("llama3-tiny-modelopt-nvfp4-kvfp8", Mo, W4a4, 14, true),
        ("mixtral-tiny-modelopt-nvfp4", Mo, W4a4, 32, false),
        ("qwen3-tiny-ct-nvfp4", Ct, W4a4, 14, false),
        ("qwen3moe-tiny-modelopt-nvfp4", Mo, W4a4, 32, false),
    ]
};

/// Returns the tensors of a folder: type, shape and bytes, by name.
pub(super) fn contents(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let tensors = TensorFolder::open(folder).unwrap();
    let all = tensors.iter().map(|tensor| {
        let content = (tensor.dtype, tensor.shape.to_vec(), tensor.bytes().to_vec());
        (tensor.name.to_owned(), content)
    });
    all.collect()
}

#[test]
fn golden_exports_are_read_with_their_conventions() {
    let root = golden("");
    for (name, dialect, scheme, layers, kv_cache_fp8) in EXPORTS {
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        let config = checkpoint.config().unwrap();
        assert_eq!(
            (config.dialect, config.scheme()),
            (dialect, Some(scheme)),
            "{name}"
        );
        assert_eq!(config.kv_cache_fp8, kv_cache_fp8, "{name}");
        assert_eq!(checkpoint.layers().len(), layers, "{name}");
        let scales = checkpoint.kv_scales();
        assert_eq!(scales.len(), if kv_cache_fp8 { 2 } else { 0 }, "{name}");
        assert!(scales.values().flatten().all(Option::is_some));
        let tensors = checkpoint.tensors();
        for module in checkpoint.layers().keys() {
            let weight = checkpoint.weight(module).unwrap();
            assert_eq!(weight.input_global().is_some(), scheme == Scheme::W4a4);
            // Uses the formula of the reference logits on the bytes of the file: code · scale ·
            // factor, where compressed-tensors' factor is fl(1 / g).
            let bytes = |leaf: &str| tensors.get(&format!("{module}.{leaf}")).unwrap();
            let (codes, scales, factor) = match dialect {
                Dialect::ModelOpt => {
                    let factor = bytes("weight_scale_2").to_f32().unwrap()[0];
                    (bytes("weight").bytes(), bytes("weight_scale"), factor)
                }
                Dialect::CompressedTensors => {
                    let divisor = bytes("weight_global_scale").to_f32().unwrap()[0];
                    let codes = bytes("weight_packed").bytes();
                    (codes, bytes("weight_scale"), 1.0 / divisor)
                }
            };
            let scales = scales.to_f32().unwrap();
            let values = weight.dequantize(Arithmetic::CodeTimesScale);
            assert_eq!(values.len(), weight.n() * weight.k());
            for (i, value) in values.iter().enumerate() {
                let code = e2m1::VALUES[(codes[i / 2] >> (4 * (i % 2)) & 15) as usize];
                let expected = code * scales[i / 16] * factor;
                assert_eq!(value.to_bits(), expected.to_bits(), "{name}: {module}, {i}");
            }
        }
    }
}

/// Bounds the error of the dequantized weight by the loss of the format: half a step of the code,
/// and clipping by the rounded scale. A wrong nibble, axis, scale or convention exceeds the bound.
#[test]
fn golden_exports_dequantize_to_the_weights_of_their_models() {
    let root = golden("");
    for (name, dialect, ..) in EXPORTS {
        let base = name.split("-modelopt").next().unwrap();
        let base = base.split("-ct").next().unwrap();
        let base = TensorFolder::open(&root.join(base)).unwrap();
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        for module in checkpoint.layers().keys() {
            let weight = checkpoint.weight(module).unwrap();
            let original = base.get(&format!("{module}.weight")).unwrap();
            let original = original.to_f32().unwrap();
            let values = weight.dequantize(dialect.arithmetic());
            let factor = weight.global().decode();
            for (i, (value, original)) in values.iter().zip(&original).enumerate() {
                let scale = e4m3::decode(weight.scales()[i / 16]);
                // Clipping of a 6 when the scale is rounded down: a sixteenth, or half of 2⁻⁹.
                let clipped = if scale < 1.0 / 64.0 { 3.0 } else { 6.0 / 16.0 };
                let bound = (1.0 + clipped) * scale * factor;
                let error = (value - original).abs();
                assert!(
                    error <= bound,
                    "{name}: {module}, {i}: {original} -> {value}"
                );
            }
        }
    }
}

#[test]
fn golden_exports_are_written_again_byte_for_byte() {
    let root = golden("");
    for (name, dialect, ..) in EXPORTS {
        let scratch = Scratch::new(&format!("same-{name}"));
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        let done = convert(&checkpoint, dialect, &scratch).unwrap();
        assert_eq!((done.moved, done.renamed), (0, 0), "{name}");
        assert_eq!(contents(&scratch), contents(&root.join(name)), "{name}");
        let again = Checkpoint::open(&scratch).unwrap();
        assert_eq!(again.config(), checkpoint.config());
        assert_eq!(again.json(), checkpoint.json(), "{name}: config.json");
        assert!(scratch.join("generation_config.json").exists());
    }
}

#[test]
fn the_other_dialect_moves_global_scales_by_one_ulp_at_most_and_says_how_many() {
    let root = golden("");
    for (name, dialect, scheme, layers, kv_cache_fp8) in EXPORTS {
        let scratch = Scratch::new(&format!("other-{name}"));
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        let to = dialect.other();
        let done = convert(&checkpoint, to, &scratch).unwrap();
        let other = Checkpoint::open(&scratch).unwrap();
        let config = other.config().unwrap();
        assert_eq!(
            (config.dialect, config.scheme()),
            (to, Some(scheme)),
            "{name}"
        );
        assert_eq!(config.kv_cache_fp8, kv_cache_fp8);
        assert_eq!(other.kv_scales(), checkpoint.kv_scales(), "{name}");
        assert_eq!(other.plain(), checkpoint.plain());
        let mut moved = 0;
        for module in checkpoint.layers().keys() {
            let (old, new) = (checkpoint.weight(module), other.weight(module));
            let (old, new) = (old.unwrap(), new.unwrap());
            assert_eq!(old.codes(), new.codes());
            assert_eq!(old.scales(), new.scales());
            let decode = |scale: Option<GlobalScale>| scale.map(|s| s.decode().to_bits());
            for (old, new) in [
                (Some(old.global()), Some(new.global())),
                (old.input_global(), new.input_global()),
            ] {
                let (old, new) = (decode(old), decode(new));
                assert_eq!(old.is_some(), new.is_some());
                let distance = old.unwrap_or(0).abs_diff(new.unwrap_or(0));
                assert!(distance <= 1, "{name}: {module} moved by {distance} ulp");
                moved += distance as usize;
            }
        }
        assert_eq!((done.layers, done.moved), (layers, moved), "{name}");
        if to == Dialect::ModelOpt {
            assert_eq!(
                moved, 0,
                "{name}: fl(1 / g) is what the divisor dequantizes by"
            );
        }
        // Converting back changes nothing except those scalars.
        let back = Scratch::new(&format!("back-{name}"));
        convert(&other, dialect, &back).unwrap();
        let (old, new) = (contents(&root.join(name)), contents(&back));
        for (tensor, (dtype, shape, bytes)) in &old {
            let is_scalar = shape.iter().product::<usize>() == 1;
            if !is_scalar {
                assert_eq!(new[tensor], (*dtype, shape.clone(), bytes.clone()));
            }
        }
        assert_eq!(old.len(), new.len());
    }
}

/// A checkpoint with one layer and two experts, to be broken.
struct Model {
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    config: QuantConfig,
}

impl Model {
    fn new(dialect: Dialect, scheme: Scheme) -> Self {
        let scratch = Scratch::new(&format!("model-{}-{}", dialect.name(), scheme.name()));
        let mut writer = TensorWriter::create(&scratch, u64::MAX).unwrap();
        let attention = ["q", "k", "v", "o"].map(|p| format!("model.layers.0.self_attn.{p}_proj"));
        let experts = (0..2).flat_map(|expert| {
            let name = |p| format!("model.layers.0.mlp.experts.{expert}.{p}_proj");
            ["gate", "up", "down"].map(name)
        });
        for (i, module) in attention.into_iter().chain(experts).enumerate() {
            let codes = (0..256).map(|j| (i + 7 * j) as u8).collect();
            let input = GlobalScale::Multiply(0.03);
            let input = (scheme == Scheme::W4a4).then_some(input);
            let global = GlobalScale::Multiply(1.1e-3);
            let weight = PackedWeight::new([16, 32], codes, vec![0x3A; 32], global, input);
            dialect
                .write(&mut writer, &module, &weight.unwrap())
                .unwrap();
        }
        for name in ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"] {
            let bytes = [0; 64];
            writer
                .add(&format!("{name}.weight"), Dtype::BF16, &[2, 16], &bytes)
                .unwrap();
        }
        writer.finish().unwrap();
        Self {
            tensors: contents(&scratch),
            config: QuantConfig {
                dialect,
                groups: vec![Group::linear(LayerFormat::Nvfp4(scheme))],
                kv_cache_fp8: false,
                pre_quant: false,
                exclude: vec!["lm_head".into(), "model.layers.0.mlp.gate".into()],
            },
        }
    }

    /// Writes the model and returns the result of opening it.
    fn open(&self, test: &str) -> Result<Checkpoint> {
        let scratch = Scratch::new(test);
        self.write(&scratch);
        Checkpoint::open(&scratch)
    }

    fn write(&self, folder: &Path) {
        let mut writer = TensorWriter::create(folder, u64::MAX).unwrap();
        for (name, (dtype, shape, bytes)) in &self.tensors {
            writer.add(name, *dtype, shape, bytes).unwrap();
        }
        writer.finish().unwrap();
        let json = json!({"quantization_config": self.config.inline()});
        super::convert::write_configs(folder, &json, &self.config).unwrap();
    }

    fn refused(&self, test: &str, names: &[&str]) {
        let error = format!("{:#}", self.open(test).unwrap_err());
        for name in names {
            assert!(error.contains(name), "does not say {name:?}: {error}");
        }
    }

    fn bytes(&mut self, tensor: &str) -> &mut Vec<u8> {
        &mut self.tensors.get_mut(tensor).unwrap().2
    }
}

const ATTENTION: &str = "model.layers.0.self_attn";
const EXPERT: &str = "model.layers.0.mlp.experts.1";

#[test]
fn what_consumers_choke_on_is_refused_by_the_name_of_the_tensor() {
    let good = || Model::new(Dialect::ModelOpt, Scheme::W4a4);
    good().open("good").unwrap();
    let ct = || Model::new(Dialect::CompressedTensors, Scheme::W4a16);
    ct().open("good-ct").unwrap();

    let mut model = good();
    model.bytes(&format!("{ATTENTION}.o_proj.weight_scale"))[5] = 0x7F;
    model.refused("nan", &["o_proj.weight_scale", "row 2, block 1", "NaN"]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        for leaf in ["weight_scale_2", "input_scale"] {
            let mut model = good();
            let name = format!("{ATTENTION}.o_proj.{leaf}");
            model.bytes(&name).copy_from_slice(&bad.to_le_bytes());
            model.refused("global", &[&name, "global scale"]);
        }
    }
    for (module, kind) in [(ATTENTION, "q_proj"), (EXPERT, "up_proj")] {
        for leaf in ["weight_scale_2", "input_scale"] {
            let mut model = good();
            let bytes = model.bytes(&format!("{module}.{kind}.{leaf}"));
            bytes[0] ^= 1;
            model.refused("unequal", &[module, leaf, "readers fuse them"]);
        }
    }
    let mut model = ct();
    model.bytes(&format!("{ATTENTION}.k_proj.weight_global_scale"))[0] ^= 1;
    model.refused("unequal-ct", &["weight_global_scale", "qkv_proj"]);

    let mut model = good();
    let input = format!("{EXPERT}.down_proj.input_scale");
    model.tensors.remove(&input);
    model.refused("no-input", &[&input, "missing", "w4a4"]);

    let mut model = good();
    model.config.exclude.pop();
    model.refused("router", &["model.layers.0.mlp.gate", "router"]);
    let mut model = ct();
    model.config.exclude.remove(0);
    model.refused("head", &["lm_head", "no exclusion names it"]);
    let mut model = good();
    model.config.exclude.push("model.layers.0".into());
    model.refused("substring", &["is quantized", "model.layers.0"]);

    let mut model = ct();
    let name = format!("{ATTENTION}.v_proj.weight_packed");
    model.tensors.remove(&name);
    model.refused("no-codes", &[&name]);
    let mut model = good();
    let scale = model
        .tensors
        .get_mut(&format!("{ATTENTION}.v_proj.weight_scale"));
    scale.unwrap().1 = vec![32, 1];
    model.refused("shape", &["v_proj.weight_scale", "[32, 1]", "[16, 2]"]);
    let mut model = good();
    let extra = format!("{ATTENTION}.o_proj.pre_quant_scale");
    model
        .tensors
        .insert(extra.clone(), (Dtype::F32, vec![1], vec![0; 4]));
    model.refused("extra", &[&extra]);
    let mut model = good();
    let scales = format!("{ATTENTION}.o_proj.weight_scale");
    model.tensors.remove(&scales);
    model.refused("no-scales", &["o_proj", "weight_scale"]);
    let mut model = good();
    model.config.kv_cache_fp8 = true;
    model.refused("kv", &["kv_cache_scheme"]);
    let name = format!("{ATTENTION}.k_proj.k_scale");
    let zero = (Dtype::F32, vec![], vec![0; 4]);
    model.tensors.insert(name.clone(), zero);
    model.refused("kv-zero", &[&name, "positive"]);
    let scale = |value: f32| (Dtype::F32, vec![], value.to_le_bytes().to_vec());
    model.tensors.insert(name.clone(), scale(0.1));
    model.refused("kv-half", &[ATTENTION, "no scale for its values"]);
    let values = name.replace("k_proj.k_scale", "v_proj.v_scale");
    model.tensors.insert(values, scale(0.1));
    model.open("kv-whole").unwrap();
    model.config.kv_cache_fp8 = false;
    model.refused("kv-unsaid", &["kv_cache_scheme", "would be ignored"]);
}

/// Global scales of either tool belong to a quantized layer.
#[test]
fn scales_without_a_layer_are_refused() {
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        for leaves in [dialect, dialect.other()].map(Dialect::leaves) {
            for leaf in &leaves.all()[2..] {
                let mut model = Model::new(dialect, Scheme::W4a4);
                let name = format!("model.layers.0.mlp.gate.{leaf}");
                let scale = (Dtype::F32, vec![1], 1f32.to_le_bytes().to_vec());
                model.tensors.insert(name.clone(), scale);
                model.refused("scale-alone", &[&name, "there is no", "for it"]);
            }
        }
    }
}

/// Readers would build these layers as quantized, in architectures with unknown names.
#[test]
fn linear_layers_of_any_name_must_be_excluded() {
    let matrix = |rows: usize| (Dtype::BF16, vec![rows, 16], vec![0; 32 * rows]);
    for name in [
        "model.decoder.layers.0.fc1",
        "projector.linear_1",
        "h.0.mlp.c_fc",
    ] {
        let mut model = Model::new(Dialect::CompressedTensors, Scheme::W4a16);
        model.tensors.insert(format!("{name}.weight"), matrix(4));
        model.refused("other-names", &[name, "no exclusion names it"]);
        model.config.exclude.push(name.into());
        model.open("other-names").unwrap();
    }
    let mut model = Model::new(Dialect::CompressedTensors, Scheme::W4a16);
    for name in [
        "model.decoder.embed_positions.weight",
        "transformer.wte.weight",
    ] {
        model.tensors.insert(name.into(), matrix(4));
    }
    let norm = (Dtype::BF16, vec![16], vec![0; 32]);
    model.tensors.insert("model.final_norm.weight".into(), norm);
    model.open("tables").unwrap();
}

/// `targets` selects the quantized layers.
#[test]
fn targets_are_obeyed() {
    let mut model = Model::new(Dialect::CompressedTensors, Scheme::W4a16);
    model.config.groups[0].targets = vec!["re:.*mlp.experts.*".into()];
    model.refused("targets", &["self_attn", "none of targets"]);
    model.config.groups[0].targets.push("re:.*_proj$".into());
    model.open("targets").unwrap();
    // Modules that are not targets need no exclusion.
    model.config.exclude.clear();
    model.open("targets").unwrap();
    model.config.groups[0].targets = vec!["re:(".into()];
    model.refused("targets", &["targets", "cannot be read"]);
}

/// Experts of a layer must be either all quantized or all unquantized.
#[test]
fn experts_of_a_layer_are_alike() {
    let mut model = Model::new(Dialect::ModelOpt, Scheme::W4a16);
    for projection in ["gate_proj", "up_proj", "down_proj"] {
        let module = format!("{EXPERT}.{projection}");
        let leaves = ["weight", "weight_scale", "weight_scale_2"];
        for leaf in leaves {
            model.tensors.remove(&format!("{module}.{leaf}"));
        }
        let plain = (Dtype::BF16, vec![16, 32], vec![0; 1024]);
        model.tensors.insert(format!("{module}.weight"), plain);
        model.config.exclude.push(module);
    }
    model.refused(
        "mixed-experts",
        &[EXPERT, "readers fuse the experts of a layer"],
    );
}

/// Covers header claims for tensors without elements, and a configuration that is not an object.
#[test]
fn lying_sizes_and_kinds_are_refused() {
    let mut model = Model::new(Dialect::ModelOpt, Scheme::W4a4);
    let name = format!("{ATTENTION}.o_proj.weight");
    let empty = (Dtype::U8, vec![0, 1 << 63], Vec::new());
    model.tensors.insert(name.clone(), empty);
    model.refused("no-rows", &[&name, "0 rows"]);

    let scratch = Scratch::new("no-object");
    Model::new(Dialect::ModelOpt, Scheme::W4a4).write(&scratch);
    fs::write(scratch.join("config.json"), "[]").unwrap();
    let error = Checkpoint::open(&scratch).unwrap_err().to_string();
    assert!(
        error.contains("config.json") && error.contains("no JSON object"),
        "{error}"
    );
}

#[test]
fn codes_of_zero_blocks_are_written_as_zero() {
    let scratch = Scratch::new("zero-blocks");
    let mut scales = vec![0x3A; 32];
    scales[3] = 0;
    let global = GlobalScale::Amax(0.7);
    let weight = PackedWeight::new([16, 32], vec![0x7F; 256], scales, global, None).unwrap();
    let mut writer = TensorWriter::create(&scratch, u64::MAX).unwrap();
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        dialect.write(&mut writer, dialect.name(), &weight).unwrap();
    }
    writer.finish().unwrap();
    let tensors = contents(&scratch);
    for name in ["modelopt.weight", "compressed-tensors.weight_packed"] {
        let codes = &tensors[name].2;
        assert_eq!(codes[24..32], [0; 8]);
        assert!(codes.iter().filter(|&&byte| byte == 0x7F).count() == 248);
    }
    let factor = &tensors["modelopt.weight_scale_2"];
    assert_eq!(factor.2, (0.7f32 / 2688.0).to_le_bytes());
    assert!(factor.1.is_empty(), "a scalar of shape []");
    assert_eq!(tensors["compressed-tensors.weight_global_scale"].1, [1]);
}

#[test]
fn experts_of_mixtral_have_two_namings() {
    let mut model = Model::new(Dialect::CompressedTensors, Scheme::W4a16);
    let rename = |name: &str| name.replace(".mlp.experts.", ".block_sparse_moe.experts.");
    let tensors = std::mem::take(&mut model.tensors);
    model.tensors = tensors.into_iter().map(|(k, v)| (rename(&k), v)).collect();
    let (folder, out) = (Scratch::new("llm-compressor"), Scratch::new("mixtral"));
    model.write(&folder);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let done = convert(&checkpoint, Dialect::ModelOpt, &out).unwrap();
    assert_eq!(done.renamed, 6);
    let written = Checkpoint::open(&out).unwrap();
    let experts = "model.layers.0.block_sparse_moe.experts.1";
    for (theirs, ours) in [("gate", "w1"), ("up", "w3"), ("down", "w2")] {
        let old = checkpoint.weight(&format!("{experts}.{theirs}_proj"));
        let new = written.weight(&format!("{experts}.{ours}"));
        assert_eq!(old.unwrap().codes(), new.unwrap().codes());
    }
}

/// The written JSON has the same fields as the tools' output.
#[test]
fn written_json_has_the_fields_of_the_tools() {
    let root: PathBuf = golden("");
    for (name, ..) in EXPORTS {
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        let config = checkpoint.config().unwrap();
        let theirs = &checkpoint.json()["quantization_config"];
        check_fields(&config.inline(), theirs, name);
        if let Some(ours) = config.hf_quant_config() {
            let text = fs::read_to_string(root.join(name).join("hf_quant_config.json"));
            let theirs: Value = serde_json::from_str(&text.unwrap()).unwrap();
            assert_eq!(ours, theirs, "{name}");
        }
    }
}

/// Asserts that every field of `ours` is in `theirs` with the same value.
fn check_fields(ours: &Value, theirs: &Value, path: &str) {
    match ours {
        Value::Object(fields) => {
            for (key, value) in fields {
                check_fields(value, &theirs[key], &format!("{path}.{key}"));
            }
        }
        _ => assert_eq!(ours, theirs, "{path}"),
    }
}

/// Any JSON is read or refused with an error; no field value causes a panic.
#[test]
fn damaged_configurations_are_refused_without_a_panic() {
    let root: PathBuf = golden("");
    let values = [
        json!(null),
        json!(-1),
        json!("re:["),
        json!([]),
        json!({}),
        json!([["a"], 3]),
    ];
    let (mut read, mut refused) = (0, 0);
    for (name, ..) in EXPORTS {
        let folder = root.join(name);
        let text = |file: &str| fs::read_to_string(folder.join(file)).ok();
        let config: Value = serde_json::from_str(&text("config.json").unwrap()).unwrap();
        let file: Option<Value> =
            text("hf_quant_config.json").map(|text| serde_json::from_str(&text).unwrap());
        let mut damage =
            |config: &Value, file: Option<&Value>| match QuantConfig::read(config, file) {
                Ok(config) => {
                    let _ = config.map(|config| config.exclusions().is_ok());
                    read += 1;
                }
                Err(_) => refused += 1,
            };
        for pointer in pointers(&config["quantization_config"], "/quantization_config") {
            for value in &values {
                let mut damaged = config.clone();
                *damaged.pointer_mut(&pointer).unwrap() = value.clone();
                damage(&damaged, None);
            }
        }
        for pointer in file.iter().flat_map(|file| pointers(file, "")) {
            for value in &values {
                let mut damaged = file.clone().unwrap();
                *damaged.pointer_mut(&pointer).unwrap() = value.clone();
                damage(&json!({}), Some(&damaged));
            }
        }
    }
    assert!(
        read > 500 && refused > 500,
        "{read} read, {refused} refused"
    );
}

/// Returns the pointers to every value inside `value`.
fn pointers(value: &Value, path: &str) -> Vec<String> {
    let mut all = vec![path.to_owned()];
    if let Value::Object(fields) = value {
        for (key, value) in fields {
            all.extend(pointers(value, &format!("{path}/{key}")));
        }
    }
    all
}
