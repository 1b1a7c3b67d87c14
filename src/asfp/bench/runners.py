"""A model or a file, made ready to run on an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from asfp.bench.timing import Run
from asfp.engines import needs, onnx_shape, openvino_shape, quietly, run_onnx, run_openvino
from asfp.errors import AsfpError, nearest
from asfp.fusion import fuse, take_faster
from asfp.measurement.macs import count_layers
from asfp.replay import Replay
from asfp.sources import Source, build, parse_source, resize
from asfp.trace import copy_of

ENGINES = {"torch": "torch", "compile": "torch", "fused": "torch", "onnxruntime": "onnx", "openvino": "openvino"}
"""Engine -> the extra that has it."""

BY_DEVICE = {"cpu": ("torch", "compile", "onnxruntime", "openvino"), "cuda": ("torch", "compile", "fused")}
"""Device -> the engines that run models on it here."""

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""tf32: fp32 numbers that a GPU's tensor cores multiply with 10 bits of fraction; fp32 has all 23, on a GPU too."""


@dataclass(frozen=True)
class Setting:
    """Under which conditions models are compared."""

    engine: str = "torch"
    batch: int = 1
    device: str = "cpu"
    precision: str = "fp32"
    channels_last: bool = False
    threads: int | None = None

    def check(self) -> None:
        """Raise where the engine cannot do this.

        >>> Setting("onnxruntime", precision="bf16").check()
        Traceback (most recent call last):
        ...
        asfp.errors.AsfpError: onnxruntime runs these models in fp32 only, not bf16: use --engine torch or openvino
        """
        for name, value, known in (
            ("engine", self.engine, ENGINES),
            ("device", self.device, ("cpu", "cuda")),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in known:
                raise AsfpError(f"{name}={value!r} is unknown: use {', '.join(known)}{nearest(value, known)}")
        for name, number in (("batch", self.batch), ("threads", self.threads)):
            if number is not None and not 1 <= number <= 100_000:
                raise AsfpError(f"{name}={number} is not a count: it must be at least 1")
        exported = self.engine in ("onnxruntime", "openvino")
        if exported and self.device != "cpu":
            raise AsfpError(
                f"{self.engine} is run on the CPU only here: use --engine torch, compile or fused with --device cuda"
            )
        if self.engine == "fused" and self.device != "cuda":
            raise AsfpError("fused is for GPUs: use --device cuda with it, or another --engine")
        if exported and self.channels_last:
            raise AsfpError(f"{self.engine} chooses its own memory layout: leave out --channels-last")
        if self.engine == "onnxruntime" and self.precision != "fp32":
            raise AsfpError(
                f"onnxruntime runs these models in fp32 only, not {self.precision}: use --engine torch or openvino"
            )
        if self.precision == "tf32" and self.device != "cuda":
            raise AsfpError("tf32 is a GPU's: use --device cuda with it, or --precision fp32")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise AsfpError("device='cuda': torch sees no GPU here; use --device cpu")
        if exported:
            needs(ENGINES[self.engine], self.engine)


@dataclass
class Contestant:
    """One of the models that are compared: built once, exported once for each engine, run under many settings."""

    source: Source
    folder: Path
    size: str | None = None
    model: nn.Module | None = None
    example: Tensor | None = None
    macs: int | None = None
    file: Path | None = None
    written: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str, folder: Path, size: str | None = None) -> Contestant:
        """A contestant by its name or file."""
        source = parse_source(given)
        if source.is_graph_file:
            return cls(source, folder, size, file=source.path)
        return cls._with_model(cls(source, folder, size), *build(source, size))

    @classmethod
    def of_model(cls, name: str, model: nn.Module, example: Tensor, folder: Path) -> Contestant:
        """A contestant that is there already."""
        return cls._with_model(cls(Source(name, name, None, None), folder), model, example)

    @staticmethod
    def _with_model(blank: Contestant, model: nn.Module, example: Tensor) -> Contestant:
        macs = sum(layer.macs_conv + layer.macs_linear for layer in count_layers(model, example))
        return replace(blank, model=model, example=example, macs=macs)

    def prepare(self, setting: Setting) -> Callable[[], Run]:
        """A function that makes the run, so that what it allocates can be measured."""
        if setting.engine in ("onnxruntime", "openvino"):
            return self._on_file(setting)
        if self.model is None or self.example is None:
            raise AsfpError(f"{self.source.text} is not a torch model: run it with --engine {self._own_engine()}")
        return self._on_torch(setting, self.model, self.example)

    def _own_engine(self) -> str:
        assert self.file is not None
        return "onnxruntime or openvino" if self.file.suffix == ".onnx" else "openvino"

    def _on_torch(self, setting: Setting, model: nn.Module, example: Tensor) -> Callable[[], Run]:
        def prepare() -> Run:
            layout: Any = torch.channels_last if setting.channels_last and example.ndim == 4 else torch.preserve_format
            fused = setting.engine == "fused"  # folded before it is rounded to the precision
            ready: Any = fuse(model, example) if fused else copy_of(model).eval()
            ready = ready.to(setting.device, PRECISIONS[setting.precision])
            ready = ready.to(memory_format=layout) if setting.channels_last else ready
            x = torch.randn(setting.batch, *example.shape[1:], generator=torch.Generator().manual_seed(0))
            x = x.to(setting.device, PRECISIONS[setting.precision]).contiguous(
                memory_format=layout if setting.channels_last else torch.contiguous_format
            )
            if fused:
                return _replayed(ready, x, self.source.text)
            if setting.engine == "compile":
                # a GPU waits for Python between the kernels of a fast network, unless they are one CUDA graph
                mode = "reduce-overhead" if setting.device == "cuda" else "default"
                ready = torch.compile(_alone(ready), mode=mode)

            def run() -> object:
                with torch.inference_mode():
                    return ready(x)

            if setting.engine == "compile":
                _compile(run, self.source.text)
            return run

        return prepare

    def _on_file(self, setting: Setting) -> Callable[[], Run]:
        file = self._exported(setting.engine)
        if setting.engine == "onnxruntime" and file.suffix != ".onnx":
            raise AsfpError(f"{file} is not an ONNX file: run it with --engine openvino")
        shape = self._shape(file, setting.batch)
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)
        threads = setting.threads or 0

        def prepare() -> Run:
            if setting.engine == "onnxruntime":
                runner = run_onnx(file, threads, shape)
            else:
                hint = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[setting.precision]
                runner = run_openvino(file, threads, hint, shape)
            return lambda: runner(x)

        return prepare

    def _exported(self, engine: str) -> Path:
        """A file for the engine: the user's, or one that is written once, for the example's size where that helps."""
        if self.model is None:
            assert self.file is not None
            return self.file
        if engine not in self.written:
            from asfp.export import export_onnx, export_openvino

            assert self.example is not None
            stem = self.folder / f"{len(list(self.folder.iterdir()))}"
            if engine == "openvino":
                self.written[engine] = stem.with_suffix(".xml")
                export_openvino(self.model, self.written[engine], self.example, fixed=True)
            else:
                self.written[engine] = stem.with_suffix(".onnx")
                export_onnx(self.model, self.written[engine], self.example)
        return self.written[engine]

    def _shape(self, file: Path, batch: int) -> tuple[int, ...]:
        if self.example is not None:
            return batch, *self.example.shape[1:]
        found: list[Any] = [*(onnx_shape(file) if file.suffix == ".onnx" else openvino_shape(file))]
        if self.size is not None:
            known = [n if isinstance(n, int) else 3 for n in found]
            found = [*known[:-2], *resize((1, 1, 1, 1), self.size)[-2:]]
        if not all(isinstance(n, int) for n in found[1:]):
            raise AsfpError(f"{file} takes any height and width: say which with --size, e.g. --size 224")
        if isinstance(found[0], int) and found[0] != batch and self.size is None:
            raise AsfpError(f"{file} takes a batch of {found[0]} only, not {batch}: use --batch {found[0]}")
        return batch, *found[1:]


def _alone(model: nn.Module) -> Callable[[Tensor], object]:
    """The model as a function with code of its own.

    What is compiled is kept with the code, and after 8 models that share theirs (all of one class) the compiler gives
    up and runs the rest uncompiled; those before pay for telling each other apart.

    >>> _alone(nn.ReLU()).__code__ is _alone(nn.ReLU()).__code__
    False
    """

    def call(x: Tensor) -> object:
        return model(x)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _replayed(model: nn.Module, x: Tensor, name: str) -> Run:
    """The fused model as one CUDA graph, each convolution in the faster way."""
    try:
        take_faster(model, x)
        return Replay(model, x)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise AsfpError(f"{name} cannot be captured as a CUDA graph: {first}; use another --engine") from error


def _compile(run: Run, name: str) -> None:
    """The first call compiles, and says what it has to say as warnings."""
    try:
        with quietly():
            run()
    except Exception as error:  # the compiler, and the compiler's compiler, fail in many ways
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise AsfpError(
            f"torch.compile fails on {name}: {type(error).__name__}: {first}; "
            f"use another --engine (on the CPU this one needs a C++ compiler)"
        ) from error
