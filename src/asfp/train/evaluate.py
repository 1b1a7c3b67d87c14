"""Accuracy: how many of the test images a model gets right, each counted once, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asfp.errors import AsfpError
from asfp.train.sources import Data


@torch.no_grad()
def predict(
    model: nn.Module,
    data: Data,
    normalise: nn.Module,
    dtype: torch.dtype | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The class that the model gives each of this process's test images, and the true one; leaves it in eval mode.

    `forward`: another way to its outputs.

    >>> from asfp.data import ResidentData, digits
    >>> data = ResidentData(digits(size=8), "cpu", 64, 0)
    >>> found, labels = predict(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data, nn.Identity())
    >>> found.shape, labels.shape
    (torch.Size([360]), torch.Size([360]))
    """
    model.eval()
    none = torch.empty(0, dtype=torch.long, device=next(model.parameters()).device)  # a process may have no images
    found, labels = [none], [none]
    for images, truth in data.test_batches():
        x = normalise(images)
        found.append((forward or model)(x if dtype is None else x.to(dtype)).argmax(1))
        labels.append(truth)
    return torch.cat(found), torch.cat(labels)


def accuracy(
    fabric: Any,
    model: nn.Module,
    data: Data,
    normalise: nn.Module,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """The share of all test images that the model gets right, in the run's precision; by `forward` where it is given.

    >>> from lightning.fabric import Fabric
    >>> from asfp.data import ResidentData, digits
    >>> data = ResidentData(digits(size=8), "cpu", 64, 0)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> 0.0 <= accuracy(Fabric(accelerator="cpu"), net, data, nn.Identity()) < 0.5
    True
    """
    with fabric.autocast():
        found, labels = predict(model, data, normalise, next(model.parameters()).dtype, forward)
    right, images = (total(fabric, count) for count in ((found == labels).sum(), (labels >= 0).sum()))
    if not images:
        raise AsfpError("there is no test image that can be read: repair those under data.root, or set another one")
    return right / images


def total(fabric: Any, count: Tensor) -> int:
    """The sum of a count over all processes.

    >>> from lightning.fabric import Fabric
    >>> total(Fabric(accelerator="cpu"), torch.tensor(3))
    3
    """
    return int(fabric.all_reduce(count, reduce_op="sum"))


@contextmanager
def full_float32() -> Iterator[None]:
    """Convolutions in true float32 on GPUs that would round the inputs to TF32.

    >>> with full_float32():
    ...     torch.backends.cudnn.allow_tf32
    False
    """
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
