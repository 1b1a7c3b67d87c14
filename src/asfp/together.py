"""How many filters of each layer go, and which ones: independent, nested or coupled.

All three choose from units. A unit is a set of channels with one score each, of which the lowest are pruned: a layer's
filters, or, coupled, channels of a stream that the same layers write.

The common score of a stream's channel is the mean, over the filters f that write it, of s_f^2 / mean(s^2), where s are
the criterion's scores of f's layer (shifted to begin at 0 where some are negative): by the l2 norm, f's share of its
layer's weights. Nested, each layer prunes the lowest of this common order; coupled, all prune the same channels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from asfp.align import align_kept, count_on_the_way, multiple_for
from asfp.costs import Costs
from asfp.filters import count_pruned, keep_all_but_lowest, mean_at, normalised
from asfp.flow import Width
from asfp.selection import Layer, Selected
from asfp.streams import Ids, shared_streams

WIDEST = {"nested": Width.FULL, "coupled": Width.FREE}
"""How wide a stream may be for its writers to choose together; those of a wider one choose independently."""


@dataclass(frozen=True)
class Unit:
    """Channels that are ranked against each other, and the layers whose filters write them."""

    size: int
    writers: tuple[tuple[int, int], ...]
    """(layer, how many of its filters write each channel)."""


class Together:
    """The units of a selection, how many of each are pruned, and which.

    >>> from asfp import SoftPruner, create_model
    >>> together = SoftPruner(create_model("resnet8"), 0.5, epochs=1, selection="coupled").together
    >>> [(unit.size, [together.layers[i].name for i, _ in unit.writers]) for unit in together.units[3:5]]
    [(16, ['conv1', 'layer1.0.conv2', 'layer2.0.conv2', 'layer3.0.conv2']), (16, ['layer2.0.conv2', 'layer3.0.conv2'])]
    >>> together.per_layer(together.counts(1.0))
    [8, 8, 8, 16, 16, 32, 32]
    """

    def __init__(self, selected: Selected, selection: str, align: int) -> None:
        self.layers = selected.layers
        self.streams = selected.streams
        self.align = align
        self.coupled = selection == "coupled"
        self._joint = self._find_joint(selection)
        self._number()
        alone = [i for i in range(len(self.layers)) if not self.coupled or i not in self._joint]
        self.units = [Unit(self.layers[i].filters, ((i, 1),)) for i in alone] + self._groups
        self._readers = [(layer.name, self._writers_of(ids)) for layer, ids in selected.readers]
        self._tables: dict[torch.device, tuple[Tensor, list[Tensor]]] = {}
        self._kept = self._align() if align > 1 else []
        self._goal = self._settle([self._count(i, layer, 1.0) for i, layer in enumerate(self.layers)])

    def _find_joint(self, selection: str) -> list[int]:
        """The layers that choose together with others."""
        if self.streams is None or selection not in WIDEST:
            return []
        place = {layer.name: i for i, layer in enumerate(self.layers)}
        found = [[place[n] for n in names if n in place] for names in shared_streams(self.streams, WIDEST[selection])]
        return sorted(i for members in found if len(members) > 1 for i in members)

    def _number(self) -> None:
        """Number the channels of the joint layers so that those with the same writers, a group, lie side by side."""
        writers: defaultdict[int, list[int]] = defaultdict(list)  # channel -> layers, in order
        for i in self._joint:
            for channel in self._channels(i).tolist():
                writers[channel].append(i)
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for channel in sorted(writers):
            groups[tuple(writers[channel])].append(channel)
        order = sorted(groups, key=lambda g: (-len(set(g)), groups[g][0]))
        number = {channel: n for n, channel in enumerate(c for g in order for c in groups[g])}
        self._index = [np.array([number[c] for c in self._channels(i).tolist()]) for i in self._joint]
        self._writers = len(number)
        self._groups = [
            Unit(len(groups[g]), tuple((i, g.count(i)) for i in sorted(set(g))))
            for g in (order if self.coupled else ())
        ]

    def _channels(self, i: int) -> Ids:
        assert self.streams is not None
        return self.streams.writes[self.layers[i].name]

    # how many

    def counts(self, share: float) -> list[int]:
        """For each unit, how many of its channels are pruned at `share` of each layer's goal; never more than at it."""
        if share >= 1.0 and self.align > 1:
            return list(self._goal)
        counts = self._split([self._count(i, layer, share) for i, layer in enumerate(self.layers)])
        if share >= 1.0 or not self._groups:
            return counts
        return [min(pair) for pair in zip(counts, self._goal, strict=True)]

    def per_layer(self, counts: Sequence[int]) -> list[int]:
        """For each layer, how many of its filters that makes."""
        found = [0] * len(self.layers)
        for unit, count in zip(self.units, counts, strict=True):
            for layer, repeat in unit.writers:
                found[layer] += count * repeat
        return found

    def per_unit(self, masks: Sequence[Tensor]) -> list[int]:
        """The counts that made these masks, one a layer."""
        found = [0] * len(self.units)
        groups = len(self.units) - len(self._groups)
        for u, unit in enumerate(self.units[:groups]):
            found[u] = int((~masks[unit.writers[0][0]]).sum())
        if self._groups:
            gone = np.zeros(self._writers, bool)
            for i, index in zip(self._joint, self._index, strict=True):
                gone[index[~masks[i].cpu().numpy()]] = True
            starts = np.cumsum([0, *(unit.size for unit in self._groups)])
            found[groups:] = [int(gone[a:b].sum()) for a, b in pairwise(starts)]
        return found

    def _count(self, i: int, layer: Layer, share: float) -> int:
        if self.align == 1:
            return count_pruned(layer.filters, share * layer.goal)
        multiple = multiple_for(layer.filters, self.align)
        if multiple == 1:
            return min(count_pruned(layer.filters, share * layer.goal), layer.filters - self._kept[i])
        return count_on_the_way(layer.filters, self._kept[i], multiple, share)

    def _split(self, targets: Sequence[int]) -> list[int]:
        """From the layers' counts to the units': the groups of a stream, the most shared first, fill their layers."""
        counts = [targets[unit.writers[0][0]] for unit in self.units[: len(self.units) - len(self._groups)]]
        done = [0] * len(self.layers)
        seen = [0] * len(self.layers)
        for unit in self._groups:
            wanted = []
            for i, repeat in unit.writers:
                seen[i] += unit.size * repeat
                last = seen[i] == self.layers[i].filters
                target = targets[i] if last else targets[i] * seen[i] // self.layers[i].filters
                wanted.append((not last, (target - done[i]) // repeat))
            _, count = min(wanted)
            room = min((self.layers[i].filters - 1 - done[i]) // repeat for i, repeat in unit.writers)
            count = max(0, min(count, room, unit.size))
            for i, repeat in unit.writers:
                done[i] += count * repeat
            counts.append(count)
        return counts

    def _settle(self, targets: Sequence[int]) -> list[int]:
        """The units' counts at the goal. Aligned, a group of channels that is one of several parts of a layer keeps
        more or fewer where that makes a multiple of the layer's sum; of those ways the one closest in multiply-adds.
        """
        counts = self._split(targets)
        if self.align == 1 or not self._groups:
            return counts
        costs, first = self.costs(), len(self.units) - len(self._groups)
        odd = self._odd(counts)
        while odd:
            ways = []
            for u, unit in enumerate(self._groups, first):
                if any(i in odd for i, _ in unit.writers):
                    trials = [[*counts[:u], gone, *counts[u + 1 :]] for gone in range(unit.size + 1)]
                    ways += [(self._odd(trial), trial) for trial in trials]
            goal = costs.macs([u.size - c for u, c in zip(self.units, counts, strict=True)])
            better = [(len(left), trial) for left, trial in ways if left is not None and len(left) < len(odd)]
            if not better:
                break
            fewest = min(left for left, _ in better)
            counts = min(
                (trial for left, trial in better if left == fewest),
                key=lambda trial: abs(costs.macs([u.size - c for u, c in zip(self.units, trial, strict=True)]) - goal),
            )
            odd = self._odd(counts)
        return counts

    def _odd(self, counts: Sequence[int]) -> set[int] | None:
        """The layers that would keep neither a multiple nor all of their filters, though they are wide enough; None
        where one would keep nothing.
        """
        gone = self.per_layer(counts)
        if any(layer.filters == count for layer, count in zip(self.layers, gone, strict=True)):
            return None
        sizes = [layer.filters for layer in self.layers]
        return {i for i, n in enumerate(sizes) if gone[i] and (n - gone[i]) % multiple_for(n, self.align)}

    def _align(self) -> list[int]:
        """How many filters each layer keeps in the end; layers that write the same channels keep the same number."""
        alike: dict[object, list[int]] = {}
        for i, layer in enumerate(self.layers):
            key = (tuple(sorted(self._channels(i).tolist())), layer.goal) if i in self._joint else i
            alike.setdefault(key, []).append(i)
        clusters = list(alike.values())
        sets = [set(self._channels(m[0]).tolist()) if self.coupled and m[0] in self._joint else set() for m in clusters]
        inner = [[j for j, part in enumerate(sets) if part and part < whole] for whole in sets]
        first = [self.layers[members[0]] for members in clusters]
        sizes = [layer.filters for layer in first]
        asked = [layer.filters - count_pruned(layer.filters, layer.goal) for layer in first]
        kept = [0] * len(self.layers)

        def spread(counts: Sequence[int]) -> list[int]:
            for members, count in zip(clusters, counts, strict=True):
                for i in members:
                    kept[i] = count
            return kept

        costs = self.costs()

        def left(counts: Sequence[int]) -> list[int]:
            targets = [layer.filters - k for layer, k in zip(self.layers, spread(counts), strict=True)]
            return [u.size - c for u, c in zip(self.units, self._split(targets), strict=True)]

        kept_by_cluster = align_kept(
            sizes, asked, self.align, lambda c: costs.macs(left(c)), inner, lambda c: costs.elements(left(c))
        )
        return list(spread(kept_by_cluster))

    def macs(self, share: float) -> float:
        """Multiply-adds of the convolutions, for one sample, with this share of the goal pruned, in whole filters."""
        counts = self.counts(share)
        return self.costs().macs([unit.size - count for unit, count in zip(self.units, counts, strict=True)])

    def macs_exact(self) -> float:
        """The same with N (1 - P) of N filters kept, not rounded."""
        return self.costs().macs([u.size * (1 - self.layers[u.writers[0][0]].goal) for u in self.units])

    def costs(self) -> Costs:
        """Multiply-adds by how much of each unit is kept; a stream that is not coupled keeps its width."""
        assert self.streams is not None
        unit_of = np.full(len(self.streams.width), -1)
        written: dict[str, list[tuple[int, int]]] = {}
        for u, unit in enumerate(self.units):
            for i, repeat in unit.writers:
                written.setdefault(self.layers[i].name, []).append((u, repeat))
        alone = len(self.units) - len(self._groups)
        for u, unit in enumerate(self.units[:alone]):
            name = self.layers[unit.writers[0][0]].name
            if name in self.streams.filters:
                unit_of[self.streams.filters[name]] = u
        starts = np.cumsum([0, *(unit.size for unit in self._groups)])
        for i, index in zip(self._joint, self._index, strict=True):
            if self.coupled:
                group = np.full(len(unit_of), -1)
                group[self._channels(i)] = alone + np.searchsorted(starts, index, side="right") - 1
                unit_of = np.where(group[self.streams.channel] >= 0, group[self.streams.channel], unit_of)
        return Costs(self.streams, unit_of, written, [unit.size for unit in self.units])

    # which

    def choose(
        self, scores: Sequence[Tensor], counts: Sequence[int], gone: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """For each layer a mask, True = kept; filters in `gone` are taken first."""
        ranked = (
            list(scores) if gone is None else [s.masked_fill(g, -math.inf) for s, g in zip(scores, gone, strict=True)]
        )
        if not self._joint:
            return keep_all_but_lowest(ranked, counts)
        device = scores[self._joint[0]].device
        table, index = self._on(device)
        common = mean_at(normalised([scores[i] for i in self._joint], device), table)
        lost = None
        if gone is not None:
            lost = mean_at([gone[i].to(device, common.dtype) for i in self._joint], table)
        if self.coupled:
            return self._choose_coupled(
                ranked, counts, common if lost is None else common.masked_fill(lost > 0, -1), index
            )
        order = common.argsort(stable=True)
        if lost is not None:
            order = order[lost[order].argsort(stable=True, descending=True)]
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
        for i, at in zip(self._joint, index, strict=True):
            ranked[i] = rank[at].to(scores[i].device)
            if gone is not None:
                ranked[i] = ranked[i].masked_fill(gone[i], -1)
        return keep_all_but_lowest(ranked, counts)

    def _choose_coupled(
        self, ranked: list[Tensor], counts: Sequence[int], common: Tensor, index: list[Tensor]
    ) -> list[Tensor]:
        alone = self.units[: len(self.units) - len(self._groups)]
        units = [ranked[unit.writers[0][0]] for unit in alone] + list(common.split([u.size for u in self._groups]))
        kept = keep_all_but_lowest(units, counts)
        masks = dict(zip((unit.writers[0][0] for unit in alone), kept, strict=False))
        stream = torch.cat(kept[len(alone) :])
        for i, at in zip(self._joint, index, strict=True):
            masks[i] = stream[at].to(ranked[i].device)
        return [masks[i] for i in range(len(self.layers))]

    def readers(self, masks: Sequence[Tensor]) -> dict[str, Tensor]:
        """The masks of the depthwise convolutions that read a stream: a filter goes where all that it reads is gone."""
        if not self._readers:
            return {}
        device = masks[0].device
        always = torch.tensor([False, True], device=device)
        flat = torch.cat([*(mask.to(device) for mask in masks), always])
        return {name: flat[places.to(device)].any(1) for name, places in self._readers}

    def _writers_of(self, ids: Ids) -> Tensor:
        """For each channel the places of its writers among all filters and then [never kept, always kept]."""
        assert self.streams is not None
        total = sum(layer.filters for layer in self.layers)
        places: defaultdict[int, list[int]] = defaultdict(list)
        at = 0
        for layer in self.layers:
            for place, channel in enumerate(self.streams.writes.get(layer.name, np.array([], int)).tolist(), at):
                places[channel].append(place)
            at += layer.filters
        chosen = {id(self.streams.writes[layer.name]) for layer in self.layers if layer.name in self.streams.writes}
        fixed = [w for w in self.streams.writes.values() if id(w) not in chosen]
        kept = set(np.concatenate([np.flatnonzero(self.streams.width), *fixed]).tolist())
        rows = [[total + 1] if c in kept or not places[c] else places[c] for c in ids.tolist()]
        most = max(map(len, rows))
        return torch.tensor([row + [total] * (most - len(row)) for row in rows], device="cpu")

    def _on(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """For each channel the places of its filters among all joint ones; for each joint layer its channels."""
        if device not in self._tables:
            index = np.concatenate(self._index)
            order = np.argsort(index, kind="stable")
            first = np.searchsorted(index[order], np.arange(self._writers))
            table = np.full((self._writers, int(np.bincount(index).max())), len(index))
            table[index[order], np.arange(len(index)) - first[index[order]]] = order
            self._tables[device] = (
                torch.from_numpy(table).to(device),
                [torch.from_numpy(i).to(device) for i in self._index],
            )
        return self._tables[device]
