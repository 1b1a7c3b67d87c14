"""CUDA C++ to functions: NVRTC compiles, the driver loads and launches. Both come with torch and the GPU's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

Argument = Tensor | int | float | None
"""A tensor goes as its address, None as a null pointer, numbers as 32-bit int and float."""

SHARED = 48 << 10
"""Bytes of shared memory that a block gets without asking for more."""

_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Launcher(Protocol):
    """Runs kernel `name` on a grid of blocks of `threads`, each with so many bytes of shared memory."""

    def __call__(self, name: str, grid: tuple[int, int], threads: int, shared: int, *args: Argument) -> None: ...


def c_value(value: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    """What C gets for an argument.

    >>> c_value(3), c_value(0.5), c_value(None)
    (c_int(3), c_float(0.5), c_void_p(None))
    """
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The run-time compiler, or None where torch came without it.

    >>> nvrtc() is nvrtc()
    True
    """
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return None
    name, packages = f"libnvrtc.so.{major}", Path(torch.__file__).parents[1] / "nvidia"
    for place in (name, *sorted(map(str, packages.glob(f"*/lib/{name}")))):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


def compile_cubin(source: str, architecture: str) -> bytes:
    """Machine code of CUDA C++ for an architecture, e.g. "sm_90"; RuntimeError with the compiler's words."""
    library = nvrtc()
    assert library is not None, "there is no NVRTC"
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"asfp.cu", 0, None, None), "nvrtc")
    try:
        options = (f"--gpu-architecture={architecture}".encode(), b"--std=c++17")
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"the kernels do not compile for {architecture}:\n{log.value.decode()}")
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtc")
        cubin = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, cubin), "nvrtc")
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


class CudaLauncher:
    """The kernels of a source on the current device; launches go to torch's current stream, so graphs capture them."""

    def __init__(self, source: str, kernels: Sequence[str]) -> None:
        torch.cuda.current_stream().synchronize()  # the device has its context
        self._driver = ctypes.CDLL("libcuda.so.1")
        major, minor = torch.cuda.get_device_capability()
        cubin, module = compile_cubin(source, f"sm_{major}{minor}"), ctypes.c_void_p()
        _check(self._driver.cuModuleLoadData(ctypes.byref(module), cubin), "the driver")
        self._functions = {name: self._function(module, name) for name in kernels}
        self._allowed = dict.fromkeys(kernels, SHARED)

    def _function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        _check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "the driver")
        return function

    def __call__(self, name: str, grid: tuple[int, int], threads: int, shared: int, *args: Argument) -> None:
        function = self._functions[name]
        if shared > self._allowed[name]:
            _check(self._driver.cuFuncSetAttribute(function, _MAX_SHARED, shared), "the driver")
            self._allowed[name] = shared
        values = [c_value(arg) for arg in args]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        result = self._driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, shared, stream, addresses, None)
        _check(result, f"kernel {name}")


def _check(result: int, what: str) -> None:
    if result:
        raise RuntimeError(f"{what} failed with error {result}")
