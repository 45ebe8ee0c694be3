//! Calls every parser of this crate with untrusted bytes.
//!
//! The folder `fuzz` of the repository runs these functions under libFuzzer, and the tests run them
//! with mutated seeds. None may panic, or use more memory than a multiple of its input.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::decoder::AdapterFolder;
use crate::decoder::fused::split;
use crate::eval::Question;
use crate::gguf;
use crate::hf::fp8::{block_size, is_fp8};
use crate::hf::{DecoderConfig, Dtype, GenerationConfig, TensorFolder, Tokenizer};
use crate::interchange::{Checkpoint, QuantConfig};
use crate::quantize::journal::{JOURNAL, Journal, MadeFrom};
use crate::tokens::chat::{ChatTemplate, Message};
use crate::tokens::encode::Encoder;
use crate::tokens::line::Line;
use crate::tokens::shard::Shard;

/// A parser with its fuzz target.
pub struct Target {
    /// Name of the fuzz target.
    pub name: &'static str,
    /// Parses the bytes and uses the result; an error is a valid outcome.
    pub run: fn(&[u8]),
}

/// All parsers.
pub const TARGETS: &[Target] = &[
    Target {
        name: "adapter_config",
        run: adapter_config,
    },
    Target {
        name: "chat_template",
        run: chat_template,
    },
    Target {
        name: "checkpoint",
        run: checkpoint,
    },
    Target {
        name: "config",
        run: config,
    },
    Target {
        name: "experts",
        run: experts,
    },
    Target {
        name: "fp8",
        run: fp8,
    },
    Target {
        name: "generation_config",
        run: generation_config,
    },
    Target {
        name: "gguf",
        run: gguf_file,
    },
    Target {
        name: "index",
        run: index,
    },
    Target {
        name: "journal",
        run: journal,
    },
    Target {
        name: "lines",
        run: lines,
    },
    Target {
        name: "quantization_config",
        run: quantization_config,
    },
    Target {
        name: "questions",
        run: questions,
    },
    Target {
        name: "safetensors",
        run: safetensors,
    },
    Target {
        name: "shard",
        run: shard,
    },
    Target {
        name: "tokenizer",
        run: tokenizer,
    },
];

/// Folder of one thread, removed when the thread ends.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

thread_local! {
    static SCRATCH: RefCell<Option<Scratch>> = const { RefCell::new(None) };
}

/// Creates the folder `name` of this thread.
fn folder(name: &str) -> PathBuf {
    let root = SCRATCH.with_borrow_mut(|scratch| {
        let scratch = scratch.get_or_insert_with(|| {
            let (process, thread) = (std::process::id(), std::thread::current().id());
            let name = format!("nvfp4-fuzz-{process}-{thread:?}");
            Scratch(std::env::temp_dir().join(name))
        });
        scratch.0.clone()
    });
    let path = root.join(name);
    fs::create_dir_all(&path).expect("the folder for temporary files can be written");
    path
}

fn write(path: &Path, data: &[u8]) {
    fs::write(path, data).expect("the folder for temporary files can be written");
}

/// `adapter_config.json` of LoRA adapters, beside the tensors of one of rank 1.
pub fn adapter_config(data: &[u8]) {
    let folder = folder("adapter_config");
    let tensors = folder.join("adapter_model.safetensors");
    if !tensors.exists() {
        let entry = |part: &str, begin: usize| {
            format!(
                "\"base_model.model.a.{part}.weight\":{{\"dtype\":\"F32\",\"shape\":[1,1],\
                 \"data_offsets\":[{begin},{}]}}",
                begin + 4
            )
        };
        let header = format!("{{{},{}}}", entry("lora_A", 0), entry("lora_B", 4));
        let length = (header.len() as u64).to_le_bytes();
        write(&tensors, &[&length, header.as_bytes(), &[0; 8]].concat());
    }
    write(&folder.join("adapter_config.json"), data);
    if let Ok(adapter) = AdapterFolder::read(&folder) {
        assert!(adapter.rank() > 0);
        let _ = adapter.modules();
    }
}

/// A safetensors file.
pub fn safetensors(data: &[u8]) {
    let path = folder("safetensors").join("model.safetensors");
    write(&path, data);
    if let Ok(tensors) = TensorFolder::open_file(&path) {
        for tensor in tensors.iter() {
            let _ = tensor.to_f32();
        }
    }
}

/// `model.safetensors.index.json` with two shards of one tensor each.
pub fn index(data: &[u8]) {
    let folder = folder("index");
    for (shard, tensor) in [("a", "x"), ("b", "y")] {
        let path = folder.join(format!("{shard}.safetensors"));
        if !path.exists() {
            let header = format!(
                "{{\"{tensor}\":{{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}}}"
            );
            let length = (header.len() as u64).to_le_bytes();
            write(&path, &[&length, header.as_bytes(), &[7]].concat());
        }
    }
    write(&folder.join("model.safetensors.index.json"), data);
    if let Ok(tensors) = TensorFolder::open(&folder) {
        assert!(tensors.iter().all(|tensor| *tensor.bytes() == [7]));
    }
}

/// `config.json` of a model.
pub fn config(data: &[u8]) {
    let Ok(json) = serde_json::from_slice::<Map<String, Value>>(data) else {
        return;
    };
    if let Ok(config) = DecoderConfig::from_json(&json) {
        let _ = config.to_json("bfloat16");
        for rope in &config.ropes {
            let _ = rope.frequencies(config.head.min(1 << 10), 64);
        }
    }
}

/// `generation_config.json` of a model of 288 tokens.
pub fn generation_config(data: &[u8]) {
    let folder = folder("generation_config");
    write(&folder.join("generation_config.json"), data);
    if let Ok(found) = GenerationConfig::read(&folder, &small_config("llama")) {
        let ids = found.eos.iter().chain(&found.bos).chain(&found.pad);
        assert!(ids.into_iter().all(|id| *id < 288));
    }
}

/// Returns a model of one layer and 288 tokens; with experts if `model_type` has them.
fn small_config(model_type: &str) -> DecoderConfig {
    let mut json = serde_json::json!({
        "model_type": model_type, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64,
        "vocab_size": 288, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    });
    if model_type != "llama" {
        json["num_local_experts"] = 2.into();
        json["num_experts_per_tok"] = 1.into();
    }
    if model_type == "qwen3_moe" {
        json["moe_intermediate_size"] = 64.into();
    }
    let json = json.as_object().expect("it is one");
    DecoderConfig::from_json(json).expect("a small model")
}

/// Experts in one tensor, in both layouts, and in MXFP4.
pub fn experts(data: &[u8]) {
    let path = folder("experts").join("model.safetensors");
    write(&path, data);
    for model_type in ["gpt_oss", "qwen3_moe"] {
        let Ok(tensors) = TensorFolder::open_file(&path) else {
            return;
        };
        if let Ok(tensors) = split(tensors, &small_config(model_type)) {
            for tensor in tensors.iter() {
                let _ = tensor.to_f32();
            }
        }
    }
}

/// Weights in FP8 with a scale for each block of 32 by 32.
pub fn fp8(data: &[u8]) {
    let path = folder("fp8").join("model.safetensors");
    write(&path, data);
    let json = serde_json::json!({"quantization_config": {
        "quant_method": "fp8", "weight_block_size": [32, 32],
    }});
    let json = json.as_object().expect("it is one");
    let tensors = TensorFolder::open_file(&path);
    if let Ok(tensors) = tensors.and_then(|tensors| tensors.with_fp8_scales(json)) {
        for tensor in tensors.iter() {
            let _ = tensor.to_f32();
        }
    }
}

/// An object of `config` (config.json) and `hf_quant_config`, which may be absent.
pub fn quantization_config(data: &[u8]) {
    let Ok(json) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    let config = json.get("config").unwrap_or(&Value::Null);
    if let Some(config) = config.as_object().filter(|config| is_fp8(config)) {
        let _ = block_size(config);
    }
    let Ok(Some(config)) = QuantConfig::read(config, json.get("hf_quant_config")) else {
        return;
    };
    let _ = (config.inline(), config.hf_quant_config());
    for exclusion in config.exclusions().into_iter().flatten() {
        for module in ["lm_head", "model.layers.10.self_attn.q_proj", ""] {
            let _ = exclusion.matches(module);
        }
    }
}

/// Tensors of a quantized folder in both dialects, in ModelOpt's with input feature scales, and in
/// FP8.
pub fn checkpoint(data: &[u8]) {
    let modelopt = |algorithm: &str| {
        serde_json::json!({"quantization_config": {
            "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": false, "num_bits": 8, "type": "float"},
        }})
    };
    let weights = serde_json::json!({
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "symmetric": true, "dynamic": false,
    });
    let compressed = serde_json::json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }});
    let fp8 =
        |strategy: &str| serde_json::json!({"num_bits": 8, "type": "float", "strategy": strategy});
    let mixed = serde_json::json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": fp8("channel")},
            "group_1": {
                "targets": ["re:.*down_proj$"], "weights": fp8("tensor"),
                "input_activations": fp8("tensor"),
            },
        },
    }});
    for (name, config) in [
        ("modelopt", modelopt("NVFP4")),
        ("awq", modelopt("NVFP4_AWQ")),
        ("compressed", compressed),
        ("mixed", mixed),
    ] {
        let folder = folder(name);
        write(&folder.join("config.json"), config.to_string().as_bytes());
        write(&folder.join("model.safetensors"), data);
        let checkpoint = Checkpoint::scan(&folder);
        if let Ok(checkpoint) = checkpoint
            && let Some(dialect) = checkpoint.config().map(|config| config.dialect)
        {
            for module in checkpoint.layers().keys() {
                if let Ok(weight) = checkpoint.weight(module) {
                    let _ = weight.effective(dialect.arithmetic());
                }
            }
            for module in checkpoint.fp8_layers().keys() {
                if let Ok(weight) = checkpoint.fp8_weight(module) {
                    let _ = weight.dequantize();
                }
            }
        }
    }
}

/// Files of an interrupted quantization: a JSON line with the reports of the calibration and of the
/// first layer, followed by the safetensors file of the calibration.
pub fn journal(data: &[u8]) {
    let out = folder("journal");
    let own = out.join(JOURNAL);
    let end = data.iter().position(|byte| *byte == b'\n');
    let (report, tensors) = data.split_at(end.unwrap_or(data.len()));
    let calibration = own.join("calibration");
    fs::create_dir_all(&calibration).expect("the folder for temporary files can be written");
    write(&calibration.join("report.json"), report);
    write(
        &calibration.join("model.safetensors"),
        tensors.get(1..).unwrap_or_default(),
    );
    write(&own.join("part-00000.json"), report);
    let made_from = MadeFrom::new();
    write(&own.join("made_from.json"), b"{}");
    let journal = Journal::resume(&out, &made_from).expect("it is made from the same");
    if let Ok(Some(calibration)) = journal.calibration() {
        for stats in calibration.inputs.values() {
            assert_eq!(stats.mean_squares().len(), stats.k());
        }
    }
    let _ = journal.part(0);
}

/// Imports a GGUF file.
pub fn gguf_file(data: &[u8]) {
    let folder = folder("gguf");
    let path = folder.join("model.gguf");
    write(&path, data);
    let out = folder.join("out");
    let _ = gguf::import(&path, &out, Dtype::F16);
    if out.exists() {
        fs::remove_dir_all(&out).expect("it was written just now");
    }
}

/// `tokenizer.json` of a model of 288 tokens.
pub fn tokenizer(data: &[u8]) {
    let folder = folder("tokenizer");
    write(&folder.join("tokenizer.json"), data);
    if let Ok(tokenizer) = Tokenizer::read(&folder, 288, &[])
        && let Ok(tokens) = tokenizer.encode("a b é 1", true)
    {
        let _ = tokenizer.decode(&tokens, true);
    }
}

/// `tokenizer_config.json` with a chat template.
pub fn chat_template(data: &[u8]) {
    let folder = folder("chat_template");
    write(&folder.join("tokenizer_config.json"), data);
    if let Ok(Some(template)) = ChatTemplate::read(&folder) {
        let _ = template.conversation(&conversation());
    }
}

fn conversation() -> [Message; 2] {
    [("user", "a"), ("assistant", "b")].map(|(role, content)| Message::new(role, content))
}

/// Lines of finetuning data: texts, completions, conversations and instructions in JSON.
pub fn lines(data: &[u8]) {
    let folder = folder("lines");
    let path = folder.join("tokenizer.json");
    if !path.exists() {
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
        });
        write(&path, json.to_string().as_bytes());
    }
    let tokenizer = Tokenizer::read(&folder, 3, &[]).expect("a tokenizer of three words");
    let template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}";
    let template = ChatTemplate::new(template.into(), String::new(), String::new());
    let encoder = Encoder::new(&tokenizer, template.ok(), Some(1));
    for line in String::from_utf8_lossy(data).lines() {
        let _ = Line::parse(line).and_then(|row| encoder.line(row));
    }
}

/// A file of multiple-choice questions.
pub fn questions(data: &[u8]) {
    let path = folder("questions").join("questions.jsonl");
    write(&path, data);
    let _ = Question::read(&path);
}

/// A token shard.
pub fn shard(data: &[u8]) {
    let path = folder("shard").join("tokens");
    write(&path, data);
    let Ok(shard) = Shard::open(&path) else {
        return;
    };
    let _ = shard.verify();
    for index in 0..shard.documents() {
        let _ = shard.read(shard.document(index));
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests;
