"""What the processes of one run tell each other beside their gradients; with one process, nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asfp.train.assemble import Parts


def asked_to_stop(parts: Parts, stop: Sequence[int]) -> int:
    """The signal that this process, or any of several, was sent; 0 for none. All of them have to call this.

    >>> from types import SimpleNamespace
    >>> one = SimpleNamespace(fabric=SimpleNamespace(world_size=1))
    >>> asked_to_stop(one, []), asked_to_stop(one, [15])
    (0, 15)
    """
    own = stop[0] if stop else 0
    if parts.fabric.world_size == 1:
        return own
    flag = torch.tensor(own, device=parts.fabric.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag)


def any_image(parts: Parts, labels: Tensor, skipping: bool) -> bool:
    """Whether a step has an image on any process; there can be none only where unreadable ones are skipped.

    >>> from types import SimpleNamespace
    >>> any_image(SimpleNamespace(fabric=SimpleNamespace(world_size=1)), torch.zeros(0), skipping=True)
    False
    """
    if parts.fabric.world_size == 1:
        return len(labels) > 0
    if not skipping:
        return True
    count = torch.tensor(len(labels), device=parts.fabric.device)
    dist.all_reduce(count)
    return bool(count)


def take_step(parts: Parts, images: Tensor, labels: Tensor, weight: float) -> Tensor:
    """The training step; a process without an image takes part in the others' with black ones that weigh nothing."""
    if len(labels):
        return parts.step(images, labels, weight)
    kept = [buffer.clone() for buffer in parts.model.buffers()]
    black = images.new_zeros(2, *parts.data.shape)  # two: batch norm needs more than one
    loss = parts.step(black, labels.new_zeros(2, dtype=torch.long), 0.0)
    for buffer, value in zip(parts.model.buffers(), kept, strict=True):
        buffer.copy_(value)
    return loss


def total_losses(parts: Parts, losses: Tensor) -> Tensor:
    """The sum of the losses of all processes, step by step.

    >>> from types import SimpleNamespace
    >>> total_losses(SimpleNamespace(fabric=SimpleNamespace(world_size=1)), torch.ones(2))
    tensor([1., 1.])
    """
    if parts.fabric.world_size == 1 or not len(losses):
        return losses
    losses = losses.clone()
    dist.all_reduce(losses)
    return losses


def share_buffers(parts: Parts) -> None:
    """Each process has seen other images: batch norm's statistics are those of the first."""
    if parts.fabric.world_size > 1:
        for buffer in parts.model.buffers():
            dist.broadcast(buffer, 0)
