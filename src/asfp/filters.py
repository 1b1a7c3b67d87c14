"""The arithmetic of a pruning step on many layers at once: score, choose the lowest, zero.

Layers of equal shape are stacked, so a step is a few kernels a shape and not a few a layer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from asfp.criteria import Criterion
from asfp.errors import AsfpError
from asfp.selection import Layer


def count_pruned(filters: int, rate: float) -> int:
    """floor(filters * rate), guarded against float error; at least one filter stays.

    >>> count_pruned(10, 0.7), count_pruned(30, 0.1), count_pruned(16, 0.39), count_pruned(2, 0.99)
    (7, 3, 6, 1)
    """
    return min(math.floor(filters * rate + 1e-9 * max(1, filters)), filters - 1)


def score_filters(layers: Sequence[Layer], criterion: Criterion, epoch: int) -> list[Tensor]:
    """One score a filter, for each layer.

    >>> from asfp.criteria import l1
    >>> conv = torch.nn.Conv2d(1, 3, 1)
    >>> conv.weight.data[:, 0, 0, 0] = torch.tensor([1.0, -3.0, 2.0])
    >>> with torch.no_grad():
    ...     score_filters([Layer("conv", conv)], l1, epoch=1)
    [tensor([1., 3., 2.])]
    """
    inputs = [scored_tensor(layer, criterion) for layer in layers]
    scores = dict[int, Tensor]()
    for members, stack in stacks(inputs):
        keys = [f"{epoch}:{layers[i].name}" for i in members]
        scores.update(zip(members, criterion.stacked(stack, keys).unbind(), strict=True))
    return [scores[i] for i in range(len(layers))]


def scored_tensor(layer: Layer, criterion: Criterion) -> Tensor:
    """What the criterion reads of the layer: its weight, or the scale of the batch norm behind it.

    >>> from asfp.criteria import l1
    >>> tuple(scored_tensor(Layer("conv", torch.nn.Conv2d(1, 3, 1)), l1).shape)
    (3, 1, 1, 1)
    """
    if criterion.reads == "weight":
        return layer.weight.detach()
    if layer.norm is None or layer.norm.weight is None:
        raise AsfpError(
            f"criterion={criterion} needs the scale of a batch norm behind each layer, and {layer.name!r} has none: "
            'leave it out with layers=lambda name, module: ..., or use another criterion, e.g. "l2"'
        )
    return layer.norm.weight.detach()


def keep_all_but_lowest(scores: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """For each layer a mask, False for the `count` filters of lowest score; of equal ones, those of lower index.

    >>> keep_all_but_lowest([torch.tensor([3.0, 1.0, 2.0, 1.0])], [2])
    [tensor([ True, False,  True, False])]
    """
    masks = dict[int, Tensor]()
    for members, stack in stacks(scores, counts):
        count = counts[members[0]]
        keep = torch.ones_like(stack, dtype=torch.bool)
        if count:
            keep.scatter_(1, stack.argsort(dim=1, stable=True)[:, :count], False)
        masks.update(zip(members, keep.unbind(), strict=True))
    return [masks[i] for i in range(len(scores))]


def count_regrown(layers: Sequence[Layer], masks: dict[str, Tensor], scores: Sequence[Tensor]) -> list[int]:
    """For each layer, how many filters outside its mask are not zero; raises where a weight or a score is not finite.

    The scores are those of the first layers. This is the one place of a step that waits for the device.

    >>> count_regrown([Layer("conv", torch.nn.Conv2d(1, 3, 1))], {"conv": torch.tensor([True, False, False])}, [])
    [2]
    """
    order: list[int] = []  # of the layers in `found`
    found: list[Tensor] = []  # for each stack: is all finite, and how many have regrown
    for members, stack in stacks(scores):
        finite = torch.isfinite(stack).all(1)
        order += members
        found.append(torch.stack([finite, torch.zeros_like(finite)], 1).long())
    for members, stack in stacks([layer.weight.detach() for layer in layers]):
        size = torch.linalg.vector_norm(stack.flatten(2), math.inf, dim=2)
        known = [masks.get(layers[i].name) for i in members]
        gone = ~torch.stack([torch.ones_like(size[0]).bool() if m is None else m.to(size.device) for m in known])
        order += members
        found.append(torch.stack([torch.isfinite(size).all(1), (gone & (size > 0)).sum(1)], 1))
    regrown = [0] * len(layers)
    for i, (finite, count) in zip(order, torch.cat([f.to(found[0].device) for f in found]).tolist(), strict=True):
        if not finite:
            raise AsfpError(
                f"layer {layers[i].name!r} has weights or scores that are NaN or infinite, so its filters cannot be "
                "ranked: training has diverged; lower the learning rate, or continue from an earlier checkpoint"
            )
        regrown[i] += count
    return regrown


def zero_(layers: Sequence[Layer], masks: dict[str, Tensor], maps: bool) -> None:
    """Zero, in place, the filters outside the masks; with `maps` also what makes their maps other than zero.

    >>> conv = torch.nn.Conv2d(1, 3, 1)
    >>> with torch.no_grad():
    ...     zero_([Layer("conv", conv)], {"conv": torch.tensor([True, False, True])}, maps=True)
    >>> (conv.weight.flatten() != 0).tolist(), (conv.bias != 0).tolist()
    ([True, False, True], [True, False, True])
    """
    for layer in layers:
        for tensor in layer.tensors(maps):
            tensor.masked_fill_(_along_filters(~masks[layer.name], tensor), 0.0)


def factors(layers: Sequence[Layer], masks: dict[str, Tensor], maps: bool, old: Sequence[Tensor]) -> list[Tensor]:
    """A tensor of ones and zeros for each one that `zero_` changes, laid out like it; reuses `old` where it fits.

    >>> factors([Layer("conv", torch.nn.Conv2d(1, 2, 1))], {"conv": torch.tensor([True, False])}, False, [])
    [tensor([[[[1.]]], [[[0.]]]])]
    """
    result = []
    for i, (name, tensor) in enumerate((layer.name, tensor) for layer in layers for tensor in layer.tensors(maps)):
        fits = len(old) > i and _layout(old[i]) == _layout(tensor)
        factor = old[i].fill_(1.0) if fits else torch.ones_like(tensor, requires_grad=False)
        result.append(factor.masked_fill_(_along_filters(~masks[name], tensor).to(tensor.device), 0.0))
    return result


def normalised(scores: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """s^2 / mean(s^2) of each layer's scores s, shifted to begin at 0 where some are negative, on one device.

    >>> normalised([torch.tensor([1.0, 3.0])], torch.device("cpu"))
    [tensor([0.2000, 1.8000])]
    """
    found: dict[int, Tensor] = {}
    for members, stack in stacks([score.to(device) for score in scores]):
        s = stack.float()
        tiny = torch.finfo(s.dtype).tiny
        s = s - s.amin(1, keepdim=True).clamp(max=0)
        s = (s / s.amax(1, keepdim=True).clamp_min(tiny)).square()
        found.update(zip(members, (s / s.mean(1, keepdim=True).clamp_min(tiny)).unbind(), strict=True))
    return [found[i] for i in range(len(scores))]


def mean_at(values: Sequence[Tensor], table: Tensor) -> Tensor:
    """For each row of the table the mean of the values at its places, summed in a fixed order on every device.

    Places count through all values in a row; the first that is none of them fills rows up.

    >>> mean_at([torch.tensor([1.0, 2.0]), torch.tensor([4.0])], torch.tensor([[0, 2], [1, 3]]))
    tensor([2.5000, 2.0000])
    """
    flat = torch.cat([*values, values[0].new_zeros(1)])
    return flat[table].sum(1) / (table < len(flat) - 1).sum(1)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _along_filters(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (tensor.ndim - 1))


def stacks(tensors: Sequence[Tensor], keys: Sequence[Hashable] = ()) -> Iterator[tuple[list[int], Tensor]]:
    """The tensors of equal shape, type, device (and key) stacked, with their indices.

    >>> [(members, tuple(stack.shape)) for members, stack in stacks([torch.ones(2), torch.ones(3), torch.ones(2)])]
    [([0, 2], (2, 2)), ([1], (1, 3))]
    """
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        groups[tensor.shape, tensor.dtype, tensor.device, keys[i] if keys else None].append(i)
    for members in groups.values():
        if len(members) == 1:
            yield members, tensors[members[0]].unsqueeze(0)
        else:
            yield members, torch.stack([tensors[i] for i in members])
