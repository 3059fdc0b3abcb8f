"""Send a layer call's missing pairs to expert servers: choose servers, make parts, submit requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attention_client.connections.messages import LayerInput
from attention_client.dispatch.parts import Part
from attention_client.layer_call.attempts import Attempt
from attention_client.layer_call.server_health import ServerHealth
from attention_client.layer_call.shared import ClusterView, Dispatcher
from eaas.errors import ConnectionLostError, SlotsBusyError
from eaas.telemetry.tracing import pack

if TYPE_CHECKING:
    from eaas.telemetry.spans import ChildSpan

__all__ = ["Sender"]

_LEAST_BUDGET_S = 0.001


class Sender:
    """Plans and sends the requests of one layer call: first ones, resends and hedges.

    Args:
        shared: State shared by all calls.
        server_health: Health of the servers in this call.
        inputs: Layer, hidden states, scores.
        ids_TK: int64, contiguous, logical experts.

    Attributes:
        deadline: Deadline of the call, monotonic seconds.
        trace: Span of the call; None: not traced.
    """

    def __init__(
        self,
        shared: Dispatcher,
        server_health: ServerHealth,
        inputs: LayerInput,
        ids_TK: npt.NDArray[np.int64],
    ) -> None:
        self._shared = shared
        self._server_health = server_health
        self._inputs = inputs
        self._ids_TK = ids_TK
        self.deadline = math.inf
        self.trace: ChildSpan | None = None

    def plan(
        self, view: ClusterView, servers: Sequence[bool], wanted_TK: npt.NDArray[np.bool_]
    ) -> tuple[list[Part], bool]:
        """Choose a server for each wanted pair by the dispatch policy. Sends nothing.

        Args:
            view: View of the cluster.
            servers: Whether each server may be asked.
            wanted_TK: Pairs to send; contiguous.

        Returns:
            The parts to send, and whether they hold every wanted pair.
        """
        shared, inputs, connections = self._shared, self._inputs, view.connections
        placement = view.placement
        replicas = view.replicas(np.array(servers, dtype=np.bool_))
        load = shared.speeds.load(
            placement.servers,
            [0.0 if c is None else c.work_in_flight for c in connections],
            shared.clock(),
        )
        max_tokens = view.max_tokens(self._ids_TK.shape[1], inputs.dtype)
        return shared.policy.plan(self._ids_TK, wanted_TK, replicas, load, max_tokens, inputs.layer)

    def send(self, view: ClusterView, part: Part) -> Attempt | None:
        """Write a part into a slot of its server, with a time budget. Returns None if it is busy or lost."""
        connection = view.connections[part.server]
        assert connection is not None
        shared = self._shared
        now = shared.clock()
        left_s = max(self.deadline - now, _LEAST_BUDGET_S)
        service, rows = connection.service, part.rows_R.size
        budget_s = service.budget(rows, shared.attempt_timeout_s, left_s)
        timeouts = self._server_health.timeouts.get(connection)
        if timeouts:
            # Double the budget per timeout, because the only replica may have become slower than ever before.
            budget_s = min(budget_s * 2.0**timeouts, left_s)
        trace = None
        if self.trace is not None and shared.traces is not None:
            trace = shared.traces.dispatch(self.trace, connection.server_id, rows)
        context = b"" if trace is None else pack(trace.context)
        try:
            ticket = connection.submit(self._inputs, view.placement.epoch, part, budget_s, context)
        except (ConnectionLostError, SlotsBusyError) as error:
            if trace is not None:
                trace.attributes["eaas.outcome"] = (
                    "busy" if isinstance(error, SlotsBusyError) else "lost"
                )
                trace.end()
            return None
        hedge_s = service.hedge_s(rows)
        hedge_at = math.inf if hedge_s is None else now + hedge_s
        return Attempt(
            part,
            connection,
            ticket,
            now,
            hedge_at,
            now + budget_s,
            trace=trace,
            spares=view.spares,
        )
