"""From missing pairs to requests in flight: choose servers, make parts, ask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_client.attempts import Attempt
from attention_client.dispatch.parts import Part
from attention_client.dispatch.plan import plan
from attention_client.messages import LayerInput
from attention_client.shared import ClusterView, Dispatcher
from attention_client.standing import Standing
from attention_client.tracing import LayerTrace
from eaas.errors import ConnectionLostError, SlotsBusyError

__all__ = ["Sender"]

_LEAST_BUDGET_S = 0.001
# A hedge earlier than this would be against the scheduler's noise, not against a slow server.
_LEAST_HEDGE_S = 0.002


class Sender:
    """Plans and sends the requests of one call.

    Args:
        shared: Of all calls.
        standing: Of the servers in this call.
        inputs: What is sent.
        ids_TK: int64, contiguous, logical experts.
        deadline: Monotonic seconds; of the call.
        trace: Of the call; None: it is not traced.
    """

    def __init__(
        self,
        shared: Dispatcher,
        standing: Standing,
        inputs: LayerInput,
        ids_TK: npt.NDArray[np.int64],
        deadline: float,
        trace: LayerTrace | None = None,
    ) -> None:
        self._shared = shared
        self._standing = standing
        self._inputs = inputs
        self._ids_TK = ids_TK
        self._deadline = deadline
        self._trace = trace

    def plan(
        self, view: ClusterView, servers: Sequence[bool], wanted_TK: npt.NDArray[np.bool_]
    ) -> tuple[list[Part], bool]:
        """Choose a server for each wanted pair.

        Args:
            view: Of the cluster.
            servers: Which servers may be asked.
            wanted_TK: Contiguous.

        Returns:
            The parts, and whether every wanted pair is in one.
        """
        shared, inputs, connections = self._shared, self._inputs, view.connections
        placement = view.placement
        shares_SE = placement.shares_LSE[inputs.layer]
        if not all(servers):
            shares_SE = shares_SE * np.array(servers, dtype=np.bool_)[:, None]
        load = shared.speeds.load(
            placement.servers,
            [0.0 if c is None else c.work_in_flight for c in connections],
            shared.clock(),
        )
        room = view.max_tokens(self._ids_TK.shape[1], inputs.dtype)
        return plan(shared.policy, self._ids_TK, wanted_TK, shares_SE, load, room, inputs.layer)

    def send(self, view: ClusterView, part: Part) -> Attempt | None:
        """Ask a server for a part; None where it cannot be asked now."""
        connection = view.connections[part.server]
        assert connection is not None
        shared = self._shared
        now = shared.clock()
        left_s = max(self._deadline - now, _LEAST_BUDGET_S)
        service, rows = connection.service, part.rows_R.size
        budget_s = service.budget(rows, shared.attempt_timeout_s, left_s)
        timeouts = self._standing.timeouts.get(connection)
        if timeouts:
            # Twice as long each time: the only replica may have become slower than it ever was.
            budget_s = min(budget_s * 2.0**timeouts, left_s)
        epoch, trace = view.placement.epoch, None
        try:
            if self._trace is None:
                ticket = connection.submit(self._inputs, epoch, part, budget_s)
            else:
                trace = self._trace.dispatch(connection.server_id, rows)
                ticket = connection.submit(self._inputs, epoch, part, budget_s, trace.context)
        except (ConnectionLostError, SlotsBusyError) as error:
            if trace is not None:
                trace.end("busy" if isinstance(error, SlotsBusyError) else "lost")
            return None
        tail_s = service.tail_s(rows)
        hedge_at = math.inf if tail_s is None else now + max(tail_s, _LEAST_HEDGE_S)
        return Attempt(part, connection, ticket, now, hedge_at, now + budget_s, trace=trace)
