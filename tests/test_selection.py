"""Which layers are pruned: roles read from the graph, against lists that were written without it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import asfp
from asfp import AsfpError, SoftPruner, TraceError
from asfp.roles import LEAVES, Roles, find_roles, is_depthwise
from asfp.selection import select, unwrap
from asfp.trace import trace

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def roles_of(model: nn.Module, example_inputs: Any = None) -> Roles:
    return find_roles(model, trace(model, example_inputs, LEAVES))


def convolutions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)]


def torchvision_model(name: str) -> nn.Module:
    keywords = {"googlenet": {"aux_logits": False}, "inception_v3": {"aux_logits": False}}.get(name, {})
    if name in ("googlenet", "inception_v3"):
        keywords["init_weights"] = False
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        return torchvision.models.get_model(name, weights=None, **keywords)


# -- projections: torchvision's and timm's own names say which they are

RESIDUAL = [
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2",
    "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d",
    *(f"regnet_{kind}" for kind in ("x_400mf", "x_800mf", "x_1_6gf", "y_400mf", "y_800mf", "y_1_6gf")),
]  # fmt: skip
NONE = [
    "alexnet", "vgg16", "vgg16_bn", "densenet121", "densenet169", "densenet161", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "efficientnet_b0", "efficientnet_b3", "efficientnet_v2_s", "mnasnet1_0", "shufflenet_v2_x1_0",
    "squeezenet1_1", "googlenet", "inception_v3", "convnext_tiny",
]  # fmt: skip


@pytest.mark.parametrize("name", RESIDUAL)
def test_projections_of_torchvision(name: str) -> None:
    model = torchvision_model(name)
    expected = {n for n in convolutions(model) if ".downsample." in n or ".proj." in n}
    assert len(expected) >= 3
    assert roles_of(model).projections == expected


@pytest.mark.parametrize("name", NONE)
def test_no_projections_in_torchvision(name: str) -> None:
    inputs = torch.zeros(2, 3, 64, 64, device="meta") if name.startswith("shufflenet") else None
    assert roles_of(torchvision_model(name), inputs).projections == frozenset()


@pytest.mark.parametrize("name", ["r3d_18", "mc3_18", "r2plus1d_18"])
def test_projections_of_video_models(name: str) -> None:
    model = torchvision_model(name)
    assert roles_of(model).projections == {n for n in convolutions(model) if "downsample" in n}


@pytest.mark.parametrize("depth", [20, 32, 56, 110])
def test_cifar_resnets_have_none(depth: int) -> None:
    model = asfp.create_model(f"resnet{depth}")
    assert roles_of(model).projections == frozenset()
    assert len(select(model, None, 0.4)) == depth - 1


def test_cifar_vgg_is_pruned_whole() -> None:
    assert len(select(asfp.create_model("vgg16"), None, 0.4)) == 13


@pytest.mark.parametrize(
    "name",
    ["resnet18", "resnet50d", "resnet26t", "seresnet50", "ecaresnet26t", "regnetx_002", "regnety_002", "resnetv2_50"],
)
def test_projections_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    device = "cpu" if name.startswith("regnet") else "meta"
    with torch.device(device):
        model = timm.create_model(name)
    expected = {n for n in convolutions(model) if "downsample" in n}
    assert len(expected) >= 3
    assert roles_of(model, torch.zeros(1, 3, 64, 64, device=device)).projections == expected


# -- small topologies


class Net(nn.Module):
    """A model from a function of its own layers and the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.body = forward
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self, x).mean((2, 3)))


def conv(i: int = 8, o: int = 8, **keywords: Any) -> nn.Conv2d:
    return nn.Conv2d(i, o, 3, padding=1, **keywords)


ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda a, b: a + b,
    "torch.add": torch.add,
    "torch.add keywords": lambda a, b: torch.add(input=a, other=b),
    "add": lambda a, b: a.add(b),
    "add_": lambda a, b: a.add_(b),
    "reversed": lambda a, b: b + a,
}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_each_way_to_write_an_addition(addition: str) -> None:
    net = Net(lambda s, x: ADDITIONS[addition](s.b(s.a(x)), s.short(x)), a=conv(), b=conv(), short=conv())
    assert roles_of(net).projections == {"short"}


def test_inplace_addition() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.b(self.a(x))
        out += self.bn(self.short(x))
        return out

    net = Net(forward, a=conv(), b=conv(), short=conv(), bn=nn.BatchNorm2d(8))
    assert roles_of(net).projections == {"short"}


def test_one_against_one_is_no_projection() -> None:
    net = Net(lambda s, x: s.three(x) + s.one(x), three=conv(), one=nn.Conv2d(8, 8, 1))
    assert roles_of(net).projections == frozenset()


def test_repvgg_branches_are_no_projections() -> None:
    net = Net(
        lambda s, x: s.relu(s.three(x) + s.one(x) + s.same(x) + s.other(x)),
        three=conv(), one=nn.Conv2d(8, 8, 1), same=nn.BatchNorm2d(8), other=conv(), relu=nn.ReLU(),
    )  # fmt: skip
    assert roles_of(net).projections == frozenset()


def test_shared_shortcut_of_two_blocks() -> None:
    net = Net(
        lambda s, x: s.d(s.c(s.b(s.a(x)) + s.short(x))) + s.short(x),
        a=conv(), b=conv(), c=conv(), d=conv(), short=conv(),
    )  # fmt: skip
    assert roles_of(net).projections == {"short"}


def test_preactivation_shortcut() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = self.bn(x).relu()
        return self.b(self.a(out).relu()) + self.short(out)

    net = Net(forward, bn=nn.BatchNorm2d(8), a=conv(), b=conv(), short=conv())
    assert roles_of(net).projections == {"short"}


def test_inputs_that_share_no_fork() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.head = conv(), conv(), conv(), conv()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.b(self.a(x)) + self.c(y))

    assert roles_of(Two()).projections == frozenset()


def test_position_embedding_is_no_fork() -> None:
    net = Net(lambda s, x: (s.b(s.a(x)) + s.p) + (s.c(x[:, :, :1]) + s.p), a=conv(), b=conv(), c=conv())
    net.p = nn.Parameter(torch.zeros(8, 1, 1))
    assert roles_of(net).projections == {"c"}


# -- depthwise convolutions, batch norms, outputs


@pytest.mark.parametrize("name", ["mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "mnasnet1_0"])
def test_depthwise_follow_what_feeds_them(name: str) -> None:
    model = torchvision_model(name)
    modules = dict(model.named_modules())
    roles = roles_of(model)
    depthwise = [n for n in convolutions(model) if is_depthwise(modules[n])]
    previous = dict(zip(convolutions(model)[1:], convolutions(model), strict=False))
    assert len(depthwise) > 10
    for n in depthwise:
        feeder = previous[n]
        fed = modules[feeder].out_channels == modules[n].in_channels and not is_depthwise(modules[feeder])
        stem_of_block_without_expansion = ".conv.0." in n or ".block.0." in n or ".layers.0." in n
        if n in roles.feeders:
            assert roles.feeders[n] == (feeder, 1)
        else:
            assert stem_of_block_without_expansion or not fed
    assert len(roles.feeders) >= len(depthwise) - 2


def test_depthwise_on_a_residual_stream_is_left_alone() -> None:
    net = Net(lambda s, x: s.dw((x := s.a(x)) + s.b(x)), a=conv(), b=conv(), dw=conv(groups=8))
    assert roles_of(net).feeders == {}
    assert [layer.followers for layer in select(net, None, 0.5)] == [(), ()]
    convnext = roles_of(torchvision_model("convnext_tiny")).feeders
    assert convnext == {f"features.{i}.0.block.0": (f"features.{i - 1}.1", 1) for i in (3, 5, 7)}


@pytest.mark.parametrize(
    "between",
    [
        nn.ReLU6(inplace=True), nn.Hardswish(), nn.BatchNorm2d(8), nn.Dropout2d(), nn.MaxPool2d(2), nn.PReLU(8),
        nn.Identity(), nn.ZeroPad2d(1), nn.Upsample(scale_factor=2), nn.Sequential(nn.BatchNorm2d(8), nn.SiLU()),
    ],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_feeder_through(between: nn.Module) -> None:
    net = Net(lambda s, x: s.pw(s.dw(s.between(s.a(x)))), a=conv(), between=between, dw=conv(groups=8), pw=conv())
    assert roles_of(net).feeders == {"dw": ("a", 1)}


@pytest.mark.parametrize(
    "between",
    [
        lambda x: nn.functional.relu(x, inplace=True), torch.relu, lambda x: x.relu_(), lambda x: x.clamp(0, 6),
        lambda x: nn.functional.max_pool2d(x, 2), lambda x: nn.functional.interpolate(x, scale_factor=2),
        lambda x: nn.functional.hardswish(x).contiguous(),
    ],
)  # fmt: skip
def test_feeder_through_functions(between: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda s, x: s.pw(s.dw(between(s.a(x)))), a=conv(), dw=conv(groups=8), pw=conv())
    assert roles_of(net).feeders == {"dw": ("a", 1)}


@pytest.mark.parametrize(
    "between", [lambda x: x.flip(1), lambda x: x + 0 * x.roll(1, 1), lambda x: nn.functional.glu(x, 1)]
)
def test_no_feeder_through_what_mixes_channels(between: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda s, x: s.pw(s.dw(between(s.a(x)))), a=conv(), dw=conv(groups=8), pw=conv())
    assert roles_of(net).feeders == {}


def test_channel_multipliers_and_chains() -> None:
    net = Net(
        lambda s, x: s.pw(s.dw2(s.dw1(s.a(x)).relu())),
        a=conv(8, 4), dw1=conv(4, 8, groups=4), dw2=conv(8, 24, groups=8), pw=conv(24, 8),
    )  # fmt: skip
    assert roles_of(net).feeders == {"dw1": ("a", 2), "dw2": ("a", 6)}


def test_norms() -> None:
    model = torchvision_model("resnet50")
    norms = {n: name for n, m in roles_of(model).norms.items() for name, k in model.named_modules() if k is m}
    expected = {
        n: re.sub(r"conv(\d)$", r"bn\1", n).replace("downsample.0", "downsample.1") for n in convolutions(model)
    }
    assert norms == expected


def test_a_norm_of_two_convolutions_belongs_to_neither() -> None:
    net = Net(lambda s, x: s.bn(s.a(x)) + s.bn(s.b(x)), a=conv(), b=conv(), bn=nn.BatchNorm2d(8))
    assert roles_of(net).norms == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("squeezenet1_1", {"classifier.1"}),
        ("resnet18", set()),
        ("mobilenet_v3_small", set()),
        ("fcn_resnet50", {"classifier.4"}),
        ("lraspp_mobilenet_v3_large", {"classifier.low_classifier", "classifier.high_classifier"}),
    ],
)
def test_output_convolutions(name: str, expected: set[str]) -> None:
    segmentation = name.startswith(("fcn", "lraspp"))
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **({"weights_backbone": None} if segmentation else {}))
    inputs = torch.zeros(2, 3, 64, 64, device="meta") if segmentation else None
    assert roles_of(model, inputs).outputs == expected


def test_last_convolution_of_a_headless_trunk_is_its_output() -> None:
    net = nn.Sequential(conv(), nn.ReLU(), conv(), nn.BatchNorm2d(8), nn.ReLU(), conv(groups=8))
    roles = roles_of(net)
    assert roles.outputs == {"2", "5"}
    assert [layer.name for layer in select(net, None, 0.5)] == ["0"]


# -- the default rule, predicates, mappings


def test_default_of_resnet50() -> None:
    model = torchvision_model("resnet50")
    assert [layer.name for layer in select(model, None, 0.3)] == [
        n for n in convolutions(model) if "downsample" not in n
    ]
    assert {layer.goal for layer in select(model, None, 0.3)} == {0.3}


def test_predicate_decides_freely() -> None:
    model = torchvision_model("resnet18")
    chosen = select(model, lambda name, module: "downsample" in name and isinstance(module, nn.Conv2d), 0.5)
    assert [layer.name for layer in chosen] == [n for n in convolutions(model) if "downsample" in n]
    first = select(model, lambda name, module: name.endswith("conv1"), 0.5)
    assert len(first) == 9


def test_predicate_is_not_asked_about_depthwise() -> None:
    model = torchvision_model("mobilenet_v2")
    chosen = select(model, lambda name, module: True, 0.5)
    assert not any(is_depthwise(layer.module) for layer in chosen)
    assert sum(len(layer.followers) for layer in chosen) == 17


def test_mapping() -> None:
    net = asfp.create_model("vgg16")
    names = convolutions(net)
    chosen = select(net, {names[0]: 0.5, names[9]: 0.25, names[3]: 0}, None)
    assert [(layer.name, layer.goal) for layer in chosen] == [(names[0], 0.5), (names[9], 0.25)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"layer1.0.conv3": 0.5}, r"'layer1\.0\.conv3'.*not a convolution.*Did you mean layer1\.0\.conv"),
        ({"fc": 0.5}, r"'fc'.*not a convolution"),
        ({7: 0.5}, r"names 7.*not a convolution"),
        ({"conv1": 1.0}, r"layers\['conv1'\]=1\.0.*at least 0 and below 1"),
        ({"conv1": -0.1}, r"layers\['conv1'\]=-0\.1.*at least 0 and below 1"),
        ({"conv1": True}, r"layers\['conv1'\]=True"),
        ({"conv1": "0.4"}, r"layers\['conv1'\]='0\.4'"),
        ({"conv1": float("nan")}, r"layers\['conv1'\]=nan"),
        ({"conv1": 0}, r"prunes nothing.*above 0"),
        ({}, r"prunes nothing"),
        (["conv1"], r"layers=\['conv1'\].*predicate.*mapping"),
        ("conv1", r"layers='conv1'.*predicate.*mapping"),
        (lambda name, module: False, r"no layer is left to prune: the predicate chose none.*conv1.*layers="),
    ],
)
def test_wrong_layers(layers: Any, message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        select(torchvision_model("resnet18"), layers, 0.4)


def test_mapping_cannot_name_a_depthwise() -> None:
    with pytest.raises(AsfpError, match=r"'features\.1\.conv\.0\.0'.*no choice of its own.*leave it out"):
        select(torchvision_model("mobilenet_v2"), {"features.1.conv.0.0": 0.4}, None)


def test_models_with_nothing_to_prune() -> None:
    with pytest.raises(AsfpError, match=r"Sequential has no convolution.*pass a CNN"):
        SoftPruner(nn.Sequential(nn.Linear(3, 3)), 0.4, 10)
    with pytest.raises(AsfpError, match=r"no layer is left to prune.*makes the model's output.*layers="):
        SoftPruner(nn.Sequential(conv()), 0.4, 10)
    with pytest.raises(AsfpError, match=r"model='resnet18' is not a torch\.nn\.Module"):
        SoftPruner("resnet18", 0.4, 10)  # type: ignore[arg-type]


def test_weights_that_cannot_be_zeroed() -> None:
    net = Net(lambda s, x: s.a(x), a=nn.utils.parametrizations.weight_norm(conv()))
    with pytest.raises(AsfpError, match=r"weight of 'a' is computed.*remove its parametrisation.*layers="):
        select(net, None, 0.4)
    lazy = Net(lambda s, x: s.a(x), a=nn.LazyConv2d(8, 3))
    with pytest.raises(AsfpError, match=r"weight of 'a' is not initialised.*run the model once"):
        select(lazy, None, 0.4)


def test_transposed_and_grouped() -> None:
    net = Net(
        lambda s, x: s.d(s.c(s.b(s.a(x)))),
        a=conv(groups=4), b=nn.ConvTranspose2d(8, 6, 3), c=nn.ConvTranspose2d(6, 8, 3, groups=2), d=conv(),
    )  # fmt: skip
    chosen = {layer.name: layer for layer in select(net, None, 0.5)}
    assert set(chosen) == {"a", "b", "d"}
    assert tuple(chosen["b"].weight.shape) == (6, 8, 3, 3)
    assert chosen["b"].filters == 6


def test_tied_weights_are_one_layer() -> None:
    net = Net(lambda s, x: s.c(s.b(s.a(x))), a=conv(), b=conv(), c=conv())
    net.b.weight = net.a.weight  # type: ignore[assignment,union-attr]
    net.c = net.a
    assert [layer.name for layer in select(net, None, 0.5)] == ["a"]
    with pytest.raises(AsfpError, match=r"'a' the rate 0\.5 and 'b' the rate 0\.25.*share one weight"):
        select(net, {"a": 0.5, "b": 0.25}, None)


# -- models that cannot be traced


class Branching(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.a, self.bn, self.b, self.head = conv(), nn.BatchNorm2d(8), conv(**keywords), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x))
        if x.sum() > 0:
            x = self.b(x)
        return self.head(x.mean((2, 3)))


def test_untraceable_by_default_says_how_to_go_on() -> None:
    with pytest.raises(TraceError, match=r"projection shortcuts.*example_inputs=.*layers=lambda name, module"):
        SoftPruner(Branching(), 0.4, 10)


def test_untraceable_with_layers_works() -> None:
    assert [layer.name for layer in select(Branching(), lambda name, module: True, 0.5)] == ["a", "b"]
    assert [layer.name for layer in select(Branching(), {"b": 0.5}, None)] == ["b"]


@pytest.mark.parametrize("keywords", [{"criterion": "bn_scale"}, {"zero_maps": True}])
def test_untraceable_without_batch_norms(keywords: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r"batch norm behind each convolution.*criterion such as \"l2\""):
        SoftPruner(Branching(), 0.5, 10, layers=lambda name, module: True, **keywords)


def test_untraceable_depthwise_is_said() -> None:
    with pytest.warns(UserWarning, match=r"Depthwise convolutions are left alone"):
        chosen = select(Branching(groups=8), lambda name, module: True, 0.5)
    assert [layer.name for layer in chosen] == ["a"]


def test_shapes_in_forward_need_example_inputs() -> None:
    net = Net(lambda s, x: s.b(s.a(x)) if x.shape[-1] > 4 else s.a(x), a=conv(), b=conv())
    with pytest.raises(TraceError, match=r"example_inputs="):
        SoftPruner(net, 0.4, 10)
    assert [layer.name for layer in SoftPruner(net, 0.4, 10, example_inputs=torch.zeros(1, 8, 6, 6)).layers] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    "example_inputs",
    [
        None,
        torch.zeros(2, 3, 32, 32),
        torch.zeros(1, 3, 4, 4),  # maps of one pixel: too little for batch norm in training
    ],
)
def test_tracing_leaves_the_model_alone(example_inputs: Tensor | None) -> None:
    model = asfp.create_model("resnet20").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SoftPruner(model, 0.4, 10, example_inputs=example_inputs)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_unwrap() -> None:
    net = conv()
    assert unwrap(net) is net
    assert unwrap(torch.compile(net, backend="eager")) is net  # type: ignore[arg-type]
    assert unwrap(torch.compile(nn.DataParallel(net), backend="eager")) is net  # type: ignore[arg-type]
