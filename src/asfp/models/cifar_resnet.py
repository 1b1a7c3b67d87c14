"""The CIFAR ResNets of He et al. 2015 (section 4.2), the networks of the paper's Tables I to III."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from asfp.errors import AsfpError

WIDTHS = (16, 32, 64)

Padding = Literal["after", "both"]


class BasicBlock(nn.Module):
    """relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)), where the shortcut has no weights ("option A").

    >>> import torch
    >>> BasicBlock(16, 32, stride=2)(torch.zeros(1, 16, 8, 8)).shape
    torch.Size([1, 32, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, shortcut_padding: Padding = "after") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else PaddedShortcut(inputs, outputs, shortcut_padding)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class PaddedShortcut(nn.Module):
    """Every second pixel of x, widened to `outputs` channels of which the new ones are zero.

    >>> import torch
    >>> PaddedShortcut(1, 2)(torch.ones(1, 1, 2, 2)).flatten().tolist()
    [1.0, 0.0]
    >>> PaddedShortcut(2, 4, "both")(torch.ones(1, 2, 2, 2)).flatten().tolist()
    [0.0, 1.0, 1.0, 0.0]
    """

    def __init__(self, inputs: int, outputs: int, padding: Padding = "after") -> None:
        super().__init__()
        self.before = (outputs - inputs) // 2 if padding == "both" else 0
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))

    def extra_repr(self) -> str:
        return f"before={self.before}, after={self.after}"


class CifarResNet(nn.Module):
    """A first convolution, three stages of (depth - 2) / 6 basic blocks with 16, 32 and 64 channels, a linear layer.

    `shortcut_padding` says where a widening shortcut puts its zero channels: "after" the existing ones (the paper), or
    half before and half after ("both", what akamaster/pytorch_resnet_cifar10's checkpoints were trained with). Any
    input size works; the tables are for 32x32.

    >>> model = CifarResNet(20, num_classes=10)
    >>> sum(p.numel() for p in model.parameters())
    269722
    """

    def __init__(
        self, depth: int, num_classes: int = 10, in_channels: int = 3, shortcut_padding: Padding = "after"
    ) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise AsfpError(
                f"depth={depth} is not a CIFAR ResNet: the depth is 6n + 2 with n >= 1, e.g. 20, 32, 56, 110"
            )
        if num_classes < 1 or in_channels < 1:
            raise AsfpError(f"num_classes={num_classes}, in_channels={in_channels}: both must be at least 1")
        if shortcut_padding not in ("after", "both"):
            raise AsfpError(f'shortcut_padding={shortcut_padding!r} is unknown: use "after" or "both"')
        blocks = (depth - 2) // 6
        narrow, middle, wide = WIDTHS
        self.conv1 = nn.Conv2d(in_channels, narrow, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.layer1 = _stage(narrow, narrow, blocks, 1, shortcut_padding)
        self.layer2 = _stage(narrow, middle, blocks, 2, shortcut_padding)
        self.layer3 = _stage(middle, wide, blocks, 2, shortcut_padding)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(wide, num_classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(self.avgpool(x).flatten(1))


def _stage(inputs: int, outputs: int, blocks: int, stride: int, padding: Padding) -> nn.Sequential:
    first = BasicBlock(inputs, outputs, stride, padding)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


def _initialise(model: nn.Module) -> None:
    """Convolutions N(0, 2 / (k k out)), batch norm 1 and 0 (torch's default), the linear layer Kaiming with bias 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)


def convert_akamaster(checkpoint: Mapping[str, Any], model: CifarResNet) -> dict[str, Tensor]:
    """The weights of an akamaster/pytorch_resnet_cifar10 checkpoint under the names of `model`, checked against it.

    Takes what `torch.load` returns: the saved dict with its "state_dict", or the state dict itself, with or without
    "module." in front of the names. Those checkpoints were trained with `shortcut_padding="both"`; a model built
    otherwise would load them and compute something else, so it is refused.

    >>> model = CifarResNet(20, shortcut_padding="both")
    >>> checkpoint = {"state_dict": {f"module.{name}": w for name, w in model.state_dict().items()}}
    >>> model.load_state_dict(convert_akamaster(checkpoint, model))
    <All keys matched successfully>
    """
    if any(isinstance(m, PaddedShortcut) and m.before == 0 for m in model.modules()):
        raise AsfpError(
            "akamaster's checkpoints pad the shortcut on both sides, this model after the existing channels: "
            'build it with shortcut_padding="both"'
        )
    weights = checkpoint.get("state_dict", checkpoint)
    if not isinstance(weights, Mapping):
        raise AsfpError(f'checkpoint["state_dict"] is a {type(weights).__name__}: it must map names to tensors')
    found = {str(name).removeprefix("module."): weight for name, weight in weights.items()}
    wanted = model.state_dict()
    # checkpoints from before torch 0.4.1 have no batch counters; they play no part with a fixed momentum
    found = {k: v for k, v in wanted.items() if k.endswith("num_batches_tracked")} | found
    for problem, names in (("missing", wanted.keys() - found.keys()), ("unexpected", found.keys() - wanted.keys())):
        if names:
            raise AsfpError(
                f"the checkpoint does not fit this model: {len(names)} {problem} weights, e.g. {min(names)}; "
                "build the model with the checkpoint's depth"
            )
    for name, weight in wanted.items():
        if getattr(found[name], "shape", None) != weight.shape:
            raise AsfpError(
                f"{name} in the checkpoint is {_describe(found[name])} where the model has {_describe(weight)}; "
                "build the model with the checkpoint's num_classes and in_channels"
            )
    return {name: found[name] for name in wanted}


def _describe(value: object) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
