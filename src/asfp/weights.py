"""Weights from a file, however they were wrapped: never unpickled, always named in the error."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.errors import AsfpError

_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state")
_PREFIXES = ("module.", "_orig_mod.")

CHECKPOINT = b"asfp checkpoint 1 "
"""How a checkpoint of `asfp train` begins; the SHA-256 of what follows the first line comes next."""


def checkpoint_payload(path: Path) -> bytes:
    """What `asfp train` saved in a checkpoint, as bytes, after its digest was compared.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "checkpoint.pt"
    >>> _ = file.write_bytes(CHECKPOINT + hashlib.sha256(b"state").hexdigest().encode() + bytes([10]) + b"state")
    >>> checkpoint_payload(file)
    b'state'
    """
    head, newline, payload = path.read_bytes().partition(b"\n")
    if not newline or not head.startswith(CHECKPOINT):
        raise AsfpError(f"{path} is not a checkpoint of asfp train")
    if hashlib.sha256(payload).hexdigest().encode() != head.removeprefix(CHECKPOINT):
        raise AsfpError(f"{path} is damaged: its digest is another one")
    return payload


def _is_checkpoint(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(CHECKPOINT)) == CHECKPOINT


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a file: safetensors, or saved by torch, bare or as the "state_dict" or "model" of a checkpoint.

    A checkpoint.pt of `asfp train` will do as well. The prefixes of `DataParallel` and `torch.compile` are taken off
    the names. Nothing in the file is executed.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "model.pt"
    >>> torch.save({"state_dict": {"module.weight": torch.zeros(2)}, "epoch": 7}, file)
    >>> list(read_weights(file))
    ['weight']
    """
    if not path.is_file():
        raise AsfpError(
            f"there is no file {str(path)!r}: give the path of a .pt, .pth or .safetensors file with weights"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        elif _is_checkpoint(path):
            found = torch.load(io.BytesIO(checkpoint_payload(path)), map_location="cpu", weights_only=True)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, AsfpError):
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AsfpError(
            f"{str(path)!r} cannot be read as weights ({reason}): it is damaged, or holds more than tensors; "
            "save it again with torch.save(model.state_dict(), path)"
        ) from error
    for name in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
            break
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise AsfpError(f"{str(path)!r} holds no state dict: save it with torch.save(model.state_dict(), path)")
    weights = {str(name): value for name, value in found.items()}
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def load_weights(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into a model of just these names and shapes.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "model.pt"
    >>> torch.save(nn.Linear(2, 3).state_dict(), file)
    >>> load_weights(nn.Linear(2, 4), file)
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: the weights in ... do not fit Linear: size mismatch for weight: ...
    """
    try:
        model.load_state_dict(read_weights(path))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise AsfpError(
            f"the weights in {str(path)!r} do not fit {type(model).__name__}: {lines[0] if lines else error}{more}; "
            "check the model's name and its number of classes"
        ) from error
