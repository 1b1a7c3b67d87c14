"""Checkpoints that survive anything: written aside, checked by a digest, the previous one kept, read without pickle."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asfp.errors import AsfpError
from asfp.train.assemble import Parts
from asfp.train.identity import comparable

MAGIC = b"asfp checkpoint 1 "
CURRENT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"


@dataclass
class Progress:
    """How far a run is: `epoch` epochs are complete, and `step` steps of the next, with their losses."""

    epoch: int = 0
    step: int = 0
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))
    history: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + (f" and {self.step} steps" if self.step else "")


def save_checkpoint(folder: Path, config: dict[str, Any], parts: Parts, progress: Progress) -> None:
    """Write the run's whole state to folder/checkpoint.pt; the one before stays as checkpoint.previous.pt."""
    device = parts.fabric.device
    state = {
        "config": config,
        "progress": {
            "epoch": progress.epoch,
            "step": progress.step,
            "losses": progress.losses[: progress.step].cpu(),
            "history": progress.history,
        },
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict()["state"],
        "pruner": parts.pruner.state_dict() if parts.pruner is not None else {},
        "rng": torch.get_rng_state(),
        "rng_device": torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0),
    }
    try:
        write_state(folder, state)
    except OSError as error:
        kept = read_newest(folder)
        last = f"the last good one is {kept['progress']['epoch']} epochs into the run" if kept else "there is none yet"
        raise AsfpError(
            f"the checkpoint could not be written to {folder}: {error.strerror or error}; {last}. "
            "Make room and run the same command again: it goes on from there"
        ) from error


def load_checkpoint(folder: Path, config: dict[str, Any], parts: Parts) -> Progress:
    """Put the newest good checkpoint of the folder into the parts, and say how far it was; none there is no error."""
    state = read_newest(folder)
    if state is None:
        return Progress()
    saved, own = comparable(state["config"]), comparable(config)
    if saved != own:
        key = next((key for key in own if saved.get(key) != own[key]), "config")
        what = _difference(saved.get(key), own.get(key))
        raise AsfpError(
            f"{folder} holds a run with other settings ({key}: {what}): "
            "use another folder with output=..., or the settings it was started with, or delete it"
        )
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(parts.optimizer.state_dict() | {"state": state["optimizer"]})
    if parts.pruner is not None:
        parts.pruner.load_state_dict(state["pruner"])
    torch.set_rng_state(state["rng"])
    if parts.fabric.device.type == "cuda" and len(state["rng_device"]):
        torch.cuda.set_rng_state(state["rng_device"], parts.fabric.device)
    return Progress(**state["progress"])


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Atomically: a killed process leaves the old checkpoint, the new one, or the old one under its second name.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_state(folder, {"epoch": 1})
    >>> write_state(folder, {"epoch": 2})
    >>> read_newest(folder)
    {'epoch': 2}
    >>> _ = (folder / CURRENT).write_bytes(b"torn")
    >>> read_newest(folder)
    {'epoch': 1}
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    aside = folder / f"{CURRENT}.new"
    try:
        with aside.open("wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n")
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        if (folder / CURRENT).exists():
            (folder / CURRENT).replace(folder / PREVIOUS)
        aside.replace(folder / CURRENT)
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
    data = path.read_bytes()
    head, newline, payload = data.partition(b"\n")
    if not newline or not head.startswith(MAGIC):
        raise AsfpError(f"{path} is not a checkpoint of asfp train")
    if hashlib.sha256(payload).hexdigest().encode() != head.removeprefix(MAGIC):
        raise AsfpError(f"{path} is damaged: its digest is another one")
    state: dict[str, Any] = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    return state


def _sync(folder: Path) -> None:
    """Make the renames last through a power failure, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _difference(saved: Any, own: Any) -> str:
    if isinstance(saved, dict) and isinstance(own, dict):
        key = next(k for k in (*own, *saved) if saved.get(k) != own.get(k))
        return f"{key} {saved.get(key)!r} there, {own.get(key)!r} here"
    return f"{saved!r} there, {own!r} here"
