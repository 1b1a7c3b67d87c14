"""The rate that leaves a share of the multiply-adds, and the fastest way to choose filters at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from torch import Tensor, nn

from asfp.compaction import CompactModule
from asfp.errors import AsfpError
from asfp.targets.target import (
    COARSE,
    LAST,
    STEP,
    Target,
    as_image,
    as_network,
    check_share,
    cutter,
    macs_share,
    rate_of,
    smallest,
)
from asfp.targets.ways import WAYS, Progress, Race, Way, allowed, counted


def rate_for_macs(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    selection: str = "independent",
    streams: float | None = None,
    align: int = 1,
    layout: str = "least",
) -> Target:
    """The smallest uniform rate whose compact network has at most `target` of the dense one's MACs.

    With `streams` it is that of the other layers. Counted on the real compact network, pruned by the weights as they
    are; the model is not changed.

    >>> import asfp, torch
    >>> found = rate_for_macs(asfp.create_model("resnet8"), torch.zeros(1, 3, 32, 32), 0.5)
    >>> found.outcome <= 0.5, 0.3 < found.rate < 0.5
    (True, True)
    """
    check_share("target_macs", target)
    cut = cutter(as_network(model), example, {"selection": selection, "streams": streams, "align": align}, layout)
    share = cache(lambda step: macs_share(cut(step)))
    rate = smallest(lambda step: share(step) <= target, rising=layout == "auto")
    if rate is None:
        least = min(share(step) for step in (*range(0, LAST, COARSE), LAST))
        raise AsfpError(
            f"target_macs={target:g} cannot be reached: up to a rate of {STEP * LAST:g} at least {least:.3f} of the "
            f"MACs are left; ask for more"
            + (f", or for a higher rate than streams={streams:g}" if streams is not None else "")
            + ("" if selection == "coupled" or streams == 0.0 else ", or try selection='coupled'")
        )
    left = share(rate)
    return Target("macs", target, rate_of(rate), selection, align, layout, left, left, left, streams=streams)


def ways_to_macs(
    model: nn.Module,
    example: Tensor,
    target: float,
    *,
    engine: str = "onnxruntime",
    ways: Sequence[Way] = WAYS,
    streams: float | None = None,
    layout: str = "least",
    repeats: int = 30,
    progress: Progress = lambda message, done: None,
) -> list[Target]:
    """`rate_for_macs` for several ways to choose filters, the fastest first.

    MACs are counted by the layout that has the fewest; what is timed, all side by side with the dense network in one
    run, is laid out by `layout`. Ways that the network does not allow, or that cannot leave so few, are left out.

    >>> import asfp, torch
    >>> ways = [Way("independent"), Way("coupled", 16)]
    >>> x = torch.zeros(1, 3, 32, 32)
    >>> found = ways_to_macs(asfp.create_model("resnet8"), x, 0.6, engine="torch", ways=ways, repeats=5)
    >>> [way.met for way in found], found[0].time <= found[1].time
    ([True, True], True)
    """
    check_share("target_macs", target)
    model, example = as_network(model), as_image(example)
    race = Race(model, example, engine, repeats)

    def search_for(way: Way) -> tuple[Target, CompactModule]:
        progress(f"counting {way}", 0.0)
        options = way.options(streams)
        found = rate_for_macs(model, example, target, **options)
        return found, cutter(model, example, options, layout)(round(found.rate / STEP))

    searches = allowed(ways, search_for)
    progress(f"timing {counted(searches)}", 0.5)
    times = race([network for _, network in searches])
    timed = [
        replace(found, time=1 - middle, interval=(1 - high, 1 - low), engine=engine, layout=network.plan.layout)
        for (found, network), (middle, low, high) in zip(searches, times, strict=True)
    ]
    return sorted(timed, key=lambda found: found.time or 0.0)
