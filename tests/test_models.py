"""The CIFAR networks against the paper's counts, and names to models."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asfp
from asfp import AsfpError, create_model
from asfp.models import MODELS, CifarResNet


def convolution_macs(model: nn.Module, x: Tensor) -> int:
    """Multiply-adds of all convolutions, counted from what really passes through them."""
    total = 0

    def count(module: nn.Conv2d, _: object, output: Tensor) -> None:
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model.eval()(x)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("resnet110", 1_727_962),
        ("vgg16", 14_987_722),
    ],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in create_model(name).parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "macs", "printed"),
    [
        ("resnet20", 40_550_400, "4.055E+07"),
        ("resnet32", 68_861_952, "6.886E+07"),
        ("resnet56", 125_485_056, "1.2549E+08"),
        ("resnet110", 252_887_040, "2.5289E+08"),
        ("vgg16", 313_196_544, "3.132E+08"),
    ],
)
def test_dense_macs_are_those_of_the_paper(name: str, macs: int, printed: str) -> None:
    counted = convolution_macs(create_model(name), torch.zeros(1, 3, 32, 32))
    assert counted == macs
    digits = len(printed.split("E")[0].split(".")[1])
    assert f"{counted:.{digits}E}" == printed


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
@pytest.mark.parametrize("size", [(16, 16), (32, 32), (33, 47)])
def test_any_input_size_and_channels(name: str, size: tuple[int, int]) -> None:
    model = create_model(name, num_classes=7, in_channels=1).eval()
    assert model(torch.randn(2, 1, *size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
def test_models_trace_and_export_to_the_same_function(name: str) -> None:
    model = create_model(name).eval()
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_shortcut_appends_zero_channels_and_takes_every_second_pixel() -> None:
    model = create_model("resnet20")
    assert isinstance(model, CifarResNet)
    x = torch.randn(2, 16, 6, 6)
    out = model.layer2[0].shortcut(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert out.shape == (2, 32, 3, 3)
    assert not out[:, 16:].any()
    both = create_model("resnet20", shortcut_padding="both").layer2[0].shortcut(x)
    assert torch.equal(both[:, 8:24], x[:, :, ::2, ::2])
    assert not both[:, :8].any()
    assert not both[:, 24:].any()


def test_resnet_has_no_projection_and_only_3x3_convolutions() -> None:
    convolutions = [m for m in create_model("resnet56").modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 55
    assert {c.kernel_size for c in convolutions} == {(3, 3)}
    assert all(c.bias is None for c in convolutions)


@pytest.mark.parametrize(("name", "scale"), [("resnet56", 1.0), ("vgg16", 0.5)])
def test_initialisation(name: str, scale: float) -> None:
    model = create_model(name)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            wanted = math.sqrt(2 / (9 * module.out_channels))
            assert module.weight.std().item() == pytest.approx(wanted, rel=0.05)
            assert abs(module.weight.mean().item()) < 5 * wanted / math.sqrt(module.weight.numel())
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == scale).all()
            assert not module.bias.any()
        elif isinstance(module, nn.Linear):
            assert not module.bias.any()


@pytest.mark.parametrize("name", ["resnet20", "resnet110", "vgg16"])
def test_a_training_step_reaches_every_weight(name: str) -> None:
    model = create_model(name)
    model(torch.randn(4, 3, 32, 32)).logsumexp(1).sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # a linear bias in front of batch norm has no effect, so its gradient is zero up to rounding
    assert set(dead) <= {"classifier.linear1.bias"}


def test_vgg_names_its_convolutions_by_number() -> None:
    widths = {n: m.out_channels for n, m in create_model("vgg16").named_modules() if isinstance(m, nn.Conv2d)}
    expected = [64, 64, 128, 128, 256, 256, 256] + 6 * [512]
    assert widths == {f"features.conv{i}": w for i, w in enumerate(expected, 1)}


@pytest.mark.parametrize("depth", [2, 9, 18, 54, -4])
def test_impossible_depths(depth: int) -> None:
    with pytest.raises(AsfpError, match=rf"depth={depth} .*6n \+ 2"):
        CifarResNet(depth)


@pytest.mark.parametrize("name", ["resnet20", "vgg16"])
@pytest.mark.parametrize("kwargs", [{"num_classes": 0}, {"in_channels": -1}])
def test_impossible_widths(name: str, kwargs: dict[str, int]) -> None:
    with pytest.raises(AsfpError, match="at least 1"):
        create_model(name, **kwargs)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("resnet65", {}, r"'resnet65'\. Did you mean resnet56\? Known: resnet8, "),
        ("resnet50", {}, r'create_model\("torchvision:resnet50"\)'),
        ("resnet20", {"classes": 10}, r"resnet20 cannot be built with \(classes=10\): .*'classes'"),
        ("resnet20", {"shortcut_padding": "left"}, r"'left' is unknown: use \"after\" or \"both\""),
        ("vgg16", {"shortcut_padding": "after"}, r"vgg16 cannot be built with"),
        ("torchvision:resnet5", {}, r"torchvision has no model named 'resnet5'\. Did you mean .*resnet50"),
        ("torchvision:resnet18", {"in_channels": 1}, r"torchvision:resnet18 cannot be built with \(in_channels=1\)"),
        ("torchvision:resnet18", {"weights": "NONE_SUCH"}, r"torchvision:resnet18 cannot be built"),
        ("torchvision:", {}, r"torchvision has no model named ''"),
        ("keras:resnet50", {}, r"the library 'keras': use torchvision:NAME, timm:NAME"),
        ("", {}, r"no model is named ''"),
    ],
)
def test_wrong_names_and_arguments(name: str, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(AsfpError, match=message):
        create_model(name, **kwargs)


def test_torchvision_segmentation_needs_no_download() -> None:
    model = create_model("torchvision:fcn_resnet50", num_classes=4).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 33, 33))["out"].shape == (1, 4, 33, 33)


def test_torchvision_resnet50_is_torchvisions() -> None:
    model = create_model("torchvision:resnet50")
    assert type(model).__module__ == "torchvision.models.resnet"
    assert sum(p.numel() for p in model.parameters()) == 25_557_032


def test_timm_passes_arguments_through() -> None:
    pytest.importorskip("timm")
    model = create_model("timm:resnet18", num_classes=5, in_chans=1).eval()
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 5)
    with pytest.raises(AsfpError, match=r"timm has no model named 'resnet81'\. Did you mean .*resnet18"):
        create_model("timm:resnet81")
    with pytest.raises(AsfpError, match=r"timm:resnet18 cannot be built with \(colour='red'\)"):
        create_model("timm:resnet18", colour="red")


def test_without_timm_the_error_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['timm'] = None\n"
        "import asfp\n"
        "try:\n    asfp.create_model('timm:resnet18')\n"
        "except asfp.AsfpError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "timm:resnet18 needs timm, which is not installed: pip install asfp[timm]\n"


def test_every_name_of_the_registry_builds() -> None:
    for name in MODELS:
        if name != "resnet1202":  # 19 million weights: the same code as the others
            assert isinstance(asfp.create_model(name), nn.Module)


@pytest.mark.parametrize("name", ["x" * 400, "x\0y"])
def test_what_cannot_be_a_path_is_an_unknown_name(name: str) -> None:
    with pytest.raises(asfp.AsfpError, match="no model is named"):
        asfp.create_model(name)


@pytest.mark.parametrize("name", [3, None, ["resnet20"]])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(asfp.AsfpError, match="a model is asked for by its name"):
        asfp.create_model(name)


def test_a_file_of_weights_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    with pytest.raises(asfp.AsfpError, match=r"It is a file: .* weights alone need asfp compact FILE --model NAME"):
        asfp.create_model(str(tmp_path / "model.pt"))
