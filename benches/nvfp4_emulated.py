"""NVFP4 in PyTorch, emulated: quantized and at once dequantized operands, bf16 products with f32 sums.

    python3 benches/nvfp4_emulated.py [te_reference.safetensors]

`gap.py` trains with it. A code times its block scale is exact in bf16; the global scales multiply the
sums. Run by itself it checks its quantizer against known facts, and, if it is given a file of vectors,
its codes and scales against those of TransformerEngine's reference quantizer. Needs PyTorch (2.8 or
later with CUDA); TORCH_COMPILE_DISABLE=1 in the environment runs it without PyTorch's compiler.
"""

import json
import math
import struct
import sys

import torch
import torch._dynamo

BLOCK = 16  # Elements that share a scale, and the size of the transform.
LARGEST = 6.0 * 448.0  # What the maximum of a tensor is scaled to.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT_MAX = torch.finfo(torch.float32).max
SIGNS = 0xD7E8  # Bit i set: the transform negates element i of each 16.

torch._dynamo.config.suppress_errors = True  # What does not compile runs as it is.
torch._dynamo.config.recompile_limit = 64  # One compilation for each shape.
torch.autograd.set_multithreading_enabled(False)  # What is set here may hold for this thread only.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

# Quantizers take a matrix as `[A, 16, B, C]`: elements that share a scale differ in axes 1 and 3.


def rows(x):
    """1x16 blocks along the columns."""
    return x.reshape(-1, BLOCK, 1, 1)


def columns(x):
    """1x16 blocks along the rows."""
    return x.reshape(x.shape[0] // BLOCK, BLOCK, x.shape[1], 1)


def tiles(w):
    """16x16 tiles."""
    return w.reshape(w.shape[0] // BLOCK, BLOCK, w.shape[1] // BLOCK, BLOCK)


def hadamard():
    """diag(signs) H / 4, `[16, 16]`, on the CPU."""
    def value(i, j):
        return (-1) ** ((i & j).bit_count() + (SIGNS >> i & 1)) / 4

    return torch.tensor([[value(i, j) for j in range(BLOCK)] for i in range(BLOCK)])


def rotated(x, rotation):
    """Columns of `x`, each 16 elements times `rotation` (`[16, 16]`, bf16): sums rounded to bf16."""
    groups = x.reshape(x.shape[0] // BLOCK, BLOCK, x.shape[1])
    rotation = rotation.t().expand(len(groups), BLOCK, BLOCK)
    if not x.is_cuda:  # PyTorch's sums on a CPU may be in bf16.
        return (rotation.float() @ groups.float()).to(x.dtype).reshape(x.shape)
    return torch.bmm(rotation, groups).reshape(x.shape)


def step_of(size):
    """Distance to the next value of E2M1."""
    return torch.where(size >= 4, 2.0, torch.where(size >= 2, 1.0, 0.5))


def encode(x, stochastic):
    """Values on E2M1's grid, block scales on E4M3's, all in f32, and the global maximum."""
    x = x.float()
    amax = x.abs().amax()
    # Division of a number by a tensor would be multiplication by its reciprocal.
    up = (torch.full_like(amax, LARGEST) / amax).clamp(max=FLOAT_MAX)
    up = torch.where(amax > 0, up, 1.0)
    scale = (x.abs().amax((1, 3), keepdim=True) * (up * (1 / 6))).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn).float()
    y = x * (1 / (scale * (1 / up))).clamp(max=FLOAT_MAX)
    size = y.abs()
    if stochastic:
        noise = torch.floor(torch.rand_like(size) * 256) / 256
        size = size + noise * step_of(size)
        step = step_of(size)
        size = torch.floor(size / step) * step
    else:
        step = step_of(size)
        size = torch.round(size / step) * step
    return torch.copysign(size.clamp(max=6), y), scale, amax


@torch.compile(dynamic=False)
def quantize(x, stochastic):
    """What the codes stand for but for the global scale, bf16, and that scale."""
    code, scale, amax = encode(x, stochastic)
    return (code * scale).bfloat16(), amax / LARGEST


@torch.compile(dynamic=True)
def rescale(sums, a, b, dtype):
    """Flat `sums` times both global scales."""
    return (sums * (a * b)).to(dtype)


def product(a, b, dtype):
    """Of operands: pairs of a bf16 matrix and a global scale, or None. Summed in f32, rounded once."""
    (x, x_scale), (y, y_scale) = a, b
    if x.is_cuda:
        if x_scale is None and dtype == torch.bfloat16:
            return x @ y
        sums = torch.mm(x, y, out_dtype=torch.float32)
    else:
        sums = x.float() @ y.float()
    if x_scale is None:
        return sums.to(dtype)
    return rescale(sums.flatten(), x_scale, y_scale, dtype).view(sums.shape)


def operand(x, blocks, stochastic=False):
    values, scale = quantize(blocks(x), stochastic)
    return values.view(x.shape), scale


def transposed(a):
    return a[0].t(), a[1]


class Linear(torch.autograd.Function):
    """`x` (bf16 `[tokens, d_in]`) times `w` (f32 `[d_in, d_out]`): bf16. Recipe `nvidia` if there is
    a `rotation`, else `bf16`."""

    @staticmethod
    def forward(ctx, x, w, rotation):
        x, w = x.detach(), w.detach()
        if rotation is None:
            forward_x = saved_x = x, None
            w = w.bfloat16(), None
        else:
            forward_x, w = operand(x, rows), operand(w, tiles)
            saved_x = operand(rotated(x, rotation), columns)
        ctx.save_for_backward(*saved_x, *w, rotation)
        return product(forward_x, w, torch.bfloat16)

    @staticmethod
    def backward(ctx, dy):
        x, x_scale, w, w_scale, rotation = ctx.saved_tensors
        dy = dy.contiguous()
        if rotation is None:
            dgrad_dy = wgrad_dy = dy, None
        else:
            dgrad_dy = operand(dy, rows, stochastic=True)
            wgrad_dy = operand(rotated(dy, rotation), columns, stochastic=True)
        dx = product(dgrad_dy, transposed((w, w_scale)), torch.bfloat16)
        dw = product(transposed((x, x_scale)), wgrad_dy, torch.float32)
        return dx, dw, None


def expect(fact, holds):
    if not holds:
        raise SystemExit(f"check failed: {fact}")


@torch.no_grad()
def check(device):
    """Facts about quantizer and products as they train: compiled, where they are."""
    torch.manual_seed(0)
    # One shape for all: each is a compilation.
    side = 256
    given = [0, 0.25, 0.26, 0.75, 1.25, 1.3, 1.75, 2.5, 2.6, 3.5, 5, 5.1, 6, -0.25, -1.25, -6]
    nearest = [0, 0, 0.5, 1, 1, 1.5, 2, 2, 3, 4, 4, 6, 6, 0, -1, -6]
    count = side * side // BLOCK - 1
    # With a maximum of 10.5, in a block of its own, all others are scaled by a power of two.
    x = torch.tensor([10.5] + 15 * [0.0] + count * given, device=device).view(side, side)
    code, scale, _ = encode(rows(x), stochastic=False)
    expect("block scale", (scale[1:] == 256).all())
    found = code.view(-1, BLOCK)[1:]
    expect("rounding to nearest", (found == torch.tensor(nearest, device=device)).all())
    # Compiled divisions may be off by one place: ties and values of the grid may then be near ones.
    values, scale = operand(x, rows, stochastic=True)
    expect("global scale", abs(scale.item() * 256 - 1) < 1e-6)
    drawn = values.view(-1, BLOCK)[1:].double() / 256
    expect("drawn codes are E2M1", set(drawn.abs().unique().tolist()) <= set(E2M1.tolist()))
    x = torch.tensor(given, device=device)
    step = step_of(x.abs()).double()
    # Noise of 8 bits loses up to 1/256 of a step; 3 / sqrt(count) of it are six standard errors.
    far = (drawn.mean(0) - x).abs() / step
    expect("stochastic rounding has the right mean", (far < 1 / 256 + 3 / math.sqrt(count)).all())
    spread = drawn.amax(0) - drawn.amin(0)
    expect("stochastic rounding moves by a step at most", (spread <= step).all())
    expect("stochastic rounding keeps zero", spread[0] == 0)

    x = torch.randn(side, side, device=device) * torch.randn(side, side, device=device).exp()
    for blocks in (rows, columns, tiles):
        code, scale, amax = encode(blocks(x), stochastic=False)
        expect("codes are E2M1", set(code.abs().unique().tolist()) <= set(E2M1.tolist()))
        expect("scales are E4M3", (scale.to(torch.float8_e4m3fn).float() == scale).all())
        exact = code * scale
        expect("a code times a scale is exact in bf16", (exact.bfloat16() == exact).all())
        values, global_scale = operand(x, blocks)
        same = (values == exact.view(x.shape)).float().mean().item()
        expect(f"compiled code computes the same ({same:.5f})", same > 0.999)
        error = ((values.float() * global_scale - x).norm() / x.norm()).item()
        expect(f"the error is some percent ({error:.3f})", 0.04 < error < 0.2)

    rotation = hadamard().to(device, torch.bfloat16)
    a, b = torch.randint(-4, 5, (2, side, side), device=device).bfloat16().unbind()
    turned = [rotated(x, rotation) for x in (a, b)]
    expect("the transform changes matrices", not torch.equal(a, turned[0]))
    same = torch.equal(a.double().t() @ b.double(), turned[0].double().t() @ turned[1].double())
    expect("the transform keeps products", same)

    x, w, dy = torch.randn(3, side, side, device=device).unbind()
    exact = x @ w, dy @ w.t(), x.t() @ dy
    for turn, low, high in ((None, 1e-4, 0.01), (rotation, 0.05, 0.25)):
        given = x.bfloat16().requires_grad_(), w.clone().requires_grad_()
        with torch.enable_grad():
            y = Linear.apply(*given, turn)
        y.backward(dy.bfloat16())
        for name, found, true in zip(("y", "dx", "dw"), (y, given[0].grad, given[1].grad), exact):
            error = ((found.float() - true).norm() / true.norm()).item()
            expect(f"error of {name}, {error:.4f}, is {low} to {high}", low < error < high)
    print("the quantizer passes its checks", flush=True)


def check_golden(path):
    """Codes and scales against `path`, vectors of TransformerEngine's reference, byte by byte."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()

    def tensor(name, dtype):
        first, end = header[name]["data_offsets"]
        shape = header[name]["shape"]
        return torch.frombuffer(bytearray(data[first:end]), dtype=dtype).reshape(shape)

    compared, rotation = 0, hadamard().bfloat16()
    for case in [name[:-2] for name in header if name.endswith(".x")]:
        x = tensor(f"{case}.x", torch.bfloat16)
        turned = rotated(x, rotation)
        for mode, made in {
            "1x16.row": rows(x),
            "1x16.col": rows(x.t()),
            "rht.row": rows(x),
            "rht.col": rows(turned.t()),
            "16x16.row": tiles(x),
            "16x16.col": tiles(x.t()),
        }.items():
            codes = tensor(f"{case}.{mode}.codes", torch.uint8)
            scales = tensor(f"{case}.{mode}.scales", torch.uint8).view(torch.float8_e4m3fn).float()
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            values = E2M1[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
            code, scale, _ = encode(made, False)
            scale = scale.expand_as(code).reshape(values.shape)[:, ::BLOCK]
            same = (code.reshape(values.shape) == values).all() and (scale == scales).all()
            expect(f"{case}.{mode} is TransformerEngine's", same)
            compared += values.numel()
    print(f"{compared} codes and their scales are those of {path}")


if __name__ == "__main__":
    check("cuda" if torch.cuda.is_available() else "cpu")
    for file in sys.argv[1:]:
        check_golden(file)
