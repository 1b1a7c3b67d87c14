"""Branches that are padded with zeros or constants to the width of the stream that they are added to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Span = tuple[int, int]
"""First channel and the one after the last."""


@dataclass(frozen=True)
class Branch:
    """What a padded value is made of: `value` on the channels `own`, and constants or zeros (None) around it."""

    value: fx.Node
    own: Span
    before: fx.Node | None = None
    after: fx.Node | None = None

    def on(self, span: Span) -> fx.Node | None:
        """What it is on a piece of the stream."""
        return self.value if span == self.own else self.before if span[1] <= self.own[0] else self.after


def branch_of(node: fx.Node) -> Branch | None:
    """What a value is made of that one reader has and that pads another, which nobody else reads."""
    if len(node.users) != 1 or width_of(node) is None:
        return None
    parts: dict[Any, Callable[[fx.Node], Branch | None]] = {F.pad: _padded, torch.cat: _surrounded}
    branch = parts[node.target](node) if node.target in parts else None
    if branch is None or len([user for user in branch.value.users if not _asks_for_shape(user)]) != 1:
        return None
    return branch


def _padded(node: fx.Node) -> Branch | None:
    """F.pad of channels, and of nothing else, with zeros."""
    value, pads = (*node.args, None)[:2]
    width = width_of(node)
    assert width is not None
    if node.kwargs.get("mode", "constant") != "constant" or node.kwargs.get("value") or len(node.args) != 2:
        return None
    if not isinstance(value, fx.Node) or not isinstance(pads, (tuple, list)) or len(pads) != 6 or any(pads[:4]):
        return None
    before, after = pads[4:]
    if not isinstance(before, int) or not isinstance(after, int) or min(before, after) < 0:
        return None
    return Branch(value, (before, width - after))


def _surrounded(node: fx.Node) -> Branch | None:
    """A concatenation of constants, a value and constants, as `Surround` makes it."""
    parts, axis = (*node.args, None)[:2]
    if axis != 1 or node.kwargs or not isinstance(parts, (tuple, list)) or len(parts) != 3:
        return None
    before, value, after = parts
    widths = [width_of(part) for part in (before, value, after)]
    if any(width is None for width in widths) or not all(_is_constant(part) for part in (before, after)):
        return None
    first, own, _ = (width or 0 for width in widths)
    return Branch(value, (first, first + own), before.args[0], after.args[0])  # type: ignore[union-attr, arg-type]


def _is_constant(node: Any) -> bool:
    """Whether a value is one number a channel, for images of any size."""
    expanded = isinstance(node, fx.Node) and node.op == "call_method" and node.target == "expand"
    source = node.args[0] if expanded else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return False
    return width_of(source) is not None and tuple(source.meta["val"].shape[2:]) == (1, 1)


def _asks_for_shape(user: fx.Node) -> bool:
    return user.target is getattr and user.args[1:] == ("shape",)


def width_of(node: Any) -> int | None:
    """The channels of an image's value, where they are known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return int(value.shape[1]) if isinstance(value, torch.Tensor) and value.ndim == 4 else None
