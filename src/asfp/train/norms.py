"""filters.jsonl: the norm of every filter before each pruning, and which were zeroed, in a few bytes a filter."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from asfp.errors import AsfpError
from asfp.pruner import SoftPruner
from asfp.train.files import write_whole

FILTERS = "filters.jsonl"


@dataclass(frozen=True)
class FilterHistory:
    """What became of each layer's filters: arrays of (epochs, filters).

    `norms` is the l2 norm after the epoch's training, before its pruning; `kept` is False where that pruning zeroed.
    """

    epochs: list[int]
    norms: dict[str, np.ndarray[Any, Any]]
    kept: dict[str, np.ndarray[Any, Any]]


@torch.no_grad()
def filter_norms(of: SoftPruner | nn.Module) -> dict[str, Tensor]:
    """The l2 norm of every filter, by layer, with one copy from the device: a pruner's, or all of an unpruned model.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(4, 2))
    >>> _ = nn.init.zeros_(net[0].weight)
    >>> filter_norms(SoftPruner(net, 0.5, epochs=2, example_inputs=torch.zeros(1, 3, 3, 3)))
    {'0': tensor([0., 0., 0., 0.])}
    """
    if isinstance(of, nn.Module):
        weights = {name: m.weight for name, m in of.named_modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))}
    else:
        weights = {layer.name: layer.weight for layer in of.layers}
    norms = [weight.detach().flatten(1).float().norm(dim=1) for weight in weights.values()]
    if not norms:
        return {}
    parts = torch.cat(norms).cpu().split([len(n) for n in norms])
    return dict(zip(weights, parts, strict=True))


def returned(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """The share of the filters zeroed by one pruning that the next one keeps: those that regrew enough to stay.

    >>> returned({"conv": torch.tensor([True, False, False])}, {"conv": torch.tensor([False, True, False])})
    0.5
    """
    if not before or before is after:
        return 0.0
    gone = ~torch.cat(list(before.values()))
    return float((gone & torch.cat([after[name] for name in before])).sum() / gone.sum().clamp(min=1))


def _epoch_of(line: str) -> int:
    """The epoch of a line, 0 where it is torn."""
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return 0


class FilterLog:
    """Appends a line an epoch; on a resumed run the lines after the checkpoint's epoch are written again.

    The first line names the layers and their filters. Each further line holds, for all layers one after the other,
    the norms as little-endian float16 and a bit for each filter (1 = kept), both in base 64.
    """

    def __init__(self, folder: Path, pruner: SoftPruner, done: int) -> None:
        self.file = folder / FILTERS
        lines = (
            self.file.read_text(encoding="utf-8", errors="replace").splitlines() if done and self.file.exists() else []
        )
        head = json.dumps({"layers": {layer.name: layer.filters for layer in pruner.layers}})
        kept = [line for line in lines[1:] if 0 < _epoch_of(line) <= done]
        write_whole(self.file, "".join(f"{line}\n" for line in [head, *kept]).encode())

    def epoch(self, epoch: int, norms: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        """`norms` as of before the pruning of this epoch, `masks` as of after it (empty before the first)."""
        flat = torch.cat(list(norms.values())).numpy().astype("<f2")
        kept = [masks[name].cpu() if name in masks else torch.ones(len(norm)).bool() for name, norm in norms.items()]
        line = {
            "epoch": epoch,
            "norms": base64.b64encode(flat.tobytes()).decode(),
            "kept": base64.b64encode(np.packbits(torch.cat(kept).numpy()).tobytes()).decode(),
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def read_filters(path: Path) -> FilterHistory:
    """The arrays of a filters.jsonl.

    >>> import tempfile
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(4, 2))
    >>> pruner = SoftPruner(net, 0.5, epochs=1, example_inputs=torch.zeros(1, 3, 3, 3))
    >>> folder, norms = Path(tempfile.mkdtemp()), filter_norms(pruner)
    >>> _ = pruner.step(1)
    >>> FilterLog(folder, pruner, 0).epoch(1, norms, pruner.masks)
    >>> history = read_filters(folder / FILTERS)
    >>> history.epochs, history.norms["0"].shape, int(history.kept["0"].sum())
    ([1], (1, 4), 2)
    """
    try:
        head, *rest = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        layers: dict[str, int] = head["layers"]
        total = sum(layers.values())
        norms = [np.frombuffer(base64.b64decode(row["norms"]), "<f2").astype(np.float32) for row in rest]
        kept = [np.unpackbits(np.frombuffer(base64.b64decode(row["kept"]), np.uint8), count=total) for row in rest]
        epochs = [int(row["epoch"]) for row in rest]
        if any(len(row) != total for row in norms) or any(len(row) != total for row in kept):
            raise ValueError("lines of different lengths")
        ends = np.cumsum(list(layers.values()))[:-1]
        all_norms, all_kept = np.array(norms).reshape(-1, total), np.array(kept).reshape(-1, total).astype(bool)
        return FilterHistory(
            epochs,
            dict(zip(layers, np.split(all_norms, ends, axis=1), strict=True)),
            dict(zip(layers, np.split(all_kept, ends, axis=1), strict=True)),
        )
    except FileNotFoundError as error:
        raise AsfpError(f"there is no {path}: it is written by `asfp train` with a pruning method") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AsfpError(f"{path} is not a record of filters: {error}") from error
