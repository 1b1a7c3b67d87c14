"""Each operation in each spelling: exact, and followed rather than walled off where a rule is promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import assert_equal
from torch import Tensor, nn

import asfp
from asfp.compaction import apply

Layer = Callable[[Tensor], Any]


class Around(nn.Module):
    """conv (some filters zero) -> norm -> the operation -> conv: the operation sees live and constant channels."""

    def __init__(self, operation: Layer, *, channels: int = 8, dims: int = 2, seen: int | None = None) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.first, self.norm = conv(3, channels, 3, padding=1), norm(channels)
        self.operation = operation
        self.last = conv(seen or channels, 4, 3, padding=1)
        with torch.no_grad():
            self.first.weight[1::2] = 0
            self.norm.bias.copy_(torch.linspace(-1, 1, channels))
            self.norm.running_mean.copy_(torch.linspace(-0.5, 0.7, channels))  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.operation(self.norm(self.first(x))))


POINTWISE: dict[str, Layer] = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "relu method": lambda x: x.relu(),
    "relu_": lambda x: x.relu_(),
    "F.relu inplace": lambda x: F.relu(x, inplace=True),
    "F.relu True": lambda x: F.relu(x, True),
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh method": lambda x: x.tanh(),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "exp": torch.exp,
    "clamp": lambda x: torch.clamp(x, min=0.1),
    "clamp_": lambda x: x.clamp_(-0.1, 0.1),
    "abs": abs,
    "neg": lambda x: -x,
    "pow": lambda x: x**2,
    "square": torch.square,
    "add number": lambda x: x + 1.5,
    "radd number": lambda x: 1.5 + x,
    "sub number": lambda x: x - 0.5,
    "rsub number": lambda x: 0.5 - x,
    "mul number": lambda x: x.mul(0.3),
    "div number": lambda x: x / 3,
    "iadd number": lambda x: x.add_(2),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "contiguous": lambda x: x.contiguous(),
    "detach clone": lambda x: x.detach().clone(),
    "permute twice": lambda x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2),
    "transpose twice": lambda x: x.transpose(1, 3).transpose(1, 3),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
    "flatten unflatten": lambda x: x.flatten(2).view(x.shape[0], x.shape[1], x.shape[2], x.shape[3]),
}
SPATIAL: dict[str, Layer] = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "max_pool padded": lambda x: F.max_pool2d(x, kernel_size=3, stride=2, padding=1, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool excluded": lambda x: F.avg_pool2d(x, 3, 2, 1, False, False),
    "avg_pool ceil": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 3),
    "mean": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3),
    "torch.mean": lambda x: torch.mean(x, dim=[-1, -2], keepdim=True),
    "sum": lambda x: x.sum(dim=(2, 3), keepdim=True),
    "amax": lambda x: torch.amax(x, dim=(2, 3), keepdim=True),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1)),
    "pad value": lambda x: F.pad(x, [1, 1, 1, 1], "constant", 0.3),
    "pad reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "interpolate size": lambda x: F.interpolate(x, size=(9, 7), mode="bilinear", align_corners=False),
    "slice of space": lambda x: x[:, :, ::2, 1:],
    "concat with itself": lambda x: torch.cat([x[:, :4], x[:, 4:]], dim=1),
    "split": lambda x: torch.cat(torch.split(x, [2, 6], dim=1)[::-1], 1),
    "chunk": lambda x: torch.cat([x.chunk(4, 1)[i] for i in (2, 0, 3, 1)], 1),
    "shuffle": lambda x: x.reshape(x.shape[0], 2, 4, *x.shape[2:]).permute(0, 2, 1, 3, 4).reshape(x.shape),
    "ellipsis": lambda x: x[..., 1:],
    "new axes": lambda x: x * x.mean((2, 3))[:, :, None, None],
    "concatenate": lambda x: torch.concatenate((x[:, 4:], x[:, :4]), dim=-3),
    "len": lambda x: x.reshape(len(x), 8, -1, x.shape[-1]),
    "constant in forward": lambda x: x * torch.arange(8, dtype=torch.float64).view(1, 8, 1, 1),
    "narrow": lambda x: x.narrow(1, 2, 4),
}
SEEN = {"narrow": 4}
NOT_SMALLER = {
    "avg_pool padded",
    "avg_pool ceil",
    "sum",
    "pad",
    "pad value",
}  # these make a constant depend on position


@pytest.mark.parametrize("name", [*POINTWISE, *SPATIAL])
def test_function_and_method_forms(name: str) -> None:
    torch.manual_seed(0)
    model = Around({**POINTWISE, **SPATIAL}[name], seen=SEEN.get(name)).double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert_equal(model, small, (1, 3, 8, 8), (3, 3, 10, 12))
    assert small.plan.barriers == (), small.plan.barriers
    assert small.first.out_channels < 8 or name in NOT_SMALLER  # type: ignore[union-attr, operator]


MODULES: dict[str, nn.Module] = {
    "GroupNorm": nn.GroupNorm(2, 8),
    "InstanceNorm": nn.InstanceNorm2d(8, affine=True),
    "InstanceNorm tracked": nn.InstanceNorm2d(8, track_running_stats=True),
    "BatchNorm untracked": nn.BatchNorm2d(8, track_running_stats=False),
    "BatchNorm plain": nn.BatchNorm2d(8, affine=False),
    "PReLU": nn.PReLU(),
    "PReLU per channel": nn.PReLU(8),
    "Dropout2d": nn.Dropout2d(),
    "MaxPool": nn.MaxPool2d(3, 2, 1),
    "LPPool": nn.LPPool2d(2, 2),
    "AvgPool": nn.AvgPool2d(3, 1, 1, divisor_override=5),
    "ZeroPad": nn.ZeroPad2d((1, 0, 2, 1)),
    "ReflectionPad": nn.ReflectionPad2d(2),
    "Upsample": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "Softmax": nn.Softmax(dim=1),
    "LocalResponseNorm": nn.LocalResponseNorm(3),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "multiplier": nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Conv2d(16, 8, 1, groups=2)),
    "grouped": nn.Conv2d(8, 8, 3, padding=1, groups=4),
    "transposed": nn.ConvTranspose2d(8, 8, 3, 2, 1, output_padding=1),
    "transposed grouped": nn.ConvTranspose2d(8, 8, 2, 2, groups=2),
    "transposed depthwise": nn.ConvTranspose2d(8, 8, 2, 2, groups=8),
    "PixelShuffle": nn.Sequential(nn.Conv2d(8, 32, 1), nn.PixelShuffle(2)),
    "PixelUnshuffle": nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(32, 8, 1)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module_forms(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
        for layer in module.modules():
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
                axis = int(isinstance(layer, nn.ConvTranspose2d))
                layer.weight.index_fill_(axis, torch.tensor([0]), 0.0)
    model = Around(module).double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert_equal(model, small, (1, 3, 8, 8), (3, 3, 10, 12))


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("kind", ["conv", "transposed", "pool", "instance"])
def test_one_and_three_dimensions(dims: int, kind: str) -> None:
    pick = dims - 1
    made: dict[str, Any] = {
        "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d)[pick](8, 8, 3, 2, 1),
        "transposed": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[pick](8, 8, 3, 2),
        "pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[pick](2),
        "instance": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[pick](8, affine=True),
    }
    model = Around(made[kind], dims=dims).double().eval()
    small = asfp.compact(model, torch.randn(2, 3, *[6] * dims, dtype=torch.float64))
    assert_equal(model, small, (1, 3, *[6] * dims), (2, 3, *[9] * dims))
    assert small.plan.barriers == ()


class Functional(nn.Module):
    """Layers with weights called as functions, parameters used directly in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.scale, self.gain = nn.Parameter(torch.randn(8, 1, 1)), nn.Parameter(torch.randn(1))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)
        self.second = nn.Parameter(torch.randn(6, 8, 1, 1))
        self.last = nn.Parameter(torch.randn(5, 6))
        with torch.no_grad():
            self.weight[::2] = 0
            self.second[1] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias, padding=1)
        x = F.batch_norm(x, self.mean, self.var, training=False)
        x = F.relu(x * self.scale) * self.gain
        x = torch.conv2d(x, self.second)
        return F.linear(x.mean((2, 3)), self.last)


def test_layers_called_as_functions() -> None:
    model = Functional().double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert small.plan.barriers == ()
    assert [x.out_after for x in small.plan.layers] == [4, 5, 5]
    assert small.scale.shape == (4, 1, 1)  # type: ignore[union-attr]
    assert_equal(model, small, (1, 3, 8, 8), (3, 3, 5, 9))


class Computed(nn.Module):
    """Weights that forward makes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.gain = nn.Parameter(torch.randn(6, 3, 3, 3)), nn.Parameter(torch.rand(6, 1, 1, 1) + 0.5)
        self.fixed, self.last = nn.Parameter(torch.randn(4, 6, 1, 1)), nn.Conv2d(4, 2, 1)
        self.register_buffer("scale", torch.rand(4, 1, 1, 1))
        with torch.no_grad():
            self.base[:2] = 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.base * self.gain * 2))
        return self.last(F.conv2d(x, self.fixed.detach() + self.scale.abs()))


def test_what_forward_makes_of_parameters_is_told_and_trained_as_it_was() -> None:
    model = Computed().double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert_equal(model, small, (1, 3, 8, 8))
    assert small.plan.computed == {"conv2d.weight": ("base", "gain"), "conv2d_1.weight": ("fixed", "scale")}
    assert "conv2d.weight: from base, gain" in str(small.plan)
    assert "2 computed parameters are parameters of their own" in small.plan.summary()
    trained = {name: p.requires_grad for name, p in small.named_parameters()}
    assert (trained["conv2d.weight"], trained["conv2d_1.weight"]) == (True, False)  # the second is detached
    assert asfp.Plan.from_json(small.plan.to_json()) == small.plan
    assert asfp.compact(Functional(), torch.randn(2, 3, 8, 8)).plan.computed == {}


class Unbound(nn.Module):
    """Weights that are parts of one parameter, by way of tuples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.both, self.head = how, nn.Parameter(torch.randn(2, 4, 4, 3, 3)), nn.Conv2d(4, 2, 1)
        with torch.no_grad():
            self.both[:, :2] = 0

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both.unbind(0) if self.how == "unbind" else (part[0] for part in self.both.chunk(2))
        return self.head(F.conv2d(F.relu(F.conv2d(x, a)), b))


@pytest.mark.parametrize("how", ["unbind", "chunk"])
def test_what_comes_out_of_a_tuple_of_parameters_is_told_too(how: str) -> None:
    model = Unbound(how).double().eval()
    small = asfp.compact(model, torch.randn(2, 4, 8, 8, dtype=torch.float64))
    assert_equal(model, small, (1, 4, 8, 8))
    assert small.plan.computed == {"conv2d.weight": ("both",), "conv2d_1.weight": ("both",)}


class OneMap(nn.Module):
    """A map for all channels, added to channels that may all be zero."""

    def __init__(self, then: Layer, zero: tuple[bool, bool]) -> None:
        super().__init__()
        self.many, self.one = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.Conv2d(3, 1, 3, padding=1)
        self.then, self.last = then, nn.Conv2d(6, 4, 3, padding=1)
        with torch.no_grad():
            for layer, gone in zip((self.many, self.one), zero, strict=True):
                layer.weight *= not gone

    def forward(self, x: Tensor) -> Any:
        y = self.many(x) + self.one(x)
        return self.last(F.relu(y)), self.then(y)


@pytest.mark.parametrize("zero", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "then",
    [lambda y: y, lambda y: y.unbind(1)[2], lambda y: y[:, ::2], lambda y: y.cumsum(1), lambda y: y.mean((2, 3))],
)
def test_one_map_added_to_channels_that_are_all_zero_makes_as_many(then: Layer, zero: tuple[bool, bool]) -> None:
    model = OneMap(then, zero).double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 8, 8, dtype=torch.float64))
    assert_equal(model, small, (1, 3, 8, 8), (3, 3, 5, 9))
    again = apply(small.plan, model)
    assert_equal(model, again, (1, 3, 8, 8))


class Overwritten(nn.Module):
    """In-place operations whose argument is read again afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(3, 6, 3), how
        self.relu = nn.ReLU(inplace=True)
        with torch.no_grad():
            self.conv.weight[::2] = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "module":
            z = self.relu(y)
        elif self.how == "method":
            z = y.relu_()
        elif self.how == "statement":
            y.mul_(2)
            z = y
        elif self.how == "item":
            y[:, 1] = 0.5
            z = y
        elif self.how == "part":
            y[:, :3].mul_(2)
            y[:, 1] += 1
            z = y
        elif self.how == "identity":
            z = y.contiguous()
            z *= 2
        else:
            z = y
            z += 1
        return y + z * 3


@pytest.mark.parametrize("how", ["module", "method", "statement", "item", "part", "identity", "augmented"])
def test_in_place_operations_keep_their_meaning(how: str) -> None:
    model = Overwritten(how).double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 6, 6, dtype=torch.float64))
    assert_equal(model, small, (1, 3, 6, 6), (2, 3, 9, 9))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)
        with torch.no_grad():
            self.conv.weight[::2] = 0
            self.a.weight[0] = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.conv(x)
        return {"out": self.a(y), "rest": (y, [self.b(y)]), "size": y.shape[2]}


def test_nested_outputs_keep_their_structure() -> None:
    model = Outputs().double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 6, 6, dtype=torch.float64))
    x = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    expected, got = model(x), small(x)
    assert got.keys() == expected.keys()
    assert got["size"] == 7
    assert torch.allclose(got["rest"][1][0], expected["rest"][1][0])
    assert_equal(model, small, (2, 3, 9, 9))
