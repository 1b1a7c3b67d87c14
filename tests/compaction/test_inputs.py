"""What users get wrong, and models that are built in unusual ways."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from networks import assert_equal, zero_filters
from torch import Tensor, nn

import asfp
from asfp.trace import trace


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


def test_not_a_module() -> None:
    with pytest.raises(asfp.AsfpError, match=r"expects a torch\.nn\.Module, got function"):
        asfp.compact(lambda x: x, torch.zeros(1))  # type: ignore[arg-type]


def test_wrong_example() -> None:
    with pytest.raises(asfp.AsfpError, match=r"does not run on example_inputs of shape \[\(1, 4, 8, 8\)\]"):
        asfp.compact(net(), torch.zeros(1, 4, 8, 8))
    with pytest.raises(asfp.AsfpError, match="must be a tensor, a tuple of arguments or a dict"):
        asfp.compact(net(), "image")  # type: ignore[arg-type]


def test_not_a_number_in_the_weights() -> None:
    model = net()
    model[2].weight.data[0, 0, 0, 0] = float("nan")  # type: ignore[index, union-attr]
    with pytest.raises(asfp.AsfpError, match=r"2\.weight holds NaN or infinite values"):
        asfp.compact(model, torch.zeros(1, 3, 8, 8))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(3, 8, 3), Inner()
        with torch.no_grad():
            self.conv.weight[:4] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.conv(x))


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Named(nn.Module):
    """Every call by name, and any number of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.norm, self.pool, self.drop = nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.Dropout()
        self.last = nn.Conv2d(64, 4, 1)

    def forward(self, *images: Tensor) -> Tensor:
        x = self.pool(input=self.norm(input=self.first(input=images[0])))
        x = x + self.drop(input=self.second(input=x))
        y: Tensor = self.last(input=x)
        return y + len(images)


@pytest.mark.parametrize("layout", ["least", "auto", "zeros"])
def test_calls_by_name(layout: str) -> None:
    torch.manual_seed(0)
    model, x = Named().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    nn.init.normal_(model.norm.bias)
    asfp.SoftPruner(model, 0.75, 1, example_inputs=x).step(1)
    small = asfp.compact(model, x, layout=layout)
    assert small.plan.macs_after < small.plan.macs_before
    assert_equal(model, small, (2, 3, 8, 8), (1, 3, 10, 12))


def test_untraceable_names_the_line_and_the_ways_out() -> None:
    with pytest.raises(asfp.TraceError, match=r"test_inputs\.py:\d+, in forward: \"if x\.sum\(\) > 0:\".*leaf_modules"):
        asfp.compact(Branching(), torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("leaf", [Inner, "inner"])
def test_a_leaf_becomes_a_barrier(leaf: type[nn.Module] | str) -> None:
    model = Branching().double().eval()
    small = asfp.compact(model, torch.randn(1, 3, 8, 8, dtype=torch.float64), leaf_modules=[leaf])
    assert [b.name for b in small.plan.barriers] == ["inner"]
    assert_equal(model, small, (2, 3, 8, 8))


def test_unknown_leaf() -> None:
    with pytest.raises(asfp.TraceError, match="does not have"):
        asfp.compact(net(), torch.zeros(1, 3, 8, 8), leaf_modules=["nowhere"])


class ByShape(nn.Module):
    """Branches on shapes, loops over sizes, defaults: plain torch.fx stops here."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.a.weight[::2] = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Tensor:
        x = self.a(x)
        if x.shape[1] == 8 and len(x.shape) == 4 and mask is None:
            x = x * scale
        n, c, *_ = x.shape
        shift = torch.ones(n, c // 2, 1, 1, dtype=x.dtype)
        return (self.b(x) + shift).view(n, -1, max(x.shape[2], 3))


def test_shapes_are_known_while_tracing() -> None:
    model = ByShape().double().eval()
    small = asfp.compact(model, torch.randn(2, 3, 6, 6, dtype=torch.float64))
    assert small.a.out_channels < 8  # type: ignore[union-attr, operator]
    assert_equal(model, small, (1, 3, 6, 6), (5, 3, 6, 9), (2, 3, 8, 4))


def test_keyword_and_several_arguments() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.b(self.a(x) * y)

    model = Two().eval()
    model.a.weight.data[:3] = 0
    x, y = torch.randn(2, 3, 4, 4), torch.randn(2, 8, 4, 4)
    for example in ((x, y), {"x": x, "y": y}):
        small = asfp.compact(model, example)
        assert asfp.verify(model, small, example).ok
    with pytest.raises(asfp.TraceError, match="do not fit"):
        trace(model, (x,))


def test_a_module_called_twice_stays_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 2, 1)
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.stem(x))
            return self.head(self.relu(self.conv(self.relu(self.conv(x)))))

    model = Twice().double().eval()
    zero_filters(model, 0.5)
    small = asfp.compact(model, torch.randn(1, 3, 6, 6, dtype=torch.float64))
    assert "called 2 times" in small.plan.barriers[0].reason
    assert small.head.in_channels == 8 or small.head.in_channels == 4  # type: ignore[union-attr]
    assert_equal(model, small, (2, 3, 9, 9))


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).double().eval()
    model[2].weight = model[0].weight  # type: ignore[union-attr]
    model[0].weight.data[:2] = 0  # type: ignore[union-attr, index]
    small = asfp.compact(model, torch.randn(1, 4, 8, 8, dtype=torch.float64))
    assert "shares weights" in small.plan.barriers[0].reason
    assert_equal(model, small, (2, 4, 9, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = zero_filters(asfp.create_model("resnet20"), 0.4).to(dtype).eval()
    small = asfp.compact(model, torch.randn(1, 3, 32, 32, dtype=dtype))
    assert small.conv1.weight.dtype == dtype  # type: ignore[union-attr]
    assert small.plan.macs_after < 0.6 * small.plan.macs_before


def test_channels_last() -> None:
    model = zero_filters(asfp.create_model("resnet20"), 0.4).to(memory_format=torch.channels_last).eval()
    small = asfp.compact(model, torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last))
    assert_equal(model, small, (2, 3, 32, 32))


def test_a_backbone_inside_a_detector() -> None:
    torch.manual_seed(0)
    detector = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5
    ).eval()
    zero_filters(detector.backbone, 0.3).double()
    detector.double()
    image = [torch.rand(3, 96, 128, dtype=torch.float64)]
    with torch.no_grad():
        expected = detector(image)
        whole = copy.deepcopy(detector)
        whole.backbone = asfp.compact(detector.backbone, torch.randn(1, 3, 96, 128, dtype=torch.float64))
        got = whole(image)
    assert whole.backbone.plan.macs_after < 0.9 * whole.backbone.plan.macs_before
    assert torch.allclose(expected[0]["boxes"], got[0]["boxes"], atol=1e-6)
    assert torch.equal(expected[0]["labels"], got[0]["labels"])


def test_channels_stay_last_in_memory() -> None:
    torch.manual_seed(0)
    model = asfp.create_model("resnet8").eval().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    asfp.SoftPruner(model, 0.4, 1, example_inputs=x).step(1)
    small = asfp.compact(model, x)
    weights = [p for p in small.parameters() if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    torch.testing.assert_close(small(x), model(x), rtol=1e-4, atol=1e-4)
