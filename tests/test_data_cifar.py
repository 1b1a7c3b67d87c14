"""CIFAR-10 on the device: what is there, the same augmentation as torchvision's, every image once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2
from typer.testing import CliRunner

from asfp import AsfpError
from asfp.cli import app
from asfp.data import ImageData, ResidentData, check_cifar10, cifar10, crop_flip

ROOT = Path(__file__).parent.parent / "data"
needs_cifar = pytest.mark.skipif(bool(check_cifar10(ROOT)), reason=f"CIFAR-10 is not in {ROOT}; see asfp data cifar10")


def some(count: int = 37, side: int = 8) -> ImageData:
    images = torch.randint(1, 256, (count, 3, side, side), dtype=torch.uint8)
    return ImageData(images, torch.arange(count), images[:10], torch.arange(10), count, (120.0,) * 3, (60.0,) * 3)


def test_crop_flip_is_torchvisions_crop_of_a_padded_image_and_its_flip() -> None:
    data = some(5)
    padded = v2.functional.pad(data.train_images, [4, 4, 4, 4])
    for top, left, flip in ((0, 0, False), (8, 8, True), (3, 5, False), (4, 4, True), (1, 7, True)):
        wanted = v2.functional.crop(padded[2], top, left, 8, 8)
        wanted = v2.functional.horizontal_flip(wanted) if flip else wanted
        one = torch.tensor([2]), torch.tensor([top]), torch.tensor([left]), torch.tensor([flip])
        got = crop_flip(padded.permute(0, 2, 3, 1), *one, (8, 8))[0].permute(2, 0, 1)
        assert torch.equal(got, wanted)


def test_same_distribution_as_torchvisions_transforms() -> None:
    """Where a marked pixel lands, over many draws: every place as often as with RandomCrop and RandomHorizontalFlip."""
    count, side = 40_000, 8
    image = torch.zeros(1, side, side, dtype=torch.uint8)
    image[0, 3, 2] = 255
    data = ImageData(
        image.expand(count, 1, side, side), torch.zeros(count, dtype=torch.long), image[None], torch.zeros(1), 1
    )
    (images, _), *rest = ResidentData(data, "cpu", batch=count, seed=0, augment=True).train_batches(1)
    assert rest == []
    ours = (images > 0).sum((0, 1)).float() / count
    transform = v2.Compose([v2.RandomCrop(side, padding=4), v2.RandomHorizontalFlip()])
    draws = 8_000
    theirs = sum((transform(image) > 0).sum(0).float() for _ in range(draws)) / draws
    deviation = (ours * (1 - ours) * (1 / draws + 1 / count)).sqrt().clamp(min=1e-3)
    assert ((ours - theirs).abs() / deviation).max() < 4.5
    assert ours.sum() == pytest.approx(float(theirs.sum()), abs=0.02)


def test_every_epoch_sees_every_image_once_in_another_order_with_other_crops() -> None:
    data = ResidentData(some(), "cpu", batch=8, seed=3, augment=True)
    epochs = [list(data.train_batches(epoch)) for epoch in (1, 2)]
    labels = [torch.cat([y for _, y in batches]) for batches in epochs]
    for seen in labels:
        assert sorted(seen.tolist()) == list(range(37))
    assert (labels[0] == labels[1]).sum() < 10
    first, second = (
        torch.cat([x for x, _ in batches])[seen.argsort()] for batches, seen in zip(epochs, labels, strict=True)
    )
    assert sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True)) > 30
    again = list(data.train_batches(2, start=3))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(again, epochs[1][3:], strict=True))


def test_processes_share_each_batch_and_the_test_images() -> None:
    parts = [ResidentData(some(), "cpu", batch=8, seed=3, augment=True, rank=rank, world=2) for rank in (0, 1)]
    whole = ResidentData(some(), "cpu", batch=8, seed=3, augment=True)
    shares = zip(*(part.train_batches(1) for part in parts), strict=True)
    for ((x1, y1), (x2, y2)), (x, y) in zip(shares, whole.train_batches(1), strict=True):
        assert torch.equal(torch.cat([y1, y2]), y)
        assert x1.shape[1:] == x2.shape[1:] == x.shape[1:]
    labels = [y for part in parts for _, y in part.test_batches()]
    assert sorted(torch.cat(labels).tolist()) == list(range(10))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        AsfpError, match=r"7 of 7 files are missing or damaged .*set data.download=true, or fetch https"
    ):
        cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"half a file")
    assert check_cifar10(tmp_path)["test_batch"].startswith("damaged")
    done = CliRunner().invoke(app, ["data", "cifar10", "--root", str(tmp_path)])
    assert done.exit_code == 2
    assert "Error: CIFAR-10 is not in" in done.stderr
    assert "; add --download, or fetch https" in done.stderr


@needs_cifar
def test_the_real_thing() -> None:
    done = CliRunner().invoke(app, ["data", "cifar10", "--root", str(ROOT)])
    assert done.exit_code == 0
    assert "50,000 training and 10,000 test images, 10 classes of 5,000; all checksums are right" in done.output
    data = cifar10(ROOT)
    mean = data.train_images.float().mean((0, 2, 3))
    assert mean.tolist() == pytest.approx(data.mean, abs=0.1)
    assert data.train_images.float().std((0, 2, 3)).tolist() == pytest.approx(data.std, abs=0.2)
