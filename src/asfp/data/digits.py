"""A data set in memory, and one that is always there: the handwritten digits that come with scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asfp.errors import AsfpError


@dataclass(frozen=True)
class ImageData:
    """A data set in memory: images as (count, channels, height, width) and labels as integers.

    The images are bytes with the `mean` and `std` (of 255) to normalise them by, or floats that are normalised already.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __repr__(self) -> str:
        train, test = tuple(self.train_images.shape), len(self.test_labels)
        return f"ImageData({train[0]} training and {test} test images of {train[1:]}, {self.classes} classes)"


def digits(size: int = 16, test_share: float = 0.2, seed: int = 0) -> ImageData:
    """scikit-learn's 1,797 handwritten digits (8x8), enlarged bilinearly to size x size, split with equal class shares.

    The mean and the deviation of the training images are taken out of both halves. The same seed gives the same split.

    >>> digits()
    ImageData(1437 training and 360 test images of (1, 16, 16), 10 classes)
    """
    if size < 8:
        raise AsfpError(f"size={size} is too small: the digits are 8x8 images, use 8 or more, e.g. size=16")
    if not 0.01 <= test_share <= 0.99:
        raise AsfpError(f"test_share={test_share} is not a share to test on: use 0.01 to 0.99, e.g. test_share=0.2")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(range(len(labels)), test_size=test_share, stratify=labels, random_state=seed)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    std, mean = torch.std_mean(pixels[train])
    pixels = (pixels - mean) / std
    target = torch.tensor(labels, dtype=torch.long)
    return ImageData(pixels[train], target[train], pixels[test], target[test], classes=10)


def batches(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over all images in random order, `size` at a time; a last batch of one image is left out (batch norm).

    >>> x, y = torch.arange(5.0), torch.arange(5)
    >>> [len(labels) for _, labels in batches(x, y, 2, torch.Generator().manual_seed(0))]
    [2, 2]
    """
    for index in torch.randperm(len(labels), generator=generator).split(size):
        if len(index) > 1:
            yield images[index], labels[index]
