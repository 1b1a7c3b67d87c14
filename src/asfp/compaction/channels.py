"""What is known of a tensor's channels: each is live, or constant with a known value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]


class Unsupported(Exception):  # noqa: N818  (a signal between a rule and the analysis, not an error of anybody)
    """A rule met a case it has no sound answer for: the operation becomes a barrier, for this reason."""


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of one tensor: they lie along `axes` (one, or two after a channel split), in row-major order.

    `live[c]` false means: every element of channel c equals `value[c]`, for every input of the network. The
    axes have the same size for every input of the network, whatever its batch or image size.
    """

    axes: tuple[int, ...]
    live: Mask
    value: Values

    @property
    def axis(self) -> int:
        if len(self.axes) != 1:
            raise Unsupported("its input's channels are split over two axes")
        return self.axes[0]

    @property
    def size(self) -> int:
        return int(self.live.size)

    @property
    def all_live(self) -> bool:
        return bool(self.live.all())

    @property
    def nonzero(self) -> Mask:
        """Constant, and not zero."""
        return ~self.live & (self.value != 0)

    def like(self, live: Mask, value: Values, axes: tuple[int, ...] | None = None) -> Channels:
        """Other channels made from these: whatever is live has no value."""
        return Channels(self.axes if axes is None else axes, live, np.where(live, 0, value))

    def moved(self, axis: int) -> Channels:
        return self.like(self.live, self.value, (axis,))

    def take(self, labels: Labels) -> Channels:
        return self.like(self.live[labels], self.value[labels])


def all_live(axis: int, size: int) -> Channels:
    return Channels((axis,), np.ones(size, dtype=bool), np.zeros(size))


class Facts:
    """What was found out about the weights' values; a second time it is read back instead of found out again.

    Every decision that depends on a weight goes through here, so a plan that holds the facts rebuilds the same
    structure from the architecture alone.
    """

    def __init__(self, recorded: dict[str, Mask] | None = None) -> None:
        self.replay = recorded is not None
        self.recorded: dict[str, Mask] = {} if recorded is None else recorded

    def __call__(self, node: str, key: str, find: Callable[[], Mask]) -> Mask:
        name = f"{node}:{key}"
        if not self.replay:
            self.recorded[name] = np.asarray(find(), dtype=bool)
        return self.recorded[name]

    def recall(self, node: str, key: str, find: Callable[[], bool]) -> bool:
        """One yes or no; a plan from before the question was asked says no."""
        if self.replay and f"{node}:{key}" not in self.recorded:
            return False
        return bool(self(node, key, lambda: np.array([find()]))[0])

    def extra(self, node: str, key: str, find: Callable[[], Mask]) -> Mask | None:
        """Flags that are recorded only where some are set; None where none is."""
        name = f"{node}:{key}"
        if not self.replay and (found := find()).any():
            self.recorded[name] = found
        return self.recorded.get(name)
