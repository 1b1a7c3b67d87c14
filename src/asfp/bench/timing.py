"""Interleaved timing, and what may be concluded from it."""

from __future__ import annotations

import ctypes
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Run = Callable[[], object]
"""One run of a model on its input."""


@dataclass(frozen=True)
class Times:
    """Durations in milliseconds, in the order they were taken.

    >>> times = Times((4.0, 1.0, 2.0, 3.0, 100.0))
    >>> times.median, times.quartiles
    (3.0, (2.0, 4.0))
    """

    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.ms) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.ms, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """The distance of the quartiles, relative to the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0


def time_saved(before: Times, after: Times) -> tuple[float, float, float]:
    """The share of the time that is saved: the median over pairs taken one after the other, and its 95 % interval.

    The interval is that of the median's order statistics, so it assumes nothing about how the noise is distributed.

    >>> time_saved(Times((2.0,) * 10), Times((1.0,) * 10))
    (0.5, 0.5, 0.5)
    """
    saved = sorted(1 - b / a for a, b in zip(before.ms, after.ms, strict=True))
    n = len(saved)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(saved), saved[low], saved[n - 1 - low]


def interleave(
    runs: Sequence[Run], repeats: int, warmup: int, device: str = "cpu", tick: Callable[[], None] = lambda: None
) -> list[Times]:
    """Time the runs in turn, A B A B ..., so that noise hits all of them; `warmup` rounds before are not counted.

    In each turn a model runs twice and the second run is timed: the first finds the caches full of another model's
    weights, as they are not where one model runs again and again.

    >>> len(interleave([lambda: None, lambda: None], repeats=3, warmup=1)[1].ms)
    3
    """
    times: list[list[float]] = [[] for _ in runs]
    measure = _on_cuda if device == "cuda" else _on_cpu
    for round_ in range(-warmup, repeats):
        for run, taken in zip(runs, times, strict=True):
            ms = measure(run)
            if round_ >= 0:
                taken.append(ms)
            tick()
    return [Times(tuple(taken)) for taken in times]


def _on_cpu(run: Run) -> float:
    run()
    begin = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begin)


def _on_cuda(run: Run) -> float:
    run()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def peak_memory(prepare: Callable[[], Run], device: str = "cpu") -> tuple[Run, int | None]:
    """The run that `prepare` makes, and the most memory in bytes that making it and running it once added.

    On the GPU it is what torch allocated, on Linux how far the process grew; elsewhere it is not known.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run = prepare()
        run()
        torch.cuda.synchronize()
        return run, torch.cuda.max_memory_allocated() - before
    resident = _reset_peak()
    run = prepare()
    run()
    peak = _status("VmHWM")
    return run, None if resident is None or peak is None else max(0, peak - resident)


def _reset_peak() -> int | None:
    """Give unused memory back, forget the peak, and return what is in use."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return 1024 * int(found[1]) if found else None
