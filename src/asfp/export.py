"""Files for other runtimes: ONNX, OpenVINO IR and torch.export, each run and compared with torch before it is there."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asfp.compaction import CompactModule
from asfp.compaction.verify import distance
from asfp.deployment.filling import fill_branches
from asfp.deployment.folding import convolve_borders, fold_batch_norms
from asfp.deployment.padding import pad_with_zeros
from asfp.deployment.pieces import keep_in_pieces
from asfp.deployment.widening import widen_streams
from asfp.deployment.widths import ONNXRUNTIME, OPENVINO
from asfp.engines import Runner, needs, quietly, run_onnx, run_openvino, run_pt2, tensors_of
from asfp.errors import AsfpError, VerificationError, nearest
from asfp.trace import Example, as_arguments, copy_of

TOLERANCE = 1e-4
"""Allowed difference, relative to the range of torch's output; engines add in another order, and fold."""


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how far it is from torch.

    >>> print(Exported("net.onnx", 1234, ("batch",), 1e-6, 2e-7, 2))
    net.onnx: 1,234 bytes, any batch; differs from torch by 2e-07 of the output's range (2 inputs)
    """

    path: str
    bytes: int
    dynamic: tuple[str, ...]
    """The sizes that may differ from the example's: "batch", and "size" for height and width (or length, or depth)."""
    max_abs_diff: float
    relative: float
    cases: int

    def __str__(self) -> str:
        sizes = f"any {' and '.join(self.dynamic)}" if self.dynamic else "one input shape"
        differs = f"differs from torch by {self.relative:.2g} of the output's range ({self.cases} inputs)"
        return f"{self.path}: {self.bytes:,} bytes, {sizes}; {differs}"

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings only, for JSON."""
        return asdict(self)


def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], example_inputs: Example, *, fixed: bool = False
) -> Exported:
    """Write `model` as an ONNX file that ONNX Runtime runs with the same result, and say how far it is from torch.

    Batch norms are folded. Batch size stays open, and height and width where the model allows, unless they are to be
    `fixed`: the example's. The file is run on random inputs, with other sizes too, before it gets its name; a
    difference raises VerificationError.

    >>> import asfp
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asfp.export_onnx(net, f"{folder}/net.onnx", torch.zeros(1, 3, 8, 8)).dynamic
    ('batch', 'size')
    """
    needs("onnx", "onnx", "onnxscript", "onnxruntime")
    _check_float32(model, "ONNX Runtime")
    return _export(model, path, example_inputs, (".onnx",), _write_onnx, run_onnx, fixed)


def export_openvino(
    model: nn.Module, path: str | os.PathLike[str], example_inputs: Example, *, fixed: bool = False
) -> Exported:
    """Write `model` as OpenVINO IR, an .xml and a .bin beside it; otherwise as `export_onnx`.

    `fixed` height and width make compact models faster there: what constant channels give at borders is one constant.

    >>> import asfp
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asfp.export_openvino(net, f"{folder}/net.xml", torch.zeros(1, 3, 8, 8)).relative < 1e-4
    True
    """
    needs("openvino", "openvino", "onnx", "onnxscript")
    return _export(model, path, example_inputs, (".xml", ".bin"), _write_openvino, run_openvino, fixed)


def export_pt2(
    model: nn.Module, path: str | os.PathLike[str], example_inputs: Example, *, fixed: bool = False
) -> Exported:
    """Write `model` as a torch.export program, which `torch.export.load` reads; otherwise as `export_onnx`.

    >>> import asfp
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asfp.export_pt2(net, f"{folder}/net.pt2", torch.zeros(1, 3, 8, 8)).relative
    0.0
    """
    return _export(model, path, example_inputs, (".pt2",), _write_pt2, run_pt2, fixed)


# -- the three formats: how a program is written


def _write_onnx(program: Any, path: Path) -> None:
    written = torch.onnx.export(program, dynamo=True, verbose=False)
    assert written is not None
    written.save(path)


def _write_openvino(program: Any, path: Path) -> None:
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        _write_onnx(program, Path(folder) / "model.onnx")
        openvino.save_model(openvino.convert_model(Path(folder) / "model.onnx"), path, compress_to_fp16=False)


def _write_pt2(program: Any, path: Path) -> None:
    torch.export.save(program, path)


# -- what suits an engine: compact models compute the same in ways that are faster there


def _for_onnxruntime(model: nn.Module, batch: int, fixed: bool) -> nn.Module:
    model = fill_branches(widen_streams(model, ONNXRUNTIME, batch=batch), ONNXRUNTIME)
    model = keep_in_pieces(convolve_borders(model))
    return pad_with_zeros(model, always=False)  # what is added would be a pass of its own


def _for_openvino(model: nn.Module, batch: int, fixed: bool) -> nn.Module:
    model = widen_streams(keep_in_pieces(model, pointwise=True), OPENVINO, batch=batch)
    model = fill_branches(model, OPENVINO)
    return pad_with_zeros(model if fixed else convolve_borders(model), always=True)


LAYOUTS: Mapping[Callable[[Path], Runner], Callable[[nn.Module, int, bool], nn.Module]] = {
    run_onnx: _for_onnxruntime,
    run_openvino: _for_openvino,
}


# -- what they share


def _export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Example,
    suffixes: Sequence[str],
    write: Callable[[Any, Path], None],
    load: Callable[[Path], Runner],
    fixed: bool,
) -> Exported:
    target = _target(path, suffixes[0])
    inputs = _inputs(model, example_inputs)
    reference = copy_of(model).eval().cpu()
    deployed = fold_batch_norms(reference, inputs)
    if isinstance(model, CompactModule) and load in LAYOUTS:
        samples = as_arguments(example_inputs)[0][0].shape[:1]
        deployed = LAYOUTS[load](deployed, max([1, *samples]), fixed)
    else:
        deployed = convolve_borders(deployed)
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}.", dir=target.parent) as folder:
        part = Path(folder) / target.name
        with quietly():
            dynamic, worst, relative, cases = _first_that_works(reference, deployed, inputs, part, write, load, fixed)
        files = [part.with_suffix(suffix) for suffix in suffixes]
        size = sum(file.stat().st_size for file in files)
        for file in reversed(files):  # the .xml last: with it the pair is there
            file.replace(target.parent / file.name)
    return Exported(str(target), size, dynamic, worst, relative, cases)


def _first_that_works(
    reference: nn.Module,
    deployed: nn.Module,
    inputs: tuple[Tensor, ...],
    part: Path,
    write: Callable[[Any, Path], None],
    load: Callable[[Path], Runner],
    fixed: bool,
) -> tuple[tuple[str, ...], float, float, int]:
    """Export with as many open sizes as the model allows: batch and, unless it is fixed, size; batch; none."""
    problem: Exception | None = None
    ways: list[tuple[str, ...]] = [("batch", "size"), ("batch",), ()]
    for dynamic in ways[fixed:]:
        try:
            write(_program(deployed, inputs, dynamic), part)
            run = load(part)
            cases = _cases(reference, inputs, dynamic)
            found = [_compare(reference, run, case) for case in cases]
        except Exception as error:  # exporters and engines have no common error
            problem = error
            continue
        return dynamic, max(d for d, _ in found), max(r for _, r in found), len(found)
    if isinstance(problem, VerificationError):
        raise problem
    first = (str(problem).strip() or repr(problem)).splitlines()[0]
    raise AsfpError(
        f"{type(reference).__name__} cannot be exported to {part.suffix}: {type(problem).__name__}: {first}"
    ) from problem


def _program(model: nn.Module, inputs: tuple[Tensor, ...], dynamic: tuple[str, ...]) -> Any:
    free = torch.export.Dim.DYNAMIC
    shapes = []
    for x in inputs:
        axes = [0] if "batch" in dynamic else []
        axes += range(2, x.ndim) if "size" in dynamic and x.ndim > 2 else []
        shapes.append(dict.fromkeys(axes, free))
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=tuple(shapes) if dynamic else None)


def _cases(reference: nn.Module, inputs: tuple[Tensor, ...], dynamic: tuple[str, ...]) -> list[tuple[Tensor, ...]]:
    """Random inputs of the example's shape, of other batch sizes, and of another height and width, where allowed."""
    generator = torch.Generator().manual_seed(0)

    def noise(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> tuple[Tensor, ...]:
        return tuple(_noise(x, change(tuple(x.shape)), generator) for x in inputs)

    cases = [noise(lambda s: s)]
    if "batch" in dynamic:
        cases += [noise(lambda s: (1, *s[1:])), noise(lambda s: (s[0] + 1, *s[1:]))]
    if "size" in dynamic:
        larger = noise(lambda s: (*s[:2], *(n + 32 * i for i, n in enumerate(s[2:], 1))))
        try:
            _outputs(reference, larger)
        except (RuntimeError, ValueError) as error:
            raise AsfpError("the model takes one size only") from error
        cases.append(larger)
    return cases


def _noise(like: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers; of whole numbers, which may be places in a table, the example's own, again and again."""
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like)
    often = [-(-n // m) if m else 1 for n, m in zip(shape, like.shape, strict=True)]
    return like.repeat(often)[tuple(slice(n) for n in shape)]


def _compare(reference: nn.Module, run: Runner, case: tuple[Tensor, ...]) -> tuple[float, float]:
    expected, got = _outputs(reference, case), run(case)
    shapes = [tuple(x.shape) for x in expected], [tuple(x.shape) for x in got]
    if shapes[0] != shapes[1]:
        raise VerificationError(f"the exported file gives shapes {shapes[1]} where torch gives {shapes[0]}")
    if not any(bool(e.isfinite().any()) for e in expected):
        raise VerificationError("the model gives no finite number for random inputs, so the file cannot be compared")
    pairs = [distance(e, g) for e, g in zip(expected, got, strict=True)]
    worst, relative = max(d for d, _ in pairs), max(r for _, r in pairs)
    if not relative <= TOLERANCE:
        raise VerificationError(
            f"the exported file differs from torch by {worst:.3g}, {relative:.3g} of the output's range "
            f"(allowed {TOLERANCE:g}); it was not kept"
        )
    return worst, relative


def _outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(model(*inputs))


def _target(path: str | os.PathLike[str], suffix: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise AsfpError(
            f"the second argument is the file to write, got {type(path).__name__}: first the model, then "
            f"'model{suffix}', then example_inputs"
        )
    target = Path(path)
    if target.suffix != suffix or target.is_dir():
        raise AsfpError(f"{str(path)!r} must be a file that ends in {suffix}, e.g. {target.stem or 'model'}{suffix}")
    if not target.parent.is_dir():
        raise AsfpError(f"there is no folder {str(target.parent)!r} to write {target.name} in: make it first")
    return target


def _inputs(model: nn.Module, example_inputs: Example) -> tuple[Tensor, ...]:
    """The example as tensors on the CPU, with two samples: a size of one would be taken for fixed."""
    if not isinstance(model, nn.Module):
        raise AsfpError(f"expected a torch.nn.Module to export, got {type(model).__name__}")
    args, kwargs = as_arguments(example_inputs)
    if kwargs or not args or not all(isinstance(x, Tensor) for x in args):
        raise AsfpError(
            "a model is exported with tensors for its positional arguments, e.g. torch.zeros(1, 3, 224, 224)"
        )
    one = all(x.ndim > 1 and x.shape[0] == 1 for x in args)
    return tuple((torch.cat([x, x]) if one else x).detach().cpu() for x in args)


def _check_float32(model: Any, engine: str) -> None:
    types = {p.dtype for p in model.parameters() if p.is_floating_point()} if isinstance(model, nn.Module) else set()
    if other := sorted(str(t).removeprefix("torch.") for t in types - {torch.float32}):
        raise AsfpError(f"{engine} runs models in float32, this one has {other[0]} weights: export model.float()")


FORMATS: Mapping[str, tuple[str, Callable[..., Exported]]] = {
    "onnx": (".onnx", export_onnx),
    "openvino": (".xml", export_openvino),
    "pt2": (".pt2", export_pt2),
}


def export_source(
    text: str,
    formats: Sequence[str] = ("onnx",),
    folder: Path = Path(),
    size: str | None = None,
    fixed: bool = False,
) -> list[Exported]:
    """What `asfp export` does: a model or saved file to files of the same name, one for each format.

    >>> export_source("resnet8", ["tflite"])
    Traceback (most recent call last):
    ...
    asfp.errors.AsfpError: there is no format 'tflite': use onnx, openvino or pt2
    """
    from asfp.sources import build, parse_source

    for name in formats:
        if name not in FORMATS:
            raise AsfpError(f"there is no format {name!r}: use onnx, openvino or pt2{nearest(name, FORMATS)}")
    source = parse_source(text)
    if source.is_graph_file:
        raise AsfpError(f"{text} is exported already: give the model or the .safetensors file it came from")
    stem = source.path.stem if source.path is not None else re.sub("[:@/]", "-", text)
    for name in formats:
        _target(folder / f"{stem}{FORMATS[name][0]}", FORMATS[name][0])
    model, example = build(source, size)
    if {"onnx", "openvino"} & set(formats):  # which compute in float32
        model, example = model.float(), example.float()
    return [FORMATS[name][1](model, folder / f"{stem}{FORMATS[name][0]}", example, fixed=fixed) for name in formats]
