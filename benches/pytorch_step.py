#!/usr/bin/env python3
"""Measures PyTorch on the same work and GPU: training steps, attention, layers.

Usage: pytorch_step.py [steps] [attention] [layers] [moe] [encoder] [flux] [mlp] [finetune] [--json FILE]

The baseline is the fastest that a user would pick: `torch.compile`, the fastest spelling of the heads
and backend of SDPA for each shape, fused AdamW, bf16 autocast over f32 master weights, gradients
clipped to a norm of 1, bytes as tokens. Times are CUDA events around whole repetitions, the best of
three. Memory is what the process holds (`torch.cuda.max_memory_reserved`); tensors in use
(`torch.cuda.max_memory_allocated`) are beside it. The model is that of the crate `nvfp4-lm`: RMSNorm,
rotary positions, causal attention, SwiGLU, an embedding and a head of their own.
"""

import argparse
import gc
import itertools
import json
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# name: width, blocks, heads, hidden, context, batch
MODELS = {
    "layer": (4096, 1, 32, 12288, 512, 16),
    "gpt2-size": (768, 12, 12, 2048, 1024, 16),
    "1b": (2048, 16, 32, 8192, 2048, 4),
    "1b-long": (2048, 16, 32, 8192, 8192, 1),
}
VOCABULARY = 256
# How attention takes its heads from the output of one linear layer: by one permute, or by chunk, view
# and transpose.
SPELLINGS = ("permute", "chunk")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Block(nn.Module):
    def __init__(self, width, heads, hidden, spelling):
        super().__init__()
        self.heads = heads
        self.spelling = spelling
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def split(self, qkv):
        """Queries, keys and values, [batch, heads, time, head size] each."""
        batch, time_, _ = qkv.shape
        if self.spelling == "permute":
            return qkv.view(batch, time_, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        parts = qkv.chunk(3, dim=-1)
        return tuple(t.view(batch, time_, self.heads, -1).transpose(1, 2) for t in parts)

    def forward(self, x, cos, sin):
        batch, time_, width = x.shape
        q, k, v = self.split(self.qkv(self.attention_norm(x)))

        def rotate(t):
            first, second = t.float().chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return turned.to(v.dtype)

        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, width, blocks, heads, hidden, context, spelling):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, spelling) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        angles = torch.arange(context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)[None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, inputs, targets):
        # The residual stream is bf16, as in the crate.
        x = self.embedding(inputs).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def best(run, repeats, rounds=3):
    """Milliseconds of one repetition."""
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / repeats)
    return min(found)


def step(name, spelling, backend):
    width, blocks, heads, hidden, context, batch = MODELS[name]
    # Nothing is left of another model, so that reserved memory is that of this one.
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = Model(width, blocks, heads, hidden, context, spelling).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    data = torch.randint(0, VOCABULARY, (batch, context + 1), device="cuda")
    inputs, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    compiled = torch.compile(model)

    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(backend):
            loss = compiled(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    # The process keeps what warm-up reserved.
    reserved = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = best(run, 5)
    reserved = max(reserved, torch.cuda.max_memory_reserved())
    in_use = torch.cuda.max_memory_allocated()
    return {"ms": milliseconds, "reserved_gb": reserved / 1e9, "in_use_gb": in_use / 1e9}


def steps(names, spellings):
    """The fastest combination of spelling and backend for each model.

    `all_ms` has the times of all of them, None where memory ran out.
    """
    for name in names:
        rows, times = [], {}
        for spelling, (label, backend) in itertools.product(spellings, BACKENDS.items()):
            times[f"{spelling}, {label}"] = None
            try:
                row = step(name, spelling, backend)
            except torch.OutOfMemoryError:
                continue
            times[f"{spelling}, {label}"] = round(row["ms"], 3)
            rows.append({"step": name, "heads": spelling, "sdpa": label, **row})
        fastest = min(rows, key=lambda row: row["ms"], default={"step": name, "ms": None})
        yield {**fastest, "all_ms": times}


def attention(lengths=(512, 1024, 2048, 4096, 8192, 16384)):
    for head, heads in ((64, 32), (128, 16)):
        for tokens in lengths:
            batch = 16384 // tokens
            shape = (batch, heads, tokens, head)
            q, k, v, dout = (
                torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)
            )
            for t in (q, k, v):
                t.requires_grad_(True)
            row = {"attention": tokens, "head": head, "heads": heads, "batch": batch}
            for label, backend in BACKENDS.items():
                with sdpa_kernel(backend):

                    def forward():
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                    def both():
                        torch.autograd.grad(forward(), (q, k, v), dout)

                    both()
                    with torch.no_grad():
                        row[f"{label}_forward_ms"] = best(forward, 10)
                    row[f"{label}_both_ms"] = best(both, 10)
            yield row


def layers():
    rows, width, hidden, vocabulary = 8192, 4096, 12288, 32768
    bf16 = torch.bfloat16
    x, residual = (torch.randn(rows, width, device="cuda", dtype=bf16) for _ in range(2))
    gain = torch.ones(width, device="cuda")
    both = torch.randn(rows, 2 * hidden, device="cuda", dtype=bf16)
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=bf16)
    targets = torch.randint(0, vocabulary, (rows,), device="cuda")

    def norm(x, residual, gain):
        total = x + residual
        return total, F.rms_norm(total, (width,), gain.to(bf16))

    def swiglu(both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def loss(logits):
        return F.cross_entropy(logits.float(), targets)

    cases = {
        "add_rms_norm": (norm, (x, residual, gain), 4 * rows * width * 2),
        "swiglu": (swiglu, (both,), 3 * rows * hidden * 2),
        "cross_entropy": (loss, (logits,), rows * vocabulary * 2),
    }
    for name, (function, inputs, moved) in cases.items():
        compiled = torch.compile(function)
        inputs = tuple(t.detach().requires_grad_(True) for t in inputs)
        outputs = compiled(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(t) for t in outputs]

        def whole():
            found = compiled(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            torch.autograd.grad(found, inputs, gradients)

        whole()
        with torch.no_grad():
            compiled(*inputs)
            forward = best(lambda: compiled(*inputs), 20)
        yield {
            "layer": name,
            "forward_ms": forward,
            "both_ms": best(whole, 20),
            "forward_gb_s": moved / forward / 1e6,
        }
    parameters = [torch.randn(218_103_808 // 8, device="cuda") for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    milliseconds = best(optimizer.step, 10)
    count = sum(p.numel() for p in parameters)
    yield {"layer": "adamw", "both_ms": milliseconds, "gb_s": 28 * count / milliseconds / 1e6}


def mlp(width=8192, hidden=28672):
    """The SwiGLU feed-forward of Llama 70B in bf16: forward alone, as in inference, and with its
    backward."""
    bf16 = torch.bfloat16
    device = {"device": "cuda", "dtype": bf16}
    gate_up = (torch.randn(2 * hidden, width, **device) * width**-0.5).requires_grad_(True)
    down = (torch.randn(width, hidden, **device) * hidden**-0.5).requires_grad_(True)

    def forward(x):
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    for tokens in (1024, 16384):
        torch._dynamo.reset()
        compiled = torch.compile(forward)
        x = torch.randn(tokens, width, **device).requires_grad_(True)
        gradient = torch.randn_like(x)

        def both():
            torch.autograd.grad(compiled(x), (x, gate_up, down), gradient)

        both()
        with torch.no_grad():
            compiled(x)
            alone = best(lambda: compiled(x), 10)
        both_ms = best(both, 10)
        teraflops = 6 * tokens * width * hidden / alone / 1e9
        yield {
            "layer": f"mlp {width}-{hidden}, {tokens} tokens",
            "forward_ms": alone,
            "both_ms": both_ms,
            "forward_tflop_s": teraflops,
        }


def moe(tokens=16384, width=2048, hidden=1408, experts=16, top_k=2):
    """Forward and backward of a mixture of SwiGLU experts: all of it, and the experts alone."""
    bf16 = torch.bfloat16
    device = {"device": "cuda"}
    router = (torch.randn(width, experts, **device) * width**-0.5).requires_grad_(True)
    gate_up = (torch.randn(experts, width, 2 * hidden, **device, dtype=bf16) * width**-0.5)
    down = (torch.randn(experts, hidden, width, **device, dtype=bf16) * hidden**-0.5)
    gate_up, down = gate_up.requires_grad_(True), down.requires_grad_(True)
    x = torch.randn(tokens, width, **device, dtype=bf16).requires_grad_(True)

    def experts_of(rows, ends):
        gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(F.silu(gate) * up, down, offs=ends)

    def whole(x):
        scores = torch.softmax(x.float() @ router, dim=-1)
        weights, chosen = scores.topk(top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        picked = F.one_hot(chosen.flatten(), experts).sum(0)
        ends = picked.cumsum(0).to(torch.int32)
        results = experts_of(x[order // top_k], ends)
        weighted = results * weights.flatten()[order, None].to(bf16)
        return torch.zeros_like(x).index_add(0, order // top_k, weighted)

    even = torch.arange(1, experts + 1, **device, dtype=torch.int32) * (tokens * top_k // experts)
    rows = torch.randn(tokens * top_k, width, **device, dtype=bf16).requires_grad_(True)
    cases = {
        "moe": (whole, (x,), (x, router, gate_up, down)),
        "moe_experts": (lambda rows: experts_of(rows, even), (rows,), (rows, gate_up, down)),
    }
    for name, (function, inputs, leaves) in cases.items():
        torch._dynamo.reset()
        compiled = torch.compile(function)
        gradient = torch.randn_like(compiled(*inputs))

        def both():
            torch.autograd.grad(compiled(*inputs), leaves, gradient)

        both()
        with torch.no_grad():
            compiled(*inputs)
            forward = best(lambda: compiled(*inputs), 20)
        yield {"layer": name, "forward_ms": forward, "both_ms": best(both, 20)}


def steps_of(build):
    """Times and memory of a step by mode of `torch.compile`: forward, backward, AdamW in bf16 autocast.

    `build` returns a model and a function of the compiled model that returns its features.
    """
    row = {}
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        model, features = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        compiled = torch.compile(model, mode=mode)

        def run():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = features(compiled).float().square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(5):
            run()
        row[f"{mode}_ms"] = best(run, 10)
        row[f"{mode}_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        del model, features, compiled, optimizer, run
    return row


def encoder(sizes=((768, 12, 12, 16, 1024), (4096, 1, 32, 16, 512))):
    """A step of `torch.nn.TransformerEncoder`, with a causal mask."""
    for width, blocks, heads, batch, time_ in sizes:

        def build():
            layer = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).cuda()
            x = torch.randn(batch, time_, width, device="cuda", dtype=torch.bfloat16)
            mask = nn.Transformer.generate_square_subsequent_mask(time_, device="cuda")
            return model, lambda compiled: compiled(x, mask=mask, is_causal=True)

        yield {"encoder": f"{width} x {blocks}", **steps_of(build)}


class FluxStream(nn.Module):
    """Layers of one stream of a block: modulation, attention's projections, feed-forward."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.qk_norms = nn.ModuleList(nn.RMSNorm(width // heads, eps=1e-5) for _ in range(2))
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def heads_of(self, x, parts):
        """Queries, keys and values, [batch, heads, tokens, head size] each."""
        batch, tokens, _ = x.shape
        x = self.norms[0](x) * (parts[1] + 1) + parts[0]
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return self.qk_norms[0](q).to(v.dtype), self.qk_norms[1](k).to(v.dtype), v

    def finish(self, x, attended, parts):
        x = x + self.output(attended) * parts[2]
        y = self.norms[1](x) * (parts[4] + 1) + parts[3]
        return x + self.feed_forward(y) * parts[5]


class FluxBlock(nn.Module):
    """Streams of text and of patches with joint attention, modulated by a condition."""

    def __init__(self, width, heads):
        super().__init__()
        self.streams = nn.ModuleList(FluxStream(width, heads) for _ in range(2))

    def forward(self, text, patches, condition):
        condition = F.silu(condition)
        parts = [s.modulation(condition)[:, None].chunk(6, dim=-1) for s in self.streams]
        streams = list(zip(self.streams, (text, patches), parts))
        each = [stream.heads_of(x, part) for stream, x, part in streams]
        q, k, v = (torch.cat(both, dim=2) for both in zip(*each))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        attended = mixed.split([text.shape[1], patches.shape[1]], dim=1)
        found = [stream.finish(x, y, part) for (stream, x, part), y in zip(streams, attended)]
        # The residual stream is bf16, as in the crate.
        return torch.cat(found, dim=1).to(text.dtype)


def flux(width=3072, heads=24, text=512, patches=3584):
    """A step of one block of a diffusion transformer like FLUX."""

    def build():
        model = FluxBlock(width, heads).cuda()
        inputs = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((1, text, width), (1, patches, width), (1, width))
        ]
        return model, lambda compiled: compiled(*inputs)

    yield {"flux": f"{width}, {text} + {patches} tokens", **steps_of(build)}


def finetune(folder, batch=4, length=2048, rank=16):
    """A step of finetuning a model of `transformers` with random weights: all parameters, and LoRA by `peft`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    for lora in (False, True):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        # Full finetuning needs f32 master weights, frozen weights do not.
        dtype = torch.bfloat16 if lora else torch.float32
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", torch_dtype=dtype)
        if lora:
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        compiled = torch.compile(model)
        ids = torch.randint(0, config.vocab_size, (batch, length), device="cuda")

        def run():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = compiled(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(5):
            run()
        row = {"finetune": f"LoRA {rank}" if lora else "all parameters", "tokens": batch * length}
        row["ms"] = best(run, 10)
        row["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        del model, compiled, optimizer, trained
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["steps", "attention", "layers"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--spellings", nargs="*", default=list(SPELLINGS), choices=SPELLINGS)
    parser.add_argument("--folder", help="folder with the config.json of a model, for finetune")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    kinds = {
        "steps": lambda: steps(arguments.models, arguments.spellings),
        "attention": attention,
        "layers": layers,
        "moe": moe,
        "encoder": encoder,
        "flux": flux,
        "mlp": mlp,
        "finetune": lambda: finetune(arguments.folder),
    }
    unknown = [what for what in arguments.what if what not in kinds]
    if unknown:
        parser.error(f"{unknown}: expected any of {list(kinds)}")
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    print(f"{report['gpu']}, PyTorch {report['torch']}, cuDNN {report['cudnn']}", flush=True)
    for what in arguments.what:
        for row in kinds[what]():
            report["rows"].append(row)
            cells = (
                f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
            print("  ".join(cells), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
