"""Exported files compute what torch computes, with other sizes too; what cannot be, is said."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import asfp
from asfp.cli import app
from asfp.compaction import CompactModule
from asfp.compaction.layers import BorderBias
from asfp.deployment.folding import convolve_borders, fold_batch_norms
from asfp.export import Exported, export_source
from asfp.sources import build, parse_source

Export = Callable[..., Exported]
EXPORTS: dict[str, Export] = {".onnx": asfp.export_onnx, ".xml": asfp.export_openvino, ".pt2": asfp.export_pt2}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.third, self.bn3 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.end = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.first(x)).relu()
        x = (self.bn3(self.third(self.bn2(self.second(x)).relu())) + x).relu()
        return self.end(x.mean((2, 3)))


def scatter(model: nn.Module) -> nn.Module:
    """Batch norms as after training, so that zero filters give constants."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.affine:
                nn.init.uniform_(module.bias, -1, 1)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture(scope="module")
def small() -> CompactModule:
    torch.manual_seed(0)
    model = scatter(Residual())
    asfp.SoftPruner(model, 0.4, epochs=1).step(1)
    compact = asfp.compact(model, torch.randn(1, 3, 12, 12))
    assert any(isinstance(module, BorderBias) for module in compact.modules())
    return compact


@pytest.mark.parametrize("suffix", EXPORTS)
def test_compact_model_with_other_batch_and_size(small: CompactModule, tmp_path: Path, suffix: str) -> None:
    before = {name: value.clone() for name, value in small.state_dict().items()}
    path = tmp_path / f"small{suffix}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = EXPORTS[suffix](small, path, torch.randn(1, 3, 12, 12))
    assert found.dynamic == ("batch", "size")
    assert found.relative <= 1e-5
    assert found.cases == 4
    assert found.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert all(torch.equal(before[name], value) for name, value in small.state_dict().items())
    x = torch.randn(5, 3, 17, 23)
    torch.testing.assert_close(RUN[suffix](path, x), small(x).detach(), rtol=1e-4, atol=1e-5)


def run_onnx(path: Path, x: Tensor) -> Tensor:
    import onnx
    import onnxruntime

    graph = onnx.load(path).graph
    assert not {"BatchNormalization", "Range"} & {node.op_type for node in graph.node}  # nothing computed from shapes
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def run_openvino(path: Path, x: Tensor) -> Tensor:
    import openvino

    model = openvino.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(np.array(model(x.numpy())[0]))


def run_pt2(path: Path, x: Tensor) -> Tensor:
    result = torch.export.load(path).module()(x).detach()
    assert isinstance(result, Tensor)
    return result


RUN = {".onnx": run_onnx, ".xml": run_openvino, ".pt2": run_pt2}


def test_a_model_for_one_size_keeps_its_batch_open(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    found = asfp.export_onnx(net, tmp_path / "net.onnx", torch.zeros(1, 3, 8, 8))
    assert found.dynamic == ("batch",)
    assert found.cases == 3


@pytest.mark.parametrize(("export", "size", "side"), [(asfp.export_onnx, 3, 16), (asfp.export_openvino, 3, 9)])
def test_a_pool_of_a_fixed_size_fixes_the_images(tmp_path: Path, export: Export, size: int, side: int) -> None:
    """Exporters write its windows for the example's size: seen at another, which is given up then, not the file."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.Linear(4 * size**2, 2)).eval()
    found = export(
        net, tmp_path / f"net{'.onnx' if export is asfp.export_onnx else '.xml'}", torch.randn(1, 3, side, side)
    )
    assert "size" not in found.dynamic
    assert found.cases > 0


@pytest.mark.parametrize("suffix", EXPORTS)
def test_a_difference_is_an_error_and_leaves_no_file(tmp_path: Path, suffix: str) -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(asfp.VerificationError, match="differs from torch by"):
        EXPORTS[suffix](Random(), tmp_path / f"net{suffix}", torch.zeros(1, 3, 8, 8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "module"), [("onnx", "onnxruntime"), ("onnx", "onnxscript"), ("openvino", "openvino")]
)
def test_a_missing_extra_is_named_with_the_command(tmp_path: Path, extra: str, module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"  # as if it were not installed
        f"import asfp, torch\n"
        f"try: asfp.export_{extra}(torch.nn.ReLU(), {str(tmp_path / 'x')!r}, torch.zeros(1))\n"
        f"except asfp.AsfpError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"this needs {module}, which is not installed: pip install 'asfp[{extra}]'\n"


def test_mistakes(tmp_path: Path) -> None:
    net, x = nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 4, 4)
    with pytest.raises(asfp.AsfpError, match=r"must be a file that ends in \.onnx, e\.g\. net\.onnx"):
        asfp.export_onnx(net, tmp_path / "net.xml", x)
    with pytest.raises(asfp.AsfpError, match="there is no folder"):
        asfp.export_pt2(net, tmp_path / "gone" / "net.pt2", x)
    with pytest.raises(asfp.AsfpError, match="tensors for its positional arguments"):
        asfp.export_pt2(net, tmp_path / "net.pt2", {"input": x})
    with pytest.raises(asfp.AsfpError, match=r"cannot be exported to \.pt2"):
        asfp.export_pt2(net, tmp_path / "net.pt2", torch.zeros(1, 4, 4, 4))
    assert list(tmp_path.iterdir()) == []


# -- folding


class Everything(nn.Module):
    """Layers that fold, and layers that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.n1 = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.deep, self.n2 = nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6, affine=False)
        self.up, self.n3 = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.BatchNorm2d(4)
        self.grouped, self.n4 = nn.ConvTranspose2d(4, 4, 2, groups=2), nn.BatchNorm2d(4)
        self.twice, self.n5 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.read, self.n6 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.linear, self.n7 = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.rows, self.n8 = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.n3(self.up(self.n2(self.deep(self.n1(self.plain(x)))).relu()))
        x = self.n4(self.grouped(x))
        x = self.n5(self.twice(self.twice(x)))
        y = self.read(x)
        x = self.n6(y) + y
        x = self.n7(self.linear(x.mean((2, 3))))
        return self.n8(self.rows(x[:, :, None].expand(-1, -1, 4)))


def test_folding_is_exact_and_folds_what_it_can() -> None:
    model = scatter(Everything()).double()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    folded = fold_batch_norms(model, x)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)
    left = {name for name, module in folded.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    assert left == {"n4", "n5", "n6", "n8"}


@pytest.mark.parametrize("name", ["0", "1"])
def test_folding_leaves_modules_with_hooks(name: str) -> None:
    torch.manual_seed(0)
    model = scatter(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).double()
    model.get_submodule(name).register_forward_hook(lambda module, args, result: result * 2)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    torch.testing.assert_close(fold_batch_norms(model, x)(x), model(x), rtol=1e-12, atol=1e-12)


def test_folding_takes_border_corrections_along(small: CompactModule) -> None:
    model = small.double()
    folded = fold_batch_norms(model, torch.zeros(1, 3, 12, 12, dtype=torch.float64))
    assert any(isinstance(module, BorderBias) for module in folded.modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    x = torch.randn(3, 3, 15, 8, dtype=torch.float64)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)
    small.float()


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y.relu_()
        return y


def test_folding_keeps_what_is_written_in_place() -> None:
    model, x = Overwritten().eval(), torch.randn(1, 3, 6, 6)
    assert torch.equal(fold_batch_norms(model, x)(x), model(x))
    assert torch.equal(convolve_borders(fold_batch_norms(model, x))(x), model(x))


class Borders(nn.Module):
    """Constants in front of padded convolutions of all kinds: strided, dilated, even, in one to three dimensions."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv: type[nn.Conv2d] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]  # type: ignore[assignment]
        self.stem = conv(2, 6, 3, padding=1)
        self.same, self.strided = conv(6, 6, 3, padding="same"), conv(6, 6, 3, stride=2, padding=2)
        self.even, self.dilated = conv(6, 6, 4, padding="same"), conv(6, 5, 3, padding=3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).sigmoid()
        x = self.same(x).sigmoid() + x
        x = self.strided(x).sigmoid()
        y: Tensor = self.dilated(self.even(x).sigmoid())
        return y


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_borders_are_convolutions_of_ones_for_every_size(dims: int) -> None:
    torch.manual_seed(0)
    model = Borders(dims).double()
    for name in ("stem", "same", "strided", "even"):
        model.get_submodule(name).weight.data[1:4].zero_()
    x = torch.randn(2, 2, *[9] * dims, dtype=torch.float64)
    compact = asfp.compact(model, x)
    corrected = sum(isinstance(module, BorderBias) for module in compact.modules())
    deployed = convolve_borders(fold_batch_norms(compact, x))
    left = sum(isinstance(module, BorderBias) for module in deployed.modules())
    assert (corrected, left) == (4, 1)  # an even kernel pads one side more
    assert sum(name.startswith("ones") for name, _ in deployed.named_children()) == 2  # one for each size
    for size in (9, 10, 17):
        x = torch.randn(3, 2, *[size] * dims, dtype=torch.float64)
        torch.testing.assert_close(deployed(x), model(x), rtol=1e-12, atol=1e-12)


class Spelled(nn.Module):
    """A submodule that is called what a map of ones would be, and arguments by name on the way back to its size."""

    def __init__(self) -> None:
        super().__init__()
        self.ones0, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.third, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ones0(torch.cat(tensors=[x, x], dim=2)).sigmoid()
        x = self.second(x).sigmoid()
        x = self.third(nn.functional.pad(input=x, pad=(1, 1, 1, 1), mode="circular")).sigmoid()
        y: Tensor = self.last(x)
        return y


def test_borders_leave_the_models_own_names_alone() -> None:
    torch.manual_seed(0)
    model = Spelled().double()
    for conv in (model.ones0, model.third):
        conv.weight.data[:3].zero_()
    x = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    compact = asfp.compact(model, x)
    assert sum(isinstance(module, BorderBias) for module in compact.modules()) == 2
    deployed = convolve_borders(fold_batch_norms(compact, x))
    assert not any(isinstance(module, BorderBias) for module in deployed.modules())
    for size in (7, 10):
        x = torch.randn(2, 2, size, size, dtype=torch.float64)
        torch.testing.assert_close(deployed(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["least", "auto"])
@pytest.mark.parametrize("selection", ["independent", "nested", "coupled"])
@pytest.mark.parametrize("name", ["resnet20", "torchvision:resnet18", "torchvision:mobilenet_v2"])
def test_borders_of_real_networks(name: str, selection: str, layout: str) -> None:
    torch.manual_seed(0)
    model = scatter(asfp.create_model(name)).double()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    asfp.SoftPruner(model, 0.4, 1, selection=selection, example_inputs=x).step(1)
    compact = asfp.compact(model, x, layout=layout).eval()
    deployed = convolve_borders(fold_batch_norms(compact, x))
    assert not any(isinstance(module, BorderBias) for module in deployed.modules())
    for sizes in ((32, 32), (40, 33)):
        x = torch.randn(2, 3, *sizes, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(deployed(x), model(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("suffix", EXPORTS)
def test_a_fixed_size(small: CompactModule, tmp_path: Path, suffix: str) -> None:
    found = EXPORTS[suffix](small, tmp_path / f"small{suffix}", torch.randn(1, 3, 12, 12), fixed=True)
    assert found.dynamic == ("batch",)
    x = torch.randn(5, 3, 12, 12)
    torch.testing.assert_close(RUN[suffix](tmp_path / f"small{suffix}", x), small(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("selection", ["independent", "coupled"])
def test_openvino_takes_every_size_of_a_compact_cifar_network(tmp_path: Path, selection: str) -> None:
    model, x = build(parse_source(f"resnet8@0.4:{selection}"))
    assert asfp.export_openvino(model, tmp_path / "net.xml", x).dynamic == ("batch", "size")


# -- the command


def call(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["export", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, done.stdout, done.stderr


def test_command_exports_a_saved_model(tmp_path: Path) -> None:
    model, _ = build(parse_source("resnet8@0.4"))
    assert isinstance(model, CompactModule)
    asfp.save(model, tmp_path / "small.safetensors", model="resnet8")
    code, out, err = call(str(tmp_path / "small.safetensors"), "--to", "onnx", "--output", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    (written,) = json.loads(out)
    assert written["path"] == str(tmp_path / "small.onnx")
    assert written["relative"] < 1e-5
    assert written["dynamic"] == ["batch", "size"]
    x = torch.randn(2, 3, 40, 36)
    torch.testing.assert_close(run_onnx(tmp_path / "small.onnx", x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_command_fixes_the_size(tmp_path: Path) -> None:
    code, out, err = call("resnet8", "--size", "24", "--fixed", "--output", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)[0]["dynamic"] == ["batch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet8", "--to", "tensorrt"], "there is no format 'tensorrt'"),
        (["resnet88"], "no model is named 'resnet88'"),
        (["resnet8", "--output", "gone"], "there is no folder 'gone'"),
        (["gone.safetensors"], "there is no file"),
    ],
)
def test_command_mistakes(arguments: list[str], message: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("suffix", EXPORTS)
@pytest.mark.parametrize(
    "name",
    [
        "resnet56@0.4",
        "vgg16@0.4",
        *(f"torchvision:{n}@0.3" for n in ("resnet18", "resnet34", "resnet50", "mobilenet_v2", "densenet121")),
    ],
)
def test_the_networks_of_the_papers(tmp_path: Path, name: str, suffix: str) -> None:
    model, example = build(parse_source(name))
    found = EXPORTS[suffix](model, tmp_path / f"model{suffix}", example)
    assert found.dynamic == ("batch", "size")
    assert found.relative <= 1e-4


class Looked(nn.Module):
    """Whole numbers that are places in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(10, 4), nn.Conv1d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.table(x).transpose(1, 2))
        return y


@pytest.mark.parametrize("suffix", EXPORTS)
def test_whole_numbers_as_input(suffix: str, tmp_path: Path) -> None:
    found = EXPORTS[suffix](Looked(), tmp_path / f"looked{suffix}", torch.randint(0, 10, (1, 12)))
    assert found.relative < 1e-4


def test_what_cannot_be_compared_is_not_kept(tmp_path: Path) -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() - x.abs() - 1).log()

    with pytest.raises(asfp.AsfpError, match="no finite number"):
        asfp.export_onnx(Nothing(), tmp_path / "nothing.onnx", torch.zeros(1, 3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_other_types_are_exported_in_float32(tmp_path: Path) -> None:
    model = asfp.create_model("resnet8").double().eval()
    x = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    with pytest.raises(asfp.AsfpError, match=r"in float32, this one has float64 weights: export model\.float\(\)"):
        asfp.export_onnx(model, tmp_path / "model.onnx", x)
    asfp.save(asfp.compact(model, x), tmp_path / "small.safetensors")
    (found,) = export_source(str(tmp_path / "small.safetensors"), ["onnx"], tmp_path)
    assert found.relative < 1e-4


INTERRUPTED = """
import gc, signal, sys
from pathlib import Path
import torch
from asfp.engines import run_openvino
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background shells ignore it
x = (torch.zeros(1, 3, 8, 8),)
runners = [run_openvino(Path(sys.argv[1])) for _ in range(2)]
for run in runners:
    run(x)
while runners:
    del run, runners[0]  # in the order in which they came
    gc.collect()
    run = None
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_after_openvino(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    asfp.export_openvino(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), tmp_path / "net.xml", torch.zeros(1, 3, 8, 8))
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "net.xml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


@pytest.mark.parametrize("export", [asfp.export_onnx, asfp.export_openvino, asfp.export_pt2])
def test_a_file_in_the_wrong_place_is_said(export: Export) -> None:
    model, x = nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8)
    with pytest.raises(asfp.AsfpError, match="the second argument is the file to write, got Tensor"):
        export(model, x, "model.onnx")
