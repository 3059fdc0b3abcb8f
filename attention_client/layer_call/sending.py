"""Send missing pairs: choose servers, make parts, submit requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_client.connections.messages import LayerInput
from attention_client.dispatch.parts import Part
from attention_client.dispatch.plan import plan
from attention_client.layer_call.attempts import Attempt
from attention_client.layer_call.server_health import ServerHealth
from attention_client.layer_call.shared import ClusterView, Dispatcher
from attention_client.telemetry.tracing import LayerTrace
from eaas.errors import ConnectionLostError, SlotsBusyError

__all__ = ["Sender"]

_LEAST_BUDGET_S = 0.001
# An earlier hedge would react to scheduling noise, not to a slow server.
_LEAST_HEDGE_S = 0.002


class Sender:
    """Plans and sends the requests of one call.

    Args:
        shared: Shared by all calls.
        server_health: Health of the servers in this call.
        inputs: Layer, hidden states, scores.
        ids_TK: int64, contiguous, logical experts.
        deadline: Deadline of the call, monotonic seconds.
        trace: Trace of the call; None: not traced.
    """

    def __init__(
        self,
        shared: Dispatcher,
        server_health: ServerHealth,
        inputs: LayerInput,
        ids_TK: npt.NDArray[np.int64],
        deadline: float,
        trace: LayerTrace | None = None,
    ) -> None:
        self._shared = shared
        self._server_health = server_health
        self._inputs = inputs
        self._ids_TK = ids_TK
        self._deadline = deadline
        self._trace = trace

    def plan(
        self, view: ClusterView, servers: Sequence[bool], wanted_TK: npt.NDArray[np.bool_]
    ) -> tuple[list[Part], bool]:
        """Choose a server for each wanted pair.

        Args:
            view: View of the cluster.
            servers: Whether each server may be asked.
            wanted_TK: Contiguous.

        Returns:
            The parts, and whether they hold every wanted pair.
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
        max_tokens = view.max_tokens(self._ids_TK.shape[1], inputs.dtype)
        return plan(
            shared.policy, self._ids_TK, wanted_TK, shares_SE, load, max_tokens, inputs.layer
        )

    def send(self, view: ClusterView, part: Part) -> Attempt | None:
        """Send a part to its server; None if the server is busy or lost."""
        connection = view.connections[part.server]
        assert connection is not None
        shared = self._shared
        now = shared.clock()
        left_s = max(self._deadline - now, _LEAST_BUDGET_S)
        service, rows = connection.service, part.rows_R.size
        budget_s = service.budget(rows, shared.attempt_timeout_s, left_s)
        timeouts = self._server_health.timeouts.get(connection)
        if timeouts:
            # Double the budget: the only replica may have become slower than ever before.
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
