"""More accuracy at the same multiply-adds: one change at a time, first on ResNet-20, and what the README shows."""

from __future__ import annotations

from asfp.reproduce.definition import Definition, Row, Run, dense, pruned
from asfp.reproduce.tables import BASELINES, CUTS, METHODS, NETWORKS, PAPER, TABLE1, dense_row

CHANGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("momentum of pruned filters zeroed", ('pruning.momentum="zero"',)),
    "norm": ("batch norm of pruned filters reset", ('pruning.norm="reset"',)),
    "maps": ("maps of pruned filters zeroed", ("pruning.zero_maps=true",)),
    "soften": ("pruned filters fade instead of going to zero", ("pruning.soften=0.5",)),
    "interval2": ("pruning every 2 epochs", ("pruning.interval=2",)),
    "freeze": ("filters frozen for the last 40 epochs", ("pruning.freeze_epochs=40",)),
    "cosine": ("cosine learning rate", ('optimizer.schedule="cosine"',)),
    "distill": ("learns from the dense network", ()),
}
"""Tag -> what it is, and the settings; `distill` gets the weights of the dense run."""


def _run(model: str, method: str, tag: str, start: str = "scratch") -> Run:
    run = pruned(model, method, start=start, tag=tag, changes=CHANGES[tag][1] if tag else ())
    return Run(run.recipe, run.overrides, run.tag, dense(model), "distill.weights") if tag == "distill" else run


def _row(model: str, method: str, tag: str, *, priority: int, seeds: int, optional: bool) -> Row:
    what = CHANGES[tag][0] if tag else "as the paper"
    cells = (NETWORKS[model], METHODS[method], what)
    run, cut = _run(model, method, tag), CUTS[model][0.4]
    paper = None if tag else PAPER.get((model, "scratch", method, 0.4))
    drop = None if paper is None else round(BASELINES[model].mean - paper.mean, 2)
    return Row(cells, run, paper, drop, cut, dense(model), priority, seeds, optional)


def _rows(model: str, priority: int, seeds: int, optional: bool) -> tuple[Row, ...]:
    first = dense_row(model, priority=priority, seeds=seeds)
    base = Row((NETWORKS[model], "dense", "as the paper"), first.run, first.paper, priority=priority, seeds=seeds)
    plain = tuple(_row(model, m, "", priority=priority, seeds=seeds, optional=False) for m in METHODS)
    return (
        base,
        *plain,
        *(_row(model, "asfp", tag, priority=priority + 1, seeds=seeds, optional=optional) for tag in CHANGES),
        *(_row(model, "sfp", tag, priority=priority + 2, seeds=seeds, optional=True) for tag in CHANGES),
    )


OPTIONS = Definition(
    "options",
    "Options for more accuracy, 40 % of the filters, from scratch, accuracy in percent",
    ("network", "method", "change"),
    (*_rows("resnet20", 6, 1, False), *_rows("resnet56", 9, 3, True)),
    (
        "† in the source of the paper, commented out.",
        "One change at a time. On ResNet-56, and with SFP, a change is run when asked for: --only resnet56-asfp-norm.",
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
