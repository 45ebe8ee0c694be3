"""Compiles CUTLASS's block-scaled GEMM for sm_100a, without a GPU, and keeps its PTX: an oracle for
the descriptors of the kernel for tcgen05.

    pip install nvidia-cutlass-dsl numpy
    git clone --depth 1 https://github.com/NVIDIA/cutlass
    python compile.py cutlass ptx
    NVFP4_CUTLASS_PTX=$PWD/ptx cargo test ... --test suite -- --ignored cutlass::

Each kernel is compiled in a process of its own, because CuTe DSL reads its settings when it is
imported.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import types

EXAMPLE = (
    "examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm/"
    "dense_blockscaled_gemm_persistent.py"
)


class Stub(types.ModuleType):
    """Stands for torch, which the example uses to check its results alone."""

    Tensor = object

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name)

    def __call__(self, *_args, **_kwargs):
        return Stub("value")


def compile_one(cutlass_folder, name, m, n):
    """Compiles the kernel with tiles of m x n, 256 rows on two CTAs; its PTX goes where the environment says."""
    sys.modules["torch"] = sys.modules["cutlass.torch"] = Stub("torch")
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_ptr
    from cutlass.tensor_utils import LayoutEnum

    cutlass.torch = sys.modules["cutlass.torch"]
    spec = importlib.util.spec_from_file_location("example", cutlass_folder / EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["example"] = example
    spec.loader.exec_module(example)
    block, element, scale = {
        "nvfp4": (16, cutlass.Float4E2M1FN, cutlass.Float8E4M3FN),
        "mxfp8": (32, cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU),
    }[name]

    def pointer(dtype, alignment):
        # Nothing is launched: any aligned address.
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=alignment)

    cute.compile(
        example.Sm100BlockScaledPersistentDenseGemmKernel(block, (m, n), (m // 128, 1)),
        pointer(element, 16),
        pointer(element, 16),
        pointer(scale, 32),
        pointer(scale, 32),
        pointer(cutlass.BFloat16, 16),
        (OperandMajorMode.K, OperandMajorMode.K, LayoutEnum.ROW_MAJOR),
        (512, 512, 1024, 1),
        148,
        cuda.CUstream(0),
    )


def main():
    if len(sys.argv) == 5:
        compile_one(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    if len(sys.argv) != 3:
        sys.exit("usage: compile.py CUTLASS_FOLDER PTX_FOLDER")
    cutlass_folder, out = (pathlib.Path(path).resolve() for path in sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for name in ("nvfp4", "mxfp8"):
        for m, n in ((128, 256), (256, 256), (128, 64)):
            with tempfile.TemporaryDirectory() as dump:
                settings = {
                    "CUTE_DSL_ARCH": "sm_100a",
                    "CUTE_DSL_KEEP_PTX": "1",
                    "CUTE_DSL_DUMP_DIR": dump,
                }
                script = os.path.abspath(__file__)
                command = [sys.executable, script, cutlass_folder, name, str(m), str(n)]
                subprocess.run(command, env=os.environ | settings, cwd=dump, check=True)
                (ptx,) = pathlib.Path(dump).glob("*.ptx")
                (out / f"{name}-{m}x{n}.ptx").write_text(ptx.read_text())
                print(f"{name}-{m}x{n}.ptx")


if __name__ == "__main__":
    main()
