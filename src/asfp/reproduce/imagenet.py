"""Table III, ImageNet: the paper's figures, the commands, and how long they would take. Not run here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from asfp.reproduce.definition import Value
from asfp.reproduce.show import Sheet

MACS = {"resnet18": 1_813_561_344, "resnet34": 3_663_249_408, "resnet50": 4_087_136_256}
"""Multiply-adds of the convolutions for one image of 224x224 (`asfp measure torchvision:resnet50`)."""

IMAGES, EPOCHS = 1_281_167, 100
SUSTAINED = 70e12
"""Assumed operations a second in training: about what ResNet-50 at 2,800 images a second on one H200 comes to."""

BASELINES = {"resnet18": Value(70.23, 0.06), "resnet34": Value(73.92), "resnet50": Value(76.15)}
CUTS = {"resnet18": 41.8, "resnet34": 41.1, "resnet50": 41.8}
PAPER: dict[tuple[str, str, str], tuple[Value, Value]] = {
    ("resnet18", "scratch", "sfp"): (Value(67.25, 0.13), Value(87.76, 0.06)),
    ("resnet18", "scratch", "asfp"): (Value(67.41), Value(87.89)),
    ("resnet18", "pretrained", "sfp"): (Value(60.79), Value(83.11)),
    ("resnet18", "pretrained", "asfp"): (Value(68.02), Value(88.19)),
    ("resnet34", "scratch", "sfp"): (Value(71.83), Value(90.33)),
    ("resnet34", "scratch", "asfp"): (Value(71.72), Value(90.65)),
    ("resnet34", "pretrained", "sfp"): (Value(72.29), Value(90.90)),
    ("resnet34", "pretrained", "asfp"): (Value(72.53), Value(91.04)),
    ("resnet50", "scratch", "sfp"): (Value(74.61), Value(92.06)),
    ("resnet50", "scratch", "asfp"): (Value(74.88), Value(92.39)),
    ("resnet50", "pretrained", "sfp"): (Value(62.14), Value(84.60)),
    ("resnet50", "pretrained", "asfp"): (Value(75.53), Value(92.73)),
}
"""(network, start, method) -> top-1 and top-5 accuracy at 30 %."""


def hours(model: str) -> float:
    """MACs * 2 operations * 3 passes (forward, and twice that backward) * images * epochs / sustained speed.

    >>> round(hours("resnet50"), 1)
    12.5
    """
    return MACS[model] * 6 * IMAGES * EPOCHS / SUSTAINED / 3600


def recipe(model: str, start: str, method: str) -> str:
    """Under recipes/, without .toml.

    >>> recipe("resnet18", "pretrained", "asfp")
    'imagenet/resnet18-asfp-pretrained'
    """
    return f"imagenet/{model}-{method}{'-pretrained' if start == 'pretrained' else ''}"


def imagenet_commands(recipes: Path, data: Path | None) -> tuple[str, ...]:
    """The command of each row, whole; FOLDER where it is not said where ImageNet lies.

    >>> print(imagenet_commands(Path("/asfp/recipes"), Path("/data"))[0])
    asfp train /asfp/recipes/imagenet/resnet18-sfp.toml 'data.root="/data"'
    """
    path = "FOLDER" if data is None else json.dumps(data.resolve().as_posix(), ensure_ascii=False)
    files = (recipes.resolve() / f"{recipe(*key)}.toml" for key in PAPER)
    return tuple(f"asfp train {shlex.quote(file.as_posix())} {shlex.quote(f'data.root={path}')}" for file in files)


def imagenet_sheet() -> Sheet:
    """The plan of Table III.

    >>> imagenet_sheet().rows[0][:4]
    ('ResNet-18', 'SFP', 'scratch', '67.25 ± 0.13')
    """
    rows = tuple(
        (
            f"ResNet-{model.removeprefix('resnet')}",
            method.upper(),
            {"scratch": "scratch", "pretrained": "pre-trained"}[start],
            str(top1),
            str(top5),
            f"{BASELINES[model].mean - top1.mean:.2f}",
            f"{CUTS[model]:.1f}",
            f"{hours(model):.0f}",
            recipe(model, start, method),
        )
        for (model, start, method), (top1, top5) in PAPER.items()
    )
    notes = (
        "Not run here. With ImageNet in FOLDER/train/CLASS/* and FOLDER/val/CLASS/*:",
        "    asfp train recipes/RECIPE.toml data.root=FOLDER",
        f"Together {sum(hours(model) for model, _, _ in PAPER):.0f} hours, one run after the other. Hours are an "
        f"estimate for one H200: 6 operations for each multiply-add, {EPOCHS} epochs, {IMAGES:,} images, at an assumed "
        f"{SUSTAINED / 1e12:.0f} TFLOP/s; reading the images must keep up.",
    )
    heads = (
        "network",
        "method",
        "start",
        "paper: top-1",
        "paper: top-5",
        "paper: top-1 drop",
        "paper: MACs saved",
        "hours",
    )
    return Sheet("Table III: ResNets on ImageNet, 30 % of the filters", (*heads, "recipe"), rows, notes)
