"""The paper's figures and its text on layers: accuracy over FLOPs, gaps, intervals, d, first or second convolutions."""

from __future__ import annotations

from asfp.reproduce.definition import LAST, Definition, Row, Value, dense, pruned
from asfp.reproduce.tables import CUTS, METHODS, NETWORKS, STARTS, dense_row, resnet_row

FIG_FLOPS = Definition(
    "fig-flops",
    "Accuracy in percent against pruned multiply-adds",
    ("network", "method", "start", "filters pruned"),
    tuple(
        row
        for model, start, first in (
            ("resnet56", "scratch", 4),
            ("resnet56", "pretrained", 5),
            ("resnet110", "pretrained", 8),
            ("resnet110", "scratch", 8),
        )
        for row in (
            *(
                [dense_row(model, priority=first, seeds=1)]
                if (model, start) in (("resnet56", "scratch"), ("resnet110", "pretrained"))
                else []
            ),
            *(
                resnet_row(model, method, rate, start, priority=first, seeds=1)
                for method in ("sfp", "asfp")
                for rate in CUTS[model]
            ),
        )
    ),
    ("† in the source of the paper, commented out. It shows ResNet-56 from trained weights and both of ResNet-110.",),
    picture="flops",
)

FIG_GAP = Definition(
    "fig-gap",
    "Accuracy before and after pruning along training",
    ("network", "method", "start", "filters pruned"),
    tuple(
        resnet_row(model, method, 0.4, start, priority=first, seeds=1)
        for model, start, first in (
            ("resnet56", "scratch", 1),
            ("resnet56", "pretrained", 2),
            ("resnet20", "scratch", 6),
        )
        for method in ("sfp", "asfp")
    ),
    (
        "The gap is what the pruning of an epoch takes from the accuracy, in points: over all epochs, the largest, and "
        "over the last fifth. Regrown: percent of the filters zeroed last that are not zero at the last pruning.",
        "The paper shows ResNet-18 and ResNet-50 on ImageNet at 30 %, as curves without figures.",
    ),
    view="gap",
    picture="gap",
)


def _interval(epochs: int) -> Row:
    changes = () if epochs == 1 else (f"pruning.interval={epochs}",)
    run = pruned("resnet56", "asfp", tag="" if epochs == 1 else f"interval{epochs}", changes=changes)
    cells = ("ResNet-56", "ASFP", "40 %", f"{epochs}")
    first = epochs in (1, 2, 5, 10)
    return Row(cells, run, None, None, CUTS["resnet56"][0.4], dense("resnet56"), 4 if first else LAST)


FIG_INTERVAL = Definition(
    "fig-interval",
    "Epochs from one pruning to the next, accuracy in percent",
    ("network", "method", "filters pruned", "interval"),
    tuple(_interval(epochs) for epochs in range(1, 11)),
    (
        "The paper: ResNet-110 at 30 %, a curve without figures; 80 % of the intervals are above interval 1.",
        "Intervals 1, 2, 5 and 10 are run first; in `asfp reproduce all` the others come last.",
    ),
    picture="sweep",
)


def _d(parts: int, start: str) -> Row:
    changes = () if parts == 8 else (f"pruning.d={1 / parts!r}",)
    run = pruned("resnet56", "asfp", start=start, tag="" if parts == 8 else f"d1_{parts}", changes=changes)
    first = parts in (7, 8, 16) and start == "scratch"
    cells = ("ResNet-56", STARTS[start], "40 %", f"1/{parts}")
    return Row(cells, run, None, None, CUTS["resnet56"][0.4], dense("resnet56"), 4 if first else LAST)


FIG_D = Definition(
    "fig-d",
    "The share d of training after which 3/4 of the rate is reached, accuracy in percent",
    ("network", "start", "filters pruned", "d"),
    tuple(_d(parts, start) for start in STARTS for parts in range(7, 17)),
    (
        "The paper: a curve without figures, from scratch and from trained weights; all within 0.3.",
        "1/7, 1/8 and 1/16 from scratch are run first; in `asfp reproduce all` the others come last.",
    ),
    picture="sweep",
)

_LAYERS = {"conv1": ("first", Value(93.96, 0.13)), "conv2": ("second", Value(93.38, 0.44))}


def _layer(model: str, method: str, conv: str, priority: int) -> Row:
    which, value = _LAYERS[conv]
    paper = value if model == "resnet110" and method == "asfp" else None
    changes = (f'pruning.layers={{"layer*.{conv}" = 0.3}}',)
    drop = None if paper is None else round(93.68 - paper.mean, 2)
    cells = (NETWORKS[model], METHODS[method], "30 %", f"{which} of each block")
    return Row(cells, pruned(model, method, 0.3, tag=which, changes=changes), paper, drop, None, dense(model), priority)


LAYERS = Definition(
    "layers",
    "Only the first or only the second convolution of each block, accuracy in percent",
    ("network", "method", "filters pruned", "convolutions"),
    tuple(_layer(m, "asfp", conv, p) for m, p in (("resnet56", 5), ("resnet110", 8)) for conv in _LAYERS),
    ("The paper does not say whether its figures are SFP's or ASFP's; they stand beside ASFP.",),
)
