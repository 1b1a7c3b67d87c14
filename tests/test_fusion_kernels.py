"""What a fused model gives to cuDNN, with a kernel for CPUs in its place: shapes, widths, what is kept, fall backs."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import zero_filters
from torch import Tensor, nn

import asfp
from asfp import fused_conv
from asfp.compaction.layers import BorderBias
from asfp.compaction.layout import Prices
from asfp.fused_conv import FusedConv
from asfp.fusion import fell_back, fuse, take_faster
from test_fusion import Write, assert_same, count, functions, network


class Kernel:
    """cuDNN's, on a CPU: reads its residual as it lies in memory, whatever its shape."""

    def __init__(self, error: str = "", left: float = 0.0) -> None:
        self.error, self.left, self.calls = error, left, 0

    def __call__(self, x: Tensor, weight: Tensor, z: Tensor | None, bias: Tensor, *geometry: Any) -> Tensor:
        self.calls += 1
        if self.error:
            raise RuntimeError(self.error)
        y = F.conv2d(x, weight, bias, *geometry)
        if z is not None:
            assert z.shape == y.shape
            y = y + z
        return y.relu() + self.left


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(fused_conv, "cudnn", lambda *given: made(*given))
    monkeypatch.setattr(FusedConv, "_by_hand", lambda self, x, z: x.ndim == 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.mark.parametrize("constants", [True, False])
def test_kernels_compute_the_same(kernel: Kernel, constants: bool) -> None:
    model = zero_filters(asfp.create_model("resnet20"), rate=0.4 if constants else 0.0).double().eval()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    small = asfp.compact(model, x, layout=Prices(math.inf, math.inf), check=False).eval()
    assert any(isinstance(m, BorderBias) for m in small.modules()) == constants
    done = fuse(small, x)
    assert functions(done).count(operator.add) == functions(done).count("relu") == 0
    assert all(name.endswith("border") for name, m in done.named_modules() if isinstance(m, BorderBias))
    for size in (32, 40, 32):
        for _ in range(2):  # what was kept is used
            assert_same(small, done, torch.randn(2, 3, size, size, dtype=torch.float64))
    assert kernel.calls == 6 * count(done, FusedConv)
    assert fell_back(done) == {}
    with torch.no_grad():
        for tensor in (*done.parameters(), *done.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.1)  # what was kept is out of date
    kept = done(x)
    for module in done.modules():
        if isinstance(module, FusedConv):
            module.__setstate__(module.__getstate__())  # forgets
    assert torch.equal(kept, done(x))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_few_channels_are_filled_up_with_zeros(kernel: Kernel, layout: torch.memory_format) -> None:
    conv = nn.Conv2d(3, 16, 7, stride=2, padding=3)
    done = fuse(nn.Sequential(conv, nn.ReLU()), torch.zeros(1, 3, 16, 16)).to(torch.bfloat16, memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 16, 16).bfloat16().contiguous(memory_format=layout)
    stem = done.get_submodule("0")
    assert isinstance(stem, FusedConv)
    wide, weight = stem._filled_up(x)
    assert wide.shape[1] == weight.shape[1] == 8
    assert weight.is_contiguous(memory_format=layout)
    assert stem._filled_up(x)[1] is weight
    torch.testing.assert_close(done(x), conv.bfloat16()(x).relu())
    stem.width = 4
    assert stem._filled_up(x)[1].shape[1] == 4
    torch.testing.assert_close(done(x), conv(x).relu())
    done.float()
    stem.width = None
    assert stem._filled_up(x.float())[1] is stem.weight


@pytest.mark.parametrize(
    ("wrong", "reason"), [(Kernel(error="no engine\nat all"), "no engine"), (Kernel(left=1.0), "another result")]
)
def test_where_cudnn_refuses_or_errs_it_falls_back(
    wrong: Kernel, reason: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_conv, "cudnn", wrong)
    model = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU())
    x = torch.randn(2, 8, 6, 6)
    done = fuse(model, x)
    for _ in range(3):
        assert_same(model, done, x)
    assert wrong.calls == 1
    assert reason in fell_back(done)["0"]
    assert reason in str(done)


def test_a_mistake_in_the_shapes_is_no_fall_back(kernel: Kernel) -> None:
    done = fuse(nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU()), torch.zeros(1, 8, 6, 6))
    with pytest.raises(RuntimeError, match="channels"):
        done(torch.zeros(1, 7, 6, 6))
    assert fell_back(done) == {}


def test_a_residual_that_is_broadcast_is_kept_from_cudnn(kernel: Kernel) -> None:
    model = Write(lambda m, x: (m.a(x) + x.mean((2, 3), keepdim=True)).relu()).double().eval()
    done = fuse(model, torch.zeros(1, 8, 1, 1, dtype=torch.float64))
    assert_same(model, done, torch.randn(2, 8, 6, 6, dtype=torch.float64))
    assert kernel.calls == 0
    assert_same(model, done, torch.randn(2, 8, 1, 1, dtype=torch.float64))
    assert kernel.calls == 1


def test_the_faster_way_is_taken(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(True, 3): 3.0, (False, 3): 4.0, (True, 4): 2.0, (False, 4): 1.0, (True, 8): 5.0, (False, 8): 6.0}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(2, 3, 6, 6)
    done = fuse(model, x)
    stem = done.get_submodule("0")
    assert isinstance(stem, FusedConv)

    def clock(run: Callable[[], object]) -> float:
        run()
        return times[not stem.fell_back, stem.width or 0]

    monkeypatch.setattr(fused_conv, "_time", clock)
    take_faster(done, x)
    assert (stem.width, stem.fell_back) == (4, fused_conv.SLOWER)
    times[True, 8] = 0.5
    take_faster(done, x)
    assert (stem.width, stem.fell_back) == (8, "")
    kernel.error = "no engine"
    take_faster(done, x)
    assert (stem.width, stem.fell_back) == (4, "no engine")
    assert_same(model, done, x)


def test_our_own_kernels_are_tried_and_shared_by_what_is_alike(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch in place of the kernels, and a clock that likes the last tile of all."""
    tried: list[tuple[int, object]] = []

    def own(self: FusedConv, x: Tensor, z: Tensor | None) -> Tensor:
        tried.append((len(self.weight), self.kernel))
        return self._separately(x, self.weight, z)

    monkeypatch.setattr(FusedConv, "_own", own)
    monkeypatch.setattr(fused_conv, "_time", lambda run: (run(), 1.0 / (1 + len(tried)))[1])
    convs = [nn.Conv2d(32, n, 3, padding=1, bias=True) for n in (32, 32, 32, 64)]
    model = nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU()))).eval()
    kind: Any = {"memory_format": torch.channels_last}
    model, x = model.to(torch.float16, **kind), torch.randn(2, 32, 6, 6).to(torch.float16, **kind)
    done = fuse(model, x)
    fused = [m for m in done.modules() if isinstance(m, FusedConv)]
    timed, real = [], FusedConv.take_faster
    monkeypatch.setattr(FusedConv, "take_faster", lambda self, *given: (timed.append(self), real(self, *given))[1])
    take_faster(done, x)
    assert timed == [fused[0], fused[3]]  # the others are like the first
    kernels = [m.kernel for m in fused]
    assert kernels[0] is not None
    assert kernels[0] == kernels[1] == kernels[2] != kernels[3]
    first = [n for n, _ in tried].index(64)
    assert len({tile for n, tile in tried[:first]}) == len(fused[0]._kernels(x, None)) > 1
    again = copy.deepcopy(fused[0])
    assert (again.kernel, again.width, again.fell_back) == (None, fused[0].width, fused[0].fell_back)
    small = torch.randn(2, 32, 1, 6).to(torch.float16, **kind)
    hollow = FusedConv(nn.Conv2d(32, 32, 3)).to(torch.float16, **kind)
    assert hollow._kernels(small, None) == []  # torch tells what is wrong


def test_gradients_and_compilation_still_work() -> None:
    model = network("resnet18").double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    done = fuse(model, x.detach())
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(done(x).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    exported = torch.export.export(done, (x.detach(),)).module()
    assert_same(done, exported, x.detach())
    assert_same(done, fuse(done, x.detach()), x.detach())
