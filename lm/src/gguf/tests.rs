use std::fs;
use std::path::PathBuf;

use serde_json::Value as Json;

use super::file::parse_names;
use super::*;
use crate::hf::TensorFolder;
use crate::interchange::{Arithmetic, Checkpoint};
use nvfp4_test_support::{Scratch, golden};

mod odd;
mod split;

/// A GGUF file under construction.
#[derive(Clone, Default)]
struct Made {
    keys: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Made {
    fn key(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.keys
            .push([&string(key)[..], &kind.to_le_bytes(), value].concat());
    }

    fn number(&mut self, key: &str, value: u32) {
        self.key(key, 4, &value.to_le_bytes());
    }

    /// Adds a tensor; `shape` has the contiguous axis last.
    fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) {
        while !self.data.len().is_multiple_of(32) {
            self.data.push(0xee);
        }
        let mut info = string(name);
        info.extend((shape.len() as u32).to_le_bytes());
        for axis in shape.iter().rev() {
            info.extend((*axis as u64).to_le_bytes());
        }
        info.extend(kind.to_le_bytes());
        info.extend((self.data.len() as u64).to_le_bytes());
        self.infos.push(info);
        self.data.extend(bytes);
    }

    /// Replaces the tensor `name`, or adds it.
    fn replace(&mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) {
        let start = string(name);
        self.infos.retain(|info| !info.starts_with(&start));
        self.tensor(name, shape, kind, bytes);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.infos.len() as u64).to_le_bytes());
        file.extend((self.keys.len() as u64).to_le_bytes());
        file.extend(self.keys.concat());
        file.extend(self.infos.concat());
        while !file.len().is_multiple_of(32) {
            file.push(0);
        }
        file.extend(&self.data);
        file
    }
}

const D_MODEL: usize = 64;
const VOCAB: usize = 32;
const HIDDEN: usize = 64;

/// Returns matrix number `seed`: small multiples of 1/8, exact in every type.
fn values(seed: usize, count: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 7 + seed * 3) % 15) as f32 / 8.0)
        .collect()
}

fn f16_bytes(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// Encodes with scale 1/8 and minimum 0, so that the values of [`values`] are codes.
fn q4_1(values: &[f32]) -> Vec<u8> {
    let block = |block: &[f32]| {
        let code = |i: usize| (block[i] * 8.0) as u8;
        let mut bytes = [f16_bytes(0.125), f16_bytes(0.0)].concat();
        bytes.extend((0..16).map(|i| code(i) | code(i + 16) << 4));
        bytes
    };
    values.chunks(32).flat_map(block).collect()
}

fn q8_0(values: &[f32]) -> Vec<u8> {
    let block = |block: &[f32]| {
        let codes = block.iter().map(|value| (value * 8.0) as i8 as u8);
        f16_bytes(0.125)
            .into_iter()
            .chain(codes)
            .collect::<Vec<u8>>()
    };
    values.chunks(32).flat_map(block).collect()
}

/// Permutes rows like llama.cpp's converter: `(h, p, i)` to `(h, i, p)`.
fn permute(values: &[f32], heads: usize) -> Vec<f32> {
    let row = |r: usize| {
        let (h, i, p) = (r / 16, r % 16 / 2, r % 2);
        let from = h * 16 + p * 8 + i;
        values[from * D_MODEL..][..D_MODEL].to_vec()
    };
    (0..heads * 16).flat_map(row).collect()
}

/// Returns a model with one layer, two query heads of dimension 16, and one key and value head.
fn model() -> Made {
    let mut made = Made::default();
    made.key("general.architecture", 8, &string("llama"));
    for (key, value) in [
        ("llama.block_count", 1),
        ("llama.context_length", 64),
        ("llama.embedding_length", D_MODEL as u32),
        ("llama.feed_forward_length", HIDDEN as u32),
        ("llama.attention.head_count", 2),
        ("llama.attention.head_count_kv", 1),
        ("llama.rope.dimension_count", 16),
        ("llama.attention.key_length", 16),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
    ] {
        made.number(key, value);
    }
    made.key(
        "llama.attention.layer_norm_rms_epsilon",
        6,
        &1e-5f32.to_le_bytes(),
    );
    made.key("llama.rope.freq_base", 6, &1e5f32.to_le_bytes());
    // An array of strings, which is skipped.
    let tokens = [
        &8u32.to_le_bytes()[..],
        &2u64.to_le_bytes(),
        &string("a"),
        &string("b"),
    ];
    made.key("tokenizer.ggml.tokens", 9, &tokens.concat());

    let f32s = |v: &[f32]| v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    made.tensor(
        "token_embd.weight",
        &[VOCAB, D_MODEL],
        8,
        &q8_0(&values(0, VOCAB * D_MODEL)),
    );
    made.tensor(
        "output_norm.weight",
        &[D_MODEL],
        0,
        &f32s(&values(1, D_MODEL)),
    );
    made.tensor(
        "blk.0.attn_norm.weight",
        &[D_MODEL],
        0,
        &f32s(&values(2, D_MODEL)),
    );
    made.tensor(
        "blk.0.ffn_norm.weight",
        &[D_MODEL],
        0,
        &f32s(&values(3, D_MODEL)),
    );
    let q = permute(&values(4, 32 * D_MODEL), 2);
    made.tensor("blk.0.attn_q.weight", &[32, D_MODEL], 3, &q4_1(&q));
    let k = permute(&values(5, 16 * D_MODEL), 1);
    made.tensor("blk.0.attn_k.weight", &[16, D_MODEL], 3, &q4_1(&k));
    let v: Vec<u8> = values(6, 16 * D_MODEL)
        .iter()
        .flat_map(|v| f16_bytes(*v))
        .collect();
    made.tensor("blk.0.attn_v.weight", &[16, D_MODEL], 1, &v);
    let o = values(7, D_MODEL * 32);
    let o: Vec<u8> = o
        .iter()
        .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
        .collect();
    made.tensor("blk.0.attn_output.weight", &[D_MODEL, 32], 30, &o);
    for (name, seed, shape) in [
        ("ffn_gate", 8, [HIDDEN, D_MODEL]),
        ("ffn_up", 9, [HIDDEN, D_MODEL]),
        ("ffn_down", 10, [D_MODEL, HIDDEN]),
    ] {
        let bytes = q4_1(&values(seed, HIDDEN * D_MODEL));
        made.tensor(&format!("blk.0.{name}.weight"), &shape, 3, &bytes);
    }
    made
}

fn write(folder: &Path, made: &Made) -> PathBuf {
    let path = folder.join("model.gguf");
    fs::write(&path, made.bytes()).unwrap();
    path
}

fn error_of(made: &Made) -> String {
    let folder = Scratch::new("gguf-error");
    let path = write(&folder, made);
    let error = import(&path, &folder.join("out"), Dtype::F32).unwrap_err();
    assert_eq!(
        fs::read_dir(&*folder).unwrap().count(),
        1,
        "something is left"
    );
    format!("{error:#}")
}

#[test]
fn a_llama_becomes_a_folder() {
    let folder = Scratch::new("gguf");
    let path = write(&folder, &model());
    let target = folder.join("out");
    let Imported {
        config,
        no_tokenizer,
        ..
    } = import(&path, &target, Dtype::BF16).unwrap();
    assert!(no_tokenizer.unwrap().contains("tokenizer.ggml.model"));
    assert_eq!(DecoderConfig::read(&target).unwrap(), config);
    assert_eq!((config.heads, config.kv_heads, config.head), (2, 1, 16));
    assert_eq!(
        (config.vocab, config.max_positions, config.tied),
        (VOCAB, 64, true)
    );
    assert_eq!((config.bos, &config.eos[..]), (Some(1), &[2][..]));
    assert_eq!(
        (config.ropes[0].theta, config.epsilon),
        (1e5, f64::from(1e-5f32))
    );
    let tensors = TensorFolder::open(&target).unwrap();
    assert_eq!(tensors.len(), 11);
    for (name, seed) in [
        ("embed_tokens", 0),
        ("norm", 1),
        ("layers.0.input_layernorm", 2),
        ("layers.0.post_attention_layernorm", 3),
        ("layers.0.self_attn.q_proj", 4),
        ("layers.0.self_attn.k_proj", 5),
        ("layers.0.self_attn.v_proj", 6),
        ("layers.0.self_attn.o_proj", 7),
        ("layers.0.mlp.gate_proj", 8),
        ("layers.0.mlp.up_proj", 9),
        ("layers.0.mlp.down_proj", 10),
    ] {
        let found = tensors.get(&format!("model.{name}.weight")).unwrap();
        let found = found.to_f32().unwrap();
        assert_eq!(found, values(seed, found.len()), "{name}");
    }
}

fn array(kind: u32, values: &[Vec<u8>]) -> Vec<u8> {
    let count = values.len() as u64;
    [
        &kind.to_le_bytes()[..],
        &count.to_le_bytes(),
        &values.concat(),
    ]
    .concat()
}

/// Returns [`model`] with a tokenizer of seven tokens and these changes.
fn with_tokenizer(cut: &str, merges: &[&str], types: &[i32]) -> Made {
    let mut made = model();
    made.keys.retain(|key| {
        let tokens = string("tokenizer.ggml.tokens");
        !key.starts_with(&tokens)
    });
    let tokens = ["a", "<s>", "</s>", "b", "Ġ", "ab", "Ġab", "1", "2", "12"];
    let strings = |texts: &[&str]| {
        let texts: Vec<Vec<u8>> = texts.iter().map(|text| string(text)).collect();
        array(8, &texts)
    };
    let types: Vec<Vec<u8>> = types.iter().map(|t| t.to_le_bytes().to_vec()).collect();
    made.key("tokenizer.ggml.model", 8, &string("gpt2"));
    made.key("tokenizer.ggml.pre", 8, &string(cut));
    made.key("tokenizer.ggml.tokens", 9, &strings(&tokens));
    made.key("tokenizer.ggml.merges", 9, &strings(merges));
    made.key("tokenizer.ggml.token_type", 9, &array(5, &types));
    made.key("tokenizer.ggml.add_bos_token", 7, &[1]);
    made
}

const MERGES: [&str; 3] = ["a b", "Ġ ab", "1 2"];
const TYPES: [i32; 10] = [1, 3, 3, 1, 1, 1, 1, 1, 1, 1];

#[test]
fn the_tokenizer_of_a_file_becomes_one() {
    for (cut, digits) in [
        ("smollm", vec![7, 8]),
        ("gpt-2", vec![9]),
        ("llama-bpe", vec![9]),
    ] {
        let folder = Scratch::new("gguf-tokenizer");
        let path = write(&folder, &with_tokenizer(cut, &MERGES, &TYPES));
        let target = folder.join("out");
        let made = import(&path, &target, Dtype::F32).unwrap();
        assert_eq!(made.no_tokenizer, None);
        let tokenizer = Tokenizer::read(&target, VOCAB, &[1, 2]).unwrap();
        let text = "ab ab</s>12";
        let expected = [vec![1, 5, 6, 2], digits].concat();
        let found = tokenizer.encode(text, true).unwrap();
        assert_eq!(found, expected, "{cut}");
        assert_eq!(tokenizer.encode(text, false).unwrap(), expected[1..]);
        assert_eq!(
            tokenizer.decode(&found, true).unwrap(),
            format!("<s>{text}")
        );
        assert_eq!(tokenizer.decode(&found, false).unwrap(), "ab ab12");
    }
}

/// Llama 3 begins a text with its first token unless the file says otherwise, and takes words that
/// are tokens without looking at merges.
#[test]
fn the_tokenizer_of_llama_3_has_its_defaults() {
    let mut made = with_tokenizer("llama-bpe", &["a b"], &TYPES);
    let flag = string("tokenizer.ggml.add_bos_token");
    made.keys.retain(|key| !key.starts_with(&flag));
    let folder = Scratch::new("gguf-llama-3");
    let path = write(&folder, &made);
    let target = folder.join("out");
    import(&path, &target, Dtype::F32).unwrap();
    let tokenizer = Tokenizer::read(&target, VOCAB, &[1, 2]).unwrap();
    assert_eq!(tokenizer.encode("ab ab12", true).unwrap(), [1, 5, 6, 9]);
}

#[test]
fn a_tokenizer_that_contradicts_itself_is_an_error() {
    let error = error_of(&with_tokenizer("smollm", &["a c"], &TYPES));
    assert!(
        error.contains("\"a c\"") && error.contains("no pair"),
        "{error}"
    );
    let error = error_of(&with_tokenizer("smollm", &MERGES, &TYPES[1..]));
    assert!(error.contains("9 entries for 10 tokens"), "{error}");
    let folder = Scratch::new("gguf-tokenizer-other");
    let path = write(&folder, &with_tokenizer("viking", &MERGES, &TYPES));
    let made = import(&path, &folder.join("out"), Dtype::F32).unwrap();
    assert!(made.no_tokenizer.unwrap().contains("viking"));
}

#[test]
fn blocks_are_dequantized_as_ggml_does() {
    let text = fs::read(golden("gguf-blocks.json")).unwrap();
    let types: Json = serde_json::from_slice(&text).unwrap();
    let types = types.as_object().unwrap();
    let hex = |text: &Json| -> Vec<u8> {
        let digits = text.as_str().unwrap().as_bytes().chunks(2);
        let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.map(byte).collect()
    };
    for (_, kind) in GgufType::ALL {
        if [GgufType::F32, GgufType::F16, GgufType::BF16].contains(&kind) {
            continue;
        }
        let expected = &types[&format!("{kind:?}")];
        let found = kind.to_f32(&hex(&expected["bytes"]));
        let found: Vec<u8> = found.iter().flat_map(|value| value.to_le_bytes()).collect();
        // Zeros of either sign are one value: ggml multiplies by integers, which have one zero.
        let zeros = |mut bytes: Vec<u8>| {
            for value in bytes.chunks_mut(4) {
                if value == [0, 0, 0, 0x80] {
                    value[3] = 0;
                }
            }
            bytes
        };
        assert!(zeros(found) == zeros(hex(&expected["f32"])), "{kind:?}");
    }
    assert_eq!(types.len(), GgufType::ALL.len() - 3);
}

/// Encodes rows of 64 in NVFP4 with a scale of 0.25 for each block, so that multiples of 1/8 up to
/// 1.5 with codes of E2M1 are exact.
fn nvfp4(values: &[f32]) -> Vec<u8> {
    let code = |value: f32| {
        let codes = 0..8u8;
        let mut found =
            codes.filter(|code| nvfp4_formats::format::e2m1::decode(*code) * 0.25 == value);
        found.next().unwrap_or_else(|| panic!("{value} is no code"))
    };
    let block = |block: &[f32]| {
        let mut bytes = vec![nvfp4_formats::format::e4m3::encode(0.25); 4];
        for values in block.chunks(16) {
            bytes.extend((0..8).map(|i| code(values[i]) | code(values[i + 8]) << 4));
        }
        bytes
    };
    values.chunks(64).flat_map(block).collect()
}

/// Returns matrix number `seed` of values that are multiples of 0.25 with an E2M1 code.
fn e2m1_values(seed: usize, count: usize) -> Vec<f32> {
    const CODES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let at = |i: usize| CODES[(i * 5 + i / 64 + seed) % 8] * 0.25;
    (0..count).map(at).collect()
}

fn f32_bytes(value: f32) -> [u8; 4] {
    value.to_le_bytes()
}

/// Returns [`model`] with queries and `down` in NVFP4, with global scales.
fn with_nvfp4() -> Made {
    let mut made = model();
    let [q, k, v] =
        [(1, 32), (3, 16), (4, 16)].map(|(seed, rows)| e2m1_values(seed, rows * D_MODEL));
    for (name, values) in [("q", permute(&q, 2)), ("k", permute(&k, 1)), ("v", v)] {
        let name = format!("blk.0.attn_{name}");
        let shape = [values.len() / D_MODEL, D_MODEL];
        made.replace(&format!("{name}.weight"), &shape, 40, &nvfp4(&values));
        made.tensor(&format!("{name}.scale"), &[1], 0, &f32_bytes(0.5));
    }
    let down = e2m1_values(2, D_MODEL * HIDDEN);
    made.replace(
        "blk.0.ffn_down.weight",
        &[D_MODEL, HIDDEN],
        40,
        &nvfp4(&down),
    );
    made
}

#[test]
fn layers_in_nvfp4_keep_their_codes() {
    for with_inputs in [false, true] {
        let mut made = with_nvfp4();
        if with_inputs {
            for (name, scale) in [("attn_q", 0.01), ("attn_k", 0.01), ("attn_v", 0.01)] {
                let name = format!("blk.0.{name}.input_scale");
                made.tensor(&name, &[1], 0, &f32_bytes(scale));
            }
            made.tensor("blk.0.ffn_down.input_scale", &[1], 0, &f32_bytes(0.02));
        }
        let folder = Scratch::new("gguf-nvfp4");
        let path = write(&folder, &made);
        let target = folder.join("out");
        let imported = import(&path, &target, Dtype::BF16).unwrap();
        assert_eq!(imported.nvfp4_layers, 4);
        assert_eq!(imported.unused_scales, Vec::<String>::new());
        let checkpoint = Checkpoint::open(&target).unwrap();
        let scheme = checkpoint.config().unwrap().scheme();
        assert_eq!(scheme == Some(Scheme::W4a4), with_inputs);
        for (module, seed, scale, input) in [
            ("model.layers.0.self_attn.q_proj", 1, 0.5, 0.01),
            ("model.layers.0.self_attn.k_proj", 3, 0.5, 0.01),
            ("model.layers.0.self_attn.v_proj", 4, 0.5, 0.01),
            ("model.layers.0.mlp.down_proj", 2, 1.0, 0.02),
        ] {
            let weight = checkpoint.weight(module).unwrap();
            let found = weight.dequantize(Arithmetic::CodeTimesScale);
            let expected = e2m1_values(seed, found.len());
            let expected: Vec<f32> = expected.iter().map(|value| value * scale).collect();
            assert_eq!(found, expected, "{module}");
            let input = with_inputs.then_some(GlobalScale::Multiply(input));
            assert_eq!(weight.input_global(), input, "{module}");
        }
        let others = checkpoint.tensors();
        let o = others
            .get("model.layers.0.self_attn.o_proj.weight")
            .unwrap();
        assert_eq!(o.to_f32().unwrap(), values(7, D_MODEL * 32));
    }
}

#[test]
fn scales_of_nvfp4_layers_are_complete_and_positive() {
    let mut made = with_nvfp4();
    for name in ["q", "k", "v"] {
        let name = format!("blk.0.attn_{name}.input_scale");
        made.tensor(&name, &[1], 0, &f32_bytes(0.01));
    }
    let error = error_of(&made);
    let modules = error.contains("self_attn.") && error.contains("down_proj");
    assert!(modules && error.contains("all layers in NVFP4"), "{error}");
    for (bytes, shape) in [
        (f32_bytes(-1.0).to_vec(), 1),
        (vec![0; 4], 1),
        (vec![1; 8], 2),
    ] {
        let mut made = with_nvfp4();
        made.replace("blk.0.attn_q.scale", &[shape], 0, &bytes);
        let error = error_of(&made);
        assert!(error.contains("one positive number"), "{error}");
        assert!(error.contains("`blk.0.attn_q.scale`"), "{error}");
    }
    // A block scale with a sign, and one that is NaN.
    for (byte, expected) in [(0xa8, "negative"), (0x7f, "NaN")] {
        let mut made = with_nvfp4();
        let mut down = nvfp4(&e2m1_values(2, D_MODEL * HIDDEN));
        down[36 + 1] = byte;
        made.replace("blk.0.ffn_down.weight", &[D_MODEL, HIDDEN], 40, &down);
        let error = error_of(&made);
        let named = error.contains("`blk.0.ffn_down.weight`") && error.contains("row 1, block 1");
        assert!(named && error.contains(expected), "{error}");
    }
}

/// Readers fuse queries, keys and values, so they are dequantized if one of them has other scales.
#[test]
fn fused_layers_with_different_scales_are_dequantized() {
    let mut made = with_nvfp4();
    made.replace("blk.0.attn_k.scale", &[1], 0, &f32_bytes(0.25));
    made.tensor("blk.0.attn_v.input_scale", &[1], 0, &f32_bytes(0.01));
    let folder = Scratch::new("gguf-nvfp4-fused");
    let path = write(&folder, &made);
    let target = folder.join("out");
    let imported = import(&path, &target, Dtype::F32).unwrap();
    assert_eq!(imported.nvfp4_layers, 1);
    assert_eq!(imported.unused_scales, ["blk.0.attn_v.input_scale"]);
    let checkpoint = Checkpoint::open(&target).unwrap();
    for (name, seed, scale) in [("q", 1, 0.5), ("k", 3, 0.25), ("v", 4, 0.5)] {
        let name = format!("model.layers.0.self_attn.{name}_proj.weight");
        let found = checkpoint.tensors().get(&name).unwrap();
        let found = found.to_f32().unwrap();
        let expected = e2m1_values(seed, found.len());
        let expected: Vec<f32> = expected.iter().map(|value| value * scale).collect();
        assert_eq!(found, expected, "{name}");
    }
}

/// The embedding is a table, which no format of ours has in NVFP4.
#[test]
fn other_nvfp4_tensors_are_dequantized() {
    let mut made = model();
    let table = e2m1_values(3, VOCAB * D_MODEL);
    made.replace("token_embd.weight", &[VOCAB, D_MODEL], 40, &nvfp4(&table));
    made.tensor("token_embd.scale", &[1], 0, &f32_bytes(2.0));
    made.tensor("token_embd.input_scale", &[1], 0, &f32_bytes(0.5));
    let folder = Scratch::new("gguf-nvfp4-table");
    let path = write(&folder, &made);
    let target = folder.join("out");
    let imported = import(&path, &target, Dtype::F32).unwrap();
    assert_eq!(imported.nvfp4_layers, 0);
    assert_eq!(imported.unused_scales, ["token_embd.input_scale"]);
    let tensors = TensorFolder::open(&target).unwrap();
    let found = tensors.get("model.embed_tokens.weight").unwrap();
    let expected: Vec<f32> = table.iter().map(|value| value * 2.0).collect();
    assert_eq!(found.to_f32().unwrap(), expected);
}

#[test]
fn what_is_not_a_llama_of_known_types_is_an_error() {
    let mut made = model();
    made.keys.remove(1);
    assert!(error_of(&made).contains("`llama.block_count` is absent"));
    let mut made = model();
    made.keys[0] = Vec::new();
    made.keys.remove(0);
    made.key("general.architecture", 8, &string("gemma"));
    assert!(error_of(&made).contains("`general.architecture` is `gemma`"));
    let mut made = model();
    made.number("llama.expert_count", 8);
    assert!(error_of(&made).contains("models with experts are not imported"));
    let mut made = model();
    made.tensor("rope_freqs.weight", &[8], 0, &[0; 32]);
    assert!(error_of(&made).contains("`rope_freqs.weight`"));
    let mut made = model();
    made.tensor("blk.0.extra", &[256], 16, &[0; 66]);
    let error = error_of(&made);
    assert!(
        error.contains("tensor `blk.0.extra`") && error.contains("number 16"),
        "{error}"
    );
    let mut made = model();
    made.infos.remove(2);
    assert!(error_of(&made).contains("no tensor `blk.0.attn_norm.weight`"));
    let mut made = model();
    made.tensor("half.block", &[16], 8, &[0; 34]);
    assert!(error_of(&made).contains("whole blocks of 32"));
    let mut made = model();
    made.number("llama.rope.scaling.factor", 4);
    assert!(error_of(&made).contains("`llama.rope.scaling`"));
}

/// Wrong lengths give an error, and corruption never a panic.
#[test]
fn damaged_files_never_panic() {
    let whole = model().bytes();
    let start = whole.len() - model().data.len();
    assert_eq!(parse_names(&whole).unwrap().len(), 11);
    for length in (0..start).chain([whole.len() - 1]) {
        assert!(parse_names(&whole[..length]).is_err(), "{length} bytes");
    }
    let mut damaged = whole.clone();
    for bit in 0..start * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        let _ = parse_names(&damaged);
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
    for at in 8..start - 8 {
        let old: [u8; 8] = damaged[at..at + 8].try_into().unwrap();
        damaged[at..at + 8].copy_from_slice(&(u64::MAX >> 1).to_le_bytes());
        let _ = parse_names(&damaged);
        damaged[at..at + 8].copy_from_slice(&old);
    }
}

#[test]
fn values_that_the_type_cannot_hold_are_refused_by_name() {
    for (value, dtype, expected) in [
        (1e5f32, Some(Dtype::F32), None),
        (1e5, Some(Dtype::BF16), None),
        (1e5, None, Some("value 3 is 1e5, which F16 cannot hold")),
        (f32::MAX, Some(Dtype::BF16), Some("which BF16 cannot hold")),
        (
            f32::NAN,
            Some(Dtype::F32),
            Some("values that are not finite"),
        ),
    ] {
        let mut made = model();
        let mut norm = values(1, D_MODEL);
        norm[3] = value;
        let norm: Vec<u8> = norm.iter().flat_map(|v| v.to_le_bytes()).collect();
        made.replace("output_norm.weight", &[D_MODEL], 0, &norm);
        let folder = Scratch::new("gguf-range");
        let path = write(&folder, &made);
        let found = import(&path, &folder.join("out"), dtype.unwrap_or(Dtype::F16));
        match expected {
            None => assert_eq!(found.unwrap().config.d_model, D_MODEL),
            Some(expected) => {
                let error = format!("{:#}", found.unwrap_err());
                assert!(error.contains("tensor `output_norm.weight`"), "{error}");
                assert!(error.contains(expected), "{error}");
            }
        }
    }
}

#[test]
fn tokens_that_the_model_does_not_have_are_refused() {
    let mut made = model();
    made.number("tokenizer.ggml.padding_token_id", VOCAB as u32);
    let error = error_of(&made);
    assert!(error.contains("`pad_token_id` is 32"), "{error}");
}
