"""The placement without statistics: every expert equally often, losses shared by all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["spread"]


def spread(
    num_layers: int, num_experts: int, servers: int, redundancy: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Places each expert on `redundancy` servers, levelled within each layer.

    Within a layer the servers' replica counts differ by at most 1; over the layers their totals are
    levelled too. Which servers share experts varies between experts and layers, so that the load of
    a lost server falls on all others. The same arguments give the same placement.

    Args:
        num_layers: MoE layers (L).
        num_experts: Logical experts per layer (E).
        servers: Expert servers (S).
        redundancy: Servers that hold each expert (R).

    Returns:
        holds_LSE: bool (L, S, E).
        shares_LSE: float32 (L, S, E); 1/R where held, else 0.

    Raises:
        ValueError: An argument is below 1, or redundancy is above servers; named in the message.

    Time O(L * E * R * S log S), memory O(L * S * E).
    """
    for name, value in (
        ("num_layers", num_layers),
        ("num_experts", num_experts),
        ("servers", servers),
        ("redundancy", redundancy),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if redundancy > servers:
        raise ValueError(f"redundancy {redundancy} is above servers {servers}")

    holds_LSE = np.zeros((num_layers, servers, num_experts), dtype=np.bool_)
    total_S = np.zeros(servers, dtype=np.int64)
    pairs_SS = np.zeros((servers, servers), dtype=np.int64)
    for layer in range(num_layers):
        count_S = np.zeros(servers, dtype=np.int64)
        # Last tie-breaker: another server begins in each layer.
        turn_S = (np.arange(servers) - layer) % servers
        for expert in range(num_experts):
            chosen: list[int] = []
            for _ in range(redundancy):
                # Step 1: The least filled server of this layer, which keeps the counts within 1 of
                # each other; of those one that is not ahead over all layers; of those the one that
                # shares the fewest experts with the servers already chosen for this expert.
                taken_S = holds_LSE[layer, :, expert]
                ahead_S = total_S > total_S.min() + 1
                shared_S = pairs_SS[chosen].sum(axis=0)
                order_S = np.lexsort((turn_S, total_S, shared_S, ahead_S, count_S, taken_S))
                server = int(order_S[0])
                # Step 2: Book it.
                pairs_SS[chosen, server] += 1
                pairs_SS[server, chosen] += 1
                chosen.append(server)
                holds_LSE[layer, server, expert] = True
            count_S[chosen] += 1
            total_S[chosen] += 1
    shares_LSE = np.where(holds_LSE, np.float32(1 / redundancy), np.float32(0))
    return holds_LSE, shares_LSE.astype(np.float32)
