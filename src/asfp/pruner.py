"""Algorithm 1 of the paper: the rate, a score for each filter, the lowest of each layer, zero them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asfp.checks import (
    Schedule,
    check_align,
    check_epoch,
    check_flag,
    check_goal,
    check_scheduled,
    check_selection,
    check_streams,
    checked_state,
    schedule_goal,
)
from asfp.criteria import Scorer, resolve
from asfp.filters import count_regrown, factors, score_filters, scored_tensor, zero_
from asfp.schedule import AsymptoticSchedule, check_epochs
from asfp.selection import Layers, select_streams, unwrap
from asfp.steps import LayerStep, PruneStep
from asfp.together import Together


class SoftPruner:
    """After each epoch zero the floor(N * rate(epoch)) filters of lowest score in each layer, and let them train on.

    The model stays as it is: no hooks, wrappers or masks; the optimiser is not touched. Weights change in place, so
    compiled, distributed, channels-last and half-precision models work. All processes of a run choose alike.

    - `rate`: the share of each layer's filters that is pruned in the end. None: as the schedule or the mapping says.
    - `schedule`: epoch -> rate; `AsymptoticSchedule(rate, epochs)` when None, `ConstantSchedule(rate)` for SFP.
    - `criterion`: "l1", "l2", "geometric_median", "bn_scale", "random", or a callable weight -> scores.
    - `layers`: None for every convolution but projection shortcuts and those that make the model's output; a predicate
      (name, module) -> bool; or a mapping name -> rate. Depthwise convolutions follow the layer that feeds them.
    - `interval`: prune every so many epochs, and after the last.
    - `selection`: "independent", each layer by itself, as in the paper; "nested", the layers that write a residual
      stream keep prefixes of one common order, at the same counts; "coupled", all that write a stream, projection
      shortcuts too, prune the same channels, so that `asfp.compact` narrows the stream itself: fewer multiply-adds at
      the same rate. An operation without a rule ends a stream: what it reads is chosen independently.
    - `streams`: another rate for layers whose channels are added to those of others, a residual stream. Every block
      reads and writes it, so its width is memory traffic more than multiply-adds; 0 leaves them alone. None: `rate`.
    - `align`: keep multiples of so many filters, at the multiply-adds that the rate asks for; see `asfp.align`.
    - `zero_maps`: also zero the bias, the batch norm's shift and its running mean of the pruned filters, so that their
      maps are zero. Left alone, as in the paper's code, they make the map of a zero filter a constant. Use it for the
      smallest compact model (no constants to fold), or for other tools, which often take the maps for zero.
    - `example_inputs`: arguments of forward, for models whose forward depends on shapes.

    >>> net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 20, 3), nn.Flatten(), nn.LazyLinear(2))
    >>> pruner = SoftPruner(net, rate=0.4, epochs=3)
    >>> for epoch in range(1, 4):
    ...     pass  # train for one epoch
    ...     print(pruner.step(epoch))
    epoch 1: rate 0.3901, 10 of 30 filters zeroed, 0.0 % of the last regrown
    epoch 2: rate 0.3998, 10 of 30 filters zeroed, 0.0 % of the last regrown
    epoch 3: rate 0.4000, 12 of 30 filters zeroed, 0.0 % of the last regrown
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float | None,
        epochs: int,
        *,
        schedule: Schedule | None = None,
        criterion: str | Scorer = "l2",
        layers: Layers = None,
        interval: int = 1,
        selection: str = "independent",
        streams: float | None = None,
        align: int = 1,
        zero_maps: bool = False,
        example_inputs: Any = None,
    ) -> None:
        self.epochs = check_epochs(epochs)
        self.interval = check_epochs(interval, "interval")
        self.criterion = resolve(criterion)
        self.zero_maps = check_flag("zero_maps", zero_maps)
        self.selection = check_selection(selection)
        self.align = check_align(align)
        goal = check_goal(rate, schedule, self.epochs, isinstance(layers, Mapping))
        self.streams = check_streams(streams, isinstance(layers, Mapping))
        needs_norm = self.zero_maps or self.criterion.reads == "bn_scale"
        selected = select_streams(
            unwrap(model), layers, goal, selection=self.selection, stream_rate=self.streams,
            needs_streams=self.align > 1, needs_norm=needs_norm, example_inputs=example_inputs,
        )  # fmt: skip
        self.layers = selected.layers
        self.together = Together(selected, self.selection, self.align)
        """Which layers choose together, and how many filters each prunes."""
        self.rate = goal if goal is not None else max(layer.goal for layer in self.layers)
        self.schedule: Schedule = schedule if schedule is not None else AsymptoticSchedule(self.rate, self.epochs)
        self._goal = schedule_goal(self.schedule, self.epochs)
        self.zeroed_layers = [*self.layers, *(follower for layer in self.layers for follower in layer.followers)]
        self.zeroed_layers += [reader for reader, _ in selected.readers]
        """The layers that choose, and the depthwise ones that follow them or read a stream of theirs."""
        self._last: dict[str, int] = {}
        self.masks: dict[str, Tensor] = {}
        """The masks of the last pruning by layer name, True = kept; empty before the first."""
        for layer in self.layers:
            scored_tensor(layer, self.criterion)

    @torch.no_grad()
    def step(self, epoch: int) -> PruneStep:
        """Prune after epoch `epoch`, counted from 1 (0 for the rate before training), and say what was done."""
        epoch = check_epoch(epoch, self.epochs)
        share = self._share(epoch)
        if epoch % self.interval and epoch != self.epochs:
            return PruneStep(epoch, share * self.rate)
        counts = self._counts(share)
        scores = score_filters(self.layers, self.criterion, epoch)
        regrown = count_regrown(self.zeroed_layers, self.masks, scores)
        self.masks = self._with_followers(self._choose(scores, counts))
        zero_(self.zeroed_layers, self.masks, self.zero_maps)
        return self._record(epoch, share * self.rate, self.together.per_layer(counts), regrown)

    def counts_at(self, epoch: int) -> dict[str, int]:
        """How many filters a pruning after `epoch` zeroes, floor(N * rate(epoch)), by the layer that chooses.

        >>> net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.LazyLinear(2))
        >>> pruner = SoftPruner(net, 0.5, epochs=200)
        >>> pruner.counts_at(25), pruner.counts_at(199), pruner.counts_at(200)
        ({'0': 6}, {'0': 7}, {'0': 8})
        """
        counts = self.together.per_layer(self.together.counts(self._share(check_epoch(epoch, self.epochs))))
        return {layer.name: count for layer, count in zip(self.layers, counts, strict=True)}

    def _share(self, epoch: int) -> float:
        """How much of its goal each layer is pruned to: rate(epoch) / goal, Eq. 6."""
        return check_scheduled(self.schedule, epoch) / self._goal

    def _counts(self, share: float) -> list[int]:
        """N_{i+1} P_i', for each layer; coupled, for each part of a stream."""
        return self.together.counts(share)

    def _choose(self, scores: list[Tensor], counts: list[int]) -> list[Tensor]:
        """A mask for each layer, True = kept."""
        return self.together.choose(scores, counts)

    def _with_followers(self, chosen: list[Tensor]) -> dict[str, Tensor]:
        masks = {layer.name: mask for layer, mask in zip(self.layers, chosen, strict=True)}
        for layer in self.layers:
            for follower in layer.followers:
                masks[follower.name] = masks[layer.name].repeat_interleave(follower.repeat)
        return masks | self.together.readers(chosen)

    def _record(self, epoch: int, rate: float, counts: list[int], regrown: list[int]) -> PruneStep:
        last, self._last = self._last, {}
        for layer, count in zip(self.layers, counts, strict=True):
            self._last |= {layer.name: count} | {f.name: count * f.repeat for f in layer.followers}
        for layer in self.zeroed_layers[len(self._last) :]:  # readers of a stream: how many depends on the choice
            self._last[layer.name] = int((~self.masks[layer.name]).sum())
        steps = {
            layer.name: LayerStep(
                layer.name,
                layer.filters,
                self._last[layer.name],
                again / max(1, last.get(layer.name, 0)),
                self.masks[layer.name],
            )
            for layer, again in zip(self.zeroed_layers, regrown, strict=True)
        }
        return PruneStep(epoch, rate, sum(self._last.values()), sum(regrown) / max(1, sum(last.values())), steps)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to continue identically: tensors, numbers and strings only.

        >>> net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.LazyLinear(2))
        >>> sorted(SoftPruner(net, 0.4, epochs=3).state_dict())
        ['masks', 'settings']
        """
        return {"settings": self._settings(), "masks": {name: mask.clone() for name, mask in self.masks.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a pruner with the same settings on the same model."""
        masks = checked_state(state, self._settings(), {layer.name: layer.filters for layer in self.zeroed_layers})
        device = {layer.name: layer.weight.device for layer in self.zeroed_layers}
        self.masks = {name: mask.to(device[name], copy=True) for name, mask in masks.items()}
        self._last = {name: int((~mask).sum()) for name, mask in masks.items()}

    def _settings(self) -> dict[str, Any]:
        return {
            "pruner": type(self).__name__,
            "epochs": self.epochs,
            "interval": self.interval,
            "criterion": self.criterion.name,
            "selection": self.selection,
            "align": self.align,
            "zero_maps": self.zero_maps,
            "rates": [check_scheduled(self.schedule, max(1, self.epochs * i // 8)) for i in range(1, 9)],
            "layers": {layer.name: layer.goal for layer in self.layers},
        }

    def __repr__(self) -> str:
        filters = sum(layer.filters for layer in self.layers)
        return (
            f"{type(self).__name__}({len(self.layers)} layers, {filters} filters, rate={self.rate:g}, "
            f"epochs={self.epochs}, schedule={self.schedule}, criterion={self.criterion}, selection={self.selection}, "
            f"{'' if self.streams is None else f'streams={self.streams:g}, '}align={self.align})"
        )


class HardPruner(SoftPruner):
    """Like `SoftPruner`, but a filter once zeroed stays zero: later steps only add filters.

    Momentum and weight decay move a zero filter even where its gradient is zero, so call `enforce_()` after each
    `optimizer.step()`:

        pruner = HardPruner(model, rate=0.4, epochs=200)
        for epoch in range(1, 201):
            for x, y in data:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
                pruner.enforce_()
            print(pruner.step(epoch))

    `step` zeroes them too; its `regrown` is 0 as long as `enforce_` is called.

    >>> net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.Flatten(), nn.LazyLinear(2))
    >>> pruner = HardPruner(net, rate=0.4, epochs=3)
    >>> first = pruner.step(1).layers["0"].keep
    >>> nn.init.ones_(net[0].weight) is net[0].weight
    True
    >>> pruner.enforce_()
    >>> [int(filter.any()) for filter in net[0].weight] == [int(i in first) for i in range(10)]
    True
    """

    _factors: tuple[Tensor, ...] = ()
    _factors_of: dict[str, Tensor] | None = None
    _before: Sequence[int] = ()

    def step(self, epoch: int) -> PruneStep:
        """Prune after epoch `epoch`; where none is due, zero again what was chosen before."""
        result = super().step(epoch)
        self.enforce_()
        return result

    @torch.no_grad()
    def enforce_(self) -> None:
        """Zero all filters chosen so far; call it after each `optimizer.step()`."""
        if not self.masks:
            return
        tensors = [tensor for layer in self.zeroed_layers for tensor in layer.tensors(self.zero_maps)]
        moved = any(f.dtype != t.dtype or f.device != t.device for f, t in zip(self._factors, tensors, strict=False))
        if moved or self._factors_of is not self.masks:
            self._factors = tuple(factors(self.zeroed_layers, self.masks, self.zero_maps, self._factors))
            self._factors_of = self.masks
        torch._foreach_mul_(tensors, self._factors)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of a pruner with the same settings on the same model."""
        super().load_state_dict(state)
        self._before = self.together.per_unit([self.masks[layer.name] for layer in self.layers]) if self.masks else []

    def _counts(self, share: float) -> list[int]:
        counts = super()._counts(share)
        return [max(pair) for pair in zip(counts, self._before or counts, strict=True)]

    def _choose(self, scores: list[Tensor], counts: list[int]) -> list[Tensor]:
        self._before, gone = counts, None
        if self.masks:
            gone = [~self.masks[layer.name].to(score.device) for layer, score in zip(self.layers, scores, strict=True)]
        return self.together.choose(scores, counts, gone)
