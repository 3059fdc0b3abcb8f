"""Dispatch policy of a layer call: choose a replica for each pair by placement shares and server load.

Shape suffixes: T tokens, K experts per token, S servers, E logical experts, P rows of all parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.dispatch import _dispatch
from attention_client.dispatch.parts import LOAD_PAIRS, Part
from eaas.errors import ConfigError
from eaas.replicas import Replicas

__all__ = ["DispatchPolicy", "Load", "dispatch_policy"]


@dataclass(frozen=True, eq=False)
class Load:
    """Load of the expert servers, as measured by this client.

    Attributes:
        rate_S: float64, seconds per unit of work (`Part.work`).
        backlog_S: float64, expected seconds until a server begins a new request.
        load_pairs: Pairs of an expert that take as long as reading its weights.
    """

    rate_S: npt.NDArray[np.float64]
    backlog_S: npt.NDArray[np.float64]
    load_pairs: float = LOAD_PAIRS


class DispatchPolicy:
    """Chooses replicas by the placement's shares, or such that the call ends soonest. Thread-safe.

    Step 1: draw a replica for each expert by the shares, evenly over experts and calls; without levelling,
    one for each chunk of at most `load_pairs` of its pairs.
    Step 2, if levelling: move pairs between replicas until no server can end much sooner (`level.c`). A
    server reads an expert's weights once and then computes its pairs, so it takes rate x (experts + pairs /
    load_pairs) seconds. So a small batch activates few experts on each server (METRO, arXiv 2512.09277), and
    a large one has even pairs. Then ask fewer servers, where a request less ends the call sooner than even
    work.
    Step 3: make the parts. A token goes to a server once, with all its experts there.

    Args:
        levels: Whether to do step 2.

    Attributes:
        levels: Whether it does step 2.
    """

    def __init__(self, *, levels: bool) -> None:
        self.levels = levels
        # Of each layer.
        self._calls: dict[int, itertools.count[int]] = {}

    def plan(
        self,
        ids_TK: npt.NDArray[np.int64],
        wanted_TK: npt.NDArray[np.bool_],
        replicas: Replicas,
        load: Load,
        max_tokens: Sequence[int],
        layer: int = 0,
    ) -> tuple[list[Part], bool]:
        """Choose a server for each wanted pair and group the pairs into parts.

        Uses one C call, because many small NumPy calls take longer than the work.

        Args:
            ids_TK: Logical experts of each token; contiguous.
            wanted_TK: Pairs to send; contiguous.
            replicas: The placement's, on the servers to ask.
            load: Load of the servers.
            max_tokens: Tokens that fit into one slot of each server; larger parts are cut.
            layer: Layer of the call.

        Returns:
            The parts by ascending server and token, and whether they hold every wanted pair; pairs of an
            expert without a share are left out.

        Raises:
            IndexError: A wanted expert is outside E.
        """
        servers, experts = replicas.servers, replicas.experts
        tokens, top_k = ids_TK.shape
        call = next(self._calls.setdefault(layer, itertools.count()))
        # A token is in at most min(K, S) parts.
        most = tokens * min(servers, top_k)
        rows_P, ids_PK = np.empty(most, np.int64), np.empty((most, top_k), np.int32)
        rate_S, backlog_S = (load.rate_S, load.backlog_S) if self.levels else (None, None)
        left, shares = _dispatch.plan(
            ids_TK, wanted_TK, tokens, top_k,
            replicas.first_LX[layer], replicas.server_N, replicas.share_N, servers, experts,
            load.load_pairs, call, layer, rate_S, backlog_S, rows_P, ids_PK,
        )  # fmt: skip
        parts = []
        start = 0
        for server, rows, work in shares:
            step, stop = max_tokens[server], start + rows
            while start < stop:
                end = min(start + step, stop)
                share = work * (end - start) / rows
                parts.append(Part(server, rows_P[start:end], ids_PK[start:end], share))
                start = end
        return parts, left == 0


def dispatch_policy(name: str) -> DispatchPolicy:
    """Make a dispatch policy by name. Raises ConfigError, which lists the names, for an unknown one."""
    if name not in ("least_loaded", "weights"):
        raise ConfigError(f"dispatch policy {name!r} is unknown; choose least_loaded or weights")
    return DispatchPolicy(levels=name == "least_loaded")
