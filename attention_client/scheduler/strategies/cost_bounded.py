"""The default: least predicted cost, for as long as nobody pays for it."""

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

# How much more may be spent while the queue grows. Found by `eaas simulate caps`: 1.5 keeps 91 to 97 % of
# greedy's gain under overload, 2 keeps 93 to 98 %.
_GROWING = 2.0


class CostBounded(SelectionStrategy):
    """What the cost model says is cheapest, within a bound on what a request may lose by being overtaken.

    Objective: the predicted time of the batch by the context's cost model, so in expert-server space
    through the current placement where that is `ServerCost`. Whether like or unlike requests are put
    together is for that model to say.

    Bound: each request is to be finished no later than first-come-first-served would have finished it, plus
    a share of the time that it would have taken there. That share is what choosing is predicted to save over
    the batches to come (`CostModel.saving`), so that on balance nobody loses, and never more than
    `most_stretch`. The context has the predicted clock of that other schedule (`FcfsClock`), which falls
    behind as cheaper batches save time: under overload, where much is saved, the bound leaves free hand; in
    calm, where every swap only makes somebody late, it is first come, first served. While the queue grows by
    more than chance, the share is doubled: what is saved then serves all who are yet to come. A request that
    would break its bound if it were left out once more is taken now, the oldest first; so it is kept to
    within two batches.

    Below a full window it is first come, first served too.

    O(B W E), and O(B W R) through a placement of R replicas.

    Args:
        most_stretch: See above; 0.2 is 20 %, and 40 % while the queue grows.
    """

    name = "cost_bounded"
    needs_fcfs = True

    def __init__(self, most_stretch: float = 0.2) -> None:
        self.most_stretch = most_stretch

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        cost, fcfs = context.cost, context.fcfs
        oldest = first(min(len(window_WE), batch_size))
        if cost is None or fcfs is None or len(window_WE) <= max(batch_size, context.depth - 1):
            return oldest
        left_W, spent_W = fcfs.left_W, (_GROWING if fcfs.growing else 1.0) * fcfs.wait_W
        # Step 1: left out now, a request is finished with the batch after this one at the earliest. For some
        # that is too late whatever is saved; often for a whole batch of the oldest.
        next_s = 2 * fcfs.usual_s
        late_W = left_W + self.most_stretch * spent_W < next_s
        if late_W[:batch_size].all():
            return oldest
        # Step 2: for others it depends on what is saved.
        unsure = np.flatnonzero(~late_W & (left_W < next_s))
        if len(unsure):
            saved = cost.saving(window_WE, context.running_E, batch_size, fcfs.bias)
            stretch = min(max(saved, 0.0), self.most_stretch)
            late_W[unsure] = left_W[unsure] + stretch * spent_W[unsure] < next_s
        # Step 3: those that would be late, the oldest first, and what goes best with them.
        late_W[0] = True
        must = np.flatnonzero(late_W)[:batch_size]
        chosen = np.empty_like(oldest)
        chosen[: len(must)] = must
        cost.choose(window_WE, context.running_E, chosen, len(must))
        return chosen
