"""Convolution (transposed, grouped, depthwise) and Linear: where channels die, and where constants are folded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from asfp.compaction.channels import Channels, Labels, Mask, Unsupported, Values
from asfp.compaction.layers import BorderBias
from asfp.compaction.rules.base import Op, Rule, shape_of, take

if TYPE_CHECKING:
    from asfp.compaction.analyse import Analysis
    from asfp.compaction.rewrite import Rewriter

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, eq=False)
class Filters:
    """The weights of a layer as filters: [out, in / groups, taps], whatever the layer's own storage order."""

    weight: Tensor
    bias: Tensor | None
    groups: int
    transposed: bool

    @classmethod
    def of(cls, module: nn.Module) -> Filters:
        layer: Any = module
        weight, bias = layer.weight.detach(), layer.bias
        groups = int(getattr(module, "groups", 1))
        transposed = isinstance(module, TRANSPOSED)
        if transposed:  # stored as [in, out / groups, ...]
            weight = torch.cat([part.transpose(0, 1) for part in weight.chunk(groups)])
        return cls(weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(2), bias, groups, transposed)

    def reads(self) -> Mask:
        """reads[o, i]: filter o has a non-zero weight on the i-th input of its group."""
        return np.asarray((self.weight != 0).any(2).cpu().numpy(), dtype=bool)

    def per_filter(self, inputs: Any) -> Any:
        """Something per input channel, laid out as `reads`: row o holds the inputs of filter o's group."""
        out = self.weight.shape[0]
        return np.repeat(inputs.reshape(self.groups, -1), out // self.groups, axis=0)

    def per_input(self, hits: Mask) -> Mask:
        """From [out, in / groups] to one flag an input channel: does any filter say yes?"""
        out, inputs = hits.shape
        flags: Mask = hits.reshape(self.groups, out // self.groups, inputs).any(axis=1).reshape(-1)
        return flags

    def response(self, labels: Labels, values: Values, rows: Labels) -> Tensor:
        """What constant inputs give, tap by tap, in float64: sum over c of values[c] * weight[o, c, tap]."""
        assert self.groups == 1
        index = torch.as_tensor(labels, device=self.weight.device)
        weight = self.weight[torch.as_tensor(rows, device=self.weight.device)].index_select(1, index).double()
        return torch.einsum("oct,c->ot", weight, torch.as_tensor(values[labels], device=weight.device))


class Weighted(Rule):
    """y[o] = b[o] + sum over c of W[o, c] * x[c].

    A filter whose weights on live channels are all zero is constant, where the constants it reads give one number
    everywhere. An input is needed when a needed filter has a non-zero weight on it.
    """

    def axis(self, op: Op) -> int:
        layer: Any = op.module
        return len(shape_of(op.source)) - (1 if isinstance(layer, nn.Linear) else layer.weight.ndim - 1)

    def uniform(self, module: nn.Module) -> bool:
        """Whether a constant input gives the same number at every position."""
        if isinstance(module, TRANSPOSED):
            return False
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return True
        padding: Any = getattr(module, "padding", 0)
        if isinstance(padding, str):
            kernel: Any = module.kernel_size
            return padding == "valid" or all(k == 1 for k in kernel)
        return not np.any(padding)

    def forward(self, op: Op, state: Analysis) -> Channels:
        assert op.module is not None
        filters = Filters.of(op.module)
        source = state.along(op.source, self.axis(op))
        reads = state.facts(op.name, "reads", filters.reads).reshape(filters.weight.shape[:2])
        state.notes[op.node] = (filters, reads)
        nonzero = state.facts(op.name, "constants", lambda: source.nonzero)
        live = (reads & filters.per_filter(source.live)).any(axis=1)
        shifted = (reads & filters.per_filter(nonzero)).any(axis=1)
        uniform = self.uniform(op.module)
        if not uniform:
            live = live | shifted
        out = len(live)
        value = np.zeros(out) if filters.bias is None else filters.bias.detach().double().cpu().numpy().copy()
        if uniform and (shifted & ~live).any():
            sums = filters.weight.double().sum(2).cpu().numpy() * filters.per_filter(np.where(nonzero, source.value, 0))
            value += sums.sum(axis=1)
        value[live] = 0
        return Channels((self.axis(op),), live, value)

    def backward(self, op: Op, state: Analysis) -> None:
        assert op.module is not None
        filters, reads = state.notes[op.node]
        source = state.along(op.source, self.axis(op))
        need = state.need[op.node]
        if filters.groups > 1:
            _equalise(need, filters.groups, state.channels_of(op.node).live)
        wanted = filters.per_input(reads & need[:, None])
        constants = wanted & state.facts(op.name, "constants", lambda: source.nonzero)
        fold = self.foldable(op.module, filters)
        if not self.uniform(op.module) and filters.groups == 1:
            along = state.channels_of(op.source).axes == (self.axis(op),)
            carrier = state.carrier(op, wanted & source.live, constants, fold) if along else None
            if carrier is not None:
                constants, fold = carrier, False
            fold &= not state.facts.recall(op.name, "leave", lambda: False)  # plans from before there were carriers
        wanted &= source.live | (constants & (not fold))
        if filters.groups > 1:
            active: Mask = np.asarray(need.reshape(filters.groups, -1).any(axis=1))
            _equalise(wanted, filters.groups, source.live, active)
            state.notes[op.node] = (filters, reads, wanted)
        elif state.channels_of(op.source).axes == (self.axis(op),):
            wanted = state.in_blocks(op, op.source, wanted, ~source.live)
        state.want_along(op.source, self.axis(op), wanted)

    def foldable(self, module: nn.Module, filters: Filters) -> bool:
        """Whether constant inputs can be left out and made up for behind the layer."""
        return self.uniform(module) or (filters.groups == 1 and not filters.transposed)

    def emit(self, op: Op, out: Rewriter) -> None:
        assert op.module is not None
        state, module = out.state, op.module
        filters: Filters = state.notes[op.node][0]
        axis = self.axis(op)
        source = state.along(op.source, axis)
        rows = np.flatnonzero(state.need[op.node])
        if filters.groups == 1:
            rows = out.ordered(op.node, rows)
            node, columns = out.along(op.source, axis)
        else:
            columns = np.flatnonzero(state.notes[op.node][2])
            node = out.fetch_along(op.source, axis, columns)
        absent = np.setdiff1d(np.arange(source.size), columns)
        absent = absent[state.facts(op.name, "constants", lambda: source.nonzero)[absent]]
        small = out.shrink(op, module, _changes(module, filters, rows, columns))
        assert small == op.node.target
        result = out.copy(op.node, {op.source: node})
        if (carrier := state.carriers.get(op.node)) is not None:
            self.carry(op, out, filters, rows, columns, (carrier, absent), source.value)
        elif len(absent) and self.foldable(module, filters):
            result = self.make_up(op, out, filters, rows, absent, source.value, (result, node))
        out.define(op.node, result, rows)

    def carry(
        self, op: Op, out: Rewriter, filters: Filters, rows: Labels, columns: Labels, who: Any, values: Values
    ) -> None:
        """Give the constant channel that stays the weights that make up for all that are absent, border included:

        W'[o, carrier] = sum over the constants c, itself among them, of W[o, c] * value[c] / value[carrier]
        """
        carrier, absent = who
        module = out.module_at(op.node)
        weight: Tensor = module.weight.detach().clone()
        carried = filters.response(np.append(absent, carrier), values, rows) / (values[carrier] or 1.0)
        place = int(np.flatnonzero(columns == carrier)[0])
        of_carrier = weight[place] if filters.transposed else weight[:, place]
        of_carrier.copy_(carried.reshape(of_carrier.shape))
        module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        if len(absent):
            out.note_folded(op, len(absent), "carrier", 0)

    def make_up(
        self, op: Op, out: Rewriter, filters: Filters, rows: Labels, absent: Labels, values: Values, nodes: Any
    ) -> Any:
        """Fold what the absent constants contributed: into the bias where that is exact, else at the border too."""
        module, facts = out.module_at(op.node), out.state.facts
        result, source = nodes
        dtype, device = filters.weight.dtype, filters.weight.device
        if self.uniform(op.module):  # type: ignore[arg-type]
            sums = filters.weight.double().sum(2).cpu().numpy()
            kept = np.zeros(sums.shape[1] * filters.groups)
            kept[absent] = values[absent]
            shift = torch.as_tensor((sums * filters.per_filter(kept)).sum(axis=1)[rows], device=device)
            if facts(op.name, "shift", lambda: np.array([bool((shift != 0).any())]))[0]:
                bias = shift if filters.bias is None else filters.bias.detach()[_index(rows, device)].double() + shift
                module.bias = nn.Parameter(bias.to(dtype), requires_grad=module.weight.requires_grad)
                out.note_folded(op, len(absent), "bias", 0)
            return result
        response = filters.response(absent, values, rows)
        if not facts(op.name, "border", lambda: np.array([bool((response != 0).any())]))[0]:
            return result
        conv: Any = op.module
        kernel = response.reshape(len(rows), *conv.kernel_size).to(dtype)
        padding = conv.padding
        if isinstance(padding, str):  # "same": stride 1, the odd element of the padding comes last
            padding = tuple(d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
        border = BorderBias(kernel, conv.stride, padding, conv.dilation)
        positions = math.prod(shape_of(op.node)[-len(conv.kernel_size) :])
        out.note_folded(op, len(absent), "border", len(rows) * positions)
        return out.insert(f"{op.node.target}_border", border, (result, source))


class Border(Rule):
    """y + a map that depends on positions alone, one for each channel: what an earlier compaction left behind."""

    @staticmethod
    def output(op: Op) -> Any:
        return op.node.args[0]

    def forward(self, op: Op, state: Analysis) -> Channels:
        layer: Any = op.module
        source = state.channels_of(self.output(op))
        if source.axis != len(shape_of(op.node)) - len(layer.stride) - 1:
            raise Unsupported("its input's channels are not where it expects them")
        varies = state.facts(op.name, "varies", lambda: (layer.integral.flatten(1) != 0).any(1).cpu().numpy())
        return source.like(source.live | varies, source.value)

    def backward(self, op: Op, state: Analysis) -> None:
        state.want(self.output(op), state.need[op.node])
        state.exist(op.node.args[1])  # type: ignore[arg-type]

    def emit(self, op: Op, out: Rewriter) -> None:
        layer: Any = op.module
        source = out.physical(self.output(op))
        small = out.shrink(op, layer, {"integral": take(layer.integral, source.keep)})
        out.define(op.node, out.call(op.node, small, source.node, out.some(op.node.args[1])), source.keep)  # type: ignore[arg-type]


def _index(labels: Labels, device: torch.device) -> Tensor:
    return torch.as_tensor(labels, device=device)


def _equalise(mask: Mask, groups: int, live: Mask, active: Mask | None = None) -> None:
    """Give every active group as many members as the largest has, live ones first: torch's groups are even."""
    rows, lively = mask.reshape(groups, -1), live.reshape(groups, -1)
    chosen = rows.any(axis=1) if active is None else active
    if active is not None:
        rows[~active] = False
    if not chosen.any():
        return
    most = max(1, int(rows[chosen].sum(axis=1).max()))
    for g in np.flatnonzero(chosen):
        spare = np.flatnonzero(~rows[g])
        spare = spare[np.argsort(~lively[g][spare], kind="stable")]
        rows[g, spare[: most - int(rows[g].sum())]] = True


def _changes(module: nn.Module, filters: Filters, rows: Labels, columns: Labels) -> dict[str, Any]:
    """The attributes of the smaller layer: its parameters, and the sizes that go with them."""
    layer: Any = module
    weight: Tensor = layer.weight.detach()
    device = weight.device
    groups = filters.groups
    bias = None if filters.bias is None else filters.bias.detach()[_index(rows, device)]
    if groups == 1:
        out_axis, in_axis = (1, 0) if filters.transposed else (0, 1)
        small = weight.index_select(out_axis, _index(rows, device)).index_select(in_axis, _index(columns, device))
    else:
        group_in, group_out = filters.weight.shape[1], filters.weight.shape[0] // groups
        active = np.unique(rows // group_out)
        small_parts = []
        for g in active:
            o = rows[rows // group_out == g]
            i = columns[columns // group_in == g]
            part = weight[_index(i, device)] if filters.transposed else weight[_index(o, device)]
            inner = o - g * group_out if filters.transposed else i - g * group_in
            small_parts.append(part.index_select(1, _index(inner, device)))
        small, groups = torch.cat(small_parts), len(active)
    if isinstance(module, nn.Linear):
        return {"weight": small, "bias": bias, "in_features": len(columns), "out_features": len(rows)}
    return {
        "weight": small,
        "bias": bias,
        "in_channels": len(columns),
        "out_channels": len(rows),
        "groups": groups,
    }
