"""Every convolutional classifier and segmentation network of torchvision, and timm's families, stays exact."""

from __future__ import annotations

import pytest
import torch
import torchvision
from networks import assert_equal, zero_filters

import asfp

LEFT_OUT = ("vit", "swin", "maxvit", "quantized", "rcnn", "retinanet", "fcos", "ssd", "raft")
VIDEO = ("r3d", "mc3", "r2plus1d", "s3d", "mvit")
ZOO = [n for n in torchvision.models.list_models() if not any(k in n for k in (*LEFT_OUT, *VIDEO))]
QUICK = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "densenet121": 32,
    "deeplabv3_mobilenet_v3_large": 64,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "fcn_resnet50": 32,
    "googlenet": 64,
    "inception_v3": 96,
    "lraspp_mobilenet_v3_large": 64,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "regnet_x_400mf": 32,
    "regnet_y_400mf": 32,
    "resnet18": 64,
    "resnet50": 64,
    "resnext50_32x4d": 32,
    "shufflenet_v2_x1_0": 64,
    "squeezenet1_1": 64,
    "vgg11_bn": 32,
}


def make(name: str) -> torch.nn.Module:
    segmentation = any(k in name for k in ("fcn", "deeplab", "lraspp"))
    options = {"weights_backbone": None} if segmentation else {}
    options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    torch.manual_seed(0)
    return zero_filters(torchvision.models.get_model(name, weights=None, **options)).eval()


def narrow(model: torch.nn.Module) -> torch.nn.Module:
    """AlexNet and VGG with 64 hidden units instead of 4096: the same topology, a hundredth of the weights."""
    layers = [m for m in getattr(model, "classifier", torch.nn.Module()).modules() if isinstance(m, torch.nn.Linear)]
    if len(layers) == 3:
        model.classifier = torch.nn.Sequential(
            torch.nn.Linear(layers[0].in_features, 64), torch.nn.ReLU(True), torch.nn.Dropout(), torch.nn.Linear(64, 10)
        )
    return model.eval()


def check(name: str, size: int, *, quick: bool = False) -> asfp.Plan:
    model = narrow(make(name)) if quick else make(name)
    small = asfp.compact(model, torch.randn(1, 3, size, size), check=False)
    assert_equal(model, small, (1, 3, size, size), (3, 3, size, size), (2, 3, size + 32, size + 32))
    model.double()
    exact = asfp.compact(model, torch.randn(1, 3, size, size, dtype=torch.float64), check=False)
    assert_equal(model, exact, (1, 3, size, size), (2, 3, size + 32, size + 32))
    return small.plan


def test_the_zoo_is_whole() -> None:
    assert len(ZOO) >= 74
    assert set(QUICK) <= set(ZOO)


@pytest.mark.parametrize(("name", "size"), QUICK.items())
def test_a_model_of_each_family(name: str, size: int) -> None:
    plan = check(name, size, quick=True)
    assert plan.macs_after < plan.macs_before


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model(name: str) -> None:
    plan = check(name, 96 if "inception" in name else 64)
    assert plan.macs_after < plan.macs_before


# One model a family.
TIMM_QUICK = ["mobilenetv4_conv_small", "tf_efficientnet_b0", "repvgg_a0", "ghostnet_050"]
# fmt: off
TIMM = [
    "resnet18", "resnetv2_50", "resnetv2_50x1_bit", "legacy_seresnet18", "res2net50_26w_4s", "regnetx_002",
    "regnety_002", "efficientnet_b0", "tf_efficientnet_b0", "mobilenetv2_050", "mobilenetv3_small_050",
    "mobilenetv4_conv_small", "ghostnet_050", "ghostnetv2_100", "convnext_atto", "eca_nfnet_l0", "dm_nfnet_f0",
    "densenet121", "dla34", "dpn48b", "hrnet_w18_small", "ese_vovnet19b_dw", "cspresnet50", "repvgg_a0",
    "inception_v3", "inception_v4", "inception_resnet_v2", "inception_next_atto", "xception41", "legacy_xception",
    "selecsls42", "tresnet_m", "fasternet_t0", "repvit_m0_9", "starnet_s1", "mixnet_s", "rexnet_100", "skresnet18",
    "resnest14d", "ecaresnet26t", "nasnetalarge", "pnasnet5large", "vgg11_bn", "efficientvit_b0", "edgenext_xx_small",
    "mobileone_s0", "hgnetv2_b0", "darknet53", "convmixer_768_32", "mambaout_femto", "repghostnet_050", "gernet_s",
    "lcnet_050",
]
# fmt: on


def check_timm(name: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    model = zero_filters(timm.create_model(name)).double().eval()
    size = 128 if any(k in name for k in ("inception", "nasnet", "xception", "nfnet")) else 64
    small = asfp.compact(model, torch.randn(2, 3, size, size, dtype=torch.float64), check=False)
    assert_equal(model, small, (2, 3, size, size), (1, 3, size, size))


@pytest.mark.filterwarnings("ignore")  # timm's own
@pytest.mark.parametrize("name", TIMM_QUICK)
def test_timm(name: str) -> None:
    check_timm(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TIMM)
def test_a_model_of_each_timm_family(name: str) -> None:
    check_timm(name)
