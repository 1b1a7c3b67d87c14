"""What puts a value's channels among constants is seen for what it is, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from asfp.compaction.layers import Widen
from asfp.deployment.embeds import embed_of
from asfp.deployment.folding import fold_batch_norms


def graph_of(module: nn.Module, x: Tensor) -> fx.GraphModule:
    folded = fold_batch_norms(module, x)
    assert isinstance(folded, fx.GraphModule)
    return folded


class Moved(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.way, self.widen = way, Widen(torch.tensor([1, 3, 0, 2]), torch.tensor([0.5, -2.0]).view(1, 2, 1, 1), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x) + 0  # type: ignore[call-arg, arg-type]


EMBEDS: dict[str, tuple[Any, list[int], list[float]]] = {
    "padded": (lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 2)), [-1, 0, 1, -1, -1], [0.0] * 5),
    "widened": (lambda net, x: net.widen(x), [1, -1, 0, -1], [0.0, -2.0, 0.0, 0.5]),
    "cut": (lambda net, x: x[:, 1:2], [1], [0.0]),
    "cut from the end": (lambda net, x: x[:, -1:2], [1], [0.0]),
    "one behind another": (
        lambda net, x: net.widen(x)[:, 1:4],
        [-1, 0, -1],
        [-2.0, 0.0, 0.5],
    ),
    "padded twice": (
        lambda net, x: F.pad(F.pad(x[:, :1], (0, 0, 0, 0, 1, 0)), (0, 0, 0, 0, 0, 1)),
        [-1, 0, -1],
        [0.0] * 3,
    ),
}


@pytest.mark.parametrize("name", EMBEDS)
def test_what_is_an_embed(name: str) -> None:
    way, places, fill = EMBEDS[name]
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    model = graph_of(Moved(way).double(), x)
    node = next(node for node in reversed(model.graph.nodes) if node.op == "output").all_input_nodes[0]
    found = embed_of(model, node.all_input_nodes[0])
    assert found is not None
    assert found.value.op == "placeholder"
    assert found.places.tolist() == places
    assert np.array_equal(np.where(found.places < 0, found.fill, 0.0), fill)


NONE: dict[str, Any] = {
    "rows are padded": lambda net, x: F.pad(x, (0, 0, 1, 0, 1, 2)),
    "with another value": lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0),
    "channels are cut off": lambda net, x: F.pad(x, (0, 0, 0, 0, -1, 2)),
    "reflected": lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "every second": lambda net, x: x[:, ::2],
    "rows are cut": lambda net, x: x[:, :, 1:],
    "two values joined": lambda net, x: torch.cat([x, x.exp()], 1),
    "rows joined": lambda net, x: torch.cat([x, torch.zeros(2, 2, 1, 4, dtype=x.dtype)], 2),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_none(name: str) -> None:
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    model = graph_of(Moved(NONE[name]).double(), x)
    assert all(embed_of(model, node) is None for node in model.graph.nodes)
