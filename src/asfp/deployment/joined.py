"""Values that are added to each other, or made of one another channel by channel: a stream, as it is and as one width.

A stream's values differ in which channels they have, because branches were pruned one by one. Here all channels get one
order, and what is in the places that a value has no channel for is settled: a constant, which a zero filter's bias is.
Whether that is cheaper than to move channels around is a question of prices.
"""

from __future__ import annotations

import math

import numpy as np
from torch import fx

from asfp.compaction.layers import BorderBias
from asfp.compaction.layout import is_run
from asfp.deployment.embeds import Embed, Places, Values, is_moved
from asfp.deployment.padding import asks_for_size, module_of, width_of
from asfp.deployment.widths import TOLERANCE, Reading, close

SMALLEST = 1e-3
"""A constant channel has to be so large to carry what is lacking at a border."""


class Stream:
    """Values whose channels carry the same numbers, in the graph's order, and the one order of all their channels."""

    def __init__(
        self,
        reading: Reading,
        members: list[fx.Node],
        sources: dict[fx.Node, list[fx.Node]],
        joined: dict[fx.Node, Embed],
        kept: set[fx.Node],
    ) -> None:
        self.reading, self.members, self.sources, self.joined = reading, members, sources, joined
        self.users: dict[fx.Node, list[fx.Node]] = {node: [] for node in members}
        for node in members:
            for source in sources[node]:
                self.users[source].append(node)
        self.places: dict[fx.Node, Places] = {}
        """Of each member's channels in the common order."""
        self.constants: dict[fx.Node, Values] = {}
        """Of each member, in the common order, where it has no channel; NaN where that is not constant."""
        asked = ((user, node) for node in members for user in node.users if user not in kept)
        self.borders = {user: node for user, node in asked if reading.corrects(user, node)}
        """Corrections of what convolutions read of members, and these."""
        self.carriers: dict[fx.Node, int] = {}
        self._lacking: list[fx.Node] = []

    # what it would be

    def is_worth_a_look(self, kept: set[fx.Node]) -> bool:
        worth = bool(self.joined or self.borders) or (self.is_ragged() and self.members[0] not in kept)
        return worth and self._is_of_channels()

    def _is_of_channels(self) -> bool:
        """Whether the second axis is that of channels: where a convolution makes or reads a member."""
        nodes = (*self.members, *(user for node in self.members for user in node.users))
        return any(self.reading.plain(node) is not None or self.reading.depthwise(node) is not None for node in nodes)

    def pays(self) -> bool:
        """Whether the stream can be had at one width, and costs less then; perhaps with a channel for constants."""
        now = self._cost_now()
        costs = {extra: self._plan(extra) for extra in (False, True)}
        extra = costs[True] < costs[False]
        if costs[extra] <= now and not extra:
            self._plan(extra)
        if costs[extra] == math.inf:
            return False
        filled = any(len(places) != self.width for places in self.places.values())
        return costs[extra] < now or (costs[extra] == now and filled)

    def is_ragged(self) -> bool:
        """Whether the engine had better have another width."""
        return any(self._whole(width) != width for node in self.members if (width := width_of(node)))

    def _whole(self, width: int) -> int:
        reading = self.reading
        depthwise = any(reading.depthwise(node) is not None for node in self.members)
        return reading.kernels.width(width, depthwise=depthwise, beside_depthwise=reading.has_depthwise)

    def _cost_now(self) -> float:
        """Of what may go: embeds and corrected borders."""
        reading = self.reading
        embeds = {**self.joined, **self._foreign()}
        moved = sum(reading.price(node, len(e.places), e.gathers) for node, e in embeds.items())
        return moved + sum(map(reading.border_price, self.borders))

    def _foreign(self) -> dict[fx.Node, Embed]:
        """Embeds of what is no member: they can put it wherever it is wanted."""
        return {node: self.reading.embeds[node] for node in self.members if self._is_foreign(node)}

    def _is_foreign(self, node: fx.Node) -> bool:
        return node in self.reading.embeds and not self.sources[node]

    def _plan(self, extra: bool) -> float:
        """Settle places, constants and carriers, and say what that costs: infinite where it cannot be."""
        if extra and not self._lacking:
            return math.inf
        if not self._number(extra) or not self._settle(self._lacking if extra else []):
            return math.inf
        carriers = {border: self._carrier(border) for border in self.borders}
        self.carriers = {border: place for border, place in carriers.items() if place is not None}
        if not extra:
            self._lacking = [source for border, source in self.borders.items() if border not in self.carriers]
        reading, width = self.reading, self.width
        cost = sum(reading.border_price(border) for border in self.borders if border not in self.carriers)
        for node in self.members:
            saved = reading.prices.saved(width, len(self.places[node]))
            if self.makes(node) and (conv := reading.plain(node)) is not None:
                cost += saved * conv.in_channels * reading.use(node)
            elif reading.depthwise(node) is not None:
                cost += saved * reading.use(node)
            elif self._is_foreign(node):
                cost += reading.price(node, width, self.is_moved(node))
            for user in self.readers(node):
                if (conv := reading.plain(user)) is not None:
                    cost += saved * conv.out_channels * reading.use(user)
                elif linear := reading.linear(node, user):
                    cost += saved * sum(reading.use(layer) for layer in linear)
                elif not self.natural(node):
                    cost += reading.price(node, len(self.places[node]), not is_run(self.places[node]))
        return cost

    def _carrier(self, border: fx.Node) -> int | None:
        """The place of a constant channel whose kernel can correct the border: what zero padding lacks of it."""
        constants = np.nan_to_num(np.abs(self.constants[self.borders[border]]))
        place = int(constants.argmax())
        return place if constants[place] >= SMALLEST else None

    def makes(self, node: fx.Node) -> bool:
        """Whether a member is made here, and at any width: by a convolution, or by an embed of something else."""
        return self._is_foreign(node) or (not self.sources[node] and self.reading.plain(node) is not None)

    def index_of(self, node: fx.Node) -> tuple[Places, Values]:
        """What an embed of something else is in the common order: channels of its value, or constants at -1."""
        embed = self.reading.embeds[node]
        index, fill = np.full(self.width, -1), self.constants[node].copy()
        index[self.places[node]], fill[self.places[node]] = embed.places, embed.fill
        return index, fill

    def is_moved(self, node: fx.Node) -> bool:
        """Whether an embed of something else is more than constants around its value."""
        return is_moved(self.index_of(node)[0], width_of(self.reading.embeds[node].value) or 0)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """What reads a member's channels and is none itself; of some only the size is asked."""
        inner = {part for embed in self.joined.values() for part in (embed.node, *embed.inner)}
        found = []
        for user in node.users:
            corrects = isinstance(module_of(self.reading.model, user), BorderBias) and user.args[0] is not node
            if user not in self.users[node] and user not in inner and not corrects and not asks_for_size(user):
                found.append(user)
        return found

    def natural(self, node: fx.Node) -> bool:
        return len(self.places[node]) == self.width and bool((np.diff(self.places[node]) == 1).all())

    def _number(self, extra: bool) -> bool:
        """Give all channels places in one order; it is that of what can be had in no other. With one `extra`, last."""
        first: dict[fx.Node, int] = {}
        total = 0
        for node in self.members:
            first[node] = total
            total += width_of(node) or 0
        same = np.arange(total)

        def root(i: int) -> int:
            while same[i] != i:
                same[i] = same[same[i]]
                i = int(same[i])
            return i

        for node in self.members:
            for source in self.sources[node]:
                own = self.joined[node].places if node in self.joined else np.arange(width_of(node) or 0)
                for i in np.flatnonzero(own >= 0):
                    same[root(first[source] + int(own[i]))] = root(first[node] + int(i))
        if any(embed.value in first for embed in self._foreign().values()):
            return False  # of this stream, but in another order
        numbers = {n: np.array([root(first[n] + i) for i in range(width_of(n) or 0)], np.int64) for n in self.members}
        fixed = [node for node in self.members if not self.sources[node] and not self.makes(node)]
        most = max(self.members, key=lambda node: len(numbers[node]))
        foreign = [
            numbers[node][np.argsort(np.where(embed.places < 0, total, embed.places), kind="stable")]
            for node, embed in self._foreign().items()
        ]
        others = (numbers[node] for node in (most, *self.members))
        order = list(dict.fromkeys(np.concatenate([*(numbers[node] for node in fixed), *foreign, *others]).tolist()))
        place = {number: i for i, number in enumerate(order)}
        self.width = len(order) + extra
        if extra:
            self.one = len(order)
        if not fixed:
            self.width = self._whole(self.width)
        self.places = {node: np.array([place[int(i)] for i in numbers[node]], np.int64) for node in self.members}
        once = all(len(set(places.tolist())) == len(places) for places in self.places.values())
        return once and all(self.natural(node) for node in fixed)

    def _settle(self, ones: list[fx.Node]) -> bool:
        """Choose what is in the places that a member has no channel for; whether all comes out as it has to.

        What is free is made for what comes next on its way: the constant that an embed puts there, less what the
        other side of an addition has already. In the last place of `ones` it is 1.
        """
        self.constants = {}
        asked: dict[fx.Node, Values] = {node: np.full(self.width, np.nan) for node in self.members}
        for node, embed in self.joined.items():
            new = embed.places < 0
            want, places = asked[embed.value], self.places[node][new]
            known = ~np.isnan(want[places])
            if not np.allclose(want[places][known], embed.fill[new][known], rtol=TOLERANCE, atol=0.0):
                return False
            want[places] = embed.fill[new]
        for node in ones:
            asked[node][self.one] = 1.0
        later: dict[fx.Node, Values] = {}
        for node in reversed(self.members):
            later[node] = asked[node].copy()
            for user in self.users[node]:
                if not self._is_free(user):
                    later[node] = np.where(np.isnan(later[node]), later[user], later[node])
            later[node][self.places[node]] = np.nan
        for node in self.members:
            self.constants[node] = self._constants(node, asked, later)
        given = [(self.constants[node], want) for node, want in asked.items()]
        scale = max(float(np.nanmax(np.abs(values), initial=0.0)) for pair in given for values in pair)
        dtype = self.members[0].meta["val"].dtype
        return all(close(found[~np.isnan(want)], want[~np.isnan(want)], scale, dtype) for found, want in given)

    def _constants(self, node: fx.Node, asked: dict[fx.Node, Values], later: dict[fx.Node, Values]) -> Values:
        if node in self.constants:
            return self.constants[node]
        sources = self.sources[node]
        if self._is_free(node):
            found: Values = np.nan_to_num(self._next(node, asked, later))
        else:
            given: Values = np.sum([self._constants(source, asked, later) for source in sources], axis=0)
            found = self.reading.after(node, given)  # NaN stays
        if node in self.joined:
            found[np.setdiff1d(self.places[sources[0]], self.places[node])] = np.nan
        found[self.places[node]] = 0.0
        return found

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a member can have any constants where it has no channel."""
        return not self.sources[node] or self.reading.depthwise(node) is not None

    def _known(self, node: fx.Node) -> bool:
        """Whether a member's constants are settled already, or follow from one that is."""
        while node not in self.constants and not self._is_free(node) and len(self.sources[node]) == 1:
            node = self.sources[node][0]
        return node in self.constants

    def _next(self, node: fx.Node, asked: dict[fx.Node, Values], later: dict[fx.Node, Values]) -> Values:
        """What the places that a member has no channel for are asked to be, as far as that is known by now."""
        found = asked[node].copy()
        for user in self.users[node]:
            if self._is_free(user):
                continue
            if len(self.sources[user]) == 1:
                wanted = self._next(user, asked, later)
            else:
                (other,) = (side for side in self.sources[user] if side is not node)
                wanted = later[user] - (self._constants(other, asked, later) if self._known(other) else 0.0)
            found = np.where(np.isnan(found), wanted, found)
        return found
