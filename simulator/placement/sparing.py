"""PAR of a replay if each server has a spare slot in each layer, whose replica follows the load.

The spare replicas of a layer are chosen right after each of its calls, from its last loads
(`balancer.policies.spares`), for its next call; clients split each batch over all replicas in the best way.

    call       one layer in one iteration. Calls follow one another, an iteration's time / L apart
    transfer   a server's link carries one expert after another, all layers' together. A replica serves calls
               that begin after its transfer. A slot is empty while its next replica is on the way
    ahead      a server takes on a load if it arrives before the layer's next call, or if its link is idle

Planning time (0.3 ms a layer) and the traffic of tokens on the link are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.policies.prices import EXPERT_BYTES
from balancer.policies.spares import SCENARIOS, choose_spares
from balancer.policies.sparse import Layout
from eaas.minmax import levels
from simulator.placement.timeline import ITERATION_S

__all__ = ["LINK_BYTES_PER_S", "Serving", "SpareRun", "replay_spares"]

LINK_BYTES_PER_S = 5e10
"""A server's link, 400 Gb/s: 1.8 ms for an expert of DeepSeek-R1 in bfloat16."""

_NONE = -1
# Any share above 0 makes a server a replica for the best split.
_REPLICA = 1.0

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Serving:
    """A placement of one layer, and the iterations that it serves.

    Attributes:
        layer: The layer.
        begin, end: Iterations begin to end - 1.
        layout: (1, S, E).
        load_E: The loads that it was planned for; None: the first placement.
    """

    layer: int
    begin: int
    end: int
    layout: Layout
    load_E: Float | None = None


@dataclass(frozen=True, eq=False)
class SpareRun:
    """The result of a replay with spare slots.

    Attributes:
        par_IL: float32 (I, L): PAR of each iteration and layer, 1.0 without load.
        loads_IL: int32 (I, L): replicas whose transfer to spare slots was begun after the call.
    """

    par_IL: npt.NDArray[np.float32]
    loads_IL: npt.NDArray[np.int32]


def replay_spares(
    counts_ILE: npt.NDArray[np.generic],
    servings: Sequence[Serving],
    *,
    transfer_s: float = EXPERT_BYTES / LINK_BYTES_PER_S,
    iteration_s: float = ITERATION_S,
    progress: Callable[[float], None] = lambda _part: None,
) -> SpareRun:
    """Replay the placements of a trace with one spare slot a server and layer.

    Args:
        servings: The placements without spare slots; for each layer and iteration one.
        transfer_s: Seconds of a server's link for one expert.
        iteration_s: Seconds of an iteration.
        progress: Called with the part done, 0 to 1.

    Time about 0.4 ms for each layer and iteration at 64 servers and 256 experts.
    """
    iterations, layers, _experts = counts_ILE.shape
    servers = servings[0].layout.shape[1]
    by_begin = {(serving.begin, serving.layer): serving for serving in servings}
    slots = _Slots(layers, servers, transfer_s)
    par_IL = np.ones((iterations, layers), np.float32)
    loads_IL = np.zeros((iterations, layers), np.int32)
    layer_s = iteration_s / layers
    layout_L: list[Layout] = [servings[0].layout] * layers
    shares_L: list[Float] = [np.zeros(0)] * layers
    for i in range(iterations):
        for layer in range(layers):
            call = i * layers + layer
            if (i, layer) in by_begin:
                layout_L[layer] = by_begin[i, layer].layout
                shares_L[layer] = layout_L[layer].dense()[1][0]
                slots.forget(layer, shares_L[layer])
            load_E = counts_ILE[i, layer].astype(np.float64)
            mean = load_E.sum() / servers
            if mean > 0:
                server_N, expert_N = slots.usable(layer, call * layer_s)
                shares_L[layer][server_N, expert_N] = _REPLICA
                par_IL[i, layer] = levels(load_E[None], shares_L[layer])[0] / mean
                shares_L[layer][server_N, expert_N] = 0.0
            now_s, next_s = (call + 1) * layer_s, (call + layers) * layer_s
            wanted_S = choose_spares(
                counts_ILE[max(0, i + 1 - SCENARIOS) : i + 1, layer].astype(np.float64),
                layout_L[layer],
                slots.expert_LS[layer],
                open_S=slots.open(layer, now_s, next_s),
            )
            loads_IL[i, layer] = slots.load(layer, wanted_S, now_s)
        progress((i + 1) / iterations)
    return SpareRun(par_IL, loads_IL)


class _Slots:
    """The spare slots of all servers, and their links."""

    def __init__(self, layers: int, servers: int, transfer_s: float) -> None:
        self.expert_LS = np.full((layers, servers), _NONE, np.int32)
        self._there_s = np.zeros((layers, servers))
        self._link_s = np.zeros(servers)
        self._transfer_s = transfer_s

    def forget(self, layer: int, shares_SE: Float) -> None:
        """Drop replicas that the layer's new placement has."""
        held = np.flatnonzero(self.expert_LS[layer] != _NONE)
        twice = shares_SE[held, self.expert_LS[layer, held]] > 0
        self.expert_LS[layer, held[twice]] = _NONE

    def usable(
        self, layer: int, now_s: float
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the servers whose spare replica has arrived, and its expert."""
        expert_S = self.expert_LS[layer]
        server_N = np.flatnonzero((expert_S != _NONE) & (self._there_s[layer] <= now_s))
        return server_N, expert_S[server_N]

    def open(self, layer: int, now_s: float, next_s: float) -> npt.NDArray[np.bool_]:
        """Return which servers may begin a load: bool (S)."""
        arrives_S = np.maximum(self._link_s, now_s) + self._transfer_s
        ahead_S = (arrives_S <= next_s) | (self._link_s <= now_s)
        return np.asarray((self._there_s[layer] <= now_s) & ahead_S)

    def load(self, layer: int, wanted_S: npt.NDArray[np.int32], now_s: float) -> int:
        """Begin the transfers of new replicas; return their number."""
        new_S = (wanted_S != self.expert_LS[layer]) & (wanted_S != _NONE)
        self._link_s[new_S] = np.maximum(self._link_s[new_S], now_s) + self._transfer_s
        self._there_s[layer, new_S] = self._link_s[new_S]
        self.expert_LS[layer] = wanted_S
        return int(new_S.sum())
