"""Widths that hardware likes: kept counts rounded to multiples of n, at the multiply-adds that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

HEAVY = 1.1
"""A layer writes much if it writes so many times the elements that all do, for its multiply-adds."""
CLOSE = 0.002
"""As close to the multiply-adds asked for as a choice by traffic has to leave them."""
SMALLEST = 16
"""Layers of n filters or fewer keep multiples of n / 2, n / 4, ..., but not of less than this."""


def multiple_for(size: int, n: int) -> int:
    """What a layer of `size` filters keeps multiples of: n, or, with n or fewer, the largest n / 2^k below `size`.

    1 where that is less than 16: such a layer keeps what was asked.

    >>> [multiple_for(size, 32) for size in (256, 64, 32, 24, 16)]
    [32, 32, 16, 16, 1]
    """
    if size > n:
        return n
    while n % 2 == 0 and n // 2 >= SMALLEST:
        n //= 2
        if n < size:
            return n
    return 1


def align_kept(
    sizes: Sequence[int],
    asked: Sequence[int],
    n: int,
    macs: Callable[[Sequence[int]], float],
    inner: Sequence[Sequence[int]] = (),
    elements: Callable[[Sequence[int]], float] | None = None,
) -> list[int]:
    """For each layer a multiple of m next to `asked`, above or below, so that macs(kept) stays close to macs(asked).

    m is n, and less in layers of n filters or fewer: `multiple_for`.
    Error diffusion: layers are settled one by one, those whose choice moves the multiply-adds most first, each to the
    side that brings the total closer to what was asked. `macs` must not fall where a count rises. Then

        |macs(kept) - macs(asked)| <= max(largest step / 2, |forced|)

    where a step is what one layer's two choices differ by, and forced is the error of the layers without a choice.
    Time is not multiply-adds alone: with `elements`, what is written to memory, the layers that write much for their
    multiply-adds (a network's first ones) come before all others and take the multiple below, as long as those
    others, at the multiple above, can make up for it; where they do not come close, some go back.

    A layer has no choice where

    - it is too narrow for any multiple: it is exempt, and keeps what was asked;
    - nothing is to be pruned: it keeps all;
    - fewer than m should stay: m stay;
    - more should stay than its largest multiple of m: that, or all of them, whichever is nearer;
    - the multiple above would need channels that others prune: `inner` names, for each layer, those that write a part
      of its channels and prune them for both. In the end such a layer takes the multiple above after all, and those
      others keep what it needs, where that comes closer to the multiply-adds.

    >>> align_kept([64, 64, 128, 8], [45, 45, 90, 6], 16, sum)
    [48, 48, 80, 6]
    """
    multiples = [multiple_for(size, n) for size in sizes]
    choices = [_choices(*layer) for layer in zip(sizes, asked, multiples, strict=True)]
    held: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        most = sizes[i] - max((sizes[j] - choices[j][0] for j in (inner[i] if inner else ())), default=0)
        if choices[i][-1] > most and (m := multiples[i]) > 1:
            held[i] = choices[i]
            choices[i] = (choices[i][0] if len(choices[i]) == 2 else max(m, most // m * m),)
    goal = macs(asked)
    kept = [pair[0] if len(pair) == 1 else count for pair, count in zip(choices, asked, strict=True)]

    def total(i: int, count: int) -> float:
        return macs([*kept[:i], count, *kept[i + 1 :]])

    steps = {i: total(i, pair[-1]) - total(i, pair[0]) for i, pair in enumerate(choices) if len(pair) == 2}
    order = sorted(steps, key=lambda i: (-steps[i], i))
    if elements is not None:
        low, high = ([pair[side] for pair in choices] for side in (0, -1))
        for i in _heavy(low, high, order, macs, elements):
            rest = [*high[:i], low[i], *high[i + 1 :]]
            if macs(rest) >= goal:
                kept[i], high = low[i], rest
                order.remove(i)
    for i in order:
        kept[i] = min(choices[i], key=lambda c: (abs(total(i, c) - goal), abs(c - asked[i]), -c))
    for i in sorted(steps.keys() - order, key=lambda i: (steps[i], i)):
        if abs(macs(kept) - goal) > CLOSE * goal:
            kept[i] = min(choices[i], key=lambda c: abs(total(i, c) - goal))
    for i in sorted(held, key=lambda i: sizes[i]):
        for count in held[i]:
            other = _lifted(kept, i, count, sizes, multiples, inner)
            if abs(macs(other) - goal) < abs(macs(kept) - goal):
                kept = other
    return kept


def _lifted(
    kept: Sequence[int],
    i: int,
    count: int,
    sizes: Sequence[int],
    multiples: Sequence[int],
    inner: Sequence[Sequence[int]],
) -> list[int]:
    """The counts with one layer at `count`, and those that write a part of its channels at what that needs."""
    result = [*kept[:i], count, *kept[i + 1 :]]
    for whole in sorted((i, *inner[i]), key=lambda j: -sizes[j]):
        for part in inner[whole]:
            least = sizes[part] - (sizes[whole] - result[whole])
            if result[part] < least:
                result[part] = min(sizes[part], -(-least // multiples[part]) * multiples[part])
    return result


def _heavy(
    low: Sequence[int],
    high: Sequence[int],
    layers: Sequence[int],
    macs: Callable[[Sequence[int]], float],
    elements: Callable[[Sequence[int]], float],
) -> list[int]:
    """The layers that write much for their multiply-adds; the heaviest first."""
    most, all_written = macs(high), elements(high)
    shares = {}
    for i in layers:
        fewer = [*high[:i], low[i], *high[i + 1 :]]
        saved = (most - macs(fewer)) * all_written
        shares[i] = (all_written - elements(fewer)) * most / saved if saved > 0 else 0.0
    return sorted((i for i in layers if shares[i] > HEAVY), key=lambda i: -shares[i])


def count_on_the_way(size: int, kept: int, n: int, share: float) -> int:
    """How many of `size` filters are pruned when `share` of the way to `kept` is done.

    What is left, size - share (size - kept), is rounded to the nearest multiple of n, or to `size`. So the count rises
    with the share and is size - kept at the end.

    >>> [count_on_the_way(64, 48, 16, share) for share in (0.0, 0.4, 0.6, 1.0)]
    [0, 0, 16, 16]
    >>> [count_on_the_way(64, 32, 8, share) for share in (0.1, 0.5, 0.75)]
    [0, 16, 24]
    """
    if share >= 1.0:
        return size - kept
    left = size - share * (size - kept)
    return size - min([size, kept, *range(-(-kept // n) * n, size, n)], key=lambda m: (abs(left - m), m))


def _choices(size: int, asked: int, n: int) -> tuple[int, ...]:
    """The multiple of n below and the one above, from n to the largest that fits; or one number."""
    if asked == size or asked % n == 0:
        return (asked,)
    largest = size // n * n
    if asked > largest:
        return (largest if asked - largest <= size - asked else size,)
    return (asked // n * n, -(-asked // n) * n) if asked > n else (n,)
