"""Folders of several formats, from llama3-tiny and its exports: `llama3-tiny-modelopt-mixed` (ModelOpt's MIXED_PRECISION) and `llama3-tiny-ct-mixed` (compressed-tensors' mixed-precision).

No tool is run here. Weights in NVFP4 and scales of inputs and caches are those of the tools' exports; weights in FP8 are made by the tools' formulas (ModelOpt 0.47: amax / 448, an f32; compressed-tensors 0.20: amax / 448 in bf16), and the JSON has the fields of their writers. The references are those of make_refs.py, by a Llama in numpy, which is compared with transformers' logits of llama3-tiny.
Run after make_modelopt.py and make_ct.py, with numpy and ml_dtypes: python make_mixed.py OUT
"""
import json, os, shutil, struct, sys
import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

OUT = sys.argv[1]
f32 = np.float32
TYPES = {"BF16": bfloat16, "F32": np.float32, "F8_E4M3": float8_e4m3fn, "U8": np.uint8, "I64": np.int64, "F64": np.float64}
NAMES = {np.dtype(v): k for k, v in TYPES.items()}
LUT = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], f32)
BLOCK = 32   # 128 in the tools' presets; the widths of the model are no multiples of it.

def load(path):
    data = open(path, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size:]
    part = lambda i: np.frombuffer(body[i["data_offsets"][0]:i["data_offsets"][1]], TYPES[i["dtype"]]).reshape(i["shape"])
    return {name: part(info) for name, info in header.items()}

def save(tensors, path):
    header, at, parts = {"__metadata__": {"format": "pt"}}, 0, []
    for name, x in sorted(tensors.items(), key=lambda it: (-it[1].dtype.itemsize, it[0])):
        parts.append(x.tobytes())
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    open(path, "wb").write(struct.pack("<Q", len(head)) + head + b"".join(parts))

def unpack(codes):
    return LUT[np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)]

def spread(scale, shape, block):
    return np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]

def fp8(w, block, dtype):
    """Codes, and the scale of each block of rows and columns."""
    rows, columns = -(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])
    padded = np.zeros((rows * block[0], columns * block[1]), f32)
    padded[: w.shape[0], : w.shape[1]] = w
    amax = np.abs(padded.reshape(rows, block[0], columns, block[1])).max((1, 3))
    scale = (amax / f32(448)).astype(dtype)
    codes = np.clip(w / spread(scale.astype(f32), w.shape, block), -448, 448).astype(float8_e4m3fn)
    return codes, scale

def logits_of(config, sd, ids):
    d, heads, kv, layers = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]
    rope = config["rope_parameters"]
    freq = 1 / rope["rope_theta"] ** (np.arange(0, d, 2) / d)
    wave, old = 2 * np.pi / freq, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    s = (old / wave - low) / (high - low)
    smooth = (1 - s) * freq / factor + s * freq
    freq = np.where(wave > old / low, freq / factor, np.where(wave < old / high, freq, smooth))
    time = ids.shape[1]
    angle = np.concatenate([np.outer(np.arange(time), freq)] * 2, -1)
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * g
    turn = lambda x: x * np.cos(angle) + np.concatenate([-x[..., d // 2:], x[..., : d // 2]], -1) * np.sin(angle)
    split = lambda x: x.reshape(*ids.shape, -1, d).swapaxes(1, 2)
    x = sd["model.embed_tokens.weight"][ids]
    for i in range(layers):
        p = f"model.layers.{i}."
        lin = lambda x, n: x @ sd[f"{p}{n}.weight"].T
        h = norm(x, sd[p + "input_layernorm.weight"])
        q, k, v = [split(lin(h, f"self_attn.{n}_proj")) for n in "qkv"]
        q, k = turn(q), turn(k)
        k, v = [np.repeat(t, heads // kv, 1) for t in (k, v)]
        a = q @ k.swapaxes(2, 3) / np.sqrt(d) + np.triu(np.full((time, time), -np.inf), 1)
        a = np.exp(a - a.max(-1, keepdims=True))
        a = (a / a.sum(-1, keepdims=True)) @ v
        x = x + lin(a.swapaxes(1, 2).reshape(*ids.shape, -1), "self_attn.o_proj")
        h = norm(x, sd[p + "post_attention_layernorm.weight"])
        gate = lin(h, "mlp.gate_proj")
        x = x + lin(gate / (1 + np.exp(-gate)) * lin(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, sd["model.norm.weight"]) @ sd["lm_head.weight"].T

base = load(f"{OUT}/llama3-tiny/model.safetensors")
config = json.load(open(f"{OUT}/llama3-tiny/config.json"))
reference = load(f"{OUT}/llama3-tiny/reference.safetensors")
ids = reference["input_ids"]
double = lambda sd: {k: v.astype(np.float64) for k, v in sd.items()}
found = logits_of(config, double(base), ids)
assert np.abs(found - reference["logits_f32"]).max() < 1e-5 * np.abs(found).max(), "the Llama above is not transformers'"

def finish(folder, stored, dequantized, quantization, file=None):
    os.makedirs(folder, exist_ok=True)
    save(stored, f"{folder}/model.safetensors")
    json.dump({**config, "quantization_config": quantization}, open(f"{folder}/config.json", "w"), indent=4)
    if file: json.dump(file, open(f"{folder}/hf_quant_config.json", "w"), indent=4)
    shutil.copy(f"{OUT}/llama3-tiny/generation_config.json", folder)
    logits = logits_of(config, double(dequantized), ids)
    logp = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    nll = -np.take_along_axis(logp, ids[:, 1:, None], -1)[..., 0]
    save({"input_ids": ids, "logits_w4a16_f32": np.ascontiguousarray(logits[:, :12].astype(f32)), "nll_w4a16": nll}, f"{folder}/reference.safetensors")
    print(folder, f"nll {nll.mean():.5f}, unquantized {reference['nll_f64'].mean():.5f}")

linear = [k[:-7] for k in base if k.endswith("_proj.weight")]
plain = {k: v for k, v in base.items() if not k.endswith("_proj.weight")}

# ModelOpt: NVFP4 (W4A4), FP8 per tensor with static inputs, bf16, and an FP8 cache.
export = load(f"{OUT}/llama3-tiny-modelopt-nvfp4-kvfp8/model.safetensors")
FP8 = lambda m: "layers.0.self_attn" in m and "o_proj" not in m or m.endswith("layers.1.mlp.down_proj")
BF16 = lambda m: m.endswith("layers.1.self_attn.o_proj")
stored, dequantized, layers = dict(plain), {k: v.astype(f32) for k, v in plain.items()}, {}
stored.update({k: v for k, v in export.items() if k.endswith((".k_scale", ".v_scale"))})
for m in linear:
    w = base[m + ".weight"]
    if BF16(m):
        stored[m + ".weight"], dequantized[m + ".weight"] = w, w.astype(f32)
    elif FP8(m):
        codes, scale = fp8(w.astype(f32), w.shape, f32)
        stored[m + ".weight"], stored[m + ".weight_scale"] = codes, scale.reshape(())
        # The scale of NVFP4's inputs is amax / 2688, and that of FP8's amax / 448.
        stored[m + ".input_scale"] = (export[m + ".input_scale"] * f32(6)).astype(f32)
        dequantized[m + ".weight"] = codes.astype(f32) * scale.reshape(())
        layers[m] = {"quant_algo": "FP8"}
    else:
        stored.update({k: v for k, v in export.items() if k.startswith(m + ".") and not k.endswith(("k_scale", "v_scale"))})
        scales = np.repeat(export[m + ".weight_scale"].astype(f32), 16, -1)
        dequantized[m + ".weight"] = unpack(export[m + ".weight"]) * scales * export[m + ".weight_scale_2"]
        layers[m] = {"quant_algo": "NVFP4", "group_size": 16}
args = lambda bits, **more: {"dynamic": False, "num_bits": bits, "type": "float", **more}
groups = {}
for algo, make in (("FP8", lambda: args(8)), ("NVFP4", lambda: args(4, group_size=16))):
    targets = sorted(m for m in layers if layers[m]["quant_algo"] == algo)
    groups[f"group_{len(groups)}"] = {"input_activations": make(), "weights": make(), "targets": targets}
producer = {"name": "modelopt", "version": "0.47.0"}
inline = {"config_groups": groups, "quantized_layers": layers, "ignore": [], "quant_algo": "MIXED_PRECISION", "kv_cache_scheme": args(8), "producer": producer, "quant_method": "modelopt"}
file = {"producer": producer, "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}}
finish(f"{OUT}/llama3-tiny-modelopt-mixed", stored, dequantized, inline, file)

# compressed-tensors: NVFP4 (W4A16), FP8 per channel with inputs per token, FP8 per block with inputs in groups, bf16.
export = load(f"{OUT}/llama3-tiny-ct-nvfp4a16/model.safetensors")
stored, dequantized = dict(plain), {k: v.astype(f32) for k, v in plain.items()}
for m in linear:
    w = base[m + ".weight"]
    if m.endswith("layers.0.self_attn.o_proj"):
        stored[m + ".weight"], dequantized[m + ".weight"] = w, w.astype(f32)
    elif "self_attn" in m or m.endswith("down_proj"):
        block = (BLOCK, BLOCK) if m.endswith("down_proj") else (1, w.shape[1])
        codes, scale = fp8(w.astype(f32), block, bfloat16)
        stored[m + ".weight"], stored[m + ".weight_scale"] = codes, scale
        dequantized[m + ".weight"] = codes.astype(f32) * spread(scale.astype(f32), w.shape, block)
    else:
        stored.update({k: v for k, v in export.items() if k.startswith(m + ".")})
        scales = np.repeat(export[m + ".weight_scale"].astype(f32), 16, -1)
        dequantized[m + ".weight"] = unpack(export[m + ".weight_packed"]) * scales * (f32(1) / export[m + ".weight_global_scale"])
def args(bits, strategy, **more):
    empty = dict.fromkeys(("actorder", "block_structure", "group_size", "observer", "scale_dtype", "zp_dtype"))
    return {**empty, "num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, "observer_kwargs": {}, **more}
group = lambda format, targets, weights, inputs: {"format": format, "input_activations": inputs, "output_activations": None, "targets": targets, "weights": weights}
groups = {
    "group_0": group("nvfp4-pack-quantized", ["Linear"], args(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", observer="memoryless_minmax"), None),
    "group_1": group("float-quantized", ["re:.*self_attn.(q|k|v|o)_proj$"], args(8, "channel", observer="memoryless_minmax"), args(8, "token", dynamic=True)),
    "group_2": group("float-quantized", ["re:.*down_proj$"], args(8, "block", block_structure=[BLOCK, BLOCK], observer="memoryless_minmax"), args(8, "group", group_size=BLOCK, dynamic=True)),
}
inline = {"config_groups": groups, "format": "mixed-precision", "global_compression_ratio": None, "ignore": ["model.layers.0.self_attn.o_proj", "lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.20.0"}
finish(f"{OUT}/llama3-tiny-ct-mixed", stored, dequantized, inline)
