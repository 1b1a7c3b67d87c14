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

    They are heard also where the process that started this one had blocked them. Outside the main thread, where Python
    takes no handlers, the list stays empty and the signals do what they did.

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
    masked = signal.pthread_sigmask(signal.SIG_UNBLOCK, before) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield stop
    finally:
        if masked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        for number, handler in before.items():
            signal.signal(number, handler)
