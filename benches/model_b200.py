"""What an NVIDIA B200 should take for NVFP4 and MXFP8 GEMMs, without a GPU: a roofline, and
NVIDIA's model.

    pip install nvidia-matmul-heuristics==0.1.0.27
    python3 benches/model_b200.py [--json results/model-b200.json]

Nothing is measured. The roofline is the larger of the time of the operations and the time of the
bytes. The model is that of nvMatmulHeuristics for CUTLASS 3 kernels: the fastest of the kernels
that it proposes. It has no grouped GEMMs: equal groups are a batch, which leaves out the tiles that
end groups of other sizes. `cargo bench -p nvfp4-kernels --features cuda --bench gemm` prints the
figures of the file beside what it measures.
"""

import argparse
import datetime
import json
import subprocess

from nvMatmulHeuristics import (
    NvMatmulHeuristicsFlags,
    NvMatmulHeuristicsInterfaceEx,
    NvMatmulHeuristicsMatmulLayout,
    NvMatmulHeuristicsNvidiaGpu,
    NvMatmulHeuristicsTarget,
)

# Bytes a second of a B200's memory.
BANDWIDTH = 7.67e12
# Of each format: what its rows begin with, its dense operations a second, bytes of codes and scales
# for an element, and what the model calls its operands with f32 sums and a bf16 output.
FORMATS = [
    ("", 9.0e15, 9 / 16, "OOSTT"),
    ("MXFP8, ", 4.5e15, 33 / 32, "QQSTT"),
]

# As `cube_kernels/benches/gemm.rs` has them: rows and columns of weights, for 8192 tokens.
TOKENS = 8192
SQUARES = [2048, 4096, 8192, 16384]
MODELS = [
    ("Llama-3 8B qkv", 6144, 4096),
    ("Llama-3 8B o", 4096, 4096),
    ("Llama-3 8B gate, up", 28672, 4096),
    ("Llama-3 8B down", 4096, 14336),
    ("Llama-3 70B qkv", 10240, 8192),
    ("Llama-3 70B o", 8192, 8192),
    ("Llama-3 70B gate, up", 57344, 8192),
    ("Llama-3 70B down", 8192, 28672),
]
# Tokens of the MLP that `burn_backend/benches/layers/mlp.rs` measures, whose GEMMs are Llama-3 70B's.
MLP_TOKENS = [1024, 16384]
# Experts of DeepSeek-V3: tokens, rows and columns of a weight, experts.
EXPERTS = [
    (8192, 4096, 7168, 8),
    (8192, 4096, 7168, 32),
    (8192, 4096, 7168, 64),
    (8192, 4096, 7168, 128),
    (8192, 4096, 7168, 256),
    (8192, 7168, 2048, 256),
    (32768, 4096, 7168, 128),
]


def roofline(shape, rate, element):
    """Microseconds: operations, or codes, scales and a bf16 output."""
    m, n, k, groups = shape
    operations = 2 * m * n * k / rate
    moved = (m * k + groups * n * k) * element + 2 * m * n
    return 1e6 * max(operations, moved / BANDWIDTH)


class Model:
    """nvMatmulHeuristics for a B200."""

    def __init__(self):
        self.layout = NvMatmulHeuristicsMatmulLayout.TN_ROW_MAJOR
        self.library = NvMatmulHeuristicsInterfaceEx(
            backend=NvMatmulHeuristicsTarget.CUTLASS3,
            flags=NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=NvMatmulHeuristicsNvidiaGpu.B200,
        )

    def time(self, shape, precision):
        """Microseconds of the fastest of eight kernels."""
        m, n, k, groups = shape
        problem = self.library.makeNvMatmulHeuristicsProblem(
            m // groups, n, k, self.layout, groups
        )
        kernels = self.library.get(problem, 8, precision=precision)
        return 1e6 * min(kernel["runtime"] for kernel in kernels)


def shapes():
    """Names and shapes, with groups."""
    for size in SQUARES:
        yield f"{size} x {size} x {size}", (size, size, size, 1)
    for name, n, k in MODELS:
        yield f"{name}, {TOKENS} x {n} x {k}", (TOKENS, n, k, 1)
    for tokens in MLP_TOKENS:
        for name, n, k in MODELS[-2:]:
            yield f"{name}, {tokens} x {n} x {k}", (tokens, n, k, 1)
    for m, n, k, groups in EXPERTS:
        yield f"DeepSeek-V3, {groups} experts, {m} x {n} x {k}", (m, n, k, groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write a results file for `cargo xtask results`")
    options = parser.parse_args()
    model = Model()
    rows = []
    for prefix, operations, element, precision in FORMATS:
        for name, shape in shapes():
            m, n, k, _ = shape
            least = roofline(shape, operations, element)
            modelled = model.time(shape, precision)
            rate = 2 * m * n * k / modelled / 1e9
            values = [round(least, 1), round(modelled, 1), round(rate, 2)]
            name = prefix + name
            rows.append({"name": name, "values": values})
            figures = f"{values[0]:>9.1f} us {values[1]:>9.1f} us {values[2]:>6.2f} PFLOP/s"
            print(f"{name:<52} {figures}")
    if not options.json:
        return
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    results = {
        "title": "NVFP4 and MXFP8 GEMMs on a B200, modelled",
        "modelled": True,
        "gpu": "NVIDIA B200",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit.strip(),
        "command": "python3 benches/model_b200.py --json results/model-b200.json",
        "method": "nvidia-matmul-heuristics 0.1.0.27",
        "notes": [
            "No figure of this table was measured. No kernel of this project has run on a B200.",
            "The roofline is the larger of 2MNK / 9 PFLOP/s (MXFP8: 4.5) and the bytes of operands "
            "and bf16 output / 7.67 TB/s.",
            "The model is nvMatmulHeuristics for CUTLASS kernels with FP4 operands (MXFP8: FP8), "
            "the fastest of eight proposals. It has no grouped GEMMs: equal groups are a batch.",
            "Rows without a format are NVFP4.",
        ],
        "row": "GEMM, M x N x K",
        "units": [
            {"name": "roofline, µs", "digits": 1},
            {"name": "model, µs", "digits": 1},
            {"name": "model, PFLOP/s", "digits": 2},
        ],
        "rows": rows,
    }
    # A row on a line, as in the other files.
    text = json.dumps({**results, "rows": "ROWS"}, indent=2, ensure_ascii=False)
    lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
    with open(options.json, "w", encoding="utf-8") as file:
        file.write(text.replace('"ROWS"', f"[\n{lines}\n  ]") + "\n")


if __name__ == "__main__":
    main()
