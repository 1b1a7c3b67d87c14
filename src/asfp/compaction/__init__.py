"""Compaction: from a network full of zero filters to a smaller one that computes the same function.

Dead-channel elimination, sound by construction: constants are followed forward, demand backward, each operation by
its rule in one table; an operation without a rule costs compression, never correctness. Then it is checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from asfp.compaction.analyse import Analysis
from asfp.compaction.channels import Facts
from asfp.compaction.effects import with_effects
from asfp.compaction.graph import program
from asfp.compaction.layout import LAYOUTS, Prices, prices_of
from asfp.compaction.plan import DTYPES, Plan, make_plan, signature, unpack
from asfp.compaction.rewrite import Rewriter
from asfp.compaction.tune import candidates, fastest
from asfp.compaction.verify import Verification, outputs, self_check, verify
from asfp.errors import AsfpError, TraceError, VerificationError
from asfp.trace import Example, Leaf, as_arguments, copy_of, is_channels_last

__all__ = ["CompactModule", "Plan", "Verification", "apply", "compact", "verify"]


TUNE_REPEATS = 15


class CompactModule(fx.GraphModule):
    """The smaller network: a graph of ordinary modules, and the plan it was made by."""

    def __init__(self, root: Any, graph: fx.Graph, class_name: str = "CompactModule") -> None:
        graph.on_generate_code(lambda _: _by_dictionary)
        super().__init__(root, graph, class_name)

    @property
    def plan(self) -> Plan:
        return cast(Plan, self.meta["plan"])

    def __deepcopy__(self, memo: dict[int, Any]) -> CompactModule:
        return _again(super().__deepcopy__(memo), self.meta)

    def __reduce__(self) -> Any:
        build, arguments = super().__reduce__()
        return _unpickled, (build, arguments, self.meta)


_LAYER = re.compile(r"(?:getattr\()*\bself(?:\.\w+|, \"[^\"]+\"\))+(?=\()")


def _by_dictionary(code: list[str]) -> list[str]:
    """`self.features.conv(x)` as `self._modules["features"]._modules["conv"](x)`: the same without Module.__getattr__.

    Its calls are a few percent of a small network's time.

    >>> _by_dictionary(['y = getattr(self.features, "0").conv(x)', "b = self.bias"])
    ['y = self._modules["features"]._modules["0"]._modules["conv"](x)', 'b = self.bias']
    """

    def found(match: re.Match[str]) -> str:
        names = re.findall(r'\.(\w+)|"([^"]+)"', match[0])
        return "self" + "".join(f'._modules["{plain or quoted}"]' for plain, quoted in names)

    return [_LAYER.sub(found, line) for line in code]


def _again(module: fx.GraphModule, meta: dict[str, Any]) -> CompactModule:
    twin = CompactModule(module, module.graph, class_name=type(module).__name__)
    twin.training = module.training
    twin.meta.update(meta)
    return twin


def _unpickled(build: Any, arguments: Any, meta: dict[str, Any]) -> CompactModule:
    return _again(build(*arguments), meta)


def compact(
    model: nn.Module,
    example_inputs: Example,
    *,
    layout: str | Prices = "least",
    tune: str | None = None,
    leaf_modules: Sequence[Leaf] = (),
    check: bool = True,
) -> CompactModule:
    """A new, smaller model with compact(x) = model(x) for every x, batch size and input size that the model takes.

    Works on any model that torch.fx can trace, whatever zeroed its filters; the model is not changed. `.plan` says
    what was done and why. Before it returns, the result is compared with the model in float64 (where memory allows)
    and in the model's own precision; a difference raises VerificationError. `check=False` leaves that out.

    `layout` says how a branch that lost channels is added to a wider residual stream. "least": the fewest
    multiply-adds; its channels are padded or gathered into place. "zeros": its zero filters stay, so that no addition
    changes: best for GPUs. "auto": whichever costs less on a CPU, addition by addition; it also leaves in the zero
    filters of narrow layers where leaving them out would save no time, for batches as large as the example.
    `tune="openvino"` (or another engine of `asfp bench`) builds several, times them there, on the example, and returns
    the fastest.

    >>> import asfp
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> _ = model[0].weight.data[:3].zero_()
    >>> small = asfp.compact(model, torch.zeros(1, 3, 8, 8))
    >>> small.get_submodule("0")
    Conv2d(3, 5, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    >>> small.plan.macs_before, small.plan.macs_after
    (15872, 9920)
    """
    prices = prices_of(layout)
    if tune is not None and prices != prices_of("least"):
        raise AsfpError(f"tune={tune!r} measures which layout is fastest: leave out layout={layout!r}")
    reference = _reference(model, example_inputs)
    traced = _program(reference, example_inputs, leaf_modules)

    def build(prices: Prices, name: str) -> tuple[CompactModule, Rewriter]:
        result, state, out = _build(traced, Facts(), prices, _batch(example_inputs))
        result.meta["plan"] = make_plan(traced, state, out, name)
        result.meta["created_as"] = getattr(model, "created_as", None)
        result.meta["leaf_modules"] = tuple(leaf_modules)
        return result, out

    if tune is not None:
        name = fastest(lambda p: build(p, "")[0].eval(), lambda m: m.plan.shape, example_inputs, tune, TUNE_REPEATS)
        prices, layout = candidates()[name], f"{name}, measured on {tune}"
    result, out = build(prices, layout if isinstance(layout, str) else str(layout))
    if check:
        try:
            _check(reference, result, example_inputs, out)
        except VerificationError:
            if not any(folded.how == "carrier" for folded in result.plan.folded):
                raise
            result, out = build(replace(prices, carry=False), result.plan.layout)
            _check(reference, result, example_inputs, out)
    return _in_mode_of(model, result)


def _check(reference: nn.Module, result: CompactModule, example_inputs: Example, out: Rewriter) -> None:
    plan, leaf_modules = result.plan, result.meta["leaf_modules"]
    self_check(reference, result.eval(), example_inputs, lambda m, x: apply(plan, m, x, leaf_modules), out)


def apply(
    plan: Plan, model: nn.Module, example_inputs: Example | None = None, leaf_modules: Sequence[Leaf] = ()
) -> CompactModule:
    """The structure that a plan describes, cut out of `model`; which of its weights are zero is not looked at.

    Give it the architecture the plan was made for, with the pruned weights (the result equals `compact`'s) or with
    any others (to load a compact state dict into).

    >>> import asfp
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> _ = model[0].weight.data[:3].zero_()
    >>> plan = asfp.compact(model, torch.zeros(1, 3, 8, 8)).plan
    >>> again = apply(Plan.from_json(plan.to_json()), model)
    >>> again.get_submodule("0").out_channels
    5
    """
    if example_inputs is None:
        sample = next(model.parameters(), torch.zeros(0))
        types = [DTYPES[name] for name in plan.input_types]
        types = [sample.dtype if t.is_floating_point else t for t in types]
        example_inputs = {
            name: torch.zeros(shape, dtype=dtype, device=sample.device)
            for name, shape, dtype in zip(plan.input_names, plan.inputs, types, strict=True)
        }
    traced = _program(copy_of(model), example_inputs, leaf_modules)
    if signature(traced) != plan.signature:
        raise AsfpError(
            f"this plan was made for another architecture ({plan.model}) than the given {type(model).__name__}: "
            f"build the model with the same name and options, and the same leaf_modules"
        )
    facts = Facts({name: unpack(text) for name, text in plan.facts.items()})
    try:
        result, _, _ = _build(traced, facts, LAYOUTS["least"])
    except (KeyError, IndexError, ValueError) as error:
        raise AsfpError(f"this plan is damaged ({type(error).__name__}: {error}): make it again") from error
    result.meta["plan"] = plan
    result.meta["leaf_modules"] = tuple(leaf_modules)
    return _in_mode_of(model, result)


def _in_mode_of(model: nn.Module, result: CompactModule) -> CompactModule:
    """Training or evaluation, layer by layer as in the original; and channels last in memory where they were."""
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in result.named_modules():
        module.training = modes.get(name, model.training)
    return result.to(memory_format=torch.channels_last) if is_channels_last(model) else result


def _build(
    traced: fx.GraphModule, facts: Facts, prices: Prices, batch: int = 1
) -> tuple[CompactModule, Analysis, Rewriter]:
    state = Analysis(traced, facts, prices, batch)
    out = Rewriter(state)
    attributes, graph = out.run()
    result = CompactModule(attributes, graph, class_name=f"Compact{type(traced).__name__}")
    result.graph.eliminate_dead_code()
    result.delete_all_unused_submodules()
    with_effects(result)
    result.recompile()
    return result, state, out


def _batch(example_inputs: Example) -> int:
    """How many samples the example has."""
    sizes = [x.shape[0] for x in pytree.tree_leaves(as_arguments(example_inputs)) if isinstance(x, Tensor) and x.ndim]
    return max([1, *sizes])


def _program(model: nn.Module, example_inputs: Example, leaf_modules: Sequence[Leaf]) -> fx.GraphModule:
    """The traced model; with a batch of one doubled, so that no other axis can be mistaken for the batch."""
    args, kwargs = as_arguments(example_inputs)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim > 1]
    if tensors and all(x.shape[0] == 1 for x in tensors):
        double = pytree.tree_map(
            lambda x: torch.cat([x, x]) if isinstance(x, Tensor) and x.ndim > 1 else x, (args, kwargs)
        )
        try:
            return program(model, double[0] or double[1], tuple(leaf_modules))
        except TraceError:
            pass  # a model for single samples
    return program(model, example_inputs, tuple(leaf_modules))


def _reference(model: nn.Module, example_inputs: Example) -> nn.Module:
    """A copy of the model in evaluation mode that is known to run on the example."""
    if not isinstance(model, nn.Module):
        raise AsfpError(f"compact expects a torch.nn.Module, got {type(model).__name__}: pass the model itself")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter) or tensor.is_meta:
            raise AsfpError(f"{name} has no values yet: run the model once, or load its weights, before compacting it")
        infinite = isinstance(tensor, nn.Parameter) and bool(tensor.isinf().any())
        if tensor.is_floating_point() and (infinite or bool(tensor.isnan().any())):
            raise AsfpError(f"{name} holds NaN or infinite values: the model diverged, go back to a good checkpoint")
    args, kwargs = as_arguments(example_inputs)
    reference = copy_of(model).eval()
    try:
        outputs(reference, args, kwargs)
    except Exception as error:
        shapes = [tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        raise AsfpError(
            f"{type(model).__name__} does not run on example_inputs of shape {shapes}: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}; "
            f"pass an input as the model takes it, e.g. torch.zeros(1, 3, 224, 224), on the model's device"
        ) from error
    return reference
