"""DeepSeek's FP8 form of deepseek3-tiny: E4M3 weights with one f32 scale per block, and references of the dequantized model.

Run after make_models.py: OMP_NUM_THREADS=1 python make_fp8.py OUT
"""
import json, os, sys, torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

OUT = sys.argv[1]
torch.set_num_threads(1)
BLOCK = 32   # 128 in DeepSeek's files. Some weights here are no multiple of it.

source, target = f"{OUT}/deepseek3-tiny", f"{OUT}/deepseek3-tiny-fp8"
os.makedirs(target, exist_ok=True)

def scales_of(w):
    """The largest magnitude of each block, divided by that of E4M3."""
    rows, columns = -(-w.shape[0] // BLOCK), -(-w.shape[1] // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: w.shape[0], : w.shape[1]] = w
    amax = padded.reshape(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3))
    return torch.where(amax > 0, amax / 448.0, torch.ones(()))

def spread(scales, w):
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: w.shape[0], : w.shape[1]]

stored, dequantized = {}, {}
for name, w in load_file(f"{source}/model.safetensors").items():
    leaf = name.split(".")[-2]
    if leaf.endswith("_proj") or leaf == "kv_a_proj_with_mqa":
        scales = scales_of(w.float())
        codes = (w.float() / spread(scales, w)).to(torch.float8_e4m3fn)
        stored[name], stored[name + "_scale_inv"] = codes, scales
        dequantized[name] = codes.float() * spread(scales, w)
    else:
        stored[name], dequantized[name] = w, w.float()
save_file(stored, f"{target}/model.safetensors", metadata={"format": "pt"})
config = json.load(open(f"{source}/config.json"))
config["quantization_config"] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
json.dump(config, open(f"{target}/config.json", "w"), indent=2)
generation = open(f"{source}/generation_config.json").read()
open(f"{target}/generation_config.json", "w").write(generation)

# The dequantized weights as an f32 folder, which transformers reads.
work = f"{OUT}/deepseek3-tiny-fp8-f32"
os.makedirs(work, exist_ok=True)
save_file(dequantized, f"{work}/model.safetensors", metadata={"format": "pt"})
del config["quantization_config"]
json.dump({**config, "dtype": "float32"}, open(f"{work}/config.json", "w"))
m = DeepseekV3ForCausalLM.from_pretrained(work, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
ids = torch.randint(0, config["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(7))
with torch.no_grad():
    logits = m(ids, use_cache=False).logits.contiguous()
    nll = -torch.log_softmax(logits[:, :-1].double(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    greedy = m.generate(ids[:, :16], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
save_file({"input_ids": ids, "logits_f32": logits, "nll_f64": nll.contiguous(), "greedy_24_from_first_16": greedy}, f"{target}/reference.safetensors")
