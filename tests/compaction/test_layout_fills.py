"""Zero filters that stay for a width's sake: where they gain, and never where they bring back what was gone."""

from __future__ import annotations

import pytest
import torch
from networks import assert_equal
from torch import Tensor, nn

import asfp
from asfp.compaction.layers import Pick, Widen

LAYOUTS = ["auto", "zeros"]


def dead(layer: nn.Module, filters: list[int] | range) -> None:
    with torch.no_grad():
        layer.weight[list(filters)] = 0  # type: ignore[index, operator]
        if layer.bias is not None:
            layer.bias[list(filters)] = 0  # type: ignore[index, operator]


class Gated(nn.Module):
    """Squeeze and excitation: of linear layers and the tensor's own size, as many write it, or of convolutions; of
    what it multiplies, or of a depthwise layer that reads that."""

    def __init__(self, zero: range, *, sized: bool = True, beside: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        layers: list[nn.Module] = [nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)]
        self.squeeze, self.excite = [nn.Linear(32, 8), nn.Linear(8, 32)] if sized else layers
        self.last = nn.Conv2d(32, 8, 3, padding=1)
        self.beside = nn.Conv2d(32, 32, 3, padding=1, groups=32) if beside else nn.Identity()
        self.sized = sized
        dead(self.first, zero)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate = self.beside(x).mean((2, 3), keepdim=not self.sized)
        gate = torch.sigmoid(self.excite(self.squeeze(gate).relu()))
        if self.sized:
            b, c, _, _ = x.size()
            gate = gate.view(b, c, 1, 1)
        y: Tensor = self.last(x * gate)
        return y


def compacted(model: nn.Module, layout: str, *shape: int) -> nn.Module:
    """The network in this layout, checked at two other sizes."""
    model = model.double().eval()
    small = asfp.compact(model, torch.randn(1, *shape, dtype=torch.float64), layout=layout)
    assert_equal(model, small, (2, *shape), (1, shape[0], shape[1] + 5, shape[2] + 2))
    return small


def widths(small: nn.Module) -> dict[str, int]:
    return {name: m.out_channels for name, m in small.named_modules() if isinstance(m, nn.Conv2d)}


def moves(small: nn.Module) -> list[nn.Module]:
    return [m for m in small.modules() if isinstance(m, (Pick, Widen))]


@pytest.mark.parametrize(("layout", "width"), [("least", 21), ("auto", 24), ("zeros", 32)])
def test_what_a_gate_multiplies_is_filled_however_its_size_is_asked_for(layout: str, width: int) -> None:
    torch.manual_seed(0)
    small = compacted(Gated(range(0, 22, 2)), layout, 3, 12, 12)
    assert widths(small)["first"] == width
    assert not moves(small)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_depthwise_layer_reads_beside_a_gate_is_not_filled(layout: str) -> None:
    torch.manual_seed(0)
    assert not moves(compacted(Gated(range(0, 22, 2), sized=False, beside=True), layout, 3, 12, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dead_gate_stays_gone(layout: str) -> None:
    torch.manual_seed(0)
    model = Gated(range(0), sized=False)
    dead(model.excite, range(32))
    assert set(widths(compacted(model, layout, 3, 12, 12))) == {"first", "last"}


class Residual(nn.Module):
    """Two blocks on a stream of 24 channels, which a depthwise layer reads as well if asked for."""

    def __init__(self, *, depthwise: bool = False) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.Conv2d(24, 4, 1)
        self.other = nn.Conv2d(24, 4, 1)
        self.inner = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1, bias=False) for _ in range(2))
        self.outer = nn.ModuleList(nn.Conv2d(24, 24, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(24) for _ in range(2))
        self.beside = nn.Conv2d(24, 24, 3, padding=1, groups=24) if depthwise else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for inner, outer, norm in zip(self.inner, self.outer, self.norms, strict=True):
            x = x + norm(outer(inner(x).relu()))
        y: Tensor = self.last(x) * self.other(self.beside(x))
        return y


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dead_branch_stays_gone(layout: str) -> None:
    torch.manual_seed(0)
    model = Residual()
    nn.init.zeros_(model.norms[1].weight)  # type: ignore[arg-type]
    small = compacted(model, layout, 3, 12, 12)
    assert "outer.0" in widths(small)
    assert not {"inner.1", "outer.1"} & set(widths(small))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_that_depthwise_layers_read_is_not_filled(layout: str) -> None:
    torch.manual_seed(0)
    model = Residual(depthwise=True)
    for layer in (model.stem, *model.outer):
        dead(layer, range(0, 20, 2))
    small = compacted(model, layout, 3, 12, 12)
    assert not moves(small)
    assert widths(small)["stem"] == 14


@pytest.mark.parametrize("layout", ["least", *LAYOUTS])
def test_doubling_a_stream_again_and_again_takes_no_time(layout: str) -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 4, 1)
            dead(self.first, range(11))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(40):
                x = x + x
            y: Tensor = self.last(x)
            return y

    torch.manual_seed(0)
    small = compacted(Doubled(), layout, 3, 6, 6)
    assert widths(small)["first"] == {"least": 13, "auto": 16, "zeros": 16}[layout]


@pytest.mark.parametrize("head", ["flatten", "mean", "convolution"])
@pytest.mark.parametrize(("layout", "width"), [("least", 53), ("auto", 56), ("zeros", 64)])
def test_what_a_classifier_reads_is_filled_through_pooling(layout: str, width: int, head: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.pool = nn.Sequential(nn.Conv2d(3, 72, 3), nn.BatchNorm2d(72)), nn.AdaptiveAvgPool2d(1)
            self.last = nn.Conv2d(72, 10, 1) if head == "convolution" else nn.Linear(72, 10)
            dead(self.first[0], range(19))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            x = x.mean((2, 3)) if head == "mean" else self.pool(x)
            y: Tensor = self.last(x.flatten(1) if head == "flatten" else x)
            return y

    torch.manual_seed(0)
    assert widths(compacted(Classifier(), layout, 3, 12, 12))["first.0"] == width


@pytest.mark.parametrize(("zero", "width"), [(8, 21), (11, 32), (27, 32)])
def test_a_width_that_cannot_become_whole_blocks_is_left(zero: int, width: int) -> None:
    """Of 48 filters, those that are live but unread are no room: 21 are read, `zero` are there to fill up with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 48, 3), nn.Conv2d(48, 8, 3))
    dead(model[0], range(zero))
    with torch.no_grad():
        model[1].weight[:, zero : 48 - 21] = 0  # type: ignore[index]
    assert widths(compacted(model, "zeros", 3, 12, 12))["0"] == width
