"""`asfp compact` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from networks import zero_filters
from typer.testing import CliRunner

import asfp
from asfp.cli import app
from asfp.weights import read_weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = zero_filters(asfp.create_model("resnet8", num_classes=7), 0.4)
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_compact_writes_a_smaller_equal_model(checkpoint: Path) -> None:
    out = checkpoint.with_name("small.safetensors")
    result = CliRunner().invoke(
        app, ["compact", str(checkpoint), "-o", str(out), "--model", "resnet8", "--num-classes", "7", "--table"]
    )
    assert result.exit_code == 0, result.output
    assert "equal: largest difference" in result.output
    assert "layer1.0.conv1" in result.output
    dense = asfp.create_model("resnet8", num_classes=7).eval()
    dense.load_state_dict(read_weights(checkpoint))
    small = asfp.load(out)
    assert asfp.verify(dense, small, torch.randn(2, 3, 32, 32)).ok
    assert sum(p.numel() for p in small.parameters()) < 0.5 * sum(p.numel() for p in dense.parameters())


@pytest.mark.parametrize("how", [["--layout", "zeros"], ["--tune", "torch"]], ids=str)
def test_the_layout_is_chosen_or_measured_and_kept_in_the_file(checkpoint: Path, how: list[str]) -> None:
    out = checkpoint.with_name("small.safetensors")
    arguments = ["compact", str(checkpoint), "-o", str(out), "--model", "resnet8", "--num-classes", "7", *how]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert asfp.load(out).plan.layout.endswith(how[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "nowhere.pt"}, "there is no file"),
        ({"--layout": "zeroes"}, "Did you mean zeros"),
        ({"--tune": "tensorrt"}, "is no engine"),
        ({"--model": "resnet9"}, "resnet"),
        ({"--num-classes": "10"}, "do not fit"),
        ({"--output": "small.onnx"}, "a compact model is a .safetensors file"),
        ({"--output": "no/such/folder/small.safetensors"}, "there is no folder"),
        ({"--size": "big"}, "not an image size"),
    ],
)
def test_mistakes_are_explained(checkpoint: Path, change: dict[str, str], message: str) -> None:
    options = {
        "checkpoint": str(checkpoint),
        "--model": "resnet8",
        "--num-classes": "7",
        "--output": str(checkpoint.with_name("small.safetensors")),
    } | change
    arguments = ["compact", options.pop("checkpoint"), *(x for pair in options.items() for x in pair)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x04cos\nsystem\n(S'true'\ntR."])
def test_damaged_and_hostile_files(checkpoint: Path, content: bytes) -> None:
    checkpoint.write_bytes(content)
    with pytest.raises(asfp.AsfpError, match=r"model\.pt' (cannot be read|holds no)"):
        read_weights(checkpoint)


def test_a_truncated_file(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:-2000])
    with pytest.raises(asfp.AsfpError, match="cannot be read as weights"):
        read_weights(checkpoint)
