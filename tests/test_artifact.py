"""Saved and loaded: the same model bit for bit, in another process too, or an error that says what is wrong."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asfp
from asfp.architecture import Architecture, build_architecture
from asfp.compaction import CompactModule


def pruned(name: str, rate: float = 0.4, size: int = 32, **options: object) -> CompactModule:
    model = asfp.create_model(name, **options).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for values in (module.weight, module.bias, module.running_mean, module.running_var):
                    nn.init.uniform_(values, 0.5, 1.5)  # so that constants are folded
    example = torch.zeros(1, 3, size, size)
    asfp.SoftPruner(model, rate, epochs=1, example_inputs=example).step(1)
    return asfp.compact(model, example, check=False).eval()


def bits(model: nn.Module, x: Tensor) -> str:
    with torch.no_grad():
        return hashlib.sha256(model(x).numpy().tobytes()).hexdigest()


IN_A_FRESH_PROCESS = """
import hashlib, sys, torch, asfp
torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(3, 3, 32, 32)
print(hashlib.sha256(asfp.load(sys.argv[1])(x).detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("name", ["resnet8", pytest.param("vgg16", marks=pytest.mark.slow)])
def test_bit_identical_in_a_fresh_process(tmp_path: Path, name: str) -> None:
    model = pruned(name)
    path = tmp_path / "model.safetensors"
    asfp.save(model, path, model=name)
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    expected = bits(model, torch.randn(3, 3, 32, 32))
    torch.set_num_threads(threads)
    assert done.stdout.strip() == expected
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "size"), [("torchvision:resnet18", 64), ("torchvision:mobilenet_v2", 32), ("timm:resnet18", 64)]
)
def test_models_of_other_libraries_come_back(tmp_path: Path, name: str, size: int) -> None:
    model = pruned(name, 0.3, size, num_classes=7)
    asfp.save(model, tmp_path / "m.safetensors", model=name, num_classes=7)
    again = asfp.load(tmp_path / "m.safetensors")
    x = torch.randn(2, 3, size, size)
    assert bits(again, x) == bits(model, x)
    assert not again.training
    assert again.plan == model.plan


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precision_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    model = pruned("resnet8").to(dtype)
    asfp.save(model, tmp_path / "m.safetensors", model="resnet8")
    again = asfp.load(tmp_path / "m.safetensors")
    for (name, a), b in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def test_channels_last_is_kept(tmp_path: Path) -> None:
    model = pruned("resnet8").to(memory_format=torch.channels_last)
    asfp.save(model, tmp_path / "m.safetensors", model="resnet8")
    weight = asfp.load(tmp_path / "m.safetensors").get_submodule("conv1").weight
    assert isinstance(weight, Tensor)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()


class Own(nn.Module):
    """A user's network, with one weight used by two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, width, 3), nn.Conv2d(width, 6, 1), nn.Conv2d(width, 6, 1)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return self.b(x) + self.c(x).sigmoid()


def test_a_network_of_the_users_own(tmp_path: Path) -> None:
    net, path = Own(), tmp_path / "own.safetensors"
    with torch.no_grad():
        net.a.weight[:3] = 0
    model = asfp.compact(net, torch.zeros(1, 3, 8, 8))
    asfp.save(model, path)
    with pytest.raises(asfp.AsfpError, match=r"does not say how to build Own.*model=Own\(\.\.\.\)"):
        asfp.load(path)
    fresh = Own()
    before = [p.clone() for p in fresh.parameters()]
    again = asfp.load(path, model=fresh)
    x = torch.randn(2, 3, 9, 7)
    assert bits(again, x) == bits(model, x)
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())  # still tied
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.parameters(), strict=True))
    with pytest.raises(asfp.AsfpError, match="another architecture"):
        asfp.load(path, model=Own(width=9))
    with pytest.raises(asfp.AsfpError, match=r"is not a torch\.nn\.Module"):
        asfp.load(path, model="own")  # type: ignore[arg-type]


def test_the_loaded_model_trains_and_saves_again(tmp_path: Path) -> None:
    asfp.save(pruned("resnet8"), tmp_path / "a.safetensors", model="resnet8")
    model = asfp.load(tmp_path / "a.safetensors").train()
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    asfp.save(model.eval(), tmp_path / "a.safetensors")  # it knows what it was built as
    x = torch.randn(2, 3, 32, 32)
    assert bits(asfp.load(tmp_path / "a.safetensors"), x) == bits(model, x)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("resnet9", {}, "'resnet9' is not a name that a file may hold"),
        ("timm:hf-hub:owner/name", {}, "is not a name that a file may hold"),
        ("resnet8", {"weights": "DEFAULT"}, "weights='DEFAULT' is not a value that a file may hold"),
        ("resnet8", {"checkpoint_path": "x"}, "'checkpoint_path' is not one that a file may hold"),
        (None, {"num_classes": 3}, "pass model="),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, model: str | None, options: dict[str, object], message: str) -> None:
    with pytest.raises(asfp.AsfpError, match=message):
        asfp.save(pruned("resnet8"), tmp_path / "m.safetensors", model=model, **options)
    assert list(tmp_path.iterdir()) == []


def test_only_compact_models_into_folders_that_exist(tmp_path: Path) -> None:
    with pytest.raises(asfp.AsfpError, match=r"save expects what asfp\.compact returned, got Conv2d"):
        asfp.save(nn.Conv2d(3, 8, 1), tmp_path / "m.safetensors")  # type: ignore[arg-type]
    with pytest.raises(asfp.AsfpError, match="there is no folder"):
        asfp.save(pruned("resnet8"), tmp_path / "gone" / "m.safetensors")
    with pytest.raises(asfp.AsfpError, match="there is no file"):
        asfp.load(tmp_path / "m.safetensors")


def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    asfp.save(pruned("resnet8"), path, model="resnet8")
    old = path.read_bytes()
    larger = pruned("resnet14")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) + 1000, limits[1]))  # the next file does not fit
    try:
        with pytest.raises((asfp.AsfpError, OSError)):
            asfp.save(larger, path, model="resnet14")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


SAVING_FOR_EVER = """
import sys, torch, asfp
path = sys.argv[1]
x = torch.zeros(1, 3, 32, 32)
models = {name: asfp.compact(asfp.create_model(name), x, check=False) for name in ("resnet8", "resnet14")}
while True:
    for name, model in models.items():
        asfp.save(model, path, model=name)
        print("saved", flush=True)
"""


def test_a_kill_in_the_middle_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    command = [sys.executable, "-c", SAVING_FOR_EVER, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    readings = [path.read_bytes() for _ in range(200)]  # while it is being replaced
    time.sleep(0.003)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert asfp.load(path).plan.macs_after > 0
    whole = {path.read_bytes(), *readings}
    for i, data in enumerate(whole):
        (tmp_path / f"{i}.safetensors").write_bytes(data)
        assert asfp.load(tmp_path / f"{i}.safetensors").plan.macs_after > 0


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        asfp.save(pruned("resnet8"), tmp_path / "m.safetensors", model="resnet8")
    finally:
        os.umask(old)
    assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640


def _activation(model: Any) -> None:
    model.relu = nn.SiLU()


def _pool(model: Any) -> None:
    model.maxpool = nn.Identity()


def _stride(model: Any) -> None:
    model.conv1.stride = (1, 1)


def _eps(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 0.1


@pytest.mark.parametrize(
    "change", [_eps, *(pytest.param(f, marks=pytest.mark.slow) for f in (_activation, _pool, _stride))]
)
def test_a_network_changed_after_it_was_built_is_not_taken_for_the_usual_one(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = asfp.create_model("torchvision:resnet18", num_classes=10).eval(), torch.randn(1, 3, 64, 64)
    change(model)
    asfp.SoftPruner(model, 0.3, 1).step(1)
    small = asfp.compact(model, x).eval()
    asfp.save(small, tmp_path / "small.safetensors")
    with pytest.raises(asfp.AsfpError, match="does not say how to build"):
        asfp.load(tmp_path / "small.safetensors")
    assert torch.equal(asfp.load(tmp_path / "small.safetensors", model=model)(x), small(x))
    with pytest.raises(asfp.AsfpError, match="made for another architecture"):
        asfp.load(tmp_path / "small.safetensors", model=asfp.create_model("torchvision:resnet18", num_classes=10))
    with pytest.raises(asfp.AsfpError, match="was not cut from torchvision:resnet18"):
        asfp.save(small, tmp_path / "other.safetensors", model="torchvision:resnet18", num_classes=10)


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.conv, self.by = nn.Conv2d(3, 8, 3), by

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) * self.by
        return y


def test_a_number_in_forward_is_part_of_the_architecture(tmp_path: Path) -> None:
    model = Scaled(2.0).eval()
    asfp.save(asfp.compact(model, torch.zeros(1, 3, 8, 8)), tmp_path / "small.safetensors")
    assert isinstance(asfp.load(tmp_path / "small.safetensors", model=Scaled(2.0)), CompactModule)
    with pytest.raises(asfp.AsfpError, match="made for another architecture"):
        asfp.load(tmp_path / "small.safetensors", model=Scaled(3.0))


def test_networks_that_cannot_be_built_without_data(tmp_path: Path) -> None:
    model, x = asfp.create_model("torchvision:regnet_y_400mf").eval(), torch.randn(1, 3, 32, 32)
    asfp.SoftPruner(model, 0.3, 1).step(1)
    small = asfp.compact(model, x, check=False).eval()
    asfp.save(small, tmp_path / "small.safetensors")
    assert torch.equal(asfp.load(tmp_path / "small.safetensors")(x), small(x))
    with pytest.raises(asfp.AsfpError, match="may be too large to build"):
        build_architecture(Path("x"), Architecture("torchvision:regnet_y_400mf", {"num_classes": 900_000}).to_json())
    with pytest.raises(asfp.AsfpError, match="cannot be built"):
        build_architecture(Path("x"), Architecture("timm:resnet18", {"global_pool": "xx"}).to_json())


@pytest.mark.parametrize("path", [None, 3, "", "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(asfp.AsfpError, match="is not the path of a file"):
        asfp.load(path)
    with pytest.raises(asfp.AsfpError, match="is not the path of a file"):
        asfp.save(asfp.compact(Scaled(1.0), torch.zeros(1, 3, 8, 8)), path)


@pytest.mark.parametrize("name", ["", "x" * 300])
def test_where_nothing_can_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(asfp.AsfpError, match="could not be written"):
        asfp.save(asfp.compact(Scaled(1.0), torch.zeros(1, 3, 8, 8)), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_model_where_its_name_is_asked_for(tmp_path: Path) -> None:
    small = asfp.compact(Scaled(1.0), torch.zeros(1, 3, 8, 8))
    with pytest.raises(asfp.AsfpError, match="model=Scaled is not a name"):
        asfp.save(small, tmp_path / "a.safetensors", model=Scaled(1.0))  # type: ignore[arg-type]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    small = asfp.compact(asfp.create_model("resnet8"), torch.zeros(1, 3, 32, 32))
    with pytest.raises(asfp.AsfpError, match=r"\(Is a directory\): give the file to save in it"):
        asfp.save(small, tmp_path)
    with pytest.raises(asfp.AsfpError, match="is a folder: give the file in it"):
        asfp.load(tmp_path)


def test_a_path_that_is_too_long_is_no_file() -> None:
    with pytest.raises(asfp.AsfpError, match="there is no file"):
        asfp.load("x" * 400)
