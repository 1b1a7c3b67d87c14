"""WHICH: one score a filter; the lowest are pruned first.

A criterion is any callable weight -> scores, with the filters along dimension 0 of the weight and one score for each.
The ones here are `Criterion` objects, which also score a stack of layers of equal shape at once.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asfp.errors import AsfpError, nearest

Scorer = Callable[[Tensor], Tensor]
"""weight (N, ...) -> scores (N,)."""


@dataclass(frozen=True)
class Criterion:
    """score(filter) for every filter of a layer, or of a stack of layers; called with a weight (N, ...) it gives (N,).

    >>> l2(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([5., 1.])
    """

    name: str
    """What it is, with its parameters."""
    score: Callable[[Tensor, Sequence[str]], Tensor]
    """A stack of weights (layers, N, ...) and a key for each layer and moment -> scores (layers, N)."""
    reads: Literal["weight", "bn_scale"] = "weight"
    """What it is given: the convolution's weight, or the scale of the batch norm behind it."""

    def __call__(self, weight: Tensor) -> Tensor:
        """The scores of the filters along dimension 0."""
        return self.stacked(weight.unsqueeze(0), [""]).squeeze(0)

    def stacked(self, weights: Tensor, keys: Sequence[str]) -> Tensor:
        """Scores (layers, N) of weights (layers, N, ...), in float32 where they come in half precision.

        >>> l1.stacked(torch.ones(2, 3, 4, dtype=torch.bfloat16), ["conv1", "conv2"])
        tensor([[4., 4., 4.],
                [4., 4., 4.]])
        """
        half = weights.dtype in (torch.float16, torch.bfloat16)
        return self.score(weights.float() if half else weights, keys)

    def __repr__(self) -> str:
        return self.name


def lp(p: float) -> Criterion:
    """(sum |w|^p)^(1/p) over each filter: Eq. 4 of the paper, which uses p = 2; p = inf is the largest |w|.

    >>> lp(3)(torch.tensor([[2.0, 2.0], [1.0, 0.0]]))
    tensor([2.5198, 1.0000])
    """
    value: object = p
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) > 0.0:
        raise AsfpError(f"p={p!r} is not the order of a norm: it must be a number above 0, e.g. lp(2)")
    order = float(value)
    return Criterion(f"lp(p={p})", lambda weights, _: torch.linalg.vector_norm(weights.flatten(2), order, dim=2))


l1 = Criterion("l1", lp(1).score)
l2 = Criterion("l2", lp(2).score)


def _distances(weights: Tensor, _: Sequence[str]) -> Tensor:
    filters = weights.flatten(2)
    return torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").sum(2)


geometric_median = Criterion("geometric_median", _distances)
"""score_j = sum_i ||F_i - F_j||_2 over the filters i of the layer: FPGM. The lowest are the easiest to replace."""

bn_scale = Criterion("bn_scale", lambda scales, _: scales.abs(), reads="bn_scale")
"""score_j = |gamma_j| of the batch norm behind the convolution: called with that scale, not with the filters."""


def random(seed: int) -> Criterion:
    """score_j ~ U(0, 1), drawn anew for every layer and epoch; the same on every device, process and rerun.

    >>> bool((random(0)(torch.ones(8, 3)) == random(0)(torch.zeros(8, 3))).all())
    True
    """
    value: object = seed
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise AsfpError(f"seed={seed!r} is not a seed: it must be an int, e.g. random(0)")

    def draw(weights: Tensor, keys: Sequence[str]) -> Tensor:
        rows = []
        for key in keys:
            digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            rows.append(torch.rand(weights.shape[1], generator=generator))
        scores = torch.stack(rows)
        return scores.pin_memory().to(weights.device, non_blocking=True) if weights.is_cuda else scores.to(weights)

    return Criterion(f"random(seed={seed})", draw)


CRITERIA: dict[str, Criterion] = {
    "l1": l1,
    "l2": l2,
    "geometric_median": geometric_median,
    "bn_scale": bn_scale,
    "random": random(0),
}


def resolve(criterion: str | Scorer) -> Criterion:
    """The criterion of that name, or any callable weight -> scores as one.

    >>> resolve("l1")
    l1
    >>> mean = resolve(lambda weight: weight.abs().flatten(1).mean(1))
    >>> mean(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    tensor([3.5000, 0.5000])
    """
    if isinstance(criterion, Criterion):
        return criterion
    if isinstance(criterion, str):
        if criterion not in CRITERIA:
            raise AsfpError(
                f"criterion={criterion!r} is unknown: it must be one of {', '.join(CRITERIA)}, "
                f"or a callable weight -> scores.{nearest(criterion, CRITERIA)}"
            )
        return CRITERIA[criterion]
    if not callable(criterion):
        raise AsfpError(
            f"criterion={criterion!r} is not a criterion: it must be one of {', '.join(CRITERIA)}, or a callable "
            'weight -> scores, e.g. criterion="l2"'
        )
    name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
    factories: tuple[object, ...] = (lp, random)
    if criterion in factories:
        raise AsfpError(f"criterion={name} needs its parameter: write criterion={name}(2)")
    return Criterion(name, lambda weights, _: torch.stack([_checked(criterion(w), w, name) for w in weights]))


def _checked(scores: object, weight: Tensor, name: str) -> Tensor:
    if not isinstance(scores, Tensor) or scores.shape != weight.shape[:1]:
        got = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(scores)
        raise AsfpError(
            f"criterion {name} gave {got} for a weight of shape {tuple(weight.shape)}: it must give one score "
            f"a filter, a tensor of shape ({weight.shape[0]},), e.g. weight.abs().flatten(1).sum(1)"
        )
    return scores.detach() if scores.is_floating_point() else scores.detach().float()
