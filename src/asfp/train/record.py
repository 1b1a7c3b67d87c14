"""The end of a run: compaction, verification, both models' accuracies, and the record that tables are made from."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from asfp.artifact import save
from asfp.compaction import CompactModule, compact, verify
from asfp.errors import VerificationError
from asfp.train.assemble import Parts
from asfp.train.checkpoint import Progress
from asfp.train.config import TrainConfig
from asfp.train.evaluate import full_float32, predict, total
from asfp.train.files import write_whole
from asfp.train.identity import settings
from asfp.version import __version__

RECORD = "record.json"
MODEL = "model.pt"
FORMAT = 1


def finish(config: TrainConfig, parts: Parts, progress: Progress, here: Mapping[str, Any]) -> dict[str, Any]:
    """Compact the trained model, check that it gets every test image as the masked one does, write model and record.

    The weights are written first: they are there whatever becomes of the rest.
    """
    history = progress.history
    model = copy.deepcopy(parts.model).cpu().float().eval()
    if parts.fabric.is_global_zero:
        save_weights(model, config.folder / MODEL)
    example = torch.randn(2, *parts.data.shape, generator=torch.Generator().manual_seed(0))
    small = compact(model, example)
    checked = verify(model, small, example)
    masked, compacted, labels, precision = _both(parts, model, small)
    hits = [total(parts.fabric, (found == labels).sum()) for found in (masked, compacted)]
    differ = total(parts.fabric, (masked != compacted).sum())
    if not checked.ok or differ:
        raise VerificationError(
            f"the compact model differs from the masked one: {checked}; {differ} test images get another class"
        )
    images = total(parts.fabric, torch.tensor(len(labels), device=labels.device))
    record = {
        "format": FORMAT,
        "name": config.name,
        "config": settings(config),
        "seed": config.seed,
        "result": {
            "accuracy": hits[0] / images,
            "accuracy_compact": hits[1] / images,
            "accuracy_before_last_pruning": history[-1]["accuracy_before"],
            "accuracy_after_last_pruning": history[-1]["accuracy_after"],
            "test_images": images,
            "predictions_that_differ": differ,
            "evaluated_in": precision,
            **skipped(parts),
        },
        "compact": {
            "max_abs_diff": checked.max_abs_diff,
            "relative_diff": checked.relative,
            "macs_dense": small.plan.macs_before,
            "macs": small.plan.macs_after,
            "parameters_dense": sum(p.numel() for p in model.parameters()),
            "parameters": sum(p.numel() for p in small.parameters()),
        },
        "weights": {key: digest(path) for key, path in started_from(config).items() if path},
        "seconds": seconds(history),
        **whereabouts(progress.places, here),
        "epochs": columns(history),
    }
    if parts.fabric.is_global_zero:
        save(small, config.folder / "compact.safetensors")
        write_record(config.folder / RECORD, record)
    return record


def _both(parts: Parts, model: nn.Module, small: CompactModule) -> tuple[Tensor, Tensor, Tensor, str]:
    """What each model says to each test image, in float32; in float64 where a tie within rounding tells them apart."""
    device = parts.fabric.device
    for dtype in (torch.float32, torch.float64):
        with full_float32():
            masked, labels = predict(copy.deepcopy(model).to(device, dtype), parts.data, parts.normalise, dtype)
            found, _ = predict(copy.deepcopy(small).to(device, dtype), parts.data, parts.normalise, dtype)
        if not total(parts.fabric, (masked != found).sum()):
            break
    return masked, found, labels, str(dtype).removeprefix("torch.")


def save_weights(model: nn.Module, path: Path) -> None:
    """The state dict, whole or not at all; a full disk is an OSError and leaves what was there.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "model.pt"
    >>> save_weights(nn.Linear(1, 1), file)
    >>> list(torch.load(file, weights_only=True))
    ['weight', 'bias']
    """
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    write_whole(path, buffer.getbuffer())


def skipped(parts: Parts) -> dict[str, int]:
    """How many images could not be read and were left out, over all processes, where the data keeps them."""
    mine = getattr(parts.data, "skipped", None)
    if mine is None:
        return {}
    found: list[Any] = [mine] * parts.fabric.world_size
    if parts.fabric.world_size > 1:
        dist.all_gather_object(found, mine)
    return {"skipped_images": len(set().union(*found))}


def started_from(config: TrainConfig) -> dict[str, str]:
    """The files of weights that a run reads.

    >>> started_from(TrainConfig())
    {'model': '', 'distill': ''}
    """
    return {"model": config.model.weights, "distill": config.distill.weights}


def digest(path: str | Path) -> str:
    """The SHA-256 of a file, so that a record says which weights it began with; "" where it is gone.

    >>> digest("/nowhere")
    ''
    """
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def seconds(history: list[dict[str, Any]]) -> dict[str, float]:
    """Totals by phase, the median training epoch, and what pruning adds to it.

    >>> rows = [{"seconds": {"train": 2.0, "prune": 0.01}}, {"seconds": {"train": 1.0, "prune": 0.01}}]
    >>> seconds(rows)
    {'train': 3.0, 'prune': 0.02, 'median_epoch': 1.5, 'prune_share': 0.006667}
    """
    totals = {phase: round(sum(row["seconds"][phase] for row in history), 3) for phase in history[0]["seconds"]}
    epochs = torch.tensor([row["seconds"]["train"] for row in history], dtype=torch.float64)
    share = totals["prune"] / totals["train"] if totals["train"] else 0.0
    return totals | {"median_epoch": round(float(epochs.quantile(0.5)), 4), "prune_share": round(share, 6)}


def columns(history: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The epochs' metrics, one list a metric, rounded to what is worth keeping.

    >>> columns([{"epoch": 1, "loss": 0.51234567, "seconds": {"train": 1.25}}])
    {'loss': [0.51235], 'train_seconds': [1.25]}
    """
    result = {k: [round(row[k], 5) for row in history] for k in history[0] if k not in ("epoch", "seconds")}
    return result | {"train_seconds": [round(row["seconds"]["train"], 3) for row in history]}


def place_of(parts: Parts) -> dict[str, Any]:
    """What this process trains with, and on what."""
    return {"commit": commit(), "versions": versions(), "hardware": hardware(parts)}


def whereabouts(places: list[dict[str, Any]], here: Mapping[str, Any]) -> dict[str, Any]:
    """Where the last epochs were trained; where those before them were and where the run was finished, if elsewhere.

    >>> gpu, cpu = {"hardware": "a GPU"}, {"hardware": "a CPU"}
    >>> whereabouts([{"from_epoch": 1, **gpu}], cpu)
    {'hardware': 'a GPU', 'finished_on': {'hardware': 'a CPU'}}
    >>> whereabouts([{"from_epoch": 1, **gpu}, {"from_epoch": 5, **cpu}], cpu)
    {'hardware': 'a CPU', 'from_epoch': 5, 'trained_before_on': [{'from_epoch': 1, 'hardware': 'a GPU'}]}
    """
    *before, last = places
    trained = {key: value for key, value in last.items() if not key.startswith("from_")}
    since = {key: value for key, value in last.items() if key.startswith("from_")}
    return {
        **trained,
        **({**since, "trained_before_on": before} if before else {}),
        **({"finished_on": dict(here)} if trained != here else {}),
    }


def versions() -> dict[str, str]:
    """Of asfp and what it stands on.

    >>> sorted(versions())[:2]
    ['asfp', 'cuda']
    """
    import lightning
    import torchvision

    return {
        "asfp": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": str(torchvision.__version__),
        "lightning": str(lightning.__version__),
        "cuda": str(torch.version.cuda or ""),
    }


def hardware(parts: Parts) -> dict[str, Any]:
    """The kind of device, how many, and how it was used."""
    device = parts.fabric.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    precision = str(parts.fabric._precision.precision)
    step = parts.mode if parts.forward is None else f"{parts.mode}, fused blocks"
    return {"device": name, "processes": parts.fabric.world_size, "precision": precision, "step": step}


def commit() -> str:
    """The commit of the source tree, with "+" where it has changes; ASFP_COMMIT where there is no git; else "".

    >>> isinstance(commit(), str)
    True
    """
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True).stdout
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", "."], cwd=here, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ASFP_COMMIT", "")
    return head.strip() + ("+" if changed.strip() else "")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """As JSON, a line a key and a line a metric; whole or not at all.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "record.json"
    >>> write_record(file, {"name": "a", "epochs": {"loss": [1.0, 0.5]}})
    >>> print(file.read_text().strip())
    {
     "name": "a",
     "epochs": {
      "loss": [1.0, 0.5]
     }
    }
    """
    write_whole(path, (_pretty(record, 1) + "\n").encode())


def _pretty(value: Any, depth: int) -> str:
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value)
    inner = (f"{' ' * depth}{json.dumps(key)}: {_pretty(item, depth + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(inner) + "\n" + " " * (depth - 1) + "}"
