"""What a step does to the weights, and what it reports."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import asfp
from asfp import AsfpError, AsymptoticSchedule, ConstantSchedule, HardPruner, LinearSchedule, PruneStep, SoftPruner
from asfp.criteria import lp, random
from asfp.filters import count_pruned, keep_all_but_lowest

PRUNERS = [SoftPruner, HardPruner]


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(),
        nn.Conv2d(10, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def zero_filters(weight: Tensor) -> list[int]:
    return [i for i, filter_ in enumerate(weight) if not filter_.any()]


def conv_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}


# -- counts and choice


@pytest.mark.parametrize(
    ("filters", "rate", "count"),
    [
        (10, 0.3, 3),
        (10, 0.7, 7),
        (30, 0.1, 3),
        (100, 0.29, 29),
        (64, 0.4, 25),
        (16, 0.0, 0),
        (1, 0.9, 0),
        (3, 0.999, 2),
    ],
)
def test_count(filters: int, rate: float, count: int) -> None:
    assert count_pruned(filters, rate) == count


@given(st.integers(1, 4096), st.integers(0, 1000))
def test_count_of_exact_fractions(filters: int, thousandths: int) -> None:
    exact = filters * thousandths // 1000
    assert count_pruned(filters, thousandths / 1000) == min(exact, filters - 1)


@given(st.integers(1, 10_000), st.floats(0.0, 1.0, exclude_max=True))
def test_count_keeps_at_least_one(filters: int, rate: float) -> None:
    count = count_pruned(filters, rate)
    assert 0 <= count <= filters - 1
    assert count <= filters * rate + 1e-4


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 4))
def test_lowest_and_first_of_equals(rows: list[list[int]], count: int) -> None:
    masks = keep_all_but_lowest([torch.tensor(row, dtype=torch.float32) for row in rows], [count] * len(rows))
    for row, mask in zip(rows, masks, strict=True):
        expected = sorted(sorted(range(5), key=lambda i: (row[i], i))[count:])
        assert mask.nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("kind", PRUNERS)
@pytest.mark.parametrize("criterion", ["l1", "l2", lp(3), lambda weight: weight.flatten(1).sum(1)])
def test_lowest_filters_of_each_layer_are_zeroed(kind: type[SoftPruner], criterion: Any) -> None:
    model = small()
    before = copy.deepcopy(model)
    step = kind(model, 0.4, 10, schedule=ConstantSchedule(0.4), criterion=criterion).step(1)
    score = asfp.criteria.resolve(criterion)
    for name, weight in conv_weights(model).items():
        old = before.get_submodule(name).weight
        count = math.floor(0.4 * len(old) + 1e-9)
        lowest = sorted(score(old.detach()).argsort(stable=True)[:count].tolist())
        assert zero_filters(weight) == lowest
        assert step.layers[name].keep == sorted(set(range(len(old))) - set(lowest))
        kept = step.layers[name].keep
        assert torch.equal(weight[kept], old[kept])


def test_bn_scale_criterion() -> None:
    model = small()
    for i in (1, 4, 7):
        nn.init.normal_(model[i].weight)
    expected = model[4].weight.detach().abs().argsort()[:6].sort().values.tolist()
    SoftPruner(model, 0.4, 10, criterion="bn_scale").step(10)
    assert zero_filters(model[3].weight) == expected


def test_bn_scale_without_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2)
    )
    with pytest.raises(AsfpError, match=r"bn_scale needs.*'0' has none.*layers=.*\"l2\""):
        SoftPruner(model, 0.4, 10, criterion="bn_scale")
    SoftPruner(model, 0.4, 10, criterion="bn_scale", layers=lambda name, module: name == "2")


def test_random_differs_by_layer_and_epoch_but_not_by_run() -> None:
    def run() -> list[list[list[int]]]:
        pruner = SoftPruner(small(), 0.5, 3, schedule=ConstantSchedule(0.5), criterion=random(1))
        return [[layer.keep for layer in pruner.step(epoch).layers.values()] for epoch in (1, 2)]

    first = run()
    assert first == run()
    assert first[0] != first[1]
    assert first[0][1] != first[0][2]


def test_only_convolution_weights_change() -> None:
    model = small()
    x = torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    modules, pointers = list(model.modules()), [p.data_ptr() for p in model.parameters()]
    SoftPruner(model, 0.4, 10).step(10)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "3.weight", "6.weight"}
    assert list(model.modules()) == modules
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    after = optimizer.state_dict()
    assert all(
        torch.equal(after["state"][i]["momentum_buffer"], s["momentum_buffer"]) for i, s in state["state"].items()
    )


# -- schedule, epochs, interval


@pytest.mark.parametrize("kind", PRUNERS)
def test_rates_follow_the_schedule(kind: type[SoftPruner]) -> None:
    model = small()
    pruner = kind(model, 0.4, 20)
    schedule = AsymptoticSchedule(0.4, 20)
    for epoch in range(1, 21):
        step = pruner.step(epoch)
        assert step.rate == pytest.approx(schedule(epoch), rel=1e-12)
        assert step.zeroed == sum(count_pruned(n, schedule(epoch)) for n in (10, 16, 16))
        assert step.zeroed == sum(len(zero_filters(w)) for w in conv_weights(model).values())
    assert {name: layer.zeroed for name, layer in step.layers.items()} == {"0": 4, "3": 6, "6": 6}


def test_rates_of_a_mapping_are_in_proportion() -> None:
    pruner = SoftPruner(small(), None, 10, layers={"0": 0.5, "6": 0.25, "3": 0})
    halfway = AsymptoticSchedule(0.5, 10)(2)
    step = pruner.step(2)
    assert step.rate == pytest.approx(halfway)
    assert {n: s.zeroed for n, s in step.layers.items()} == {
        "0": count_pruned(10, halfway),
        "6": count_pruned(16, halfway / 2),
    }
    assert {n: s.zeroed for n, s in pruner.step(10).layers.items()} == {"0": 5, "6": 4}


def test_any_callable_is_a_schedule() -> None:
    pruner = SoftPruner(small(), None, 4, schedule=lambda epoch: 0.1 * epoch)
    assert [pruner.step(e).layers["0"].zeroed for e in (1, 2, 3, 4)] == [1, 2, 3, 4]
    scaled = SoftPruner(small(), 0.2, 4, schedule=lambda epoch: 0.1 * epoch)
    assert scaled.step(4).layers["0"].zeroed == 2


def test_a_schedule_may_know_epochs_from_1_only() -> None:
    table = [0.1, 0.2, 0.3]
    pruner = SoftPruner(small(), None, 3, schedule=lambda epoch: table[epoch - 1] if epoch else 1 / 0)
    assert [pruner.step(epoch).layers["0"].zeroed for epoch in (1, 2, 3)] == [1, 2, 3]
    pruner.load_state_dict(pruner.state_dict())


def test_numpy_numbers() -> None:
    pruner = SoftPruner(small(), np.float64(0.4), np.int64(3))  # type: ignore[arg-type]
    assert json.dumps(pruner.step(np.int64(3)).to_dict())  # type: ignore[arg-type]


def test_epoch_zero() -> None:
    model = small()
    assert SoftPruner(model, 0.4, 10).step(0).zeroed == 0
    assert not any(zero_filters(w) for w in conv_weights(model).values())
    assert SoftPruner(model, 0.4, 10, schedule=LinearSchedule(0.4, 10, start=0.2)).step(0).layers["0"].zeroed == 2


def test_interval() -> None:
    model = small()
    pruner = SoftPruner(model, 0.4, 7, schedule=ConstantSchedule(0.4), interval=3)
    due = []
    for epoch in range(1, 8):
        nn.init.normal_(model[0].weight)
        step = pruner.step(epoch)
        due.append(bool(step.layers))
        assert bool(zero_filters(model[0].weight)) == due[-1]
        if not due[-1]:
            assert (step.zeroed, step.regrown, step.rate) == (0, 0.0, 0.4)
            assert str(step) == f"epoch {epoch}: rate 0.4000, no pruning due"
    assert due == [False, False, True, False, False, True, True]


# -- regrowth and the report


def test_regrown() -> None:
    model = small()
    pruner = SoftPruner(model, 0.5, 10, schedule=ConstantSchedule(0.5))
    assert pruner.step(1).regrown == 0.0
    zeroed = zero_filters(model[3].weight)
    with torch.no_grad():
        model[3].weight[zeroed[:2]] = 1e-30
        model[0].weight[zero_filters(model[0].weight)[0]] = 5.0
    step = pruner.step(2)
    assert step.regrown == 3 / 21
    assert {name: layer.regrown for name, layer in step.layers.items()} == {"0": 1 / 5, "3": 2 / 8, "6": 0.0}
    assert zero_filters(model[3].weight) == zeroed
    assert str(step) == "epoch 2: rate 0.5000, 21 of 42 filters zeroed, 14.3 % of the last regrown"


def test_report_is_plain_data() -> None:
    step = SoftPruner(small(), 0.4, 10).step(10)
    assert isinstance(step, PruneStep)
    assert json.loads(json.dumps(step.to_dict())) == {
        "epoch": 10,
        "rate": 0.4,
        "zeroed": 16,
        "filters": 42,
        "regrown": 0.0,
        "layers": {
            "0": {"filters": 10, "zeroed": 4, "regrown": 0.0},
            "3": {"filters": 16, "zeroed": 6, "regrown": 0.0},
            "6": {"filters": 16, "zeroed": 6, "regrown": 0.0},
        },
    }
    assert all(s.mask.dtype == torch.bool and int(s.mask.sum()) == s.filters - s.zeroed for s in step.layers.values())
    with pytest.raises(AttributeError):
        step.epoch = 3  # type: ignore[misc]


def test_repr() -> None:
    text = repr(SoftPruner(small(), 0.4, 10))
    assert text.startswith("SoftPruner(3 layers, 42 filters, rate=0.4, epochs=10, schedule=AsymptoticSchedule(")


# -- depthwise, maps, other kinds of convolution


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pw, self.bn1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.dw, self.bn2 = nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.BatchNorm2d(16)
        self.out, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.dw(self.bn1(self.pw(x)).relu())).relu()
        return self.head(self.out(x).mean((2, 3)))


@pytest.mark.parametrize("kind", PRUNERS)
def test_depthwise_follow(kind: type[SoftPruner]) -> None:
    model = Separable()
    step = kind(model, 0.5, 10).step(10)
    gone = zero_filters(model.pw.weight)
    assert len(gone) == 4
    assert zero_filters(model.dw.weight) == [row for c in gone for row in (2 * c, 2 * c + 1)]
    assert step.layers["dw"].zeroed == 8
    assert step.zeroed == 4 + 8 + 4
    assert len(zero_filters(model.out.weight)) == 4


@pytest.mark.parametrize("kind", PRUNERS)
def test_zero_maps(kind: type[SoftPruner]) -> None:
    model = Separable()
    for bn in (model.bn1, model.bn2):
        for tensor in (bn.weight, bn.bias, bn.running_mean):
            nn.init.normal_(tensor)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    kind(model, 0.5, 10, zero_maps=True).step(10)
    x = torch.randn(2, 3, 6, 6)
    gone = zero_filters(model.pw.weight)
    rows = zero_filters(model.dw.weight)
    for training in (True, False):
        model.train(training)
        first = model.bn1(model.pw(x))
        assert not first[:, gone].any()
        assert not model.bn2(model.dw(first.relu()))[:, rows].any()
        assert first[:, [c for c in range(8) if c not in gone]].all()
    alive = [c for c in range(8) if c not in gone]
    assert torch.equal(model.bn1.bias[alive], kept["bn1.bias"][alive])
    assert torch.equal(model.bn1.weight, kept["bn1.weight"])


def test_maps_stay_by_default() -> None:
    model = Separable()
    nn.init.normal_(model.bn1.bias)
    bias = model.bn1.bias.detach().clone()
    SoftPruner(model, 0.5, 10).step(10)
    assert torch.equal(model.bn1.bias, bias)
    assert model.pw.bias is not None
    assert model.pw.bias.all()


def test_transposed_grouped_and_other_dimensions() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv1d(2, 8, 3, padding=1)
            self.up = nn.ConvTranspose1d(8, 6, 3, padding=1)
            self.group = nn.Conv1d(6, 12, 3, padding=1, groups=3)
            self.three = nn.Conv3d(12, 8, 1)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.group(self.up(self.one(x).relu()).relu())
            return self.head(self.three(x[..., None, None]).mean((2, 3, 4)))

    model = Mixed()
    x = torch.randn(2, 2, 9)
    SoftPruner(model, 0.5, 10).step(10)
    assert len(zero_filters(model.up.weight.transpose(0, 1))) == 3
    assert [len(zero_filters(w)) for w in (model.one.weight, model.group.weight, model.three.weight)] == [4, 6, 4]
    up = model.up(model.one(x).relu()) - model.up.bias[:, None]  # type: ignore[index]
    assert sum(not up[:, c].any() for c in range(6)) == 3


# -- formats, types, compiled and shared


def test_channels_last_chooses_alike() -> None:
    plain = small()
    last = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    a, b = SoftPruner(plain, 0.4, 10).step(10), SoftPruner(last, 0.4, 10).step(10)
    assert {n: s.keep for n, s in a.layers.items()} == {n: s.keep for n, s in b.layers.items()}
    for name, weight in conv_weights(last).items():
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(weight, conv_weights(plain)[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("criterion", ["l1", "l2", "geometric_median", "bn_scale", "random"])
def test_types(dtype: torch.dtype, criterion: str) -> None:
    model = small().to(dtype)
    step = SoftPruner(model, 0.4, 10, criterion=criterion).step(10)
    assert step.zeroed == 16
    assert all(w.dtype == dtype and w.isfinite().all() for w in conv_weights(model).values())


def test_half_precision_does_not_overflow() -> None:
    model = small()
    with torch.no_grad():
        for weight in conv_weights(model).values():
            weight.mul_(1e4)
    model = model.half()
    SoftPruner(model, 0.4, 10).step(10)
    assert [len(zero_filters(w)) for w in conv_weights(model).values()] == [4, 6, 6]


def test_compiled() -> None:
    model = small().eval()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(2, 3, 8, 8)
    before = compiled(x)
    step = SoftPruner(compiled, 0.5, 10).step(10)  # type: ignore[arg-type]
    assert list(step.layers) == ["0", "3", "6"]
    after = compiled(x)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model(x))


def test_compiled_in_part() -> None:
    model = small()
    model[3] = wrapped = torch.compile(model[3], backend="eager")
    model[6].compile(backend="eager")
    model.compile(backend="eager")
    implementation = model[6]._compiled_call_impl
    step = SoftPruner(model, 0.5, 10, criterion="bn_scale").step(10)
    assert list(step.layers) == ["0", "3", "6"]
    assert model[3] is wrapped
    assert model[6]._compiled_call_impl is implementation is not None


def test_data_parallel() -> None:
    model = small()
    step = SoftPruner(nn.DataParallel(model), 0.5, 10).step(10)
    assert list(step.layers) == ["0", "3", "6"]
    assert len(zero_filters(model[0].weight)) == 5


@pytest.mark.parametrize("kind", PRUNERS)
def test_moved_to_another_type_between_steps(kind: type[SoftPruner]) -> None:
    model = small()
    pruner = kind(model, 0.5, 10, schedule=ConstantSchedule(0.5))
    keep = pruner.step(1).layers["3"].keep
    model.double().to(memory_format=torch.channels_last)
    step = pruner.step(2)
    assert step.layers["3"].keep == keep
    assert step.regrown == 0.0


def test_tied_weights() -> None:
    model = small()
    model[6].weight = model[3].weight = nn.Parameter(torch.randn(16, 16, 3, 3))
    step = SoftPruner(model, 0.5, 10).step(10)
    assert list(step.layers) == ["0", "3"]
    assert len(zero_filters(model[6].weight)) == 8


def test_frozen_and_grad_mode_do_not_matter() -> None:
    model = small().requires_grad_(False)
    SoftPruner(model, 0.5, 10).step(10)
    assert len(zero_filters(model[0].weight)) == 5


# -- hard pruning


def test_hard_choices_only_grow() -> None:
    model = small()
    pruner = HardPruner(model, 0.5, 6, schedule=LinearSchedule(0.5, 6))
    chosen: dict[str, set[int]] = {}
    for epoch in range(1, 7):
        for weight in conv_weights(model).values():
            nn.init.normal_(weight)
        step = pruner.step(epoch)
        for name, layer in step.layers.items():
            gone = set(range(layer.filters)) - set(layer.keep)
            assert gone >= chosen.get(name, set())
            assert zero_filters(conv_weights(model)[name]) == sorted(gone)
            chosen[name] = gone
    assert {name: len(gone) for name, gone in chosen.items()} == {"0": 5, "3": 8, "6": 8}


def test_hard_keeps_its_choice_when_the_rate_falls() -> None:
    pruner = HardPruner(small(), None, 4, schedule=lambda epoch: (0.0, 0.5, 0.2, 0.2, 0.3)[epoch])
    assert [pruner.step(e).layers["0"].zeroed for e in (1, 2, 4)] == [5, 5, 5]
    soft = SoftPruner(small(), None, 4, schedule=lambda epoch: (0.0, 0.5, 0.2, 0.2, 0.3)[epoch])
    assert [soft.step(e).layers["0"].zeroed for e in (1, 2, 4)] == [5, 2, 3]


@pytest.mark.parametrize("zero_maps", [False, True])
def test_enforce_withstands_momentum_and_weight_decay(zero_maps: bool) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    pruner = HardPruner(model, 0.5, 10, schedule=ConstantSchedule(0.5), zero_maps=zero_maps)
    pruner.enforce_()
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 4

    def train(enforce: bool) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if enforce:
                pruner.enforce_()

    train(True)
    keep = pruner.step(1).layers["3"].keep
    train(True)
    assert zero_filters(model[3].weight) == sorted(set(range(16)) - set(keep))
    if zero_maps:
        assert not model[4].bias[zero_filters(model[3].weight)].any()
        assert not model[4].running_mean[zero_filters(model[3].weight)].any()
    assert pruner.step(2).regrown == 0.0
    train(False)
    step = pruner.step(3)
    assert step.regrown > 0.0
    assert step.layers["3"].keep == keep


def test_hard_step_that_is_not_due_zeroes_again() -> None:
    model = small()
    pruner = HardPruner(model, 0.5, 10, schedule=ConstantSchedule(0.5), interval=2)
    pruner.step(2)
    gone = zero_filters(model[0].weight)
    nn.init.normal_(model[0].weight)
    assert not pruner.step(3).layers
    assert zero_filters(model[0].weight) == gone


# -- mistakes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("criterion", ["l2", "random", "geometric_median"])
def test_weights_that_are_not_finite(bad: float, criterion: str) -> None:
    model = small()
    with torch.no_grad():
        model[3].weight[2, 0, 0, 0] = bad
    before = {name: w.clone() for name, w in conv_weights(model).items()}
    with pytest.raises(AsfpError, match=r"layer '3' has weights or scores that are NaN or infinite.*learning rate"):
        SoftPruner(model, 0.4, 10, criterion=criterion).step(10)
    assert all(torch.equal(w.nan_to_num(), before[name].nan_to_num()) for name, w in conv_weights(model).items())


def test_scores_that_are_not_finite() -> None:
    with pytest.raises(AsfpError, match=r"layer '0' has weights or scores"):
        SoftPruner(small(), 0.4, 10, criterion=lambda w: w.flatten(1).sum(1) * math.nan).step(10)


@pytest.mark.parametrize("epoch", [-1, 11, 1.0, True, "1", None, math.nan])
@pytest.mark.parametrize("kind", PRUNERS)
def test_wrong_epochs(kind: type[SoftPruner], epoch: Any) -> None:
    with pytest.raises(AsfpError, match=r"epoch=.*int in 0\.\.10"):
        kind(small(), 0.4, 10).step(epoch)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"rate": 0}, r"rate=0 .*between 0 and 1.*rate=0\.4"),
        ({"rate": 1.0}, r"rate=1\.0 .*between 0 and 1"),
        ({"rate": "0.4"}, r"rate='0\.4'.*number"),
        ({"rate": math.nan}, r"rate=nan"),
        ({"rate": True}, r"rate=True"),
        ({"rate": None}, r"rate=None leaves open.*rate=0\.4.*schedule.*mapping"),
        ({"epochs": 0}, r"epochs=0 .*at least 1"),
        ({"epochs": 10.0}, r"epochs=10\.0 .*at least 1"),
        ({"interval": 0}, r"interval=0 .*at least 1"),
        ({"interval": 1.5}, r"interval=1\.5 .*at least 1"),
        ({"criterion": "l7"}, r"criterion='l7' is unknown.*l1, l2"),
        ({"align": 0}, r"align=0 .*at least 1.*align=16"),
        ({"align": 8.0}, r"align=8\.0 .*at least 1"),
        ({"align": True}, r"align=True .*at least 1"),
        ({"selection": "independant"}, r"selection='independant' is unknown.*Did you mean independent"),
        ({"selection": None}, r"selection=None is unknown"),
        ({"zero_maps": 1}, r"zero_maps=1 .*True or False"),
        ({"schedule": 0.4}, r"schedule=0\.4 is not a schedule.*ConstantSchedule"),
        ({"schedule": AsymptoticSchedule(0.4, 20)}, r"epochs=10 and schedule\.epochs=20 differ"),
        ({"schedule": lambda epoch: 0.0}, r"schedule\(10\) is 0.*end above 0"),
        ({"schedule": lambda epoch: 1.0}, r"schedule\(10\) gave 1\.0.*at least 0 and below 1"),
        ({"schedule": lambda epoch: "0.4"}, r"schedule\(10\) gave '0\.4'"),
    ],
)
def test_wrong_arguments(keywords: dict[str, Any], message: str) -> None:
    arguments = {"rate": 0.4, "epochs": 10} | keywords
    with pytest.raises(AsfpError, match=message):
        SoftPruner(small(), arguments.pop("rate"), arguments.pop("epochs"), **arguments)


def test_a_schedule_that_goes_wrong_later() -> None:
    pruner = SoftPruner(small(), None, 10, schedule=lambda epoch: 0.4 if epoch == 10 else -1.0)
    with pytest.raises(AsfpError, match=r"schedule\(3\) gave -1\.0"):
        pruner.step(3)
