"""More accuracy at the same multiply-adds: one change at a time, first on ResNet-20, and what the README shows."""

from __future__ import annotations

from dataclasses import replace

from asfp.reproduce.definition import Definition, Row, Run, dense, pruned
from asfp.reproduce.tables import BASELINES, CUTS, METHODS, NETWORKS, PAPER, STARTS, TABLE1, dense_row

CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("momentum of pruned filters zeroed", ('pruning.momentum="zero"',)),
    "norm": ("batch norm of pruned filters reset", ('pruning.norm="reset"',)),
    "maps": ("maps of pruned filters zeroed", ("pruning.zero_maps=true",)),
    "soften": ("pruned filters fade instead of going to zero", ("pruning.soften=0.5",)),
    "interval2": ("pruning every 2 epochs", ("pruning.interval=2",)),
    "freeze": ("filters frozen for the last 40 epochs", ("pruning.freeze_epochs=40",)),
    "freeze140": ("filters frozen after epoch 60", ("pruning.freeze_epochs=140",)),
    "warmup": ("learning rate rises over 5 epochs", ("optimizer.warmup_epochs=5", 'optimizer.warmup="ramp"')),
    "cosine": ("cosine learning rate", ('optimizer.schedule="cosine"',)),
    "distill": ("learns from the dense network", ()),
    "inner": (
        "56.25 % of the blocks' inner filters, none of the streams'",
        ("pruning.rate=0.5625", "pruning.streams=0.0"),
    ),
    "inner0.563": (
        "56.3 % of the blocks' inner filters, none of the streams'",
        ("pruning.rate=0.563", "pruning.streams=0.0"),
    ),
    "lr0.1": ("learning rate 0.1", ("optimizer.lr=0.1",)),
}
"""Tag -> what it is, and the settings; `distill` gets the weights of the dense run."""

INNER_CUTS = {
    "inner": {"resnet20": 55.64, "resnet56": 56.05},
    "inner0.563": {"resnet20": 55.69, "resnet56": 56.10},
}
"""Percent of the multiply-adds saved by `inner` (`asfp measure resnet56 --rate 0.5625 --streams 0`). 7, 14 and 28
filters of a block stay, so the compact model saves as much as the paper's count says: more than 40 % of all filters.
With `inner` the last of the filters go at the last pruning only, since 0.5625 of 16 is nine; just above, sooner."""

REVIVED = (("momentum", "freeze"), ("norm", "freeze140"), ("soften", "freeze140"))
"""What brings filters back, together with an end in which the network can do without those that go."""

TOGETHER = (
    ("momentum", "cosine"),
    ("momentum", "cosine", "distill"),
    ("cosine", "distill"),
    ("warmup", "cosine", "distill"),
    ("freeze140", "warmup", "cosine", "distill"),
    ("freeze140", "cosine", "distill"),
    ("norm", "freeze140", "cosine", "distill"),
    ("soften", "freeze140", "cosine", "distill"),
    ("inner", "cosine"),
    ("inner0.563", "cosine"),
)
"""Changes to try at once, after each alone; only when asked for."""

TUNED = (("lr0.1",), ("cosine", "lr0.1"), ("inner", "cosine", "lr0.1"), ("inner0.563", "cosine", "lr0.1"))
"""From trained weights the recipes have a tenth of the learning rate; with these it is that of a run from scratch."""

CONTROLS = (("cosine",), ("inner",), ("inner", "cosine"), ("inner0.563", "cosine"))
"""What is run with hard pruning too, when asked for: a gain of the change, or of pruning softly?"""

ALONE = tuple((tag,) for tag in CHANGES if tag != "lr0.1")

UNPRUNED = ("warmup", "cosine")
"""What may help the unpruned network as much: it is run with these too, when asked for."""


def changed(model: str, method: str, tags: tuple[str, ...], start: str = "scratch") -> Run:
    """A run at 40 % with these changes.

    >>> run = changed("resnet56", "asfp", ("cosine", "distill"), "pretrained")
    >>> run.name(0), run.needs_for
    ('resnet56-asfp-pretrained-cosine-distill-seed0', ('model.weights', 'distill.weights'))
    """
    settings = tuple(setting for tag in tags for setting in CHANGES[tag][1])
    run = pruned(model, method, start=start, tag="-".join(tags), changes=settings)
    keys = ("model.weights",) * (start == "pretrained") + ("distill.weights",) * ("distill" in tags)
    return replace(run, needs=dense(model), needs_for=keys) if keys else run


def _cut(model: str, tags: tuple[str, ...]) -> float:
    cuts = [INNER_CUTS[tag][model] for tag in tags if tag in INNER_CUTS]
    return cuts[0] if cuts else CUTS[model][0.4]


def _row(model: str, method: str, start: str, tags: tuple[str, ...], priority: int, seeds: int, optional: bool) -> Row:
    what = "; ".join(CHANGES[tag][0] for tag in tags) or "as the paper"
    cells = (NETWORKS[model], METHODS[method], STARTS[start], what)
    paper = None if tags else PAPER.get((model, start, method, 0.4))
    drop = None if paper is None else round(BASELINES[model].mean - paper.mean, 2)
    run, cut = changed(model, method, tags, start), _cut(model, tags)
    return Row(cells, run, paper, drop, cut, dense(model), priority, seeds, optional)


def _rows(model: str, priority: int, seeds: int, optional: bool) -> tuple[Row, ...]:
    first = dense_row(model, priority=priority, seeds=seeds)
    return (
        Row((*first.cells[:3], "as the paper"), first.run, first.paper, priority=priority, seeds=seeds),
        *(
            Row((*first.cells[:3], CHANGES[tag][0]), Run(first.run.recipe, CHANGES[tag][1], tag), priority=priority + 1,
                seeds=seeds, optional=True)
            for tag in UNPRUNED
        ),
        *(_row(model, m, "scratch", (), priority, seeds, False) for m in METHODS),
        *(_row(model, "asfp", "scratch", tags, priority + 1, seeds, optional) for tags in (*ALONE, *REVIVED)),
        *(_row(model, "asfp", "scratch", tags, priority + 2, seeds, True) for tags in TOGETHER),
        *(_row(model, "sfp", "scratch", tags, priority + 2, seeds, True) for tags in ALONE),
        *(_row(model, "hard", "scratch", tags, priority + 2, seeds, True) for tags in CONTROLS),
        *(
            _row(model, "asfp", "pretrained", tags, priority + 3, seeds, True)
            for tags in (*ALONE, *REVIVED, *TOGETHER, *TUNED)
        ),
        *(_row(model, "hard", "pretrained", tags, priority + 3, seeds, True) for tags in (*CONTROLS, *TUNED)),
    )  # fmt: skip


OPTIONS = Definition(
    "options",
    "Options for more accuracy, 40 % of the filters, accuracy in percent",
    ("network", "method", "start", "change"),
    (*_rows("resnet20", 6, 1, False), *_rows("resnet56", 9, 3, True)),
    (
        "† in the source of the paper, commented out.",
        "One change at a time. On ResNet-56, with SFP, from trained weights, or several at once, they are run when "
        "asked for: --only =resnet56-asfp-norm.",
    ),
)

SUMMARY = Definition(
    "summary",
    "CIFAR-10, 40 % of the filters pruned, 200 epochs",
    TABLE1.heads,
    tuple(
        row
        for row in (
            dense_row("resnet20", priority=6, seeds=1),
            *(
                Row((NETWORKS["resnet20"], METHODS[m], "scratch", "40 %"), pruned("resnet20", m), None, None,
                    CUTS["resnet20"][0.4], dense("resnet20"), 6)
                for m in METHODS
            ),
            *TABLE1.rows,
        )
        if row.cells[3] in ("0 %", "40 %")
    ),
    ("† in the source of the paper, commented out.",),
    view="short",
)  # fmt: skip
"""For the README: the rows that are recorded."""
