"""Checkpoints of akamaster/pytorch_resnet_cifar10 compute the same here as there."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asfp import AsfpError, create_model
from asfp.models import CifarResNet, convert_akamaster


class Block(nn.Module):
    """That repository's block, written from its description: zero channels, half before and half after."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        self.quarter = outputs // 4 if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.quarter is None:
            out += x
        else:
            zeros = x.new_zeros(x.shape[0], self.quarter, out.shape[2], out.shape[3])
            out += torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)
        return F.relu(out)


class Reference(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i, (inputs, outputs, stride) in enumerate([(16, 16, 1), (16, 32, 2), (32, 64, 2)], 1):
            rest = [Block(outputs, outputs, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{i}", nn.Sequential(Block(inputs, outputs, stride), *rest))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


def trained_like(model: nn.Module) -> nn.Module:
    """Running statistics, scales and shifts away from their start, as after training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.double().eval()


def checkpoint_of(reference: nn.Module, prefix: str = "module.", wrapped: bool = True) -> dict[str, Any]:
    weights = {prefix + name: weight for name, weight in reference.state_dict().items()}
    saved = io.BytesIO()
    torch.save({"state_dict": weights, "best_prec1": 91.7} if wrapped else weights, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=True)


def model_of(depth: int, **kwargs: Any) -> CifarResNet:
    model = create_model(f"resnet{depth}", **kwargs)
    assert isinstance(model, CifarResNet)
    return model.double().eval()


@pytest.mark.parametrize("depth", [20, 56])
@pytest.mark.parametrize(("prefix", "wrapped"), [("module.", True), ("", False)])
def test_converted_checkpoint_gives_identical_outputs(depth: int, prefix: str, wrapped: bool) -> None:
    reference = trained_like(Reference((depth - 2) // 6))
    model = model_of(depth, shortcut_padding="both")
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert not torch.allclose(model(x), reference(x))
    model.load_state_dict(convert_akamaster(checkpoint_of(reference, prefix, wrapped), model))
    torch.testing.assert_close(model(x), reference(x), rtol=1e-12, atol=1e-12)


def test_the_padding_side_matters() -> None:
    reference = trained_like(Reference(3))
    model = model_of(20)
    model.load_state_dict(reference.state_dict())
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert (model(x) - reference(x)).abs().max() > 1e-2
    with pytest.raises(AsfpError, match='build it with shortcut_padding="both"'):
        convert_akamaster(checkpoint_of(reference), model)


def test_old_checkpoints_without_batch_counters() -> None:
    reference = trained_like(Reference(3))
    checkpoint = checkpoint_of(reference)
    weights = checkpoint["state_dict"]
    for name in [n for n in weights if n.endswith("num_batches_tracked")]:
        del weights[name]
    model = model_of(20, shortcut_padding="both")
    model.load_state_dict(convert_akamaster(checkpoint, model))
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), reference(x), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    reference = Reference(3)
    both = {"shortcut_padding": "both"}
    with pytest.raises(AsfpError, match=r"60 missing weights, e\.g\. layer1\.3\.bn1\.bias; build the model with the"):
        convert_akamaster(checkpoint_of(reference), model_of(32, **both))
    with pytest.raises(AsfpError, match=r"unexpected weights, e\.g\. layer1\.1\."):
        convert_akamaster(checkpoint_of(reference), model_of(8, **both))
    with pytest.raises(
        AsfpError, match=r"linear\.weight in the checkpoint is \(10, 64\) where the model has \(100, 64\)"
    ):
        convert_akamaster(checkpoint_of(reference), model_of(20, num_classes=100, **both))
    with pytest.raises(AsfpError, match='"state_dict"'):
        convert_akamaster({"state_dict": 3}, model_of(20, **both))
    broken: dict[str, Any] = {**reference.state_dict(), "conv1.weight": "lost"}
    with pytest.raises(AsfpError, match=r"conv1\.weight in the checkpoint is a str"):
        convert_akamaster(broken, model_of(20, **both))
