"""In the balancer's layouts: adds replicas for fault tolerance to those that a policy places for balance.

primary   a replica placed by a policy, which takes its share of the load
backup    a further replica for the operator's redundancy. It takes almost no load while the primaries live;
          its tiny share marks it as a backup
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Holds, Int, Shares

__all__ = ["BACKUP_SHARE", "deal", "primaries", "with_backups", "with_least_shares"]

BACKUP_SHARE = 1 / 1024
"""Share of an expert's load that each of its backups takes."""
_IS_PRIMARY = 1.5 * BACKUP_SHARE


def primaries(holds_LSE: Holds, shares_LSE: npt.NDArray[np.floating]) -> Holds:
    """bool (L, S, E): the primaries of a layout. If an expert has only backups, they count as primaries."""
    found_LSE: Holds = holds_LSE & (shares_LSE > _IS_PRIMARY)
    lost_LE = ~np.any(found_LSE, axis=1)
    return np.asarray(np.where(np.expand_dims(lost_LE, 1), holds_LSE, found_LSE))


def with_least_shares(primary_LSE: Holds, holds_LSE: Holds, shares_LSE: Shares) -> Shares:
    """Give every replica a share above 0, so that clients can use it when the others are lost.

    Args:
        primary_LSE, holds_LSE: bool (L, S, E); primaries are among those held.
        shares_LSE: float64; the wanted shares of the primaries.
    """
    least_LSE = np.where(primary_LSE, 2 * BACKUP_SHARE, np.where(holds_LSE, BACKUP_SHARE, 0.0))
    raised_LSE = np.maximum(np.where(holds_LSE, shares_LSE, 0.0), least_LSE)
    # Only the part above the least shares is scaled.
    spare_LSE = raised_LSE - least_LSE
    rest_LE = 1 - least_LSE.sum(axis=1)
    sum_LE = spare_LSE.sum(axis=1)
    count_LE = np.maximum(primary_LSE.sum(axis=1), 1)
    factor_LE = np.divide(rest_LE, sum_LE, out=np.zeros_like(sum_LE), where=sum_LE > 0)
    even_LSE = np.where(primary_LSE, (rest_LE / count_LE)[:, None], 0.0)
    scaled_LSE = np.where((sum_LE > 0)[:, None], spare_LSE * factor_LE[:, None], even_LSE)
    return np.asarray(least_LSE + scaled_LSE)


def with_backups(
    primary_LSE: Holds,
    held_LSE: Holds,
    redundancy: int,
    cap_LS: Int,
    away_LE: Int | None = None,
    nodes_S: npt.NDArray[np.integer] | None = None,
) -> Holds:
    """Add backups until each expert is on `redundancy` servers, within capacity.

    Servers on nodes without the expert come first, as far as they hold no more than one replica above the
    mean, then held replicas, which cost no load.

    Args:
        primary_LSE: bool (L, S, E); stays.
        held_LSE: bool (L, S, E); what servers hold now.
        redundancy: Servers of each expert; all of them if there are fewer.
        cap_LS: int64; replicas that a server may hold.
        away_LE: int64; replicas on other servers, which also count. None: there are none.
        nodes_S: Numbers of the servers' nodes. None: unknown.
    """
    layers, servers, experts = primary_LSE.shape
    known_LE = np.zeros((layers, experts), np.int64) if away_LE is None else away_LE
    wanted_LE = np.minimum(redundancy - known_LE, servers)
    holds_LSE = primary_LSE.copy()
    for holds_SE, held_SE, cap_S, wanted_E in zip(
        holds_LSE, held_LSE, cap_LS, wanted_LE, strict=True
    ):
        if nodes_S is not None:
            total = int(np.maximum(holds_SE.sum(axis=0), wanted_E).sum())
            level_S = np.minimum(cap_S, -(-total // servers))
            for limit_S in (level_S, np.minimum(cap_S, level_S + 1)):
                for only_held in (True, False):
                    _add(holds_SE, held_SE, limit_S, wanted_E, only_held=only_held, nodes_S=nodes_S)
        for only_held in (True, False):
            _add(holds_SE, held_SE, cap_S, wanted_E, only_held=only_held)
    return holds_LSE


def _add(
    holds_SE: npt.NDArray[np.bool_],
    held_SE: npt.NDArray[np.bool_],
    cap_S: Int,
    wanted_E: Int,
    *,
    only_held: bool,
    nodes_S: npt.NDArray[np.integer] | None = None,
) -> None:
    """Add a layer's missing replicas, in place, on the emptiest servers; with nodes only on new nodes."""
    count_S = holds_SE.sum(axis=1)
    for expert in np.flatnonzero(holds_SE.sum(axis=0) < wanted_E):
        for _ in range(int(wanted_E[expert] - holds_SE[:, expert].sum())):
            free_S = ~holds_SE[:, expert] & (count_S < cap_S)
            if only_held:
                free_S &= held_SE[:, expert]
            if nodes_S is not None:
                free_S &= ~np.isin(nodes_S, nodes_S[holds_SE[:, expert]])
            if not free_S.any():
                break
            server = min(np.flatnonzero(free_S), key=lambda s: (count_S[s] - cap_S[s], s))
            holds_SE[server, expert] = True
            count_S[server] += 1


def deal(total: int, cap_S: Int) -> Int:
    """int64 (S): deal `total` slots to servers as evenly as the caps allow; fewer if the caps are lower."""
    level = 0
    # The highest common level; the remainder goes to the first servers.
    while level < cap_S.max(initial=0) and np.minimum(cap_S, level + 1).sum() <= total:
        level += 1
    slots_S = np.minimum(cap_S, level)
    slots_S[np.flatnonzero(cap_S > level)[: total - int(slots_S.sum())]] += 1
    return np.asarray(slots_S)
