"""A loader that keeps all images on the device and augments whole batches there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asfp.data.digits import ImageData

PADDING = 4

Batch = tuple[Tensor, Tensor]


class ResidentData:
    """Batches of a data set in memory, each a pure function of (seed, epoch, step): nothing to save, nothing to lose.

    `batch` is the global batch; of each, process `rank` of `world` gets its own slice. With `augment` a batch is
    flipped and cropped out of images padded with 4 black pixels, as torchvision's RandomCrop and RandomHorizontalFlip.
    A last batch with fewer than two images a process is left out (batch norm). Test images are dealt out, not padded.

    >>> from asfp.data import digits
    >>> data = ResidentData(digits(size=8), "cpu", batch=400, seed=0)
    >>> [len(labels) for _, labels in data.train_batches(epoch=1)], data.steps
    ([400, 400, 400, 237], 4)
    >>> [len(labels) for _, labels in data.train_batches(epoch=1, start=3)]
    [237]
    """

    def __init__(
        self,
        data: ImageData,
        device: str | torch.device,
        batch: int,
        seed: int,
        *,
        augment: bool = False,
        test_batch: int = 1000,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.classes, self.mean, self.std = data.classes, data.mean, data.std
        self.shape = tuple(data.train_images.shape[1:])
        self.batch, self.seed, self.augment, self.test_batch = batch, seed, augment, test_batch
        self.rank, self.world = rank, world
        self.train_size, self.test_size = len(data.train_labels), len(data.test_labels)
        padding = (PADDING,) * 4 if augment else (0,) * 4
        # height, width, channels: a crop of it is channels-last without a copy
        self._images = F.pad(data.train_images.to(device), padding).permute(0, 2, 3, 1).contiguous()
        self._labels = data.train_labels.to(device)
        self._test_images = data.test_images[rank::world].to(device)
        self._test_labels = data.test_labels[rank::world].to(device)

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        full, rest = divmod(self.train_size, self.batch)
        return full + (rest >= 2 * self.world)

    def global_size(self, step: int) -> int:
        """The images in batch `step`, of all processes together."""
        return min(self.batch, self.train_size - step * self.batch)

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from step `start` on."""
        plan = _plan(self.train_size, self.seed, epoch, self._images.device)
        side = self.shape[1], self.shape[2]
        for step in range(start, self.steps):
            low, size = step * self.batch, self.global_size(step)
            mine = slice(low + self.rank * size // self.world, low + (self.rank + 1) * size // self.world)
            index = plan.order[mine]
            if self.augment:
                images = crop_flip(self._images, index, plan.top[mine], plan.left[mine], plan.flip[mine], side)
            else:
                images = self._images[index]
            yield images.permute(0, 3, 1, 2), self._labels[index]

    def test_batches(self) -> Iterator[Batch]:
        """This process's share of the test images, each exactly once."""
        size = max(1, self.test_batch // self.world)
        yield from zip(self._test_images.split(size), self._test_labels.split(size), strict=True)


@dataclass(frozen=True)
class _Plan:
    """The order of an epoch, and for each place in it where the crop begins and whether it is flipped."""

    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor


def _plan(count: int, seed: int, epoch: int, device: torch.device) -> _Plan:
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    order = torch.randperm(count, generator=generator)
    place = torch.randint(2 * PADDING + 1, (2, count), generator=generator)
    flip = torch.rand(count, generator=generator) < 0.5
    return _Plan(order.to(device), place[0].to(device), place[1].to(device), flip.to(device))


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for each epoch of each run, of 32 mixed bits: torch's CPU generator looks at no more than those.

    >>> epoch_seed(0, 1) == epoch_seed(0, 1), epoch_seed(0, 1) != epoch_seed(0, 2), epoch_seed(0, 1) < 2**32
    (True, True, True)
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:4], "big")


def crop_flip(images: Tensor, index: Tensor, top: Tensor, left: Tensor, flip: Tensor, side: tuple[int, int]) -> Tensor:
    """Of images (count, height, width, channels) those at `index`, cut out at (top, left) and mirrored where `flip`.

    >>> image = torch.arange(9).reshape(1, 3, 3, 1)
    >>> one = torch.tensor([1])
    >>> crop_flip(image, one - 1, one, one, one > 0, (2, 2)).squeeze().tolist()
    [[5, 4], [8, 7]]
    """
    rows = top[:, None] + torch.arange(side[0], device=images.device)
    columns = torch.arange(side[1], device=images.device).expand(len(index), -1)
    columns = left[:, None] + torch.where(flip[:, None], side[1] - 1 - columns, columns)
    return images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
