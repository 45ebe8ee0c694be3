"""Prints gguf-blocks.json: random blocks of tensor types of GGUF, and the values that the package gguf gives them.

The scales of type f16 in a block are finite, and NVFP4's are neither negative nor NaN; all other bytes are random.
"""
import json

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Type

# Positions of the f16 numbers in a block.
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q2_K: [80, 82],
    Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.MXFP4: [], Type.NVFP4: [],
}
BLOCKS = 3


def main():
    random = np.random.default_rng(7)
    types = {}
    for kind, halves in HALVES.items():
        _, size = GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for at in halves:
            scales = random.normal(0.0, 2.0, BLOCKS).astype(np.float16)
            data[:, at:at + 2] = scales.view(np.uint8).reshape(BLOCKS, 2)
        if kind == Type.MXFP4:
            data[:, 0] = [0, 1, 130]
        if kind == Type.NVFP4:
            data[:, :4] = random.integers(0, 127, (BLOCKS, 4), dtype=np.uint8)
        values = gguf.quants.dequantize(data.reshape(-1), kind).reshape(-1).astype(np.float32)
        types[kind.name] = {
            "bytes": data.tobytes().hex(),
            "f32": values.tobytes().hex(),
        }
    print(json.dumps(types, indent=0))


main()
