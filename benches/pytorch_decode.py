#!/usr/bin/env python3
"""What PyTorch takes for prefill and decoding in bf16, on the same GPU as `nvfp4 dev decode-cost`.

Usage: pytorch_decode.py [llama-3.2-1b] [llama-3.1-8b] [--prompt N] [--tokens N] [--decode-only]
                         [--json FILE]

Random weights in the shapes of the models; no network. Kept fair: `torch.compile` of the whole
model with a static cache of keys and values, decoding with `mode="reduce-overhead"` (CUDA graphs),
the token chosen on the device, fused projections of queries, keys and values and of gate and up,
the fastest SDPA that takes the shapes. Times are of whole rounds between synchronizations, the
median of the rounds.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

# name: layers, width, hidden, heads, heads of keys, tied
MODELS = {
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, True),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, False),
}
VOCABULARY = 128256


class Layer(nn.Module):
    def __init__(self, width, hidden, heads, kv_heads, capacity):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        shape = (1, kv_heads, capacity, self.head)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, x, positions, cos, sin, mask):
        batch, length, width = x.shape
        sizes = [self.heads * self.head] + 2 * [self.kv_heads * self.head]
        parts = self.qkv(self.attention_norm(x)).split(sizes, dim=-1)
        q, k, v = (t.view(batch, length, -1, self.head).transpose(1, 2) for t in parts)

        def rotate(t):
            first, second = t.float().chunk(2, dim=-1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return turned.to(v.dtype)

        q, k = rotate(q), rotate(k)
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        if mask is None:
            # A prompt: it is all there is.
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = F.scaled_dot_product_attention(
                q, self.keys, self.values, attn_mask=mask, enable_gqa=True
            )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, layers, width, hidden, heads, kv_heads, tied, capacity):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            Layer(width, hidden, heads, kv_heads, capacity) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.capacity, self.head_size = capacity, width // heads

    def tables(self, device):
        """Cosines and sines; made outside of the cast of the model, in f32."""
        half = self.head_size // 2
        base = 500000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(self.capacity, device=device)[:, None] * base
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, positions, decodes):
        x = self.embedding(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        mask = None
        if decodes:
            mask = torch.arange(self.capacity, device=x.device)[None, :] <= positions[:, None]
        for layer in self.layers:
            x = layer(x, positions, cos, sin, mask)
        return self.head(self.norm(x[:, -1:])).float()


def measure(name, prompt, tokens, rounds, decode_only):
    layers, width, hidden, heads, kv_heads, tied = MODELS[name]
    device = torch.device("cuda")
    torch.manual_seed(0)
    capacity = prompt + (rounds + 2) * tokens
    with torch.device("meta"):
        model = Model(layers, width, hidden, heads, kv_heads, tied, capacity)
    model = model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)
        for buffer in model.buffers():
            buffer.zero_()
    if tied:
        model.head.weight = model.embedding.weight
    model.tables(device)
    model.eval()

    def prefill(ids, positions):
        return model(ids, positions, False)

    if not decode_only:
        prefill = torch.compile(prefill, mode="max-autotune-no-cudagraphs", fullgraph=True)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(token, position):
        logits = model(token, position, True)
        return logits.argmax(-1), position + 1

    ids = (torch.arange(prompt, device=device) * 7919 + 13) % VOCABULARY
    ids, positions = ids[None], torch.arange(prompt, device=device)
    with torch.inference_mode():
        prefills = []
        for _ in range(1 if decode_only else rounds + 2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            logits = prefill(ids, positions)
            torch.cuda.synchronize()
            prefills.append(time.perf_counter() - started)
        token = logits.argmax(-1)
        position = torch.tensor([prompt], device=device)

        def decode(count):
            nonlocal token, position
            for _ in range(count):
                torch.compiler.cudagraph_mark_step_begin()
                token, position = step(token, position)
                # The outputs of a graph are overwritten by its next replay.
                token, position = token.clone(), position.clone()

        decode(min(8, tokens))
        torch.cuda.synchronize()
        steps = []
        for _ in range(rounds):
            started = time.perf_counter()
            decode(tokens)
            torch.cuda.synchronize()
            steps.append((time.perf_counter() - started) / tokens)
    weights = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    if not tied:
        # A step looks up one row of the embedding.
        weights -= model.embedding.weight.numel() * 2
    return {
        "shape": name,
        "prompt": prompt,
        "step_bytes": weights,
        "prefill": None if decode_only else statistics.median(prefills[2:]),
        "step": statistics.median(steps),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--decode-only", action="store_true", help="do not compile and time the prefill"
    )
    parser.add_argument("--json")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"{sorted(unknown)}: a model is one of {list(MODELS)}")
    torch.set_float32_matmul_precision("high")
    results = []
    for name in options.models:
        found = measure(
            name, options.prompt, options.tokens, options.rounds, options.decode_only
        )
        prefill = "not timed"
        if found["prefill"] is not None:
            prefill = f"{1e3 * found['prefill']:.2f} ms"
        print(
            f"{name}: prefill of {found['prompt']} tokens {prefill}, a step"
            f" {1e3 * found['step']:.3f} ms ({1 / found['step']:.0f} tokens/s)",
            flush=True,
        )
        results.append(found)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    if options.json:
        figures = {
            "hardware": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
