"""Latency and throughput of models side by side, in one interleaved run."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.bench.runners import BY_DEVICE, ENGINES, PRECISIONS, Contestant, Setting
from asfp.bench.timing import Times, interleave, peak_memory, time_saved
from asfp.errors import AsfpError
from asfp.trace import Example, as_arguments

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "Bench",
    "Row",
    "Setting",
    "bench",
    "bench_models",
    "engines_present",
    "environment",
    "latency_ms",
]

Progress = Callable[[str, float], None]
"""(what is being done, share of all that is done)."""

NOISY = 0.2
"""A spread of the quartiles above this share of the median is called noisy."""


@dataclass(frozen=True)
class Row:
    """One model under one setting; what it saves is against the first model under the same setting."""

    model: str
    setting: Setting
    times: Times
    macs: int | None
    peak_bytes: int | None
    time_saved: tuple[float, float, float] | None = None
    """Median and 95 % interval; None for the first model."""
    macs_saved: float | None = None

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return 1000 * self.setting.batch / self.times.median

    @property
    def doubt(self) -> str | None:
        """Why the numbers decide nothing, or None where they do."""
        if self.times.spread > NOISY:
            return f"half of its runs lie {100 * self.times.spread:.0f} % apart: the machine is busy, repeat it"
        if self.time_saved is not None and self.time_saved[1] <= 0 <= self.time_saved[2]:
            return "as fast as the first within the noise: more --repeats, or a quieter machine, may tell them apart"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings only, for JSON."""
        low, high = self.times.quartiles
        result: dict[str, Any] = {"model": self.model, **asdict(self.setting)}
        result |= {"latency_ms": self.times.median, "quartiles_ms": [low, high], "repeats": len(self.times.ms)}
        result |= {"throughput": self.throughput, "macs": self.macs, "peak_bytes": self.peak_bytes}
        if self.time_saved is not None:
            saved, *interval = (100 * x for x in self.time_saved)
            result |= {"time_saved_percent": saved, "time_saved_interval": interval}
            result |= {"macs_saved_percent": None if self.macs_saved is None else 100 * self.macs_saved}
        return result | {"doubt": self.doubt}


@dataclass(frozen=True)
class Bench:
    """All rows, and what they were measured on."""

    rows: tuple[Row, ...]
    environment: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"environment": self.environment, "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        from asfp.bench.table import as_table

        return as_table(self)


def bench(
    models: Sequence[str],
    settings: Sequence[Setting] = (Setting(),),
    *,
    repeats: int = 30,
    warmup: int = 5,
    size: str | None = None,
    progress: Progress = lambda message, done: None,
) -> Bench:
    """Time the models side by side under each setting: A B A B ..., medians, quartiles, peak memory.

    A model is a name (`resnet56`), a pruned one (`resnet56@0.4`), or a file (.safetensors, .onnx, .xml). The first one
    is what the others are compared with. `progress` is called with what is being done, and the share that is done.

    >>> done = bench(["resnet8", "resnet8@0.5"], repeats=3, warmup=1)
    >>> [row.model for row in done.rows], done.rows[1].macs < done.rows[0].macs
    (['resnet8', 'resnet8@0.5'], True)
    """
    if not models:
        raise AsfpError("there is nothing to time: give at least one model, e.g. resnet56 resnet56@0.4")
    _check(settings, repeats, warmup)
    steps = _Steps(progress, len(models) * (1 + 2 * len(settings)))
    with tempfile.TemporaryDirectory() as folder:
        contestants = []
        for text in models:
            steps(f"building {text}")
            contestants.append(Contestant.of(text, Path(folder), size))
            steps.add(1)
        return _side_by_side(contestants, settings, repeats, warmup, steps)


def bench_models(
    models: Mapping[str, nn.Module],
    example: Tensor,
    settings: Sequence[Setting] = (Setting(),),
    *,
    repeats: int = 30,
    warmup: int = 5,
) -> Bench:
    """`bench` for models in memory, by any names; they all take inputs like the example.

    >>> done = bench_models({"wide": nn.Conv2d(3, 64, 3), "narrow": nn.Conv2d(3, 8, 3)}, torch.zeros(1, 3, 8, 8))
    >>> [row.model for row in done.rows]
    ['wide', 'narrow']
    """
    _check(settings, repeats, warmup)
    with tempfile.TemporaryDirectory() as folder:
        contestants = [Contestant.of_model(name, model, example, Path(folder)) for name, model in models.items()]
        steps = _Steps(lambda message, done: None, 2 * len(models) * len(settings))
        return _side_by_side(contestants, settings, repeats, warmup, steps)


def _check(settings: Sequence[Setting], repeats: int, warmup: int) -> None:
    for name, count, least in (("repeats", repeats, 3), ("warmup", warmup, 0)):
        if not least <= count <= 1_000_000:
            raise AsfpError(f"{name}={count} is not a count: it must be at least {least}")
    for setting in settings:
        setting.check()


def _side_by_side(
    contestants: list[Contestant], settings: Sequence[Setting], repeats: int, warmup: int, steps: _Steps
) -> Bench:
    rows: list[Row] = []
    for setting in settings:
        with _threads(setting.threads), _kernels(setting):
            rows += _under(setting, contestants, repeats, warmup, steps)
    return Bench(tuple(rows), environment())


def latency_ms(model: nn.Module, example_inputs: Example, repeats: int = 30) -> float:
    """The median time of one run in evaluation mode, on the device that the model and example are on.

    >>> latency_ms(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8), repeats=3) > 0
    True
    """
    args, kwargs = as_arguments(example_inputs)
    device = next((x.device.type for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), "cpu")
    training = model.training

    def run() -> object:
        with torch.inference_mode():
            return model(*args, **kwargs)

    try:
        (times,) = interleave([model.eval() and run], repeats, min(5, repeats), device)
    finally:
        model.train(training)
    return times.median


def engines_present(device: str = "cpu") -> list[str]:
    """The engines that are installed, of those for the device.

    >>> engines_present()[:2], engines_present("cuda")
    (['torch', 'compile'], ['torch', 'compile', 'fused'])
    """
    known = BY_DEVICE.get(device, ("torch",))
    return [engine for engine in known if ENGINES[engine] == "torch" or find_spec(engine) is not None]


def environment() -> dict[str, str]:
    """The hardware and the versions that a number depends on.

    >>> sorted(environment())[:3]
    ['asfp', 'cores', 'cpu']
    """
    known = {"cpu": _cpu_name(), "cores": str(os.cpu_count()), "python": platform.python_version()}
    if torch.cuda.is_available():
        known["gpu"] = torch.cuda.get_device_name()
    for package in ("asfp", "torch", "onnxruntime", "openvino"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


class _Steps:
    def __init__(self, progress: Progress, total: float) -> None:
        self.progress, self.total, self.done, self.message = progress, total, 0.0, ""

    def __call__(self, message: str) -> None:
        self.message = message
        self.add(0)

    def add(self, steps: float) -> None:
        self.done += steps
        self.progress(self.message, self.done / self.total)


def _under(setting: Setting, contestants: list[Contestant], repeats: int, warmup: int, steps: _Steps) -> list[Row]:
    where = f"{setting.engine}, batch {setting.batch}"
    runs, peaks = [], []
    for contestant in contestants:
        steps(f"{where}: preparing {contestant.source.text}")
        run, peak = peak_memory(contestant.prepare(setting), setting.device)
        runs.append(run)
        peaks.append(peak)
        steps.add(1)
    steps(f"{where}: timing")
    times = interleave(runs, repeats, warmup, setting.device, lambda: steps.add(1 / (repeats + warmup)))
    rows = []
    for i, (contestant, taken, peak) in enumerate(zip(contestants, times, peaks, strict=True)):
        first = contestants[0].macs
        macs_saved = 1 - contestant.macs / first if i and contestant.macs is not None and first else None
        saved = time_saved(times[0], taken) if i else None
        rows.append(Row(contestant.source.text, setting, taken, contestant.macs, peak, saved, macs_saved))
    return rows


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _kernels(setting: Setting) -> Iterator[None]:
    """On a GPU: cuDNN tries its kernels for each shape and takes the fastest, TF32 only where it is asked for."""
    if setting.device != "cuda":
        yield
        return
    fast = setting.precision == "tf32"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=fast):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
