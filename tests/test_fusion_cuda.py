"""Fused models on a GPU: the same results by cuDNN's fused kernels, eagerly and as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import zero_filters
from torch import Tensor, nn

import asfp
from asfp.bench import Setting, bench_models
from asfp.bench.runners import Contestant
from asfp.compaction.layers import BorderBias
from asfp.fused_conv import FusedConv, FusedPool
from asfp.fusion import fell_back, fuse, take_faster
from asfp.replay import Replay

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZE = 128
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far results may be apart, as a share of their range: some roundings of 8 bits for each of 50 layers."""


@pytest.fixture(autouse=True)
def _precisely() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
        yield


def network(name: str, selection: str = "", *, constants: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = zero_filters(asfp.create_model(f"torchvision:{name}"), rate=0.0).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not constants:
            nn.init.zeros_(module.bias)
            nn.init.zeros_(module.running_mean)  # type: ignore[arg-type]
    if not selection:
        return model
    x = torch.zeros(1, 3, SIZE, SIZE)
    asfp.SoftPruner(model, 0.3, 1, selection=selection, align=8, example_inputs=x).step(1)
    return asfp.compact(model, x, layout="zeros", check=False).eval()


def on_gpu(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, Tensor]:
    """The model and its fused copy in this type, channels last, and an input."""
    kind: Any = {"memory_format": torch.channels_last}
    fused = fuse(model, torch.zeros(1, 3, SIZE, SIZE))
    x = torch.randn(8, 3, SIZE, SIZE).to("cuda", dtype, **kind)
    return model.to("cuda", dtype, **kind), fused.to("cuda", dtype, **kind), x


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    found, expected = found.double(), expected.double()
    assert found.isfinite().all()
    apart = float((found - expected).abs().max() / expected.abs().max())
    assert apart <= CLOSE[dtype], apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("selection", ["", "independent", "nested", "coupled"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_same_result_by_fused_kernels(name: str, selection: str, dtype: torch.dtype) -> None:
    model, fused, x = on_gpu(network(name, selection), dtype)
    with torch.inference_mode():
        for _ in range(2):
            assert_close(fused(x), model(x), dtype)
    if dtype != torch.float32:
        assert fell_back(fused) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selection", ["independent", "coupled"])
def test_border_corrections(selection: str, dtype: torch.dtype) -> None:
    model, fused, x = on_gpu(network("resnet18", selection, constants=True), dtype)
    assert any(isinstance(m, BorderBias) for m in fused.modules())
    with torch.inference_mode():
        for size in (SIZE, 96, SIZE):
            assert_close(fused(x[..., :size]), model(x[..., :size]), dtype)
    print(fell_back(fused))


@pytest.mark.parametrize("channels", [1, 3, 5, 8, 12, 45, 64])
@pytest.mark.parametrize("groups", [1, "all"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_width_works(channels: int, groups: Any, layout: Any, dtype: torch.dtype) -> None:
    count = channels if groups == "all" else 1
    model = nn.Sequential(nn.Conv2d(channels, channels * 2, 3, padding=1, groups=count), nn.ReLU())
    fused = fuse(model, torch.zeros(1, channels, 16, 16)).to("cuda", dtype, memory_format=layout)  # type: ignore[call-overload]
    model = model.to("cuda", dtype, memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(4, channels, 16, 16).to("cuda", dtype, memory_format=layout)
    with torch.inference_mode():
        assert_close(fused(x), model(x), dtype)
        take_faster(fused, x)
        assert_close(fused(x), model(x), dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 256), (45, 70), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_way_to_compute_a_convolution(
    inputs: int, outputs: int, window: int, stride: int, residual: bool, dtype: Any
) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(inputs, outputs, window, stride=stride, padding=window // 2)
    conv = FusedConv(plain).to("cuda", dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, inputs, 14, 14).to("cuda", dtype, memory_format=torch.channels_last)
    with torch.inference_mode():
        y = plain.to("cuda", dtype).double()(x.double())
        z = torch.randn_like(y).to(dtype=dtype, memory_format=torch.channels_last) if residual else None
        expected = (y if z is None else y + z.double()).relu()
        ways = conv._kernels(x, z)
        assert len(ways) >= 2
        for conv.kernel in ways:
            assert_close(conv(x, z), expected, dtype)
        conv.kernel, conv.fell_back = None, "to be tried"
        assert_close(conv(x, z), expected, dtype)  # a convolution and one pass
        conv.fell_back = ""
        conv.take_faster(x, z)
        assert_close(conv(x, z), expected, dtype)
        first = x.contiguous()  # channels first: another way, the same result
        assert_close(conv(first, z), expected, dtype)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "size", "stride"), [(3, 64, 7, 2), (1, 45, 3, 1), (4, 32, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_way_to_compute_a_convolution_of_few_channels(
    inputs: int, outputs: int, size: int, stride: int, relu: bool, dtype: Any
) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2)
    conv = FusedConv(plain, relu=relu).to("cuda", dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, inputs, 57, 43).to("cuda", dtype, memory_format=torch.channels_last)
    with torch.inference_mode():
        plain = plain.to("cuda", dtype).double()
        expected = plain(x.double()).relu() if relu else plain(x.double())
        ways = conv._kernels(x, None)
        assert len(ways) == 6
        for conv.kernel in ways:
            assert_close(conv(x), expected, dtype)
        conv.take_faster(x)
        for given in (x, x.contiguous(), x[:3]):
            assert_close(conv(given), expected[: len(given)], dtype)


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2), nn.MaxPool2d((3, 1), (1, 2), (1, 0))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pooling(pool: nn.MaxPool2d, dtype: Any) -> None:
    fused = FusedPool(pool)
    x = torch.randn(8, 45, 57, 43).to("cuda", dtype, memory_format=torch.channels_last)
    with torch.inference_mode():
        expected = pool(x)
        assert fused._by_hand(x)
        assert torch.equal(fused._pooled(x), expected)
        fused.take_faster(x)
        fused.own = True
        for given in (x, x.contiguous(), x[:3]):
            assert torch.equal(fused(given), expected[: len(given)])


def test_what_is_left_in_memory_does_not_matter() -> None:
    _, fused, x = on_gpu(network("resnet18"), torch.bfloat16)
    with torch.inference_mode():
        expected = fused(x).clone()
        torch.cuda.empty_cache()
        poison = [torch.full((n,), torch.nan, device="cuda") for n in (2**26, 2**24, 2**22, 2**20, 2**18) * 2]
        del poison
        assert_close(fused(x), expected, torch.bfloat16)


def test_gradients_take_the_separate_operations() -> None:
    model, fused, x = on_gpu(network("resnet18"), torch.float32)
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    (found,) = torch.autograd.grad(fused(x).sum(), x)
    assert_close(found, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_computes_new_inputs(dtype: torch.dtype) -> None:
    model, fused, x = on_gpu(network("resnet50", "coupled"), dtype)
    take_faster(fused, x)
    run = Replay(fused, x)
    for _ in range(3):
        x = torch.randn_like(x)
        with torch.inference_mode():
            assert_close(run(x), model(x), dtype)
    print(fell_back(fused))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_the_engine(precision: str) -> None:
    models = {"dense": network("resnet18"), "compact": network("resnet18", "coupled")}
    setting = Setting("fused", 8, "cuda", precision, channels_last=True)
    done = bench_models(models, torch.zeros(1, 3, SIZE, SIZE), [setting], repeats=5)
    assert [row.model for row in done.rows] == ["dense", "compact"]
    assert all(0 < row.times.median < 1000 for row in done.rows)


def test_the_engine_runs_the_fused_model(tmp_path: Any) -> None:
    model = network("resnet18")
    contestant = Contestant.of_model("dense", model, torch.zeros(1, 3, SIZE, SIZE), tmp_path)
    run = contestant.prepare(Setting("fused", 2, "cuda", "bf16", channels_last=True))()
    assert isinstance(run, Replay)
    assert sum(isinstance(m, FusedConv) for m in run.function.modules()) == 17  # type: ignore[attr-defined]
    assert_close(run(), model.to("cuda")(run.inputs[0].float()), torch.bfloat16)


def test_tuning_on_the_gpu() -> None:
    torch.manual_seed(0)
    model = zero_filters(asfp.create_model("resnet20")).eval().cuda()
    small = asfp.compact(model, torch.randn(8, 3, 32, 32, device="cuda"), tune="fused")
    assert small.plan.layout.endswith("measured on fused")


def test_a_graph_outlives_calls_with_other_sizes() -> None:
    """What the modules keep for the last size is kept by the graph too."""
    model, fused, x = on_gpu(network("resnet18", "coupled", constants=True), torch.bfloat16)
    first, second = Replay(fused, x), Replay(fused, x[:1])
    filled = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    with torch.inference_mode():
        assert_close(first(x), model(x), torch.bfloat16)
        assert_close(second(x[:1]), model(x[:1]), torch.bfloat16)
    del filled
    with pytest.raises(asfp.AsfpError, match="captured for inputs of the shapes"):
        second(x)


def test_a_wrong_kernel_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "asfp.fused_conv.cudnn", lambda x, weight, *rest: torch.zeros_like(nn.functional.conv2d(x, weight, padding=1))
    )
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    fused = fuse(model, torch.zeros(1, 3, 16, 16)).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.inference_mode():
        take_faster(fused, x)
        assert_close(fused(x), model.cuda()(x), torch.float32)
    assert fell_back(fused) == {"0": "cuDNN's fused kernel gives another result"} or "faster" in fell_back(fused)["0"]
