"""Processes that read images: started fast, deaf to Ctrl-C and SIGTERM, gone when the one that reads from them ends."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

PRELOAD = ["__main__", "asfp.data.folder", "torchvision.datasets", "torchvision.transforms.v2"]
"""What every worker needs, imported once by the server that they are forked from."""


def worker_context() -> Any:
    """What `DataLoader(multiprocessing_context=...)` takes, with the server that forks the workers running.

    Ctrl-C and a batch system's SIGTERM reach every process of a run, but it is the training that has to answer, after
    its checkpoint, and that still needs its workers. So the server is started with both signals blocked, which every
    process that it forks inherits. What does not hear SIGTERM is ended by SIGKILL instead.

    >>> worker_context().get_start_method() in ("forkserver", "spawn")
    True
    """
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver, resource_tracker

    context = _context()
    resource_tracker.ensure_running()  # it unblocks the signals when it starts, so it has to run before
    with _blocked({signal.SIGINT, signal.SIGTERM}):
        forkserver.ensure_running()
    return context


if sys.platform != "win32":
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    class Worker(ForkServerProcess):
        """A process that `terminate` ends although SIGTERM is blocked in it, and that ends with its parent."""

        def run(self) -> None:
            threading.Thread(target=_end_with_parent, daemon=True).start()
            super().run()

        def terminate(self) -> None:
            self.kill()

    class _Context(ForkServerContext):
        Process = Worker

    @cache
    def _context() -> _Context:
        context = _Context()
        context.set_forkserver_preload(PRELOAD)
        atexit.register(_end_workers)  # after multiprocessing's own, so that it runs before: that one waits for them
        return context

    def _end_with_parent() -> None:
        """In a worker: torch watches the process that forked it, the server, which itself waits for the workers."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    def _end_workers() -> None:
        for child in multiprocessing.active_children():
            if isinstance(child, Worker):
                child.kill()

    @contextmanager
    def _blocked(signals: set[signal.Signals]) -> Iterator[None]:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
