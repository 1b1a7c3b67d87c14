"""For deployment: branches that stay among constants compute some of these, where engines move whole blocks only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx, nn

from asfp.compaction.effects import free_of_effects
from asfp.compaction.layers import BorderBias
from asfp.deployment.embeds import Embed, Places, Values, embed_again, is_moved, put
from asfp.deployment.padding import conv_like, meta_of, module_of, width_of
from asfp.deployment.widths import Kernels, Reading, close
from asfp.trace import tidy


def fill_branches(model: nn.Module, kernels: Kernels) -> nn.Module:
    """In place, of what `fold_batch_norms` gave: what is put among constants gets a width that is moved in blocks.

    The next of the constants become zero filters, with a bias, of the convolution that makes the branch.

    >>> import asfp
    >>> from asfp.deployment.folding import fold_batch_norms
    >>> net = asfp.create_model("torchvision:resnet18").eval()
    >>> x = torch.zeros(1, 3, 64, 64)
    >>> _ = asfp.SoftPruner(net, 0.3, 1, example_inputs=x).step(1)
    >>> small = fold_batch_norms(asfp.compact(net, x), x)
    >>> width = lambda model: model.get_submodule("layer3.0.conv2").out_channels
    >>> width(small), width(fill_branches(small, Kernels(moved=16)))
    (180, 192)
    """
    if not isinstance(model, fx.GraphModule) or not free_of_effects(model):
        return model
    reading = Reading(model, kernels)
    for embed in reading.embeds.values():
        _fill(reading, embed)
    tidy(model)
    return model


def _fill(reading: Reading, embed: Embed) -> None:
    made, width = reading.branch(embed), width_of(embed.value) or 0
    lacking = reading.kernels.width(width, moved=True, beside_depthwise=reading.has_depthwise) - width
    if made is None or not lacking:
        return
    taken, front = _next_constants(embed, width, lacking)
    if len(taken) < lacking:
        return
    chain = [embed.value]
    while chain[-1] is not made:
        chain += reading.sources(chain[-1])
    wanted = constants = embed.fill[taken]
    for node in reversed(chain[:-1]):
        constants = wanted if reading.depthwise(node) is not None else reading.after(node, constants)
    if not close(constants, wanted, float(np.abs(wanted).max()), embed.node.meta["val"].dtype):
        return
    places, new = front + np.arange(width), np.setdiff1d(np.arange(width + lacking), front + np.arange(width))
    for node in chain:
        module: Any = module_of(reading.model, node)
        if isinstance(module, BorderBias):
            module.integral = put(module.integral, 0, width + lacking, places)
        elif isinstance(module, nn.Conv2d):
            reading.model.set_submodule(str(node.target), _wider(module, places, new, wanted))
        node.meta = meta_of(node, width + lacking)
    index, fill = np.where(embed.places < 0, -1, embed.places + front), embed.fill.copy()
    index[taken] = new
    embed.node.replace_all_uses_with(embed_again(reading.model, embed.node, embed.value, index, fill))


def _next_constants(embed: Embed, width: int, count: int) -> tuple[Places, int]:
    """Places of so many constants, those beside the channels if these lie side by side; and how many are in front."""
    if is_moved(embed.places, width):
        return np.flatnonzero(embed.places < 0)[:count], 0
    first, last = np.flatnonzero(embed.places >= 0)[[0, -1]]
    end = min(len(embed.places), last + 1 + count)
    begin = max(0, first - (count - (end - last - 1)))
    return np.concatenate([np.arange(begin, first), np.arange(last + 1, end)]), int(first - begin)


def _wider(conv: nn.Conv2d, places: Places, new: Places, constants: Values) -> nn.Conv2d:
    width = len(places) + len(new)
    bias = put(torch.from_numpy(constants).to(conv.weight), 0, width, new) if constants.any() else None
    if conv.bias is not None:
        own = put(conv.bias.detach(), 0, width, places)
        bias = own if bias is None else own + bias
    return conv_like(conv, put(conv.weight.detach(), 0, width, places), bias)
