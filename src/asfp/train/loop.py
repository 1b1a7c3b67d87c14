"""The loop: train an epoch, evaluate, prune, evaluate, log, checkpoint; at the end compact, verify, record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asfp.errors import AsfpError, Interrupted, out_of_room
from asfp.pruner import SoftPruner
from asfp.steps import PruneStep
from asfp.train.assemble import Parts, assemble, learning_rate, set_learning_rate, start_fabric
from asfp.train.checkpoint import (
    Progress,
    difference,
    gather_ranks,
    last_saved,
    load_checkpoint,
    not_written,
    save_checkpoint,
)
from asfp.train.config import TrainConfig
from asfp.train.evaluate import accuracy
from asfp.train.files import only_run
from asfp.train.identity import comparable, settings
from asfp.train.journal import Journal
from asfp.train.norms import filter_norms, returned
from asfp.train.processes import any_image, asked_to_stop, share_buffers, take_step, total_losses
from asfp.train.pruning import taken_last
from asfp.train.record import RECORD, finish, place_of
from asfp.train.stopping import stop_signals

CHECK_EVERY = 200  # steps between two looks at the losses, each of which waits for the device
AGREE_EVERY = 8  # steps after which several processes tell each other whether one was asked to stop


def train(config: TrainConfig) -> dict[str, Any]:
    """Run a config to its end and return its record; a run that was cut off goes on where it was.

    Everything is written under `config.folder`: config.toml, metrics.jsonl, filters.jsonl, TensorBoard files,
    checkpoints, model.pt (the masked weights), compact.safetensors (for `asfp.load`) and record.json. Called again
    when all is done, it only returns the record.

    >>> import tempfile
    >>> from asfp.train import config_from
    >>> small = {
    ...     "model": {"name": "resnet8"},
    ...     "data": {"name": "digits", "size": 8, "batch": 256},
    ...     "epochs": 1,
    ...     "engine": {"accelerator": "cpu", "progress": "none"},
    ...     "output": tempfile.mkdtemp(),
    ... }
    >>> record = train(config_from(small))
    >>> record["result"]["accuracy"] == record["result"]["accuracy_compact"]
    True
    """
    if (done := config.folder / RECORD).exists():
        return _finished(config, done)
    with _numerics():
        return _train(config, start_fabric(config))


def _train(config: TrainConfig, fabric: Any) -> dict[str, Any]:
    try:
        with only_run(config.folder) if fabric.is_global_zero else nullcontext():
            return _run(config, fabric)
    except OSError as error:
        if not out_of_room(error):
            raise
        raise not_written(config.folder, error) from error


def _run(config: TrainConfig, fabric: Any) -> dict[str, Any]:
    first = fabric.is_global_zero
    parts = assemble(config, fabric)
    progress = load_checkpoint(config.folder, settings(config), parts)
    if first:
        (config.folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    journal = Journal(config, progress.history, parts.data.steps, parts.pruner, quiet=not first)
    if progress.epoch or progress.step:
        journal.say(f"going on from {progress} of {config.folder}")
    elif parts.pruner is not None:
        if told := taken_last(parts.pruner, config, parts.model, parts.data):
            journal.say(f"note: {told}")
        if parts.pruner.schedule(0) > 0.0:
            _prune(parts, parts.pruner, 0)  # SFP: a rate above 0 before training, too
            _restart(parts, 0)
    if parts.regrowth is not None:
        parts.regrowth.resume(progress.epoch)
    here = place_of(parts)
    if progress.epoch < config.epochs:
        progress.trains_at(here)
    try:
        with stop_signals() as stop:
            for epoch in range(progress.epoch + 1, config.epochs + 1):
                row, norms = _epoch(config, parts, progress, journal, epoch, stop)
                progress.epoch, progress.step = epoch, 0
                progress.history.append(row)
                journal.epoch(row, norms)
                asked = asked_to_stop(parts, stop)
                if epoch % config.engine.checkpoint_epochs == 0 or epoch == config.epochs or asked:
                    _save(config, parts, progress)
                _leave(config, parts, progress, asked)
        record = finish(config, parts, progress, here)
    finally:
        journal.close()
    return record


def _epoch(
    config: TrainConfig, parts: Parts, progress: Progress, journal: Journal, epoch: int, stop: list[int]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One epoch of Algorithm 1 and what is to be told of it: the row, and the filters' norms before pruning."""
    lr = learning_rate(config.optimizer, epoch, config.epochs)
    set_learning_rate(parts.optimizer, lr)
    clock = _Clock(parts.fabric.device)
    _train_epoch(config, parts, progress, journal, epoch, stop)
    clock.stop("train")
    share_buffers(parts)
    _check_weights(config, parts, progress)  # filters that are not finite cannot be ranked
    before = after = accuracy(parts.fabric, parts.model, parts.data, parts.normalise, parts.forward)
    clock.stop("evaluate")
    rate, zeroed, regrown, back = 0.0, 0, 0.0, 0.0
    norms = filter_norms(parts.pruner or parts.model)
    clock.stop("log")
    if parts.pruner is not None:
        masks = parts.pruner.masks
        step = _prune(parts, parts.pruner, epoch)
        rate, zeroed, regrown = step.rate, step.zeroed, step.regrown
        clock.stop("prune")
        back = returned(masks, parts.pruner.masks)
        clock.stop("log")
        if zeroed:
            after = accuracy(parts.fabric, parts.model, parts.data, parts.normalise, parts.forward)
        clock.stop("evaluate")
        if zeroed:
            _restart(parts, epoch)
        clock.stop("prune")
    row = {
        "epoch": epoch,
        "loss": _mean_loss(parts, progress),
        "lr": lr,
        "rate": rate,
        "accuracy_before": before,
        "accuracy_after": after,
        "zeroed": zeroed,
        "regrown": regrown,
        "returned": back,
        "seconds": clock.seconds,
    }
    return row, norms


def _prune(parts: Parts, pruner: SoftPruner, epoch: int) -> PruneStep:
    """The pruner's step; in a frozen end nothing is chosen, and what was pruned is zero already."""
    if parts.regrowth is not None and parts.regrowth.frozen(epoch):
        zeroed = sum(int((~mask).sum()) for mask in pruner.masks.values())
        return PruneStep(epoch, float(pruner.schedule(epoch)), zeroed)
    if parts.regrowth is not None:
        parts.regrowth.before(epoch)
    return pruner.step(epoch)


def _restart(parts: Parts, epoch: int) -> None:
    """How the pruned filters begin the next epoch, where an option changes that."""
    if parts.regrowth is not None:
        parts.regrowth.after(epoch)


def _train_epoch(
    config: TrainConfig, parts: Parts, progress: Progress, journal: Journal, epoch: int, stop: list[int]
) -> None:
    """All batches of an epoch, from the step that the progress is at."""
    data, world = parts.data, parts.fabric.world_size
    every, agree = config.engine.checkpoint_steps, 1 if world == 1 else AGREE_EVERY
    _lengthen(progress, data.steps, parts.fabric.device)
    parts.model.train()
    ramps = config.optimizer.warmup == "ramp" and epoch <= config.optimizer.warmup_epochs
    for step, (images, labels) in enumerate(data.train_batches(epoch, progress.step), progress.step + 1):
        if ramps:
            rate = learning_rate(config.optimizer, epoch, config.epochs, step / data.steps)
            set_learning_rate(parts.optimizer, rate)
        weight = len(labels) * world / data.global_size(step - 1)
        if any_image(parts, labels, config.data.corrupt == "skip"):
            progress.losses[step - 1] = take_step(parts, images, labels, weight) * weight
            progress.seen[step - 1] = True
        progress.step = step
        journal.step(epoch, step)
        if step % CHECK_EVERY == 0:
            _check_losses(config, parts, progress, epoch)
        asked = asked_to_stop(parts, stop) if step % agree == 0 else 0
        if step < data.steps and (asked or (every and step % every == 0)):
            _check_losses(config, parts, progress, epoch)
            _save(config, parts, progress)
            _leave(config, parts, progress, asked)
    _check_losses(config, parts, progress, epoch)
    if not bool(progress.seen.any()):
        raise AsfpError(
            f"epoch {epoch} had no image to train on ({data.train_size:,} training images, data.batch="
            f"{config.data.batch}): check data.root and the warnings of images that cannot be read"
        )


def _lengthen(progress: Progress, steps: int, device: torch.device) -> None:
    """Room for all steps of an epoch; checkpoints of before `seen` was kept had an image in each step."""
    done, losses, seen = progress.step, torch.zeros(steps, device=device), torch.zeros(steps, dtype=torch.bool)
    losses[:done] = progress.losses.to(device)[:done]
    seen[:done] = progress.seen[:done] if len(progress.seen) else True
    progress.losses, progress.seen = losses, seen


def _check_losses(config: TrainConfig, parts: Parts, progress: Progress, epoch: int) -> None:
    losses = total_losses(parts, progress.losses[: progress.step])  # so that all processes stop, whichever met it
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        step = int(bad[0]) + 1
        raise _diverged(config, f"the loss is {float(losses[step - 1])}", epoch, step)


def _check_weights(config: TrainConfig, parts: Parts, progress: Progress) -> None:
    """So that a checkpoint is always one to go on from."""
    state = [value for value in parts.model.state_dict().values() if value.is_floating_point() and value.numel()]
    if not bool(torch.stack([value.abs().amax() for value in state]).isfinite().all()):
        raise _diverged(
            config, "there are weights that are not finite", progress.epoch + bool(progress.step), progress.step
        )


def _diverged(config: TrainConfig, what: str, epoch: int, step: int) -> AsfpError:
    at = f"epoch {epoch}, step {step}" if step else f"epoch {epoch}, after its last step"
    last = last_saved(config.folder)
    return AsfpError(
        f"{what} in {at}: training has diverged. The last good checkpoint in {config.folder} {last}; lower "
        f"optimizer.lr (now {config.optimizer.lr:g}) and start in another folder with output=..."
    )


def _mean_loss(parts: Parts, progress: Progress) -> float:
    """Over the steps that had an image."""
    losses: Tensor = parts.fabric.all_reduce(progress.losses, reduce_op="mean")
    return float(losses[progress.seen.to(losses.device)].double().mean())


def _save(config: TrainConfig, parts: Parts, progress: Progress) -> None:
    _check_weights(config, parts, progress)
    ranks = gather_ranks(parts, progress)
    if parts.fabric.is_global_zero:
        save_checkpoint(config.folder, settings(config), parts, progress, ranks)
    if parts.fabric.world_size > 1:
        parts.fabric.barrier()  # a process that ended before the checkpoint is written would take the others with it


def _leave(config: TrainConfig, parts: Parts, progress: Progress, asked: int) -> None:
    if asked and progress.epoch < config.epochs:
        message = f"Stopped after {progress}; run the same command again to go on from there."
        raise Interrupted(message, asked, silent=not parts.fabric.is_global_zero)


@contextmanager
def _numerics() -> Iterator[None]:
    """Leaves torch's switches as they were; a run sets them."""
    cudnn, deterministic = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    before = cudnn.benchmark, cudnn.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        cudnn.benchmark, cudnn.deterministic = before


class _Clock:
    """Seconds by phase; waits for the device at each stop, so that a phase's work is counted in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.last = (
            device,
            dict.fromkeys(("train", "evaluate", "prune", "log"), 0.0),
            self._now(device),
        )

    def stop(self, phase: str) -> None:
        now = self._now(self.device)
        self.seconds[phase] += now - self.last
        self.last = now

    @staticmethod
    def _now(device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _finished(config: TrainConfig, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"config", "result", "compact", "seconds"} - record.keys()
        saved, own = (comparable(record["config"]), comparable(settings(config))) if not missing else ({}, {})
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise _no_record(path, str(error)) from error
    if missing:
        raise _no_record(path, f"it has no {', '.join(sorted(missing))}")
    for key in (*own, *saved):
        if saved.get(key) != own.get(key):
            raise AsfpError(
                f"{config.folder} holds a finished run with other settings "
                f"({key}: {difference(saved.get(key), own.get(key))}): use another folder with output=..., or delete it"
            )
    return record


def _no_record(path: Path, why: str) -> AsfpError:
    return AsfpError(
        f"{path} is not the record of a run ({why}): delete it and run the same command again, which goes on from the "
        "last checkpoint"
    )
