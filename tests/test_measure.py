"""Multiply-adds and parameters: the paper's numbers to two decimals, and counts that can be done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import asfp
from asfp.measurement.macs import count_layers
from asfp.measurement.paper import convolution_macs, exact_fraction, trace_whole, whole_filters
from asfp.selection import select

PAPER = {
    "resnet20": (4.055e7, {0.1: 15.24, 0.2: 29.31, 0.3: 42.22, 0.4: 53.96}),
    "resnet32": (6.886e7, {0.1: 14.93, 0.2: 28.77, 0.3: 41.51, 0.4: 53.16}),
    "resnet56": (1.2549e8, {0.1: 14.74, 0.2: 28.42, 0.3: 41.06, 0.4: 52.63}),
    "resnet110": (2.5289e8, {0.1: 14.62, 0.2: 28.21, 0.3: 40.78, 0.4: 52.31}),
}
INTEGER = {
    "resnet56": {0.1: 12.28, 0.2: 26.77, 0.3: 38.05, 0.4: 50.41},
    "resnet110": {0.1: 12.21, 0.2: 26.57, 0.3: 37.81, 0.4: 50.11},
}
IMAGENET = {
    "resnet18": (41.73, 41.40),
    "resnet34": (41.11, 40.77),
    "resnet50": (41.53, 41.23),
    "resnet101": (43.69, 43.36),
}


@pytest.mark.parametrize("name", PAPER)
def test_cifar_percentages_of_the_paper(name: str) -> None:
    model, example = asfp.create_model(name), torch.zeros(1, 3, 32, 32)
    dense = sum(layer.macs_conv for layer in count_layers(model, example))
    printed, cuts = PAPER[name]
    assert dense == pytest.approx(printed, rel=1.5e-4)
    graph, layers = trace_whole(model, example), [layer.name for layer in select(model, None, 0.5)]
    for rate, percent in cuts.items():
        rates = dict.fromkeys(layers, rate)
        assert round(100 * (1 - convolution_macs(graph, rates, exact_fraction) / dense), 2) == percent
        if name in INTEGER:
            integer = 100 * (1 - convolution_macs(graph, rates, whole_filters) / dense)
            assert round(integer, 2) == INTEGER[name][rate]


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_percentages(name: str) -> None:
    model, example = asfp.create_model(f"torchvision:{name}"), torch.zeros(1, 3, 224, 224)
    dense = sum(layer.macs_conv for layer in count_layers(model, example))
    graph, rates = trace_whole(model, example), {layer.name: 0.3 for layer in select(model, None, 0.3)}
    paper, integer = (
        100 * (1 - convolution_macs(graph, rates, kept) / dense) for kept in (exact_fraction, whole_filters)
    )
    assert (round(paper, 2), round(integer, 2)) == IMAGENET[name]


def test_compact_resnet56_has_no_more_than_the_integer_model() -> None:
    """Fewer, by the stream channels of each stage's first blocks that nothing has written yet."""
    found = asfp.measure(asfp.create_model("resnet56"), torch.zeros(1, 3, 32, 32), rate=0.4)
    assert found.pruned is not None
    assert found.pruned.macs_compact <= found.pruned.macs_integer
    assert 50.41 <= round(found.cut_percent(found.pruned.macs_compact), 2) < 52.63
    assert found.pruned.params_compact < 0.55 * found.params


@pytest.mark.parametrize("name", ["resnet20", "vgg16", "torchvision:resnet18", "torchvision:mobilenet_v2"])
def test_streams_count_as_the_paper_does(name: str) -> None:
    """Two ways to the paper's count: shares followed along the graph, and channels followed from filter to reader."""
    example = torch.zeros(1, 3, 32, 32)
    model = asfp.create_model(name)
    pruner = asfp.SoftPruner(model, 0.3, 1, selection="nested", example_inputs=example)
    graph, rates = trace_whole(model, example), {layer.name: layer.goal for layer in pruner.layers}
    assert pruner.together.macs_exact() == pytest.approx(convolution_macs(graph, rates, exact_fraction), rel=1e-12)
    assert pruner.together.macs(1.0) == pytest.approx(convolution_macs(graph, rates, whole_filters), rel=1e-12)


def test_selections_and_alignment() -> None:
    model, example = asfp.create_model("resnet20"), torch.zeros(1, 3, 32, 32)
    cuts = {s: asfp.measure(model, example, rate=0.3, selection=s) for s in ("independent", "nested", "coupled")}
    assert all(found.pruned is not None and found.pruned.selection == s for s, found in cuts.items())
    pruned = {s: found.pruned for s, found in cuts.items() if found.pruned is not None}
    assert pruned["nested"].macs_paper == pytest.approx(pruned["independent"].macs_paper)
    assert pruned["nested"].macs_integer == pytest.approx(pruned["independent"].macs_integer)
    assert pruned["coupled"].macs_compact == round(pruned["coupled"].macs_integer)
    assert pruned["coupled"].macs_compact < pruned["nested"].macs_compact < pruned["independent"].macs_compact
    aligned = asfp.measure(model, example, rate=0.3, selection="coupled", align=8)
    assert aligned.pruned is not None
    assert aligned.pruned.macs_compact == round(aligned.pruned.macs_integer)
    assert aligned.pruned.macs_integer == pytest.approx(pruned["coupled"].macs_integer, rel=0.01)
    assert str(aligned).startswith("CifarResNet, input 1x3x32x32, 30 % of the filters pruned, coupled, multiples of 8")


def test_vgg16_as_pfec_prunes_it() -> None:
    rates = {f"features.conv{i}": 0.5 for i in (1, 8, 9, 10, 11, 12, 13)}
    found = asfp.measure(asfp.create_model("vgg16"), torch.zeros(1, 3, 32, 32), layers=rates)
    assert found.pruned is not None
    assert found.macs_conv == pytest.approx(3.132e8, rel=1e-4)
    for macs in (found.pruned.macs_paper, found.pruned.macs_integer, found.pruned.macs_compact):
        assert macs == pytest.approx(2.061e8, rel=3e-4)
        assert round(found.cut_percent(macs), 1) == 34.2
    assert found.pruned.rate is None


def test_the_result_does_not_depend_on_the_weights_and_leaves_them_alone() -> None:
    example = torch.zeros(1, 3, 32, 32)
    first, second = asfp.create_model("resnet8"), asfp.create_model("resnet8")
    for p in second.parameters():
        nn.init.zeros_(p)
    before = [p.clone() for p in first.parameters()]
    assert asfp.measure(first, example, rate=0.4) == asfp.measure(second, example, rate=0.4)
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True))
    assert first.training


class Twice(nn.Module):
    """One convolution called twice, one weight used by two layers, one layer never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.right.weight = self.left.weight
        self.idle = nn.Linear(100, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.conv(x)).mean((2, 3))
        return self.left(x) + self.right(x)


def test_calls_count_twice_and_parameters_once() -> None:
    layers = {layer.name: layer for layer in count_layers(Twice(), torch.zeros(5, 4, 6, 6))}
    assert layers["conv"].macs_conv == 2 * 36 * 4 * 4 * 9
    assert (layers["left"].macs_linear, layers["right"].macs_linear) == (16, 16)
    assert "idle" in layers
    assert layers["idle"].macs_linear == 0
    found = asfp.measure(Twice(), torch.zeros(5, 4, 6, 6))
    assert found.params == sum(p.numel() for p in Twice().parameters())
    assert found.macs == found.macs_conv + found.macs_linear == 2 * 5184 + 32


@pytest.mark.parametrize(
    ("layer", "shape", "macs"),
    [
        (nn.Conv2d(6, 9, (3, 5), stride=2, padding=1, groups=3), (1, 6, 11, 13), 6 * 6 * 9 * 2 * 15),
        (nn.Conv1d(4, 4, 3, groups=4), (2, 4, 10), 8 * 4 * 3),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 27 * 3 * 2 * 8),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), (1, 4, 5, 5), 25 * 4 * 6 * 9),
    ],
)
def test_convolutions_by_hand(layer: nn.Module, shape: tuple[int, ...], macs: int) -> None:
    found = asfp.measure(layer, torch.zeros(shape))
    assert (found.macs_conv, found.macs_linear) == (macs, 0)
    traced = convolution_macs(trace_whole(nn.Sequential(layer), torch.zeros(shape)), {}, exact_fraction)
    assert traced == macs


def test_concatenation_averages_the_shares_and_depthwise_follows() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 10, 1), nn.Conv2d(2, 30, 1)
            self.deep, self.last = nn.Conv2d(40, 40, 1, groups=40), nn.Conv2d(40, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.deep(torch.cat([self.a(x), self.b(x)], 1)))

    graph = trace_whole(Net(), torch.zeros(1, 2, 1, 1))
    assert convolution_macs(graph, {"a": 0.5}, exact_fraction) == 10 + 60 + 35 + 35


def test_a_network_without_a_graph_is_still_counted() -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.shape[2] == int(str(x.shape[2])) else x

    assert asfp.measure(Dynamic(), torch.zeros(1, 3, 4, 4)).macs_conv == 3 * 8 * 16


def test_a_wrong_input_is_named() -> None:
    with pytest.raises(asfp.AsfpError, match=r"does not run on example_inputs of shape \[\(1, 1, 32, 32\)\]"):
        asfp.measure(asfp.create_model("resnet8"), torch.zeros(1, 1, 32, 32))


def test_a_large_model_is_counted_without_its_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(200_000, 200_000)  # 160 GB
    assert asfp.measure(model, torch.zeros(1, 200_000, device="meta")).macs_linear == 200_000**2
