"""The fused stages of CIFAR ResNets: the kernels' own source, run on the CPU by tests/emulated.h, against torch."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asfp import create_model
from asfp.models.cifar_resnet import CifarResNet
from asfp.train import blocks, stage
from asfp.train.blocks import FusedResNet, fits, fused_forward
from asfp.train.cuda import geometry
from asfp.train.cuda.geometry import Geometry, source
from asfp.train.cuda.runtime import compile_cubin, nvrtc
from asfp.train.objective import distillation
from asfp.train.stage import Stage
from emulation import compiler, emulated
from stages import LAST, STAGES, check_stage, error, layers, maps, reference

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs g++")


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "ELEMENTWISE_BLOCKS", 3)


@needs_compiler
@pytest.mark.parametrize(("channels", "height", "width", "count", "depth", "shortcut"), STAGES)
def test_a_stage_is_what_torch_computes(
    channels: int, height: int, width: int, count: int, depth: int, shortcut: bool
) -> None:
    check_stage(channels, height, width, count, depth, shortcut, emulated)


@needs_compiler
def test_blocks_that_have_several_tiles_and_sums_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "ELEMENTWISE_BLOCKS", 70)
    monkeypatch.setitem(geometry.CHUNKS, 64, 2)
    check_stage(64, 4, 4, 80, 1, False, emulated)  # 10 tiles; 40 blocks have pixels, a round adds up 32


@needs_compiler
def test_in_evaluation_a_stage_uses_the_running_statistics_and_leaves_them() -> None:
    torch.manual_seed(0)
    convs, norms = layers(16, 3)
    for norm in norms:
        nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    before = copy.deepcopy(norms.eval().state_dict())
    y, added = maps(2, 16, 8, 8), maps(2, 16, 8, 8)
    with torch.no_grad():
        z = Stage(list(convs), list(norms), emulated)(y, added)  # type: ignore[arg-type]
    z2 = reference(copy.deepcopy(convs).double(), copy.deepcopy(norms).double(), y.double(), added.double())
    assert error(z, z2) < 2e-3
    for name, value in norms.state_dict().items():
        assert torch.equal(value, before[name]), name


@needs_compiler
def test_the_same_inputs_give_the_same_bits() -> None:
    torch.manual_seed(0)
    convs, norms = layers(32, 2)
    y, slope = maps(3, 32, 8, 8), maps(3, 32, 8, 8)
    fused, found = Stage(list(convs), list(norms), emulated), []  # type: ignore[arg-type]
    for _ in range(2):
        convs.zero_grad()
        fused(y, None).backward(slope)
        found.append([conv.weight.grad.clone() for conv in convs])  # type: ignore[union-attr,operator]
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


@needs_compiler
@pytest.mark.parametrize("padding", ["after", pytest.param("both", marks=pytest.mark.slow)])
def test_a_network_moves_as_the_plain_one_does(padding: str) -> None:
    """Against float64: 16-bit rounding turns ReLUs on and off, so gradients differ by a few percent, for torch too."""
    torch.manual_seed(0)
    model = CifarResNet(8, shortcut_padding=padding).to(memory_format=LAST)  # type: ignore[arg-type]
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    x, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    fused = FusedResNet(model, emulated)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(fused(x), labels)
        other = F.cross_entropy(plain(x), labels)
    loss.backward()
    other.backward()
    wanted = F.cross_entropy(exact(x.double()), labels)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=0.02)
    ours = theirs = total = 0.0
    for (name, p), p2, p3 in zip(model.named_parameters(), exact.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        assert p2.grad is not None
        assert p3.grad is not None
        ours += float((p.grad - p2.grad).square().sum())
        theirs += float((p3.grad - p2.grad).square().sum())
        total += float(p2.grad.square().sum())
    assert ours < 0.05 * total
    assert ours < 1.5 * theirs  # not less exact than autocast
    for name, buffer in exact.named_buffers():
        if buffer.is_floating_point():
            assert error(model.get_buffer(name), buffer) < 0.02, name
        else:
            assert model.get_buffer(name) == buffer


@needs_compiler
def test_a_network_in_evaluation_gives_the_plain_ones_classes() -> None:
    torch.manual_seed(0)
    model = CifarResNet(8).to(memory_format=LAST).eval()
    x = torch.randn(8, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = FusedResNet(model, emulated)(x).float()
    with torch.no_grad():
        wanted = model(x)
    assert error(found, wanted.double()) < 0.02
    assert model.bn1.num_batches_tracked == 0


def test_what_captured_steps_read_stays_where_it_is() -> None:
    convs, norms = layers(16, 2)
    fused, cpu = Stage(list(convs), list(norms), emulated), torch.device("cpu")  # type: ignore[arg-type]
    first = [tensor.data_ptr() for tensor in fused.addresses(cpu)]
    assert [tensor.data_ptr() for tensor in fused.addresses(cpu)] == first
    convs[0].weight = nn.Parameter(convs[0].weight.detach().clone())  # type: ignore[operator]
    with pytest.raises(AssertionError, match="moved"):
        fused.addresses(cpu)


@needs_compiler
@pytest.mark.parametrize("where", ["weight", "scale", "image"])
def test_what_is_not_a_number_shows_in_the_loss(where: str) -> None:
    """ReLU must not hide it: training watches the loss."""
    torch.manual_seed(0)
    model = CifarResNet(8).to(memory_format=LAST)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tensor = {"weight": model.layer1[0].conv2.weight, "scale": model.layer2[0].bn1.weight, "image": x}[where]
        tensor[(0,) * tensor.ndim] = torch.nan
    with torch.autocast("cpu", torch.bfloat16):
        assert FusedResNet(model, emulated)(x).isnan().any()


@needs_compiler
def test_a_stage_refuses_what_it_would_compute_wrongly() -> None:
    convs, norms = layers(16, 2)
    fused, y = Stage(list(convs), list(norms), emulated), maps(1, 16, 8, 8)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="autocast"):
        fused(y.float(), None)
    norms[1].eval()
    with pytest.raises(ValueError, match="unpack"):  # some norms learn, some do not
        fused(y, None)
    norms.eval()
    with pytest.raises(AssertionError, match="no gradients"):
        fused(y, None)


@needs_compiler
def test_a_teacher_by_the_kernels_teaches_the_same() -> None:
    torch.manual_seed(0)
    teacher = CifarResNet(8).to(memory_format=LAST)
    x, labels, logits = torch.randn(4, 3, 16, 16), torch.arange(4), torch.randn(4, 10)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = distillation(teacher, 0.5, 4.0)(logits, x, labels)
        found = distillation(teacher, 0.5, 4.0, FusedResNet(teacher, emulated))(logits, x, labels)
    assert found.item() == pytest.approx(wanted.item(), rel=0.01)


@needs_compiler
def test_in_evaluation_no_activations_are_kept() -> None:
    convs, norms = layers(16, 4)
    norms.eval()
    run = stage._Run(Stage(list(convs), list(norms), emulated), maps(1, 16, 8, 8), False)  # type: ignore[arg-type]
    with torch.no_grad():
        run.forward(None)
    assert len(run.raw) == 1
    assert run.out == []


def test_what_the_kernels_are_for() -> None:
    last = {"memory_format": LAST}
    assert fits(create_model("resnet20").to(**last), (3, 32, 32))
    assert fits(create_model("resnet110", num_classes=100).to(**last), (3, 32, 32))
    assert fits(create_model("resnet20", in_channels=1).to(**last), (1, 16, 16))
    assert not fits(create_model("resnet20"), (3, 32, 32))  # not channels last
    assert not fits(create_model("resnet20").to(**last), (3, 36, 36))
    assert not fits(create_model("resnet20").to(**last), (3, 34, 34))
    assert not fits(create_model("vgg16").to(**last), (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer2[1].bn1.momentum = None
    assert not fits(other, (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer2[1].bn2.eps = 1e-3
    assert not fits(other, (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer1[0].conv1 = nn.Conv2d(16, 16, 3, padding=1)  # with a bias
    assert not fits(other.to(**last), (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer3[2].conv2 = nn.Conv2d(64, 64, 1, bias=False)
    assert not fits(other.to(**last), (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer1[1].bn2 = nn.Identity()
    assert not fits(other, (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer2[0].shortcut = nn.Conv2d(16, 32, 1, stride=2)
    assert not fits(other, (3, 32, 32))
    assert not fits(create_model("resnet20").to(**last).half(), (3, 32, 32))
    other = create_model("resnet20").to(**last)
    other.layer1[1].register_forward_hook(lambda module, inputs, output: output)
    assert not fits(other, (3, 32, 32))
    assert fused_forward(create_model("resnet20").to(**last), (3, 32, 32)) is None  # not on a GPU


def test_without_kernels_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*size: int) -> None:
        raise RuntimeError("the kernels do not compile for sm_00")

    monkeypatch.setattr(blocks, "_can_run", lambda device, shape: True)
    monkeypatch.setattr(blocks, "launcher", fails)
    with pytest.warns(UserWarning, match="without fused blocks.*sm_00"):
        assert fused_forward(create_model("resnet20").to(memory_format=LAST), (3, 32, 32)) is None


@given(st.sampled_from([16, 32, 64]), st.integers(0, 7), st.integers(0, 7), st.integers(1, 300))
def test_tiles_cover_each_pixel_once(channels: int, high: int, wide: int, count: int) -> None:
    height, width = 2**high, 2**wide
    tiles = Geometry(channels, height, width)
    assert tiles.fits == (width <= tiles.pixels)
    covered = tiles.tiles(count) * tiles.pixels
    assert covered >= count * height * width > covered - tiles.images * height * width
    assert tiles.images * tiles.rows * width == tiles.pixels
    assert height % tiles.rows == 0


@pytest.mark.skipif(nvrtc() is None, reason="this torch has no NVRTC")
@pytest.mark.parametrize("architecture", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("channels", "side"), [(64, 8), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((16, 32), (32, 16)))]
)
def test_the_kernels_compile(architecture: str, channels: int, side: int) -> None:
    assert compile_cubin(source(channels, side, side), architecture)[1:4] == b"ELF"


@pytest.mark.skipif(nvrtc() is None, reason="this torch has no NVRTC")
def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match="undefined"):
        compile_cubin('extern "C" __global__ void kernel() { undefined(); }', "sm_80")


def test_stages_follow_each_other_in_the_models_order() -> None:
    model = CifarResNet(20)
    stages = FusedResNet(model, emulated).stages
    convs = [conv for each in stages for conv in each.convs]
    wanted = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.in_channels == m.out_channels]
    assert convs == wanted
    norms = [norm for each in stages for norm in each.norms]
    assert norms == [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(a.convs[0].in_channels < b.convs[0].in_channels for a, b in pairwise(stages))
