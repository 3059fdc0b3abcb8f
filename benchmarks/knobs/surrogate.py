"""A differentiable relaxation of ScalpeLB's cycle: PAR and transit as functions of its knobs.

    weight    mean + k * std, mixed with that of the window's end by sigmoid((tv - shift_tv) / T)
    counts    replicas of an expert. The greedy rule (one more for the highest weight per replica) gives an
              expert its j-th further replica if weight / j is above a threshold (Adams' apportionment), so
              count = 1 + sum over j of [weight / j > threshold]; relaxed to a sum of sigmoids, with the
              threshold for which they sum to the slots
    packing   replicas to servers: Sinkhorn's matrix with the soft counts as rows and the servers' slots as
              columns, around the policy's own packing (the anchor)
    swaps     interpolation between the layouts after floor(budget) swaps and after one more
    drift     sigmoid((PAR kept - PAR fresh - drift_tol) / T); all layers if its mean is above heavy_frac

Anchors are the layouts that the policy itself makes with these knobs. The result converges to the hard cycle
as T goes to 0. With `straight_through`, values are hard and gradients soft (Bengio et al., 2013).
Shape suffixes: L layers, S servers, E logical experts, B samples of the next window, J further replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Cycle", "Outcome", "cycle_outcome", "sinkhorn", "soft_counts"]

_BISECTIONS = 40
_SINKHORN = 20
# Temperatures relative to the given one. Counts and packing are dimensionless; PARs and distances of loads
# differ by tenths.
_PAR_PART, _DECISION_PART = 0.05, 0.2


@dataclass(frozen=True, eq=False)
class Cycle:
    """The input of a relaxed cycle: one window, samples of the next ones, and the anchors. Float64 tensors.

    Attributes:
        mean_LE, std_LE: Mean and standard deviation of the window's loads.
        late_mean_LE, late_std_LE: The same, weighted towards its end.
        tv_L: Total-variation distance of its halves.
        load_LE: Sum of the window's loads.
        next_BLE: Loads of later iterations.
        current_LSE: 1 if a replica is held, else 0.
        slots_LS: Replicas that servers may hold.
        fresh_LSE: Anchor: the policy's fresh layout, aligned to the current one.
        kept_LSE, kept_more_LSE: Anchors: the current layout after floor(budget) swaps, and after one more.
    """

    mean_LE: torch.Tensor
    std_LE: torch.Tensor
    late_mean_LE: torch.Tensor
    late_std_LE: torch.Tensor
    tv_L: torch.Tensor
    load_LE: torch.Tensor
    next_BLE: torch.Tensor
    current_LSE: torch.Tensor
    slots_LS: torch.Tensor
    fresh_LSE: torch.Tensor
    kept_LSE: torch.Tensor
    kept_more_LSE: torch.Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a relaxed cycle, as scalars with a gradient.

    Attributes:
        par: PAR (peak over average load), mean over layers and later iterations.
        transit: Replicas to load, mean over layers.
    """

    par: torch.Tensor
    transit: torch.Tensor


def cycle_outcome(
    knobs_K: torch.Tensor, cycle: Cycle, temperature: float, *, straight_through: bool = False
) -> Outcome:
    """Compute the outcome of a cycle with these knobs, differentiable in the knobs.

    Args:
        knobs_K: k, shift_tv, budget, drift_tol, heavy_frac.
        temperature: Above 0.
        straight_through: Hard values, soft gradients.
    """
    k, shift_tv, budget, drift_tol, heavy_frac = knobs_K

    def hardened(soft: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
        return soft + (hard - soft).detach() if straight_through else soft

    # Step 1: the planning weight.
    decision = temperature * _DECISION_PART
    late_L = torch.sigmoid((cycle.tv_L - shift_tv) / decision)
    late_L1 = hardened(late_L, (cycle.tv_L > shift_tv).double())[:, None]
    early_LE = cycle.mean_LE + k * cycle.std_LE
    weight_LE = early_LE + late_L1 * (cycle.late_mean_LE + k * cycle.late_std_LE - early_LE)
    # Step 2: a fresh placement.
    count_LE = soft_counts(
        weight_LE, cycle.slots_LS.sum(dim=1), cycle.slots_LS.shape[1], temperature
    )
    fresh_LSE = sinkhorn((cycle.fresh_LSE - 1) / temperature, count_LE, cycle.slots_LS)
    fresh_LSE = hardened(fresh_LSE, cycle.fresh_LSE)
    share_LSE = fresh_LSE / fresh_LSE.sum(dim=1, keepdim=True)
    # Step 3: the maintained placement.
    part = budget - budget.detach().floor()

    def kept(of: torch.Tensor, of_more: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = of + part * (of_more - of)
        return found

    def equal(holds_LSE: torch.Tensor) -> torch.Tensor:
        return holds_LSE / holds_LSE.sum(dim=1, keepdim=True)

    def par_L(load_BLE: torch.Tensor, of_LSE: torch.Tensor) -> torch.Tensor:
        load_BLS = torch.einsum("ble,lse->bls", load_BLE, of_LSE)
        ratio_BLS = load_BLS / load_BLS.mean(dim=2, keepdim=True)
        peak_BL = (ratio_BLS * torch.softmax(ratio_BLS / (temperature * _PAR_PART), dim=2)).sum(
            dim=2
        )
        return hardened(peak_BL, ratio_BLS.amax(dim=2)).mean(dim=0)

    shares = equal(cycle.kept_LSE), equal(cycle.kept_more_LSE)
    window_1LE = cycle.load_LE[None]
    # Step 4: choose between the two.
    behind_L = kept(*(par_L(window_1LE, of) for of in shares)) - par_L(window_1LE, share_LSE)
    drifted_L = hardened(
        torch.sigmoid((behind_L - drift_tol) / decision), (behind_L > drift_tol).double()
    )
    drifted = drifted_L.mean()
    heavy = hardened(
        torch.sigmoid((drifted - heavy_frac) / decision), (drifted > heavy_frac).double()
    )
    anew_L = heavy + (1 - heavy) * drifted_L
    # Step 5: the outcome.
    par_anew_L = par_L(cycle.next_BLE, share_LSE)
    par_kept_L = kept(*(par_L(cycle.next_BLE, of) for of in shares))
    absent_LSE = 1 - cycle.current_LSE
    moved_L = (fresh_LSE * absent_LSE).sum(dim=(1, 2))
    swapped_L = kept(
        *((of * absent_LSE).sum(dim=(1, 2)) for of in (cycle.kept_LSE, cycle.kept_more_LSE))
    )
    return Outcome(
        par=(anew_L * par_anew_L + (1 - anew_L) * par_kept_L).mean(),
        transit=(anew_L * moved_L + (1 - anew_L) * swapped_L).mean(),
    )


def soft_counts(
    weight_LE: torch.Tensor, slots_L: torch.Tensor, servers: int, temperature: float
) -> torch.Tensor:
    """Compute soft replica counts: float64 (L, E), 1 to `servers` each, that sum to the slots."""
    experts = weight_LE.shape[1]
    spare = int((slots_L - experts).max())
    most = min(servers - 1, spare)
    if most == 0:
        return torch.ones_like(weight_LE)
    log_J = torch.log(torch.arange(1, most + 1, dtype=torch.float64))
    log_LEJ = torch.log(weight_LE + 1e-12 * weight_LE.detach().mean())[:, :, None] - log_J
    spare_L = (slots_L - experts).double()

    def further(at_L: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((log_LEJ - at_L[:, None, None]) / temperature).sum(dim=2)

    with torch.no_grad():
        low_L = log_LEJ.amin(dim=(1, 2)) - 50 * temperature
        high_L = log_LEJ.amax(dim=(1, 2)) + 50 * temperature
        for _ in range(_BISECTIONS):
            at_L = (low_L + high_L) / 2
            many_L = further(at_L).sum(dim=1) > spare_L
            low_L, high_L = torch.where(many_L, at_L, low_L), torch.where(many_L, high_L, at_L)
        at_L = (low_L + high_L) / 2
        part_LEJ = torch.sigmoid((log_LEJ - at_L[:, None, None]) / temperature)
        slope_L = -(part_LEJ * (1 - part_LEJ)).sum(dim=(1, 2)) / temperature
    # A Newton step of size 0 gives the threshold its gradient (implicit function theorem).
    at_L = at_L - (further(at_L).sum(dim=1) - spare_L) / slope_L.clamp(max=-1e-9)
    return 1 + further(at_L)


def sinkhorn(
    logits_LSE: torch.Tensor, rows_LE: torch.Tensor, columns_LS: torch.Tensor
) -> torch.Tensor:
    """Scale exp(logits) to float64 (L, S, E); sums over servers are `rows`, over experts nearly `columns`."""
    log_rows_LE, log_columns_LS = torch.log(rows_LE), torch.log(columns_LS.double())
    x_LSE = logits_LSE
    for _ in range(_SINKHORN):
        x_LSE = x_LSE + (log_columns_LS - torch.logsumexp(x_LSE, dim=2))[:, :, None]
        x_LSE = x_LSE + (log_rows_LE - torch.logsumexp(x_LSE, dim=1))[:, None, :]
    return torch.exp(x_LSE)
