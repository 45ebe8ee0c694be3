"""Compares what nvfp4 wrote with what the tools read: check.py MADE OURS REPORT.

MADE has a folder for each model that nvfp4 wrote; OURS a folder of the same name with the values
that nvfp4 reads there (see lm/src/interchange/tools.rs). Prints a line for each check, writes all of
them to REPORT (JSON), and fails when one failed.
"""
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")

import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

made, ours, report = sys.argv[1:]
torch.set_num_threads(1)
IDS = torch.tensor([(i * 37 + 11) % 288 for i in range(64)]).reshape(2, 32)
# Rounding of f32 in other orders of summation.
LOGITS = 1e-4
results = []


def check(name, what, good, figure):
    results.append({"folder": name, "check": what, "good": bool(good), "figure": figure})
    print(f"{'ok    ' if good else 'FAILED'}  {name}: {what}: {figure}", flush=True)


def tensors(folder):
    found = {}
    for file in sorted(os.listdir(folder)):
        if file.endswith(".safetensors"):
            with safe_open(os.path.join(folder, file), "pt") as opened:
                found.update({key: opened.get_tensor(key) for key in opened.keys()})
    return found


def read_json(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def compare_logits(name, what, found, expected):
    distance = (found - expected).abs().max() / expected.abs().max()
    check(name, what, distance <= LOGITS, f"{distance.item():.1e} of the largest logit")


def load(folder):
    """The model, with what transformers says about names that it did not find or know."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(map(str, value)) for key, value in info.items() if value}
    return model, wrong


def check_plain(name, folder, mine):
    model, wrong = load(folder)
    check(name, "transformers finds every tensor", not wrong, wrong or "all")
    compare_logits(name, "transformers' logits are ours", logits(model), mine["logits"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The weights of the model.", add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids)
    check(name, "transformers loads the tokenizer", text == "The weights of the model.", repr(text))


def check_compressed(name, folder, config, mine):
    quantization = dict(config["quantization_config"])
    parsed = QuantizationConfig.model_validate(quantization)
    (scheme,) = parsed.config_groups.values()
    w4a4 = scheme.input_activations is not None
    stored = tensors(folder)
    modules = sorted(key.removesuffix(".weight_packed") for key in stored if key.endswith("_packed"))
    same = moved = 0
    values = {}
    for module in modules:
        names = set(NVFP4PackedCompressor.compression_param_names(scheme))
        if w4a4:
            # llm-compressor writes it, and readers need it; the list leaves it out for "local".
            names.add("input_global_scale")
        state = {leaf: stored[f"{module}.{leaf}"] for leaf in names}
        found = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        values[f"{module}.weight"] = found.float()
        expected = mine[f"{module}.ct"]
        equal = torch.equal(found.float(), expected.to(found.dtype).float())
        same, moved = same + equal, moved + (not equal)
        extra = {key for key in stored if key.rpartition(".")[0] == module} - {
            f"{module}.{leaf}" for leaf in names
        }
        if extra:
            check(name, f"{module} has the tensors of the scheme only", False, sorted(extra))
    what = f"compressed-tensors decompresses {'W4A4' if w4a4 else 'W4A16'} to our values, bit for bit"
    check(name, what, modules and not moved, f"{same} of {len(modules)} modules")
    if parsed.kv_cache_scheme is not None:
        layers = config["num_hidden_layers"]
        scales = [key for key in stored if key.endswith(("self_attn.k_scale", "self_attn.v_scale"))]
        good = len(scales) == 2 * layers and all(stored[key].float().item() > 0 for key in scales)
        check(name, "scales of the FP8 cache", good, f"{len(scales)} for {layers} layers")
    if any("experts" in module for module in modules):
        # transformers 5 fuses experts, for which it has no NVFP4 layer.
        return
    model, wrong = load(folder)
    check(name, "transformers finds every tensor", not wrong, wrong or "all")
    # The model that transformers loaded computes in bf16 only. What compressed-tensors decompresses
    # goes into a plain model, which computes in f32.
    plain = AutoConfig.from_pretrained(folder)
    del plain.quantization_config
    plain = AutoModelForCausalLM.from_config(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    weights = {key: value.float() for key, value in stored.items() if key in plain.state_dict()}
    weights.update(values)
    missing = plain.load_state_dict(weights, strict=False).missing_keys
    missing = [key for key in missing if key != "lm_head.weight" or not config["tie_word_embeddings"]]
    check(name, "every weight is there", not missing, missing or "all")
    what = "transformers' logits with the decompressed weights are ours"
    compare_logits(name, what, logits(plain), mine["logits_bf16"])


def check_modelopt(name, folder, config, mine):
    file = read_json(folder, "hf_quant_config.json")
    expected = convert_hf_quant_config_format(file)
    inline = config["quantization_config"]
    different = [
        key
        for key in ("config_groups", "ignore", "quant_algo", "kv_cache_scheme")
        if inline.get(key) != expected.get(key)
    ]
    figure = {key: [inline.get(key), expected.get(key)] for key in different} or "equal"
    check(name, "config.json is what modelopt makes of hf_quant_config.json", not different, figure)
    stored = tensors(folder)
    modules = sorted(key.removesuffix(".weight_scale_2") for key in stored if key.endswith("_scale_2"))
    same = 0
    for module in modules:
        codes = stored[f"{module}.weight"]
        shape = torch.Size([codes.shape[0], 2 * codes.shape[1]])
        found = NVFP4QTensor(shape, torch.float32, codes).dequantize(
            scale=stored[f"{module}.weight_scale"],
            double_scale=stored[f"{module}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        same += torch.equal(found, mine[f"{module}.modelopt"])
    algorithm = file["quantization"]["quant_algo"]
    what = f"modelopt dequantizes {algorithm} to our values, bit for bit"
    check(name, what, modules and same == len(modules), f"{same} of {len(modules)} modules")
    inputs = sum(key.endswith(".input_scale") for key in stored)
    good = inputs == (len(modules) if algorithm == "NVFP4" else 0)
    check(name, "input scales", good, f"{inputs} for {len(modules)} modules of {algorithm}")
    if file["quantization"]["kv_cache_quant_algo"] == "FP8":
        layers = config["num_hidden_layers"]
        ends = ("k_proj.k_scale", "v_proj.v_scale")
        scales = [key for key in stored if key.endswith(ends)]
        good = len(scales) == 2 * layers and all(stored[key].item() > 0 for key in scales)
        check(name, "scales of the FP8 cache", good, f"{len(scales)} for {layers} layers")


def check_adapter(name, folder, base, merged):
    model, _ = load(base)
    tuned = PeftModel.from_pretrained(model, folder)
    stored = tensors(folder)
    loaded = {key for key, _ in tuned.named_parameters() if "lora_" in key}
    good = len(loaded) == len(stored) and any(value.any() for value in stored.values())
    check(name, "PEFT loads every adapter", good, f"{len(loaded)} of {len(stored)} matrices")
    compare_logits(name, "PEFT's logits are those of our merged model", logits(tuned), merged)


for name in sorted(os.listdir(made)):
    folder = os.path.join(made, name)
    if name.endswith("-adapter"):
        family = name.removesuffix("-adapter")
        merged = tensors(os.path.join(ours, f"{family}-merged"))["logits"]
        base = os.path.join(os.path.dirname(made), "base", family)
        check_adapter(name, folder, base, merged)
        continue
    mine, config = tensors(os.path.join(ours, name)), read_json(folder, "config.json")
    method = config.get("quantization_config", {}).get("quant_method")
    try:
        if method == "compressed-tensors":
            check_compressed(name, folder, config, mine)
        elif method == "modelopt":
            check_modelopt(name, folder, config, mine)
        else:
            check_plain(name, folder, mine)
    except Exception as error:
        # What a tool raises is a finding of its own; the other folders are still checked.
        check(name, "the tools read it", False, f"{type(error).__name__}: {error}")

with open(report, "w", encoding="utf-8") as file:
    json.dump(results, file, indent=1)
failed = sum(not result["good"] for result in results)
print(f"{len(results) - failed} checks passed, {failed} failed")
sys.exit(1 if failed or not results else 0)
