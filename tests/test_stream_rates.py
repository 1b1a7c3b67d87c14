"""Another rate for what writes residual streams: counts, exactness, equal to a mapping, wherever it can be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from asfp import AsfpError, HardPruner, SoftPruner, compact, create_model, measure
from asfp.cli import app
from asfp.sources import build, parse_source
from asfp.targets import rate_for_macs
from asfp.train import config_from, train

IMAGE = torch.zeros(1, 3, 32, 32)


def writes_stream(name: str) -> bool:
    """Of the CIFAR ResNets: what is added, and the first convolution, which begins the stream."""
    return name == "conv1" or name.endswith("conv2")


def pruned_counts(pruner: SoftPruner) -> dict[str, int]:
    return {name: step.zeroed for name, step in pruner.step(pruner.epochs).layers.items()}


@pytest.mark.parametrize("kind", [SoftPruner, HardPruner])
@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize(("rate", "streams"), [(0.25, 0.5), (0.5, 0.25), (0.4, 0.0)])
def test_layers_on_a_stream_have_its_rate_and_the_others_theirs(
    kind: type[SoftPruner], selection: str, rate: float, streams: float
) -> None:
    net = create_model("resnet20")
    expected = {}
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            share = streams if writes_stream(name) else rate
            expected |= {name: int(module.out_channels * share + 1e-9)} if share else {}
    assert pruned_counts(kind(net, rate, 1, selection=selection, streams=streams)) == expected


@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize(
    ("name", "align"),
    [
        ("resnet8", 1),
        ("torchvision:mobilenet_v2", 1),
        ("torchvision:resnet18", 8),
        *(pytest.param("torchvision:resnet50", align, marks=pytest.mark.slow) for align in (1, 8)),
    ],
)
def test_compact_networks_stay_exact(name: str, align: int, selection: str) -> None:
    torch.manual_seed(0)
    net = create_model(name).double().eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.1, 0.9)
    example = torch.randn(2, 3, 64, 64, dtype=torch.double)
    SoftPruner(net, 0.2, 1, selection=selection, streams=0.5, align=align, example_inputs=example).step(1)
    small = compact(net, example)
    with torch.no_grad():
        expected = net(example)
        assert (small(example) - expected).abs().max() < 1e-10 * expected.abs().max()
    assert small.plan.macs_after < small.plan.macs_before


def test_coupled_streams_get_narrower_by_their_own_rate() -> None:
    net = create_model("resnet20")
    SoftPruner(net, 0.25, 1, selection="coupled", streams=0.5).step(1)
    small = compact(net, IMAGE)
    assert small.get_submodule("layer1.1.conv1").in_channels == 8
    assert small.get_submodule("layer1.1.conv1").out_channels == 12
    assert small.get_submodule("layer3.1.conv2").out_channels == 32


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["independent", "nested", "coupled"]),
    st.floats(0.05, 0.9),
    st.floats(0.05, 0.9),
    st.sampled_from([1, 8]),
    st.integers(1, 6),
)
def test_the_same_as_a_mapping_that_names_the_layers(
    selection: str, rate: float, streams: float, align: int, epoch: int
) -> None:
    torch.manual_seed(1)
    net, twin = create_model("resnet8"), create_model("resnet8")
    twin.load_state_dict(net.state_dict())
    names = [layer.name for layer in SoftPruner(net, rate, 6, selection=selection).layers]
    mapping = {name: streams if writes_stream(name) else rate for name in names}
    one = SoftPruner(net, rate, 6, selection=selection, streams=streams, align=align)
    other = SoftPruner(twin, None, 6, selection=selection, layers=mapping, align=align, schedule=one.schedule)
    one.step(epoch)
    other.step(epoch)
    assert one.masks.keys() == other.masks.keys()
    for name, mask in other.masks.items():
        assert torch.equal(one.masks[name], mask)


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("torchvision:efficientnet_b0", "features.2.1.block.0.0", "features.2.1.block.3.0"),
        ("torchvision:mobilenet_v3_small", "features.3.block.0.0", "features.3.block.2.0"),
        ("torchvision:regnet_y_400mf", "trunk_output.block2.block2-0.f.a.0", "trunk_output.block2.block2-0.f.c.0"),
    ],
)
def test_a_gate_alone_makes_no_stream(name: str, inside: str, outside: str) -> None:
    """Squeeze and excite multiplies within a block: what it gates is not added to anything, and keeps its rate."""
    example = torch.zeros(1, 3, 64, 64)
    goals = {
        layer.name: layer.goal
        for layer in SoftPruner(create_model(name), 0.3, 1, streams=0.5, example_inputs=example).layers
    }
    assert (goals[inside], goals[outside]) == (0.3, 0.5)
    left = SoftPruner(create_model(name), 0.3, 1, streams=0, example_inputs=example)
    assert {layer.name for layer in left.layers} == {name for name, goal in goals.items() if goal == 0.3}


def test_a_gate_on_a_stream_has_the_rate_of_what_it_gates() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.squeeze, self.gate, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            y = self.last(torch.relu(self.inner(x)))
            gate = torch.sigmoid(self.gate(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
            return self.head(torch.relu(x + y * gate))

    pruner = SoftPruner(Gated(), 0.25, 1, selection="coupled", streams=0.5, example_inputs=torch.zeros(1, 3, 8, 8))
    goals = {layer.name: layer.goal for layer in pruner.layers}
    assert goals == {"stem": 0.5, "inner": 0.25, "last": 0.5, "squeeze": 0.25, "gate": 0.5}


def test_a_predicate_chooses_and_streams_says_how_much() -> None:
    def chosen(name: str, module: nn.Module) -> bool:
        return name.startswith("layer1")

    pruner = SoftPruner(create_model("resnet20"), 0.25, 1, layers=chosen, streams=0.5)
    assert pruned_counts(pruner) == {f"layer1.{i}.conv{k}": 4 * k for i in range(3) for k in (1, 2)}


def test_state_goes_on_with_the_same_streams_only() -> None:
    net = create_model("resnet8")
    pruner = SoftPruner(net, 0.25, 3, selection="coupled", streams=0.5)
    pruner.step(1)
    again = SoftPruner(net, 0.25, 3, selection="coupled", streams=0.5)
    again.load_state_dict(pruner.state_dict())
    assert "streams=0.5" in repr(again)
    with pytest.raises(AsfpError, match="the state was saved with layers="):
        SoftPruner(net, 0.25, 3, selection="coupled").load_state_dict(pruner.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": 1.0}, "streams=1.0 is not a rate: it must be at least 0"),
        ({"streams": -0.1}, "streams=-0.1 is not a rate"),
        ({"streams": True}, "streams=True is not a rate"),
        ({"streams": "half"}, "streams='half' is not a rate"),
        ({"streams": float("nan")}, "streams=nan is not a rate"),
        ({"streams": 0.5, "layers": {"conv1": 0.3}, "rate": None}, "does not go with layers that have rates"),
        ({"streams": 0.0, "layers": lambda name, _: name == "conv1"}, "streams=0 leaves no layer to prune"),
        ({"streams": 0.5, "layers": lambda name, _: name == "layer1.0.conv1"}, "streams=0.5 changes nothing"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    given = {"rate": 0.3} | options
    with pytest.raises(AsfpError, match=message):
        SoftPruner(create_model("resnet8"), epochs=2, **given)


def test_networks_without_residual_streams() -> None:
    with pytest.raises(AsfpError, match=r"streams=0.5 changes nothing: .* leave it out"):
        SoftPruner(create_model("vgg16"), 0.3, 1, streams=0.5)


def test_measured_found_and_built_alike() -> None:
    net = create_model("resnet8")
    found = measure(net, IMAGE, rate=0.25, selection="coupled", streams=0.5)
    assert found.pruned is not None
    small, _ = build(parse_source("resnet8@0.25/0.5:coupled"))
    assert found.pruned.macs_compact == measure(small, IMAGE).macs_conv
    assert found.to_dict()["streams"] == 0.5
    target = rate_for_macs(net, IMAGE, 0.4, selection="coupled", streams=0.5)
    assert target.outcome <= 0.4
    assert target.streams == 0.5
    assert "streams 0.5, coupled" in str(target)
    assert rate_for_macs(net, IMAGE, 0.4, selection="coupled", streams=0.55).rate < target.rate
    with pytest.raises(AsfpError, match=r"cannot be reached: .* or for a higher rate than streams=0$"):
        rate_for_macs(net, IMAGE, 0.01, streams=0.0)
    with pytest.raises(AsfpError, match=r"streams=0.5 is the rate of some layers: give rate="):
        measure(net, IMAGE, streams=0.5)


def test_a_name_with_streams_is_a_file_name(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["export", "resnet8@0.3/0.5:coupled", "--output", str(tmp_path)])
    assert shown.exit_code == 0, shown.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["resnet8-0.3-0.5-coupled.onnx"]


def test_on_the_command_line() -> None:
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["measure", "resnet20", *arguments], env={"COLUMNS": "160"})

    shown = call("--rate", "0.25", "--streams", "0.5", "--selection", "coupled", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert json.loads(shown.stdout)["streams"] == 0.5
    assert "50 % of those on streams" in call("--rate", "0.25", "--streams", "0.5").stdout
    assert "streams 0.5" in call("--target-macs", "0.5", "--streams", "0.5").stdout
    for wrong in ("--streams 0.5", "--rate 0.3 --streams 2", "--target-macs 0.5 --streams 2"):
        shown = call(*wrong.split())
        assert shown.exit_code == 2
        assert "Traceback" not in shown.stderr


def test_in_a_recipe(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "epochs": 1,
        "output": str(tmp_path),
        "model": {"name": "resnet8"},
        "data": {"name": "digits", "size": 8, "batch": 256},
        "optimizer": {"lr": 0.05, "milestones": []},
        "engine": {"accelerator": "cpu", "progress": "none"},
    }
    pruning = {"method": "sfp", "rate": 0.25, "selection": "coupled", "zero_maps": True}
    record = train(config_from(tables | {"pruning": pruning | {"streams": 0.5}}))
    assert record["config"]["pruning"]["streams"] == 0.5
    net, image = create_model("resnet8", in_channels=1), torch.zeros(1, 1, 8, 8)
    found = measure(net, image, rate=0.25, selection="coupled", streams=0.5).pruned
    assert found is not None
    assert record["compact"]["macs"] == found.macs_compact + found.macs_compact_linear
    with pytest.raises(AsfpError, match=r"pruning.streams=-0\.5 is not a rate"):
        config_from(tables | {"pruning": {"streams": -0.5}})
    with pytest.raises(AsfpError, match=r"pruning.streams=0.5 does not go with layers that"):
        config_from(tables | {"pruning": {"streams": 0.5, "layers": {"conv1": 0.2}}})
