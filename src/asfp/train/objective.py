"""The loss of a step: cross entropy, or that and the outputs of a trained teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""logits, normalised images, labels -> mean loss of the batch."""


def cross_entropy(logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy; the images play no part.

    >>> round(cross_entropy(torch.zeros(1, 2), torch.empty(0), torch.tensor([1])).item(), 4)
    0.6931
    """
    return F.cross_entropy(logits, labels)


def distillation(
    teacher: nn.Module, alpha: float, temperature: float, forward: Callable[[Tensor], Tensor] | None = None
) -> Objective:
    """(1 - alpha) CE(y, z) + alpha T^2 KL(softmax(t / T) || softmax(z / T)), with t the teacher's logits.

    The teacher stays in evaluation mode and gets no gradients. With alpha = 1 the labels play no part. `forward`: a
    faster way to the teacher's outputs.

    >>> teacher = nn.Linear(3, 2)
    >>> loss = distillation(teacher, alpha=1.0, temperature=4.0)
    >>> images, labels = torch.ones(5, 3), torch.zeros(5, dtype=torch.long)
    >>> loss(teacher(images), images, labels).abs().item() < 1e-6, loss(-teacher(images), images, labels).item() > 0
    (True, True)
    """
    teacher = teacher.eval().requires_grad_(False)
    dtype = next(teacher.parameters()).dtype

    def loss(logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.log_softmax((forward or teacher)(images.to(dtype)) / temperature, 1)
        own = F.log_softmax(logits / temperature, 1)
        told = F.kl_div(own, target, reduction="batchmean", log_target=True) * temperature**2
        return (1.0 - alpha) * F.cross_entropy(logits, labels) + alpha * told

    return loss
