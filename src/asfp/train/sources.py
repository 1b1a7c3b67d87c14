"""From a config to its images: what the loop needs of a data set, and the data set that the config names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from asfp.data import ImageData, ResidentData, cifar10, digits
from asfp.errors import AsfpError
from asfp.train.config import TrainConfig


class Data(Protocol):
    """What the loop needs of a data set; every batch is a pure function of (seed, epoch, step)."""

    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_size: int
    test_size: int

    @property
    def steps(self) -> int: ...
    def global_size(self, step: int) -> int: ...
    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]: ...
    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]: ...


def build_data(config: TrainConfig, fabric: Any) -> Data:
    """The data set that the config names, with at least two images for each process in every batch (batch norm).

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from asfp.train.config import DataConfig
    >>> one = SimpleNamespace(device=torch.device("cpu"), global_rank=0, world_size=1)
    >>> build_data(TrainConfig(data=DataConfig(name="digits")), one).shape
    (1, 16, 16)
    """
    least, world = 2 * fabric.world_size, fabric.world_size
    if config.data.batch < least:
        raise AsfpError(
            f"data.batch={config.data.batch} is too small for {world} processes: it is their batch together, set "
            f"data.batch={least} or more"
        )
    data = _open_data(config, fabric)
    if not data.steps:
        raise AsfpError(
            f"there is too little to train on: {data.train_size} training images for {world} process"
            f"{'es' if world > 1 else ''}, at least {least} are needed; set another data.root"
        )
    return data


def _open_data(config: TrainConfig, fabric: Any) -> Data:
    data = config.data
    if data.name == "imagefolder":
        from asfp.data.folder import FolderData

        return FolderData(
            data.root, data.batch, config.seed, size=data.size or 224, workers=data.workers, corrupt=data.corrupt,
            augment=data.augment != "none", test_batch=data.test_batch,
            device=fabric.device, rank=fabric.global_rank, world=fabric.world_size,
        )  # fmt: skip
    if data.name == "cifar10":
        if data.size not in (0, 32):
            raise AsfpError(f"data.size={data.size}: CIFAR-10's images are 32x32, leave data.size out")
        images = _cifar10(data.root, data.download, fabric)
    else:
        images = digits(data.size or 16)
    augment = data.augment == "crop-flip" or (data.augment == "auto" and data.name == "cifar10")
    return ResidentData(
        images, fabric.device, data.batch, config.seed, augment=augment, test_batch=data.test_batch,
        rank=fabric.global_rank, world=fabric.world_size,
    )  # fmt: skip


def _cifar10(root: str, download: bool, fabric: Any) -> ImageData:
    """Where it is to be downloaded, the first process of each machine does so and the others wait for it."""
    if not download or fabric.world_size == 1:
        return cifar10(root, download)
    failure = None
    with fabric.rank_zero_first(local=True):
        try:
            images = cifar10(root, download=fabric.local_rank == 0)
        except AsfpError as error:  # raised when all are out of here: the others would wait for a process that is gone
            failure = error
    if failure is not None:
        raise failure
    return images
