"""Exports models by ModelOpt as NVFP4_AWQ: awq.py BASE OUT MODEL...

The search of AWQ in ModelOpt needs Triton. The scales here are those of its exponent 1/2: what an
input is divided by is the square root of the mean of its feature's magnitude. Averages over layers
that read the same input, folding into norms and layers, and the files are ModelOpt's own.
"""
import copy
import os
import sys
import warnings

warnings.filterwarnings("ignore")

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

base, out = sys.argv[1:3]
torch.set_num_threads(1)
with open(os.path.join(base, "text.txt"), encoding="utf-8") as file:
    text = file.read()

for name in sys.argv[3:]:
    folder = os.path.join(base, name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text)["input_ids"])[:256].reshape(4, 64)

    def read(model):
        with torch.no_grad():
            model(ids, use_cache=False)

    means = {}
    watched = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]

    def watch(module, inputs):
        means[module] = inputs[0].float().abs().flatten(0, -2).mean(0)

    hooks = [module.register_forward_pre_hook(watch) for module in watched]
    read(model)
    for hook in hooks:
        hook.remove()
    # Converted in place: modules stay the keys of their means.
    model = mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), read)
    for module, mean in means.items():
        if not module.weight_quantizer.is_enabled:
            continue
        divisor = (mean / mean.mean()).sqrt().clamp(min=2**-6)
        scale = (1 / divisor).to(torch.bfloat16)
        module.weight.data = (module.weight.float() / scale.float()).to(torch.bfloat16)
        module.input_quantizer.pre_quant_scale = scale
    mtq.calibrate(model, "max", read)
    destination = os.path.join(out, f"{name}-awq-by-modelopt")
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=destination)
    tokenizer.save_pretrained(destination)
