"""What NVIDIA's NVFP4 recipe costs on the `10m` language model, computed without this project's code.

    nvfp4 train --preset 10m --data DIR --data-bytes 0 --seed SEED --stop-at 0 --out OUT
    python3 benches/gap.py --data DIR --seed SEED --start OUT/nvfp4/checkpoint-00000000 \\
        [--steps 3000] [--stop-at N] [--recipes bf16,nvidia] [--csv FILE]

A second implementation, in PyTorch, of what `nvfp4 train --preset 10m` does: the same model, optimizer
and schedule, and recipe `nvidia` as `nvfp4_emulated.py` has it. Initial weights (a checkpoint of step
0), batches and the split of the text are those of `nvfp4 train`. So losses can be compared step by step,
and a gap between the recipes that only one of the two implementations has is its defect. `--stop-at`
ends runs early without changing their learning rates, `--seconds` all of them at the next evaluation.

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

# ---- Random numbers, text and checkpoints of `nvfp4 train` (lm/src/{random,data,checkpoint}.rs).


def fnv(text):
    """FNV-1a of a string."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def words(seed, name, stream, count):
    """The first `count` u64 of ChaCha8 with the key `seed` and `name`, and this stream."""
    blocks = -(-count // 8)
    constants = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    halves = [half for word in (seed, fnv(name)) for half in (word % 2**32, word >> 32)]
    state = np.zeros((16, blocks), np.uint32)
    state[:12] = np.array(constants + halves + 4 * [0], np.uint32)[:, None]
    state[12] = np.arange(blocks)
    state[14:] = np.array([stream % 2**32, stream >> 32], np.uint32)[:, None]
    x = state.copy()

    def quarter(a, b, c, d):
        for target, source, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[target] += x[source]
            x[turned] ^= x[target]
            x[turned] = x[turned] << np.uint32(bits) | x[turned] >> np.uint32(32 - bits)

    for _ in range(4):
        for i in range(4):
            quarter(i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    flat = (x + state).T.reshape(-1).astype(np.uint64)
    return (flat[::2] | flat[1::2] << np.uint64(32))[:count]


def cbor(data, at):
    """The value at `data[at]`, of the kinds that a burnpack file has, and where it ends."""
    kind, size, at = data[at] >> 5, data[at] & 31, at + 1
    if size >= 24 and kind != 7:
        length = 1 << size - 24
        size, at = int.from_bytes(data[at : at + length], "big"), at + length
    if kind in (2, 3):
        return data[at : at + size].decode() if kind == 3 else data[at : at + size], at + size
    if kind in (4, 5):
        values = []
        for _ in range(size if kind == 4 else 2 * size):
            value, at = cbor(data, at)
            values.append(value)
        return (values if kind == 4 else dict(zip(values[::2], values[1::2]))), at
    return (size if kind == 0 else None), at


def read_weights(checkpoint):
    """The parameters of a checkpoint, by name, f32."""
    with open(os.path.join(checkpoint, "model.bpk"), "rb") as file:
        data = file.read()
    size = int.from_bytes(data[6:10], "little")
    first = -(-(10 + size) // 256) * 256
    weights = {}
    for name, tensor in cbor(data, 10)[0]["tensors"].items():
        begin, end = (first + offset for offset in tensor["data_offsets"])
        values = np.frombuffer(data[begin:end], "<f4").reshape(tensor["shape"])
        weights[name] = torch.from_numpy(values.copy())
    return weights


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
    word, bound = words(seed, "batches", step, batch), np.uint64(len(text) - context)
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
    """A decoder of bytes. Parameters are those of the checkpoint that `--start` names."""

    def __init__(self, args, rotation):
        super().__init__()
        width, self.layers, self.heads = args.width, args.layers, args.heads
        self.rotation = rotation
        self.p = {}
        for name, value in read_weights(args.start).items():
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

            y = linear(norm(x, p[f"blocks.{i}.attention_norm.gamma"]), "attention.qkv")
            q, k, v = heads_of(y, self.cos, self.sin, self.heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
            x = x + linear(y.transpose(1, 2).reshape(x.shape), "attention.out")
            y = linear(norm(x, p[f"blocks.{i}.feed_forward_norm.gamma"]), "feed_forward.gate_up")
            x = x + linear(swiglu(y), "feed_forward.down")
        logits = norm(x, p["norm.gamma"]) @ p["head"].bfloat16()
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
        "eval-batches": 16, "width": 448, "layers": 4, "heads": 4, "seconds": 1e9, "start": "",
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
