"""The captured step on a GPU: the same training as the plain step, pruning and learning rates included."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asfp import create_model
from asfp.train import config_from
from asfp.train.assemble import Parts, assemble, set_learning_rate, start_fabric
from asfp.train.cuda.geometry import launcher
from asfp.train.evaluate import accuracy
from asfp.train.stage import Stage
from stages import STAGES, check_stage, layers, maps

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def parts_of(mode: str, method: str, accelerator: str = "cuda", **tables: Any) -> Parts:
    config = config_from(
        {
            "epochs": 4,
            "model": {"name": "resnet8"},
            "data": {"name": "digits", "size": 16, "batch": 128},
            "pruning": {"method": method} | tables.get("pruning", {}),
            "distill": tables.get("distill", {}),
            "engine": {"compile": mode, "precision": tables.get("precision", "32-true"), "accelerator": accelerator},
        }
    )
    return assemble(config, start_fabric(config))


def epochs(parts: Parts, lr: float, count: int = 2) -> dict[str, Tensor]:
    """How far each parameter moved in some epochs, with a pruning and a change of the learning rate between them."""
    start = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    for epoch in range(1, count + 1):
        parts.model.train()
        set_learning_rate(parts.optimizer, lr / epoch)
        for images, labels in parts.data.train_batches(epoch):
            parts.step(images, labels, 1.0)
        if parts.pruner is not None and epoch < count:
            parts.pruner.step(epoch)
    return {name: p.detach() - start[name] for name, p in parts.model.named_parameters()}


def assert_alike(mode: str, method: str, accelerator: str = "cuda") -> Parts:
    """With a small learning rate all steps are taken at nearly the same weights, so that rounding grows little.

    At 0.02 a relative change of 1e-6 in the weights makes the loss of the fifth batch differ by 1e-2; at 1e-4 it
    makes the way that the weights go differ by 2e-3, and by 5e-2 where filters grow again from exactly zero.
    """
    tolerance = 0.2 if method == "asfp" else 0.02
    torch.backends.cudnn.allow_tf32 = False
    plain = epochs(parts_of("eager", method, accelerator), lr=1e-4)
    parts = parts_of(mode, method, accelerator)
    for name, moved in epochs(parts, lr=1e-4).items():
        assert plain[name].norm() > 0
        assert (moved - plain[name]).norm() < tolerance * plain[name].norm(), name
    return parts


@needs_gpu
@pytest.mark.parametrize("method", ["none", "asfp", "hard"])
def test_captured_and_plain_steps_move_the_weights_alike(method: str) -> None:
    parts: Any = assert_alike("graph", method)
    (captured,) = parts.step.captured.values()  # the last, smaller batch runs as the plain step
    assert captured.graph is not None


@needs_gpu
@pytest.mark.parametrize("method", ["none", "hard"])
def test_fused_blocks_move_the_weights_as_autocast_does(method: str) -> None:
    """In 16 bits both stray from float32, in different ways: by about as much as they are apart."""
    plain = epochs(parts_of("eager", method), lr=1e-4)
    eager = epochs(parts_of("eager", method, precision="bf16-mixed"), lr=1e-4)
    parts = parts_of("graph", method, precision="bf16-mixed")
    assert parts.forward is not None
    for name, moved in epochs(parts, lr=1e-4).items():
        apart = (eager[name] - plain[name]).norm()
        assert (moved - plain[name]).norm() < 1.5 * apart + 0.05 * plain[name].norm(), name
    x, _ = next(parts.data.test_batches())
    parts.model.eval()
    with torch.no_grad(), parts.fabric.autocast():
        fused, model = parts.forward(parts.normalise(x)).float(), parts.model(parts.normalise(x)).float()
    assert (fused - model).norm() < 0.03 * model.norm()


@needs_gpu
def test_fused_blocks_are_captured_for_every_size_of_batch() -> None:
    """With an evaluation by larger batches in between, which must not take what the graphs read."""
    parts: Any = parts_of("graph", "asfp", precision="bf16-mixed")
    for count in range(5):
        epochs(parts, lr=0.02, count=1)
        parts.pruner.step(count + 1) if count < 4 else None
        assert accuracy(parts.fabric, parts.model, parts.data, parts.normalise, parts.forward) > 0.05
    assert len(parts.step.captured) == 2
    assert all(captured.graph is not None for captured in parts.step.captured.values())
    assert all(bool(p.isfinite().all()) for p in parts.model.parameters())


@needs_gpu
@pytest.mark.parametrize(
    ("channels", "height", "width", "count", "depth", "shortcut"),
    [*STAGES, (16, 32, 32, 128, 4, False), (32, 16, 16, 128, 3, True), (64, 8, 8, 128, 3, True)],
)
def test_a_stage_is_what_torch_computes(
    channels: int, height: int, width: int, count: int, depth: int, shortcut: bool
) -> None:
    check_stage(channels, height, width, count, depth, shortcut, launcher, "cuda")


@needs_gpu
def test_the_same_inputs_give_the_same_bits() -> None:
    torch.manual_seed(0)
    convs, norms = (part.cuda() for part in layers(16, 4))
    y, slope = maps(128, 16, 32, 32).cuda(), maps(128, 16, 32, 32).cuda()
    fused, found = Stage(list(convs), list(norms)), []  # type: ignore[arg-type]
    for _ in range(3):
        convs.zero_grad()
        fused(y, None).backward(slope)
        found.append([conv.weight.grad.clone() for conv in convs])  # type: ignore[union-attr,operator]
    for others in found[1:]:
        for first, other in zip(found[0], others, strict=True):
            assert torch.equal(first, other)


@pytest.mark.slow
def test_compiled_and_plain_steps_move_the_weights_alike() -> None:
    assert_alike("compile", "asfp", "cpu")


@needs_gpu
def test_hard_masks_hold_within_the_graph() -> None:
    parts = parts_of("graph", "hard")
    epochs(parts, lr=0.02, count=3)
    assert parts.pruner is not None
    for images, labels in parts.data.train_batches(4):
        parts.step(images, labels, 1.0)
        for layer in parts.pruner.layers:
            assert not layer.weight[~parts.pruner.masks[layer.name]].any()


@needs_gpu
def test_a_frozen_end_and_a_teacher_within_the_graph(tmp_path: Path) -> None:
    torch.save(create_model("resnet8", in_channels=1).state_dict(), tmp_path / "teacher.pt")
    parts = parts_of(
        "graph",
        "sfp",
        pruning={"freeze_epochs": 2, "momentum": "zero", "norm": "reset", "soften": 0.5},
        distill={"weights": str(tmp_path / "teacher.pt")},
    )
    assert parts.pruner is not None
    assert parts.regrowth is not None
    taken = list[Tensor]()
    for epoch in (1, 2, 3, 4):
        parts.model.train()
        for images, labels in parts.data.train_batches(epoch):
            parts.step(images, labels, 1.0)
            for layer in parts.pruner.layers if epoch > 2 else ():
                assert not layer.weight[~parts.pruner.masks[layer.name]].any()
        if epoch < 3:
            parts.regrowth.before(epoch)
            parts.pruner.step(epoch)
        parts.regrowth.after(epoch)
        # takes the place of whatever the graph still reads but nobody holds any more
        taken += [torch.full_like(p, math.nan) for p in parts.model.parameters()]
    assert all(bool(p.isfinite().all()) for p in parts.model.parameters())
