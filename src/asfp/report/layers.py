"""The layers of a run before and after, and its residual streams with who writes which of their channels."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn import functional as F

from asfp.architecture import Architecture, build_architecture
from asfp.errors import AsfpError
from asfp.report.chart import Bytes, Heat, Rows
from asfp.report.runs import Run
from asfp.report.values import dig, integer
from asfp.roles import CONVOLUTIONS, LEAVES
from asfp.trace import trace

ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__iadd__", "__radd__"}
LARGEST = 2**24
"""Elements of an input that is traced."""
SHAPES = {"cifar10": (3, 32), "digits": (1, 16), "imagefolder": (3, 224)}
"""Channels and side of the images, by data set."""


@dataclass(frozen=True)
class LayerRow:
    """One layer; what is not known is None. `out_after` 0 means that it is gone."""

    name: str
    out_before: int
    out_after: int
    kept: int | None = None
    """Filters kept by the last pruning; the compact layer may have fewer, where nothing reads them."""
    in_before: int | None = None
    in_after: int | None = None
    macs_before: int | None = None
    macs_after: int | None = None


def layer_rows(run: Run) -> list[LayerRow]:
    """From the compact model's plan; of a run that is not finished, from the last pruning.

    >>> from pathlib import Path
    >>> layer_rows(Run(Path("x"), "x"))
    []
    """
    kept = {}
    if run.filters is not None and run.filters.epochs:
        kept = {name: int(array[-1].sum()) for name, array in run.filters.kept.items()}
    if run.plan is not None:
        return [
            LayerRow(
                x.name,
                x.out_before,
                x.out_after,
                kept.get(x.name),
                x.in_before,
                x.in_after,
                x.macs_before,
                x.macs_after,
            )
            for x in run.plan.layers
        ]
    if run.filters is None:
        return []
    return [LayerRow(name, run.filters.kept[name].shape[1], count, count) for name, count in kept.items()]


def dense_model(run: Run) -> tuple[nn.Module, tuple[int, ...]]:
    """The run's network with random weights, and the shape of its input; only options that are safe to read count."""
    data, given = dig(run.config, "data"), dig(run.config, "model", "options")
    options = dict(given) if isinstance(given, dict) else {}
    channels, side = SHAPES.get(str(dig(data, "name")), (3, 32))
    shape: tuple[int, ...] = (1, channels, *(2 * [integer(dig(data, "size")) or side]))
    if run.plan is not None and run.plan.inputs:
        shape = (1, *run.plan.inputs[0][1:])
    if math.prod(shape) > LARGEST:
        raise AsfpError(f"its input of shape {shape} is too large to trace")
    text = run.architecture
    if not text:
        name = str(dig(run.config, "model", "name") or "")
        if shape[1] != 3:
            options["in_chans" if name.startswith("timm:") else "in_channels"] = shape[1]
        text = Architecture(name, options).to_json()
    return build_architecture(run.path, text), shape


def stream_heat(run: Run, label: str, index: int) -> tuple[Heat | None, str]:
    """Every residual stream: a row a writer in order, a column a channel; and a notice where it cannot be drawn."""
    if run.filters is None or not run.filters.epochs:
        return None, ""
    try:
        model, shape = dense_model(run)
        graph = trace(model, torch.zeros(shape), LEAVES)
        kept = {name: array[-1] for name, array in run.filters.kept.items()}
        parts = tuple(_part(i, writers, kept) for i, writers in enumerate(streams(graph)))
    except Exception as error:  # the files may name any network and any layers: whatever that does is their fault
        return None, f"residual streams are not drawn, as the network cannot be built: {str(error)[:300]}"
    if not parts:
        return None, ""
    widths = ", ".join(f"{part.cells.shape[1]} channels by {part.cells.shape[0]} writers" for part in parts)
    return Heat(
        key=f"streams-{index}",
        title=label,
        alt=f"{label}: which channels of each residual stream each layer writes, after the last pruning: {widths}.",
        x_title="channel of the stream",
        x=(),
        parts=parts,
        kind="streams",
    ), ""


def _part(index: int, writers: list[Writer], kept: dict[str, Any]) -> Rows:
    width = max(writer.width for writer in writers)
    rows: Bytes = np.zeros((len(writers), width), np.uint8)
    for row, writer in zip(rows, writers, strict=True):
        mask = kept.get(writer.layer)
        row[writer.start : writer.start + writer.count] = 1 if mask is None else mask[: writer.count]
    return Rows(f"stream {index + 1}: {width} channels", rows, tuple(writer.name for writer in writers))


@dataclass(frozen=True)
class Writer:
    """What is added to a stream: the channels start .. start + count of its `width`."""

    name: str
    layer: str
    width: int
    start: int
    count: int


def streams(graph: fx.GraphModule) -> list[list[Writer]]:
    """Additions that feed one another are one stream; its writers are found by walking back from their operands.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.stem, self.a, self.b = (nn.Conv2d(4, 4, 1) for _ in range(3))
    ...
    ...     def forward(self, x):
    ...         x = self.stem(x)
    ...         x = x + self.a(x)
    ...         return x + self.b(torch.relu(x))
    >>> found = streams(trace(Block(), torch.zeros(1, 4, 8, 8), LEAVES))
    >>> [[writer.name for writer in stream] for stream in found]
    [['stem', 'a', 'b']]
    """
    modules = dict(graph.named_modules())
    home: dict[fx.Node, int] = {}
    found: list[dict[fx.Node, Writer]] = []
    for node in graph.graph.nodes:
        operands = [n for n in node.all_input_nodes if _width(n)]
        if node.target not in ADDITIONS or len(operands) != 2 or not _width(node):
            continue
        sources = [_source(n, modules) for n in operands]
        joined = sorted({home[s] for s in sources if s in home})
        index = joined[0] if joined else len(found)
        if not joined:
            found.append({})
        for other in joined[1:]:  # two streams meet: one from here on
            found[index] |= found[other]
            found[other] = {}
            home |= {n: index for n, where in home.items() if where == other}
        for operand, source in zip(operands, sources, strict=True):
            if source not in home:
                found[index][source] = _writer(source, operand, modules)
        home[node] = index
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    return [[stream[n] for n in sorted(stream, key=order.__getitem__)] for stream in found if stream]


def _width(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.shape[1]) if isinstance(value, torch.Tensor) and value.ndim >= 3 else 0


def _source(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node:
    """Back through all that keeps the channels, to a convolution, an addition or what changes their number."""
    while True:
        if node.op == "call_module" and isinstance(modules[str(node.target)], CONVOLUTIONS):
            return node
        before = [n for n in node.all_input_nodes if _width(n) == _width(node)]
        if node.target in ADDITIONS and len(before) == 2:
            return node
        if not before:
            return node
        node = before[0]


def _writer(source: fx.Node, operand: fx.Node, modules: dict[str, nn.Module]) -> Writer:
    width = _width(operand)
    if source.op == "call_module":
        return Writer(str(source.target), str(source.target), width, 0, width)
    if source.target is F.pad:  # a shortcut of the paper's CIFAR networks: zeros around the narrower stream's channels
        before = source.all_input_nodes[0]
        pads: Any = source.args[1] if len(source.args) > 1 else source.kwargs.get("pad", ())
        count = _width(before)
        start = int(pads[4]) if len(pads) >= 6 else 0
        return Writer("shortcut (no weights)", "", width, start, count)
    name = "the stream before" if source.target in ADDITIONS else f"{source.name} (no filters)"
    return Writer(name, "", width, 0, width)
