"""Our Triton kernels give what torch gives; here in Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which torch installs on Linux")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="run by test_in_the_interpreter, or on a GPU"
)

SHAPES = [
    (3, 16, 16, 8, 8),
    (2, 32, 32, 5, 7),
    (2, 64, 64, 4, 4),
    (1, 16, 32, 9, 3),
    (2, 64, 16, 3, 5),
    (2, 16, 16, 1, 1),
]


def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).abs().max() / wanted.abs().max())


@inside
@pytest.mark.parametrize(("shape", "last"), [(SHAPES[0], False), *((shape, True) for shape in SHAPES)], ids=str)
def test_output_and_gradients_are_those_of_torch(shape: tuple[int, ...], last: bool) -> None:
    from asfp.train.kernels import narrow_conv, narrow_conv_input, narrow_conv_weight

    n, inputs, outputs, height, width = shape
    layout = torch.channels_last if last else torch.contiguous_format
    torch.manual_seed(0)
    x = torch.randn(n, inputs, height, width, device=device()).half().to(memory_format=layout)
    w = (torch.randn(outputs, inputs, 3, 3, device=device()) / 10).half().float().to(memory_format=layout)
    dy = torch.randn(n, outputs, height, width, device=device()).half().to(memory_format=layout)
    exact = [t.double() for t in (dy, x, w)]
    y = torch.nn.functional.conv2d(exact[1], exact[2], padding=1)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    dx, dw, _ = torch.ops.aten.convolution_backward(*exact, None, *geometry)
    assert relative(narrow_conv(x, w), y) < 1e-3  # half precision of what is stored
    assert relative(narrow_conv_input(dy, w), dx) < 1e-3
    assert relative(narrow_conv_weight(x, dy), dw) < 3e-6  # float32


@inside
def test_operations_are_registered_as_torch_wants_them() -> None:
    from asfp.train.kernels import narrow_conv, narrow_conv_input, narrow_conv_weight

    x, w = torch.randn(2, 16, 4, 4, device=device()).half(), torch.randn(32, 16, 3, 3, device=device())
    dy = torch.randn(2, 32, 4, 4, device=device()).half()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(narrow_conv, (x, w), test_utils=checks)
    torch.library.opcheck(narrow_conv_input, (dy, w), test_utils=checks)
    torch.library.opcheck(narrow_conv_weight, (x, dy), test_utils=checks)


@inside
@pytest.mark.parametrize("compiled", [False, True])
def test_a_network_has_the_gradients_that_it_had(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import asfp
    from asfp.train import kernels
    from asfp.train.kernels import NarrowConvolutions

    used = Counter[str]()

    def counted(run: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            used[run.__name__] += 1
            return run(*given, **more)

        return call

    for run in (kernels.convolve, kernels.weight_gradient):
        monkeypatch.setattr(kernels, run.__name__, counted(run))

    torch.manual_seed(0)
    model = asfp.create_model("resnet8").to(device(), memory_format=torch.channels_last)
    x, labels = torch.randn(4, 3, 8, 8, device=device()), torch.randint(10, (4,), device=device())

    def loss_of(ours: bool) -> Tensor:
        with torch.autocast(device(), torch.float16):
            if ours:
                with NarrowConvolutions():
                    return torch.nn.functional.cross_entropy(model(x).float(), labels)
            return torch.nn.functional.cross_entropy(model(x).float(), labels)

    def gradients(ours: bool) -> dict[str, Tensor]:
        model.zero_grad()
        (torch.compile(loss_of, backend="aot_eager", dynamic=False) if compiled else loss_of)(ours).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    found = gradients(True)
    assert used == {"convolve": 6, "weight_gradient": 4}  # two of 16 channels, one of 32 and, for the weight, one of 64
    wanted = gradients(False)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() < 0.01 * gradient.norm(), name


@inside
@pytest.mark.parametrize(
    ("shape", "window", "stride", "padding"),
    [
        ((2, 16, 24, 3, 5), (1, 1), (1, 1), (0, 0)),
        ((2, 40, 20, 5, 3), (1, 1), (1, 1), (0, 0)),
        ((1, 128, 70, 1, 1), (1, 1), (1, 1), (0, 0)),
        ((2, 40, 20, 5, 4), (1, 1), (2, 2), (0, 0)),
        ((2, 32, 33, 6, 5), (3, 3), (1, 1), (1, 1)),
        ((1, 70, 20, 5, 7), (3, 3), (2, 2), (1, 1)),
        ((1, 16, 24, 6, 6), (1, 5), (1, 2), (0, 3)),
        ((1, 16, 40, 5, 6), (4, 2), (3, 1), (2, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_with_all_behind_it_is_that_of_torch(
    shape: tuple[int, ...], window: Any, stride: Any, padding: Any, residual: bool, relu: bool
) -> None:
    from asfp.triton_fused import CACHED, TILES, conv, finish_, tiles_for

    n, inputs, outputs, height, width = shape
    torch.manual_seed(0)
    x = torch.randn(n, inputs, height, width, device=device()).half().to(memory_format=torch.channels_last)
    w = (torch.randn(outputs, inputs, *window, device=device()) / 8).half()
    b = torch.randn(outputs, device=device()).half()
    product = torch.nn.functional.conv2d(x.double(), w.double(), None, stride, padding)
    z = torch.randn(product.shape, device=device()).half() if residual else None
    exact = product + b.double().view(-1, 1, 1) + (0 if z is None else z.double())
    exact = exact.relu() if relu else exact
    found = tiles_for(inputs, outputs, window[0] * window[1])
    assert found
    for tile in {found[0], found[-1]} if INTERPRETED else TILES + CACHED:
        assert relative(conv(x, w, b, z, stride, padding, relu, tile), exact) < 1e-3
    y = product.float().to(memory_format=torch.channels_last)
    done = finish_(y, b.float(), None if z is None else z.float(), relu)
    assert done is y
    assert relative(y, exact) < 1e-6


@inside
def test_relu_keeps_what_is_not_a_number() -> None:
    from asfp.triton_fused import TILES, conv, finish_

    x = torch.full((1, 16, 1, 1), torch.nan, device=device()).half()
    w, b = torch.ones(16, 16, 1, 1, device=device()).half(), torch.zeros(16, device=device()).half()
    assert conv(x, w, b, None, (1, 1), (0, 0), True, TILES[0]).isnan().all()
    assert finish_(x, b, None, True).isnan().all()


@inside
@pytest.mark.parametrize(
    ("inputs", "outputs", "window", "stride", "padding"),
    [
        (3, 20, (7, 7), (2, 2), (3, 3)),
        (1, 8, (3, 3), (1, 1), (1, 1)),
        (3, 70, (4, 4), (4, 4), (0, 0)),
        (7, 16, (1, 5), (2, 1), (0, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("relu", [False, True])
def test_a_convolution_of_few_channels_is_that_of_torch(
    inputs: int, outputs: int, window: Any, stride: Any, padding: Any, relu: bool
) -> None:
    from asfp.triton_stem import STEM_TILES, arranged, lead_of, stem

    torch.manual_seed(0)
    x = torch.randn(2, inputs, 11, 13, device=device()).half().to(memory_format=torch.channels_last)
    w = (torch.randn(outputs, inputs, *window, device=device()) / 8).half()
    b = torch.randn(outputs, device=device()).half()
    exact = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), stride, padding)
    exact = exact.relu() if relu else exact
    assert lead_of(w, stride[1], padding[1]) == (window == (7, 7))
    for tile in STEM_TILES[:1] if INTERPRETED else STEM_TILES:
        ready = arranged(w, lead_of(w, stride[1], padding[1]))
        found = stem(x, w, ready, b, stride, padding, relu, tile)
        assert found.shape == exact.shape
        assert relative(found, exact) < 1e-3


@inside
@pytest.mark.parametrize(
    ("window", "stride", "padding"),
    [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 3), (1, 0))],
    ids=str,
)
def test_pooling_is_that_of_torch(window: Any, stride: Any, padding: Any) -> None:
    from asfp.triton_stem import max_pool

    torch.manual_seed(0)
    x = torch.randn(2, 5, 11, 13, device=device()).half().to(memory_format=torch.channels_last)
    x[0, 1, 4, 4] = torch.nan
    expected = torch.nn.functional.max_pool2d(x, window, stride, padding)
    assert expected.isnan().any()
    assert torch.equal(max_pool(x, window, stride, padding).nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-rs", str(Path(__file__))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "54 passed, 1 skipped" in done.stdout
