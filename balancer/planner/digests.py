"""The planner's right digest of each expert's bytes, to find damaged copies of the checkpoint. No I/O.

Before a digest is decided, servers may state different ones. Each contradiction counts against both servers,
and the server with fewer contradictions is right: one damaged copy among three servers is found, in any
order of loading. Of two servers with equally many contradictions, the first to state a digest is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import Process

__all__ = ["Digests", "ExpertDigests"]

Digests = npt.NDArray[np.uint64]
"""Digests by layer and expert, (L, E); 0: not known."""


class ExpertDigests:
    """The digests that the experts on all servers must have.

    Attributes:
        known_LE: Decided digests, which never change; None before the first decision.
    """

    def __init__(self) -> None:
        self.known_LE: Digests | None = None
        self._stated: dict[Process, Digests] = {}

    def state(self, process: Process, digests_LE: Digests) -> None:
        """Record the digests that a server has computed of its experts; `decide` compares servers'."""
        self._stated[process] = digests_LE

    def decide(self, processes: Container[Process]) -> None:
        """Decide the unknown digests by these servers' statements, then drop all statements.

        The next Prepare calls give the decided digests to servers, which compare their own bytes.
        """
        stated = [
            digests_LE for process, digests_LE in self._stated.items() if process in processes
        ]
        self._stated.clear()
        if not stated:
            return
        if self.known_LE is None:
            self.known_LE = np.zeros(stated[0].shape, np.uint64)
        stated_SLE = np.stack(stated)
        for s in np.argsort(_contradictions(stated_SLE, self.known_LE), kind="stable"):
            self.known_LE = np.where(self.known_LE == 0, stated_SLE[s], self.known_LE)


def _contradictions(stated_SLE: npt.NDArray[np.uint64], known_LE: Digests) -> list[int]:
    """Count, by server, the other statements and known digests that its own contradict."""
    counts = [0] * len(stated_SLE)
    all_SLE = np.concatenate([stated_SLE, known_LE[np.newaxis]])
    least_LE = np.where(all_SLE == 0, np.iinfo(np.uint64).max, all_SLE).min(axis=0)
    disputed_LE = all_SLE.max(axis=0) > least_LE
    for layer, expert in np.argwhere(disputed_LE):
        *stated, known = all_SLE[:, layer, expert].tolist()
        votes = Counter(digest for digest in (*stated, known) if digest)
        for s, digest in enumerate(stated):
            if digest:
                counts[s] += votes.total() - votes[digest]
    return counts
