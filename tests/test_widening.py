"""Streams of one width compute what those with gathers, padding and corrections do, for every size."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_networks import build
from torch import Tensor, fx, nn

import asfp
from asfp.compaction.layers import BorderBias, Pick, Widen
from asfp.deployment.embeds import embed_of
from asfp.deployment.filling import fill_branches
from asfp.deployment.folding import convolve_borders, fold_batch_norms
from asfp.deployment.padding import pad_with_zeros
from asfp.deployment.pieces import keep_in_pieces
from asfp.deployment.widening import widen_streams
from asfp.deployment.widths import ONNXRUNTIME, OPENVINO, PRICES, Kernels

DEAR = replace(PRICES, gather=1e12, pad=1e12, border=1e12)
"""Whatever can be computed in its place is."""
ANY = Kernels()
EIGHTS = Kernels(multiple=8, depthwise=16, most=9.0, most_beside_depthwise=9.0)
"""Everything is filled up."""
WIDTH, OWN = 12, 7


def moves(model: nn.Module) -> int:
    """Embeds; those one behind another are one."""
    assert isinstance(model, fx.GraphModule)
    embeds = {node: found for node in model.graph.nodes if (found := embed_of(model, node)) is not None}
    modules = [module for module in model.modules() if isinstance(module, (Pick, Widen))]
    return len(embeds.keys() - {part for found in embeds.values() for part in found.inner}) + len(modules)


def borders(model: nn.Module) -> int:
    return sum(isinstance(module, BorderBias) for module in model.modules())


def difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """The largest, relative to the largest output; inputs are given as copies, for who writes into them."""
    with torch.no_grad():
        found = [torch.utils._pytree.tree_leaves(model(x.clone())) for model in (one, other)]
    assert [a.shape for a in found[0]] == [b.shape for b in found[1]]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in zip(*found, strict=True))


def widened(net: nn.Module, x: Tensor, kernels: Kernels = ANY, prices: Any = DEAR) -> fx.GraphModule:
    """The folded network with wide streams, seen equal to the network at the example's size and at another."""
    model = widen_streams(fold_batch_norms(net, x), kernels, prices=prices)
    assert isinstance(model, fx.GraphModule)
    larger = torch.randn(3, x.shape[1], x.shape[2] + 3, x.shape[3] + 5, dtype=x.dtype)
    for case in (x, larger):
        assert difference(net, model, case) < 1e-11
    return model


class Net(nn.Module):
    """A stem, and a branch that reads it and is put among constants; `way` says what is done with both."""

    def __init__(self, way: Callable[[Net, Tensor, Tensor], Any], fill: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.way, self.relu, self.gap = way, nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.branch, self.second = nn.Conv2d(WIDTH, OWN, 3, padding=1), nn.Conv2d(WIDTH, OWN, 1, bias=False)
        self.inner = nn.Conv2d(OWN, OWN, 3, padding=1)
        self.depthwise = nn.Conv2d(OWN, OWN, 3, padding=1, groups=OWN)
        self.grouped = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2)
        places = torch.full((WIDTH,), OWN)
        places[torch.randperm(WIDTH)[:OWN]] = torch.randperm(OWN)
        places[places == OWN] = OWN + torch.arange(WIDTH - OWN)
        constants = fill * (torch.rand(1, WIDTH - OWN, 1, 1) + 0.5)
        self.widen, self.pick = Widen(places, constants, 1), Pick(torch.randperm(WIDTH)[:OWN], 1)
        self.again = Widen(places.flip(0), constants.flip(1), 1)
        self.last = nn.Conv2d(WIDTH, 5, 3, 2, 1)
        self.double().eval()

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        return self.way(self, x, self.branch(torch.sigmoid(x)))


def added(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(x + net.widen(b)))


def added_in_place(net: Net, x: Tensor, b: Tensor) -> Tensor:
    wide = net.widen(b)
    wide += x
    return net.last(net.relu(wide))


def twice(net: Net, x: Tensor, b: Tensor) -> Tensor:
    x = net.relu(x + net.widen(b))
    return net.last(net.relu(net.again(net.second(x)) + x))


def two_branches(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(net.widen(b) + net.again(net.second(x))))


def through_a_depthwise_layer(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(x + net.widen(net.depthwise(torch.relu(b))))


def padded_and_joined(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(x + F.pad(b, (0, 0, 0, 0, 2, WIDTH - OWN - 2))))


def picked(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """Channels that leave: the branch reads some of the stream's."""
    y = net.relu(x + net.widen(b))
    return net.last(y + net.widen(net.inner(net.pick(y))))


def cut(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + net.widen(b))
    return net.last(y + net.widen(net.inner(y[:, 2 : OWN + 2])))


def pooled(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.gap(net.relu(F.relu(x) + net.widen(b))).flatten(1)


def seen(net: Net, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Others see the branch too: it is picked out of the wide one."""
    y = net.relu(x + net.widen(b))
    return net.last(y), torch.sort(b, 1).values.mean((2, 3))


def gated(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + net.widen(b))
    return net.last(y * torch.sigmoid(net.grouped(y)))


WIDENED = (added, twice, two_branches, through_a_depthwise_layer, padded_and_joined, picked, cut)
WIDENED += (pooled, seen, gated)


@pytest.mark.parametrize("kernels", [ANY, EIGHTS, Kernels(multiple=4, most=9.0)], ids=["any", "8", "4"])
@pytest.mark.parametrize("fill", [0.0, 0.7, -0.7])
@pytest.mark.parametrize("way", WIDENED, ids=lambda way: way.__name__)
def test_branches_are_computed_where_they_belong(way: Any, fill: float, kernels: Kernels) -> None:
    net, x = Net(way, fill), torch.randn(2, 3, 8, 9, dtype=torch.float64)
    state = torch.get_rng_state()
    folded = fold_batch_norms(net, x)
    before = moves(folded)
    widen_streams(folded, kernels, prices=DEAR)
    assert torch.equal(torch.get_rng_state(), state)
    after = moves(widened(net, x, kernels))
    if way in (seen, gated, pooled):  # what is no convolution gets its own channels out of the wide stream
        assert after <= before
    else:
        assert after == 0 < before


def after_an_activation(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """Below zero nothing comes out of a ReLU: it could not give these constants."""
    y = net.widen(F.relu(b))
    return net.last(x + y)


@pytest.mark.parametrize(("fill", "left"), [(0.0, 0), (0.7, 0), (-0.7, 1)])
def test_constants_that_cannot_be_had_are_joined(fill: float, left: int) -> None:
    net, x = Net(after_an_activation, fill), torch.randn(2, 3, 8, 9, dtype=torch.float64)
    assert moves(widened(net, x)) == left


def no_convolution(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(x + net.widen(torch.sort(b, 1).values))


def several_readers(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """A module that is called twice reads values that are not both the stream's."""
    return net.last(net.relu(x + net.widen(b))) + net.last(x.exp())


def in_two_orders(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """The same channels of one stream at other places than before."""
    y = net.relu(x + net.widen(b))
    return net.last(y + net.widen(net.depthwise(net.pick(y))))


def written(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = x + net.widen(b)
    y[:, 1] = 0.0
    return net.last(y)


def weighed(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(torch.add(x, net.widen(b), alpha=2))


def stretched(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """One value a channel is added to an image."""
    return net.last(x + net.widen(net.gap(b)))


LEFT = (added_in_place, no_convolution, several_readers, in_two_orders, written, weighed, stretched)


@pytest.mark.parametrize("way", LEFT, ids=lambda way: way.__name__)
@pytest.mark.parametrize("fill", [0.0, 0.7])
def test_what_cannot_be_widened_computes_the_same(way: Any, fill: float) -> None:
    widened(Net(way, fill), torch.randn(2, 3, 8, 9, dtype=torch.float64), EIGHTS)


@pytest.mark.parametrize("name", ["relu", "stem", "branch", "last", "second", "widen"])
def test_modules_with_hooks_are_called(name: str) -> None:
    net = Net(twice, 0.3)
    net.get_submodule(name).register_forward_hook(lambda module, args, result: result * 2)
    widened(net, torch.randn(2, 3, 8, 9, dtype=torch.float64), EIGHTS)


def test_a_network_that_cannot_be_read_is_left() -> None:
    conv = nn.Conv2d(3, 4, 1)
    assert widen_streams(conv, EIGHTS) is conv


def test_moving_stays_where_it_is_cheaper() -> None:
    x = torch.randn(1, 3, 8, 9, dtype=torch.float64)
    cheap = replace(PRICES, gather=0.0, pad=0.0, border=0.0, step=0.0)
    assert moves(widened(Net(twice), x, prices=cheap)) == moves(fold_batch_norms(Net(twice), x)) > 0


@given(
    width=st.integers(1, 5000),
    multiple=st.integers(1, 64),
    depthwise=st.integers(1, 64),
    most=st.floats(1.0, 4.0),
    passes=st.booleans(),
    beside=st.booleans(),
)
def test_a_width_is_whole_or_left(
    width: int, multiple: int, depthwise: int, most: float, passes: bool, beside: bool
) -> None:
    kernels = Kernels(multiple, depthwise, most=most, most_beside_depthwise=most)
    found, n = kernels.width(width, depthwise=passes, beside_depthwise=beside), depthwise if passes else multiple
    assert found == width or (found % n == 0 and width < found < width + n)
    assert kernels.width(16 * width, depthwise=passes, beside_depthwise=beside) % n == 0


NAMES = ("resnet20", "vgg16", "torchvision:resnet18")
OTHERS = (
    "torchvision:resnet50",
    *("torchvision:mobilenet_v2", "torchvision:mobilenet_v3_small", "torchvision:densenet121"),
    *("torchvision:shufflenet_v2_x0_5", "torchvision:regnet_y_400mf", "torchvision:vgg11_bn"),
    *("torchvision:efficientnet_b0", "torchvision:mnasnet0_5", "torchvision:squeezenet1_1", "timm:mobilenetv2_100"),
)


def small_of(name: str, selection: str, constants: bool, layout: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if ":" in name and name.startswith("timm"):
        pytest.importorskip("timm")
    net = asfp.create_model(name, **({"num_classes": 10} if ":" in name else {})).double().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            if constants:
                nn.init.uniform_(module.bias, -0.3, 0.3)
    size = 64 if ":" in name else 32
    x = torch.randn(1, 3, size, size, dtype=torch.float64)
    asfp.SoftPruner(net, 0.4, 1, selection=selection, example_inputs=x).step(1)
    return asfp.compact(net, x, layout=layout), x


def check(name: str, selection: str, constants: bool, layout: str) -> None:
    small, x = small_of(name, selection, constants, layout)
    folded = fold_batch_norms(small, x)
    larger = torch.randn(2, 3, x.shape[2] + 32, x.shape[3] + 16, dtype=x.dtype)
    for kernels in (ONNXRUNTIME, OPENVINO):
        for prices in (PRICES, DEAR):
            model = widen_streams(copy.deepcopy(folded), kernels, prices=prices)
            assert moves(fill_branches(model, kernels)) <= moves(folded)
            assert max(difference(small, model, x), difference(small, model, larger)) < 1e-10


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize("name", NAMES)
def test_networks_compute_the_same(name: str, selection: str, constants: bool) -> None:
    check(name, selection, constants, "least")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["least", "auto", "zeros"])
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_compute_the_same(name: str, selection: str, constants: bool, layout: str) -> None:
    check(name, selection, constants, layout)


def seeds(count: int, first: int = 0) -> list[Any]:
    return [pytest.param(seed, id=str(seed)) for seed in range(first, first + count)]


ALL = [Kernels(n, m, n, most=9.0, most_beside_depthwise=9.0) for n, m in ((1, 1), (2, 4), (4, 4), (8, 16))]
PRICED = [PRICES, DEAR, replace(PRICES, gather=math.inf, pad=math.inf, border=math.inf)]


def check_seed(seed: int) -> None:
    net, x = build(seed)
    r = random.Random(seed)
    small = asfp.compact(net, x, layout=r.choice(["least", "auto", "zeros"]))
    kernels, prices = r.choice([*ALL, ONNXRUNTIME]), r.choice(PRICED)
    steps: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: widen_streams(model, kernels, batch=r.choice([1, 8]), prices=prices),
        lambda model: fill_branches(model, kernels),
        *r.sample([keep_in_pieces, convolve_borders], r.randint(0, 2)),
    ]
    r.shuffle(steps)
    model = fold_batch_norms(small, x)
    for step in (*steps, lambda model: pad_with_zeros(model, always=r.random() < 0.5)):
        model = step(model)
    assert difference(small, model, x) < 1e-10
    larger = torch.randn(3, 3, x.shape[2] + 4, x.shape[3] + 8, dtype=x.dtype)
    try:
        small(larger)
    except RuntimeError:
        return  # networks for one size only
    assert difference(small, model, larger) < 1e-10


@pytest.mark.parametrize("seed", seeds(40))
def test_random_networks(seed: int) -> None:
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1500, 1000))
def test_many_random_networks(seed: int) -> None:
    check_seed(seed)


class Blocks(nn.Module):
    """Residual blocks, each of which keeps other channels, with shifts that make constants of zero filters."""

    def __init__(self, width: int, kinds: list[str], kept: list[list[int]], shifts: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kinds, self.pool = kinds, nn.MaxPool2d(2, ceil_mode=True)
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.first = nn.ModuleList(nn.Conv2d(width, 6, 3, padding=1) for _ in kinds)
        self.last = nn.ModuleList(nn.Conv2d(6, width, 3, padding=1, bias=False) for _ in kinds)
        self.direct = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in kinds)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in kinds)
        self.head = nn.Conv2d(width, 4, 3, padding=1)
        for norm in (self.norm, *self.norms):
            if shifts:
                nn.init.uniform_(norm.bias, -1, 1)
                nn.init.uniform_(norm.running_mean, -1, 1)
        with torch.no_grad():
            for i, conv in enumerate((self.stem, *self.last, *self.direct)):
                own = kept[i % len(kept)]
                conv.weight[[c for c in range(width) if c % 7 not in own]] = 0.0
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        layers = zip(self.kinds, self.first, self.last, self.direct, self.norms, strict=True)
        for kind, first, last, direct, norm in layers:
            branch = norm(direct(x) if kind in ("direct", "shown") else last(F.relu(first(x))))
            x = branch + x if kind == "turned" else x + branch
            x = x + torch.sort(branch, 1).values.mean((1, 2, 3), keepdim=True) if kind == "shown" else x
            x = x if kind == "linear" else F.hardswish(x) if kind == "curved" else F.relu(x)
            x = self.pool(x) if kind == "pooled" else x * torch.sigmoid(x) if kind == "gated" else x
        made: Tensor = self.head(x)
        return made


KINDS = ("plain", "turned", "linear", "pooled", "gated", "curved", "direct", "shown")
SETS = st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(7, 20),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    kept=st.lists(SETS, min_size=1, max_size=3),
    shifts=st.booleans(),
    seed=st.integers(0, 99),
    kernels=st.sampled_from(ALL),
    prices=st.sampled_from(PRICED[:2]),
)
def test_random_streams(
    width: int, kinds: list[str], kept: list[list[int]], shifts: bool, seed: int, kernels: Kernels, prices: Any
) -> None:
    net = Blocks(width, kinds, kept, shifts, seed)
    x = torch.randn(1, 3, 9, 11, dtype=torch.float64)
    widened(asfp.compact(net, x), x, kernels, prices)


def test_constants_are_carried_by_a_channel() -> None:
    """What padding lacks of the constants that were cut out of a stream is a kernel's job, where it costs less."""
    net = Blocks(16, ["plain", "plain", "plain"], [[0, 1, 2], [2, 3, 4], [0, 5]], True, 0)
    x = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    small = asfp.compact(net, x)
    folded = fold_batch_norms(small, x)
    assert borders(folded) > 1
    assert moves(folded) > 1
    model = widened(small, x)
    assert moves(model) == 0
    assert borders(model) == 0


def widths(model: nn.Module) -> dict[str, int]:
    return {name: module.out_channels for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}


class Direct(nn.Module):
    """Layers that read the stream to which they are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.convs = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in "ab"),
        )
        self.last = nn.Conv2d(8, 4, 3, padding=1)
        with torch.no_grad():
            for i, conv in enumerate((self.stem, *self.convs)):
                conv.weight[2 * i : 2 * i + 4] = 0.0  # type: ignore[index, operator]
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for conv in self.convs:
            x = F.relu(x + conv(x))
        made: Tensor = self.last(x)
        return made


def test_layers_that_read_the_stream_to_which_they_are_added() -> None:
    net, x = Direct(), torch.randn(1, 3, 9, 11, dtype=torch.float64)
    small = asfp.compact(net, x)
    folded = fold_batch_norms(small, x)
    assert borders(folded) > 0
    assert moves(folded) > 0
    model = widened(small, x)
    assert (borders(model), moves(model)) == (0, 0)


class TwoPads(nn.Module):
    """An addition of what no convolution makes, whose width something else needs as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(3, 30, 3, padding=1), nn.Conv2d(3, 30, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(30, 30, 3, 1, 1), nn.Conv2d(30, 5, 3, padding=1)
        with torch.no_grad():
            for conv, first in ((self.one, 0), (self.two, 1)):
                conv.weight[first::5] = 0.0
                conv.bias[first::5] = 0.0  # type: ignore[index]
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(F.avg_pool2d(self.one(x), 3, 1, 1) + F.avg_pool2d(self.two(x), 3, 1, 1))
        made: Tensor = self.last(F.relu(y + self.up(y)))
        return made


@pytest.mark.parametrize("kernels", [ANY, EIGHTS], ids=["any", "8"])
def test_a_stream_is_looked_at_once(kernels: Kernels) -> None:
    """Though it would like another width, which it cannot have."""
    net, x = TwoPads(), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    for prices in (PRICES, DEAR):
        widened(asfp.compact(net, x), x, kernels, prices)


class OfItself(nn.Module):
    """A stream to which its own channels are added, in another order or shifted."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shifts, self.stem, self.two = shifts, nn.Conv2d(3, 30, 3, padding=1), nn.Conv2d(30, 30, 3, padding=1)
        self.three, self.last = nn.Conv2d(30, 30, 3, padding=1, bias=False), nn.Conv2d(30, 5, 3, padding=1)
        self.register_buffer("order", torch.arange(29, -1, -1))
        with torch.no_grad():
            for i, conv in enumerate((self.stem, self.two, self.three)):
                conv.weight[i::7] = 0.0
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(x + self.two(x))
        if self.shifts:
            z = y + F.pad(y[:, 4:], (0, 0, 0, 0, 0, 4))
            y = F.relu(z + self.three(z))
        else:
            y = y + y.index_select(1, self.order)  # type: ignore[arg-type]
        made: Tensor = self.last(y)
        return made


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("kernels", [ANY, EIGHTS], ids=["any", "8"])
def test_a_stream_that_is_added_to_itself_in_another_order(shifts: bool, kernels: Kernels) -> None:
    net, x = OfItself(shifts), torch.randn(1, 3, 16, 16, dtype=torch.float64)
    for prices in (PRICES, DEAR):
        widened(asfp.compact(net, x), x, kernels, prices)


def test_what_is_made_of_an_embed_that_was_made_anew() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.b = nn.Conv2d(3, 30, 3, padding=1), nn.Conv2d(3, 30, 3, padding=1, bias=False)
            self.one, self.last = nn.Conv2d(18, 30, 3, padding=1), nn.Conv2d(30, 5, 3, padding=1)
            self.double().eval()

        def forward(self, x: Tensor) -> Tensor:
            y = F.avg_pool2d(F.relu(self.stem(x)), 3, 1, 1)[:, 6:24]
            made: Tensor = self.last(F.relu(F.pad(y, (0, 0, 0, 0, 0, 12)) + self.one(y) + self.b(x)))
            return made

    for kernels in (ANY, EIGHTS):
        widened(Cut(), torch.randn(1, 3, 16, 16, dtype=torch.float64), kernels)


def test_an_axis_that_is_not_of_channels_stays_open() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
            self.double().eval()

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.one(x)).permute(0, 2, 3, 1)
            for _ in range(4):
                y = F.relu(F.pad(y, (0, 0, 0, 0, 1, 0)))
            made: Tensor = self.two(y.permute(0, 3, 1, 2))
            return made

    for prices in (PRICES, DEAR):
        widened(Last(), torch.randn(1, 3, 27, 30, dtype=torch.float64), EIGHTS, prices)


def test_tiny_constants_are_no_zeros() -> None:
    net, x = Net(after_an_activation, -5e-7), torch.randn(2, 3, 8, 9, dtype=torch.float64)
    assert moves(widened(net, x)) == 1


class Pooled(nn.Module):
    def __init__(self, head: Callable[[Pooled, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.conv = head, nn.Conv2d(3, 14, 3, padding=1)
        self.gap, self.flat, self.drop = nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout()
        self.fc, self.other = nn.Linear(14, 5), nn.Linear(14, 3, bias=False)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self, F.relu(self.conv(x)))


def two_linear(net: Pooled, x: Tensor) -> Tensor:
    x = net.gap(x).flatten(1)
    return torch.cat([net.fc(x), net.other(x)], 1)


HEADS: dict[str, tuple[Any, bool]] = {
    "flattened": (lambda net, x: net.fc(torch.flatten(net.gap(x), 1)), True),
    "flattened by name": (lambda net, x: net.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), start_dim=1)), True),
    "a module": (lambda net, x: net.fc(net.drop(net.flat(net.gap(x)))), True),
    "two layers": (two_linear, True),
    "a mean": (lambda net, x: net.fc(x.mean((2, 3))), True),
    "a mean from behind": (lambda net, x: net.fc(torch.mean(x, dim=[-1, -2])), True),
    "a mean that keeps its axes": (lambda net, x: net.fc(x.mean((2, 3), keepdim=True)[:, :, 0, 0]), False),
    "a mean of rows": (lambda net, x: net.fc(x.mean((1, 2))[:, :1].expand(-1, 14)), False),
    "flattened otherwise": (lambda net, x: net.fc(torch.flatten(net.gap(x), 1, 2)[:, :, 0]), False),
    "something in between": (lambda net, x: net.fc(torch.sort(net.gap(x).flatten(1), 1).values), False),
    "something beside": (lambda net, x: net.fc(y := x.mean((2, 3))) + y[:, :5], False),
    "called twice": (lambda net, x: net.fc(x.mean((2, 3))) + net.fc(x.amax((2, 3))), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_classifiers_read_what_is_filled_up(name: str) -> None:
    head, filled = HEADS[name]
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    model = widened(Pooled(head), x, EIGHTS)
    assert (widths(model)["conv"] == 16) == filled
    assert moves(model) == 0


# -- branches that stay among constants


def padded_between(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(x + F.pad(b, (0, 0, 0, 0, 3, WIDTH - OWN - 3))))


def padded_in_front(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(x + F.pad(b, (0, 0, 0, 0, WIDTH - OWN, 0))))


def behind_an_activation(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(x + net.widen(F.relu6(b)))


@pytest.mark.parametrize("fill", [0.0, 0.7, -0.7])
@pytest.mark.parametrize(
    ("way", "wide"),
    [
        (added, True),
        (padded_between, True),
        (padded_in_front, True),
        (through_a_depthwise_layer, True),
        (behind_an_activation, None),
        (several_readers, True),
        (seen, False),
        (no_convolution, False),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_branches_take_constants_up(way: Any, wide: bool | None, fill: float) -> None:
    net, x = Net(way, fill), torch.randn(2, 3, 8, 9, dtype=torch.float64)
    folded = fold_batch_norms(net, x)
    before, channels = moves(folded), widths(folded)
    model = fill_branches(folded, Kernels(moved=5, most=9.0, most_beside_depthwise=9.0))
    assert difference(net, model, x) < 1e-12
    assert difference(net, model, torch.randn(3, 3, 11, 14, dtype=torch.float64)) < 1e-12
    assert moves(model) == before
    if wide is None:  # where the activation leaves a constant as it is
        wide = fill >= 0.0
    assert widths(model)["branch"] == (10 if wide else OWN)
    assert {name: n for name, n in widths(model).items() if name not in ("branch", "depthwise")} == {
        name: n for name, n in channels.items() if name not in ("branch", "depthwise")
    }


def test_branches_stay_where_there_are_too_few_constants() -> None:
    net, x = Net(added, 0.7), torch.randn(2, 3, 8, 9, dtype=torch.float64)
    model = fill_branches(fold_batch_norms(net, x), Kernels(moved=16, most=9.0, most_beside_depthwise=9.0))
    assert widths(model)["branch"] == OWN


# -- files

SMALL = {"Shape", "ShapeOf", "ReduceMean", "Slice", "Concat"}
"""Sizes, one value a channel, and the images of shortcuts without filters, every second pixel."""


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("selection", ["independent", "nested"])
def test_files_for_onnxruntime_move_no_channels(tmp_path: Path, selection: str, constants: bool) -> None:
    onnx = pytest.importorskip("onnx")
    small, x = small_of("resnet20", selection, constants, "least")
    x = x.float()
    exported = asfp.export_onnx(small.float(), tmp_path / "net.onnx", x)
    assert exported.dynamic == ("batch", "size")
    assert exported.relative < 1e-5
    nodes = onnx.load(tmp_path / "net.onnx").graph.node
    makers = {name: node.op_type for node in nodes for name in node.output}
    assert {makers[node.input[0]] for node in nodes if node.op_type == "Gather"} <= SMALL
    assert [node.op_type for node in nodes].count("Slice") == 4  # rows and columns of the shortcuts without filters


@pytest.mark.parametrize("selection", ["independent", "nested"])
def test_files_for_openvino_move_no_channels(tmp_path: Path, selection: str) -> None:
    openvino = pytest.importorskip("openvino")
    small, x = small_of("resnet20", selection, True, "least")
    x = x.float()
    exported = asfp.export_openvino(small.float(), tmp_path / "net.xml", x)
    assert exported.relative < 1e-5
    model = openvino.Core().read_model(tmp_path / "net.xml")
    gathers = [op for op in model.get_ops() if op.get_type_name() == "Gather"]
    assert {op.input(0).get_source_output().get_node().get_type_name() for op in gathers} <= SMALL


def test_models_that_were_not_cut_are_exported_as_they_are(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    net, x = Net(added, 0.5).float(), torch.randn(1, 3, 8, 9)
    exported = asfp.export_onnx(net, tmp_path / "net.onnx", x)
    assert exported.relative < 1e-5
    assert "Gather" in [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
