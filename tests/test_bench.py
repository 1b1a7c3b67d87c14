"""Benchmarks: what is timed and in which order, what may be concluded, and which combinations there are."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from typer.testing import CliRunner, Result

import asfp
from asfp.bench import ENGINES, Bench, Row, Setting, bench, bench_models, engines_present, latency_ms
from asfp.bench.runners import BY_DEVICE
from asfp.bench.timing import Times, interleave, peak_memory, time_saved
from asfp.cli import app
from asfp.compaction import CompactModule
from asfp.sources import build, parse_source


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


# -- timing


def test_runs_take_turns_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    times = interleave([lambda: order.append("A"), lambda: order.append("B")], repeats=3, warmup=2)
    assert "".join(order) == "AABB" * 5  # the first of a pair fills the caches
    assert [len(t.ms) for t in times] == [3, 3]


def test_a_run_three_times_as_long_is_found_to_be() -> None:
    times = interleave([lambda: time.sleep(0.01), lambda: time.sleep(0.03)], repeats=15, warmup=1)
    saved, low, high = time_saved(*times)
    assert -2.6 < low <= saved <= high < -1
    assert 10 <= times[0].median < 20


def row(first: list[float], second: list[float]) -> Row:
    a, b = Times(tuple(first)), Times(tuple(second))
    return Row("b", Setting(), b, None, None, time_saved(a, b))


def test_doubt_where_the_spread_hides_the_difference() -> None:
    steady, shaky = [10.0, 10.1, 9.9] * 10, [8.0, 10.0, 16.0] * 10
    assert row(steady, [9.0, 9.1, 8.9] * 10).doubt is None
    assert "within the noise" in str(row(steady, [10.0, 9.9, 10.1] * 10).doubt)
    assert "the machine is busy" in str(row(steady, shaky).doubt)


def test_noise_that_hits_both_does_not_hide_a_difference() -> None:
    wave = [10 + math.sin(i) for i in range(40)]
    saved, low, high = time_saved(Times(tuple(wave)), Times(tuple(0.8 * x for x in wave)))
    assert saved == pytest.approx(0.2)
    assert low == pytest.approx(high)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_peak_memory_sees_what_is_used_for_a_moment() -> None:
    def run() -> None:
        torch.ones(32 * 2**20 // 4).sum()

    _, small = peak_memory(lambda: lambda: None)
    _, large = peak_memory(lambda: run)
    assert small is not None
    assert large is not None
    assert small < 16 * 2**20 <= large < 80 * 2**20


def test_latency_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    before = model[1].running_mean
    assert latency_ms(model, torch.randn(4, 3, 8, 8), repeats=3) > 0
    assert model.training
    assert torch.equal(before, torch.zeros(8))
    found = asfp.measure(model, torch.randn(4, 3, 8, 8), repeats=3)
    assert found.latency_ms is not None
    assert found.latency_ms > 0
    assert "ms a run" in str(found)


# -- models, engines, files


def check(done: Bench, names: list[str], settings: int) -> None:
    assert [r.model for r in done.rows] == names * settings
    for i, r in enumerate(done.rows):
        assert len(r.times.ms) == 4
        assert 0 < r.times.median < 10_000
        assert r.throughput == pytest.approx(1000 * r.setting.batch / r.times.median)
        assert (r.time_saved is None) == (i % len(names) == 0)


def test_engines_and_batches_side_by_side() -> None:
    shares: list[float] = []
    settings = [Setting(engine, batch) for engine in ("torch", "onnxruntime", "openvino") for batch in (1, 3)]
    names = ["resnet8", "resnet8@0.4"]
    threads = torch.get_num_threads()
    done = bench(names, settings, repeats=4, warmup=1, progress=lambda _, share: shares.append(share))
    check(done, names, 6)
    assert [r.setting for r in done.rows[::2]] == settings
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    dense, small = done.rows[0].macs, done.rows[1].macs
    assert dense == 12_238_848 + 640
    assert small is not None
    assert done.rows[1].macs_saved == pytest.approx(1 - small / dense)
    assert torch.get_num_threads() == threads
    assert "time saved" in str(done)
    assert {"cpu", "cores", "torch", "openvino"} <= done.environment.keys()


def test_precision_and_layout() -> None:
    settings = [
        Setting(precision="bf16", channels_last=True, threads=1),
        Setting("openvino", precision="bf16", threads=1),
    ]
    done = bench(["resnet8"], settings, repeats=4, warmup=1)
    check(done, ["resnet8"], 2)
    assert "channels last, 1 threads" in str(done)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    model, _ = build(parse_source("resnet8@0.4"))
    assert isinstance(model, CompactModule)
    asfp.save(model, folder / "small.safetensors", model="resnet8")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    asfp.export_onnx(net, folder / "small.onnx", torch.zeros(1, 3, 8, 8))
    asfp.export_openvino(net, folder / "small.xml", torch.zeros(1, 3, 8, 8))
    return folder


def test_files_side_by_side(files: Path) -> None:
    names = [str(files / "small.onnx"), str(files / "small.xml")]
    done = bench(names, [Setting("openvino", 2)], repeats=4, warmup=0, size="32")
    check(done, names, 1)
    assert [r.macs for r in done.rows] == [None, None]


def test_a_saved_model_beside_the_dense_one(files: Path) -> None:
    names = ["resnet8", str(files / "small.safetensors")]
    done = bench(names, repeats=4, warmup=0)
    check(done, names, 1)
    assert done.rows[1].macs_saved is not None
    assert done.rows[1].macs_saved > 0.5


def test_files_say_what_they_need(files: Path) -> None:
    onnx, xml = str(files / "small.onnx"), str(files / "small.xml")
    with pytest.raises(asfp.AsfpError, match=r"is not a torch model: run it with --engine onnxruntime or openvino"):
        bench([onnx])
    with pytest.raises(asfp.AsfpError, match=r"is not an ONNX file: run it with --engine openvino"):
        bench([xml], [Setting("onnxruntime")])
    with pytest.raises(asfp.AsfpError, match="say which with --size"):
        bench([onnx], [Setting("onnxruntime")])


def test_measure_reads_a_saved_file(files: Path) -> None:
    done = CliRunner().invoke(app, ["measure", str(files / "small.safetensors"), "--json"])
    found = json.loads(done.stdout)
    assert found["architecture"] == "CifarResNet"
    assert found["macs_dense"] == 12_238_848
    assert 40 < found["cut_compact_percent"] < 65


class Narrow(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.relu()


@pytest.mark.slow
def test_many_models_of_one_class_are_all_compiled() -> None:
    counters.clear()
    bench_models({str(n): Narrow(n) for n in range(1, 11)}, torch.zeros(1, 3, 8, 8), [Setting("compile")], repeats=3)
    assert counters["stats"]["unique_graphs"] == 10


@pytest.mark.slow
def test_compiled() -> None:
    done = bench(["resnet8", "resnet8@0.4"], [Setting("compile")], repeats=4, warmup=1)
    check(done, ["resnet8", "resnet8@0.4"], 1)


# -- the command


def test_command_prints_json_or_a_table() -> None:
    done = call("resnet8", "resnet8@0.5", "--repeats", "3", "--batch", "2", "--json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert [r["batch"] for r in found["rows"]] == [2, 2]
    keys = {
        "latency_ms",
        "quartiles_ms",
        "throughput",
        "peak_bytes",
        "macs",
        "engine",
        "device",
        "precision",
        "threads",
    }
    assert keys <= found["rows"][0].keys()
    assert found["rows"][1]["macs_saved_percent"] > 60
    low, high = found["rows"][1]["time_saved_interval"]
    assert low <= found["rows"][1]["time_saved_percent"] <= high
    table = call("resnet8", "--repeats", "3").stdout
    assert table.splitlines()[0] == "torch, cpu, batch 1, fp32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument"),
        (["resnet88"], "no model is named"),
        (["resnet8", "--engine", "tensorrt"], "engine='tensorrt' is unknown"),
        (["resnet8", "--device", "tpu"], "device='tpu' is unknown"),
        (["resnet8", "--precision", "int4"], "precision='int4' is unknown"),
        (["resnet8", "--batch", "0"], "batch=0 is not a count"),
        (["resnet8", "--threads", "0"], "threads=0 is not a count"),
        (["resnet8", "--repeats", "1"], "repeats=1 is not a count: it must be at least 3"),
        (["resnet8", "--engine", "onnxruntime", "--precision", "fp16"], "in fp32 only, not fp16"),
        (["resnet8", "--precision", "tf32"], "use --device cuda with it"),
        (["resnet8", "--engine", "openvino", "--channels-last"], "leave out --channels-last"),
        (["resnet8", "--engine", "openvino", "--device", "cuda"], "on the CPU only here"),
        (["resnet8", "--engine", "fused"], "fused is for GPUs: use --device cuda"),
        (["gone.onnx"], "there is no file 'gone.onnx'"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_all_engines_are_those_of_the_device() -> None:
    assert "fused" not in engines_present()
    assert engines_present("cuda") == ["torch", "compile", "fused"]
    assert {engine for device in BY_DEVICE.values() for engine in device} == set(ENGINES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    assert "torch sees no GPU here" in call("resnet8", "--device", "cuda").stderr


@pytest.mark.parametrize(("name", "engine"), [("bad.onnx", "onnxruntime"), ("bad.xml", "openvino")])
def test_a_damaged_file_for_an_engine(name: str, engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine)
    (tmp_path / name).write_text("not a model")
    done = call(str(tmp_path / name), "--engine", engine, "--size", "32")
    assert done.exit_code == 2
    assert f"cannot be read by {engine}" in done.stderr


def test_a_file_of_two_inputs(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    asfp.export_onnx(Sum(), tmp_path / "sum.onnx", (torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)))
    done = call(str(tmp_path / "sum.onnx"), "--engine", "onnxruntime", "--size", "8")
    assert done.exit_code == 2
    assert "has 2 inputs" in done.stderr


def test_measuring_a_file_counts_both_sides_alike(files: Path) -> None:
    done = CliRunner().invoke(app, ["measure", str(files / "small.safetensors"), "--size", "64", "--json"])
    found = json.loads(done.stdout)
    dense = asfp.measure(asfp.create_model("resnet8"), torch.zeros(1, 3, 64, 64))
    assert (found["macs_dense"], found["params_dense"]) == (dense.macs_conv, dense.params)
    assert found["params_compact"] < dense.params
    assert found["macs_compact"] < dense.macs_conv


@pytest.mark.parametrize("repeats", [-1, 2.5, "a", True])
def test_repeats_that_are_no_count(repeats: object) -> None:
    with pytest.raises(asfp.AsfpError, match="is not a count"):
        asfp.measure(nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 8, 8), repeats=repeats)  # type: ignore[arg-type]


def test_an_example_without_a_sample() -> None:
    with pytest.raises(asfp.AsfpError, match="no sample in it"):
        asfp.measure(nn.Conv2d(3, 4, 1), torch.zeros(0, 3, 8, 8))


def test_an_image_too_large_to_measure() -> None:
    done = CliRunner().invoke(app, ["measure", "resnet8", "--size", "99999"])
    assert done.exit_code == 2
    assert "too large" in done.stderr
