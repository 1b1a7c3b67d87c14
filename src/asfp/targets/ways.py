"""Ways to choose filters, and networks timed side by side with the dense one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from asfp.checks import SELECTIONS, check_align, check_selection
from asfp.compaction import CompactModule
from asfp.errors import AsfpError
from asfp.trace import copy_of

Progress = Callable[[str, float], None]
"""(what is being done, share of all that is done)."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Way:
    """How filters are chosen.

    >>> str(Way("coupled", 16))
    'coupled, align 16'
    """

    selection: str = "independent"
    align: int = 1

    def __post_init__(self) -> None:
        check_selection(self.selection)
        check_align(self.align)

    def __str__(self) -> str:
        return self.selection + (f", align {self.align}" if self.align > 1 else "")

    def options(self, streams: float | None) -> dict[str, Any]:
        """For the pruner."""
        return {"selection": self.selection, "align": self.align, "streams": streams}


WAYS = tuple(Way(selection, align) for selection in SELECTIONS for align in (1, 16, 32))


def allowed(ways: Sequence[Way], make: Callable[[Way], Found]) -> list[Found]:
    """What is made of each way that the network allows; an error where it allows none."""
    if not ways:
        raise AsfpError("there are no ways to compare: give at least one, e.g. Way('coupled', 16)")
    if wrong := [way for way in ways if not isinstance(way, Way)]:
        raise AsfpError(f"{wrong[0]!r} is no way to choose filters: give asfp.targets.Way('coupled', 16) and the like")
    found, refused = [], []
    for way in dict.fromkeys(ways):
        try:
            found.append(make(way))
        except AsfpError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    return found


def counted(networks: Sequence[object]) -> str:
    """How many there are.

    >>> counted([1, 2])
    '2 networks'
    """
    return f"{len(networks)} network{'s' * (len(networks) != 1)}"


class Race:
    """Compact networks side by side with the dense one, on an engine; those that are alike are timed once."""

    def __init__(self, model: nn.Module, example: Tensor, engine: str, repeats: int) -> None:
        from asfp.bench import Setting

        self.dense, self.example, self.repeats = copy_of(model).eval(), example, repeats
        self.setting = Setting(engine, batch=len(example), threads=torch.get_num_threads())
        self.setting.check()

    def __call__(self, networks: Sequence[CompactModule]) -> list[tuple[float, float, float]]:
        """The share of the time that each saves, and its 95 % interval."""
        from asfp.bench import bench_models

        different = {network.plan.shape: network for network in networks}
        names = {shape: str(i) for i, shape in enumerate(different)}
        models = {"dense": self.dense} | {names[shape]: network for shape, network in different.items()}
        rows = bench_models(models, self.example, [self.setting], repeats=self.repeats).rows
        saved = {row.model: row.time_saved for row in rows[1:]}
        return [saved[names[network.plan.shape]] or (0.0, 0.0, 0.0) for network in networks]
