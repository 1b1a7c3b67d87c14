"""Folders of images: worker processes that outlive a signal, damaged images, and too few of them."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from asfp import AsfpError
from asfp.data.folder import FolderData
from asfp.train import config_from, train

BAD = b"not an image"


def image_tree(root: Path, train: int = 6, val: int = 2, classes: int = 2) -> Path:
    """So many images of each class, every one of another colour."""
    for half, count in (("train", train), ("val", val)):
        for label in range(classes):
            (root / half / str(label)).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (12, 10), (20 * number, 100 * label, 7))
                image.save(root / half / str(label) / f"{number}.png")
    return root


def settings(root: Path, **data: Any) -> Any:
    images = {"name": "imagefolder", "root": str(root), "batch": 4, "size": 8, "workers": 0} | data
    engine = {"accelerator": "cpu", "progress": "none"}
    tables = {"epochs": 1, "model": {"name": "resnet8"}, "data": images, "engine": engine}
    return config_from(tables | {"output": str(root / "run")})


SIGNALS = """
import multiprocessing, os, signal, sys
from asfp.data.folder import FolderData
from asfp.data.workers import worker_context

if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: None)
    data = FolderData(sys.argv[1], 2, 0, size=8, workers=2)
    seen = 0
    for images, labels in data.train_batches(1):
        if not seen:
            os.killpg(0, signal.SIGINT)
            os.killpg(0, signal.SIGTERM)
        seen += len(labels)
    print("seen", seen, "left", len(multiprocessing.active_children()))
    code = "import sys; sys.exit('torchvision.datasets' not in sys.modules)"
    fresh = worker_context().Process(target=exec, args=(code,))
    fresh.start()
    fresh.join()
    print("not preloaded", fresh.exitcode)
    stuck = worker_context().Process(target=exec, args=("import time; time.sleep(600)",))
    stuck.start()
    stuck.terminate()
    stuck.join(30)
    print("ended", stuck.exitcode)
    batches = data.train_batches(1)
    next(batches)
    print("at work", len(multiprocessing.active_children()), flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
@pytest.mark.parametrize(("end", "code"), [("exits", 3), pytest.param("killed", -9, marks=pytest.mark.slow)])
def test_workers_outlive_a_signal_to_all_processes_but_not_the_run(tmp_path: Path, end: str, code: int) -> None:
    image_tree(tmp_path / "images", train=8)
    (tmp_path / "script.py").write_text(SIGNALS)
    done = subprocess.run(  # returns when the last process that could write is gone
        [sys.executable, "script.py", "images", end], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        start_new_session=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["seen 16 left 0", "not preloaded 0", "ended -9", "at work 2"], done.stderr
    assert done.returncode == code, done.stderr
    assert done.stderr == "" or end == "killed"


def test_a_batch_without_a_readable_image_is_an_empty_one(tmp_path: Path) -> None:
    image_tree(tmp_path)
    for path in sorted((tmp_path / "train").rglob("*.png"))[:10]:
        path.write_bytes(BAD)
    for world in (1, 2):
        for rank in range(world):
            data = FolderData(tmp_path, 4, 0, size=8, workers=0, corrupt="skip", rank=rank, world=world)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batches = list(data.train_batches(1))
                assert len(batches) == data.steps == 3
                assert 0 in [len(labels) for _, labels in batches]
                for images, labels in batches:
                    assert images.shape == (len(labels), 3, 8, 8)
                    assert (images.dtype, labels.dtype) == (torch.uint8, torch.long)
                again = list(data.train_batches(1, start=1))
            assert all(torch.equal(a[0], b[0]) for a, b in zip(again, batches[1:], strict=True))


def test_a_test_batch_without_a_readable_image_is_left_out(tmp_path: Path) -> None:
    image_tree(tmp_path)
    for path in (tmp_path / "val" / "0").iterdir():
        path.write_bytes(BAD)
    data = FolderData(tmp_path, 4, 0, size=8, workers=0, corrupt="skip", test_batch=2)
    with pytest.warns(UserWarning, match="is left out"):
        assert [labels.tolist() for _, labels in data.test_batches()] == [[1, 1]]


def png_header(side: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return header + struct.pack(">I", 100) + b"IDAT"


def test_an_image_that_claims_to_be_huge_is_a_damaged_one(tmp_path: Path) -> None:
    image_tree(tmp_path)
    (tmp_path / "train" / "0" / "1.png").write_bytes(png_header(60_000))
    with pytest.raises(AsfpError, match=r"1.png cannot be read as an image: DecompressionBombError"):
        list(FolderData(tmp_path, 4, 0, size=8, workers=0).train_batches(1))
    data = FolderData(tmp_path, 4, 0, size=8, workers=0, corrupt="skip")
    with pytest.warns(UserWarning, match=r"1.png is left out: DecompressionBombError"):
        assert sum(len(labels) for _, labels in data.train_batches(1)) == 11


def test_nothing_to_test_on_is_found_before_training(tmp_path: Path) -> None:
    image_tree(tmp_path)
    for path in (tmp_path / "val").rglob("*.png"):
        path.write_bytes(BAD)
    with pytest.raises(AsfpError, match=r"none of the 4 images in .*val can be read: repair them"):
        train(settings(tmp_path, corrupt="skip"))


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    image_tree(tmp_path, train=1, classes=1)
    with pytest.raises(AsfpError, match=r"too little to train on: 1 training images for 1 process, at least 2 are"):
        train(settings(tmp_path))


def test_images_are_not_augmented_where_that_is_asked_for(tmp_path: Path) -> None:
    from asfp.train.assemble import build_data, start_fabric

    image_tree(tmp_path)
    pixels = torch.randint(256, (10, 12, 3), dtype=torch.uint8).numpy()
    for path in tmp_path.rglob("*.png"):
        Image.fromarray(pixels).save(path)
    config = settings(tmp_path, augment="none")
    images = torch.cat([x for x, _ in build_data(config, start_fabric(config)).train_batches(1)])
    assert len(images.unique(dim=0)) == 1
    (tests, _), *_ = build_data(config, start_fabric(config)).test_batches()
    assert torch.equal(tests[0], images[0])
    for augment in ("auto", "crop-flip"):
        data = build_data(settings(tmp_path, augment=augment), start_fabric(config))
        assert len(torch.cat([x for x, _ in data.train_batches(1)]).unique(dim=0)) > 6
