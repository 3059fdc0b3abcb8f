"""Strategy `cost_bounded`: the batch of least predicted cost, within a bound on each request's delay."""

from __future__ import annotations

import numpy as np

from attention_client.scheduler.strategies.base import (
    Context,
    Indices,
    Loads,
    SelectionStrategy,
    first,
)

__all__ = ["CostBounded"]

# Factor of the bound while the queue grows. Found by `eaas simulate caps`: 1.5 keeps 91 to 97 % of greedy's
# gain under overload, 2 keeps 93 to 98 %.
_GROWING = 2.0


class CostBounded(SelectionStrategy):
    """Takes the cheapest batch by the cost model, within a bound on the delay of overtaken requests.

    Objective: the predicted time of the batch by the context's cost model. `ServerCost` computes it through
    the current placement. The model decides whether similar or complementary requests run together.

    Bound: each request finishes no later than first-come-first-served would have finished it, plus a share of
    its time in that schedule. The share is the predicted saving of choosing (`CostModel.saving`), at most
    `most_stretch`. `FcfsClock` predicts the reference schedule, which falls behind as cheaper batches save
    time. So under overload the bound allows free choice; at low load, where a swap only delays a request, the
    strategy is first come, first served. While the queue grows by more than chance the share is doubled,
    because savings then help all later requests. A request that would break its bound if left out once more
    is taken now, oldest first, so the bound holds to within two batches, unless more requests of a burst are
    late at once than a batch holds.

    With less than a full window, the strategy is first come, first served.

    O(B W E), and O(B W R) through a placement of R replicas.

    Args:
        most_stretch: Largest share: 0.2 is 20 %, and 40 % while the queue grows.
    """

    name = "cost_bounded"
    needs_fcfs = True

    def __init__(self, most_stretch: float = 0.2) -> None:
        self.most_stretch = most_stretch

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the cheapest next batch that keeps the bound on delays (see `SelectionStrategy`)."""
        cost, fcfs = context.cost, context.fcfs
        oldest = first(min(len(window_WE), batch_size))
        if cost is None or fcfs is None or len(window_WE) <= max(batch_size, context.depth - 1):
            return oldest
        left_W, spent_W = fcfs.left_W, (_GROWING if fcfs.growing else 1.0) * fcfs.wait_W
        # Step 1: a request left out now finishes with the next batch at the earliest. Find those for which
        # that is too late at any saving; often they are a whole batch of the oldest.
        next_s = 2 * fcfs.usual_s
        late_W = left_W + self.most_stretch * spent_W < next_s
        if late_W[:batch_size].all():
            return oldest
        # Step 2: for other requests it depends on the saving.
        unsure = np.flatnonzero(~late_W & (left_W < next_s))
        if len(unsure):
            saved = cost.saving(window_WE, context.running_E, batch_size, fcfs.bias)
            stretch = min(max(saved, 0.0), self.most_stretch)
            late_W[unsure] = left_W[unsure] + stretch * spent_W[unsure] < next_s
        # Step 3: take the late requests, oldest first, and fill up with the best matches.
        late_W[0] = True
        must = np.flatnonzero(late_W)[:batch_size]
        chosen = np.empty_like(oldest)
        chosen[: len(must)] = must
        cost.choose(window_WE, context.running_E, chosen, len(must))
        return chosen
