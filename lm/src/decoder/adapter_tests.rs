//! Tests of adapters from folders in PEFT's format.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde_json::{Value, json};

use super::*;
use crate::checkpoint::write_json;
use crate::hf::{Dtype, StoredTensor, TensorFolder, TensorWriter, WHOLE_FILE};
use crate::random::normal;
use nvfp4_test_support::{Scratch, golden};

/// Contents of a folder of adapters.
#[derive(Clone)]
struct Made {
    json: Value,
    /// Shape by name.
    tensors: BTreeMap<String, Vec<usize>>,
}

/// Returns adapters of rank 4 for two fused modules and one that is not, of `llama3-tiny`.
fn adapters() -> Made {
    adapters_of(4)
}

/// Returns such adapters of rank `rank`.
fn adapters_of(rank: usize) -> Made {
    let modules = [
        ("model.layers.0.self_attn.q_proj", 96, 96),
        ("model.layers.1.self_attn.v_proj", 96, 32),
        ("model.layers.1.mlp.down_proj", 160, 96),
    ];
    let mut tensors = BTreeMap::new();
    for (module, d_in, outputs) in modules {
        let name = |part: &str| format!("base_model.model.{module}.{part}.weight");
        tensors.insert(name("lora_A"), vec![rank, d_in]);
        tensors.insert(name("lora_B"), vec![outputs, rank]);
    }
    // As PEFT writes it, with the fields of all its methods.
    let json = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model",
        "r": rank, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "lora_dropout": 0.05, "bias": "none", "fan_in_fan_out": false, "use_dora": false,
        "use_rslora": false, "init_lora_weights": true, "rank_pattern": {}, "alpha_pattern": {},
        "modules_to_save": null, "megatron_core": "megatron.core", "loftq_config": {},
        "inference_mode": true, "lora_bias": false, "qalora_group_size": 16, "peft_version": "0.19",
    });
    Made { json, tensors }
}

impl Made {
    /// Writes the folder, with values that depend on the names.
    fn write(&self, folder: &Path) {
        write_json(&folder.join("adapter_config.json"), &self.json).unwrap();
        let mut writer = TensorWriter::create(folder, u64::MAX).unwrap();
        for (name, shape) in &self.tensors {
            let values = normal(7, name, shape.iter().product(), 0.1);
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            writer.add(name, Dtype::F32, shape, &bytes).unwrap();
        }
        writer.finish().unwrap();
        let tensors = folder.join("adapter_model.safetensors");
        fs::rename(folder.join(WHOLE_FILE), tensors).unwrap();
    }
}

fn logits(model: &Decoder) -> Vec<f32> {
    let tokens = TensorData::new(vec![5, 3, 8, 13, 21], [1, 5]);
    let tokens = Tensor::<2, Int>::from_data(tokens, &Device::flex());
    let logits = model.forward(tokens).unwrap().into_data();
    logits.try_to_vec().unwrap()
}

fn largest_difference(left: &[f32], right: &[f32]) -> f32 {
    let pairs = left.iter().zip(right);
    pairs.fold(0.0, |most, (left, right)| most.max((left - right).abs()))
}

/// A model with adapters computes the same as the merged one, from weights in high precision and
/// from packed ones, and generates text.
#[test]
fn adapters_are_applied_beside_weights() {
    let folder = Scratch::new("adapter");
    adapters().write(&folder);
    let adapter = AdapterFolder::read(&folder).unwrap();
    assert_eq!((adapter.rank(), adapter.base()), (4, Some("some/model")));
    for name in ["llama3-tiny", "llama3-tiny-ct-nvfp4a16"] {
        let source = golden(name);
        let (device, dtype) = (Device::flex(), FloatDType::F32);
        let base = Decoder::load_for_inference(&source, &device, dtype, None).unwrap();
        let is_packed = base.layers[0].attention.qkv.is_packed();
        assert_eq!(is_packed, name != "llama3-tiny");
        let without = logits(&base);
        let model = base.with_adapter(&adapter).unwrap();
        assert_eq!(model.layers[0].attention.qkv.is_packed(), is_packed);
        let found = logits(&model);
        assert!(largest_difference(&found, &without) > 1e-2, "{name}");
        let out = folder.join(format!("{name}-merged"));
        model.save(&out, Dtype::F32, Some(&source)).unwrap();
        assert!(!out.join("recipe.yaml").exists(), "it is not quantized");
        let merged = Decoder::load(&out, &device, dtype).unwrap();
        let difference = largest_difference(&found, &logits(&merged));
        assert!(difference < 1e-3, "{name}: {difference}");
        let generation = Generation::greedy(3);
        let texts = model.generate(&[vec![5, 3, 8]], &generation, |_, _| Ok(true));
        assert_eq!(texts.unwrap()[0].len(), 3);
        let error = model.with_adapter(&adapter).unwrap_err();
        assert!(format!("{error:#}").contains("adapters already"), "{error}");
    }
}

/// Returns the values of all tensors of a folder of adapters, by name.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let tensors = TensorFolder::open_file(&folder.join("adapter_model.safetensors")).unwrap();
    let read = |tensor: StoredTensor<'_>| (tensor.shape.to_vec(), tensor.to_f32().unwrap());
    let all = tensors.iter();
    all.map(|tensor| (tensor.name.to_owned(), read(tensor)))
        .collect()
}

/// A folder that is read and written again has the same tensors, for any rank, also if a module
/// between others has no adapter.
#[test]
fn folders_are_written_as_they_were_read() {
    let device = Device::flex();
    for rank in [1, 4, 16] {
        let folder = Scratch::new(&format!("adapter-again-{rank}"));
        let mut made = adapters_of(rank);
        for part in ["lora_A", "lora_B"] {
            let name = |module: &str| format!("base_model.model.{module}.{part}.weight");
            let (q, v) = (
                "model.layers.0.self_attn.q_proj",
                "model.layers.0.self_attn.v_proj",
            );
            let mut shape = made.tensors[&name(q)].clone();
            if part == "lora_B" {
                shape[0] = 32;
            }
            made.tensors.insert(name(v), shape);
        }
        made.write(&folder);
        let model = Decoder::load(&golden("llama3-tiny"), &device, FloatDType::F32).unwrap();
        let adapter = AdapterFolder::read(&folder).unwrap();
        let model = model.with_adapter(&adapter).unwrap();
        let lora = LoraConfig {
            rank,
            alpha: 6.0,
            targets: ".".into(),
        };
        let out = folder.join("again");
        model
            .save_adapter(&out, &lora, Path::new("some/model"))
            .unwrap();
        assert_eq!(tensors(&out), tensors(&folder), "rank {rank}");
        let again = AdapterFolder::read(&out).unwrap();
        let base = Decoder::load(&golden("llama3-tiny"), &device, FloatDType::F32).unwrap();
        let again = base.with_adapter(&again).unwrap();
        assert_eq!(logits(&again), logits(&model), "rank {rank}");
    }
}

/// The initial A of a module depends on its name, not on its projection; B is 0.
#[test]
fn initial_adapters_are_those_of_their_modules() {
    let folder = Scratch::new("adapter-initial");
    for rank in [1, 4, 16] {
        let device = Device::flex().autodiff();
        let model = Decoder::load(&golden("llama3-tiny"), &device, FloatDType::F32).unwrap();
        let recipe = burn_nvfp4::Nvfp4Recipe::bf16();
        let model = model.into_training(&recipe, FloatDType::F32).unwrap();
        let lora = LoraConfig {
            rank,
            alpha: 8.0,
            targets: r"\.(q|v|up|down)_proj$".into(),
        };
        let model = model.into_lora(&lora, 7).unwrap().valid();
        let out = folder.join(rank.to_string());
        model.save_adapter(&out, &lora, Path::new("base")).unwrap();
        let found = tensors(&out);
        assert_eq!(found.len(), 2 * 2 * 4);
        for (name, (shape, values)) in found {
            if name.contains("lora_B") {
                assert!(values.iter().all(|value| value.to_bits() == 0), "{name}");
                continue;
            }
            let module = name.strip_prefix("base_model.model.").unwrap();
            let module = module.strip_suffix(".lora_A.weight").unwrap();
            let d_in = shape[1];
            let expected = normal(7, module, d_in * rank, (3.0 * d_in as f64).powf(-0.5));
            for (at, value) in values.iter().enumerate() {
                let (row, column) = (at / d_in, at % d_in);
                assert_eq!(*value, expected[column * rank + row], "{name}, {at}");
            }
        }
    }
}

/// `use_rslora` divides by the square root of the rank: 6 / sqrt(4) is 12 / 4.
#[test]
fn rank_stabilized_adapters_have_their_scale() {
    let folder = Scratch::new("adapter-scale");
    let [left, right] = [(true, 6), (false, 12)].map(|(is_stabilized, alpha)| {
        let mut made = adapters();
        made.json["use_rslora"] = is_stabilized.into();
        made.json["lora_alpha"] = alpha.into();
        let own = folder.join(alpha.to_string());
        fs::create_dir_all(&own).unwrap();
        made.write(&own);
        let model = Decoder::load(&golden("llama3-tiny"), &Device::flex(), FloatDType::F32);
        let adapter = AdapterFolder::read(&own).unwrap();
        logits(&model.unwrap().with_adapter(&adapter).unwrap())
    });
    assert_eq!(left, right);
}

#[test]
fn adapters_that_do_not_fit_are_named() {
    const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";
    type Change = fn(&mut Made);
    let cases: [(Change, &[&str]); 12] = [
        (
            |made| {
                let shape = made.tensors.remove(&format!("{Q}.lora_A.weight")).unwrap();
                made.tensors.insert(
                    "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight".into(),
                    shape,
                );
            },
            &["lora_A.weight` is missing", "layers.0.self_attn.q_proj"],
        ),
        (
            |made| {
                for part in ["lora_A", "lora_B"] {
                    let name = "base_model.model.model.layers.9.mlp.up_proj";
                    let name = format!("{name}.{part}.weight");
                    made.tensors.insert(name, vec![4, 4]);
                }
            },
            &["does not fit the model", "`model.layers.9.mlp.up_proj`"],
        ),
        (
            |made| made.json["r"] = 8.into(),
            &["q_proj.lora_A.weight` is [4, 96], of rank 4", "`r`", "is 8"],
        ),
        (
            |made| {
                made.tensors
                    .insert(format!("{Q}.lora_B.weight"), vec![64, 4]);
            },
            &["q_proj.lora_B.weight` is [64, 4]", "needs [96, 4]"],
        ),
        (
            |made| {
                made.tensors.insert(format!("{Q}.lora_A.weight"), vec![384]);
            },
            &["q_proj.lora_A.weight` is [384], no matrix"],
        ),
        (
            |made| {
                let name = format!("{Q}.lora_magnitude_vector.weight");
                made.tensors.insert(name, vec![96]);
            },
            &["of no LoRA adapter", "lora_magnitude_vector"],
        ),
        (
            |made| made.json["target_modules"] = json!(["q_proj", "o_proj"]),
            &["`target_modules`", "`o_proj`"],
        ),
        (
            |made| made.json["peft_type"] = "IA3".into(),
            &["`peft_type` is \"IA3\"", "LORA"],
        ),
        (
            |made| made.json["use_dora"] = true.into(),
            &["adapter_config.json", "`use_dora` is true"],
        ),
        (
            |made| made.json["bias"] = "all".into(),
            &["`bias` is \"all\""],
        ),
        (
            |made| made.json["init_lora_weights"] = "pissa".into(),
            &["`init_lora_weights` is \"pissa\""],
        ),
        (
            |made| made.json["lora_alpha"] = Value::Null,
            &["`lora_alpha` is null, but must be a number"],
        ),
    ];
    for (number, (change, says)) in cases.into_iter().enumerate() {
        let folder = Scratch::new(&format!("adapter-refused-{number}"));
        let mut made = adapters();
        change(&mut made);
        made.write(&folder);
        let model = Decoder::load(&golden("llama3-tiny"), &Device::flex(), FloatDType::F32);
        let adapted =
            AdapterFolder::read(&folder).and_then(|adapter| model.unwrap().with_adapter(&adapter));
        let error = format!("{:#}", adapted.map(drop).unwrap_err());
        for part in says {
            assert!(error.contains(part), "does not say {part:?}: {error}");
        }
    }
    let empty = Scratch::new("adapter-empty");
    let error = AdapterFolder::read(&empty).map(drop).unwrap_err();
    assert!(
        error.to_string().contains("has no adapter_config.json"),
        "{error}"
    );
}

/// Returns the logits of `llama3-tiny` with the adapters of `made`.
fn adapted(made: &Made) -> Result<Vec<f32>> {
    let folder = Scratch::new("adapter-odd");
    made.write(&folder);
    let model = Decoder::load(&golden("llama3-tiny"), &Device::flex(), FloatDType::F32)?;
    Ok(logits(&model.with_adapter(&AdapterFolder::read(&folder)?)?))
}

/// Fields of PEFT 0.21 that say how adapters were trained, or nothing.
#[test]
fn fields_that_change_nothing_are_accepted() {
    let expected = adapted(&adapters()).unwrap();
    for fields in [
        // All fields of `LoraConfig` with their defaults.
        json!({"alora_invocation_tokens": null, "arrow_config": null, "auto_mapping": null,
            "corda_config": null, "ensure_weight_tying": false, "eva_config": null,
            "exclude_modules": null, "kasa_config": null, "layer_replication": null,
            "layers_pattern": null, "layers_to_transform": null, "lora_ga_config": null,
            "megatron_config": null, "monteclora_config": null, "revision": null,
            "runtime_config": {"ephemeral_gpu_offload": false}, "target_parameters": null,
            "trainable_token_indices": null, "use_bdlora": null, "use_qalora": false,
            "velora_config": null}),
        json!({"modules_to_save": [], "use_rslora": null, "layer_replication": []}),
        json!({"target_modules": "all-linear", "exclude_modules": ["lm_head"]}),
        json!({"target_modules": ".*(q_proj|v_proj|down_proj)$", "layers_to_transform": [0, 1]}),
        json!({"init_lora_weights": "gaussian", "lora_dropout": 0.5}),
        json!({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}),
        json!({"init_lora_weights": false, "task_type": null, "revision": "main"}),
        json!({"lora_alpha": 6.0}),
    ] {
        let mut made = adapters();
        for (name, value) in fields.as_object().unwrap() {
            made.json[name] = value.clone();
        }
        assert_eq!(adapted(&made).unwrap(), expected, "{fields}");
    }
    // The few fields of the first versions.
    let mut made = adapters();
    let first = ["peft_type", "r", "lora_alpha", "target_modules", "bias"];
    let json = made.json.as_object_mut().unwrap();
    json.retain(|name, _| first.contains(&name.as_str()));
    assert_eq!(adapted(&made).unwrap(), expected);
}

/// Fields and tensors that make an adapter compute something else, each refused by its name.
#[test]
fn fields_that_change_adapters_are_refused() {
    for (fields, says) in [
        (json!({"rank_pattern": {"q_proj": 8}}), "`rank_pattern` is"),
        (
            json!({"alpha_pattern": {"q_proj": 32}}),
            "`alpha_pattern` is",
        ),
        (
            json!({"modules_to_save": ["lm_head"]}),
            "`modules_to_save` is",
        ),
        (json!({"fan_in_fan_out": true}), "`fan_in_fan_out` is true"),
        (json!({"bias": "lora_only"}), "`bias` is \"lora_only\""),
        (json!({"lora_bias": true}), "`lora_bias` is true"),
        (
            json!({"layer_replication": [[0, 2], [1, 2]]}),
            "`layer_replication` is",
        ),
        (
            json!({"trainable_token_indices": [1]}),
            "`trainable_token_indices` is",
        ),
        (
            json!({"target_parameters": ["mlp.experts.gate_up_proj"]}),
            "`target_parameters` is",
        ),
        (
            json!({"alora_invocation_tokens": [1]}),
            "`alora_invocation_tokens` is",
        ),
        (json!({"use_qalora": true}), "`use_qalora` is true"),
        (json!({"kasa_config": {"beta": 1e-4}}), "`kasa_config` is"),
        (json!({"use_rslora": "true"}), "`use_rslora` is \"true\""),
        (json!({"use_rslora": 1}), "`use_rslora` is 1"),
        (
            json!({"init_lora_weights": "olora"}),
            "`init_lora_weights` is \"olora\"",
        ),
        (
            json!({"init_lora_weights": "pissa_niter_4"}),
            "`init_lora_weights` is \"pissa_niter_4\"",
        ),
        (
            json!({"init_lora_weights": "loftq"}),
            "`init_lora_weights` is \"loftq\"",
        ),
        (json!({"r": 4.5}), "`r` is 4.5, but must be a rank"),
        (json!({"r": 0}), "`r` is 0, but must be a rank"),
        (json!({"lora_alpha": "6"}), "`lora_alpha` is \"6\""),
        (
            json!({"peft_type": "ADALORA"}),
            "`peft_type` is \"ADALORA\"",
        ),
    ] {
        let mut made = adapters();
        for (name, value) in fields.as_object().unwrap() {
            made.json[name] = value.clone();
        }
        let error = format!("{:#}", adapted(&made).unwrap_err());
        assert!(error.contains(says), "{fields}: {error}");
    }
    // A head saved beside adapters, names of the first versions and of other wrappers, embeddings.
    for name in [
        "base_model.model.lm_head.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.k_proj.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    ] {
        let mut made = adapters();
        made.tensors.insert(name.into(), vec![4, 96]);
        let error = format!("{:#}", adapted(&made).unwrap_err());
        let says = format!("of no LoRA adapter: `{name}`");
        assert!(error.contains(&says), "{error}");
    }
}
