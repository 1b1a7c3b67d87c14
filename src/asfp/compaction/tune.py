"""The layout that is fastest on the engine that a model will run on: measured, not guessed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from asfp.compaction.layout import LAYOUTS, Prices
from asfp.errors import AsfpError, nearest
from asfp.trace import Example, as_arguments

SCALES = (0.3, 3.0)
"""Prices between the named layouts', as multiples of "auto"."""

Module = TypeVar("Module", bound=nn.Module)


def candidates() -> dict[str, Prices]:
    """The named layouts, some between them, some in wider blocks of channels, 16 for CPUs that compute as many numbers
    at once and 32 and 64 for GPUs, and one that leaves zero filters in wherever that saves an operation.

    >>> list(candidates())
    ['least', 'auto', 'zeros', 'auto in 16s', 'zeros in 32s', 'zeros in 64s', 'auto x 0.3', 'auto x 3', 'plain']
    """
    wider = {
        f"{name} in {n}s": replace(LAYOUTS[name], block=n) for name, n in (("auto", 16), ("zeros", 32), ("zeros", 64))
    }
    scaled = {f"auto x {s:g}": LAYOUTS["auto"].scaled(s) for s in SCALES}
    return LAYOUTS | wider | scaled | {"plain": Prices(math.inf, math.inf, math.inf)}


def fastest(
    build: Callable[[Prices], Module], alike: Callable[[Module], object], example: Example, engine: str, repeats: int
) -> str:
    """Build the model by each of the prices, time them side by side on the engine, and name the fastest.

    Models that come out the same, as `alike` tells, are timed once.

    >>> widths = {0.0: 8, 30.0: 64}
    >>> make = lambda prices: nn.Conv2d(3, widths.get(prices.pad, 128), 3)
    >>> fastest(make, lambda conv: conv.out_channels, torch.zeros(1, 3, 64, 64), "torch", 5)
    'least'
    """
    from asfp.bench import ENGINES, Setting, bench_models

    if not isinstance(engine, str) or engine not in ENGINES:
        hint = nearest(str(engine), ENGINES)
        raise AsfpError(f"tune={engine!r} is no engine: use one of {', '.join(ENGINES)}.{hint}")
    args, kwargs = as_arguments(example)
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        raise AsfpError(
            "tune=... times models with one input: give one tensor as example, or choose layout=... by hand"
        )
    if engine == "fused" and not args[0].is_cuda:
        raise AsfpError("tune='fused' times on a GPU: bring model and example there, model.cuda() and example.cuda()")
    models: dict[str, Module] = {}
    seen: set[object] = set()
    for name, prices in candidates().items():
        model = build(prices)
        if alike(model) not in seen:
            seen.add(alike(model))
            models[name] = model
    if len(models) == 1:
        return next(iter(models))
    x = args[0]
    setting = Setting(engine, batch=len(x), device=x.device.type, threads=torch.get_num_threads())
    rows = bench_models(models, x, [setting], repeats=repeats).rows
    return min(rows, key=lambda row: row.times.median).model
