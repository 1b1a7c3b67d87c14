"""Streams in pieces compute what the whole ones do, for every size; what cannot be cut is left as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import asfp
from asfp.compaction.layers import BorderBias
from asfp.deployment import pieces
from asfp.deployment.folding import convolve_borders, fold_batch_norms
from asfp.deployment.padding import pad_with_zeros
from asfp.deployment.pieces import keep_in_pieces

WIDTH, OWN = 64, 40


def count(model: nn.Module, target: Any) -> int:
    assert isinstance(model, fx.GraphModule)
    return sum(node.target is target for node in model.graph.nodes)


def padded(model: nn.Module) -> int:
    """Additions with a side that is padded, with zeros or with constants."""
    assert isinstance(model, fx.GraphModule)
    additions = [node for node in model.graph.nodes if node.target in (operator.add, operator.iadd)]
    return sum(side.target in (F.pad, torch.cat) for node in additions for side in node.all_input_nodes)


def difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    """The largest, relative to the outputs' range; inputs are given as copies, for who writes into them."""
    with torch.no_grad():
        found = [torch.utils._pytree.tree_leaves(model(x.clone())) for model in (one, other)]
    assert all(a.shape == b.shape for a, b in zip(*found, strict=True))
    return max(float((a - b).abs().max() / (a.max() - a.min())) for a, b in zip(*found, strict=True))


def in_pieces(net: nn.Module, x: Tensor) -> fx.GraphModule:
    """The folded network in pieces, seen equal to the network at the example's size and at another."""
    model = keep_in_pieces(fold_batch_norms(net, x))
    assert isinstance(model, fx.GraphModule)
    larger = torch.randn(3, x.shape[1], x.shape[2] + 3, x.shape[3] + 5, dtype=x.dtype)
    for case in (x, larger):
        assert difference(net, model, case) < 1e-12
    return model


def pad(branch: Tensor, before: int = 0, after: int = WIDTH - OWN) -> Tensor:
    return F.pad(branch, (0, 0, 0, 0, before, after))


class Net(nn.Module):
    """A stem, a stream of two blocks of which `forward` says how they are added, and a layer that reads the stream."""

    def __init__(self, way: Callable[[Net, Tensor, Tensor], Any], *, inplace: bool = False) -> None:
        super().__init__()
        self.way = way
        self.stem, self.relu = nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU(inplace)
        self.inner, self.branch = nn.Conv2d(WIDTH, 8, 3, padding=1), nn.Conv2d(8, OWN, 3, padding=1)
        self.second, self.other = nn.Conv2d(WIDTH, OWN, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.last, self.gap = nn.Conv2d(WIDTH, 5, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        self.double().eval()

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.stem(x))
        return self.way(self, x, self.branch(torch.sigmoid(self.inner(x))))


def residual(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + pad(b))
    return net.last(net.relu(y + pad(net.second(y))))


def added_in_place(net: Net, x: Tensor, b: Tensor) -> Tensor:
    b = pad(b)
    b += x
    return net.last(net.relu(b))


def in_the_middle(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(pad(b, 16, 8) + x))


def with_a_plain_block(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """A layer of the stream that also reads it."""
    y = net.relu(x + pad(b))
    return net.last(net.relu(y + net.other(y)))


def pooled(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = F.max_pool2d(net.relu(x + pad(b)), 2)
    return net.last(y).mean((2, 3))


def returned(net: Net, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = net.relu(x + pad(b))
    return net.last(y), y


def gated(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + pad(b))
    return net.last(y * torch.sigmoid(net.other(y)))


def joined(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + pad(b))
    return torch.cat([net.last(y), y[:, :, ::2, ::2]], 1)


def written_afterwards(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """Readers of the sum that write into a value which nobody else reads."""
    y = net.relu(x + pad(b))
    return net.last(F.hardswish(y, inplace=True))


def within_another(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """A branch that is a stream of its own, of which a part is added to."""
    inner = net.relu(net.second(x) + F.pad(b[:, :16], (0, 0, 0, 0, 0, OWN - 16)))
    return net.last(net.relu(x + pad(inner)))


CUT = (residual, in_the_middle, with_a_plain_block, pooled, returned, gated, joined, within_another)


@pytest.mark.parametrize("way", CUT, ids=lambda way: way.__name__)
def test_a_stream_in_pieces_computes_the_same(
    way: Callable[[Net, Tensor, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "NARROWEST", 8)
    torch.manual_seed(0)
    net, x = Net(way), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    state = torch.get_rng_state()
    folded = fold_batch_norms(net, x)
    keep_in_pieces(folded)
    assert torch.equal(torch.get_rng_state(), state)
    assert count(in_pieces(net, x), F.pad) == 0


def other_channels(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = net.relu(x + pad(b))
    return net.last(net.relu(y + pad(net.second(y), 20, 4)))


def both_padded(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(net.relu(pad(net.second(x)) + pad(b)))


def stretched(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """The stream has one value a channel; the padded branch makes images of it."""
    return net.last(net.relu(x.mean((2, 3), keepdim=True) + pad(b)))


def written_by_another(net: Net, x: Tensor, b: Tensor) -> Tensor:
    wide = pad(b)
    b.mul_(3.0)
    return net.last(net.relu(x + wide)) + b.mean()


def written_while_read(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = x + pad(b)
    torch.relu_(y)
    return net.last(y)


def of_another_kind(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(torch.sort(x, 1).values + pad(b))


def padded_with_ones(net: Net, x: Tensor, b: Tensor) -> Tensor:
    return net.last(x + F.pad(b, (0, 0, 0, 0, 0, WIDTH - OWN), value=1.0))


def after_an_activation(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """The padded branch is not added itself."""
    return net.last(x + net.relu(pad(b)))


def stretched_at_other_sizes(net: Net, x: Tensor, b: Tensor) -> Tensor:
    """One value a channel, and so is the branch at the example's size, but at no other."""
    pooled = F.max_pool2d(b, 8, ceil_mode=True)
    return net.last(net.relu(net.gap(net.other(x)) + pad(pooled)))


def written_as_an_item(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = x + pad(b)
    y[:, 0] = 1.0
    return net.last(y)


def written_through_a_view(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = x + pad(b)
    y[:, :8].mul_(3.0)
    return net.last(y)


def branch_written_through_a_view(net: Net, x: Tensor, b: Tensor) -> Tensor:
    z = net.other(x)
    wide = pad(z[:, :OWN])
    z.mul_(3.0)
    return net.last(x + wide) + z.mean() * 0.0


WHOLE = (
    *(other_channels, both_padded, stretched, written_by_another, written_while_read, of_another_kind),
    *(padded_with_ones, after_an_activation, added_in_place, written_afterwards, stretched_at_other_sizes),
    *(written_as_an_item, written_through_a_view, branch_written_through_a_view),
)


@pytest.mark.parametrize("way", WHOLE, ids=lambda way: way.__name__)
def test_what_cannot_be_cut_stays_whole(way: Callable[[Net, Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = in_pieces(Net(way), torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert count(model, F.pad) > 0


@pytest.mark.parametrize("name", ["relu", "branch", "last", "other"])
def test_modules_with_hooks_are_called(name: str) -> None:
    torch.manual_seed(0)
    net = Net(with_a_plain_block)
    net.get_submodule(name).register_forward_hook(lambda module, args, result: result * 2)
    in_pieces(net, torch.randn(2, 3, 8, 8, dtype=torch.float64))


class OfAConstant(Net):
    """A stream that begins with a constant: one sample, whatever the batch."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.other(torch.ones(1, WIDTH, 8, 8, dtype=torch.float64))
        return torch.relu(start + pad(self.branch(torch.sigmoid(self.inner(self.stem(x))))))


def test_a_stream_that_comes_of_no_input_stays_whole() -> None:
    torch.manual_seed(0)
    net, x = OfAConstant(residual), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    model = keep_in_pieces(fold_batch_norms(net, x))
    for case in (x, x.repeat(3, 1, 1, 1)):
        assert difference(net, model, case) < 1e-12


class Shared(nn.Module):
    """One border correction, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.border = BorderBias(torch.randn(3, 3, 3), (1, 1), (1, 1), (1, 1))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.border(self.conv(x), x)
        return x


def test_a_border_correction_that_two_calls_share() -> None:
    torch.manual_seed(0)
    net, x = Shared(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert difference(net, convolve_borders(fold_batch_norms(net, x)), x) < 1e-12


def seen_later(net: Net, x: Tensor, b: Tensor) -> Tensor:
    y = x + pad(b)
    return net.last(net.relu(y)) + net.last(y)


@pytest.mark.parametrize(("way", "pads"), [(residual, 0), (seen_later, 1)])
def test_networks_that_write_in_place_are_cut_where_nobody_sees_it(way: Callable[..., Any], pads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert count(in_pieces(Net(way, inplace=True), x), F.pad) == pads


def test_only_what_compaction_padded_is_cut(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    exported = asfp.export_onnx(Net(residual).float(), tmp_path / "net.onnx", torch.randn(1, 3, 8, 8))
    assert exported.relative < 1e-5
    assert [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node].count("Pad") == 2


def test_narrow_pieces_are_not_worth_it() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, x, b: net.last(x + pad(b, 20, 4)))
    assert count(in_pieces(net, torch.randn(2, 3, 8, 8, dtype=torch.float64)), F.pad) == 1


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "regnet_x_400mf"])
@pytest.mark.parametrize("constants", [False, True])
def test_nested_networks_pad_nothing(name: str, constants: bool) -> None:
    torch.manual_seed(0)
    net = asfp.create_model(f"torchvision:{name}", num_classes=10).double().eval()
    for module in net.modules():
        if constants and isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, -0.2, 0.2)
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    asfp.SoftPruner(net, 0.3, 1, selection="nested", align=16, example_inputs=x).step(1)
    small = asfp.compact(net, x)
    folded = fold_batch_norms(small, x)
    assert padded(folded) > 4
    model = in_pieces(small, x)
    assert padded(model) == 0
    borders = any(isinstance(module, BorderBias) for module in model.modules())
    assert borders == (constants and name.startswith("resnet"))  # RegNet's 3x3 convolutions are grouped
    convolved = keep_in_pieces(convolve_borders(folded))
    assert padded(convolved) == 0
    larger = torch.randn(2, 3, 96, 80, dtype=torch.float64)
    assert max(difference(small, convolved, x), difference(small, convolved, larger)) < 1e-12


@pytest.mark.parametrize(("name", "cut"), [("resnet18", False), ("resnet50", True)])
def test_pointwise_leaves_streams_of_basic_blocks(name: str, cut: bool) -> None:
    net = asfp.create_model(f"torchvision:{name}", num_classes=10).double().eval()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    asfp.SoftPruner(net, 0.3, 1, selection="nested", align=16, example_inputs=x).step(1)
    small = asfp.compact(net, x)
    model = keep_in_pieces(fold_batch_norms(small, x), pointwise=True)
    assert (padded(model) == 0) == cut
    assert difference(small, model, x) < 1e-12


@pytest.mark.parametrize("constants", [False, True])
def test_an_onnx_file_has_no_padding_and_equals_torch(tmp_path: Path, constants: bool) -> None:
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    net = asfp.create_model("torchvision:resnet18", num_classes=10).eval()
    for module in net.modules():
        if constants and isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, -0.2, 0.2)
    x = torch.randn(1, 3, 64, 64)
    asfp.SoftPruner(net, 0.3, 1, selection="nested", align=16, example_inputs=x).step(1)
    exported = asfp.export_onnx(asfp.compact(net, x), tmp_path / "net.onnx", x)
    assert exported.dynamic == ("batch", "size")
    assert exported.relative < 1e-5
    operations = [node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node]
    assert "Pad" not in operations
    assert operations.count("Concat") <= 1


class Blocks(nn.Module):
    """Residual blocks of many kinds on one stream, with batch norms whose shifts make constants of zero filters."""

    def __init__(self, width: int, kinds: list[str], inplace: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kinds, self.relu, self.pool = kinds, nn.ReLU(inplace), nn.MaxPool2d(2, ceil_mode=True)
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.first = nn.ModuleList(nn.Conv2d(width, 6, 3, padding=1) for _ in kinds)
        self.last = nn.ModuleList(nn.Conv2d(6, width, 3, padding=1, bias=False) for _ in kinds)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in kinds)
        self.head = nn.Conv2d(width, 4, 3, padding=1)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.bias, -1, 1)
                nn.init.uniform_(module.running_mean, -1, 1)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        for kind, first, last, norm in zip(self.kinds, self.first, self.last, self.norms, strict=True):
            branch = norm(last(self.relu(first(x))))
            x = branch + x if kind == "turned" else x + branch
            x = x if kind == "linear" else self.relu(x)
            x = self.pool(x) if kind == "pooled" else x * torch.sigmoid(x) if kind == "gated" else x
        return self.head(x)


KINDS = ("plain", "turned", "linear", "pooled", "gated")


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(4, 20),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    kept=st.lists(st.integers(1, 20), min_size=1, max_size=2),
    inplace=st.booleans(),
    shifts=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_streams(width: int, kinds: list[str], kept: list[int], inplace: bool, shifts: bool, seed: int) -> None:
    net = Blocks(width, kinds, inplace, seed)
    with torch.no_grad():
        for i, (conv, norm) in enumerate(zip(net.last, net.norms, strict=True)):
            own = min(kept[i % len(kept)], width)
            for tensor in (conv.weight, *([] if shifts else [norm.bias, norm.running_mean])):
                tensor[own:] = 0.0
    x = torch.randn(1, 3, 9, 11, dtype=torch.float64)
    small = asfp.compact(net, x)
    before, pieces.NARROWEST = pieces.NARROWEST, 1
    try:
        model = in_pieces(small, x)
    finally:
        pieces.NARROWEST = before
    if "gated" not in kinds and len({min(k, width) for k in kept[: len(kinds)]}) == 1:
        assert padded(model) == 0
    for always in (False, True):
        zeros = pad_with_zeros(fold_batch_norms(small, x), always=always)
        assert not always or count(zeros, torch.cat) == 0
        for case in (x, torch.randn(3, 3, 12, 16, dtype=torch.float64)):
            assert difference(net, zeros, case) < 1e-12
