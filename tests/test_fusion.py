"""Fused models compute what they were made from: which patterns are fused and which are not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from networks import zero_filters
from random_networks import build
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import asfp
from asfp.compaction.layout import LAYOUTS
from asfp.fused_conv import FusedConv, FusedPool
from asfp.fusion import fell_back, fuse, take_faster

RELUS: list[Callable[[Tensor], Tensor]] = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    F.relu,
    lambda x: F.relu(x, inplace=True),
    torch.relu,
    torch.relu_,
    lambda x: x.relu(),
    lambda x: x.relu_(),
]
ADDITIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    operator.add,
    operator.iadd,
    torch.add,
    lambda a, b: a.add(b),
    lambda a, b: a.add_(b),
]
OVERWRITE = (1, 4)
"""Which of these write into their first operand."""


def assert_same(model: nn.Module, fused: nn.Module, *inputs: Tensor) -> None:
    """Within 1e-12 of the range in float64, 1e-6 in float32."""
    for x in inputs:
        with torch.no_grad():
            pairs = zip(pytree.tree_leaves(model(x.clone())), pytree.tree_leaves(fused(x.clone())), strict=True)
            for expected, found in pairs:
                close = (1e-12 if expected.dtype == torch.float64 else 2e-6) * max(1.0, float(expected.abs().max()))
                torch.testing.assert_close(found, expected, rtol=0, atol=close, equal_nan=True)


def count(model: nn.Module, *kinds: type[nn.Module]) -> int:
    return sum(isinstance(m, kinds) for m in model.modules())


def functions(model: nn.Module) -> list[Any]:
    assert isinstance(model, fx.GraphModule)
    return [node.target for node in model.graph.nodes if node.op in ("call_function", "call_method")]


def network(name: str) -> nn.Module:
    options = {"init_weights": False} if name == "googlenet" else {}
    torch.manual_seed(0)
    model = zero_filters(torchvision.models.get_model(name, weights=None, **options))
    return model.eval()


# -- whole networks


@pytest.mark.parametrize(
    ("name", "fused", "plain"),
    [
        ("resnet18", 17, 3),
        ("resnet50", 49, 4),
        ("resnext50_32x4d", 49, 4),
        ("mobilenet_v2", 1, 51),  # ReLU6
        ("densenet121", 59, 61),
        ("googlenet", 57, 0),
        ("squeezenet1_1", 26, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_networks_of_torchvision(name: str, fused: int, plain: int, dtype: torch.dtype) -> None:
    model = network(name).to(dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(2, 3, 64, 64, dtype=dtype)
    done = fuse(model, x[:1])
    assert (count(done, FusedConv), count(done, nn.Conv2d)) == (fused, plain)
    assert_same(model, done, x, torch.randn(1, 3, 96, 64, dtype=dtype))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(m, (FusedConv, FusedPool)) for m in model.modules())
    pools = [m for m in model.modules() if isinstance(m, nn.MaxPool2d)]
    assert count(done, FusedPool) == sum(not m.ceil_mode for m in pools)
    assert fell_back(done) == {}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_residual_network_has_no_relu_and_no_addition_left(name: str) -> None:
    done = fuse(network(name), torch.zeros(1, 3, 64, 64))
    assert functions(done) == [torch.flatten]
    assert count(done, nn.ReLU, nn.BatchNorm2d) == 0
    assert all(m.bias is None for m in done.modules() if isinstance(m, nn.Conv2d))  # their partners add it


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize("name", ["resnet20", "torchvision:resnet18", "torchvision:resnet50"])
def test_compact_networks(name: str, selection: str, layout: str) -> None:
    size = 32 if name == "resnet20" else 64
    model = zero_filters(asfp.create_model(name), rate=0.0).double().eval()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    asfp.SoftPruner(model, 0.4, 1, selection=selection, example_inputs=x).step(1)
    small = asfp.compact(model, x[:1], layout=layout, check=False).eval()
    done = fuse(small, x[:1])
    assert count(done, FusedConv) > 8
    assert_same(small, done, x, torch.randn(1, 3, size + 7, size, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (25, 50, 75))])
def test_random_networks(start: int) -> None:
    for seed in range(start, start + 25):
        net, x = build(seed)
        assert_same(net, fuse(net, x), x, torch.randn(3, *x.shape[1:], dtype=x.dtype))
        small = asfp.compact(net, x, layout=list(LAYOUTS)[seed % len(LAYOUTS)], check=False).eval()
        assert_same(small, fuse(small, x), x, torch.randn(3, *x.shape[1:], dtype=x.dtype))


# -- patterns


class Sum(nn.Module):
    """relu(a(x) + b(y)), by one of the ways to write it; `b` may be no convolution, or be read once more."""

    def __init__(self, relu: int, add: int, *, swap: bool = False, second: bool = True, read: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 1) if second else nn.MaxPool2d(1)
        self.relu, self.add, self.swap, self.read = RELUS[relu], ADDITIONS[add], swap, read

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.b, nn.MaxPool2d):
            b, a = self.b(x)[:, :4].contiguous().sigmoid(), self.a(x)
        else:
            a, b = self.a(x), self.b(x)
        once_more = {"a": a, "b": b}[self.read].exp() if self.read else x
        result = self.relu(self.add(b, a) if self.swap else self.add(a, b))
        return result, once_more


@given(
    st.integers(0, len(RELUS) - 1),
    st.integers(0, len(ADDITIONS) - 1),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "a", "b"]),
)
def test_every_way_to_write_a_sum(relu: int, add: int, swap: bool, second: bool, read: str) -> None:
    model = Sum(relu, add, swap=swap, second=second, read=read).double().eval()
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    done = fuse(model, x)
    assert_same(model, done, x)
    overwritten = add in OVERWRITE
    if second and not (overwritten and read):
        assert count(done, FusedConv) == 1
        assert count(done, nn.ReLU) == 0
    if not second and (read == "a" or (overwritten and swap)):
        assert count(done, FusedConv) == 0


@pytest.mark.parametrize("relu", range(len(RELUS)))
def test_every_way_to_write_relu(relu: int) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.relu = nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), RELUS[relu]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.relu(self.norm(self.conv(x)))
            return y

    model = zero_filters(Plain(), rate=0.0).double().eval()
    done = fuse(model, torch.zeros(1, 8, 5, 5, dtype=torch.float64))
    assert [type(m) for m in done.children()] == [FusedConv]
    assert_same(model, done, torch.randn(3, 8, 9, 6, dtype=torch.float64))


class Write(nn.Module):
    """One line of code over two convolutions."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.line = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), forward
        self.same = nn.Conv2d(8, 8, 3, padding="same")
        self.reflect = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.scale = nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.line(self, x)


def overwrites_the_input(m: Any, x: Tensor) -> Tensor:
    y, z = m.a(x), x.sigmoid_()
    return (y + z).relu()


def overwrites_a_view(m: Any, x: Tensor) -> Tensor:
    y = m.b(x)
    z = y.view(y.shape)
    z += m.a(x)
    return z.relu() + y


def overwrites_what_is_read_later(m: Any, x: Tensor) -> Tensor:
    y = m.b(x).sigmoid()
    z = y
    z += m.a(x)
    return z.relu_() + y


@pytest.mark.parametrize(
    ("line", "fused"),
    [
        (lambda m, x: (y := m.a(x), y.relu())[1] + y, 0),  # read twice
        (lambda m, x: (y := m.a(x) + x).relu() + y, 0),  # the sum is read twice
        (lambda m, x: (m.a(x) + m.scale).relu(), 0),  # broadcast
        (lambda m, x: (m.a(x) + x.mean((2, 3), keepdim=True)).relu(), 0),
        (lambda m, x: (m.a(x) + 1.0).relu(), 0),
        (lambda m, x: torch.add(m.a(x), x, alpha=2).relu(), 0),
        (lambda m, x: (y := m.a(x), (y + y).relu())[1], 0),
        (lambda m, x: m.same(x).relu() + m.reflect(x).relu(), 0),
        (lambda m, x: (m.a(x) - x).relu(), 0),
        (lambda m, x: F.relu6(m.a(x)), 0),
        (overwrites_the_input, 0),
        (overwrites_a_view, 0),
        (overwrites_what_is_read_later, 0),
        (lambda m, x: (m.same(x) + m.a(x)).relu(), 1),
        (lambda m, x: m.a(m.a(m.a(x).relu()).relu()) + x, 2),  # one layer, three times
        (lambda m, x: (m.a(x) + m.a(x.exp())).relu(), 1),
        (lambda m, x: m.b(m.a(x).relu() + m.b(x).relu()).relu(), 3),
    ],
)
def test_what_is_fused_and_what_is_not(line: Callable[[Any, Tensor], Any], fused: int) -> None:
    model = Write(line).double().eval()
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    done = fuse(model, x)
    assert count(done, FusedConv) == fused
    assert_same(model, done, x, torch.randn(1, 8, 9, 5, dtype=torch.float64))


class OwnPool(nn.MaxPool2d):
    pass


POOLS: list[tuple[Callable[[], nn.Module], bool]] = [
    (lambda: nn.MaxPool2d(3, 2, 1), True),
    (lambda: nn.MaxPool2d((2, 3), [2, 1], (1, 0)), True),
    (lambda: nn.MaxPool2d((3,), stride=[2], padding=(1,)), True),  # type: ignore[arg-type]
    (lambda: nn.MaxPool2d(3, stride=()), False),  # type: ignore[arg-type]
    (lambda: nn.MaxPool2d(np.int64(3)), False),  # type: ignore[arg-type]
    (lambda: nn.MaxPool2d(3, dilation=2), False),
    (lambda: nn.MaxPool2d(3, ceil_mode=True), False),
    (lambda: OwnPool(3), False),
]


@pytest.mark.parametrize(("pool", "fused"), POOLS)
def test_which_pools_are_fused(pool: Callable[[], nn.Module], fused: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=(2,), padding=[1]), nn.ReLU(), pool()).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 3, 31, 26)
    done = fuse(model, x[:1])
    assert (count(done, FusedConv), count(done, FusedPool)) == (1, fused)
    assert_same(model, done, x, torch.randn(1, 3, 24, 40))
    take_faster(done, x)  # nothing on a CPU
    assert_same(copy.deepcopy(model), copy.deepcopy(done), x)


def test_pools_with_hooks_and_pools_that_are_shared() -> None:
    pool = nn.MaxPool2d(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Conv2d(8, 8, 3), pool).eval()
    x = torch.randn(2, 3, 31, 26)
    assert count(fuse(model, x), FusedPool) == 2
    assert_same(model, fuse(model, x), x)
    pool.register_forward_hook(lambda *given: given[2] + 1)
    assert count(fuse(model, x), FusedPool) == 0
    assert_same(model, fuse(model, x), x)


def test_what_has_the_same_shape_in_the_example_only() -> None:
    model = Write(lambda m, x: (m.a(x) + x.mean((2, 3), keepdim=True)).relu()).double().eval()
    done = fuse(model, torch.zeros(1, 8, 1, 1, dtype=torch.float64))
    assert count(done, FusedConv) == 1
    assert_same(model, done, torch.randn(2, 8, 6, 6, dtype=torch.float64))


def test_hooks_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU())
    model[0].register_forward_hook(lambda m, given, y: 2 * y)
    x = torch.randn(1, 8, 6, 6)
    assert_same(model, fuse(model, x), x)


def test_what_cannot_be_traced_comes_back_as_it_is() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu() if x.sum().item() > 0 else self.conv(x)

    x = torch.randn(1, 8, 6, 6)
    done = fuse(Branch(), x)
    assert isinstance(done, Branch)
    assert not done.training


class Named(nn.Module):
    """An activation, and an addition, by the names of torch's methods."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.relu, self.add = nn.Conv2d(3, 8, 3), activation, Difference()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(x))
        return torch.relu(self.add(self.conv(x), y))


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


@pytest.mark.parametrize(
    "activation", [nn.LeakyReLU(), nn.SiLU(), nn.GELU(), nn.ReLU6(), nn.PReLU(), nn.ReLU()], ids=str
)
def test_a_module_by_the_name_of_a_method_is_what_it_is(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model = Named(activation).eval()
    x = 9 * torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fuse(model, x)(x), model(x))


def test_a_hook_on_a_relu_is_kept() -> None:
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 8, 3))
    model.add_module("relu", nn.ReLU())
    model.relu.register_forward_hook(lambda module, args, result: result + 1)  # type: ignore[union-attr, operator]
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(fuse(model.eval(), x)(x), model(x))


class Viewed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.one(x)
        view = a.flatten(2)
        a += self.two(x)
        return torch.relu(a), view * 1


def test_a_view_sees_what_is_written_in_place() -> None:
    torch.manual_seed(0)
    model, x = Viewed().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for found, wanted in zip(fuse(model, x)(x), model(x), strict=True):
            torch.testing.assert_close(found, wanted)
