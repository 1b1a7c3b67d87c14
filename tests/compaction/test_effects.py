"""What wrote in place in the original does so again in the compact model, where nobody can see it."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_equal, zero_filters
from torch import Tensor, fx, nn

import asfp
from asfp.trace import trace, writes_in_place


def writing(model: nn.Module, example: Tensor) -> int:
    """How many operations of the model write in place."""
    return sum(map(writes_in_place, trace(model, example).graph.nodes))


@pytest.mark.parametrize(  # lost: a dropout behind a mean, additions behind stochastic depth
    ("name", "lost"),
    [("resnet18", 0), ("mobilenet_v2", 0), ("efficientnet_b0", 10), ("mnasnet0_5", 1), ("googlenet", 0)],
)
def test_networks_of_torchvision_write_as_they_did(name: str, lost: int) -> None:
    kwargs = {"init_weights": False} if name == "googlenet" else {}
    model = zero_filters(asfp.create_model(f"torchvision:{name}", **kwargs)).double().eval()
    example = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    small = asfp.compact(model, example, layout="zeros")
    written = writing(model, example)
    assert written > 15
    assert written - writing(small, example) == lost
    assert_equal(model, small, (2, 3, 64, 64), (1, 3, 96, 70))


class Ways(nn.Module):
    """Spellings of writing in place, each after a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.layers
        y = F.relu(a(x), inplace=True)
        y = b(y).relu_()
        y = torch.relu_(c(y))
        y = self.act(d(y))
        z = e(y)
        z += y
        z *= 2
        return f(F.leaky_relu(z, 0.1, True))


def test_every_spelling() -> None:
    torch.manual_seed(0)
    model, x = Ways().double().eval(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight[1], layer.bias[1] = 0, 0  # type: ignore[index, operator]
    small = asfp.compact(model, x)
    assert small.get_submodule("layers.0").out_channels == 3
    assert writing(small, x) >= 5
    assert_equal(model, small, (2, 4, 6, 6), (1, 4, 9, 5))


class Seen(nn.Module):
    """Writes that somebody else could see: into the input, into a part, into what is read before by another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        x.relu_()
        y = self.first(x)
        early = self.second(y)
        y[:, 1:3].mul_(0.5)
        z = self.act(y)
        u = self.second(z)
        return early, z, self.act(u), u  # called twice, once on what else is read


def test_what_somebody_sees_is_not_overwritten() -> None:
    torch.manual_seed(0)
    model, x = Seen().double().eval(), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    small = asfp.compact(model, x)
    given = x.clone()
    small(given)
    assert torch.equal(given, x)  # the original changes its input; the compact model need not
    assert_equal(model, small, (2, 4, 6, 6), (1, 4, 3, 8))


def test_it_trains_as_the_original() -> None:
    torch.manual_seed(0)
    model, x = (
        asfp.create_model("torchvision:mobilenet_v2", num_classes=5, dropout=0.0).double(),
        torch.randn(4, 3, 32, 32),
    )
    small = asfp.compact(model.eval(), x.double(), check=False)
    assert writing(small, x.double()) > 30
    for each in (model, small):
        each.train()
        each(x.double()).square().sum().backward()
    for name, weight in small.named_parameters():
        assert torch.allclose(weight.grad, model.get_parameter(name).grad, rtol=1e-8, atol=1e-10), name  # type: ignore[arg-type]


def test_compact_models_of_one_network_do_not_share_what_was_changed() -> None:
    model = zero_filters(asfp.create_model("torchvision:mobilenet_v2")).eval()
    x = torch.randn(1, 3, 32, 32)
    small, other = (asfp.compact(model, x, layout=layout) for layout in ("least", "auto"))
    expected = other(x)
    for module in small.modules():
        if isinstance(module, nn.ReLU6):
            module.inplace = False
            module.max_val = 1.0
    assert torch.equal(other(x), expected)
    assert writing(other, x) > 30


def called(model: nn.Module) -> int:
    return str(model.code).count("self._modules[")  # type: ignore[attr-defined]


def test_layers_are_looked_up_without_getattr_also_in_copies() -> None:
    model = zero_filters(asfp.create_model("resnet20")).eval()
    x = torch.randn(1, 3, 32, 32)
    small = asfp.compact(model, x)
    expected, calls = small(x), called(small)
    assert calls >= sum(node.op == "call_module" for node in small.graph.nodes)
    assert "getattr(" not in small.code
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert called(twin) == calls
        assert torch.equal(twin(x), expected)
    again = fx.symbolic_trace(small)
    assert torch.equal(again(x), expected)
    layers = {name for name, m in small.named_modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d, nn.Linear))}
    assert layers <= {str(n.target) for n in again.graph.nodes if n.op == "call_module"}


def test_a_layer_that_is_exchanged_is_the_one_that_runs() -> None:
    model = zero_filters(asfp.create_model("torchvision:mobilenet_v2")).eval()
    x = torch.randn(1, 3, 32, 32)
    small = asfp.compact(model, x)
    small.set_submodule("classifier.1", nn.Identity())
    assert small(x).shape == (1, 896)
    small.get_submodule("classifier")._modules["1"] = nn.Flatten(0)
    assert small(x).shape == (896,)


def test_additions_write_in_place_where_the_original_did() -> None:
    model = zero_filters(asfp.create_model("torchvision:resnet18")).eval()
    small = asfp.compact(model, torch.randn(1, 3, 64, 64), layout="zeros")
    targets = [node.target for node in small.graph.nodes]
    assert targets.count(operator.iadd) == 8
    assert operator.add not in targets
