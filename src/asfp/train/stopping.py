"""Ctrl-C and SIGTERM as a list to look at, so that work ends where it can be taken up again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asfp.errors import Interrupted


@contextmanager
def stop_signals(*, patient: bool = False) -> Iterator[list[int]]:
    """A list that SIGINT and SIGTERM are put on; a second one raises `Interrupted`, unless `patient`.

    Outside the main thread, where Python takes no handlers, the list stays empty and the signals do what they did.

    >>> with stop_signals() as stop:
    ...     work = [step for step in range(1000) if not stop]
    >>> len(work)
    1000
    """
    stop: list[int] = []

    def note(number: int, frame: Any) -> None:
        if stop and not patient:
            raise Interrupted("Stopped.", number)
        stop.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
