"""Orders loads and unloads between two layouts, for plans and stages: no expert is ever without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Move", "layer_moves", "ordered_moves"]

_Bool = npt.NDArray[np.bool_]
_Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """The load or unload of one replica.

    Attributes:
        layer: Index of the layer.
        expert: Index of the expert.
        server: Index of the server.
        kind: "load" or "unload".
    """

    layer: int
    expert: int
    server: int
    kind: Literal["load", "unload"]


def ordered_moves(
    current_LSE: _Bool, holds_LSE: _Bool, slots_LS: npt.NDArray[np.int64]
) -> tuple[Move, ...]:
    """Order the loads and unloads, layer after layer, that turn `current` into `holds`.

    An expert that has a server now has one after each move. A server exceeds its slots only if it did so from
    the start (its loads then wait for its unloads), with one exception: full servers that exchange sole
    replicas in a layer without a free slot or a spare replica. One of them then holds one expert too many
    until its next move; otherwise an expert would be uncovered.

    If such an exchange finds a free slot, or a spare replica whose slot it can borrow, on a server without
    moves left, an expert waits there. This takes moves beyond the difference of the two layouts.

    Args:
        current_LSE: bool (L, S, E); experts may have no server.
        holds_LSE: bool (L, S, E); each expert has a server.
        slots_LS: int64 (L, S); `holds` has no more than these.

    Time O(L * (S * E + moves * S)) at worst, O(L * S * E + moves) if nothing is exchanged.
    """
    found: list[Move] = []
    for layer in np.flatnonzero((current_LSE != holds_LSE).any(axis=(1, 2))):
        found += layer_moves(int(layer), current_LSE[layer], holds_LSE[layer], slots_LS[layer])
    return tuple(found)


def layer_moves(layer: int, now_SE: _Bool, then_SE: _Bool, slots_S: _Int) -> Iterator[Move]:
    """Order one layer's loads and unloads, as `ordered_moves` does."""
    for server, expert, kind in _Layer(now_SE, then_SE, slots_S).steps():
        yield Move(layer, expert, server, kind)


_Step = tuple[int, int, Literal["load", "unload"]]


class _Layer:
    """Experts that a layer's servers hold after the moves so far, and their remaining loads and unloads."""

    def __init__(self, now_SE: _Bool, then_SE: _Bool, slots_S: _Int) -> None:
        self.holds_SE = now_SE.copy()
        self.then_SE = then_SE
        self.free: list[int] = (slots_S - now_SE.sum(axis=1)).tolist()
        self.cover: list[int] = now_SE.sum(axis=0).tolist()
        self.loads: dict[int, list[int]] = {}
        self.unloads: dict[int, list[int]] = {}
        for todo, mask_SE in ((self.loads, then_SE & ~now_SE), (self.unloads, now_SE & ~then_SE)):
            for server, expert in zip(*(axis.tolist() for axis in mask_SE.nonzero()), strict=True):
                todo.setdefault(server, []).append(expert)
        # By server: the expert that waits there for its final server.
        self.guests: dict[int, int] = {}
        # Servers that lent a spare replica's slot to their own load; once each, so that the search ends.
        self.lenders: set[int] = set()

    def steps(self) -> Iterator[_Step]:
        while self.loads or self.unloads:
            stuck = True
            for server in sorted(self.loads.keys() | self.unloads.keys()):
                for step in self._what_is_safe(server):
                    stuck = False
                    yield step
            if stuck:
                yield from self._break_cycle()

    def _what_is_safe(self, server: int) -> Iterator[_Step]:
        loads, unloads = self.loads.get(server, []), self.unloads.get(server, [])
        while loads and self.free[server] > 0:
            yield self._load(server, loads.pop(0))
        blocked = []
        for expert in unloads:
            if self.cover[expert] == 1 or self._waits(server, expert):
                blocked.append(expert)
                continue
            yield self._unload(server, expert)
            while loads and self.free[server] > 0:
                yield self._load(server, loads.pop(0))
        for todo, rest in ((self.loads, loads), (self.unloads, blocked)):
            if rest:
                todo[server] = rest
            else:
                todo.pop(server, None)
        if self.guests.get(server) not in blocked:
            self.guests.pop(server, None)

    def _waits(self, server: int, expert: int) -> bool:
        """Whether an expert is a guest on a server, and none of its final servers has it yet."""
        if self.guests.get(server) != expert:
            return False
        return not (self.holds_SE[:, expert] & self.then_SE[:, expert]).any()

    def _break_cycle(self) -> Iterator[_Step]:
        """Make the next moves when all servers with loads are full and hold only sole replicas."""
        for server in sorted(self.loads):
            if server in self.lenders or self.free[server] != 0:
                continue
            lent = self._spare(server)
            if lent is not None:
                self.lenders.add(server)
                yield self._unload(server, lent)
                yield self._load(server, self.loads[server].pop(0))
                self.loads[server].append(lent)
                return
        own = [
            (server, expert)
            for server, experts in self.unloads.items()
            for expert in experts
            if server in self.loads and self.guests.get(server) != expert
        ]
        if own:
            expert = own[0][1]
            for host in np.flatnonzero(~self.holds_SE[:, expert]).tolist():
                if host in self.loads or self.free[host] < 0:
                    continue
                if self.free[host] == 0:
                    lent = self._spare(host)
                    if lent is None:
                        continue
                    yield self._unload(host, lent)
                    self.loads[host] = [lent]
                yield self._load(host, expert)
                self.guests[host] = expert
                self.unloads.setdefault(host, []).append(expert)
                return
        # Without a place to wait, the server that is least above its slots holds one expert too many.
        server = max(self.loads, key=lambda s: (self.free[s], -s))
        yield self._load(server, self.loads[server].pop(0))
        if not self.loads[server]:
            del self.loads[server]

    def _spare(self, host: int) -> int | None:
        """Return an expert that the host keeps and that another server also holds; None: there is none."""
        for expert in np.flatnonzero(self.holds_SE[host] & self.then_SE[host]).tolist():
            if self.cover[expert] > 1:
                return int(expert)
        return None

    def _load(self, server: int, expert: int) -> _Step:
        self.holds_SE[server, expert] = True
        self.free[server] -= 1
        self.cover[expert] += 1
        return server, expert, "load"

    def _unload(self, server: int, expert: int) -> _Step:
        self.holds_SE[server, expert] = False
        self.free[server] += 1
        self.cover[expert] -= 1
        return server, expert, "unload"
