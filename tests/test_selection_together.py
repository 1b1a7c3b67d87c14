"""Nested and coupled choices: their laws on real and random networks, softness, exactness of what compaction makes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import zero_filters
from random_networks import build
from torch import Tensor, nn

import asfp
from asfp import AsfpError, ConstantSchedule, HardPruner, LinearSchedule, PruneStep, SoftPruner
from asfp.flow import Width
from asfp.measurement.macs import count_layers
from asfp.roles import LEAVES
from asfp.streams import Streams, find_streams, shared_streams
from asfp.trace import trace

SELECTIONS = ["independent", "nested", "coupled"]


def streams_of(model: nn.Module, example: Any = None) -> Streams:
    return find_streams(model, trace(model, example, LEAVES))


def check_nested(streams: Streams, step: PruneStep) -> int:
    """One order serves all writers of a stream: no two disagree on which of two channels goes first."""
    seen = 0
    for names in shared_streams(streams, Width.FULL):
        gone, kept = {}, {}
        for name in (n for n in names if n in step.layers):
            mask, ids = step.layers[name].mask.numpy(), streams.writes[name]
            gone[name], kept[name] = set(ids[~mask].tolist()), set(ids[mask].tolist())
        for a, b in itertools.combinations(gone, 2):
            assert not (gone[a] & kept[b] and kept[a] & gone[b]), (a, b)
            if len(gone[a]) == len(gone[b]) and set(streams.writes[a]) == set(streams.writes[b]):
                assert gone[a] == gone[b], (a, b)
            seen += 1
    return seen


def check_coupled(streams: Streams, step: PruneStep) -> int:
    """A channel that one writer of a stream prunes, all prune; a depthwise reader's filter goes with its channel."""
    gone: set[int] = set()
    kept: set[int] = set()
    seen = 0
    for names in shared_streams(streams, Width.FREE):
        for name in names:
            mask, ids = step.layers[name].mask.numpy(), streams.writes[name]
            gone |= set(ids[~mask].tolist())
            kept |= set(ids[mask].tolist())
            seen += 1
    assert not gone & kept
    for name, ids in streams.follows.items():
        for i, channel in enumerate(ids.tolist()):
            if channel in gone:
                assert not step.layers[name].mask[i], name
            elif channel in kept and name in step.layers:
                assert step.layers[name].mask[i], name
    return seen


CHECKS = {"independent": lambda streams, step: 0, "nested": check_nested, "coupled": check_coupled}

ZOO = {
    "resnet20": 32,
    "torchvision:resnet18": 32,
    "torchvision:mobilenet_v2": 32,
    "torchvision:efficientnet_b0": 32,
    "torchvision:shufflenet_v2_x0_5": 32,
}


@pytest.mark.parametrize(
    ("name", "selection"),
    [(n, s) for n in ZOO for s in SELECTIONS[1:] if (n, s) != ("torchvision:efficientnet_b0", "nested")],
)
def test_laws_and_exactness_on_real_networks(name: str, selection: str) -> None:
    x = torch.randn(1, 3, ZOO[name], ZOO[name], dtype=torch.float64)
    model = zero_filters(asfp.create_model(name), rate=0.0).double().eval()
    streams = streams_of(model, x)
    step = SoftPruner(model, 0.3, 1, selection=selection, example_inputs=x).step(1)
    assert (CHECKS[selection](streams, step) > 0) == ("shufflenet" not in name)
    small = asfp.compact(model, x, check=False)
    found = asfp.verify(model, small, x)
    assert found.ok, str(found)
    assert found.relative < 1e-10
    assert small.plan.macs_after < small.plan.macs_before


@pytest.mark.slow
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize(
    "name", ["torchvision:resnet50", "torchvision:densenet121", "torchvision:regnet_y_400mf", "timm:resnetv2_50",
             "torchvision:mobilenet_v3_large", "torchvision:fcn_resnet50", "timm:seresnet50",
             "timm:ecaresnet26t", "timm:resnet26t", "timm:mixnet_s", "timm:ghostnet_100", "timm:hrnet_w18_small",
             "timm:dla34", "timm:res2net50_26w_4s", "timm:rexnet_100", "timm:cspresnet50", "timm:selecsls42b"],
)  # fmt: skip
def test_laws_and_exactness_on_more(name: str, selection: str, align: int) -> None:
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    options = {"weights_backbone": None} if "fcn" in name else {}
    model = zero_filters(asfp.create_model(name, **options), rate=0.0).double().eval()
    streams = streams_of(model, x)
    step = SoftPruner(model, 0.3, 1, selection=selection, align=align, example_inputs=x).step(1)
    CHECKS[selection](streams, step)
    found = asfp.verify(model, asfp.compact(model, x, check=False), x)
    assert found.ok, str(found)


def check_random(seed: int, selection: str) -> int:
    net, x = build(seed)
    streams = streams_of(net, x)
    zero_maps = seed % 2 == 1
    step = SoftPruner(net, 0.4, 1, selection=selection, zero_maps=zero_maps, example_inputs=x).step(1)
    seen = CHECKS[selection](streams, step)
    found = asfp.verify(net, asfp.compact(net, x, check=False), x)
    assert found.ok, f"seed {seed}: {found}"
    return seen


@pytest.mark.parametrize("selection", SELECTIONS[1:])
def test_laws_and_exactness_on_random_networks(selection: str) -> None:
    seen = [check_random(seed, selection) for seed in range(8)]
    assert sum(n > 0 for n in seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("start", range(1000, 1300, 60))
def test_more_random_networks(selection: str, start: int) -> None:
    for seed in range(start, start + 60):
        check_random(seed, selection)


# -- what it is for: the stream gets narrower


@pytest.mark.parametrize("zero_maps", [False, True])
@pytest.mark.parametrize("name", ["resnet20", pytest.param("torchvision:mobilenet_v2", marks=pytest.mark.slow)])
def test_coupled_narrows_the_stream_as_foreseen(name: str, zero_maps: bool) -> None:
    x = torch.zeros(1, 3, 32, 32)
    macs = {}
    for selection in SELECTIONS:
        model = zero_filters(asfp.create_model(name), rate=0.0).eval()
        pruner = SoftPruner(model, 0.3, 1, selection=selection, zero_maps=zero_maps, example_inputs=x)
        pruner.step(1)
        small = asfp.compact(model, x, check=False)
        macs[selection] = sum(layer.macs_conv for layer in count_layers(small, x))
        if selection == "coupled":
            assert macs[selection] == pytest.approx(pruner.together.macs(1.0), rel=1e-12)
    assert macs["coupled"] < macs["independent"]
    assert macs["coupled"] <= macs["nested"]
    if name == "resnet20":
        assert small.get_submodule("layer1.1.conv1").in_channels == 12
        assert small.get_submodule("layer3.2.conv1").in_channels == 45
        assert small.get_submodule("linear").in_features == 45


def test_projections_are_pruned_when_coupled_only() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    names = {s: [layer.name for layer in SoftPruner(model, 0.3, 1, selection=s).layers] for s in SELECTIONS}
    assert names["nested"] == names["independent"]
    assert len(names["nested"]) == 17
    assert [n for n in names["coupled"] if n not in names["nested"]] == [f"layer{i}.0.downsample.0" for i in (2, 3, 4)]
    assert names["coupled"] == [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]


@settings(max_examples=20)
@given(rate=st.floats(0.01, 0.95), share=st.floats(0.0, 1.0))
def test_counts_are_those_of_independent(rate: float, share: float) -> None:
    counts = {}
    for selection in SELECTIONS:
        together = SoftPruner(MODEL, rate, 1, selection=selection).together
        counts[selection] = together.per_layer(together.counts(share))
        assert all(0 <= c < layer.filters for c, layer in zip(counts[selection], together.layers, strict=True))
    assert counts["independent"] == counts["nested"] == counts["coupled"]


MODEL = asfp.create_model("resnet8")


# -- the common order


class Residual(nn.Module):
    """A stem and two blocks on one stream of eight channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a1, self.a2 = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.b1, self.b2 = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.bn, self.head = nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = x + self.a2(self.a1(x).relu())
        x = x + self.bn(self.b2(self.b1(x).relu()))
        return self.head(x.mean((2, 3)))


def set_norms(conv: nn.Conv2d, norms: list[float]) -> None:
    with torch.no_grad():
        size = conv.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        conv.weight.mul_(torch.tensor(norms).view(-1, 1, 1, 1) / size)


def test_the_formula() -> None:
    model = Residual()
    norms = {"stem": [1, 2, 3, 4, 5, 6, 7, 8], "a2": [8, 7, 6, 5, 4, 3, 2, 1], "b2": [3, 3, 1, 3, 1, 3, 3, 3]}
    for name, values in norms.items():
        set_norms(model.get_submodule(name), [float(v) * (10 if name == "stem" else 1) for v in values])
    common = sum(torch.tensor(v).square() / torch.tensor(v).float().square().mean() for v in norms.values()) / 3
    assert isinstance(common, Tensor)
    lowest = common.argsort()[:4].tolist()
    rates = {"stem": 0.25, "a2": 0.5, "b2": 0.375}
    step = SoftPruner(model, None, 1, layers=rates, selection="nested").step(1)
    for name, rate in rates.items():
        gone = set(range(8)) - set(step.layers[name].keep)
        assert gone == set(lowest[: int(8 * rate)])
    step = SoftPruner(model, 0.5, 1, selection="coupled").step(1)
    assert {n: sorted(set(range(8)) - set(step.layers[n].keep)) for n in norms} == dict.fromkeys(norms, sorted(lowest))
    assert len(step.layers["a1"].keep) == 3


@pytest.mark.parametrize("selection", SELECTIONS)
def test_equal_scores_go_from_the_left(selection: str) -> None:
    model = Residual()
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    step = SoftPruner(model, 0.5, 1, selection=selection).step(1)
    assert {tuple(step.layers[n].keep) for n in ("stem", "a2", "b2")} == {(4, 5, 6, 7)}


@pytest.mark.parametrize("criterion", ["l1", "geometric_median", "random", lambda w: w.flatten(1).sum(1)])
@pytest.mark.parametrize("selection", SELECTIONS[1:])
def test_every_criterion_even_with_negative_scores(criterion: Any, selection: str) -> None:
    model = Residual()
    step = SoftPruner(model, 0.5, 1, selection=selection, criterion=criterion).step(1)
    assert step.zeroed == 4 + 3 + 4 + 3 + 4
    assert len({tuple(step.layers[n].keep) for n in ("stem", "a2", "b2")}) == 1
    with torch.no_grad():
        model.a2.weight.zero_()  # a layer without any weight has no say
    assert SoftPruner(model, 0.5, 1, selection=selection, criterion=criterion).step(1).zeroed == 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("selection", SELECTIONS[1:])
def test_types(dtype: torch.dtype, selection: str) -> None:
    model = Residual().to(dtype)
    with torch.no_grad():
        model.stem.weight.mul_(1e4)
    step = SoftPruner(model, 0.5, 1, selection=selection).step(1)
    assert len({tuple(step.layers[n].keep) for n in ("stem", "a2", "b2")}) == 1


# -- soft, hard


@pytest.mark.parametrize("selection", SELECTIONS)
def test_soft_a_filter_that_grows_back_returns(selection: str) -> None:
    model = Residual()
    pruner = SoftPruner(model, 0.5, 10, schedule=ConstantSchedule(0.5), selection=selection)
    before = pruner.step(1)
    lost = min(set(range(8)) - set(before.layers["a2"].keep))
    with torch.no_grad():
        for name in ("stem", "a2", "b2"):
            model.get_submodule(name).weight[lost] = 3.0
    after = pruner.step(2)
    assert lost in after.layers["a2"].keep
    assert after.layers["a2"].regrown == 1 / 4
    assert len(after.layers["a2"].keep) == 4


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("align", [1, 2])
def test_hard_choices_stay_and_obey_the_law(selection: str, align: int) -> None:
    model = asfp.create_model("resnet8")
    streams = streams_of(model)
    pruner = HardPruner(model, 0.5, 6, schedule=LinearSchedule(0.5, 6), selection=selection, align=align)
    gone: dict[str, Tensor] = {}
    for epoch in range(1, 7):
        for layer in pruner.layers:
            nn.init.normal_(layer.weight)
        step = pruner.step(epoch)
        CHECKS[selection](streams, step)
        for name, layer in step.layers.items():
            assert not (layer.mask & gone.get(name, torch.zeros(1, dtype=torch.bool))).any()
            assert layer.zeroed == int((~layer.mask).sum())
            gone[name] = ~layer.mask
    assert {layer.name: int(gone[layer.name].sum()) for layer in pruner.layers} == {
        layer.name: layer.filters // 2 for layer in pruner.layers
    }


def test_hard_with_rates_of_their_own_stays_nested() -> None:
    model = Residual()
    rates = {"stem": 0.75, "a2": 0.25, "b2": 0.5}
    pruner = HardPruner(model, None, 8, schedule=LinearSchedule(0.75, 8), layers=rates, selection="nested")
    streams = streams_of(model)
    for epoch in range(1, 9):
        for name in rates:
            nn.init.normal_(model.get_submodule(name).weight)
        before = {name: ~mask for name, mask in pruner.masks.items()}
        step = pruner.step(epoch)
        assert check_nested(streams, step) == 3
        assert all(not (step.layers[name].mask & lost).any() for name, lost in before.items())
    assert {name: 8 - len(step.layers[name].keep) for name in rates} == {"stem": 6, "a2": 2, "b2": 4}


@pytest.mark.parametrize("kind", [SoftPruner, HardPruner])
@pytest.mark.parametrize("selection", SELECTIONS[1:])
@pytest.mark.parametrize("align", [1, 2])
def test_resumed_in_the_middle(kind: type[SoftPruner], selection: str, align: int) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, SoftPruner]:
        torch.manual_seed(3)
        model = Residual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        return model, optimizer, kind(model, 0.5, 6, selection=selection, align=align)

    def epoch(parts: tuple[nn.Module, torch.optim.Optimizer, SoftPruner], number: int) -> PruneStep:
        model, optimizer, pruner = parts
        x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(number))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
            optimizer.step()
        return pruner.step(number)

    whole = make()
    for number in (1, 2, 3):
        epoch(whole, number)
    state = copy.deepcopy([part.state_dict() for part in whole])
    resumed = make()
    for part, saved in zip(resumed, state, strict=True):
        part.load_state_dict(saved)
    for number in (4, 5, 6):
        a, b = epoch(whole, number), epoch(resumed, number)
        assert a == b
        assert all(torch.equal(a.layers[n].mask, b.layers[n].mask) for n in a.layers)
    with pytest.raises(AsfpError, match=r"saved with (selection|align)="):
        kind(make()[0], 0.5, 6, selection=selection, align=3).load_state_dict(state[2])


# -- what a user may ask for


def test_coupled_needs_every_writer_of_a_stream() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    with pytest.raises(AsfpError, match=r"coupled.*rate 0\.3.*'layer2\.0\.downsample\.0'.*none.*nested"):
        SoftPruner(model, 0.3, 1, layers=lambda n, m: "downsample" not in n, selection="coupled")
    rates = {"layer1.0.conv2": 0.3, "layer1.1.conv2": 0.3, "conv1": 0.4}
    with pytest.raises(AsfpError, match=r"'conv1' the rate 0\.4 and 'layer1\.0\.conv2'.*0\.3.*same rate"):
        SoftPruner(model, None, 1, layers=rates, selection="coupled")
    assert len(SoftPruner(model, None, 1, layers=rates, selection="nested").layers) == 3
    inner = SoftPruner(model, 0.3, 1, layers=lambda n, m: n.endswith("0.conv1"), selection="coupled")
    assert len(inner.layers) == 4


def test_what_cannot_be_narrowed_is_chosen_independently() -> None:
    class Normalised(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            x = x + self.a2(self.a1(self.norm(x)).relu())
            return self.head((x + self.b2(x.cumsum(1)[:, :6] if self.unknown else self.b1(x))).mean((2, 3)))

        unknown = False

    def steps(selection: str) -> dict[str, list[int]]:
        torch.manual_seed(0)
        step = SoftPruner(model(), 0.5, 1, selection=selection).step(1)
        return {name: layer.keep for name, layer in step.layers.items()}

    model: Any = Normalised
    assert steps("coupled") == steps("independent") != steps("nested")
    Normalised.unknown = True
    assert steps("coupled") == steps("independent") == steps("nested")


def test_a_model_that_cannot_be_traced() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.sum() > 0 else x

    layers = {"conv": 0.5}
    SoftPruner(Branching(), None, 1, layers=layers)
    for options in ({"selection": "nested"}, {"selection": "coupled"}, {"align": 2}):
        with pytest.raises(asfp.TraceError, match=r"residual stream.*example_inputs=.*independent.*align=1"):
            SoftPruner(Branching(), None, 1, layers=layers, **options)


def test_default_device_does_not_matter() -> None:
    model = asfp.create_model("resnet8")
    with torch.device("meta"):
        pruner = SoftPruner(model, 0.5, 1, selection="coupled", align=4)
        assert pruner.step(1).zeroed == sum(layer.filters for layer in pruner.layers) // 2
