"""What a model costs, and what pruning it saves: multiply-adds, parameters, latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from asfp.compaction import compact
from asfp.errors import AsfpError
from asfp.measurement.macs import LayerMacs, count_layers
from asfp.measurement.paper import convolution_macs, exact_fraction, trace_whole, whole_filters
from asfp.pruner import SoftPruner
from asfp.selection import Layers, unwrap
from asfp.trace import Example, copy_of

__all__ = ["LayerMacs", "Measurement", "Pruned", "measure"]


@dataclass(frozen=True)
class Pruned:
    """What pruning saves, by three counts of the convolutions' multiply-adds.

    - `macs_paper`: N (1 - P) filters of N, no rounding, residual streams at full width: the paper's FLOPs. Coupled,
      which the paper has not, with the streams narrowed.
    - `macs_integer`: the same with whole filters, N - floor(N P), or the multiple that `align` makes of it.
    - `macs_compact`: those of a model that was really pruned and compacted. It has fewer where a stream's first blocks
      leave some of its channels unwritten, and more where channels cannot be cut (see the plan's barriers).
    """

    rate: float | None
    """None where the layers have rates of their own."""
    macs_paper: float
    macs_integer: float
    macs_compact: int
    macs_compact_linear: int
    params_compact: int
    selection: str = "independent"
    align: int = 1
    streams: float | None = None
    """The rate of layers that write a residual stream with others, where it is another."""


@dataclass(frozen=True)
class Measurement:
    """Multiply-adds for one sample (convolutions and linear maps apart), parameters, and the layers they belong to.

    >>> found = measure(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2)), torch.zeros(1, 3, 2, 2))
    >>> found.macs_conv, found.macs_linear, found.macs, found.params
    (48, 32, 80, 50)
    """

    model: str
    input_shape: tuple[int, ...]
    layers: tuple[LayerMacs, ...]
    pruned: Pruned | None = None
    latency_ms: float | None = None

    @property
    def macs_conv(self) -> int:
        """Multiply-adds of the convolutions: what the paper calls FLOPs."""
        return sum(layer.macs_conv for layer in self.layers)

    @property
    def macs_linear(self) -> int:
        return sum(layer.macs_linear for layer in self.layers)

    @property
    def macs(self) -> int:
        return self.macs_conv + self.macs_linear

    @property
    def params(self) -> int:
        return sum(layer.params for layer in self.layers)

    def cut_percent(self, macs: float) -> float:
        """The share of the convolutions' multiply-adds that is gone, in percent."""
        return 100 * (1 - macs / self.macs_conv) if self.macs_conv else 0.0

    def to_dict(self, *, layers: bool = False) -> dict[str, Any]:
        """One flat object of numbers and strings for JSON; `macs_...` are convolutions, `..._linear` linear maps.

        >>> measure(nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 2, 2)).to_dict()["macs_dense"]
        48
        """
        result: dict[str, Any] = {
            "model": self.model,
            "input_shape": list(self.input_shape),
            "macs_dense": self.macs_conv,
            "macs_dense_linear": self.macs_linear,
            "params_dense": self.params,
        }
        if self.latency_ms is not None:
            result["latency_ms"] = self.latency_ms
        if (cut := self.pruned) is not None:
            result |= {
                "rate": cut.rate,
                "selection": cut.selection,
                "streams": cut.streams,
                "align": cut.align,
                "macs_paper": round(cut.macs_paper),
                "cut_paper_percent": round(self.cut_percent(cut.macs_paper), 4),
                "macs_integer": round(cut.macs_integer),
                "cut_integer_percent": round(self.cut_percent(cut.macs_integer), 4),
                "macs_compact": cut.macs_compact,
                "cut_compact_percent": round(self.cut_percent(cut.macs_compact), 4),
                "macs_compact_linear": cut.macs_compact_linear,
                "params_compact": cut.params_compact,
            }
        return result | ({"layers": [asdict(layer) for layer in self.layers]} if layers else {})

    def __str__(self) -> str:
        from asfp.measurement.table import as_table

        return as_table(self)


def measure(
    model: nn.Module,
    example_inputs: Example,
    *,
    rate: float | None = None,
    layers: Layers = None,
    selection: str = "independent",
    streams: float | None = None,
    align: int = 1,
    repeats: int = 0,
) -> Measurement:
    """Multiply-adds (one sample), parameters and, with `rate` or `layers`, what pruning to that rate would leave.

    A convolution costs positions * weights, a linear map in * out; biases, norms and activations are not counted. A
    layer that is called twice counts twice in multiply-adds and once in parameters. The model itself is not changed
    and its weights do not matter: what is pruned and compacted is a copy with random ones. `rate`, `layers`,
    `selection`, `streams` and `align` are as in SoftPruner. With `repeats`, `latency_ms` is the median time of so many
    runs on the example, in evaluation mode.

    >>> import asfp
    >>> found = asfp.measure(asfp.create_model("resnet20"), torch.zeros(1, 3, 32, 32), rate=0.4)
    >>> found.macs_conv, found.macs_linear, found.params
    (40550400, 640, 269722)
    >>> round(found.cut_percent(found.pruned.macs_paper), 2)  # the paper prints 54.0
    53.96
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or not 0 <= repeats <= 1_000_000:
        raise AsfpError(f"repeats={repeats!r} is not a count: give 0 for no timing, or e.g. 30")
    if streams is not None and rate is None:
        raise AsfpError(f"streams={streams!r} is the rate of some layers: give rate= for the others, e.g. rate=0.3")
    model = unwrap(model)
    counted = count_layers(model, example_inputs)
    pruned = None
    if rate is not None or layers is not None:
        options = {"layers": layers, "selection": selection, "streams": streams, "align": align}
        pruned = _pruned(model, example_inputs, rate, options)
    latency = None
    if repeats:
        from asfp.bench import latency_ms

        latency = latency_ms(model, example_inputs, repeats)
    return Measurement(type(model).__name__, _shape(example_inputs), counted, pruned, latency)


def _pruned(model: nn.Module, example_inputs: Example, rate: float | None, options: Mapping[str, Any]) -> Pruned:
    copied = _with_random_weights(model)
    pruner = SoftPruner(copied, rate, epochs=1, example_inputs=example_inputs, **options)
    if pruner.together.streams is not None:
        paper, integer = pruner.together.macs_exact(), pruner.together.macs(1.0)
    else:
        rates = {layer.name: layer.goal for layer in pruner.layers}
        graph = trace_whole(copied, example_inputs)
        paper, integer = (convolution_macs(graph, rates, kept) for kept in (exact_fraction, whole_filters))
    pruner.step(1)
    small = count_layers(compact(copied, example_inputs, check=False), example_inputs)
    return Pruned(
        rate=None if isinstance(options["layers"], Mapping) else rate,
        macs_paper=paper,
        macs_integer=integer,
        macs_compact=sum(layer.macs_conv for layer in small),
        macs_compact_linear=sum(layer.macs_linear for layer in small),
        params_compact=sum(layer.params for layer in small),
        selection=pruner.selection,
        align=pruner.align,
        streams=pruner.streams,
    )


def _with_random_weights(model: nn.Module) -> nn.Module:
    """A copy in which no channel is zero by accident (as the last norm of a block often is at first)."""
    copied = copy_of(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_((0.1 + 0.9 * noise) / max(1, tensor[0].numel() if tensor.ndim > 1 else 1))
    return copied


def _shape(example_inputs: Example) -> tuple[int, ...]:
    tensors = [x for x in torch.utils._pytree.tree_leaves(example_inputs) if isinstance(x, torch.Tensor)]
    return tuple(tensors[0].shape) if tensors else ()
