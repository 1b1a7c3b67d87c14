"""Checkpoints that survive anything: written aside, checked by a digest, the previous one kept, read without pickle."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asfp.errors import AsfpError
from asfp.train.assemble import Parts
from asfp.train.identity import comparable
from asfp.weights import CHECKPOINT, checkpoint_payload

CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
UNKNOWN = {"from_epoch": 1, "commit": "", "versions": {}, "hardware": {"device": "not recorded"}}
"""Where a run was trained whose checkpoint is from before this was kept."""

_KEYS = {"config", "progress", "model", "optimizer", "pruner", "rng", "rng_device"}
_whole: dict[Path, tuple[int, int, int]] = {}  # files that were seen whole, and what they were like then


@dataclass
class Progress:
    """How far a run is: `epoch` epochs are complete, and `step` steps of the next, with their losses.

    `losses` are this process's; `seen` tells, for all processes alike, which steps had an image to train on.
    `places` says from which epoch on it was trained with what, and where.
    """

    epoch: int = 0
    step: int = 0
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    history: list[dict[str, Any]] = field(default_factory=list)
    seen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    places: list[dict[str, Any]] = field(default_factory=list)

    def trains_at(self, place: dict[str, Any]) -> None:
        """The epochs from here on are trained there.

        >>> run = Progress()
        >>> for run.epoch, device in ((0, "one GPU"), (3, "one GPU"), (5, "a CPU")):
        ...     run.trains_at({"hardware": {"device": device}})
        >>> [(place["from_epoch"], place["hardware"]["device"]) for place in run.places]
        [(1, 'one GPU'), (6, 'a CPU')]
        """
        since = {"from_epoch": self.epoch + 1} | ({"from_step": self.step + 1} if self.step else {})
        if not self.places or any(self.places[-1].get(key) != value for key, value in place.items()):
            self.places.append({**since, **place})

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + (f" and {self.step} steps" if self.step else "")


def gather_ranks(parts: Parts, progress: Progress) -> dict[str, list[Tensor]]:
    """What differs between the processes of a run, of each of them: losses and random numbers. Called on all of them.

    >>> from types import SimpleNamespace
    >>> one = SimpleNamespace(fabric=SimpleNamespace(device=torch.device("cpu"), world_size=1))
    >>> {name: len(values) for name, values in gather_ranks(one, Progress()).items()}
    {'losses': 1, 'rng': 1, 'rng_device': 1}
    """
    device = parts.fabric.device
    own = {
        "losses": progress.losses[: progress.step],
        "rng": torch.get_rng_state(),
        "rng_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0),
    }
    return {name: _of_all(parts.fabric, value) for name, value in own.items()}


def _of_all(fabric: Any, value: Tensor) -> list[Tensor]:
    if fabric.world_size == 1 or not value.numel():
        return [value.cpu()] * fabric.world_size
    value = value.to(fabric.device)
    found = [torch.empty_like(value) for _ in range(fabric.world_size)]
    dist.all_gather(found, value)
    return [part.cpu() for part in found]


def save_checkpoint(
    folder: Path, config: dict[str, Any], parts: Parts, progress: Progress, ranks: dict[str, list[Tensor]]
) -> None:
    """Write the run's whole state to folder/checkpoint.pt; the one before stays as checkpoint.previous.pt."""
    data = parts.data
    state = {
        "config": config,
        "progress": {
            "epoch": progress.epoch,
            "step": progress.step,
            "losses": ranks["losses"][0],
            "history": progress.history,
            "seen": progress.seen[: progress.step].clone(),
            "places": progress.places,
        },
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict()["state"],
        "pruner": parts.pruner.state_dict() if parts.pruner is not None else {},
        "precision": parts.fabric._precision.state_dict(),  # how far losses are scaled up, in float16
        "rng": ranks["rng"][0],
        "rng_device": ranks["rng_device"][0],
        "ranks": ranks,
        "data": {"classes": data.classes, "train_size": data.train_size, "test_size": data.test_size},
    }
    try:
        write_state(folder, state)
    except OSError as error:
        raise not_written(folder, error) from error


def not_written(folder: Path, error: OSError) -> AsfpError:
    """For a run that could not write to its folder: what is kept, and how to go on.

    >>> print(not_written(Path("/nowhere"), OSError(28, "No space left on device")))
    the run could not be written to /nowhere: No space left on device; the last good checkpoint was not written yet. \
Make room and run the same command again: it goes on from there
    """
    return AsfpError(
        f"the run could not be written to {folder}: {error.strerror or error}; the last good checkpoint "
        f"{last_saved(folder)}. Make room and run the same command again: it goes on from there"
    )


def last_saved(folder: Path) -> str:
    """When the newest good checkpoint of a folder was written, as the end of a sentence.

    >>> last_saved(Path("/nowhere"))
    'was not written yet'
    """
    try:
        state = read_newest(folder)
    except AsfpError:
        return "cannot be read any more"
    if state is None:
        return "was not written yet"
    return f"was written after {Progress(state['progress']['epoch'], state['progress']['step'])}"


def load_checkpoint(folder: Path, config: dict[str, Any], parts: Parts) -> Progress:
    """Put the newest good checkpoint of the folder into the parts, and say how far it was; none there is no error."""
    state = read_newest(folder)
    if state is None:
        return Progress()
    saved, own = comparable(state["config"]), comparable(config)
    if saved != own:
        key = next((key for key in own if saved.get(key) != own[key]), "config")
        what = difference(saved.get(key), own.get(key))
        raise AsfpError(
            f"{folder} holds a run with other settings ({key}: {what}): "
            "use another folder with output=..., or the settings it was started with, or delete it"
        )
    _compare_data(folder, state.get("data", {}), parts)
    try:
        parts.model.load_state_dict(state["model"])
    except RuntimeError as error:
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
        raise AsfpError(
            f"the checkpoint in {folder} does not fit the model ({first}): use another folder with output=..., or the "
            "data and the model that it was started with"
        ) from error
    parts.optimizer.load_state_dict(parts.optimizer.state_dict() | {"state": state["optimizer"]})
    if parts.pruner is not None:
        parts.pruner.load_state_dict(state["pruner"])
    if state.get("precision"):
        parts.fabric._precision.load_state_dict(state["precision"])
    ranks = state.get("ranks", {"losses": [state["progress"]["losses"]], "rng": [state["rng"]]})
    ranks = {"rng_device": [state["rng_device"]]} | ranks
    _set_random(parts.fabric, ranks)
    kept = {"places": [UNKNOWN], **state["progress"]}
    return Progress(**kept | {"losses": _own_losses(parts.fabric, ranks["losses"])})


def _set_random(fabric: Any, ranks: dict[str, list[Tensor]]) -> None:
    """Each process's own; a process that was not there keeps the numbers that it starts with."""
    rank = fabric.global_rank
    if rank < len(ranks["rng"]):
        torch.set_rng_state(ranks["rng"][rank])
    if fabric.device.type == "cuda" and rank < len(ranks["rng_device"]) and len(ranks["rng_device"][rank]):
        torch.cuda.set_rng_state(ranks["rng_device"][rank], fabric.device)


def _own_losses(fabric: Any, losses: list[Tensor]) -> Tensor:
    """This process's; with another number of processes than before, the mean of all, which gives the same mean."""
    return losses[fabric.global_rank] if len(losses) == fabric.world_size else torch.stack(losses).mean(0)


def _compare_data(folder: Path, saved: dict[str, Any], parts: Parts) -> None:
    for key, there in saved.items():
        if (here := getattr(parts.data, key, there)) != there:
            raise AsfpError(
                f"{folder} holds a run on other data ({key}: {there} there, {here} here): set data.root to the images "
                "that it was started with, or use another folder with output=..."
            )


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Atomically: a killed process leaves the old checkpoint, the new one, or the old one under its second name.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for epoch in (1, 2):
    ...     write_state(folder, dict.fromkeys(_KEYS) | {"progress": vars(Progress(epoch))})
    >>> read_newest(folder)["progress"]["epoch"]
    2
    >>> _ = (folder / CURRENT).write_bytes(b"torn")
    >>> read_newest(folder)["progress"]["epoch"]
    1
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    aside = folder / f"{CURRENT}.new"
    try:
        with aside.open("wb") as file:
            file.write(CHECKPOINT + hashlib.sha256(payload).hexdigest().encode() + b"\n")
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        if _is_whole(folder / CURRENT):  # a torn one must not take the place of the last good one
            (folder / CURRENT).replace(folder / PREVIOUS)
        aside.replace(folder / CURRENT)
        _whole[folder / CURRENT] = _likeness(folder / CURRENT)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    _sync(folder)


def read_newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None where there is none at all; an error where all are damaged.

    >>> read_newest(Path("/nowhere")) is None
    True
    """
    found = [path for path in (folder / CURRENT, folder / PREVIOUS) if path.exists()]
    problems = []
    for path in found:
        try:
            return read_state(path)
        except AsfpError as error:
            problems.append(str(error))
    if not found:
        return None
    raise AsfpError(
        f"no checkpoint in {folder} can be read ({'; '.join(problems)}): "
        "restore one, or delete the folder to begin again from nothing"
    )


def read_state(path: Path) -> dict[str, Any]:
    """The state in one checkpoint file, when it is whole and one of ours.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "theirs.pt"
    >>> torch.save({}, file)
    >>> read_state(file)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: ...theirs.pt is not a checkpoint of asfp train
    """
    payload = checkpoint_payload(path)
    try:
        state: Any = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        missing = (_KEYS - state.keys()) | ({"epoch", "step", "losses", "history"} - state["progress"].keys())
    except Exception as error:
        raise AsfpError(f"{path} is not a checkpoint of asfp train ({type(error).__name__} in reading it)") from error
    if missing:
        raise AsfpError(f"{path} is not a checkpoint of asfp train: it has no {', '.join(sorted(missing))}")
    _whole[path] = _likeness(path)
    found: dict[str, Any] = state
    return found


def _is_whole(path: Path) -> bool:
    """Known from when this process wrote or read it, or by reading it now."""
    if not path.exists():
        return False
    if _whole.get(path) == _likeness(path):
        return True
    try:
        checkpoint_payload(path)
    except AsfpError:
        return False
    return True


def _likeness(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _sync(folder: Path) -> None:
    """Make the renames last through a power failure, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def difference(saved: Any, own: Any) -> str:
    """The first thing in which two settings differ, in words.

    >>> difference({"rate": 0.4, "d": 0.125}, {"rate": 0.3, "d": 0.125})
    'rate 0.4 there, 0.3 here'
    """
    if isinstance(saved, dict) and isinstance(own, dict):
        key = next(k for k in (*own, *saved) if saved.get(k) != own.get(k))
        return f"{key} {saved.get(key)!r} there, {own.get(key)!r} here"
    return f"{saved!r} there, {own!r} here"
