"""Damaged and hostile files: an error, or exactly the model that was saved. Never a crash, a hang, or a wrong model."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import asfp
from asfp.artifact import checksum

MUTATIONS = 2400
X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.end = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x)).relu()
        return self.end((self.b(x) + x).mean((2, 3)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    torch.manual_seed(0)
    net = Tiny().eval()
    with torch.no_grad():
        net.a.weight[:3] = 0
        net.b.weight[2:5] = 0
        net.bn.bias.uniform_(-1, 1)
    small = asfp.compact(net, X)
    path = tmp_path_factory.mktemp("fuzz") / "tiny.safetensors"
    asfp.save(small, path)
    return path, small(X)


def flip_bit(data: bytearray, rng: random.Random, at: int) -> None:
    data[at] ^= 1 << rng.randrange(8)


def set_byte(data: bytearray, rng: random.Random, at: int) -> None:
    data[at] = rng.choice([0, 0x22, 0x2C, 0x39, 0x5B, 0x7B, 0x7D, 0xFF, rng.randrange(256)])


def cut(data: bytearray, rng: random.Random, at: int) -> None:
    del data[at:]


def remove(data: bytearray, rng: random.Random, at: int) -> None:
    del data[at : at + rng.randint(1, 64)]


def insert(data: bytearray, rng: random.Random, at: int) -> None:
    data[at:at] = rng.randbytes(rng.randint(1, 64))


def repeat(data: bytearray, rng: random.Random, at: int) -> None:
    data[at:at] = data[at : at + rng.randint(1, 256)]


def blank(data: bytearray, rng: random.Random, at: int) -> None:
    end = min(len(data), at + rng.randint(1, 256))
    data[at:end] = bytes(end - at)


def swap(data: bytearray, rng: random.Random, at: int) -> None:
    other, size = rng.randrange(len(data)), rng.randint(1, 32)
    data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]


def header_length(data: bytearray, rng: random.Random, at: int) -> None:
    data[:8] = struct.pack("<Q", rng.choice([0, 1, 7, len(data), len(data) - 8, 2**31, 2**63, 2**64 - 1, at]))


def number(data: bytearray, rng: random.Random, at: int) -> None:
    """A digit in the header becomes a huge number: sizes and offsets that no file has."""
    digits = [i for i in range(8, len(data)) if 0x30 <= data[i] <= 0x39 and i < 8 + struct.unpack("<Q", data[:8])[0]]
    place = rng.choice(digits)
    data[place : place + 1] = rng.choice([b"9" * 19, b"99999999999", b"-1", b"1e99", b"00"])
    grown = struct.unpack("<Q", data[:8])[0] + len(data)
    data[:8] = struct.pack("<Q", min(grown, 2**63)) if rng.random() < 0.1 else data[:8]


ALL: list[Callable[[bytearray, random.Random, int], None]] = [
    flip_bit, set_byte, cut, remove, insert, repeat, blank, swap, header_length, number,
]  # fmt: skip


def outcome(path: Path, expected: Tensor) -> str:
    begin = time.monotonic()
    try:
        model = asfp.load(path, model=Tiny())
    except asfp.AsfpError:
        result = "error"
    else:
        assert torch.equal(model(X), expected), "a damaged file gave another model"
        result = "same"
    assert time.monotonic() - begin < 20
    return result


def test_random_damage(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    source, expected = saved
    original = source.read_bytes()
    assert outcome(source, expected) == "same"
    header = 8 + struct.unpack("<Q", original[:8])[0]
    rng, target = random.Random(0), tmp_path / "damaged.safetensors"
    outcomes = []
    for i in range(MUTATIONS):
        data = bytearray(original)
        for _ in range(1 if i % 3 else rng.randint(1, 4)):
            end = header if i % 2 else len(data)  # half of them in the header, where the meaning is
            ALL[i % len(ALL)](data, rng, rng.randrange(min(end, len(data)) or 1) if data else 0)
            if len(data) < 16:
                break
        target.write_bytes(data)
        outcomes.append(outcome(target, expected))
    assert len(outcomes) >= 2000
    assert outcomes.count("same") < 0.05 * len(outcomes)  # damage that does not matter, such as in the padding


HOSTILE: list[Any] = [
    None, True, -1, 0, 2**31, 10**30, 1e308, "", "../../../etc/passwd", "__import__('os').system('touch hacked')",
    "${HOME}", "a" * 100_000, [], [[]], {}, {"__class__": "os"}, [10**9] * 4, ["x"], "8:ff",
    "99999999999:ff", "8:zz", "-1:",
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(p for key, value in items for p in places(value, (*path, key)))]


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(copy[path[0]], path[1:], value)
    return copy


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    metadata = dict(metadata)
    metadata["sha256"] = checksum(tensors, metadata)
    save_file(tensors, path, metadata)


def test_hostile_plans_with_a_right_checksum(saved: tuple[Path, Tensor], tmp_path: Path, monkeypatch: Any) -> None:
    """Someone who knows the format can write any model, but nothing is run, hangs or leaves an error untold."""
    monkeypatch.chdir(tmp_path)
    tensors, metadata = contents(saved[0])
    plan = json.loads(metadata["plan"])
    rng, target, spots = random.Random(0), tmp_path / "hostile.safetensors", places(plan)
    begin, refused = time.monotonic(), 0
    for _ in range(300):
        bad = json.dumps(changed(plan, rng.choice(spots), rng.choice(HOSTILE)))
        write(target, tensors, metadata | {"plan": bad})
        try:
            asfp.load(target, model=Tiny())
        except asfp.AsfpError:
            refused += 1
    assert time.monotonic() - begin < 100
    assert refused > 150
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


@pytest.mark.parametrize(
    "architecture",
    [
        '{"model": "timm:local-dir:/tmp", "options": {}}',
        '{"model": "timm:hf-hub:owner/name", "options": {}}',
        '{"model": "timm:../../evil", "options": {}}',
        '{"model": "torchvision:__builtins__", "options": {}}',
        '{"model": "os.system", "options": {}}',
        '{"model": "resnet8", "options": {"num_classes": 1000000000000}}',
        '{"model": "resnet8", "options": {"num_classes": -3}}',
        '{"model": "resnet8", "options": {"num_classes": true}}',
        '{"model": "timm:resnet18", "options": {"pretrained": true}}',
        '{"model": "timm:resnet18", "options": {"checkpoint_path": "evil.pth"}}',
        '{"model": "torchvision:resnet18", "options": {"weights": "DEFAULT"}}',
        '{"model": "torchvision:resnet18", "options": {"norm_layer": "os.system"}}',
        '{"model": "resnet8", "options": []}',
        '{"model": 8, "options": {}}',
        '"resnet8"',
        "[" * 200_000,
        "not json",
    ],
)
def test_hostile_architectures(saved: tuple[Path, Tensor], tmp_path: Path, architecture: str) -> None:
    tensors, metadata = contents(saved[0])
    target = tmp_path / "hostile.safetensors"
    write(target, tensors, metadata | {"architecture": architecture})
    with pytest.raises(asfp.AsfpError, match="names an architecture that cannot be built"):
        asfp.load(target)


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"a.weight": t["a.weight"][:2].clone()}, "instead of"),
        (lambda t: t | {"a.weight": t["a.weight"].long()}, "instead of"),
        (lambda t: t | {"more": torch.zeros(1)}, "holds other tensors"),
        (lambda t: without(t, "a.weight"), "holds other tensors"),
    ],
)
def test_tensors_that_do_not_fit(
    saved: tuple[Path, Tensor], tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    tensors, metadata = contents(saved[0])
    write(tmp_path / "bad.safetensors", change(tensors), metadata)
    with pytest.raises(asfp.AsfpError, match=message):
        asfp.load(tmp_path / "bad.safetensors", model=Tiny())


def test_other_versions_and_other_files(saved: tuple[Path, Tensor], tmp_path: Path) -> None:
    tensors, metadata = contents(saved[0])
    target = tmp_path / "other.safetensors"
    write(target, tensors, metadata | {"format": "asfp-compact-2"})
    with pytest.raises(asfp.AsfpError, match="has the format 'asfp-compact-2'; this version of asfp reads"):
        asfp.load(target, model=Tiny())
    save_file(tensors, target)
    with pytest.raises(asfp.AsfpError, match=r"was not written by asfp\.save"):
        asfp.load(target, model=Tiny())
    torch.save(tensors, target)
    with pytest.raises(asfp.AsfpError, match="safetensors file"):
        asfp.load(target, model=Tiny())
    with pytest.raises(asfp.AsfpError, match="is a folder: give the file in it"):
        asfp.load(tmp_path, model=Tiny())
