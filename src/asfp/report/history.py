"""Filters over the epochs as cells of a heat map: one sees them die and come back."""

from __future__ import annotations

import numpy as np

from asfp.report.chart import CODES, Bytes, Heat, Rows
from asfp.report.runs import Run
from asfp.train.norms import FilterHistory


def cells(history: FilterHistory, layer: str) -> Bytes:
    """One byte a filter and epoch, as in `CODES`; norms are on a scale to the layer's largest, evenly in log from 1 %.

    >>> norms = np.array([[1.0, 0.5], [1.0, 0.0], [1.0, 0.25], [1.0, 0.3]], np.float32)
    >>> kept = np.array([[True, False], [True, False], [True, True], [True, True]])
    >>> cells(FilterHistory([1, 2, 3, 4], {"c": norms}, {"c": kept}), "c").tolist()
    [[199, 199, 199, 199], [84, 0, 100, 173]]
    """
    norms, kept = np.nan_to_num(history.norms[layer]), history.kept[layer]
    top = float(norms.max()) or 1.0
    with np.errstate(divide="ignore"):
        share = np.clip(1 + np.log10(norms / top) / 2, 0, 1)
    scaled = np.round(98 * share).astype(np.uint8)
    before = np.vstack([np.ones_like(kept[:1]), kept[:-1]])
    result = np.where(kept, CODES["kept"] + scaled, CODES["zeroed"] + scaled)
    result = np.where(~kept & (norms == 0), CODES["dead"], result)
    result = np.where(kept & ~before, CODES["back"], result)
    return np.asarray(result.T, dtype=np.uint8)


def filter_heat(run: Run, label: str, index: int, budget: int) -> Heat | None:
    """The heat maps of a run's layers in at most `budget` bytes, by leaving out epochs where there are more."""
    history = run.filters
    if history is None or not history.epochs:
        return None
    filters = sum(array.shape[1] for array in history.norms.values())
    stride = max(1, -(-filters * len(history.epochs) // max(budget, filters)))
    chosen = list(range(len(history.epochs)))[::-1][::stride][::-1]  # the last one is always there
    thin = FilterHistory(
        [history.epochs[i] for i in chosen],
        {name: array[chosen] for name, array in history.norms.items()},
        {name: array[chosen] for name, array in history.kept.items()},
    )
    zeroed = sum(int((~kept[-1]).sum()) for kept in history.kept.values())
    back = sum(int((kept[1:] & ~kept[:-1]).sum()) for kept in thin.kept.values())
    note = f"One epoch in {stride} is drawn." if stride > 1 else ""
    return Heat(
        key=f"filters-{index}",
        title=label,
        alt=f"{label}: the norm of each of {filters:,} filters at each epoch. {zeroed:,} are zeroed after the last "
        f"epoch shown; {back:,} times a zeroed filter was kept by the next pruning.",
        x_title="epoch",
        x=thin.epochs,
        parts=tuple(Rows(name, cells(thin, name)) for name in thin.norms),
        note=note,
    )
