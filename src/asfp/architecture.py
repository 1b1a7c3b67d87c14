"""The name and options that a network was built with: enough to build it again, and safe to read from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asfp.errors import AsfpError
from asfp.models import MODELS, create_model

OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "num_classes": int,
    "in_channels": int,
    "in_chans": int,
    "shortcut_padding": str,
    "width_mult": (int, float),
    "drop_rate": (int, float),
    "drop_path_rate": (int, float),
    "dropout": (int, float),
    "stochastic_depth_prob": (int, float),
    "output_stride": int,
    "img_size": int,
    "global_pool": str,
    "aux_logits": bool,
    "aux_loss": bool,
    "transform_input": bool,
    "init_weights": bool,
    "progress": bool,
    "zero_init_residual": bool,
    "replace_stride_with_dilation": list,
    "pretrained": bool,
    "weights": type(None),
    "weights_backbone": type(None),
}
"""Options that a file may name, with their types: none of them reads a file, loads weights or runs code."""

LARGEST_OPTION = 1_000_000
LARGEST_UNCOUNTED = 20_000
"""An option's, where the parameters cannot be counted beforehand."""
LARGEST_MODEL = 2_000_000_000
"""Parameters."""


@dataclass(frozen=True)
class Architecture:
    """What `create_model` is to be called with.

    >>> Architecture("resnet56", {"num_classes": 100}).to_json()
    '{"model": "resnet56", "options": {"num_classes": 100}}'
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"model": self.model, "options": dict(self.options)}, sort_keys=True)

    def check(self) -> None:
        """Raise unless the name is that of a known network and the options are plain and without effects.

        >>> Architecture("timm:resnet18", {"checkpoint_path": "weights.pth"}).check()
        Traceback (most recent call last):
        ...
        asfp.errors.AsfpError: the option 'checkpoint_path' is not one that a file may hold: save without model=, and
        load with model=, the network itself
        """
        if not isinstance(self.model, str):
            raise AsfpError(
                f"model={type(self.model).__name__} is not a name: give what create_model was called with, or nothing"
            )
        library, colon, rest = self.model.partition(":")
        if (not colon and self.model not in MODELS) or (colon and (library not in LIBRARIES or not _is_plain(rest))):
            raise AsfpError(
                f"{self.model[:80]!r} is not a name that a file may hold: it must be one of {', '.join(MODELS)}, "
                f"torchvision:NAME or timm:NAME"
            )
        for key, value in self.options.items():
            if key not in OPTIONS:
                raise AsfpError(
                    f"the option {key[:80]!r} is not one that a file may hold: save without model=, "
                    f"and load with model=, the network itself"
                )
            if not _fits(key, value):
                raise AsfpError(f"the option {key}={str(value)[:80]!r} is not a value that a file may hold")


LIBRARIES = ("torchvision", "timm")
WITHOUT_TRACE = {"weights", "weights_backbone", "pretrained", "progress"}
"""Options that fill a network and leave its structure as it is."""


def recorded(created_as: object) -> Architecture | None:
    """What `create_model` noted on a network, where a file may hold it.

    >>> recorded(("timm:resnet18", {"pretrained": True, "num_classes": 5}))
    Architecture(model='timm:resnet18', options={'num_classes': 5})
    >>> recorded(None)
    """
    match created_as:
        case (str(name), dict(options)):
            found = Architecture(name, {k: v for k, v in options.items() if k not in WITHOUT_TRACE})
        case _:
            return None
    try:
        found.check()
    except AsfpError:
        return None
    return found


def build_architecture(path: Path, text: str) -> nn.Module:
    """The network that a file names, with random weights.

    >>> type(build_architecture(Path("x"), Architecture("resnet8").to_json())).__name__
    'CifarResNet'
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != {"model", "options"}:
            raise AsfpError("it must have a model and options")
        if not isinstance(data["model"], str) or not isinstance(data["options"], dict):
            raise AsfpError("it must have a name and a mapping")
        architecture = Architecture(data["model"], data["options"])
        architecture.check()
        return _create(architecture)
    except Exception as error:  # name and options are the file's word: whatever a library makes of them is its fault
        raise AsfpError(f"{path} names an architecture that cannot be built: {str(error)[:300]}") from error


def _create(architecture: Architecture) -> nn.Module:
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in create_model(architecture.model, **architecture.options).parameters())
    except Exception:  # cannot be built without data, or not at all: then it is one of a library's own sizes
        count = 0
        large = [v for v in architecture.options.values() if isinstance(v, (int, float)) and v > LARGEST_UNCOUNTED]
        if large:
            raise AsfpError(f"{architecture.model} with an option of {large[0]} may be too large to build") from None
    if count > LARGEST_MODEL:
        raise AsfpError(f"{architecture.model} would have {count} parameters, more than the {LARGEST_MODEL} allowed")
    with torch.random.fork_rng(devices=[]):
        return create_model(architecture.model, **architecture.options)


def _is_plain(name: str) -> bool:
    return 0 < len(name) <= 120 and all(c.isascii() and (c.isalnum() or c in "_-.") for c in name)


def _fits(key: str, value: Any) -> bool:
    allowed = OPTIONS[key]
    if key == "pretrained":
        return value is False
    if isinstance(value, bool) and allowed is not bool:
        return False
    if isinstance(value, list):
        return allowed is list and len(value) <= 8 and all(isinstance(x, bool) for x in value)
    if isinstance(value, str):
        return allowed is str and len(value) <= 40 and _is_plain(value)
    if isinstance(value, (int, float)) and not 0 <= value <= LARGEST_OPTION:
        return False
    return isinstance(value, allowed)
