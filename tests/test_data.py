"""The embedded digits: all there, split once, nothing of the test half in the training half."""

from __future__ import annotations

import pytest
import torch

from asfp import AsfpError
from asfp.data import batches, digits


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_every_digit_is_in_exactly_one_half() -> None:
    data = digits(size=8)
    assert len(data.train_labels) == len(data.train_images) == 1437
    assert len(data.test_labels) == len(data.test_images) == 360
    everything = torch.cat([data.train_images, data.test_images])
    assert len(rows(everything)) == 1797  # no two of the 1,797 images are equal
    assert not rows(data.train_images) & rows(data.test_images)


def test_halves_have_equal_class_shares() -> None:
    data = digits()
    train = torch.bincount(data.train_labels, minlength=10) / len(data.train_labels)
    test = torch.bincount(data.test_labels, minlength=10) / len(data.test_labels)
    assert (train - test).abs().max() < 0.003


def test_training_half_alone_sets_the_normalisation() -> None:
    data = digits(size=16)
    assert data.train_images.shape[1:] == (1, 16, 16)
    assert data.train_images.dtype == torch.float32
    assert data.train_images.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_images.std().item() == pytest.approx(1, abs=1e-5)
    assert data.test_images.mean().item() != pytest.approx(0, abs=1e-5)


def test_same_seed_same_split() -> None:
    first, second, other = digits(seed=3), digits(seed=3), digits(seed=4)
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_labels, second.test_labels)
    assert not torch.equal(first.test_labels, other.test_labels)


def test_enlarging_keeps_the_picture() -> None:
    small, large = digits(size=8), digits(size=16)
    shrunk = torch.nn.functional.avg_pool2d(large.test_images, 2)
    pairs = torch.stack([shrunk.flatten(), small.test_images.flatten()])
    assert torch.corrcoef(pairs)[0, 1] > 0.97
    assert torch.equal(small.test_labels, large.test_labels)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"size": 4}, "size=4 is too small"), ({"test_share": 1.0}, "test_share=1.0 is not a share")],
)
def test_wrong_values(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        digits(**kwargs)


def test_batches_pass_over_everything_once_in_a_seeded_order() -> None:
    images, labels = torch.arange(10.0), torch.arange(10)

    def one_pass(seed: int) -> list[int]:
        drawn = list(batches(images, labels, 4, torch.Generator().manual_seed(seed)))
        assert [len(y) for _, y in drawn] == [4, 4, 2]
        assert all(torch.equal(x.long(), y) for x, y in drawn)
        return torch.cat([y for _, y in drawn]).tolist()

    assert sorted(one_pass(0)) == list(range(10))
    assert one_pass(0) == one_pass(0) != one_pass(1)
