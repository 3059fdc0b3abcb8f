"""Slot tables, to count transit as in the published figures of EPLB.

A slot table has the expert in each slot of each server. DeepSeek's EPLB lists a server's experts anew in each
plan, heaviest replica first, and its published transit counts slots whose expert changes, even if the expert
only moves to another slot of its server. Replays count loaded replicas instead, so the tables serve only the
comparison with the published figures.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["SlotTables", "changed_slots", "first_table", "packed_table"]

Table = npt.NDArray[np.int64]
Holds = npt.NDArray[np.bool_]

_EMPTY = -1


class SlotTables:
    """The slot tables of all layers during a replay, with the slots changed so far.

    Args:
        holds_LSE: The initial layout.
        slots: Replicas per layer.
    """

    def __init__(self, holds_LSE: Holds, slots: int) -> None:
        servers = holds_LSE.shape[1]
        slots_S = slots // servers + (np.arange(servers) < slots % servers)
        self._tables = [first_table(holds_SE, slots_S) for holds_SE in holds_LSE]
        self.changed = 0

    def redeploy(self, layer: int, holds_SE: Holds, load_E: npt.NDArray[np.float64]) -> None:
        """Apply a layer's plan made for these loads; add its changed slots to `changed`."""
        old_SR = self._tables[layer]
        self._tables[layer] = packed_table(holds_SE, load_E, old_SR.shape[1])
        self.changed += changed_slots(old_SR, self._tables[layer])


def first_table(holds_SE: Holds, slots_S: npt.NDArray[np.int64]) -> Table:
    """int64 (S, R), R the most slots: each server's experts by id, padded with the last one; -1: no slot."""
    rank_SR = np.arange(int(slots_S.max()))
    held_S = holds_SE.sum(axis=1)
    last_S = np.where(held_S > 0, holds_SE.shape[1] - 1 - holds_SE[:, ::-1].argmax(axis=1), _EMPTY)
    table_SR = np.where(rank_SR < slots_S[:, None], last_S[:, None], _EMPTY)
    server, expert = np.nonzero(holds_SE)
    table_SR[server, _rank(server, held_S)] = expert
    return table_SR


def packed_table(holds_SE: Holds, load_E: npt.NDArray[np.float64], width: int) -> Table:
    """int64 (S, width): each server's experts, highest load per replica first; -1 in slots left over.

    Args:
        holds_SE: bool (S, E).
        load_E: The planned load.
        width: R.
    """
    each_E = load_E / np.maximum(holds_SE.sum(axis=0), 1)
    order_E = np.argsort(-each_E, kind="stable")
    server, place = np.nonzero(holds_SE[:, order_E])
    table_SR = np.full((len(holds_SE), width), _EMPTY, np.int64)
    table_SR[server, _rank(server, holds_SE.sum(axis=1))] = order_E[place]
    return table_SR


def changed_slots(old_SR: Table, new_SR: Table) -> int:
    """Count the slots whose expert differs between two tables of a layer: the published transit."""
    return int(np.count_nonzero((old_SR != new_SR) & (new_SR != _EMPTY)))


def _rank(server_N: npt.NDArray[np.int64], held_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the place of each expert in its server's row of the table; servers in order."""
    first_S = np.cumsum(held_S) - held_S
    return np.arange(len(server_N)) - first_S[server_N]
