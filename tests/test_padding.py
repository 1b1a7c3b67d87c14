"""Branches that constants surround are padded with zeros, and compute the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import asfp
from asfp.compaction.layers import BorderBias, Surround
from asfp.deployment.folding import fold_batch_norms
from asfp.deployment.padding import pad_with_zeros

WIDTH, OWN = 12, 7


def count(model: nn.Module, target: Any) -> int:
    assert isinstance(model, fx.GraphModule)
    return sum(node.target is target for node in model.graph.nodes)


class Net(nn.Module):
    """Two convolutions of one image, the first of which is surrounded by constants; `way` says what is added to it."""

    def __init__(self, way: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.branch, self.other = nn.Conv2d(3, OWN, 3, padding=1), nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        before, after = torch.randn(1, 2, 1, 1), torch.randn(1, WIDTH - OWN - 2, 1, 1)
        self.around, self.again = Surround(before, after, 1), Surround(after, before, 1)
        self.column = nn.Parameter(torch.randn(1, WIDTH, 1, 1))
        self.border = BorderBias(torch.randn(WIDTH, 3, 3), (1, 1), (1, 1), (1, 1))
        self.relu, self.narrow = nn.ReLU(inplace=True), nn.Conv2d(3, OWN, 1)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x, self.around(self.branch(x)))


def to_a_convolution(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(net.other(x) + b)


def to_a_corrected_convolution(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return torch.add(b, net.border(net.other(x), x)).relu()


def to_a_sum(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return (net.other(x) + F.relu(net.other(-x)) + net.border(torch.sigmoid(b), x)) * 0.5 + b


def to_a_sum_with_a_convolution(net: Net, x: Tensor, b: Tensor) -> Tensor:
    total = x.mean(1, keepdim=True).expand(-1, WIDTH, -1, -1).sin() + net.other(x)
    return net.relu(b + total)


def to_an_activation(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(F.relu(net.other(x)) + b)


def both_surrounded(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(net.again(net.narrow(x)) + b)


def to_what_others_read(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.other(x)
    return net.relu(y + b) + y


def to_what_is_called_twice(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(net.other(x) + b) + net.other(2 * x).exp()


def to_itself(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(b + b)


def to_one_value_a_channel(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(net.other(x).mean((2, 3), keepdim=True) + b)


def with_a_factor(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return torch.add(net.other(x), b, alpha=2)


def read_twice(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.relu(net.other(x) + b) * b


def of_what_others_read(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.narrow(x)
    return net.relu(net.other(x) + net.again(y)) * y.mean() + b.mean()


def not_added(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.other(x) * b


def overwritten(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.other(x) + b
    y[:, 1] = 0.0
    return y


INTO_A_BIAS = (to_a_convolution, to_a_corrected_convolution, to_a_sum_with_a_convolution, of_what_others_read)
ADDED = (to_an_activation, both_surrounded, to_what_others_read, to_what_is_called_twice)
LEFT = (
    *(to_itself, to_one_value_a_channel, with_a_factor, read_twice, not_added, to_a_sum, overwritten),
)  # fmt: skip


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("way", [*INTO_A_BIAS, *ADDED, *LEFT], ids=lambda way: way.__name__)
def test_it_computes_the_same_and_joins_nothing_that_can_be_added(way: Any, always: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(way), torch.randn(2, 3, 6, 7, dtype=torch.float64)
    folded = fold_batch_norms(net, x)
    joined, added = count(folded, torch.cat), count(folded, operator.add)
    model = pad_with_zeros(folded, always=always)
    for case in (x, torch.randn(3, 3, 9, 8, dtype=torch.float64)):
        with torch.no_grad():
            torch.testing.assert_close(model(case.clone()), net(case.clone()), rtol=1e-12, atol=1e-12)
    gone = joined - (way is of_what_others_read) if way in INTO_A_BIAS or (always and way in ADDED) else 0
    assert count(model, torch.cat) == joined - gone
    assert count(model, operator.add) == added + (always and way in ADDED)


@pytest.mark.parametrize("hooked", ["other", "border"])
def test_layers_with_hooks_keep_their_bias(hooked: str) -> None:
    torch.manual_seed(0)
    net, x = Net(to_a_corrected_convolution), torch.randn(2, 3, 6, 7, dtype=torch.float64)
    net.get_submodule(hooked).register_forward_hook(lambda module, args, result: result * 2)
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(pad_with_zeros(fold_batch_norms(net, x), always=True)(x), expected)


def test_names_of_the_model_are_left_alone() -> None:
    torch.manual_seed(0)
    net, x = Net(to_an_activation), torch.randn(2, 3, 6, 7, dtype=torch.float64)
    net.fill = nn.Identity()
    wrapped = nn.Sequential(net)
    net.way = lambda net, x, b: net.fill(to_an_activation(net, x, b))
    model = pad_with_zeros(fold_batch_norms(wrapped, x), always=True)
    with torch.no_grad():
        torch.testing.assert_close(model(x), wrapped(x))


@pytest.mark.parametrize("fixed", [False, True])
def test_an_openvino_file_joins_nothing(tmp_path: Path, fixed: bool) -> None:
    openvino = pytest.importorskip("openvino")
    torch.manual_seed(0)
    net = asfp.create_model("torchvision:resnet18", num_classes=10).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, -0.2, 0.2)
    x = torch.randn(1, 3, 64, 64)
    asfp.SoftPruner(net, 0.3, 1, example_inputs=x).step(1)
    small = asfp.compact(net, x, layout="auto")
    assert sum(isinstance(module, Surround) for module in small.modules()) > 4
    assert asfp.export_openvino(small, tmp_path / "net.xml", x, fixed=fixed).relative < 1e-5
    operations = [op.get_type_name() for op in openvino.Core().read_model(tmp_path / "net.xml").get_ordered_ops()]
    assert "Concat" not in operations
    assert "Pad" in operations
