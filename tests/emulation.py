"""The CUDA kernels of training on a CPU: their source, compiled by g++ with emulated.h in place of the hardware."""

from __future__ import annotations

import atexit
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from asfp.train.cuda.geometry import KERNELS, SOURCES
from asfp.train.cuda.runtime import Argument, Launcher, c_value

HERE = Path(__file__).parent


def compiler() -> str | None:
    """g++, where there is one that knows ucontext.h."""
    return shutil.which("g++") if sys.platform == "linux" else None


@cache
def emulated(channels: int, height: int, width: int) -> Launcher:
    """The kernels for one width and size, as a launcher for tensors in the memory of the CPU."""
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name != "warp.cuh")
    code = code.replace("extern __shared__ Chunk shared[];", "static Chunk shared[1 << 14];")
    sizes = f"#define C {channels}\n#define H {height}\n#define W {width}\n"
    text = f'#include "{HERE / "emulated.h"}"\n{sizes}{code}\n' + "\n".join(_entry(code, name) for name in KERNELS)
    folder = Path(tempfile.mkdtemp(prefix="asfp-kernels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "kernels.cpp").write_text(text, encoding="utf-8")
    library = folder / "kernels.so"
    gxx = compiler()
    assert gxx is not None
    command = [gxx, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(folder / "kernels.cpp")]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))

    def launch(name: str, grid: tuple[int, int], threads: int, shared: int, *args: Argument) -> None:
        assert shared <= 16 << 14
        assert all(arg.is_cpu for arg in args if isinstance(arg, Tensor))
        beyond = functions[f"run_{name}"](*grid, threads, shared, *(c_value(arg) for arg in args))
        assert not beyond, f"{name} writes beyond its {shared} bytes of shared memory"

    return launch


def _entry(code: str, name: str) -> str:
    """A C function that runs all blocks of a grid, one after the other."""
    plain = re.search(rf'extern "C" __global__ void __launch_bounds__\(\w+\) {name}\(([^)]*)\)', code)
    macro = "CONVOLUTION" if name.startswith(("forward", "backward")) else "WEIGHT_GRADIENT"
    text = plain.group(1) if plain else re.search(rf"#define {macro}\(.*?name\((.*?)\) {{", code, re.DOTALL).group(1)  # type: ignore[union-attr]
    parameters = [" ".join(p.replace("\\", " ").split()) for p in text.split(",")]
    names = ", ".join(re.findall(r"(\w+)$", p)[0] for p in parameters)
    return (
        f'extern "C" int run_{name}(int across, int down, int threads, int bytes, {", ".join(parameters)}) {{\n'
        "  gridDim = {across, down};\n  guard((char*)shared, bytes, sizeof shared);\n"
        f"  body = [&] {{ {name}({names}); }};\n"
        "  for (blockIdx.y = 0; blockIdx.y < down; blockIdx.y++)\n"
        "    for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++) run_block(threads);\n"
        "  return broken((char*)shared, bytes, sizeof shared);\n}"
    )
