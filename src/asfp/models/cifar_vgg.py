"""VGG-16 for CIFAR, as Li et al. ("PFEC") and the paper's Table on VGG prune it."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from asfp.errors import AsfpError

# filters of the convolutions, stage by stage, with a max pool between two stages
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class CifarVgg(nn.Module):
    """13 bias-free 3x3 convolutions with batch norm, average pool, Linear 512, batch norm, ReLU, Linear.

    The convolutions are `features.conv1` to `features.conv13`. Any input from 16x16 on works; at
    32x32 the average pool is the 2x2 one of the original.

    >>> model = CifarVgg()
    >>> [model.features.conv1.out_channels, model.features.conv13.out_channels]
    [64, 512]
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        if num_classes < 1 or in_channels < 1:
            raise AsfpError(f"num_classes={num_classes}, in_channels={in_channels}: both must be at least 1")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        number, inputs = 0, in_channels
        for stage, widths in enumerate(STAGES):
            if stage > 0:
                layers[f"pool{stage}"] = nn.MaxPool2d(2)
            for outputs in widths:
                number += 1
                layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
                layers[f"bn{number}"] = nn.BatchNorm2d(outputs)
                layers[f"relu{number}"] = nn.ReLU()
                inputs = outputs
        self.features = nn.Sequential(layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            OrderedDict(
                linear1=nn.Linear(inputs, 512),
                bn=nn.BatchNorm1d(512),
                relu=nn.ReLU(),
                linear2=nn.Linear(512, num_classes),
            )
        )
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def _initialise(model: nn.Module) -> None:
    """Convolutions N(0, 2 / (k k out)), the batch norm after them 0.5 and 0, linear layers N(0, 0.01^2) with bias 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, math.sqrt(2 / (math.prod(module.kernel_size) * module.out_channels)))
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
