"""The plan: what compaction did to a model and why, as plain data that prints as a table and goes to JSON."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from asfp.compaction.analyse import Analysis
from asfp.compaction.channels import Channels, Mask
from asfp.compaction.rewrite import Rewriter
from asfp.compaction.rules.base import Op, shape_of
from asfp.compaction.rules.weighted import TRANSPOSED, Filters, Weighted
from asfp.errors import AsfpError

FORMAT = 1
DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}
"""Types that an input may have, by name."""


@dataclass(frozen=True)
class LayerPlan:
    """One convolution or linear layer, before and after; an `after` of 0 means that the layer is gone."""

    name: str
    kind: str
    in_before: int
    in_after: int
    out_before: int
    out_after: int
    macs_before: int
    macs_after: int


@dataclass(frozen=True)
class BarrierPlan:
    """An operation whose inputs stay at full width, and the reason."""

    name: str
    operation: str
    reason: str


@dataclass(frozen=True)
class FoldedPlan:
    """Constant input channels that a layer no longer reads.

    `how` is "bias", which is free; "carrier", one constant channel that is still read, and makes up for the others; or
    "border", which costs so many `additions` a sample of the example's size.
    """

    layer: str
    channels: int
    how: str
    additions: int


@dataclass(frozen=True)
class Plan:
    """What `asfp.compact` did. `facts` are its findings about the weights, enough to do it again without them.

    >>> import asfp, torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 1))
    >>> _ = model[0].weight.data[:4].zero_()
    >>> print(asfp.compact(model, torch.zeros(1, 3, 8, 8)).plan.summary())
    Sequential: 8,928 MACs -> 4,464 (-50.00 %)
      2 of 2 layers smaller
      4 constant channels folded into 1 biases
    """

    model: str
    inputs: tuple[tuple[int, ...], ...]
    layers: tuple[LayerPlan, ...]
    barriers: tuple[BarrierPlan, ...]
    folded: tuple[FoldedPlan, ...]
    layouts: dict[str, str]
    constant_outputs: int
    signature: str
    facts: dict[str, str]
    input_names: tuple[str, ...]
    input_types: tuple[str, ...]
    layout: str = "least"
    computed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameters that the model's forward computes from others: here they are parameters of their own, by name."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """Equal for plans that give the same structure."""
        widths = tuple((x.name, x.in_after, x.out_after) for x in self.layers)
        return widths, tuple(sorted(self.layouts.items()))

    @property
    def macs_before(self) -> int:
        """Multiply-adds of convolutions and linear layers, one sample of the example's size."""
        return sum(layer.macs_before for layer in self.layers)

    @property
    def macs_after(self) -> int:
        return sum(layer.macs_after for layer in self.layers)

    @property
    def corrections(self) -> int:
        """Layers that need an addition of their own to stay exact at zero-padded borders."""
        return sum(f.how == "border" for f in self.folded)

    def to_json(self) -> str:
        """One JSON object; `Plan.from_json` reads it back."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan from its JSON; raises AsfpError where the text is something else."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise AsfpError(f"this plan has another format than {FORMAT}: make it again with asfp.compact")
            if not len(data["inputs"]) == len(data["input_names"]) == len(data["input_types"]):
                raise ValueError("its inputs, their names and types differ in number")
            if unknown := set(data["input_types"]) - set(DTYPES):
                raise ValueError(f"its inputs have types {sorted(unknown)}")
            return cls(
                model=str(data.pop("model")),
                inputs=tuple(tuple(int(n) for n in shape) for shape in data.pop("inputs")),
                layers=tuple(LayerPlan(**x) for x in data.pop("layers")),
                barriers=tuple(BarrierPlan(**x) for x in data.pop("barriers")),
                folded=tuple(FoldedPlan(**x) for x in data.pop("folded")),
                layouts=dict(data.pop("layouts")),
                facts=dict(data.pop("facts")),
                computed={str(k): tuple(map(str, v)) for k, v in data.pop("computed", {}).items()},
                input_names=tuple(str(n) for n in data.pop("input_names")),
                input_types=tuple(str(n) for n in data.pop("input_types")),
                **data,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, AsfpError):
                raise
            raise AsfpError(f"this is not a compaction plan ({type(error).__name__}: {error})") from error

    def summary(self) -> str:
        """A few lines for people."""
        before, after = self.macs_before, self.macs_after
        share = f" (-{100 * (1 - after / before):.2f} %)" if before else ""
        gone = sum(layer.out_after == 0 for layer in self.layers)
        lines = [f"{self.model}: {before:,} MACs -> {after:,}{share}"]
        changed = sum((x.in_after, x.out_after) != (x.in_before, x.out_before) for x in self.layers)
        lines.append(f"  {changed} of {len(self.layers)} layers smaller" + (f", {gone} of them gone" if gone else ""))
        if self.folded:
            count = sum(f.channels for f in self.folded)
            kinds = (("bias", "biases"), ("carrier", "channels that carry others"), ("border", "border corrections"))
            numbers = ((sum(f.how == how for f in self.folded), words) for how, words in kinds)
            where = [f"{n} {words}" for n, words in numbers if n]
            cost = sum(f.additions for f in self.folded)
            price = f" ({cost:,} additions)" if cost else ""
            lines.append(f"  {count} constant channels folded into {' and '.join(where)}{price}")
        if self.layouts:
            counts = ", ".join(f"{n} {how}" for how, n in sorted(Counter(self.layouts.values()).items()))
            lines.append(f"  additions: {counts}")
        if self.barriers:
            lines.append(f"  {len(self.barriers)} barriers (kept at full width)")
        if self.computed:
            lines.append(f"  {len(self.computed)} computed parameters are parameters of their own from here on")
        if self.constant_outputs:
            lines.append(f"  {self.constant_outputs} output channels no longer depend on the input")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The whole plan as a table."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.model}, compact", title_justify="left")
        for name in ("layer", "kind", "in", "out", "MACs", "after", "saved"):
            table.add_column(name, justify="left" if name in ("layer", "kind") else "right")
        for x in self.layers:
            saved = f"{100 * (1 - x.macs_after / x.macs_before):.1f} %" if x.macs_before else "-"
            ins = f"{x.in_before} -> {x.in_after}" if x.in_before != x.in_after else str(x.in_before)
            outs = f"{x.out_before} -> {x.out_after}" if x.out_before != x.out_after else str(x.out_before)
            table.add_row(x.name, x.kind, ins, outs, f"{x.macs_before:,}", f"{x.macs_after:,}", saved)
        text = io.StringIO()
        console = Console(file=text, width=120, color_system=None)
        console.print(table)
        for title, rows in (
            ("Barriers", [f"{b.name}: {b.operation}: {b.reason}" for b in self.barriers]),
            (
                "Constants folded",
                [f"{f.layer}: {f.channels} channels into the {f.how}, {f.additions:,} additions" for f in self.folded],
            ),
            ("Additions", [f"{name}: {how}" for name, how in self.layouts.items()]),
            (
                "Computed once, trained by themselves from here on",
                [f"{name}: from {', '.join(sources)}" for name, sources in self.computed.items()],
            ),
        ):
            if rows:
                console.print(f"{title}:", *(f"  {row}" for row in rows), sep="\n", highlight=False)
        return text.getvalue() + self.summary()


WITHOUT_EFFECT = {"training", "inplace", "momentum", "p", "track_running_stats", "created_as"}
"""Settings of modules that change nothing in evaluation."""


def signature(traced: fx.GraphModule) -> str:
    """A fingerprint of the graph, its sizes and settings, not of its weights: what equals it computes the same."""
    digest = hashlib.sha256()
    for node in traced.graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        given = _spelled((node.args, node.kwargs))
        digest.update(f"{node.op} {node.name} {target} {given}\n".encode())
        if node.op == "call_module":
            for name, module in traced.get_submodule(str(node.target)).named_modules():
                known = {k: v for k, v in vars(module).items() if k not in WITHOUT_EFFECT and not k.startswith("_")}
                digest.update(f"  {name} {type(module).__name__} {_spelled(dict(sorted(known.items())))}\n".encode())
    for name, value in traced.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
    return digest.hexdigest()[:32]


def _spelled(value: Any) -> str:
    """Numbers, words and nodes as text; of anything else its type alone, which is the same in every process."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_spelled, value)) + ")"
    if isinstance(value, slice):
        return f"slice{_spelled((value.start, value.stop, value.step))}"
    plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))
    return repr(value) if plain else type(value).__name__


def make_plan(traced: fx.GraphModule, state: Analysis, out: Rewriter, layout: str) -> Plan:
    model = type(traced).__name__
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor)]
    barriers = tuple(BarrierPlan(op.name, op.spelling, reason) for op, reason in state.barriers)
    folded = tuple(FoldedPlan(*f) for f in out.folded)
    output = next(n for n in traced.graph.nodes if n.op == "output")
    constant = sum(
        int((~state.channels[n].live).sum()) for n in output.all_input_nodes if isinstance(state.channels[n], Channels)
    )
    facts = {name: pack(mask) for name, mask in state.facts.recorded.items()}
    return Plan(
        model=model,
        inputs=tuple(shape_of(n) for n in inputs),
        layers=_layers(state, out),
        barriers=barriers,
        folded=folded,
        layouts=dict(out.layouts),
        constant_outputs=constant,
        signature=signature(traced),
        facts=facts,
        input_names=tuple(str(n.target) for n in inputs),
        input_types=tuple(str(n.meta["val"].dtype).removeprefix("torch.") for n in inputs),
        layout=layout,
        computed=_computed(traced, out),
    )


def _computed(traced: fx.GraphModule, out: Rewriter) -> dict[str, tuple[str, ...]]:
    """What is left of the tensors that were worked out from parameters."""
    trained = {name for name, _ in traced.named_parameters(remove_duplicate=False)}
    return {
        name: sources
        for name, sources in traced.meta["computed"].items()
        if {name, name.rpartition(".")[0]} & set(out.attributes) and trained & set(sources)
    }


def _layers(state: Analysis, out: Rewriter) -> tuple[LayerPlan, ...]:
    layers = []
    for op in state.ops:
        if op.module is None or not hasattr(op.module, "weight") or not _is_layer(op.module):
            continue
        before: Any = op.module
        after: Any = out.attributes.get(str(op.node.target), before) if op.node in state.existing else None
        positions = _positions(op, before)
        sizes = [(*_widths(m), positions * m.weight.numel()) if m is not None else (0, 0, 0) for m in (before, after)]
        (i0, o0, m0), (i1, o1, m1) = sizes
        layers.append(LayerPlan(str(op.node.target), type(before).__name__, i0, i1, o0, o1, m0, m1))
    return tuple(layers)


def _is_layer(module: nn.Module) -> bool:
    from asfp.compaction.rules import MODULES

    return isinstance(MODULES.get(type(module)), Weighted)


def _widths(module: Any) -> tuple[int, int]:
    filters = Filters.of(module)
    return int(filters.weight.shape[1]) * filters.groups, int(filters.weight.shape[0])


def _positions(op: Op, module: Any) -> int:
    """How often each weight is used for one sample."""
    shape = shape_of(op.source if isinstance(module, TRANSPOSED) else op.node)
    dims = module.weight.ndim - 2 if module.weight.ndim > 2 else 0
    return math.prod(shape[len(shape) - dims :]) if dims else math.prod(shape[1:-1])


def pack(mask: Mask) -> str:
    """A mask as text: its length and its bits."""
    flat = np.asarray(mask, dtype=bool).reshape(-1)
    return f"{flat.size}:{np.packbits(flat).tobytes().hex()}"


def unpack(text: str) -> Mask:
    """The mask from its text.

    >>> unpack(pack(np.array([True, False, True])))
    array([ True, False,  True])
    """
    length, _, bits = text.partition(":")
    flat = np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8))[: int(length)].astype(bool)
    if flat.size != int(length):
        raise AsfpError("a plan's facts are damaged: make it again with asfp.compact")
    return flat
