"""Exported files as functions: one for each engine that runs them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asfp.errors import AsfpError

Runner = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Inputs -> outputs, on the engine that a file is for."""


def needs(extra: str, *modules: str) -> None:
    """Raise, with the command that helps, unless all modules are installed.

    >>> needs("onnx", "no_such_module")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: this needs no_such_module, which is not installed: pip install 'asfp[onnx]'
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise AsfpError(f"this needs {', '.join(missing)}, which is not installed: pip install 'asfp[{extra}]'")


@contextmanager
def reading(path: Path, engine: str) -> Iterator[None]:
    """What an engine says of a file that it cannot take, in one line.

    >>> with reading(Path("a.onnx"), "onnxruntime"):
    ...     raise RuntimeError("no graph\\n  in it")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: a.onnx cannot be read by onnxruntime (no graph): export it again
    """
    try:
        yield
    except AsfpError:
        raise
    except Exception as error:  # each engine has its own kinds
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise AsfpError(f"{path} cannot be read by {engine} ({first}): export it again") from error


def _one_input(path: Path, count: int) -> None:
    if count != 1:
        raise AsfpError(f"{path} has {count} inputs: only files with one can be given a size or timed here")


def run_onnx(path: Path, threads: int = 0, shape: tuple[int, ...] | None = None) -> Runner:
    """A function that runs an ONNX file in ONNX Runtime on the CPU; 0 threads leave the number to the engine.

    With `shape`, the open sizes of its one input are fixed, so that what depends on them is computed once.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # else it slows down what runs next
    sizes = onnx_shape(path) if shape else []
    if shape and len(sizes) != len(shape):
        raise AsfpError(f"{path} takes inputs of {len(sizes)} sizes, not of {len(shape)}")
    for open_size, n in zip(sizes, shape or (), strict=True):
        if isinstance(open_size, str):
            options.add_free_dimension_override_by_name(open_size, n)
    with reading(path, "onnxruntime"):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, feed)]

    return run


def onnx_shape(path: Path) -> list[int | str | None]:
    """The shape of a file's first input; open sizes are names, or None."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    with reading(path, "onnxruntime"):
        inputs = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).get_inputs()
    _one_input(path, len(inputs))
    return list(inputs[0].shape)


def openvino_shape(path: Path) -> list[int | None]:
    """The shape of a file's first input; open sizes are None."""
    with reading(path, "openvino"):
        inputs = _openvino().read_model(path).inputs
    _one_input(path, len(inputs))
    shape = inputs[0].get_partial_shape()
    return [None if n.is_dynamic else n.get_length() for n in shape]


def run_openvino(path: Path, threads: int = 0, precision: str = "f32", shape: tuple[int, ...] | None = None) -> Runner:
    """A function that runs an OpenVINO IR (or ONNX) file on the CPU; threads and shape as in `run_onnx`."""
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = threads
    core = _openvino()
    with reading(path, "openvino"):
        model = core.read_model(path)
        if shape:
            model.reshape(list(shape))
        compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        results = request.infer([x.numpy() for x in inputs], share_inputs=True)
        return [torch.from_numpy(results[i].copy()) for i in range(len(results))]

    return run


@cache
def _openvino() -> Any:
    """The one core of this process, for good.

    Each core gives the thread another stack for signals, and puts the one that it found back when it goes: that of a
    core that went before it, where they do not go in reverse order. Ctrl-C is then a segmentation fault.
    """
    import openvino

    return openvino.Core()


def run_pt2(path: Path) -> Runner:
    """A function that runs a torch.export program."""
    module = torch.export.load(path).module()

    def run(inputs: tuple[Tensor, ...]) -> list[Tensor]:
        with torch.no_grad():
            return tensors_of(module(*inputs))

    return run


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a nested result, in order.

    >>> len(tensors_of({"a": torch.zeros(1), "b": [torch.zeros(2), 3]}))
    2
    """
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


@contextmanager
def quietly() -> Iterator[None]:
    """Without what exporters and compilers say on the way: the outcome is all that the user needs to know."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(level)
