"""What a PyTorch user has on the same GPU, for comparison with `cargo bench` and `layer_timing`.

    python3 benches/pytorch.py [linear] [quantize] [matmul]

Prints one line for each figure: the best of three means over calls between two synchronisations, as the
timings of burn-nvfp4's `layer_timing` are. Needs PyTorch with CUDA.
"""

import sys
import time

import torch

TOKENS, WIDTH = 8192, 4096


def milliseconds(work, calls=20):
    for _ in range(5):
        work()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / calls * 1e3)
    return best


def bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def linear():
    """A linear layer, forward and backward, from a given gradient and from a sum."""
    for outputs in (4096, 14336):
        x = bf16(TOKENS, WIDTH).requires_grad_()
        layer = torch.nn.Linear(WIDTH, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
        gradient = bf16(TOKENS, outputs)

        def step(backward):
            x.grad = layer.weight.grad = None
            backward(layer(x))

        given = milliseconds(lambda: step(lambda y: y.backward(gradient)))
        summed = milliseconds(lambda: step(lambda y: y.sum(1).sum().backward()))
        print(f"linear {TOKENS} x {WIDTH} x {outputs}: {given:.3f} ms, from a sum {summed:.3f} ms")


def quantize_rows(x, encode):
    """Row-wise NVFP4, to nearest, from a given global encode scale: two codes a byte, E4M3 scales."""
    blocks = x.float().view(-1, 16)
    scales = (blocks.abs().amax(1, keepdim=True) / 6.0 * encode).clamp(max=448)
    scales = scales.to(torch.float8_e4m3fn)
    scaled = blocks * (encode / scales.float())
    magnitude = scaled.abs()
    code = torch.signbit(scaled).int() * 8
    # Ties go to the even code.
    for threshold in (0.25, 1.25, 2.5, 5.0):
        code += (magnitude > threshold).int()
    for threshold in (0.75, 1.75, 3.5):
        code += (magnitude >= threshold).int()
    code = code.view(-1, 2).to(torch.uint8)
    return code[:, 0] | (code[:, 1] << 4), scales


def quantize():
    """`torch.compile` of the reference quantization, and a copy."""
    compiled = torch.compile(quantize_rows)
    encode = torch.tensor(500.0, device="cuda")
    for size in (8192, 16384):
        inputs = [bf16(size, size) for _ in range(3)]
        turn = [0]

        def rotated(work):
            turn[0] = (turn[0] + 1) % len(inputs)
            return work(inputs[turn[0]])

        ms = milliseconds(lambda: rotated(lambda x: compiled(x, encode)))
        copy = milliseconds(lambda: rotated(torch.clone))
        bytes_moved = size * size * (2 + 9 / 16)
        print(
            f"torch.compile, row RN {size}²: {ms * 1e3:.1f} us, {bytes_moved / ms / 1e6:.0f} GB/s; "
            f"copy {size * size * 4 / copy / 1e6:.0f} GB/s"
        )


def matmul():
    """Products in bf16, which are cuBLAS's."""
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 4096, 7168)):
        a, b = bf16(m, k), bf16(n, k)
        ms = milliseconds(lambda: a @ b.T)
        print(f"matmul {m} x {n} x {k}: {ms * 1e3:.1f} us, {2 * m * n * k / ms / 1e9:.0f} TFLOP/s")


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    chosen = sys.argv[1:] or ["linear", "quantize", "matmul"]
    for name in chosen:
        {"linear": linear, "quantize": quantize, "matmul": matmul}[name]()
