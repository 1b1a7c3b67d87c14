"""CIFAR-10, read by torchvision, as bytes in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asfp.data.digits import ImageData
from asfp.errors import AsfpError

MEAN = (125.3, 123.0, 113.9)
STD = (63.0, 62.1, 66.7)
FOLDER = "cifar-10-batches-py"
ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"


def cifar10(root: str | Path, download: bool = False) -> ImageData:
    """The 50,000 training and 10,000 test images under root/cifar-10-batches-py; `download` fetches what is missing.

        data = cifar10("data", download=True)
        data.train_images.shape, data.train_images.dtype    # (50000, 3, 32, 32), torch.uint8

    >>> cifar10("/nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: CIFAR-10 is not in /nowhere/cifar-10-batches-py: 7 of 7 files are missing or damaged ...
    """
    return _open(root, download, "set data.download=true")


def _open(root: str | Path, download: bool, how: str) -> ImageData:
    """As `cifar10`; `how` says how the caller's user asks for a download."""
    from torchvision.datasets import CIFAR10

    problems = check_cifar10(root)
    if problems and download:
        try:
            CIFAR10(str(root), download=True)
        except (OSError, RuntimeError) as error:
            raise AsfpError(f"CIFAR-10 could not be downloaded ({error}): {_by_hand(Path(root))}") from error
        problems = check_cifar10(root)
    if problems:
        first = next(iter(problems.items()))
        raise AsfpError(
            f"CIFAR-10 is not in {Path(root) / FOLDER}: {len(problems)} of {len(_files())} files are missing or "
            f"damaged (e.g. {first[0]}: {first[1]}); {how}, or {_by_hand(Path(root))}"
        )
    train, test = CIFAR10(str(root), train=True), CIFAR10(str(root), train=False)
    return ImageData(*_tensors(train), *_tensors(test), classes=10, mean=MEAN, std=STD)


def _tensors(half: Any) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(half.data).permute(0, 3, 1, 2), torch.tensor(half.targets, dtype=torch.long)


def check_cifar10(root: str | Path) -> Mapping[str, str]:
    """The files of CIFAR-10 under `root` that are missing or damaged, each with what is wrong; empty when all is well.

    >>> check_cifar10("/nowhere")["test_batch"]
    'missing'
    """
    problems = {}
    for name, digest in _files():
        path = Path(root) / FOLDER / name
        if not path.is_file():
            problems[name] = "missing"
        elif hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != digest:
            problems[name] = "damaged: its checksum is another one"
    return problems


def describe(name: str, root: str | Path, download: bool = False) -> str:
    """What there is of a data set under `root`, in a line; an error where it is missing or damaged.

    >>> describe("cifar100", "data")
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: there is no data set 'cifar100': use cifar10
    """
    if name != "cifar10":
        raise AsfpError(f"there is no data set {name!r}: use cifar10")
    data = _open(root, download, "add --download")
    counts = torch.bincount(data.train_labels).tolist()
    return (
        f"CIFAR-10 in {Path(root) / FOLDER}: {len(data.train_labels):,} training and {len(data.test_labels):,} test "
        f"images, {data.classes} classes of {min(counts):,}; all checksums are right"
    )


def _files() -> list[tuple[str, str]]:
    from torchvision.datasets import CIFAR10

    return [*CIFAR10.train_list, *CIFAR10.test_list, (CIFAR10.meta["filename"], CIFAR10.meta["md5"])]


def _by_hand(root: Path) -> str:
    return f"fetch {ADDRESS} on a machine with a network and unpack it in {root}"
