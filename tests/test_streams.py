"""Which filters write the same channel: against lists written by hand, and topologies whose answer can be read off."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import asfp
from asfp.flow import Width
from asfp.roles import LEAVES
from asfp.streams import Streams, find_streams, shared_streams
from asfp.trace import trace


def streams_of(model: nn.Module, example_inputs: Any = None) -> Streams:
    return find_streams(model, trace(model, example_inputs, LEAVES))


def sets_of(streams: Streams, widest: Width = Width.FREE) -> set[frozenset[str]]:
    return {frozenset(names) for names in shared_streams(streams, widest)}


# -- real networks


@pytest.mark.parametrize("example", [None, torch.zeros(2, 3, 16, 16)], ids=["no example", "example"])
def test_cifar_resnets_are_one_stream_through_option_a(example: Tensor | None) -> None:
    model = asfp.create_model("resnet20")
    streams = streams_of(model, example)
    last = {"conv1", *(f"layer{s}.{b}.conv2" for s in (1, 2, 3) for b in range(3))}
    assert sets_of(streams) == {frozenset(last)}
    first, second, third = (streams.writes[name].tolist() for name in ("conv1", "layer2.1.conv2", "layer3.0.conv2"))
    assert second[:16] == first
    assert third[:32] == second
    assert len(set(third)) == 64


def test_zero_channels_on_both_sides() -> None:
    model = asfp.create_model("resnet8", shortcut_padding="both")
    streams = streams_of(model)
    assert streams.writes["layer2.0.conv2"].tolist()[8:24] == streams.writes["conv1"].tolist()
    assert streams.writes["layer3.0.conv2"].tolist()[16:48] == streams.writes["layer2.0.conv2"].tolist()


@pytest.mark.parametrize(("name", "last"), [("resnet18", "conv2"), ("resnet50", "conv3"), ("resnext50_32x4d", "conv3")])
def test_torchvision_resnets_have_a_stream_a_stage(name: str, last: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    expected = {
        frozenset(n for n in names if re.fullmatch(rf"layer{stage}\.\d+\.({last}|downsample\.0)", n))
        for stage in (1, 2, 3, 4)
    }
    if name == "resnet18":  # its first stage has no projection: the stem writes it
        expected = {names | {"conv1"} if "layer1.0.conv2" in names else names for names in expected}
    assert sets_of(streams_of(model)) == expected


def test_mobilenet_v2() -> None:
    with torch.device("meta"):
        model = torchvision.models.mobilenet_v2()
    blocks = [(2, 3), (4, 5, 6), (7, 8, 9, 10), (11, 12, 13), (14, 15, 16)]
    streams = streams_of(model)
    assert sets_of(streams) == {frozenset(f"features.{i}.conv.2" for i in b) for b in blocks}
    for i in range(2, 18):
        expansion = streams.writes[f"features.{i}.conv.0.0"].tolist()
        assert streams.follows[f"features.{i}.conv.1.0"].tolist() == expansion


def test_squeeze_and_excite_is_of_the_stream_that_it_scales() -> None:
    with torch.device("meta"):
        streams = streams_of(torchvision.models.efficientnet_b0())
    found = sets_of(streams)
    assert {"features.2.0.block.3.0", "features.2.1.block.3.0"} in found
    assert {"features.3.1.block.0.0", "features.3.1.block.2.fc2"} in found


@pytest.mark.parametrize("name", ["densenet121", "googlenet", "vgg11_bn", "squeezenet1_1", "shufflenet_v2_x0_5"])
def test_concatenation_shares_nothing(name: str) -> None:
    options = {"init_weights": False} if name == "googlenet" else {}
    with torch.device("meta"):
        model = torchvision.models.get_model(name, **options)
        streams = streams_of(model, torch.zeros(2, 3, 64, 64))
    assert sets_of(streams, Width.UNKNOWN) == set()
    trunk = [n for n in streams.writes if "classifier" not in n]
    assert max(streams.width[streams.writes[n]].max() for n in trunk) == Width.FREE


def test_shuffled_channels_reach_the_depthwise_that_reads_them() -> None:
    with torch.device("meta"):
        model = torchvision.models.shufflenet_v2_x0_5()
        streams = streams_of(model, torch.zeros(2, 3, 64, 64))
    read = streams.follows["stage3.0.branch1.0"]  # reads the end of stage 2: halves of two units, shuffled
    halves = {n: streams.writes[n] for n in streams.writes if n.startswith("stage2.")}
    last = halves["stage2.3.branch2.5"]
    assert set(last.tolist()) <= set(read.tolist())
    assert len(set(read.tolist())) == len(read) == 48
    assert read.tolist()[1::2] == last.tolist()  # (2, c / 2) turned: the second half on odd places


def test_layer_norm_and_linear_writers_keep_the_width() -> None:
    with torch.device("meta"):
        streams = streams_of(torchvision.models.convnext_tiny())
    assert {streams.width[ids].max() for ids in streams.writes.values()} == {Width.FULL}


# -- small topologies


class Net(nn.Module):
    """Two convolutions on one input, and what a function makes of their outputs."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Any], a: int = 8, b: int = 8, **layers: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, a, 3, padding=1), nn.Conv2d(3, b, 3, padding=1)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.body = body
        self.end = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.end(self.body(self, self.a(x), self.b(x)))


X = torch.zeros(2, 3, 6, 6)
TOGETHER: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "+": lambda s, a, b: a + b,
    "+=": lambda s, a, b: a.relu().add_(b),
    "torch.add": lambda s, a, b: torch.add(a, b, alpha=2),
    "keywords": lambda s, a, b: torch.add(input=a, other=b),
    "-": lambda s, a, b: b - a,
    "maximum": lambda s, a, b: torch.maximum(a, b),
    "gate": lambda s, a, b: a * torch.sigmoid(b.mean((2, 3), keepdim=True)),
    "gate of features": lambda s, a, b: a * b.mean((2, 3))[:, :, None, None],
    "pools, activations": lambda s, a, b: F.max_pool2d(a.relu(), 2) + F.avg_pool2d(F.silu(b), 2),
    "strided": lambda s, a, b: a[:, :, ::2, ::2] + F.interpolate(b, scale_factor=0.5),
    "numbers": lambda s, a, b: 0.5 * a + (1 - b) / 2,
    "padded in space": lambda s, a, b: F.pad(a, (1, 1)) + F.pad(b, (2, 0, 0, 0), mode="replicate"),
    "dropout": lambda s, a, b: F.dropout(a) + F.dropout2d(b, training=False),
    "cut and joined": lambda s, a, b: torch.cat(a.chunk(4, 1), 1) + torch.cat([b[:, :3], b[:, 3:]], 1),
    "split": lambda s, a, b: torch.cat(torch.split(a, [3, 5], dim=1), 1) + b,
    "last axis": lambda s, a, b: (a.permute(0, 2, 3, 1) + b.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "beside each other": lambda s, a, b: torch.cat([a, b], 2),
    "there and back": lambda s, a, b: a.flatten(2).view(2, 8, 6, 6) + b.unsqueeze(0).squeeze(0),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_same_channel(name: str) -> None:
    streams = streams_of(Net(TOGETHER[name]), X)
    assert streams.writes["a"].tolist() == streams.writes["b"].tolist()
    assert sets_of(streams) == {frozenset("ab")}


@pytest.mark.parametrize(
    ("move", "order"),
    [
        (lambda x: x.flip(1), [7, 6, 5, 4, 3, 2, 1, 0]),
        (lambda x: x.roll(1, 1), [7, 0, 1, 2, 3, 4, 5, 6]),
        (lambda x: torch.cat([x[:, 4:], x[:, :4]], 1), [4, 5, 6, 7, 0, 1, 2, 3]),
        (lambda x: F.channel_shuffle(x, 2), [0, 4, 1, 5, 2, 6, 3, 7]),
        (lambda x: x.view(2, 2, 4, 6, 6).transpose(1, 2).reshape(2, 8, 6, 6), [0, 4, 1, 5, 2, 6, 3, 7]),
        (lambda x: x.index_select(1, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])), None),
    ],
)
def test_moved_channels(move: Callable[[Tensor], Tensor], order: list[int] | None) -> None:
    streams = streams_of(Net(lambda s, a, b: a + move(b)), X)
    if order is None:  # the index is a tensor, which is not followed
        assert sets_of(streams, Width.FULL) == set()
    else:
        assert streams.writes["a"].tolist() == streams.writes["b"][order].tolist()


def test_offsets_of_a_concatenation() -> None:
    net = Net(lambda s, a, b: torch.cat([a, b], 1) + s.c(a), a=3, b=5, c=nn.Conv2d(3, 8, 1))
    streams = streams_of(net)
    assert streams.writes["c"].tolist() == [*streams.writes["a"].tolist(), *streams.writes["b"].tolist()]


def test_a_narrow_shortcut_is_padded_with_nothing() -> None:
    net = Net(lambda s, a, b: F.pad(a, (0, 0, 0, 0, 2, 3)) + b, a=3)
    streams = streams_of(net)
    assert streams.writes["b"].tolist()[2:5] == streams.writes["a"].tolist()
    assert len(set(streams.writes["b"].tolist())) == 8


def test_depthwise_goes_along() -> None:
    net = Net(lambda s, a, b: s.dw(a) + b, a=4, dw=nn.Conv2d(4, 8, 3, padding=1, groups=4))
    streams = streams_of(net)
    assert streams.follows["dw"].tolist() == np.repeat(streams.writes["a"], 2).tolist()
    assert streams.writes["b"].tolist() == streams.follows["dw"].tolist()


def test_shared_layer_and_tied_weight() -> None:
    net = Net(lambda s, a, b: s.c(a) + s.c(b) + s.d(a), c=nn.Conv2d(8, 8, 1), d=nn.Conv2d(8, 8, 1))
    net.d.weight = net.c.weight
    streams = streams_of(net)
    assert streams.writes["c"] is streams.writes["d"]
    assert sets_of(streams, Width.UNKNOWN) == set()


ENDS: dict[str, tuple[Width, Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "group norm": (Width.FULL, lambda s, a, b: a + b + s.norm(a)),
    "softmax": (Width.FULL, lambda s, a, b: a + b + F.softmax(a, 1)),
    "mean over channels": (Width.FULL, lambda s, a, b: a + b + a.mean(1, keepdim=True)),
    "input": (Width.FULL, lambda s, a, b: a + b + s.x),
    "linear": (Width.FULL, lambda s, a, b: a + b + s.linear(a.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "linear over pixels": (Width.FULL, lambda s, a, b: a + b + s.pixels(a)),
    "map for all": (Width.FULL, lambda s, a, b: (a + b) + s.one(a)),
    "cumsum": (Width.UNKNOWN, lambda s, a, b: a + b + a.cumsum(1)),
    "written into": (Width.UNKNOWN, lambda s, a, b: s.write(a) + b),
    "sorted": (Width.UNKNOWN, lambda s, a, b: a + b + a.sort(1).values),
    "matmul": (Width.UNKNOWN, lambda s, a, b: a + b + a @ b),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_a_stream(name: str) -> None:
    width, body = ENDS[name]

    class Ending(Net):
        x: Tensor

        def write(self, x: Tensor) -> Tensor:
            x = x + 0
            x[:, 0] = 0.25
            return x

        def forward(self, x: Tensor) -> Any:
            self.x = F.pad(x, (0, 0, 0, 0, 0, 5))
            return super().forward(x)

    net = Ending(body, norm=nn.GroupNorm(2, 8), linear=nn.Linear(8, 8), pixels=nn.Linear(6, 6), one=nn.Conv2d(8, 1, 1))
    streams = streams_of(net, X)
    assert streams.width[streams.writes["a"]].max() == width
    assert sets_of(streams, Width(width - 1)) == set()
    assert sets_of(streams, width) == {frozenset("ab")}


def test_output_keeps_its_width() -> None:
    net = Net(lambda s, a, b: a + b)
    net.end = nn.Identity()
    assert sets_of(streams_of(net)) == set()
    assert sets_of(streams_of(net), Width.FULL) == {frozenset("ab")}


def test_parameters_and_spatial_gates_do_not_end_it() -> None:
    net = Net(lambda s, a, b: (a * s.scale + b + s.shift) * torch.sigmoid(s.one(a)), one=nn.Conv2d(8, 1, 1))
    net.scale, net.shift = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.ones(1, 8, 1, 1))
    assert sets_of(streams_of(net)) == {frozenset("ab")}
    net.shift = nn.Parameter(torch.ones(8, 6, 6))
    assert sets_of(streams_of(net)) == set()


@pytest.mark.parametrize(("name", "streams"), [("efficientnet_b0", 21), ("resnet26d", 4), ("hrnet_w18_small", 9)])
def test_timm_in_training_with_stochastic_depth(name: str, streams: int) -> None:
    timm = pytest.importorskip("timm")
    options = {} if name.startswith("hrnet") else {"drop_path_rate": 0.2}
    with torch.device("meta"):
        model = timm.create_model(name, **options).train()
        found = streams_of(model, torch.zeros(2, 3, 64, 64))
    assert len(shared_streams(found, Width.FREE)) == len(shared_streams(found, Width.UNKNOWN)) == streams
