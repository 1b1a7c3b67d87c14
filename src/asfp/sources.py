"""What a command is given, a name or a file, and the model and example input that it stands for."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.checks import SELECTIONS, check_align, check_selection, check_streams
from asfp.compaction import CompactModule, compact
from asfp.compaction.layout import LAYOUTS
from asfp.errors import AsfpError, nearest
from asfp.models import MODELS, create_model
from asfp.pruner import SoftPruner

FILES = (".safetensors", ".onnx", ".xml")
"""Endings of the files that a command takes for a model."""


@dataclass(frozen=True)
class Source:
    """A model as the user wrote it: `resnet56`, `torchvision:resnet50@0.3:nested:16`, `model.safetensors`, `a.onnx`."""

    text: str
    name: str
    """What `create_model` takes, or "" for a file."""
    rate: float | None
    """Pruned to this share and compacted, where the text ends in @RATE."""
    path: Path | None
    selection: str | None = None
    """As `SoftPruner` takes it, where the text ends in @RATE:SELECTION; None: not said."""
    align: int | None = None
    """Likewise, from @RATE:ALIGN or @RATE:SELECTION:ALIGN."""
    layout: str | None = None
    """As `asfp.compact` takes it, last of all: @RATE:SELECTION:ALIGN:LAYOUT."""
    streams: float | None = None
    """The rate of layers that write a residual stream, from @RATE/STREAMS."""

    @property
    def is_graph_file(self) -> bool:
        """An exported file, which only its own engine can run."""
        return self.path is not None and self.path.suffix in (".onnx", ".xml")


def parse_source(text: str) -> Source:
    """NAME, NAME@RATE, NAME@RATE/STREAMS:SELECTION:ALIGN:LAYOUT (any of these may be left out), or a file.

    >>> parse_source("torchvision:resnet50@0.3").rate
    0.3
    >>> parse_source("torchvision:resnet50@0.3:nested:16").selection, parse_source("resnet56@0.4:8").align
    ('nested', 8)
    >>> parse_source("torchvision:resnet50@0.3:zeros").layout
    'zeros'
    >>> parse_source("torchvision:resnet50@0.27/0.5:coupled:128").streams
    0.5
    >>> parse_source("resnet56").name
    'resnet56'
    """
    if text.endswith(FILES):
        if not Path(text).is_file():
            raise AsfpError(f"there is no file {text!r}: give the path of a {', '.join(FILES)} file, or a model's name")
        return Source(text, "", None, Path(text))
    name, at, pruning = text.rpartition("@")
    if not at:
        return Source(text, text, None, None)
    rate, *options = pruning.split(":")
    share, slash, streams = rate.partition("/")
    number = _number(text, share)
    if not 0.0 < number < 1.0:
        raise AsfpError(f"{text!r}: {share} is no pruning rate, which lies between 0 and 1: e.g. {name}@0.4")
    wide = check_streams(_number(text, streams), mapped=False) if slash else None
    selection, align, layout = _options(text, options)
    return Source(text, name, number, None, selection, align, layout, wide)


def _number(text: str, rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        raise AsfpError(
            f"{text!r}: {rate!r} is not a pruning rate; write NAME@RATE, e.g. resnet56@0.4, or "
            "NAME@RATE/STREAMS, e.g. resnet56@0.3/0.5"
        ) from None


def _options(text: str, options: list[str]) -> tuple[str | None, int | None, str | None]:
    selection, align, layout = None, None, None
    for option in options:
        if option.isdecimal() and align is None and layout is None:
            align = check_align(int(option))
        elif option in SELECTIONS and (selection, align, layout) == (None, None, None):
            selection = check_selection(option)
        elif option in LAYOUTS and layout is None:
            layout = option
        else:
            raise AsfpError(
                f"{text!r}: {option!r} is not understood; write NAME@RATE/STREAMS:SELECTION:ALIGN:LAYOUT with one of "
                f"{', '.join(SELECTIONS)}, a whole number, and one of {', '.join(LAYOUTS)}, e.g. "
                f"resnet56@0.4:nested:8.{nearest(option, (*SELECTIONS, *LAYOUTS))}"
            )
    return selection, align, layout


def build(source: Source, size: str | None = None, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The model in evaluation mode and one example input for it; a rate means pruned on random weights and compacted.

    >>> model, example = build(parse_source("resnet20@0.5"))
    >>> model.get_submodule("conv1"), tuple(example.shape)
    (Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False), (1, 3, 32, 32))
    """
    if source.path is not None:
        from asfp.artifact import load

        loaded = load(source.path)
        shape = (1, *loaded.plan.inputs[0][1:])
        weight = next((p for p in loaded.parameters() if p.is_floating_point()), torch.zeros(0))
        return loaded, torch.zeros(resize(shape, size), dtype=weight.dtype)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library will do differently some day is nothing the user can act on
        torch.manual_seed(seed)
        model = create_model(source.name).eval()
        _nothing_zero(model)
    example = torch.zeros(resize(input_shape(source.name, model), size))
    if source.rate is None:
        return model, example
    options = (source.selection, source.align, source.layout, source.streams)
    return prune_and_compact(model, example, source.rate, *options), example


def prune_and_compact(
    model: nn.Module,
    example: Tensor,
    rate: float,
    selection: str | None = None,
    align: int | None = None,
    layout: str | None = None,
    streams: float | None = None,
) -> CompactModule:
    """The model pruned in place to `rate` in one step, then compacted; None stands for the usual choice.

    >>> prune_and_compact(create_model("resnet8"), torch.zeros(1, 3, 32, 32), 0.5).get_submodule("conv1").out_channels
    8
    """
    options: dict[str, Any] = {"selection": selection or "independent", "align": align or 1, "streams": streams}
    SoftPruner(model, rate, epochs=1, example_inputs=example, **options).step(1)
    return compact(model, example, layout=layout or "least")


def input_shape(name: str, model: nn.Module) -> tuple[int, ...]:
    """The shape of one input, batch first, that a model of this name is made for.

    >>> input_shape("resnet56", create_model("resnet56"))
    (1, 3, 32, 32)
    """
    library, _, rest = name.partition(":")
    if name in MODELS:
        return 1, 3, 32, 32
    if library == "timm":
        settings: Any = model.default_cfg
        return 1, *(int(n) for n in settings["input_size"])
    from torchvision import models

    weights: Any = models.get_model_weights(rest)
    preset: Any = next(iter(weights)).transforms() if len(weights) else None
    side = list(getattr(preset, "crop_size", [224]))
    height, width = (side * 2)[:2]
    if models.get_model_builder(rest).__module__.startswith("torchvision.models.video"):
        return 1, 3, 16, height, width
    return 1, 3, height, width


LARGEST_IMAGE = 2**25


def resize(shape: tuple[int, ...], size: str | None) -> tuple[int, ...]:
    """The shape with another height and width, "128" or "128x96".

    >>> resize((1, 3, 224, 224), "128x96")
    (1, 3, 128, 96)
    """
    if size is None:
        return shape
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", size)
    if found is None:
        raise AsfpError(f"size={size!r} is not an image size: write a side, e.g. 224, or HEIGHTxWIDTH, e.g. 224x160")
    height, width = int(found[1]), int(found[2] or found[1])
    if height * width > LARGEST_IMAGE:
        raise AsfpError(f"size={size!r} is too large: images may have up to {LARGEST_IMAGE:,} pixels here")
    return *shape[:-2], height, width


def _nothing_zero(model: nn.Module) -> None:
    """A fresh model often begins with zero norms and shifts; a trained one has none, and neither has this one.

    So its zero filters make constants, as they do after training, and a benchmark pays for what folding those costs.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not bool(parameter.any()):
                parameter.uniform_(-0.2, 0.2)
