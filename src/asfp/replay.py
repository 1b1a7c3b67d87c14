"""A computation on a GPU as one CUDA graph: launched at once, it does not wait for Python between its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from asfp.errors import AsfpError


class Replay:
    """`Replay(f, x)` captures f(x); `replay(other)` computes f(other), with all shapes as they were.

    The result is the same tensors each time, with other values. Without an argument it runs on what it last had.
    Before it is captured f runs three times, so that kernels are chosen and what is kept between calls is there.

    >>> if torch.cuda.is_available():
    ...     double = Replay(lambda x: 2 * x, torch.ones(3, device="cuda"))
    ...     assert double(torch.full((3,), 4.0, device="cuda")).tolist() == [8.0, 8.0, 8.0]
    """

    def __init__(self, function: Callable[..., Any], *inputs: Tensor) -> None:
        self.function = function  # holds the weights that the graph reads
        with torch.inference_mode(False):
            self.inputs = [x.detach().clone() for x in inputs]
        self.graph = torch.cuda.CUDAGraph()
        self.device = next((x.device for x in self.inputs if x.is_cuda), torch.device("cuda"))
        with torch.cuda.device(self.device):
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.inference_mode(), torch.cuda.stream(side):
                for _ in range(3):
                    function(*self.inputs)
            current.wait_stream(side)
            with torch.inference_mode(), torch.cuda.graph(self.graph):
                self.result = function(*self.inputs)
        self.kept = _kept_by(function)

    def __call__(self, *inputs: Tensor) -> Any:
        if inputs and [x.shape for x in inputs] != [x.shape for x in self.inputs]:
            shapes = [tuple(x.shape) for x in self.inputs], [tuple(x.shape) for x in inputs]
            raise AsfpError(
                f"the graph was captured for inputs of the shapes {shapes[0]}, not {shapes[1]}: make another"
            )
        with torch.cuda.device(self.device):
            for kept, given in zip(self.inputs, inputs, strict=False):
                kept.copy_(given)
            self.graph.replay()
        return self.result


def _kept_by(function: object) -> list[object]:
    """What modules keep between calls and may let go when the sizes change, though the graph still reads it."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return [getattr(module, name, None) for module in modules for name in ("_map", "_weight", "_kept")]
