#!/usr/bin/env python3
"""Bytes and times of the collectives of a step on 64 GPUs, by a model on paper.

    python3 benches/model_64_gpus.py [--json results/model-64-gpus.json]

No step has run on more than two GPUs. Rates are those of results/two-gpus*.json and, between nodes,
the network's peak.
"""

import argparse
import datetime
import json
import pathlib
import subprocess

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results"
NODES, IN_NODE = 8, 8
RANKS = NODES * IN_NODE
# One 400 Gb/s adapter a GPU. Nothing was measured between nodes.
NETWORK = 50e9
# Bytes of an element: NVFP4 codes and block scales, bf16, f32.
CODES, BF16, F32 = 0.5625, 2, 4
# Master weight, gradient and two moments.
STATE = 16
# Tokens of each GPU in a step.
TOKENS = 8192


def rows(name):
    return {(row["name"], row.get("at")): row["values"] for row in load(name)["rows"]}


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured_link():
    """Bytes a second of a GPU, to others of its node: what two GPUs take longer than one for 341 MB
    of gradients. An all-reduce sends as many bytes as it has, of two."""
    found = rows("two-gpus")
    tokens = 16 * 1024
    one, two = (found[name, "`bf16`"][0] for name in ("one GPU", "`nccl`"))
    return 341e6 / (2 * tokens / two - tokens / one)


def measured_compute():
    """FLOP a second of a step of the `nvidia` recipe: the model of 1 B parameters on one GPU."""
    width, blocks, hidden, context = 2048, 16, 8192, 2048
    parameters = blocks * (4 * width * width + 3 * width * hidden)
    flops = 6 * parameters + 6 * blocks * width * context
    return flops * rows("two-gpus-parts")["1 B, `nvidia`, one GPU", None][0]


LINK, COMPUTE = measured_link(), measured_compute()


def gathered(size, ranks):
    """Seconds until all of `ranks` have the `size` bytes of which each has a part, or of a
    reduce-scatter: in a node each GPU takes what it does not have; into a node each byte comes once,
    through its adapters together."""
    inside = size * (min(ranks, IN_NODE) - 1) / min(ranks, IN_NODE) / LINK
    if ranks <= IN_NODE:
        return inside
    nodes = ranks // IN_NODE
    between = size * (nodes - 1) / nodes / IN_NODE / NETWORK
    return max(size * (ranks - 1) / ranks / LINK, between)


def across_nodes(size):
    """The same, of one GPU of each node."""
    return size * (NODES - 1) / NODES / NETWORK


def exchanged(size):
    """Seconds of an all-to-all in which each GPU sends `size` bytes evenly to all."""
    return max(size * (NODES - 1) / NODES / NETWORK, size / NODES / LINK)


def dense():
    width, blocks, hidden, kv, vocabulary = 8192, 80, 28672, 1024, 128256
    block = 2 * width * width + 2 * width * kv + 3 * width * hidden
    weights, ends = blocks * block, 2 * vocabulary * width
    # Causal attention over 8192 tokens.
    flops = TOKENS * (6 * (weights + ends // 2) + 6 * blocks * width * TOKENS)
    seconds = flops / COMPUTE
    step = ["FSDP", seconds, STATE * (weights + ends) / RANKS]
    fsdp = [
        ("gather of codes for fprop and dgrad", 2 * blocks * 7, 2 * CODES * weights),
        ("the same in f32, once", blocks * 7, F32 * weights),
        ("gather of embedding and head in f32", 2, F32 * ends),
        ("reduce-scatter of gradients in f32", blocks * 7 + 2, F32 * (weights + ends)),
    ]
    yield step, [(*row, gathered(row[2], RANKS)) for row in fsdp]

    # A tensor group shares the tokens of its eight GPUs.
    activations = IN_NODE * TOKENS * width
    step = ["TP + FSDP", *step[1:]]
    codes = 4 * blocks * 2 * CODES * activations
    sums = 4 * blocks * BF16 * activations
    part = weights / IN_NODE
    yield step, [
        ("gather of tokens' codes, both orientations", 8 * blocks, codes, gathered(codes, IN_NODE)),
        ("reduce-scatter of partial sums in bf16", 4 * blocks, sums, gathered(sums, IN_NODE)),
        (
            "gather of codes of weights for fprop and dgrad",
            2 * blocks * 7,
            2 * CODES * part,
            across_nodes(2 * CODES * part),
        ),
        (
            "reduce-scatter of gradients in f32",
            blocks * 7 + 2,
            F32 * (part + ends / IN_NODE),
            across_nodes(F32 * (part + ends / IN_NODE)),
        ),
    ]


def experts():
    width, blocks, dense_blocks, hidden, vocabulary = 7168, 61, 3, 2048, 129280
    count, top, attention = 64, 8, 187_000_000
    expert = 3 * width * hidden
    mixed = blocks - dense_blocks
    replicated = blocks * attention + mixed * expert + dense_blocks * 9 * expert
    ends = 2 * vocabulary * width
    active = replicated + mixed * top * expert
    flops = TOKENS * (6 * (active + ends // 2) + 6 * blocks * 16384 * TOKENS)
    state = STATE * (replicated + ends + mixed * count * expert) / RANKS
    step = ["EP + FSDP", flops / COMPUTE, state]
    tokens = 4 * mixed * TOKENS * top * width * BF16
    shared = 2 * CODES * replicated
    gradients = F32 * (replicated + ends)
    yield step, [
        ("all-to-all of tokens and results in bf16", 4 * mixed, tokens, exchanged(tokens)),
        ("gather of codes for fprop and dgrad", 2 * blocks * 6, shared, gathered(shared, RANKS)),
        ("reduce-scatter of gradients in f32", blocks * 6 + 2, gradients, gathered(gradients, RANKS)),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write a results file for `cargo xtask results`")
    options = parser.parse_args()
    table = []
    for (layout, compute, state), collectives in [*dense(), *experts()]:
        table.append((f"{layout}: compute", [None, None, compute]))
        table.append((f"{layout}: state of a GPU", [None, state / 1e9, None]))
        for name, count, size, seconds in collectives:
            table.append((f"{layout}: {name}", [count, size / 1e9, seconds]))
    for name, (count, size, seconds) in table:
        figures = [
            "" if count is None else f"{count:d}",
            "" if size is None else f"{size:.1f} GB",
            "" if seconds is None else f"{seconds:.2f} s",
        ]
        print(f"{name:<72}", *(f"{figure:>10}" for figure in figures))
    if not options.json:
        return
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    results = {
        "title": "Communication of 64 GPUs in a step, modelled",
        "modelled": True,
        "gpu": f"{NODES} nodes of {IN_NODE} NVIDIA H100",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit.strip(),
        "command": "python3 benches/model_64_gpus.py --json results/model-64-gpus.json",
        "method": "bytes over rates",
        "notes": [
            f"FSDP: Llama-3 70B, all of it over {RANKS} GPUs. TP + FSDP: the same, {IN_NODE} GPUs of a "
            f"node share each matrix, and {NODES} nodes each part. EP + FSDP: as DeepSeek-V3, but with "
            f"64 experts, one of each block on a GPU, all else over {RANKS} GPUs.",
            f"{TOKENS} tokens on each GPU, the `nvidia` recipe. Nothing is hidden behind compute "
            "here, and no latency is counted (about 9 µs a collective of two GPUs).",
            f"In a node: {LINK / 1e9:.0f} GB/s of each GPU, measured with two (gradients of 341 MB, "
            "two-gpus.json). Between nodes: 50 GB/s of each GPU, a peak, not measured. Compute: "
            f"{COMPUTE / 1e12:.0f} TFLOP/s, measured (1 B on one GPU, two-gpus-parts.json).",
            "GB are those of the whole tensors that a group of ranks gathers or reduces; of the "
            "all-to-all, what a GPU sends. State is 16 bytes a parameter.",
            "All 256 experts of DeepSeek-V3 would take 168 GB of state a GPU.",
        ],
        "row": "layout, collective",
        "units": [
            {"name": "in a step", "digits": 0},
            {"name": "GB", "digits": 1},
            {"name": "s", "digits": 2},
        ],
        "rows": [
            {
                "name": name,
                "values": [
                    count,
                    None if size is None else round(size, 1),
                    None if seconds is None else round(seconds, 2),
                ],
            }
            for name, (count, size, seconds) in table
        ],
    }
    with open(options.json, "w") as file:
        json.dump(results, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
