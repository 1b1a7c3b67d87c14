"""Residual additions: whatever the layout, the same function; what each layout promises about gathers and work."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import assert_equal, zero_filters
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import asfp
from asfp.compaction import apply
from asfp.compaction.channels import Facts
from asfp.compaction.layers import BorderBias, Pick, Surround, Widen
from asfp.compaction.layout import LAYOUTS, Prices, is_run, order_of
from asfp.compaction.tune import candidates
from asfp.errors import AsfpError

NAMES = ["resnet20", "torchvision:resnet18", "torchvision:mobilenet_v2"]
masks = st.integers(2, 12).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n).map(lambda m: np.array(m, bool)), min_size=1)
)


@given(masks)
def test_an_order_has_all_channels_once_and_the_first_two_sets_side_by_side(sets: list[Any]) -> None:
    order = order_of(len(sets[0]), sets)
    assert sorted(order.tolist()) == list(range(len(sets[0])))
    for mask in sets[:2]:
        assert not mask.any() or is_run(np.flatnonzero(mask[order]))


@given(masks)
def test_nested_sets_all_lie_side_by_side(sets: list[Any]) -> None:
    nested = [np.logical_and.reduce(sets[: i + 1]) for i in range(len(sets))]
    order = order_of(len(sets[0]), nested)
    assert all(not mask.any() or is_run(np.flatnonzero(mask[order])) for mask in nested)


def pruned(name: str, *, constants: bool) -> tuple[nn.Module, tuple[int, int, int]]:
    """A network with a third of its filters zero; with `constants`, their maps are not."""
    torch.manual_seed(0)
    model = zero_filters(asfp.create_model(name)).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not constants:
            nn.init.zeros_(module.bias)
            nn.init.zeros_(module.running_mean)  # type: ignore[arg-type]
    return model, (3, 32, 32) if name.startswith("resnet") else (3, 64, 64)


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_exact_and_comes_back_from_its_plan(name: str, layout: str, constants: bool) -> None:
    model, shape = pruned(name, constants=constants)
    example = torch.randn(1, *shape, dtype=torch.float64)
    small = asfp.compact(model, example, layout=layout)
    assert small.plan.layout == layout
    assert_equal(model, small, (2, *shape), (1, 3, shape[1] + 9, shape[2] + 4))
    again = apply(asfp.Plan.from_json(small.plan.to_json()), model)
    with torch.no_grad():
        assert torch.equal(small(example), again(example))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_cost_multiplications_and_save_gathers(name: str) -> None:
    model, shape = pruned(name, constants=False)
    example = torch.zeros(1, *shape, dtype=torch.float64)
    plans = {layout: asfp.compact(model, example, layout=layout).plan for layout in LAYOUTS}
    macs = {layout: plans[layout].macs_after for layout in LAYOUTS}
    assert macs["least"] <= min(macs.values())
    assert max(macs.values()) < plans["least"].macs_before
    moved = [sum(how in ("gather", "pad") for how in plan.layouts.values()) for plan in plans.values()]
    assert moved[0] >= moved[1] >= moved[2]
    assert moved[2] < moved[0]


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "torchvision:efficientnet_b0"])
def test_auto_widths_within_blocks_are_whole_blocks(name: str, constants: bool) -> None:
    """The widths between the convolutions of a block, which nothing else reads but a gate: multiples of 8, where they
    pass a depthwise layer of 16, or all there are."""
    model, shape = pruned(name, constants=constants)
    example = torch.zeros(1, *shape, dtype=torch.float64)
    small = asfp.compact(model, example, layout="auto")
    depthwise = {path for path, m in small.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1}
    resnet = "resnet" in name
    inner = {p for p, _ in small.named_modules() if re.fullmatch(r"layer.*conv1", p)} if resnet else depthwise
    seen = 0
    for path in inner:
        now, whole = (m.get_submodule(path).out_channels for m in (small, model))
        assert now % (8 if resnet else 16) == 0 or now == whole, path
        seen += now < whole  # type: ignore[operator]
    assert seen > 3
    assert bool(depthwise) != resnet
    assert_equal(model, small, (2, *shape), (1, 3, shape[1] + 9, shape[2] + 4))


@pytest.mark.parametrize("padding", ["after", "both"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_auto_moves_no_channels_in_a_small_residual_network(seed: int, padding: str) -> None:
    """A stream that begins with padded channels keeps one width, of whole blocks: no gather, the two pads it had."""
    torch.manual_seed(seed)
    model = zero_filters(asfp.create_model("resnet20", shortcut_padding=padding), rate=0.4, seed=seed).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    small = asfp.compact(model, x[:1], layout="auto")
    assert set(small.plan.layouts.values()) <= {"zeros", "plain", "pad"}
    assert sum(how == "pad" for how in small.plan.layouts.values()) <= 2
    assert not any(isinstance(m, Widen) for m in small.modules())
    widths = [m.out_channels for m in small.modules() if isinstance(m, nn.Conv2d)]
    assert all(width % 8 == 0 for width in widths)
    assert small.plan.macs_after < 0.9 * small.plan.macs_before
    assert torch.allclose(small(x), model(x), rtol=1e-10, atol=1e-10)
    again = apply(small.plan, asfp.create_model("resnet20", shortcut_padding=padding).double())
    assert [tuple(p.shape) for p in again.parameters()] == [tuple(p.shape) for p in small.parameters()]


def test_a_correction_that_costs_more_than_it_saves_is_left_out() -> None:
    """One constant stays, in a block of 8, where that costs less: not for large images or batches."""

    class Narrow(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
            self.second = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.norm(self.first(x)).relu())
            return y

    def left(width: int, batch: int, side: int = 8) -> tuple[int, int]:
        torch.manual_seed(0)
        model = Narrow(width).double().eval()
        model.first.weight.data[: width // 2].zero_()
        nn.init.ones_(model.norm.bias)
        small = asfp.compact(model, torch.randn(batch, 3, side, side, dtype=torch.float64), layout="auto")
        return small.get_submodule("first").out_channels, sum(isinstance(m, BorderBias) for m in small.modules())  # type: ignore[return-value]

    assert left(16, batch=1) == (16, 0)
    assert left(64, batch=1) == (40, 0)
    assert left(16, batch=64, side=8) == (8, 1)
    assert left(128, batch=1, side=32) == (64, 1)
    assert left(130, batch=1, side=32) == (72, 0)  # of 65 in whole blocks


class Carrying(nn.Module):
    """Half of what `last` reads is constant."""

    def __init__(self, kind: type[nn.Module], last: nn.Module) -> None:
        super().__init__()
        convs: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        norms: Any = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        dims = int(kind.__name__[-2])
        self.first, self.norm, self.last = convs[dims](3, 22, 3, padding=1), norms[dims](22), last
        with torch.no_grad():
            self.first.weight[::2] = 0
            self.norm.bias.uniform_(-1, 1)
            self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).relu())
        return y


CARRIED: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Conv1d(22, 5, 5, padding=3, dilation=2),
    "conv2d": lambda: nn.Conv2d(22, 5, (3, 5), stride=(1, 2), padding=(2, 1)),
    "same": lambda: nn.Conv2d(22, 5, (3, 7), padding="same", bias=False),
    "conv3d": lambda: nn.Conv3d(22, 5, 3, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(22, 5, 3, stride=2, padding=1, output_padding=1),
}


@pytest.mark.parametrize("name", CARRIED)
def test_one_constant_channel_carries_the_others(name: str) -> None:
    torch.manual_seed(0)
    last = CARRIED[name]()
    model = Carrying(type(last), last).double().eval()
    dims = last.weight.ndim - 2  # type: ignore[operator, union-attr]
    example = torch.randn(1, 3, *[9] * dims, dtype=torch.float64)
    small = asfp.compact(model, example, layout="auto")
    assert not any(isinstance(m, BorderBias) for m in small.modules())
    assert small.get_submodule("first").out_channels == 16  # 11 live ones, one that carries, and up to a whole block
    assert [(f.layer, f.how, f.additions) for f in small.plan.folded] == [("last", "carrier", 0)]
    assert "1 channels that carry others" in small.plan.summary()
    assert_equal(model, small, (2, 3, *[9] * dims), (1, 3, *range(11, 11 + dims)))
    again = apply(asfp.Plan.from_json(small.plan.to_json()), model)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), small.parameters(), strict=True))
    fresh = apply(small.plan, Carrying(type(last), CARRIED[name]()).double().eval())
    fresh.load_state_dict(small.state_dict())
    assert_equal(small, fresh, (1, 3, *[9] * dims))
    assert_equal(model, asfp.compact(small, example, layout="auto"), (1, 3, *[9] * dims))
    fewest = asfp.compact(model, example).get_submodule("first").out_channels
    assert fewest == (12 if name == "transposed" else 11)  # what a transposed one reads cannot be made up for


class Tower(nn.Module):
    """A branch of constants alone, larger than the others, beside live channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 30, 3, padding=1), nn.BatchNorm2d(30)
        self.dead = nn.Sequential(nn.Conv2d(30, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 16, 1), nn.ReLU())
        self.last = nn.Conv2d(46, 8, 3, padding=1)
        with torch.no_grad():
            self.first.weight[:2] = 0
            self.norm.bias.fill_(1.0)
            self.dead[2].weight.zero_()
            self.dead[2].bias.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        y: Tensor = self.last(torch.cat([x, self.dead(x)], 1))
        return y


class Grouped(nn.Sequential):
    """One more channel of a grouped convolution is one more in every group."""

    def __init__(self) -> None:
        grouped = nn.Conv2d(48, 48, 3, padding=1, groups=12, bias=False)
        super().__init__(nn.Conv2d(3, 48, 1), grouped, nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 8, 3, padding=1))
        with torch.no_grad():
            grouped.weight.view(12, 4, -1)[:, 1:] = 0
            self[2].bias.fill_(1.0)


@pytest.mark.parametrize("kind", [Tower, Grouped])
def test_a_carrier_does_not_bring_back_what_was_gone(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(1, 3, 16, 16)
    least, auto = (asfp.compact(model, x, layout=layout).plan for layout in ("least", "auto"))
    assert auto.macs_after <= 1.15 * least.macs_after
    assert auto.corrections == 1


class Cancelling(nn.Module):
    """Constants that are differences of large numbers, or sines of such, read by weights of one sign."""

    def __init__(self, sine: bool) -> None:
        super().__init__()
        self.sine, self.norm = sine, nn.BatchNorm2d(406)
        self.first, self.last = nn.Conv2d(3, 406, 3, padding=1, bias=False), nn.Conv2d(406, 8, 3, padding=1)
        turns = 2 * math.pi * torch.randint(300, 600, (406,)) if sine else 0.0
        with torch.no_grad():
            self.first.weight[6:] = 0
            self.last.weight.abs_()
            self.norm.running_mean.uniform_(50, 150)  # type: ignore[union-attr]
            self.norm.bias.copy_(self.norm.running_mean + turns + 0.5 + 0.3 * torch.rand(406))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        y: Tensor = self.last(x.sin() if self.sine else x.relu())
        return y


@pytest.mark.parametrize(("sine", "how"), [(False, "carrier"), (True, "border")])
def test_a_carrier_is_as_exact_as_a_border(sine: bool, how: str) -> None:
    """A batch norm is told its constant; where a carrier is too inexact all the same, borders are corrected."""
    torch.manual_seed(0)
    model, x = Cancelling(sine).eval(), torch.randn(1, 3, 9, 9)
    found = {layout: asfp.compact(model, x, layout=layout) for layout in ("least", "auto")}
    assert [f.how for f in found["auto"].plan.folded] == [how]
    far = {layout: asfp.verify(model, small, x).relative for layout, small in found.items()}
    assert far["auto"] < 2 * far["least"] + 1e-6
    again = apply(found["auto"].plan, model).state_dict()
    assert all(torch.equal(again[name], value) for name, value in found["auto"].state_dict().items())


def test_two_readers_of_a_constant_each_have_their_own_weights() -> None:
    class Two(Carrying):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d, nn.Conv2d(22, 5, 3, padding=1))
            self.other = nn.Conv2d(22, 5, 5, padding=2)
            with torch.no_grad():
                self.other.weight[:, ::4] = 0  # reads some of the constants only

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x)).relu()
            return self.last(y) * self.other(y)

    torch.manual_seed(0)
    model = Two().double().eval()
    small = asfp.compact(model, torch.randn(1, 3, 9, 9, dtype=torch.float64), layout="auto")
    assert sorted(f.layer for f in small.plan.folded if f.how == "carrier") == ["last", "other"]
    assert_equal(model, small, (2, 3, 9, 9), (1, 3, 6, 13))


@pytest.mark.parametrize(("kept", "width", "saved"), [(45, 64, 16), (8, 16, 8), (10, 16, 0), (64, 64, 0), (1, 9, 8)])
def test_channels_are_saved_in_blocks(kept: int, width: int, saved: int) -> None:
    assert LAYOUTS["auto"].saved(width, kept) == saved
    assert LAYOUTS["least"].saved(width, kept) == width - kept


def test_tuning_may_leave_nearly_everything_in() -> None:
    """For networks so small that each correction costs time: no addition is changed, only streams are corrected."""
    model, shape = pruned("torchvision:resnet18", constants=True)
    example = torch.zeros(1, *shape, dtype=torch.float64)
    least, plain = (asfp.compact(model, example, layout=candidates()[name]) for name in ("least", "plain"))
    assert not any(isinstance(m, (Pick, Widen, Surround)) for m in plain.modules())
    borders = [{n for n, m in small.named_modules() if isinstance(m, BorderBias)} for small in (least, plain)]
    assert len(borders[0]) > 12
    assert borders[1] <= {f"layer{i}.{j}.conv1_border" for i in range(1, 5) for j in range(2)}
    assert_equal(model, plain, (2, *shape))


def test_zeros_leave_a_plain_resnet() -> None:
    model, shape = pruned("torchvision:resnet50", constants=True)
    small = asfp.compact(model, torch.zeros(1, *shape, dtype=torch.float64), layout="zeros")
    assert set(small.plan.layouts.values()) == {"zeros"}
    assert not any(isinstance(m, (Pick, Widen, Surround)) for m in small.modules())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_keep_widths_that_gpus_like(name: str) -> None:
    model, shape = pruned(name, constants=True)
    small = asfp.compact(model, torch.zeros(1, *shape, dtype=torch.float64), layout="zeros")
    widths = [(layer.out_after, layer.out_before) for layer in small.plan.layers if layer.kind == "Conv2d"]
    assert all(after % 16 == 0 or after == before for after, before in widths)
    assert any(after < before for after, before in widths)


@pytest.mark.parametrize("constants", [True, False])
def test_two_blocks_with_any_sets_need_no_gather(constants: bool) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 4, 1)
            self.branches = nn.ModuleList(nn.Sequential(nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for branch in self.branches:
                x = torch.relu(x + branch(x))
            return self.head(x)

    torch.manual_seed(1)
    model = Two().double().eval()
    for branch in model.branches:
        nn.init.normal_(branch[1].bias) if constants else nn.init.zeros_(branch[1].bias)  # type: ignore[index]
        with torch.no_grad():
            gone = torch.randperm(24)[:8]
            branch[0].weight[gone] = 0  # type: ignore[index]
            branch[0].bias[gone] = 0  # type: ignore[index]
    small = asfp.compact(model, torch.zeros(1, 3, 5, 5, dtype=torch.float64))
    assert list(small.plan.layouts.values()) == ["pad", "pad"]
    assert any(isinstance(m, Surround) for m in small.modules()) == constants
    assert_equal(model, small, (2, 3, 7, 6))


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_two_sides_that_both_lack_channels_are_padded_both(
    monkeypatch: pytest.MonkeyPatch, seed: int, constants: bool
) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 24, 1, bias=False), nn.BatchNorm2d(24), nn.MaxPool2d(2))
            self.branch = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24))
            self.head = nn.Conv2d(24, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(torch.relu(x + self.branch(x)))

    torch.manual_seed(seed)
    model = Both().double().eval()
    with torch.no_grad():
        for part in (model.stem, model.branch):
            part[0].weight[torch.randperm(24)[:14]] = 0  # type: ignore[index]
            if constants:
                nn.init.normal_(part[1].bias)  # type: ignore[index]
    example = torch.zeros(1, 3, 10, 10, dtype=torch.float64)
    small = asfp.compact(model, example)
    gathers = [m for m in small.modules() if isinstance(m, (Pick, Widen))]
    assert (list(small.plan.layouts.values()), gathers) == (["pad"], [])
    assert small.get_submodule("stem.0").out_channels == small.get_submodule("branch.0").out_channels == 10
    assert any(isinstance(m, Surround) for m in small.modules()) == constants
    assert_equal(model, small, (2, 3, 12, 8))
    recall = Facts.recall
    monkeypatch.setattr(Facts, "recall", lambda facts, *asked: asked[1] != "both" and recall(facts, *asked))
    plan = asfp.compact(model, example).plan
    monkeypatch.undo()
    old = apply(plan, model, example)  # a plan from before this was possible gathers, as it did then
    assert not any(name.endswith(":both") for name in plan.facts)
    assert any(isinstance(m, (Pick, Widen)) for m in old.modules())
    assert_equal(model, old, (2, 3, 12, 8))


def test_what_needs_the_natural_order_keeps_it() -> None:
    class Outputs(nn.Module):
        """The stream itself is an output: its channels must come in their own order."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.branch = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return x + self.branch(x)

    model = Outputs().double().eval()
    with torch.no_grad():
        model.branch.weight[::2] = 0
    small = asfp.compact(model, torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    assert sum(isinstance(m, (Pick, Widen)) for m in small.modules()) == 1
    assert_equal(model, small, (2, 3, 5, 5))


@pytest.mark.parametrize("engine", ["torch", pytest.param("openvino", marks=pytest.mark.slow)])
def test_tuning_takes_a_layout_that_was_timed(engine: str) -> None:
    pytest.importorskip(engine)
    model, shape = pruned("resnet20", constants=False)
    model.float()
    small = asfp.compact(model, torch.randn(1, *shape), tune=engine)
    name, _, where = small.plan.layout.partition(", measured on ")
    assert name in candidates()
    assert where == engine
    assert_equal(model, small, (2, *shape))


def test_a_layout_survives_the_file(tmp_path: Path) -> None:
    model, shape = pruned("resnet20", constants=True)
    model.float()
    example = torch.randn(2, *shape)
    small = asfp.compact(model, example, layout="zeros")
    asfp.save(small, tmp_path / "small.safetensors")
    again = asfp.load(tmp_path / "small.safetensors")
    with torch.no_grad():
        assert torch.equal(small.eval()(example), again.eval()(example))


def test_mistakes_are_told() -> None:
    model, shape = pruned("resnet20", constants=False)
    example = torch.zeros(1, *shape, dtype=torch.float64)
    with pytest.raises(AsfpError, match="Did you mean zeros"):
        asfp.compact(model, example, layout="zeroes")
    with pytest.raises(AsfpError, match="is no engine"):
        asfp.compact(model, example, tune="opnvino")
    assert asfp.compact(model, example, layout=Prices(1.0, 1.0)).plan.macs_after < 40_000_000
    for wrong in ({"block": 0}, {"depthwise": -1}, {"block": 2.5}):
        with pytest.raises(AsfpError, match="numbers of channels, at least 1"):
            Prices(1.0, 1.0, **wrong)  # type: ignore[arg-type]


def test_a_border_that_was_kept_follows_sizes_weights_and_modes() -> None:
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 3, dtype=torch.float64)
    border = BorderBias(kernel, (1, 1), (1, 1), (1, 1))

    def added(side: int) -> Tensor:
        return border(torch.zeros(1, 4, side, side, dtype=torch.float64), torch.zeros(1, 2, side, side))

    with torch.no_grad():
        first = added(5)
        assert torch.equal(added(5), first)
        assert added(7).shape == (1, 4, 7, 7)
        assert torch.equal(added(5), first)
        border.integral.mul_(2)
        assert torch.equal(added(5), 2 * first)
        border.load_state_dict({"integral": border.integral / 2})
        assert torch.equal(added(5), first)
    with torch.inference_mode():
        assert torch.equal(added(5), first)
    assert torch.equal(added(5), first)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        assert added(9).shape == (1, 4, 9, 9)
    with torch.no_grad():
        assert type(added(9)) is Tensor
    twin = copy.deepcopy(border).float()
    with torch.no_grad():
        assert twin(torch.zeros(1, 4, 5, 5), torch.zeros(1, 2, 5, 5)).dtype == torch.float32
    assert pickle.loads(pickle.dumps(border))._kept == (None, None, None)


@pytest.mark.parametrize("layout", [3, None, ["auto"], "outo"])
def test_a_layout_that_is_none(layout: Any) -> None:
    with pytest.raises(asfp.AsfpError, match="is unknown: use one of least, auto, zeros"):
        asfp.compact(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8), layout=layout)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tune": True}, "tune=True is no engine"),
        ({"tune": "touch"}, "Did you mean torch"),
        ({"tune": "fused"}, "times on a GPU: bring model and example there"),
        ({"tune": "torch", "layout": "zeros"}, "leave out layout='zeros'"),
    ],
)
def test_a_tuning_that_cannot_be(options: Any, says: str) -> None:
    with pytest.raises(asfp.AsfpError, match=says):
        asfp.compact(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8), **options)


class Reading(nn.Module):
    """A branch that reads the stream it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 128, 3, padding=1), nn.Conv2d(128, 128, 3, padding=1)
        self.last = nn.Conv2d(128, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y: Tensor = self.last(x + self.second(x))
        return y


def test_zeros_that_another_layer_would_read_have_their_price() -> None:
    torch.manual_seed(0)
    model, x = Reading(), torch.zeros(2, 3, 16, 16)
    asfp.SoftPruner(model, 0.5, 1, layers={"first": 0.5, "second": 0.5}).step(1)
    plans = {layout: asfp.compact(model, x, layout=layout).plan for layout in ("least", "auto", "zeros")}
    assert plans["least"].macs_after < plans["auto"].macs_after < 0.6 * plans["zeros"].macs_after
