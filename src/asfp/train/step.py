"""One training step: forward, loss, backward, SGD; plain, compiled, or the whole of it as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from asfp.train.objective import Objective, cross_entropy
from asfp.train.regrowth import Regrowth

Step = Callable[[Tensor, Tensor, float], Tensor]
"""images, labels, weight of this process's loss -> loss, on the device."""

WARM_UP = 3


class Normalise(nn.Module):
    """(x - mean) / std of images given as bytes; floats pass as they are. No weights: it is not part of the model.

    >>> Normalise((100.0,), (50.0,))(torch.tensor([[[[200]]]], dtype=torch.uint8)).item()
    2.0
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...] = (), std: tuple[float, ...] = (), channels_last: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            images = (images.float() - self.mean) / self.std
        return images.contiguous(memory_format=self.format)


def eager_step(
    fabric: Any,
    model: Callable[[Tensor], Tensor],
    normalise: nn.Module,
    optimizer: Any,
    regrowth: Regrowth | None,
    objective: Objective = cross_entropy,
    compiled: bool = False,
    kernels: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """zero_grad, loss, backward, step; `enforce_` while filters are held. `compiled`: the loss by torch.compile.

    `kernels`: a context in which the loss is computed, e.g. one that replaces convolutions by faster ones.

    >>> from lightning.fabric import Fabric
    >>> fabric, net = Fabric(accelerator="cpu"), nn.Linear(1, 2)
    >>> step = eager_step(fabric, net, nn.Identity(), torch.optim.SGD(net.parameters(), lr=0.5), None)
    >>> x, y = torch.ones(4, 1), torch.zeros(4, dtype=torch.long)
    >>> bool(step(x, y, 1.0) > step(x, y, 1.0))
    True
    """

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        x = normalise(images)
        with kernels():
            return objective(model(x), x, labels)

    loss_of = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(images: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
        optimizer.zero_grad()
        with fabric.autocast():
            loss = loss_of(images, labels)
        fabric.backward(loss if weight == 1.0 else loss * weight)
        optimizer.step()
        if regrowth is not None and regrowth.holding:
            regrowth.enforce_()
        return loss.detach()

    return step


class GraphedStep:
    """A step captured in a CUDA graph and replayed; the first few batches run without it.

    Weights, momentum, batch norm's statistics, the learning rate (a tensor) and the masks of held filters are changed
    in place, so pruning and learning rates go on without another capture. Every batch is trained on exactly once. With
    `every_size` each size of batch gets a graph, in the same memory; else only the first, and others run by `plain`.
    """

    def __init__(self, fast: Step, plain: Step, regrowth: Regrowth | None, *, every_size: bool = False) -> None:
        self.fast, self.plain, self.regrowth, self.every_size = fast, plain, regrowth, every_size
        self.captured: dict[torch.Size, _Captured] = {}
        self.pool: Any = None

    def __call__(self, images: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
        known = images.shape in self.captured
        if weight != 1.0 or (self.captured and not known and not self.every_size):
            return self.plain(images, labels, weight)
        if not known:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            self.captured[images.shape] = _Captured(self.fast, self.pool, images, labels)
        return self.captured[images.shape](images, labels, self._holding())

    def _holding(self) -> bool:
        """Whether each step multiplies by masks: in hard pruning from the first pruning on, and in a frozen end."""
        return self.regrowth is not None and self.regrowth.holding


class _Captured:
    """The graph for batches of one size, which reads images and labels where they were when it was captured."""

    def __init__(self, fast: Step, pool: Any, images: Tensor, labels: Tensor) -> None:
        self.fast, self.pool = fast, pool
        self.images, self.labels = torch.empty_like(images), torch.empty_like(labels)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss = torch.empty(0)
        self.warm, self.masked = 0, False

    def __call__(self, images: Tensor, labels: Tensor, holding: bool) -> Tensor:
        self.images.copy_(images)
        self.labels.copy_(labels)
        if self.warm < WARM_UP:
            return self._warm_up()
        if self.graph is None or self.masked != holding:
            self._capture(holding)
        assert self.graph is not None
        self.graph.replay()
        return self.loss

    def _warm_up(self) -> Tensor:
        self.warm += 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            # torch's compiler warns of its own deprecated parts, and advises TF32 for what runs in bfloat16
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            loss = self.fast(self.images, self.labels, 1.0)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, holding: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.loss = self.fast(self.images, self.labels, 1.0)
        self.graph, self.masked = graph, holding  # only now: a pool that no graph uses is gone
