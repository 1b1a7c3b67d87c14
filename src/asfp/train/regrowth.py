"""How pruned filters start again, beyond what the paper does: momentum, batch norm, softening, a frozen end.

All of it is off by default. Everything here is a function of the epoch, the weights and the pruner's masks, and is done
in place: a resumed run needs no state from here, captured steps see it, and all processes of a run act alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from asfp.errors import AsfpError
from asfp.filters import factors
from asfp.pruner import HardPruner, SoftPruner
from asfp.selection import Layer
from asfp.train.config import PruningConfig


class Regrowth:
    """What is done around each pruning: `before`, the pruner's step, an evaluation, `after`; `enforce_` in each step.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 1, bias=False), nn.Flatten(), nn.Linear(4, 2))
    >>> pruner = SoftPruner(net, 0.5, epochs=4, example_inputs=torch.zeros(1, 1, 1, 1))
    >>> regrowth = Regrowth(
    ...     PruningConfig(soften=1.0, soften_epochs=4), 4, pruner, torch.optim.SGD(net.parameters()), {}
    ... )
    >>> weight = net[0].weight.detach().clone()
    >>> regrowth.before(2)
    >>> mask = pruner.step(2).layers["0"].mask
    >>> regrowth.after(2)
    >>> torch.equal(net[0].weight[~mask], 0.5 * weight[~mask]), torch.equal(net[0].weight[mask], weight[mask])
    (True, True)
    """

    def __init__(
        self,
        config: PruningConfig,
        epochs: int,
        pruner: SoftPruner,
        optimizer: torch.optim.Optimizer,
        norms: Mapping[str, nn.Module],
    ) -> None:
        self.config, self.pruner, self.optimizer = config, pruner, optimizer
        self.epochs, self.frozen_after = epochs, epochs - config.freeze_epochs
        self.layers: list[Layer] = pruner.zeroed_layers
        self.norms = {layer.name: _norm_of(layer, norms) for layer in self.layers} if config.norm == "reset" else {}
        self._before: list[Tensor] = []
        self._factors: list[Tensor] = []

    @property
    def holding(self) -> bool:
        """Whether pruned filters are kept at zero in every step: in the frozen end, and always in hard pruning."""
        hard = isinstance(self.pruner, HardPruner) and bool(self.pruner.masks)
        return hard or bool(self._factors)

    def frozen(self, epoch: int) -> bool:
        """Whether the filters are no longer chosen in this epoch."""
        return epoch > self.frozen_after

    def resume(self, epoch: int) -> None:
        """Take up the state of after epoch `epoch`."""
        if self.config.freeze_epochs > 0 and epoch >= self.frozen_after:
            self._hold()

    def alpha(self, epoch: int) -> float:
        """The share of its weights that a filter pruned after this epoch restarts with."""
        last = min(self.config.soften_epochs or self.epochs // 2, self.frozen_after, self.epochs)
        return self.config.soften * max(0.0, 1.0 - epoch / last) if last else 0.0

    @torch.no_grad()
    def before(self, epoch: int) -> None:
        """Called before the pruning: remember the weights where they are needed after it."""
        self._before = [layer.weight.clone() for layer in self.layers] if self.alpha(epoch) > 0.0 else []

    @torch.no_grad()
    def after(self, epoch: int) -> None:
        """Called after a pruning and its evaluation: set the pruned filters up for the next epoch."""
        if epoch >= self.frozen_after:
            self.resume(epoch)
        elif epoch < self.epochs:
            for layer in self.layers:
                self._reset_norm(layer)
            for layer, weight in zip(self.layers, self._before, strict=False):
                gone = _along(~self.pruner.masks[layer.name], weight)
                layer.weight.copy_(torch.where(gone, weight * self.alpha(epoch), layer.weight))
        if self.config.momentum == "zero":
            for layer in self.layers:
                gone = ~self.pruner.masks[layer.name]
                self._zero_momentum(layer.module.weight, gone, transposed=layer.module.transposed)
                self._zero_momentum(layer.module.bias, gone)
        self._before = []

    @torch.no_grad()
    def enforce_(self) -> None:
        """Zero the held filters again; called after each step of the optimiser while `holding`."""
        if isinstance(self.pruner, HardPruner):
            self.pruner.enforce_()
        elif self._factors:
            tensors = [tensor for layer in self.layers for tensor in layer.tensors(self.pruner.zero_maps)]
            torch._foreach_mul_(tensors, self._factors)

    @torch.no_grad()
    def _hold(self) -> None:
        """A captured step reads the factors at their addresses, so from the second epoch on they are filled again."""
        self._factors = factors(self.layers, self.pruner.masks, self.pruner.zero_maps, self._factors)

    def _reset_norm(self, layer: Layer) -> None:
        norm = self.norms.get(layer.name)
        if norm is not None:
            gone = ~self.pruner.masks[layer.name]
            for parameter, value in ((norm.weight, 1.0), (norm.bias, self.config.norm_shift)):
                parameter.masked_fill_(gone, value)
                self._zero_momentum(parameter, gone)

    def _zero_momentum(self, parameter: Tensor | None, gone: Tensor, *, transposed: bool = False) -> None:
        buffer = None if parameter is None else self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            buffer = buffer.transpose(0, 1) if transposed else buffer
            buffer.masked_fill_(_along(gone, buffer), 0.0)


def _along(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))


def _norm_of(layer: Layer, norms: Mapping[str, nn.Module]) -> _BatchNorm:
    norm = norms.get(layer.name)
    if not isinstance(norm, _BatchNorm) or norm.weight is None or norm.bias is None:
        raise AsfpError(
            f"pruning.norm=reset needs a batch norm with scale and shift behind each pruned layer, and {layer.name!r} "
            "has none: leave the layer out with pruning.layers, or use pruning.norm=keep"
        )
    return norm
