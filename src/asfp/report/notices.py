"""What a report lacks, said once for all runs that lack it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """What is missing or wrong, and at which files or folders.

    >>> print(Notice("there are no curves", ("runs/a", "runs/b")))
    runs/a, runs/b: there are no curves
    """

    text: str
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(self.places)}: {self.text}" if self.places else self.text


def merged(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Notices of the same text as one.

    >>> [str(notice) for notice in merged([Notice("x", ("a",)), Notice("y"), Notice("x", ("b",))])]
    ['a, b: x', 'y']
    """
    found: dict[str, tuple[str, ...]] = {}
    for notice in notices:
        found[notice.text] = (*found.get(notice.text, ()), *notice.places)
    return tuple(Notice(text, places) for text, places in found.items())
