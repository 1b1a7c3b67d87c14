"""ImageNet, or any tree of train/CLASS/* and val/CLASS/*, read by torchvision in worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from asfp.data.resident import Batch, epoch_seed
from asfp.data.workers import worker_context
from asfp.errors import AsfpError

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


class FolderData:
    """Batches of a folder of images, each a pure function of (seed, epoch, step), whatever the number of workers.

    Training images are RandomResizedCrop(size) and flipped; test images, and without `augment` all, are resized to
    size * 256 / 224 and cropped in the centre. Images that cannot be read are fatal, or with `corrupt="skip"` left out,
    each named in a warning and counted in `skipped`. Batches come as bytes; they are normalised on the device.

        data = FolderData("data/imagenet", batch=256, seed=0, workers=16, device="cuda")
        for images, labels in data.train_batches(epoch=1): ...
    """

    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def __init__(
        self,
        root: str | Path,
        batch: int,
        seed: int,
        *,
        size: int = 224,
        augment: bool = True,
        workers: int = 8,
        corrupt: str = "fatal",
        test_batch: int = 256,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.train, self.test = _open(Path(root) / "train"), _open(Path(root) / "val")
        if self.train.classes != self.test.classes:
            differ = sorted(set(self.train.classes) ^ set(self.test.classes))
            raise AsfpError(f"train/ and val/ under {root} have other classes, e.g. {differ[0]}: make them the same")
        self.classes = len(self.train.classes)
        self.shape: tuple[int, ...] = (3, size, size)
        self.train_size, self.test_size = len(self.train), len(self.test)
        self.batch, self.seed, self.workers, self.test_batch = batch, seed, workers, test_batch
        self.device, self.rank, self.world, self.fatal = torch.device(device), rank, world, corrupt == "fatal"
        self.augment, self.skipped = augment, set[str]()
        if not self.fatal:
            _check_one_readable(self.test, Path(root) / "val")

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        full, rest = divmod(self.train_size, self.batch)
        return full + (rest >= 2 * self.world)

    def global_size(self, step: int) -> int:
        """The images in batch `step`, of all processes together, unreadable ones included."""
        return min(self.batch, self.train_size - step * self.batch)

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from step `start` on; one without a readable image is empty.

        Empty is (0, 3, size, size) and (0,): the k-th batch is that of step start + k, whatever could be read.
        """
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, epoch))
        order = torch.randperm(self.train_size, generator=generator)
        shares = []
        for step in range(start, self.steps):
            low, size = step * self.batch, self.global_size(step)
            part = order[low + self.rank * size // self.world : low + (self.rank + 1) * size // self.world]
            shares.append(part.tolist())
        transform = training_transform(self.shape[1]) if self.augment else test_transform(self.shape[1])
        for images, labels in self._load(_Images(self.train, transform, epoch_seed(self.seed, epoch)), shares):
            yield images.view(len(labels), *self.shape), labels

    def test_batches(self) -> Iterator[Batch]:
        """This process's share of the test images that can be read, each exactly once."""
        mine = range(self.rank, self.test_size, self.world)
        size = max(1, self.test_batch // self.world)
        shares = [list(mine[i : i + size]) for i in range(0, len(mine), size)]
        for images, labels in self._load(_Images(self.test, test_transform(self.shape[1]), None), shares):
            if len(labels):
                yield images, labels

    def _load(self, images: _Images, shares: list[list[int]]) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            images, batch_sampler=shares, num_workers=self.workers, collate_fn=_collate,
            pin_memory=self.device.type == "cuda", multiprocessing_context=worker_context() if self.workers else None,
        )  # fmt: skip
        for x, y, unreadable in loader:
            for path, reason in unreadable:
                self._report(path, reason)
            yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _report(self, path: str, reason: str) -> None:
        if self.fatal:
            raise AsfpError(
                f"{path} cannot be read as an image: {reason}; repair or remove it, or set data.corrupt=skip to leave "
                "such images out"
            )
        if path not in self.skipped:
            self.skipped.add(path)
            warnings.warn(f"{path} is left out: {reason} ({len(self.skipped)} so far)", stacklevel=2)


def training_transform(size: int) -> Any:
    """RandomResizedCrop and a flip, to bytes (3, size, size).

    >>> training_transform(8)(torch.zeros(3, 20, 30, dtype=torch.uint8)).shape
    torch.Size([3, 8, 8])
    """
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()])


def test_transform(size: int) -> Any:
    """Resize the shorter side to size * 256 / 224, then the centre.

    >>> test_transform(8)(torch.zeros(3, 20, 30, dtype=torch.uint8)).shape
    torch.Size([3, 8, 8])
    """
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(size * 256 // 224, antialias=True), v2.CenterCrop(size)])


class _Images(Dataset[Any]):
    """One image, its label and what is wrong with it; augmented by a generator of (epoch, index) alone."""

    def __init__(self, folder: Any, transform: Any, seed: int | None) -> None:
        self.samples, self.loader, self.transform, self.seed = folder.samples, folder.loader, transform, seed

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, tuple[str, str] | None]:
        from torchvision.transforms import v2

        path, label = self.samples[index]
        try:
            image = v2.functional.pil_to_tensor(self.loader(path))
        except Exception as error:  # whatever a decoder makes of a damaged file
            return None, label, (path, f"{type(error).__name__}: {error}")
        if self.seed is None:
            return self.transform(image), label, None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(epoch_seed(self.seed, index))
            return self.transform(image), label, None


def _check_one_readable(folder: Any, where: Path) -> None:
    """So that nobody trains an epoch before it turns out that there is nothing to test on."""
    images = _Images(folder, lambda image: image, None)
    if not any(images[index][2] is None for index in range(len(folder))):
        raise AsfpError(
            f"none of the {len(folder)} images in {where} can be read: repair them, or set another data.root"
        )


def _collate(items: Sequence[Any]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    good = [(image, label) for image, label, problem in items if problem is None]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0, dtype=torch.uint8)
    labels = torch.tensor([label for _, label in good], dtype=torch.long)
    return images, labels, [problem for _, _, problem in items if problem is not None]


def _open(folder: Path) -> Any:
    from torchvision.datasets import ImageFolder

    try:
        return ImageFolder(str(folder))
    except (FileNotFoundError, OSError) as error:
        raise AsfpError(
            f"{folder} is not a folder of images ({error}): data.root must hold train/CLASS/* and val/CLASS/*"
        ) from error
