"""The options for more accuracy: each does what it says, nothing by default, and survives an interruption."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asfp import AsfpError, SoftPruner, create_model
from asfp.train import TrainConfig, config_from, train
from asfp.train.assemble import Parts, assemble, start_fabric
from asfp.train.config import PruningConfig
from asfp.train.journal import read_metrics
from asfp.train.norms import FILTERS, read_filters
from asfp.train.objective import distillation
from asfp.train.pruning import build_pruner

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "model": {"name": "resnet8"},
    "data": {"name": "digits", "size": 8, "batch": 128},
    "optimizer": {"lr": 0.05, "milestones": []},
    "engine": {"accelerator": "cpu", "progress": "none"},
}


def config_with(folder: Path | str = "", **pruning: Any) -> TrainConfig:
    table = {"method": "sfp", "rate": 0.4} | pruning
    return config_from(SETTINGS | {"pruning": table, "output": str(folder)})


def parts_with(**pruning: Any) -> Parts:
    config = config_with(**pruning)
    return assemble(config, start_fabric(config))


def steps(parts: Parts, count: int, epoch: int = 1) -> None:
    parts.model.train()
    for _, (images, labels) in zip(range(count), parts.data.train_batches(epoch), strict=False):
        parts.step(images, labels, 1.0)


def prune(parts: Parts, epoch: int) -> None:
    """As the loop does it."""
    assert parts.pruner is not None
    assert parts.regrowth is not None
    parts.regrowth.before(epoch)
    parts.pruner.step(epoch)
    parts.regrowth.after(epoch)


def rows(parts: Parts, name: str) -> Tensor:
    """Which filters of a layer the last pruning took."""
    assert parts.pruner is not None
    return ~parts.pruner.masks[name]


def momentum(parts: Parts, parameter: Tensor) -> Tensor:
    buffer: Tensor = parts.optimizer.state[parameter]["momentum_buffer"]
    return buffer


@pytest.mark.parametrize("kind", ["keep", "zero"])
def test_momentum_of_pruned_filters(kind: str) -> None:
    parts = parts_with(momentum=kind)
    steps(parts, 2)
    assert parts.pruner is not None
    kept = {layer.name: momentum(parts, layer.weight).clone() for layer in parts.pruner.layers}
    prune(parts, 1)
    for layer in parts.pruner.layers:
        gone, buffer = rows(parts, layer.name), momentum(parts, layer.weight)
        assert gone.any()
        assert torch.equal(buffer[~gone], kept[layer.name][~gone])
        assert kept[layer.name][gone].any()
        assert torch.equal(buffer[gone], torch.zeros_like(buffer[gone]) if kind == "zero" else kept[layer.name][gone])


def blocks(parts: Parts) -> list[tuple[str, nn.Conv2d, nn.BatchNorm2d]]:
    """The first convolution of every block, with the batch norm behind it: a ReLU comes next."""
    modules = dict(parts.model.named_modules())
    names = [name for name in modules if name.endswith(".conv1")]
    return [(n, modules[n], modules[n.replace("conv", "bn")]) for n in names]  # type: ignore[misc]


def test_reset_norms_let_gradients_through_to_zero_filters() -> None:
    grown = {}
    for kind in ("keep", "reset"):
        parts = parts_with(norm=kind, momentum="zero")
        steps(parts, 2)
        with torch.no_grad():
            for _, _, norm in blocks(parts):
                norm.bias.fill_(-0.5)  # shut: what the ReLU behind gives is zero
        before = {name: (norm.weight.clone(), norm.bias.clone()) for name, _, norm in blocks(parts)}
        prune(parts, 1)
        for name, _, norm in blocks(parts):
            gone = rows(parts, name)
            for now, was, value in ((norm.weight, before[name][0], 1.0), (norm.bias, before[name][1], 0.01)):
                assert torch.equal(now[~gone], was[~gone])
                assert torch.equal(now[gone], was[gone] if kind == "keep" else torch.full_like(was[gone], value))
                assert kind == "keep" or not momentum(parts, now)[gone].any()
        steps(parts, 1, epoch=2)
        grown[kind] = [int(conv.weight[rows(parts, name)].any()) for name, conv, _ in blocks(parts)]
    assert grown == {"keep": [0, 0, 0], "reset": [1, 1, 1]}


def test_norms_are_not_reset_after_the_last_pruning() -> None:
    parts = parts_with(norm="reset")
    steps(parts, 2)
    prune(parts, 4)
    assert all(not bool((norm.bias == 0.01).any()) for _, _, norm in blocks(parts))


def test_reset_needs_a_batch_norm() -> None:
    config = config_from(SETTINGS | {"model": {"name": "timm:test_resnet", "options": {"norm_layer": "groupnorm1"}}})
    pytest.importorskip("timm")
    tables = config.to_dict() | {"pruning": {"norm": "reset"}}
    with pytest.raises(AsfpError, match=r"norm=reset needs a batch norm .* behind each pruned layer, and 'conv1"):
        assemble(config_from(tables), start_fabric(config))


def test_softened_filters_restart_from_a_share_of_themselves() -> None:
    parts = parts_with(soften=0.8, soften_epochs=2)
    assert parts.regrowth is not None
    assert [parts.regrowth.alpha(e) for e in range(5)] == pytest.approx([0.8, 0.4, 0.0, 0.0, 0.0])
    assert parts.pruner is not None
    for epoch, share in ((1, 0.4), (2, 0.0), (4, 0.0)):
        steps(parts, 1, epoch)
        before = {layer.name: layer.weight.detach().clone() for layer in parts.pruner.layers}
        prune(parts, epoch)
        for layer in parts.pruner.layers:
            gone = rows(parts, layer.name)
            assert torch.equal(layer.weight[gone], share * before[layer.name][gone])
            assert torch.equal(layer.weight[~gone], before[layer.name][~gone])


@pytest.mark.parametrize(("method", "selection"), [("sfp", "independent"), ("asfp", "coupled")])
def test_frozen_filters_stay_zero_and_the_rest_trains(tmp_path: Path, method: str, selection: str) -> None:
    pruning = {"method": method, "selection": selection, "criterion": "geometric_median"}
    record = train(config_with(tmp_path, freeze_epochs=2, **pruning))
    filters = read_filters(tmp_path / FILTERS)
    found = read_metrics(tmp_path)
    assert len({row["zeroed"] for row in found[1:]}) == 1
    assert found[-1]["zeroed"] >= 92
    assert [row["regrown"] for row in found][2:] == [0.0, 0.0]
    assert [row["accuracy_before"] == row["accuracy_after"] for row in found][2:] == [True, True]
    assert found[1]["regrown"] > 0.0
    assert found[1]["rate"] == found[3]["rate"] == 0.4
    for name, kept in filters.kept.items():
        assert (kept[1] == kept[3]).all()
        assert not filters.norms[name][2][~kept[1]].any()
        assert (filters.norms[name][3][kept[1]] != filters.norms[name][2][kept[1]]).any()
    assert record["compact"]["macs"] < 0.7 * record["compact"]["macs_dense"]


def test_a_captured_step_finds_the_held_filters_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph reads what it was captured with: factors made anew each epoch would be memory that is gone."""
    parts, read, multiply = parts_with(freeze_epochs=3), list[Tensor](), torch._foreach_mul_
    assert parts.regrowth is not None

    def recorded(tensors: list[Tensor], factors: list[Tensor]) -> None:
        read.extend(factors)
        multiply(tensors, factors)

    steps(parts, 1)
    prune(parts, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_mul_", recorded)
        parts.regrowth.enforce_()
    captured = [(factor, factor.clone()) for factor in read]
    for epoch in (2, 3):
        steps(parts, 1, epoch)
        parts.regrowth.after(epoch)
        read.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_foreach_mul_", recorded)
            parts.regrowth.enforce_()
        assert len(read) == len(captured) > 0
        for now, (factor, values) in zip(read, captured, strict=True):
            assert now.data_ptr() == factor.data_ptr()
            assert torch.equal(now, values)
            assert 0 < (now == 0).sum() < now.numel()


def test_a_loss_that_learns_from_a_teacher() -> None:
    teacher, logits = nn.Linear(3, 5), torch.randn(7, 5, requires_grad=True)
    images, labels = torch.randn(7, 3), torch.randint(5, (7,))
    loss = distillation(teacher, alpha=0.3, temperature=2.0)
    soft = [torch.softmax(t / 2.0, 1) for t in (teacher(images), logits)]
    told = (soft[0] * (soft[0].log() - soft[1].log())).sum(1).mean() * 4.0
    expected = 0.7 * nn.functional.cross_entropy(logits, labels) + 0.3 * told
    assert loss(logits, images, labels).item() == pytest.approx(expected.item(), rel=1e-5)
    loss(logits, images, labels).backward()
    assert logits.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert not teacher.training


def test_distillation_trains_towards_the_teacher(tmp_path: Path) -> None:
    dense = config_with(tmp_path / "dense", method="none")
    train(dense)
    weights = str(tmp_path / "dense" / "model.pt")
    tables = SETTINGS | {"epochs": 1, "pruning": {"method": "asfp"}}
    plain = train(config_from(tables | {"output": str(tmp_path / "plain")}))
    told = train(config_from(tables | {"distill": {"weights": weights}, "output": str(tmp_path / "told")}))
    assert told["epochs"]["loss"] != plain["epochs"]["loss"]
    assert len(told["weights"]["distill"]) == 64
    assert plain["weights"] == {}
    copy = {"model": {"name": "resnet8", "weights": weights}, "distill": {"weights": weights, "alpha": 1.0}}
    config = config_from(tables | copy | {"pruning": {"method": "none"}})
    parts = assemble(config, start_fabric(config))
    parts.model.eval()  # as the teacher: the loss of an exact copy is zero
    images, labels = next(parts.data.train_batches(1))
    assert parts.step(images, labels, 1.0).abs().item() < 1e-5
    with pytest.raises(AsfpError, match=r"distill.weights='nothing.pt': there is no such file"):
        train(config_from(tables | {"distill": {"weights": "nothing.pt"}, "output": str(tmp_path / "no")}))


@pytest.mark.slow
def test_a_compiled_step_learns_from_a_teacher_as_a_plain_one(tmp_path: Path) -> None:
    torch.save(create_model("resnet8", in_channels=1).state_dict(), tmp_path / "teacher.pt")
    losses = []
    for mode in ("eager", "compile"):
        engine = SETTINGS["engine"] | {"compile": mode}
        tables = SETTINGS | {"distill": {"weights": str(tmp_path / "teacher.pt")}, "engine": engine}
        parts = assemble(config := config_from(tables), start_fabric(config))
        parts.model.train()
        losses.append(
            [float(parts.step(x, y, 1.0)) for (x, y), _ in zip(parts.data.train_batches(1), "ab", strict=False)]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "pruning",
    [
        {"momentum": "zero", "norm": "reset", "soften": 0.5, "soften_epochs": 4},
        {"method": "asfp", "freeze_epochs": 2, "momentum": "zero"},
    ],
    ids=lambda pruning: "+".join(pruning),
)
def test_an_interrupted_run_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pruning: dict[str, Any]
) -> None:
    import asfp.train.loop as loop

    torch.save(create_model("resnet8", in_channels=1).state_dict(), tmp_path / "teacher.pt")
    distill = {"weights": str(tmp_path / "teacher.pt"), "alpha": 0.5}
    engine = SETTINGS["engine"] | {"checkpoint_steps": 5}

    def config(name: str) -> TrainConfig:
        tables = {"pruning": {"method": "sfp", "rate": 0.4} | pruning, "output": str(tmp_path / name)}
        return config_from(SETTINGS | tables | {"distill": distill, "engine": engine})

    train(config("whole"))
    real, saves = loop.save_checkpoint, [0]

    def crash(*arguments: Any) -> None:
        real(*arguments)
        saves[0] += 1
        if saves[0] in (3, 5, 8):
            raise InterruptedError

    monkeypatch.setattr(loop, "save_checkpoint", crash)
    for _ in range(3):
        with pytest.raises(InterruptedError):
            train(config("cut"))
    train(config("cut"))
    assert (tmp_path / "whole" / FILTERS).read_text() == (tmp_path / "cut" / FILTERS).read_text()
    whole, cut = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "cut"))
    assert [name for name in whole if not torch.equal(whole[name], cut[name])] == []


def test_nothing_changes_by_default() -> None:
    parts = parts_with()
    steps(parts, 2)
    assert parts.regrowth is not None
    assert not parts.regrowth.holding
    assert parts.pruner is not None
    parts.pruner.step(1)
    state = {key: value.clone() for key, value in parts.model.state_dict().items()}
    parts.regrowth.before(1)
    parts.regrowth.after(1)
    assert all(torch.equal(value, state[key]) for key, value in parts.model.state_dict().items())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"pruning": {"momentum": "none"}}, r"pruning.momentum='none' is unknown: use one of keep, zero"),
        ({"pruning": {"norm": "zero"}}, r"pruning.norm='zero' is unknown: use one of keep, reset"),
        ({"pruning": {"norm": "reset", "norm_shift": 0}}, r"pruning.norm_shift=0.0: it must be above 0"),
        ({"pruning": {"soften": 1.5}}, r"pruning.soften=1.5: it must lie between 0 \(off\) and 1"),
        ({"pruning": {"freeze_epochs": -1}}, r"pruning.freeze_epochs=-1 is too small"),
        ({"pruning": {"freeze_epochs": 4}}, r"pruning.freeze_epochs=4: it must be less than epochs=4"),
        ({"pruning": {"freeze_epochs": 1, "interval": 2}}, r"the epoch before, 3, must be one with a pruning"),
        ({"pruning": {"method": "hard", "soften": 0.5}}, r"pruning.soften=0.5 is for soft pruning"),
        ({"pruning": {"method": "none", "momentum": "zero"}}, r"pruning.momentum=zero is for soft pruning"),
        ({"distill": {"alpha": 0}}, r"distill.alpha=0.0: it must lie above 0"),
        ({"distill": {"temperature": 0}}, r"distill.temperature=0.0: it must be above 0"),
    ],
)
def test_mistakes_are_named(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        config_from(SETTINGS | tables)


def test_layers_by_pattern() -> None:
    model, data = create_model("resnet8"), SimpleNamespace(shape=(3, 8, 8))
    config = TrainConfig(pruning=PruningConfig(layers={"layer*.conv2": 0.3, "layer3.0.conv2": 0.5}))
    pruner = build_pruner(config, model, data)
    assert isinstance(pruner, SoftPruner)
    goals = {layer.name: layer.goal for layer in pruner.layers}
    assert goals == {"layer1.0.conv2": 0.3, "layer2.0.conv2": 0.3, "layer3.0.conv2": 0.5}
    with pytest.raises(AsfpError, match=r"no convolution is named like 'stage\*.conv2'"):
        build_pruner(TrainConfig(pruning=PruningConfig(layers={"stage*.conv2": 0.3})), model, data)
