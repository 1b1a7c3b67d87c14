"""Networks that were once right at the example's size and wrong at another: no axis is taken for fixed that is not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_equal
from torch import Tensor, nn

import asfp
from asfp.compaction import CompactModule
from asfp.compaction.verify import compare


class Net(nn.Module):
    """A forward given as a function of the module's layers."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def conv(channels: int = 3, out: int = 8) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, 3, padding=1)
    with torch.no_grad():
        layer.weight[::2] = 0
    return layer


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


SEQUENCES: dict[str, Callable[..., Any]] = {
    "last step": lambda s, x: s.a(x[:, -1:]),
    "differences": lambda s, x: s.a(x[:, 1:] - x[:, :-1]),
    "causal padding": lambda s, x: s.a(F.pad(x, (0, 0, 2, 0))),
    "mean over padded steps": lambda s, x: s.a(F.pad(x, (0, 0, 1, 1)).mean(1)),
    "halves": lambda s, x: s.a(torch.cat(x.chunk(2, 1)[::-1], 1)),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_length_of_a_sequence_is_not_a_number_of_channels(name: str) -> None:
    model = Net(SEQUENCES[name], a=nn.Linear(5, 6)).double().eval()
    small = asfp.compact(model, normal(2, 8, 5))
    assert_equal(model, small, (2, 8, 5), (3, 12, 5), (1, 4, 5))


IMAGES: dict[str, Callable[..., Any]] = {
    "rows joined and cut": lambda s, x: s.b(torch.cat([s.a(x), s.a(x)], 2)[:, :, 1:-1]),
    "rows joined and padded": lambda s, x: s.b(F.pad(torch.cat([s.a(x), s.a(x)], 2), (0, 0, 1, 1))),
    "flattened and back": lambda s, x: s.b(s.a(x).flatten(2).reshape(len(x), 8, *x.shape[2:])),
    "number of axes": lambda s, x: s.b(s.a(x)) / x.dim(),
    "elements": lambda s, x: s.b(s.a(x)) / x.shape.numel(),
}


@pytest.mark.parametrize("name", IMAGES)
def test_image_sizes_stay_open(name: str) -> None:
    model = Net(IMAGES[name], a=conv(), b=conv(8, 4)).double().eval()
    small = asfp.compact(model, normal(2, 3, 8, 8))
    assert_equal(model, small, (2, 3, 8, 8), (1, 3, 12, 8), (3, 3, 9, 11))


def test_a_constant_map_keeps_the_extent_of_the_image() -> None:
    model = Net(
        lambda s, x: s.norm(s.a(x)) * s.fc(F.adaptive_avg_pool2d(x, 1)).sigmoid(), a=conv(), fc=nn.Conv2d(3, 8, 1)
    )
    model.add_module("norm", nn.BatchNorm2d(8))
    nn.init.zeros_(model.a.weight)  # type: ignore[arg-type, union-attr]
    nn.init.normal_(model.norm.bias)  # type: ignore[arg-type, union-attr]
    model.double().eval()
    small = asfp.compact(model, normal(2, 3, 1, 1))
    assert_equal(model, small, (2, 3, 1, 1), (2, 3, 5, 6))


def test_a_mask_beside_an_image() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(), conv(8, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.a(x)
            n, c, h, w = x.shape
            return self.b(x.view(n, c, h * w).reshape(n, c, h, w) * mask[:, None])

    model = Masked().double().eval()
    small = asfp.compact(model, (normal(2, 3, 8, 8), torch.ones(2, 8, 8, dtype=torch.bool))).eval()
    assert compare(model, small, [((normal(3, 3, 10, 9), torch.rand(3, 10, 9) > 0.5), {})]).ok


@pytest.mark.parametrize("how", [float, int])
def test_a_size_made_a_plain_number_is_refused(how: Callable[[Any], Any]) -> None:
    model = Net(lambda s, x: s.b(s.a(x)) * how(x.shape[2]), a=conv(), b=conv(8, 4)).double()
    with pytest.raises(asfp.TraceError, match=r"into a plain number at .*test_sizes\.py:\d+"):
        asfp.compact(model, normal(2, 3, 8, 8))


SIZED: dict[str, Callable[..., Any]] = {
    "size()": lambda s, x: F.avg_pool2d(x, x.size()[3]),
    "size(3)": lambda s, x: F.avg_pool2d(x, x.size(3)),
    "shape": lambda s, x: F.avg_pool2d(x, x.shape[2:]),
    "by name": lambda s, x: F.avg_pool2d(x, kernel_size=x.size()[2:]),
    "narrow": lambda s, x: torch.narrow(x, 2, 1, x.size(2) - 2),
    "reshape": lambda s, x: torch.reshape(x, (x.size(0), 8, x.size(2) * x.size(3), 1)),
    "roll": lambda s, x: torch.roll(x, x.size(2) // 2, 2),
}


@pytest.mark.parametrize("name", SIZED)
def test_a_size_may_be_an_argument(name: str) -> None:
    model = Net(lambda s, x: s.b(SIZED[name](s, s.a(x))), a=conv(), b=conv(8, 4)).double().eval()
    small = asfp.compact(model, normal(2, 3, 8, 8))
    assert small.plan.macs_after < small.plan.macs_before
    assert_equal(model, small, (2, 3, 8, 8), (1, 3, 12, 12), (3, 3, 6, 6))


def test_an_argument_and_a_number_in_one_line() -> None:
    model = Net(lambda s, x: F.avg_pool2d(s.b(s.a(x)), x.size(2), int(x.size(2))), a=conv(), b=conv(8, 4)).double()
    with pytest.raises(asfp.TraceError, match="into a plain number"):
        asfp.compact(model, normal(2, 3, 8, 8))


def test_constants_have_the_precision_of_their_place() -> None:
    model = Net(lambda s, x: s.a(x).half(), a=conv()).eval()
    x = torch.randn(2, 3, 8, 8)
    assert asfp.compact(model, x).eval()(x).dtype == torch.float16


def test_inputs_that_the_model_writes_into_are_left_alone() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        x -= 0.5
        return s.b(s.a(x))

    x = normal(2, 3, 8, 8)
    before = x.clone()
    small = asfp.compact(Net(forward, a=conv(), b=conv(8, 4)).double().eval(), x)
    assert torch.equal(x, before)
    assert small.plan.macs_after < small.plan.macs_before


def test_frozen_layers_stay_frozen_and_modes_are_kept() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4))
    model.requires_grad_(False).train()
    model[1].eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8))
    assert small.get_submodule("3").bias is not None
    assert not any(p.requires_grad for p in small.parameters())
    assert [small.get_submodule(n).training for n in ("1", "4")] == [False, True]


def test_copies_and_pickles_are_compact_models() -> None:
    model = nn.Sequential(conv(), nn.ReLU(), conv(8, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    small = asfp.compact(model, x)
    kept = io.BytesIO()
    pickle.dump(small, kept)
    kept.seek(0)
    for twin in (copy.deepcopy(small), pickle.load(kept)):
        assert isinstance(twin, CompactModule)
        assert twin.plan == small.plan
        assert torch.equal(twin(x), small(x))
