"""Does the compact model compute what the original does? Measured, on the example and on random inputs."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from asfp.errors import AsfpError, VerificationError
from asfp.trace import Example, as_arguments, copy_of

if TYPE_CHECKING:
    from asfp.compaction.rewrite import Rewriter

Case = tuple[tuple[Any, ...], dict[str, Any]]
Rebuild = Callable[[nn.Module, Example], nn.Module]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Verification:
    """How far two models are apart: the largest difference, and that relative to the range of the original's output.

    >>> print(Verification(max_abs_diff=2e-7, relative=3e-8, tolerance=1e-5, dtype="float32", cases=3))
    equal: largest difference 2e-07, 3e-08 of the output's range (allowed 1e-05 in float32, 3 inputs)
    """

    max_abs_diff: float
    relative: float
    tolerance: float
    dtype: str
    cases: int
    problem: str = ""
    """Why there is no difference to measure: outputs of other shapes or types, or a compact model that does not run."""

    @property
    def ok(self) -> bool:
        return self.relative <= self.tolerance and not self.problem

    def __str__(self) -> str:
        if self.problem:
            return f"NOT equal: {self.problem}"
        verdict = "equal" if self.ok else "NOT equal"
        return (
            f"{verdict}: largest difference {self.max_abs_diff:.3g}, {self.relative:.3g} of the output's range "
            f"(allowed {self.tolerance:g} in {self.dtype}, {self.cases} inputs)"
        )


def verify(model: nn.Module, compact: nn.Module, example_inputs: Example) -> Verification:
    """Compare two models in evaluation mode: max |model(x) - compact(x)|, over x = the example and random inputs.

    The random inputs have the example's shape, once with its batch size and once with another. Raises nothing on a
    difference, not even where shapes differ or the compact model does not run: look at `.ok`, or print the result. What
    raises is a mistake: no models, or an example that the original does not take. Both models are left as they are.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> verify(model, model, torch.randn(2, 3, 8, 8)).ok
    True
    """
    for given in (model, compact):
        if not isinstance(given, nn.Module):
            raise AsfpError(
                f"two models are compared, got {type(given).__name__}: asfp.verify(model, compact, example_inputs)"
            )
    a, b = copy_of(model).eval(), copy_of(compact).eval()
    try:
        return compare(a, b, cases_of(model, example_inputs))
    except UnlikeError as error:
        return Verification(math.inf, math.inf, TOLERANCE[torch.float32], "float32", 1, str(error))


class UnlikeError(VerificationError):
    """Two models whose outputs cannot be compared number by number."""


def compare(model: nn.Module, compact: nn.Module, cases: list[Case]) -> Verification:
    """`verify` on given inputs; the models must be in evaluation mode."""
    worst, worst_relative, dtype, count = 0.0, 0.0, torch.float32, 0
    for args, kwargs in cases:
        expected, got = _run("original", model, args, kwargs), _run("compact", compact, args, kwargs)
        count += 1
        shapes = [[tuple(t.shape) for t in side] for side in (expected, got)]
        if shapes[0] != shapes[1]:
            raise UnlikeError(f"the models' outputs differ in shape: {_listed(shapes[0])} and {_listed(shapes[1])}")
        types = [[str(t.dtype).removeprefix("torch.") for t in side] for side in (expected, got)]
        if types[0] != types[1]:
            raise UnlikeError(
                f"the models' outputs differ in type: {_listed(types[0])} and {_listed(types[1])}; "
                "torch.autocast inside forward is not traced: put it around the call of the model"
            )
        for e, g in zip(expected, got, strict=True):
            dtype = e.dtype if e.is_floating_point() else dtype
            diff, relative = distance(e, g)
            worst, worst_relative = max(worst, diff), max(worst_relative, relative)
    return Verification(worst, worst_relative, TOLERANCE.get(dtype, 1e-5), str(dtype).removeprefix("torch."), count)


def _run(which: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    try:
        return outputs(model, args, kwargs)
    except Exception as error:  # whatever a model's forward raises
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        said = str(error).strip().partition("\n")[0] or "no message"
        raise (UnlikeError if which == "compact" else VerificationError)(
            f"the {which} model does not run on inputs of shape {_listed(shapes)}: {type(error).__name__}: {said}"
        ) from error


def _listed(things: list[Any]) -> str:
    return ", ".join(map(str, things)) or "nothing"


def distance(expected: Tensor, got: Tensor) -> tuple[float, float]:
    """The largest difference, and that over the range of what was expected.

    An output that hardly varies has no range to speak of: it is compared with its size, and at the least with 1e-4.
    """
    if expected.numel() == 0:
        return 0.0, 0.0
    e, g = expected.double(), got.double()
    same = (e == g) | (e.isnan() & g.isnan())
    diff = torch.where(same, 0.0, (e - g).abs())
    worst = float("inf") if bool(diff.isnan().any()) else float(diff.max())
    finite = e[e.isfinite()]
    if not finite.numel():
        return worst, worst
    span, size = float(finite.max() - finite.min()), float(finite.abs().max())
    if span < 1e-4 * size:
        span = size
    return worst, worst / max(span, 1e-4)


def outputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors that the model returns, on copies of the inputs (some models write into them) and fixed seeds."""
    args, kwargs = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        return [x for x in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor)]


def cases_of(model: nn.Module, example_inputs: Example) -> list[Case]:
    """The example, random numbers in its place, and random numbers with another batch size (where that runs)."""
    args, kwargs = as_arguments(example_inputs)
    generator = torch.Generator().manual_seed(0)

    def noise(x: Any, grow: int) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return torch.cat([x] * (1 + grow)) if isinstance(x, Tensor) and grow and x.ndim else x
        shape = (x.shape[0] + grow * x.shape[0], *x.shape[1:]) if grow and x.ndim else x.shape
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(x)

    cases = [(args, kwargs), pytree.tree_map(lambda x: noise(x, 0), (args, kwargs))]
    other = pytree.tree_map(lambda x: noise(x, 1), (args, kwargs))
    probe = copy_of(model).eval()
    try:
        outputs(probe, *other)
    except Exception:  # whatever a model says to a batch size that it does not take
        return cases
    return [*cases, other]


def self_check(
    reference: nn.Module, compact: nn.Module, example_inputs: Example, rebuild: Rebuild, out: Rewriter
) -> None:
    """Raise unless the compact model equals the reference: in float64 where that runs, and in its own precision.

    In its own precision a difference is also accepted while it stays within the reference's own rounding error, and a
    model that computes in less precision inside is compared as that allows.
    """
    cases = cases_of(reference, example_inputs)

    def compared(a: nn.Module, b: nn.Module, given: list[Case]) -> Verification:
        try:
            return compare(a, b, given)
        except VerificationError as error:
            raise VerificationError(f"{error}{_first_difference(out, compact, cases[0])}") from error

    found = compared(reference, compact, cases)
    noise = 0.0
    if found.dtype != "float64" and _fits_in_float64(reference):
        wide, wide_cases = copy_of(reference).double(), _doubled(cases)
        if _types_in(wide, wide_cases[0]) == {torch.float64}:
            wide_compact = rebuild(wide, wide_cases[0][0] or wide_cases[0][1])
            exact = compared(wide, wide_compact.eval(), wide_cases)
            if not exact.ok:
                raise VerificationError(f"{exact}{_first_difference(out, compact, cases[0])}")
            noise = max(_rounding(reference, wide, c, w) for c, w in zip(cases, wide_cases, strict=True))
    inside = max((TOLERANCE.get(t, 0.0) for t in _types_in(reference, cases[0])), default=0.0)
    if found.relative > max(found.tolerance, inside, 4 * noise):
        raise VerificationError(f"{found}{_first_difference(out, compact, cases[0])}")


def _fits_in_float64(model: nn.Module) -> bool:
    need = 4 * 8 * sum(p.numel() for p in model.parameters())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return need < torch.cuda.mem_get_info(device)[0]
    return device.type == "cpu" and need < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _types_in(model: nn.Module, case: Case) -> set[torch.dtype]:
    """The floating-point types that a model computes in; empty where it does not run (some insist on a precision)."""
    recorder = _Types()
    try:
        with recorder:
            outputs(model, *case)
    except (RuntimeError, TypeError, ValueError, MemoryError):
        return set()
    return recorder.found


class _Types(TorchDispatchMode):
    """Notes the types of all floating-point results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.found |= {x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()}
        return result


def _doubled(cases: list[Case]) -> list[Case]:
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, cases)


def _rounding(model: nn.Module, wide: nn.Module, case: Case, wide_case: Case) -> float:
    pairs = zip(outputs(wide, *wide_case), outputs(model, *case), strict=True)
    return max((distance(e, g)[1] for e, g in pairs), default=0.0)


def _first_difference(out: Rewriter, compact: nn.Module, case: Case) -> str:
    """Names the first layer whose kept channels differ from the original's, or else the first that does not run."""
    originals, new = _Recorder(out.state.traced), _Recorder(compact)
    with torch.no_grad():
        for recorder in (originals, new):
            args, kwargs = case
            with contextlib.suppress(Exception):  # what the graph does up to there is recorded
                recorder.run(*args, *kwargs.values())
    for node, physical in out.physicals.items():
        expected, got = originals.values.get(node.name), new.values.get(physical.node.name)
        if isinstance(expected, Tensor) and isinstance(got, Tensor) and not physical.virtual:
            axis = out.state.channels_of(node).axes[0]
            expected = expected.index_select(axis, torch.as_tensor(physical.keep, device=expected.device))
            if expected.shape != got.shape or distance(expected, got)[1] > TOLERANCE.get(got.dtype, 1e-5):
                return f"; first at {node.name} ({node.target})"
    missing = next((n for n in new.graph.nodes if n.name not in new.values), None)
    return "" if missing is None else f"; at {missing.name} ({missing.target})"


class _Recorder(fx.Interpreter):
    """Runs a graph and remembers every value by name."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value.clone() if isinstance(value, Tensor) else value  # it may be overwritten
        return value
