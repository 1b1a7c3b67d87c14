"""How long single layers take on an engine: the table that latencies are predicted from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.bench.timing import interleave
from asfp.engines import needs, run_onnx, run_openvino
from asfp.errors import AsfpError
from asfp.trace import copy_of

ENGINES = {"torch": "torch", "onnxruntime": "onnx", "openvino": "openvino"}
"""Engines that single layers can be timed on, and the extra that has them."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Use:
    """A convolution or linear layer, and the shapes of what it reads and makes."""

    module: nn.Module
    shape: tuple[int, ...]
    made: tuple[int, ...]

    @property
    def key(self) -> Key:
        """Equal for layers that take the same time: sizes, not values."""
        layer: Any = self.module
        options = [getattr(layer, name, None) for name in ("stride", "padding", "dilation", "groups")]
        return type(layer).__name__, tuple(layer.weight.shape), layer.bias is None, *options, self.shape


def uses_of(model: nn.Module, example: Tensor) -> list[Use]:
    """The layers with weights in the order they run, each with its input's shape.

    >>> [use.shape for use in uses_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 6, 6))]
    [(1, 3, 6, 6)]
    """
    found: list[Use] = []

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> None:
        source = next(x for x in (*args, *named.values()) if isinstance(x, Tensor))
        found.append(Use(module, tuple(source.shape), tuple(made.shape)))

    hooks = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))
    ]
    try:
        with torch.inference_mode():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass
class LayerTimes:
    """Milliseconds of layers on one engine, measured when first asked for and kept."""

    engine: str
    threads: int
    repeats: int = 9
    known: dict[Key, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise AsfpError(f"engine={self.engine!r}: latencies are predicted for {', '.join(ENGINES)}")
        if self.engine != "torch":
            needs(ENGINES[self.engine], self.engine, "onnx")

    def total(self, uses: list[Use]) -> float:
        """The sum over layers."""
        return sum(self(use) for use in uses)

    def __call__(self, use: Use) -> float:
        if use.key not in self.known:
            (times,) = interleave([self._run(use)], self.repeats, 3)
            self.known[use.key] = times.median
        return self.known[use.key]

    def _run(self, use: Use) -> Callable[[], object]:
        x = torch.randn(use.shape, generator=torch.Generator().manual_seed(0))
        if self.engine == "torch":
            layer = copy_of(use.module).float().cpu().eval()

            def run() -> object:
                with torch.inference_mode():
                    return layer(x)

            return run
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layer.onnx"
            path.write_bytes(_onnx(use))
            runner = run_onnx if self.engine == "onnxruntime" else run_openvino
            ready = runner(path, self.threads)
        return lambda: ready((x,))


def _onnx(use: Use) -> bytes:
    """A file with this one layer."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    layer: Any = use.module
    weight = layer.weight.detach().float().cpu()
    bias = torch.zeros(weight.shape[0]) if layer.bias is None else layer.bias.detach().float().cpu()
    if isinstance(layer, nn.Linear):
        nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
        weight = weight.t().contiguous()
    else:
        dims = weight.ndim - 2
        pads = layer.padding if not isinstance(layer.padding, str) else (0,) * dims
        auto = {"auto_pad": "SAME_UPPER"} if layer.padding == "same" else {"pads": [*pads, *pads]}
        nodes = [
            helper.make_node(
                "Conv",
                ["x", "w", "b"],
                ["y"],
                kernel_shape=list(weight.shape[2:]),
                strides=list(layer.stride),
                dilations=list(layer.dilation),
                group=layer.groups,
                **auto,
            )
        ]
    parts = [numpy_helper.from_array(t.numpy(), name) for t, name in ((weight, "w"), (bias, "b"))]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(use.shape))
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(use.made))
    graph = helper.make_graph(nodes, "layer", [given], [made], parts)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
