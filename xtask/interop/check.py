"""Compares what nvfp4 wrote with what the tools read: check.py BASE MADE OURS REPORT.

BASE has the models of models.py. MADE has a folder for each model that nvfp4 made of them, or that
ModelOpt did (awq.py); OURS a folder of the same name with the values that nvfp4 reads there (see
lm/src/interchange/tools.rs). Prints a line for each check, writes all of
them to REPORT (JSON), and fails when one failed.
"""
import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import warnings
from importlib.metadata import version

warnings.filterwarnings("ignore")

import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

base, made, ours, report = sys.argv[1:]
torch.set_num_threads(1)
IDS = torch.tensor([(i * 37 + 11) % 288 for i in range(64)]).reshape(2, 32)
# Rounding of f32 in other orders of summation.
LOGITS = 1e-4
# How many positions have such logits where inputs are quantized, of which a few are at a tie.
W4A4 = 0.75
# Rounding of f32 of a largest value.
SCALES = 1e-5
# Exports that interop.rs calibrates on the text of BASE, and their conversions.
EXPORT = re.compile(r"(?P<family>\w+)-(ct|modelopt)-(?P<awq>awq-)?w4a(4|16)(-to-[\w-]+)?")
LAYER = re.compile(r"model\.layers\.\d+")
LINEAR = re.compile(r"(_proj|\.w[123])\.weight$")
CACHE = re.compile(r"\.[kv]_scale$")
# What a quantized layer has in either dialect, its bias apart.
LEAVES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "pre_quant_scale",
)
results = []
# How far the logits of each export with dequantized weights are from those of the base model.
distances = {}


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
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        # One expert after another, in the function that watching() replaces.
        experts_implementation="eager",
        output_loading_info=True,
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
    modules = sorted(of_modules(stored, ".weight_packed"))
    same = 0
    values, inputs = {}, {}
    for module in modules:
        names = set(NVFP4PackedCompressor.compression_param_names(scheme))
        if w4a4:
            # llm-compressor writes it, and readers need it; the list leaves it out for "local".
            names.add("input_global_scale")
            inputs[module] = stored[f"{module}.input_global_scale"]
        state = {leaf: stored[f"{module}.{leaf}"] for leaf in names}
        # The tool decompresses to bf16; its own arithmetic in f32 is what logits are compared by.
        rounded = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        n, half = state["weight_packed"].shape
        values[module] = dequantize(
            unpack_fp4_from_uint8(state["weight_packed"], n, 2 * half, dtype=torch.float32),
            state["weight_scale"].float(),
            args=scheme.weights,
            dtype=torch.float32,
            global_scale=state["weight_global_scale"],
        )
        expected = mine[f"{module}.ct"]
        equal = torch.equal(rounded, expected.to(rounded.dtype))
        same += equal and torch.equal(values[module], expected)
        extra = {key for key in stored if key.rpartition(".")[0] == module} - {
            f"{module}.{leaf}" for leaf in names
        }
        if extra:
            check(name, f"{module} has the tensors of the scheme only", False, sorted(extra))
    format = "W4A4" if w4a4 else "W4A16"
    what = f"compressed-tensors decompresses {format} to our values, bit for bit"
    check(name, what, modules and same == len(modules), f"{same} of {len(modules)} modules")
    if not any("experts" in module for module in modules):
        # transformers 5 fuses experts, for which it has no NVFP4 layer.
        _, wrong = load(folder)
        check(name, "transformers finds every tensor", not wrong, wrong or "all")
    caches = {}
    if parsed.kv_cache_scheme is not None:
        ends = ("self_attn.k_scale", "self_attn.v_scale")
        caches = {key: stored[key].float() for key in stored if key.endswith(ends)}
    scales = {module: 1 / scale.float() for module, scale in inputs.items()}
    check_calibration(name, stored, scales, caches)
    check_logits(name, folder, config, stored, (values, inputs, {}), mine)


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
    modules = sorted(of_modules(stored, ".weight_scale_2"))
    same = 0
    values = {}
    for module in modules:
        codes = stored[f"{module}.weight"]
        shape = torch.Size([codes.shape[0], 2 * codes.shape[1]])
        values[module] = NVFP4QTensor(shape, torch.float32, codes).dequantize(
            scale=stored[f"{module}.weight_scale"],
            double_scale=stored[f"{module}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        same += torch.equal(values[module], mine[f"{module}.modelopt"])
    algorithm = file["quantization"]["quant_algo"]
    what = f"modelopt dequantizes {algorithm} to our values, bit for bit"
    check(name, what, modules and same == len(modules), f"{same} of {len(modules)} modules")
    scales = of_modules(stored, ".input_scale")
    good = len(scales) == (0 if algorithm == "W4A16_NVFP4" else len(modules))
    check(name, "input scales", good, f"{len(scales)} for {len(modules)} modules of {algorithm}")
    factors = of_modules(stored, ".pre_quant_scale")
    if algorithm == "NVFP4_AWQ":
        check(name, "scales of input features", factors, f"{len(factors)} modules have one")
    else:
        check(name, "no scales of input features", not factors, sorted(factors) or "none")
    caches = {}
    if file["quantization"]["kv_cache_quant_algo"] == "FP8":
        ends = ("k_proj.k_scale", "v_proj.v_scale")
        caches = {key: stored[key] for key in stored if key.endswith(ends)}
        check(name, "scales of the FP8 cache are F32", all_are_f32(caches), len(caches))
    check_calibration(name, stored, scales, caches)
    inputs = {module: 1 / scale for module, scale in scales.items()}
    check_logits(name, folder, config, stored, (values, inputs, factors), mine)


def of_modules(stored, leaf):
    return {key.removesuffix(leaf): stored[key] for key in stored if key.endswith(leaf)}


def all_are_f32(scales):
    return all(scale.dtype == torch.float32 and scale.dim() == 0 for scale in scales.values())


# A weight of one expert: transformers 5 holds those of all of them in one parameter.
EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


def weight_of(model, module):
    """The weight that `model` has for the quantized `module`; for an expert's gate also its up."""
    expert = EXPERT.fullmatch(module)
    if expert is None:
        return model.get_submodule(module).weight
    layer, index, leaf = expert.groups()
    experts = model.get_submodule(f"{layer}.mlp.experts")
    down = leaf in ("down_proj", "w2")
    return (experts.down_proj if down else experts.gate_up_proj)[int(index)]


@contextlib.contextmanager
def watching(model, modules, read):
    """`read(module, x)` is what the linear layers `modules` of `model` read in place of their x."""
    names = {weight_of(model, module).data_ptr(): module for module in modules}
    linear = torch.nn.functional.linear

    def watched(x, weight, bias=None):
        module = names.get(weight.data_ptr())
        return linear(x if module is None or not x.numel() else read(module, x), weight, bias)

    torch.nn.functional.linear = watched
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


# Inputs as compressed-tensors quantizes them; modelopt's own kernel for it needs a GPU.
INPUTS = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    symmetric=True,
    dynamic="local",
    scale_dtype=torch.float8_e4m3fn,
)


def quantized(x, divisor):
    scale, zero = compute_dynamic_scales_and_zp(x, INPUTS, None, divisor)
    return fake_quantize(x, scale, zero, INPUTS, divisor)


def check_logits(name, folder, config, stored, quantization, mine):
    """Logits of transformers, whose weights are those that a tool dequantized, in f32.

    `quantization` has the weights, what divides the largest inputs to 2688, and by what inputs are
    multiplied first, each by module.
    """
    values, inputs, factors = quantization
    weights = {f"{module}.weight": value for module, value in values.items()}
    own = {f"{module}.{leaf}" for module in values for leaf in LEAVES}
    others = {key: stored[key] for key in stored if key not in own and not CACHE.search(key)}
    with tempfile.TemporaryDirectory() as plain:
        save_file(others | weights, os.path.join(plain, "model.safetensors"), {"format": "pt"})
        dense = {key: value for key, value in config.items() if key != "quantization_config"}
        with open(os.path.join(plain, "config.json"), "w", encoding="utf-8") as file:
            json.dump(dense, file)
        model, wrong = load(plain)
    check(name, "transformers finds every dequantized tensor", not wrong, wrong or "all")
    scaled = lambda module, x: x * factors[module].float() if module in factors else x
    with watching(model, values, scaled):
        found = logits(model)
    what = "transformers' logits with the dequantized weights are ours"
    compare_logits(name, what, found, mine["logits"])
    family = name.partition("-")[0]
    base = base_of(family)["logits"]
    distances[name] = ((found - base).norm() / base.norm()).item()
    if not inputs:
        return
    read = lambda module, x: quantized(scaled(module, x), inputs[module])
    with watching(model, values, read):
        w4a4 = logits(model)
    # A code at a tie may round the other way: all later positions of its row may then be others.
    off = lambda logits: (logits - mine["logits_w4a4"]).norm(dim=-1) / w4a4.norm(dim=-1)
    same, other = ((off(logits) <= LOGITS).sum().item() for logits in (w4a4, found))
    what = "transformers' logits with quantized inputs are ours"
    figure = f"{same} of {IDS.numel()} positions, {off(w4a4).median():.1e} apart; {other} without"
    check(name, what, same >= W4A4 * IDS.numel() and other == 0, figure)


@functools.cache
def base_of(family):
    """The base model: its logits, norms, and largest inputs and cached values in calibration."""
    folder = os.path.join(base, family)
    model, _ = load(folder)
    with open(os.path.join(base, "text.txt"), encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(folder)(file.read())["input_ids"]
    # As interop.rs calibrates: 4 sequences of 64 tokens.
    ids = torch.tensor(ids[:256]).reshape(4, 64)
    stored = tensors(folder)
    linear = [key.removesuffix(".weight") for key in stored if LINEAR.search(key)]
    features, caches = {}, {}

    def count(module, x):
        amax = x.abs().reshape(-1, x.shape[-1]).amax(0)
        features[module] = torch.maximum(features.get(module, amax), amax)
        return x

    with torch.no_grad(), watching(model, linear, count):
        for sequence in ids:
            cache = model(sequence[None], use_cache=True).past_key_values
            for index, layer in enumerate(cache.layers):
                for which, cached in (("k", layer.keys), ("v", layer.values)):
                    key = f"model.layers.{index}.self_attn.{which}"
                    caches[key] = max(caches.get(key, 0.0), cached.abs().max().item())
    norms = {key: stored[key].float() for key in stored if key.endswith("layernorm.weight")}
    return {"logits": logits(model), "norms": norms, "features": features, "caches": caches}


def check_calibration(name, stored, inputs, caches):
    """The static scales of inputs and caches against the largest values in transformers' base."""
    export = EXPORT.fullmatch(name)
    if export is None:
        return
    family, smoothed = export["family"], export["awq"] is not None
    expected = base_of(family)
    if smoothed:
        norms = expected["norms"]
        kept = sum(torch.equal(stored[key].float(), gain) for key, gain in norms.items())
        figure = f"{kept} of {len(norms)} kept"
        check(name, "smoothing changes the gains", kept < len(norms), figure)
    largest, compared = 0.0, 0
    for module, scale in inputs.items():
        layer, _, leaf = module.rpartition(".")
        expert = EXPERT.fullmatch(module)
        # In transformers an expert's gate and up are one weight.
        pair = {"up_proj": "gate_proj", "w3": "w1"}
        names = {module, f"{layer}.{pair.get(leaf, leaf)}"} | {
            f"{layer}.{up}" for up, gate in pair.items() if gate == leaf
        }
        features = [expected["features"][key] for key in names if key in expected["features"]]
        if not features:
            # No token came to this expert.
            check(name, f"{module} is an expert", expert, "without tokens")
            continue
        amax = functools.reduce(torch.maximum, features)
        if smoothed:
            # Rows of codes do not tell by what they were divided; gains do.
            if leaf in ("o_proj", "down_proj", "w2"):
                continue
            norm = "input_layernorm" if "self_attn" in module else "post_attention_layernorm"
            norm = f"{module[:LAYER.match(module).end()]}.{norm}.weight"
            amax = amax * (stored[norm].float() / expected["norms"][norm]).abs()
        amax = amax.max().item() / 2688
        largest, compared = max(largest, abs(scale.item() / amax - 1)), compared + 1
    if inputs:
        what = "input scales are those of transformers' inputs"
        check(name, what, compared and largest <= SCALES, f"{compared} scales, {largest:.1e} apart")
    if not caches:
        return
    largest = 0.0
    for key, scale in caches.items():
        # compressed-tensors keeps them in BF16.
        amax = expected["caches"][LAYER.match(key).group() + f".self_attn.{key[-7]}"]
        bound = 2**-8 if "-ct-" in name else SCALES
        largest = max(largest, abs(scale.item() * 448 / amax - 1) / bound)
    good = len(caches) == len(expected["caches"]) and largest <= 1
    what = "scales of the FP8 cache are those of transformers' cache"
    check(name, what, good, f"{len(caches)} scales, {largest:.1e} of the bound apart")


def check_same_tensors(name, folder, origin):
    """A folder of another tool that was written again in its own dialect."""
    ours, theirs = tensors(folder), tensors(origin)
    bits = lambda tensor: tensor.contiguous().reshape(-1).view(torch.uint8)
    differ = [
        key
        for key in ours.keys() | theirs.keys()
        if key not in ours
        or key not in theirs
        or ours[key].shape != theirs[key].shape
        or ours[key].dtype != theirs[key].dtype
        or not torch.equal(bits(ours[key]), bits(theirs[key]))
    ]
    check(name, "every tensor is as the tool wrote it", not differ, sorted(differ) or len(ours))


def check_adapter(name, folder, base, merged):
    model, _ = load(base)
    tuned = PeftModel.from_pretrained(model, folder)
    stored = tensors(folder)
    loaded = {key for key, _ in tuned.named_parameters() if "lora_" in key}
    good = len(loaded) == len(stored) and any(value.any() for value in stored.values())
    check(name, "PEFT loads every adapter", good, f"{len(loaded)} of {len(stored)} matrices")
    compare_logits(name, "PEFT's logits are those of our merged model", logits(tuned), merged)


TOOLS = ("transformers", "compressed-tensors", "nvidia-modelopt", "peft", "torch", "safetensors")
print(", ".join(f"{tool} {version(tool)}" for tool in TOOLS), flush=True)
for name in sorted(os.listdir(made)):
    folder = os.path.join(made, name)
    if name.endswith("-adapter"):
        family = name.removesuffix("-adapter")
        merged = tensors(os.path.join(ours, f"{family}-merged"))["logits"]
        check_adapter(name, folder, os.path.join(base, family), merged)
        continue
    mine, config = tensors(os.path.join(ours, name)), read_json(folder, "config.json")
    method = config.get("quantization_config", {}).get("quant_method")
    try:
        if name.endswith("-awq-by-modelopt-to-modelopt"):
            check_same_tensors(name, folder, folder.removesuffix("-to-modelopt"))
        if method == "compressed-tensors":
            check_compressed(name, folder, config, mine)
        elif method == "modelopt":
            check_modelopt(name, folder, config, mine)
        else:
            check_plain(name, folder, mine)
    except Exception as error:
        # What a tool raises is a finding of its own; the other folders are still checked.
        check(name, "the tools read it", False, f"{type(error).__name__}: {error}")

for name, distance in sorted(distances.items()):
    # The same method without smoothing; ModelOpt's own is to nearest.
    plain = name.replace("awq-by-modelopt", "modelopt-w4a16").replace("awq-", "")
    if "awq" in name and plain in distances:
        what = f"smoothing brings the model closer to its base than {plain} is"
        figure = f"{distance:.3f}, not {distances[plain]:.3f} of the logits"
        check(name, what, distance < distances[plain], figure)

with open(report, "w", encoding="utf-8") as file:
    json.dump(results, file, indent=1)
failed = sum(not result["good"] for result in results)
print(f"{len(results) - failed} checks passed, {failed} failed")
sys.exit(1 if failed or not results else 0)
