"""What NVIDIA's NVFP4 recipe costs on the `10m` language model, computed without this project's code.

    python3 benches/gap.py --data DIR [--steps 3000] [--stop-at N] [--recipes bf16,nvidia] [--csv FILE]

A second implementation, in PyTorch, of what `nvfp4 train --preset 10m` does: the same model, optimizer
and schedule, and recipe `nvidia` as `nvfp4_emulated.py` has it. Initial weights, batches and the split
of the text are those of `nvfp4 train --data DIR --data-bytes 0 --seed SEED`, so losses can be compared
step by step, and a gap between the recipes that only one of the two implementations has is its defect.
`--stop-at` ends runs early without changing their learning rates, `--seconds` all of them at the next
evaluation.

Different are: random bits of stochastic rounding, the order of sums, scores of attention (not rounded
to bf16), roundings inside fused element-wise operations, and the gradients of embedding and head (not
rounded for each sequence).

Before it trains it checks its quantizer. Prints losses in nats per byte (training: the mean since the
last row) and gaps to the first recipe in percent. Needs NumPy and PyTorch (2.8 or later with CUDA).
"""

import argparse
import csv
import math
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

from nvfp4_emulated import Linear, check, expect, hadamard

# ---- Random numbers and text of `nvfp4 train` (lm/src/random.rs, lm/src/data.rs).


def mix(z):
    """SplitMix64's finaliser, of an array of u64."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fnv(text):
    """FNV-1a of a string."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def words(seed, name, first, count):
    """Words `first`, `first + 1`, ... of the stream of `seed` and `name`."""
    key = mix(mix(np.array([seed], np.uint64)) ^ np.uint64(fnv(name)))
    return mix(key ^ mix(np.arange(first, first + count, dtype=np.uint64)))


def normal(seed, name, shape, deviation):
    """Normal variates by Box and Muller, f32."""
    count = math.prod(shape)
    uniform = ((words(seed, name, 0, count) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[::2])) * deviation, math.tau * uniform[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return torch.from_numpy(pairs.astype(np.float32).reshape(shape))


def read_text(folder):
    """Training text, validation text: the files of `folder` in the order of their paths, a zero after
    each. A file is for validation if ten divides the hash of its path."""
    parts, paths = ([], []), []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(root, name) for name in names if not name.startswith(".")]
    keys = {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in paths}
    for key in sorted(keys):
        with open(keys[key], "rb") as file:
            text = file.read()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        if text and b"\0" not in text:
            parts[fnv(key) % 10 == 0].append(text + b"\0")
    if not parts[0] or not parts[1]:
        raise SystemExit(f"{folder}: {len(parts[0])} files to train, {len(parts[1])} to validate")
    print(f"{folder}: {len(parts[0])} files to train, {len(parts[1])} to validate", flush=True)
    return [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts]


def windows(text, starts, context):
    """Inputs and targets, `[len(starts), context]`: the windows of `text` that begin at `starts`."""
    starts = torch.from_numpy(starts.astype(np.int64)).to(text.device, non_blocking=True)
    bytes_ = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return bytes_[:, :-1], bytes_[:, 1:]


def train_batch(text, seed, step, batch, context):
    word, bound = words(seed, "batches", step * batch, batch), np.uint64(len(text) - context)
    half = np.uint64(32)  # word * bound / 2^64, for a bound below 2^32
    low = ((word & np.uint64(0xFFFFFFFF)) * bound) >> half
    return windows(text, ((word >> half) * bound + low) >> half, context)


def valid_batch(text, index, count, batch, context):
    sequence = np.arange(index * batch, (index + 1) * batch, dtype=np.int64)
    return windows(text, (len(text) - context - 1) * sequence // max(count * batch - 1, 1), context)


# ---- The model (lm/src/model.rs) and its optimizer (lm/src/optim.rs).


@torch.compile(dynamic=False)
def norm(x, gain):
    x = x.float()
    return (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain).bfloat16()


@torch.compile(dynamic=False)
def heads_of(qkv, cos, sin, heads):
    """Queries (scaled), keys, both rotated, and values: `[batch, heads, time, head]`, bf16."""
    time_, half = cos.shape
    q, k, v = qkv.view(-1, time_, 3, heads, 2 * half).permute(2, 0, 3, 1, 4)

    def rotate(x):
        a, b = x[..., :half].float(), x[..., half:].float()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return (rotate(q) * (2 * half) ** -0.5).bfloat16(), rotate(k).bfloat16(), v.contiguous()


@torch.compile(dynamic=False)
def swiglu(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@torch.compile(dynamic=False)
def cross_entropy(logits, targets):
    return F.cross_entropy(logits.float(), targets)


class Model(torch.nn.Module):
    """A decoder of bytes. Parameters have the names and the initial values of `nvfp4 train`."""

    def __init__(self, args, rotation):
        super().__init__()
        width, hidden, self.layers, self.heads = args.width, args.hidden, args.layers, args.heads
        self.rotation = rotation
        shapes = {"embedding": (256, width), "norm.gain": (width,), "head": (width, 256)}
        for i in range(self.layers):
            shapes |= {
                f"blocks.{i}.attention_norm.gain": (width,),
                f"blocks.{i}.attention.qkv.weight": (width, 3 * width),
                f"blocks.{i}.attention.out.weight": (width, width),
                f"blocks.{i}.feed_forward_norm.gain": (width,),
                f"blocks.{i}.feed_forward.gate_up.weight": (width, 2 * hidden),
                f"blocks.{i}.feed_forward.down.weight": (hidden, width),
            }
        self.p = {}
        for name, shape in shapes.items():
            deviation = 0.1 if name == "embedding" else shape[0] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                deviation *= (2 * self.layers) ** -0.5
            if name == "head":
                deviation *= 0.25
            gain = len(shape) == 1
            value = torch.ones(shape) if gain else normal(args.seed, name, shape, deviation)
            self.p[name] = torch.nn.Parameter(value.to(args.device))
            self.register_parameter(name.replace(".", "_"), self.p[name])
        half = width // self.heads // 2
        angle = np.arange(args.context)[:, None] * 1e4 ** (-np.arange(half) / half)
        self.cos, self.sin = (
            torch.from_numpy(table.astype(np.float32)).to(args.device)
            for table in (np.cos(angle), np.sin(angle))
        )

    def forward(self, tokens, targets):
        """Mean loss in nats per byte."""
        p = self.p
        x = F.embedding(tokens.reshape(-1), p["embedding"]).bfloat16()
        for i in range(self.layers):

            def linear(x, name):
                return Linear.apply(x, p[f"blocks.{i}.{name}.weight"], self.rotation)

            y = linear(norm(x, p[f"blocks.{i}.attention_norm.gain"]), "attention.qkv")
            q, k, v = heads_of(y, self.cos, self.sin, self.heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            x = x + linear(y.transpose(1, 2).reshape(x.shape), "attention.out")
            y = linear(norm(x, p[f"blocks.{i}.feed_forward_norm.gain"]), "feed_forward.gate_up")
            x = x + linear(swiglu(y), "feed_forward.down")
        logits = norm(x, p["norm.gain"]) @ p["head"].bfloat16()
        return cross_entropy(logits, targets.reshape(-1))


def learning_rate(step, steps, warmup, highest):
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(recipe, args, texts, report):
    """Train with `recipe`; `report` gets each row."""
    torch.manual_seed(args.seed)
    rotation = hadamard().to(args.device, torch.bfloat16) if recipe == "nvidia" else None
    model = Model(args, rotation)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    count, shape = args.eval_batches, (args.batch, args.context)
    losses, begun = [], time.perf_counter()
    for step in range(args.stop_at + 1):
        if step % args.eval_every == 0 or step == args.stop_at:
            trained = torch.stack(losses).mean().item() if losses else None
            speed = len(losses) * math.prod(shape) / (time.perf_counter() - begun)
            # With gradients that nobody asks for, or everything would be compiled once more.
            valid = [model(*valid_batch(texts[1], i, count, *shape)).detach() for i in range(count)]
            row = (recipe, step, torch.stack(valid).double().mean().item(), trained, round(speed))
            report(row)
            if step == args.stop_at:
                return
            losses, begun = [], time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.warmup, args.lr)
        loss = model(*train_batch(texts[0], args.seed, step, *shape))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options = {
        "data": "", "csv": "", "recipes": "bf16,nvidia", "steps": 3000, "stop-at": 0,
        "warmup": 0, "batch": 328, "context": 256, "lr": 2e-3, "seed": 0, "eval-every": 250,
        "eval-batches": 16, "width": 448, "layers": 4, "heads": 4, "hidden": 1216, "seconds": 1e9,
    }
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    args.stop_at = args.stop_at or args.steps
    args.warmup = args.warmup or args.steps // 10
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"PyTorch {torch.__version__} on {hardware}", flush=True)
    check(args.device)
    texts = [text.to(args.device) for text in read_text(args.data)]
    print(f"bytes of text: {len(texts[0])} to train, {len(texts[1])} to validate", flush=True)
    baseline = {}
    table = [("recipe", "step", "valid_loss", "train_loss", "bytes_per_s", "gap_percent")]

    def report(row):
        recipe, step, valid, trained, speed = row
        gap = 100 * (valid / baseline.setdefault(step, valid) - 1)
        table.append((*row, gap))
        seconds = time.perf_counter() - started
        print(
            f"{recipe:8} step {step:5}  validation {valid:.6f}  training {trained or math.nan:.6f}"
            f"  gap {gap:+.2f} %  {speed} bytes/s  {seconds:.0f} s",
            flush=True,
        )
        if args.csv:
            with open(args.csv, "w", newline="") as file:
                csv.writer(file).writerows(table)
        expect("the loss is finite", math.isfinite(valid))
        if seconds > args.seconds:
            raise SystemExit(f"stopped after {seconds:.0f} s")

    for recipe in args.recipes.split(","):
        expect(f"recipe {recipe} is bf16 or nvidia", recipe in ("bf16", "nvidia"))
        train(recipe, args, texts, report)


if __name__ == "__main__":
    main()
