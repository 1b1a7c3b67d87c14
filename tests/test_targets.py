"""A target instead of a rate: the smallest rate that meets it, and latencies that were measured."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import asfp
import asfp.bench
from asfp.engines import run_onnx, run_openvino
from asfp.errors import AsfpError
from asfp.targets import STEP, Way, rate_for_latency, rate_for_macs, ways_to_latency, ways_to_macs
from asfp.targets.layers import LayerTimes, _onnx, uses_of
from asfp.targets.target import cutter

EXAMPLE = torch.zeros(1, 3, 32, 32)


def share_at(model: nn.Module, rate: float, **options: Any) -> float:
    twin = asfp.create_model("resnet14")
    twin.load_state_dict(model.state_dict())
    asfp.SoftPruner(twin, rate, 1, example_inputs=EXAMPLE, **options).step(1)
    plan = asfp.compact(twin, EXAMPLE).plan
    return plan.macs_after / plan.macs_before


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("options", [{}, {"selection": "coupled"}, {"selection": "nested", "align": 4}], ids=str)
def test_the_rate_is_the_smallest_that_meets_the_macs(target: float, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = asfp.create_model("resnet14")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = rate_for_macs(model, EXAMPLE, target, **options)
    assert found.met
    assert share_at(model, found.rate, **options) == pytest.approx(found.outcome)
    assert share_at(model, found.rate - STEP, **options) > target
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert json.loads(json.dumps(found.to_dict()))["met"] is True


@pytest.mark.parametrize("target", [0.0, 1.0, -1, 50, float("nan"), "half"])
def test_what_is_no_share_is_refused(target: Any) -> None:
    model = asfp.create_model("resnet8")
    with pytest.raises(AsfpError, match="between 0 and 1"):
        rate_for_macs(model, EXAMPLE, target)
    with pytest.raises(AsfpError, match="between 0 and 1"):
        rate_for_latency(model, EXAMPLE, target)


def test_a_target_out_of_reach_says_what_is_in_reach() -> None:
    with pytest.raises(AsfpError, match=r"cannot be reached.*left"):
        rate_for_macs(asfp.create_model("resnet8"), EXAMPLE, 0.0001)
    with pytest.raises(AsfpError, match="latencies are predicted for"):
        rate_for_latency(asfp.create_model("resnet8"), EXAMPLE, 0.5, engine="compile")


@pytest.mark.parametrize("engine", ["torch", "onnxruntime", pytest.param("openvino", marks=pytest.mark.slow)])
def test_latency_is_predicted_from_layers_and_then_measured(engine: str) -> None:
    pytest.importorskip(engine)
    torch.manual_seed(0)
    found = rate_for_latency(asfp.create_model("resnet8"), torch.zeros(4, 3, 32, 32), 0.8, engine=engine, repeats=5)
    assert found.engine == engine
    assert found.interval is not None
    assert found.interval[0] <= found.outcome <= found.interval[1]
    assert found.predicted > 0
    assert f"on {engine}" in str(found)
    assert ("missed" in str(found)) == (not found.met)


class Weighted(nn.Module):
    """Work that no layer's time shows and no pruning saves, about as much as the layers take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.repeat(1, 16, 1, 1)
        for _ in range(12):
            y = y.exp().cos()
        return self.second(self.first(x)).mean((2, 3)) + y.mean((1, 2, 3)).unsqueeze(1)


@pytest.mark.slow
def test_a_prediction_that_is_off_is_corrected_by_what_was_measured() -> None:
    torch.manual_seed(0)
    found = rate_for_latency(Weighted(), torch.zeros(1, 3, 64, 64), 0.8, engine="torch", layout="least", repeats=7)
    assert found.rounds > 1


class Rising(nn.Module):
    """By layout auto, more of it is left at the highest rates than at some below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y: Tensor = self.last(self.up(x + self.second(input=x)))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.25, 0.5])
def test_the_rate_is_small_also_where_zeros_stay(target: float) -> None:
    torch.manual_seed(0)
    model, x = Rising(), torch.zeros(2, 3, 16, 16)
    found = rate_for_macs(model, x, target, layout="auto")
    assert found.met
    for rate in np.arange(0.05, found.rate, 0.05):
        twin = copy.deepcopy(model)
        asfp.SoftPruner(twin, float(rate), 1, example_inputs=x).step(1)
        plan = asfp.compact(twin, x, layout="auto").plan
        assert plan.macs_after > target * plan.macs_before


def test_inputs_to_targets() -> None:
    torch.manual_seed(0)
    x = torch.zeros(1, 3, 16, 16)
    for find in (rate_for_macs, rate_for_latency):
        with pytest.raises(AsfpError, match=r"expected a torch\.nn\.Module, got str"):
            find("resnet8", x, 0.5)  # type: ignore[arg-type]
    with pytest.raises(AsfpError, match="one tensor as input, got tuple"):
        rate_for_latency(Rising(), (x, x), 0.5)  # type: ignore[arg-type]


LAYERS = {
    "plain": (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 9)),
    "strided": (nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), (1, 4, 9, 8)),
    "grouped, dilated": (nn.Conv2d(4, 8, 3, groups=2, dilation=2), (1, 4, 9, 9)),
    "same": (nn.Conv2d(4, 6, 3, padding="same"), (1, 4, 9, 9)),
    "one axis": (nn.Conv1d(4, 6, 3), (1, 4, 9)),
    "linear": (nn.Linear(5, 3), (2, 5)),
}


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_timed_is_the_layer(name: str, engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    layer, shape = LAYERS[name]
    x = torch.randn(shape)
    (use,) = uses_of(layer, x)
    (tmp_path / "layer.onnx").write_bytes(_onnx(use))
    run = run_onnx if engine == "onnxruntime" else run_openvino
    (y,) = run(tmp_path / "layer.onnx")((x,))
    assert torch.allclose(y, layer(x), atol=1e-5)


def test_a_layer_is_timed_once() -> None:
    table = LayerTimes("torch", 1)
    layer = nn.Conv2d(3, 8, 3)
    uses = uses_of(nn.Sequential(layer, nn.ReLU()), torch.zeros(1, 3, 8, 8))
    assert table.total([*uses, *uses]) == 2 * table(uses[0]) > 0
    assert len(table.known) == 1


RACE = [Way("independent"), Way("nested", 4), Way("coupled"), Way("coupled", 16)]


@pytest.mark.parametrize("kind", ["macs", "latency"])
def test_ways_are_compared_in_one_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network that is timed is raced against the dense one, each different one once."""
    raced: list[list[str]] = []
    real = asfp.bench.bench_models

    def counted(models: dict[str, nn.Module], *args: Any, **kwargs: Any) -> Any:
        raced.append(list(models))
        return real(models, *args, **kwargs)

    monkeypatch.setattr("asfp.bench.bench_models", counted)
    torch.manual_seed(0)
    model = asfp.create_model("resnet14")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compare = ways_to_macs if kind == "macs" else ways_to_latency
    found = compare(model, EXAMPLE, 0.7, engine="torch", ways=[*RACE, RACE[0]], repeats=5)
    assert sorted((t.selection, t.align) for t in found) == sorted((way.selection, way.align) for way in RACE)
    assert all(names[0] == "dense" and 2 <= len(names) <= 1 + len(RACE) for names in raced)
    assert 1 <= len(raced) <= (1 if kind == "macs" else 3)
    assert all(t.interval is not None and t.engine == "torch" and t.kind == kind for t in found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    if kind == "macs":
        for t in found:
            options = {"selection": t.selection, "align": t.align}
            assert t.met
            assert t.rate == rate_for_macs(model, EXAMPLE, 0.7, **options).rate
            assert share_at(model, t.rate, **options) == pytest.approx(t.macs)
            assert t.time is not None
        assert [t.time for t in found] == sorted(t.time or 0.0 for t in found)
        assert f"% of the time on torch ({100 * (found[0].interval or (0, 0))[0]:.1f}" in str(found[0])
    else:
        order = [(not t.met, -t.macs if t.met else t.outcome) for t in found]
        assert order == sorted(order)


def test_networks_that_are_alike_are_timed_once() -> None:
    """A network without residual streams is the same by each selection."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(1), nn.Linear(128, 4))
    ways = [Way(selection) for selection in ("independent", "nested", "coupled")]
    found = ways_to_macs(model, torch.zeros(1, 3, 6, 6), 0.6, engine="torch", ways=ways, repeats=5)
    assert len(found) == 3
    assert len({t.time for t in found}) == len({t.rate for t in found}) == 1


def test_ways_that_a_network_does_not_allow() -> None:
    torch.manual_seed(0)
    model, x = asfp.create_model("resnet8"), EXAMPLE
    with pytest.raises(AsfpError, match="no ways to compare"):
        ways_to_macs(model, x, 0.5, ways=[])
    ways = [Way("independent"), Way("coupled", 64)]
    found = ways_to_macs(model, x, 0.1, engine="torch", ways=ways, repeats=3)  # in blocks of 32 so few cannot be left
    assert [t.selection for t in found] == ["independent"]
    with pytest.raises(AsfpError, match="cannot be reached"):
        ways_to_macs(model, x, 0.1, engine="torch", ways=ways[1:])
    with pytest.raises(AsfpError, match="selection='couple' is unknown"):
        ways_to_latency(model, x, 0.5, engine="torch", ways=[Way("couple")])


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (lambda: [("coupled", 16)], r"\('coupled', 16\) is no way to choose filters: give asfp\.targets\.Way"),
        (lambda: ["coupled"], "'coupled' is no way"),
        (lambda: [Way("nestd")], "selection='nestd' is unknown"),
        (lambda: [Way("nested", 0)], "align=0"),
        (lambda: [Way("nested", 2.5)], r"align=2\.5"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_way_is_refused(ways: Any, message: str) -> None:
    for compare in (ways_to_macs, ways_to_latency):
        with pytest.raises(AsfpError, match=message):
            compare(asfp.create_model("resnet8"), EXAMPLE, 0.5, engine="torch", ways=ways())


def test_a_search_keeps_one_network_at_a_time() -> None:
    """However many rates are tried: a search over ten times the memory of a network would not do for large ones."""
    cut = cutter(asfp.create_model("resnet8"), EXAMPLE, {}, "least")
    first = weakref.ref(cut(20))
    for step in range(30, 70, 10):
        cut(step)
    gc.collect()
    assert first() is None
    assert cut(60) is cut(60)


@pytest.mark.parametrize("shape", [(), (0, 3, 32, 32)])
def test_an_example_without_samples(shape: tuple[int, ...]) -> None:
    for find in (rate_for_latency, ways_to_latency, ways_to_macs):
        with pytest.raises(AsfpError, match="no sample in it"):
            find(asfp.create_model("resnet8"), torch.zeros(shape), 0.5, engine="torch")  # type: ignore[operator]


class Scaled(nn.Conv2d):
    """A convolution that is also told how much."""

    def forward(self, scale: float, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Scaled(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(0.5, x)
        return made


def test_layers_that_take_more_than_a_tensor() -> None:
    (use,) = uses_of(Telling(), torch.zeros(2, 3, 8, 8))
    assert (use.shape, use.made) == ((2, 3, 8, 8), (2, 4, 6, 6))


def test_a_network_without_layers_has_no_latency_to_predict() -> None:
    with pytest.raises(AsfpError, match="no convolution or linear layer"):
        ways_to_latency(nn.Sequential(nn.ReLU(), nn.Flatten()), EXAMPLE, 0.5, engine="torch", repeats=3)


def test_a_search_with_progress() -> None:
    torch.manual_seed(0)
    said: list[str] = []
    ways_to_latency(
        asfp.create_model("resnet8"),
        EXAMPLE,
        0.8,
        engine="torch",
        ways=[Way("coupled", 16)],
        repeats=3,
        progress=lambda message, share: said.append(message),
    )
    assert said[0] == "predicting coupled, align 16"
    assert said[1].startswith("timing 1 network, round 1 ")
