"""Splits a change of layout into stages that fit into memory, as servers hold old and new during a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from balancer.policies.moves import Move
from balancer.policies.types import Float, Holds, Int, Shares

__all__ = ["shares_of", "stages"]


def stages(
    holds_LSE: Holds,
    shares_LSE: npt.NDArray[np.floating],
    then_LSE: Holds,
    then_shares_LSE: npt.NDArray[np.floating],
    moves: Sequence[Move],
    capacity_S: Int | None,
) -> list[tuple[Holds, npt.NDArray[np.floating]]]:
    """Return the sequence of layouts, each rolled out in turn, that leads to `then`, which is the last.

    A replica that a stage unloads stays in memory until clients use the stage's layout, so a load that needs
    its memory belongs to a later stage. An expert with a server has one in every stage. Without memory limits
    there is one stage.

    Args:
        holds_LSE, shares_LSE: The current layout.
        then_LSE, then_shares_LSE: The target layout.
        moves: Moves from the current to the target layout (see `ordered_moves`); loads keep this order.
        capacity_S: int64 (S): replicas that servers have memory for, over all layers.
    """
    if capacity_S is None:
        return [(then_LSE, then_shares_LSE)]
    loads = [
        (m.layer, m.server, m.expert)
        for m in moves
        if m.kind == "load" and then_LSE[m.layer, m.server, m.expert]
    ]
    found: list[tuple[Holds, npt.NDArray[np.floating]]] = [
        (stage_LSE, shares_of(stage_LSE, then_shares_LSE, shares_LSE))
        for stage_LSE in _Walk(holds_LSE, then_LSE, loads, capacity_S).stages()
    ]
    return [*found, (then_LSE, then_shares_LSE)]


_Place = tuple[int, int, int]  # layer, server, expert


class _Walk:
    """Finds the intermediate layouts between two layouts, within memory.

    Args:
        holds_LSE, then_LSE: Start and target.
        loads: Replicas to load, in order.
        capacity_S: Replicas that servers have memory for.
    """

    def __init__(
        self, holds_LSE: Holds, then_LSE: Holds, loads: Sequence[_Place], capacity_S: Int
    ) -> None:
        self._stage_LSE = holds_LSE.copy()
        self._then_LSE = then_LSE
        self._loads = list(loads)
        self._room_S = capacity_S
        # Replicas in memory, including those that the stage unloads, which stay until the stage is over.
        self._peak_S = holds_LSE.sum(axis=(0, 2))
        self._borrowed: set[_Place] = set()

    def stages(self) -> Iterator[Holds]:
        """Yield what servers hold in each stage but the last, which is the target."""
        while True:
            loaded = self._load_what_fits()
            if not self._loads:
                return
            if not (self._unload_for_the_rest() or self._borrow() or loaded):
                # When full servers exchange sole replicas, one of them must exceed its memory temporarily.
                self._load(self._loads.pop(0))
                continue
            yield self._stage_LSE.copy()
            self._peak_S = self._stage_LSE.sum(axis=(0, 2))

    def _load(self, place: _Place) -> None:
        self._stage_LSE[place] = True
        self._peak_S[place[1]] += 1

    def _load_what_fits(self) -> bool:
        waiting = []
        for place in self._loads:
            if self._peak_S[place[1]] < self._room_S[place[1]]:
                self._load(place)
            else:
                waiting.append(place)
        done = len(waiting) < len(self._loads)
        self._loads = waiting
        return done

    def _unload_for_the_rest(self) -> bool:
        """Unload replicas that others hold and the target lacks, on servers whose loads wait for memory."""
        needed = Counter(server for _, server, _ in self._loads)
        dropped = False
        for layer, server, expert in np.argwhere(self._stage_LSE & ~self._then_LSE).tolist():
            if needed[server] > 0 and self._stage_LSE[layer, :, expert].sum() > 1:
                self._stage_LSE[layer, server, expert] = False
                needed[server] -= 1
                dropped = True
        return dropped

    def _borrow(self) -> bool:
        """On a server whose load waits for memory, unload a kept replica that others hold, once each."""
        for _, server, _ in self._loads:
            kept_LE = self._stage_LSE[:, server] & self._then_LSE[:, server]
            spare_LE = kept_LE & (self._stage_LSE.sum(axis=1) > 1)
            for layer, expert in np.argwhere(spare_LE).tolist():
                place = (layer, server, expert)
                if place not in self._borrowed:
                    self._borrowed.add(place)
                    self._stage_LSE[place] = False
                    self._loads.append(place)
                    return True
        return False


def shares_of(holds_LSE: Holds, *wanted: npt.NDArray[np.floating]) -> Shares:
    """float64 (L, S, E): by expert, the first `wanted` with shares for its replicas, else even shares."""
    result: Float = np.zeros(holds_LSE.shape)
    for wanted_LSE in (*wanted, holds_LSE.astype(np.float64)):
        part_LSE = np.where(holds_LSE, wanted_LSE, 0.0)
        sum_LE = part_LSE.sum(axis=1, keepdims=True)
        missing_LE = (result.sum(axis=1, keepdims=True) == 0) & (sum_LE > 0)
        scaled_LSE = np.divide(part_LSE, sum_LE, out=np.zeros_like(part_LSE), where=sum_LE > 0)
        result = np.where(missing_LE, scaled_LSE, result)
    # Clients never use a replica without a share, so each gets at least a small one.
    least_LSE = np.where(holds_LSE, np.maximum(result, 1 / 1024), 0.0)
    sum_LE = least_LSE.sum(axis=1, keepdims=True)
    return np.asarray(np.divide(least_LSE, sum_LE, out=np.zeros_like(least_LSE), where=sum_LE > 0))
