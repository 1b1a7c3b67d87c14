"""Random networks for the property test: every topology that compaction has a rule for, and some it has not.

`build(seed)` gives a network with random zeros, random batch norm statistics, and an input for it; the same seed gives
the same network, so a failing seed is a test case.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    lambda: nn.ReLU(inplace=True),
    nn.ReLU6,
    nn.Sigmoid,
    nn.Hardswish,
    nn.GELU,
    nn.ELU,
    nn.Softplus,
    nn.SiLU,
    nn.Identity,
]


class Conv(nn.Module):
    """Convolution, norm, activation, with every option now and then."""

    def __init__(self, r: random.Random, c: int, out: int, *, stride: int = 1, keep_size: bool = True) -> None:
        super().__init__()
        k = r.choice([1, 3, 3, 5])
        dilation = r.choice([1, 1, 2]) if k == 3 else 1
        mode = r.choice(["zeros"] * 5 + ["reflect", "circular", "replicate"])
        padding: Any = dilation * (k - 1) // 2
        if stride == 1 and r.random() < 0.15:
            padding = "same"
        elif not keep_size:
            padding = r.choice([0, 1, (1, 2)])
            mode = "zeros"
        divisors = [g for g in (2, 4) if c % g == 0 and out % g == 0]
        groups = r.choice(divisors) if divisors and r.random() < 0.25 else 1
        self.conv = nn.Conv2d(
            c, out, k, stride, padding, dilation, groups, bias=r.random() < 0.4, padding_mode=mode
        )  # fmt: skip
        self.norm: nn.Module = r.choice(
            [nn.BatchNorm2d(out)] * 6 + [nn.Identity(), nn.InstanceNorm2d(out, affine=True), nn.GroupNorm(1, out)]
        )
        self.act = nn.PReLU(r.choice([1, out])) if r.random() < 0.1 else r.choice(ACTIVATIONS)()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Depthwise(nn.Module):
    def __init__(self, r: random.Random, c: int, out: int) -> None:
        super().__init__()
        m = r.choice([1, 1, 2])
        self.dw = nn.Conv2d(c, c * m, 3, padding=r.choice([1, 1, 0]), groups=c, bias=r.random() < 0.5)
        self.norm = nn.BatchNorm2d(c * m)
        self.act = r.choice(ACTIVATIONS)()
        self.pw = nn.Conv2d(c * m, out, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pw(self.act(self.norm(self.dw(x))))


class Residual(nn.Module):
    """Shortcut: identity, projection, or option A; the sum spelled in several ways."""

    def __init__(self, r: random.Random, c: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Conv(r, c, r.choice([4, 6, 8])))
        self.body.append(nn.Conv2d(self.body[0].conv.out_channels, out, 3, padding=1, bias=r.random() < 0.3))
        self.body.append(nn.BatchNorm2d(out))
        self.project = nn.Conv2d(c, out, 1) if c != out and (out < c or r.random() < 0.5) else None
        self.extra = out - c
        self.before = r.choice([0, (out - c) // 2]) if out > c else 0
        self.value = r.choice([0.0, 0.0, 0.7])
        self.how = r.choice(["plain", "iadd", "function", "method", "sub"])
        self.act = r.choice(ACTIVATIONS)()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.project is not None:
            x = self.project(x)
        elif self.extra:
            x = F.pad(x, (0, 0, 0, 0, self.before, self.extra - self.before), value=self.value)
        if self.how == "plain":
            y = y + x
        elif self.how == "iadd":
            y += x
        elif self.how == "function":
            y = torch.add(x, y)
        elif self.how == "method":
            y = y.add_(x)
        else:
            y = x - y
        return self.act(y)


class Branches(nn.Module):
    """Inception: branches side by side, one of them a pool."""

    def __init__(self, r: random.Random, c: int, out: int) -> None:
        super().__init__()
        half = max(1, out // 2)
        self.a, self.b = Conv(r, c, half), Conv(r, c, out - half if out > half else 1)
        self.pool = r.choice([nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=r.random() < 0.5)])
        self.dense = r.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.a(x), self.b(self.pool(x))]
        if self.dense:
            parts.insert(0, x)
        return torch.cat(parts, 1)


class SqueezeExcite(nn.Module):
    def __init__(self, r: random.Random, c: int) -> None:
        super().__init__()
        linear = r.random() < 0.4
        self.linear = linear
        self.a = nn.Linear(c, 4) if linear else nn.Conv2d(c, 4, 1)
        self.b = nn.Linear(4, c) if linear else nn.Conv2d(4, c, 1)
        self.expand = r.random() < 0.3
        self.gate = r.choice([nn.Sigmoid(), nn.Hardsigmoid(), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=not self.linear)
        s = self.gate(self.b(F.relu(self.a(s))))
        if self.linear:
            s = s.unsqueeze(-1).unsqueeze(-1)
        return x * (s.expand_as(x) if self.expand else s)


class SpatialGate(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv(x))


class Shuffle(nn.Module):
    """ShuffleNet's unit: cut in two, work on one half, join, shuffle."""

    def __init__(self, r: random.Random, c: int) -> None:
        super().__init__()
        self.branch = Conv(r, c // 2, c // 2)
        self.how = r.choice(["chunk", "split", "slice"])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chunk":
            a, b = x.chunk(2, dim=1)
        elif self.how == "split":
            a, b = torch.split(x, x.shape[1] // 2, dim=1)
        else:
            a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.size()
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


class ChannelsLast(nn.Module):
    """ConvNeXt's inner part: layer norm and linear layers over the last axis, a scale for each channel."""

    def __init__(self, r: random.Random, c: int) -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(c) if r.random() < 0.5 else nn.Identity()
        self.a, self.b = nn.Linear(c, 6), nn.Linear(6, c)
        self.scale = nn.Parameter(torch.randn(c, 1, 1) * (torch.rand(c, 1, 1) > 0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.gelu(self.a(self.norm(x.permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2) * self.scale


class Scalars(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.how = r.choice(["affine", "reverse", "clamp", "square", "minus_mean", "max", "double", "gain"])
        self.gain = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "affine":
            return x * 0.5 + 0.3
        if self.how == "reverse":
            return 1 - x
        if self.how == "clamp":
            return x.clamp(-0.5, 0.8)
        if self.how == "square":
            return x**2
        if self.how == "minus_mean":
            return x - x.mean((2, 3), keepdim=True)
        if self.how == "max":
            return torch.maximum(x, -x)
        if self.how == "gain":
            return x * self.gain
        return x + x


class Barrier(nn.Module):
    """Operations without a rule."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.how = r.choice(["softmax", "flip", "roll", "cumsum", "norm", "write"])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "softmax":
            return torch.softmax(x, 1)
        if self.how == "flip":
            return torch.flip(x, (1,))
        if self.how == "roll":
            return x.roll(1, 1)
        if self.how == "cumsum":
            return x.cumsum(1)
        if self.how == "write":
            x = x + 0
            x[:, 0] = 0.25
            return x
        return F.normalize(x, dim=1)


class Pad(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.pad = r.choice(
            [
                nn.ZeroPad2d(1),
                nn.ConstantPad2d((1, 0, 2, 1), 0.5),
                nn.ReflectionPad2d(1),
                nn.ReplicationPad2d((1, 1, 0, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.pad(x)


class Resize(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.how = r.choice(["nearest", "bilinear", "size", "shuffle", "unshuffle"])

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "nearest":
            return F.interpolate(x, scale_factor=2)
        if self.how == "bilinear":
            return F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False)
        if self.how == "size":
            return F.interpolate(x, size=(x.shape[2] + 1, x.shape[3]), mode="bilinear", align_corners=True)
        if self.how == "shuffle":
            return F.pixel_shuffle(torch.cat([x, x, x, x], 1), 2)
        return F.pixel_unshuffle(F.interpolate(x, scale_factor=2), 2)


class Head(nn.Module):
    def __init__(self, r: random.Random, c: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.how = r.choice(["gap", "gap", "flatten", "view", "mean", "map", "dict", "tuple", "adaptive"])
        fixed = self.how in ("flatten", "view")
        self.pool = nn.AdaptiveAvgPool2d((2, 3) if self.how == "adaptive" else 1)
        features = c * size[0] * size[1] if fixed else c * 6 if self.how == "adaptive" else c
        self.fc = nn.Linear(features, 5)
        self.fixed = fixed
        self.conv = nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor) -> Any:
        if self.how == "flatten":
            return self.fc(torch.flatten(x, 1))
        if self.how == "view":
            return self.fc(x.view(x.size(0), -1))
        if self.how == "mean":
            return self.fc(x.mean([-2, -1]))
        if self.how == "map":
            return self.conv(x)
        y = self.fc(self.pool(x).flatten(1))
        if self.how == "dict":
            return {"out": y, "map": self.conv(x)}
        if self.how == "tuple":
            return y, [x, self.conv(x)]
        return y


class Network(nn.Module):
    def __init__(self, r: random.Random, size: int) -> None:
        super().__init__()
        c = r.choice([4, 6, 8, 12])
        self.blocks = nn.Sequential(Conv(r, 3, c))
        for _ in range(r.randint(1, 5)):
            self.blocks.extend(_block(r, c))
            with torch.no_grad():
                self.blocks.eval()
                x = self.blocks(torch.zeros(2, 3, size, size))
            c = x.shape[1]
            if min(x.shape[2:]) < 3:
                break
        self.blocks.append(Conv(r, c, r.choice([4, 8])))
        with torch.no_grad():
            self.blocks.eval()
            x = self.blocks(torch.zeros(2, 3, size, size))
        self.head = Head(r, x.shape[1], (x.shape[2], x.shape[3]))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x))


def _block(r: random.Random, c: int) -> list[nn.Module]:
    out = r.choice([4, 6, 8, 12])
    return r.choice(
        [
            lambda: [Conv(r, c, out)],
            lambda: [Conv(r, c, out, stride=2)],
            lambda: [Conv(r, c, out, keep_size=False)],
            lambda: [Depthwise(r, c, out)],
            lambda: [Residual(r, c, c), Residual(r, c, c)],
            lambda: [Residual(r, c, out)],
            lambda: [Residual(r, c, c)],
            lambda: [Branches(r, c, out)],
            lambda: [SqueezeExcite(r, c)],
            lambda: [SpatialGate(c)],
            lambda: [Shuffle(r, c)] if c % 2 == 0 else [],
            lambda: [ChannelsLast(r, c)],
            lambda: [Scalars(r)],
            lambda: [Barrier(r)],
            lambda: [Pad(r)],
            lambda: [Resize(r)],
            lambda: [nn.ConvTranspose2d(c, out, 2, 2, groups=r.choice([1, 2]) if c % 2 == 0 and out % 2 == 0 else 1)],
            lambda: [nn.MaxPool2d(2, ceil_mode=r.random() < 0.5)],
            lambda: [nn.AvgPool2d(3, 2, 1, ceil_mode=r.random() < 0.5, count_include_pad=r.random() < 0.5)],
            lambda: [nn.Dropout(0.5)],
        ]
    )()


def build(seed: int) -> tuple[Network, Tensor]:
    """The network of this seed, in float64, and an input; the next one where its maps get too small for torch."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        size = r.choice([8, 9, 12])
        try:
            net = Network(r, size).double().eval()
        except (RuntimeError, ValueError):
            continue
        break
    randomise(net, r, r.choice([0.0, 0.3, 0.5, 0.8, 1.0]))
    return net, torch.randn(r.choice([1, 2]), 3, size, size, dtype=torch.float64)


def randomise(net: nn.Module, r: random.Random, rate: float) -> None:
    """Zero filters, some input columns and some scales at random; give every norm statistics that matter."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                axis = 1 if isinstance(module, nn.ConvTranspose2d) else 0
                rows = [i for i in range(module.weight.shape[axis]) if r.random() < rate]
                if rows and r.random() < 0.9:
                    module.weight.index_fill_(axis, torch.tensor(rows), 0.0)
                if r.random() < 0.2:
                    module.weight[:, r.randrange(module.weight.shape[1])] = 0
                if module.bias is not None and r.random() < 0.3:
                    module.bias.zero_()
            elif isinstance(module, (nn.BatchNorm2d, nn.InstanceNorm2d)):
                n = module.num_features
                module.weight.copy_(torch.randn(n) * (torch.rand(n) > 0.1))
                module.bias.copy_(torch.randn(n) * (torch.rand(n) > 0.3))
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.copy_(torch.randn(n) * (torch.rand(n) > 0.3))
                    module.running_var.copy_(torch.rand(n) + 0.5)
