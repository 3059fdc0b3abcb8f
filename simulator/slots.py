"""Slot tables, for counting transit as the dynamic-balancing competition does.

A slot table says which expert lies in each slot of each server; transit is the number of slots whose
expert changes. Policies here say what a server holds, not where. So:

- A policy that plans from scratch (EPLB) lists a server's experts anew each time, in the order in which it
  packs them: heaviest replica first. Its transit is counted in these tables.
- For any other policy what stays keeps its slot, and transit is the number of replicas that a server has
  to load. (ScalpeLB's alignment gives just such tables.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FROM_SCRATCH", "changed_slots", "first_table", "packed_table"]

Table = npt.NDArray[np.int64]
Holds = npt.NDArray[np.bool_]

FROM_SCRATCH = ("eplb", "eplb-hierarchical")
_EMPTY = -1


def first_table(holds_SE: Holds, slots_S: npt.NDArray[np.int64]) -> Table:
    """int64 (S, R), R the most slots: each server's experts by id, further slots repeat the last one.

    Slots that a server does not have are -1.
    """
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
        load_E: What was planned for.
        width: R.
    """
    each_E = load_E / np.maximum(holds_SE.sum(axis=0), 1)
    order_E = np.argsort(-each_E, kind="stable")
    server, place = np.nonzero(holds_SE[:, order_E])
    table_SR = np.full((len(holds_SE), width), _EMPTY, np.int64)
    table_SR[server, _rank(server, holds_SE.sum(axis=1))] = order_E[place]
    return table_SR


def changed_slots(old_SR: Table, new_SR: Table) -> int:
    """Slots that another expert is loaded into."""
    return int(np.count_nonzero((old_SR != new_SR) & (new_SR != _EMPTY)))


def _rank(server_N: npt.NDArray[np.int64], held_S: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The how many-th of its server each is; servers in order."""
    first_S = np.cumsum(held_S) - held_S
    return np.arange(len(server_N)) - first_S[server_N]
