"""What placements can be at best, by HiGHS: oracles that share no line with the code."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

__all__ = ["fewest_loads", "fewest_on_one_node", "least_fullness"]


def least_fullness(
    load_E: np.ndarray, holds_SE: np.ndarray, speeds_S: np.ndarray, backlog_S: np.ndarray
) -> float:
    """min t, with flows of each expert over its holders, load + backlog <= t * speed on each server."""
    servers, experts = holds_SE.shape
    server_N, expert_N = np.nonzero(holds_SE)
    flows = len(server_N)
    each_N = np.arange(flows)
    most = coo_matrix(
        (
            np.concatenate([np.ones(flows), -speeds_S]),
            (
                np.concatenate([server_N, np.arange(servers)]),
                np.concatenate([each_N, np.full(servers, flows)]),
            ),
        ),
        shape=(servers, flows + 1),
    )
    all_of_it = coo_matrix((np.ones(flows), (expert_N, each_N)), shape=(experts, flows + 1))
    answer = linprog(
        np.append(np.zeros(flows), 1.0),
        A_ub=most.tocsr(),
        b_ub=-backlog_S,
        A_eq=all_of_it.tocsr(),
        b_eq=load_E,
        method="highs",
    )
    assert answer.status == 0
    return float(answer.fun)


def fewest_loads(had_SE: np.ndarray, count_S: np.ndarray, replicas: int) -> int:
    """Replicas that no server had, where each has its count and each expert its replicas."""
    servers, experts = had_SE.shape
    each_N = np.arange(had_SE.size)
    row_N, column_N = np.divmod(each_N, experts)
    sums = coo_matrix(
        (
            np.ones(2 * had_SE.size),
            (np.concatenate([row_N, servers + column_N]), np.concatenate([each_N, each_N])),
        ),
        shape=(servers + experts, had_SE.size),
    )
    answer = linprog(
        (~had_SE).ravel().astype(float),
        A_eq=sums.tocsr(),
        b_eq=np.concatenate([count_S, np.full(experts, replicas)]),
        bounds=(0, 1),
        method="highs",
    )
    assert answer.status == 0
    # Of a transport problem the corners are whole numbers.
    return round(answer.fun)


def fewest_on_one_node(count_S: np.ndarray, replicas_E: np.ndarray, node_S: np.ndarray) -> int:
    """Least number of experts with two or more replicas, all on one node, for these counts.

    A flow from experts over nodes to servers: the last replica of an expert on one node costs 1.
    """
    servers, experts, nodes = len(count_S), len(replicas_E), int(node_S.max()) + 1
    size, several_E = servers * experts, replicas_E > 1
    server_N, expert_N = np.divmod(np.arange(size), experts)
    sums = coo_matrix(
        (
            np.ones(2 * size),
            (
                np.concatenate([server_N, servers + expert_N]),
                np.concatenate([np.arange(size), np.arange(size)]),
            ),
        ),
        shape=(servers + experts, size + nodes * experts),
    )
    # on node - alone <= replicas - 1
    on_node = coo_matrix(
        (
            np.concatenate([np.ones(size), -np.ones(nodes * experts)]),
            (
                np.concatenate([node_S[server_N] * experts + expert_N, np.arange(nodes * experts)]),
                np.arange(size + nodes * experts),
            ),
        ),
        shape=(nodes * experts, size + nodes * experts),
    )
    answer = linprog(
        np.concatenate([np.zeros(size), np.tile(several_E, nodes).astype(float)]),
        A_ub=on_node.tocsr(),
        b_ub=np.tile(np.where(several_E, replicas_E - 1, 1), nodes),
        A_eq=sums.tocsr(),
        b_eq=np.concatenate([count_S, replicas_E]),
        bounds=(0, 1),
        method="highs",
    )
    assert answer.status == 0
    # Of a flow problem the corners are whole numbers.
    return round(answer.fun)
