"""A client of lone servers: connections and layer calls of `attention_client`, without a monitor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import numpy as np
import torch

# Imported at the start, because a later import would swallow the exception of a SIGTERM.
from numpy.random import default_rng
from prometheus_client import CollectorRegistry

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget
from attention_client.connections.messages import LayerInput
from attention_client.connections.opening import open_connection
from attention_client.connections.transports import opener
from attention_client.dispatch import dispatch_policy
from attention_client.dispatch.parts import Part
from attention_client.layer_call.layer_calls import LayerCalls
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.metrics import ClientMetrics
from benchmarks.harness.lone_server import model_shape
from eaas.config import load_config
from eaas.errors import ClusterError
from eaas.types import Member, MemberState, Placement, Role
from eaas_cli.bench.experts.plan import Shape

__all__ = ["Request", "connected", "exchange", "layer_calls", "random_request"]

# Deadline of a call and of its attempt. They are equal, so nothing is sent twice.
_ANSWER_S = 30.0


@dataclass(frozen=True, eq=False)
class Request:
    """The input of a layer call, all of whose token-expert pairs are wanted.

    Attributes:
        x_TH: bfloat16.
        ids_TK: int64, distinct experts of each token.
        scores_TK: float32.
        layer: MoE layer.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    layer: int = 0

    def call(self, calls: LayerCalls) -> torch.Tensor:
        """Make the layer call, as an engine does. Returns (T, H)."""
        return calls.run(self.layer, self.x_TH, self.ids_TK, self.scores_TK, None)


def random_request(tokens: int, shape: Shape) -> Request:
    """Make a request with random tokens and uniformly drawn experts."""
    rng = default_rng(tokens)
    ids_TK = rng.random((tokens, shape.num_experts)).argsort(axis=1)[:, : shape.top_k]
    scores_TK = rng.random((tokens, shape.top_k), dtype=np.float32)
    x_TH = rng.standard_normal((tokens, shape.hidden), dtype=np.float32)
    ids = torch.from_numpy(np.ascontiguousarray(ids_TK))
    return Request(torch.from_numpy(x_TH).bfloat16(), ids, torch.from_numpy(scores_TK))


@contextmanager
def connected(
    address: str | None,
    transport: str,
    shape: Shape,
    *,
    slots: int,
    layers: int = 1,
) -> Iterator[Connection]:
    """Connect a client to a lone server.

    Args:
        shape, layers: Of the server.

    Raises:
        ClusterError: The server refuses the connection (its message).
    """
    assert address is not None
    settings = load_config()
    most = settings.expert_server.slot_tokens
    changes = {"transport": transport, "slots": slots, "max_batch_tokens": most}
    try:
        connection = open_connection(
            Member(address, Role.EXPERT_SERVER, 1, "h", address, MemberState.SERVING, 1),
            1,
            lambda _opened: None,
            open_link=opener(transport),
            client_id="client",
            shape=model_shape(shape, layers),
            config=settings.attention_client.model_copy(update=changes),
            metrics=ClientMetrics(CollectorRegistry()),
            on_lost=lambda _lost: None,
            tls=None,
        )
    except grpc.RpcError as error:
        reason = error.details() if isinstance(error, grpc.Call) else error
        raise ClusterError(f"{transport}: no connection: {reason}") from error
    try:
        yield connection
    finally:
        connection.close()


def layer_calls(servers: Sequence[Connection], shape: Shape) -> LayerCalls:
    """Make the layer calls of a client of several servers, each of which holds its share of the experts."""
    holds_LSE = np.zeros((1, len(servers), shape.num_experts), dtype=np.bool_)
    for number in range(len(servers)):
        holds_LSE[0, number, number :: len(servers)] = True
    names = tuple(server.server_id for server in servers)
    placement = Placement(1, names, holds_LSE, holds_LSE.astype(np.float32))
    settings = load_config().attention_client
    context = CallContext(
        _FixedView(ClusterView(placement, tuple(servers))),
        dispatch_policy(settings.dispatch),
        _ANSWER_S,
        _ANSWER_S,
        HedgeBudget(0.0),
        ClientMetrics(CollectorRegistry()),
    )
    return LayerCalls(context, settings.checksum)


def exchange(connection: Connection, request: Request) -> int:
    """Send a request through a slot and read the result.

    Returns:
        The server's time for it, as its answer says, in microseconds.

    Raises:
        ClusterError: The server refused the request or did not answer.
    """
    ids_TK = request.ids_TK.numpy().astype(np.int32)
    part = Part(0, np.arange(len(ids_TK)), ids_TK, float(ids_TK.size))
    inputs = LayerInput.of(request.layer, request.x_TH, request.scores_TK.numpy())
    ticket = connection.submit(inputs, 1, part, _ANSWER_S)
    deadline = time.monotonic() + _ANSWER_S
    while True:
        seen = connection.seq()
        answer = connection.poll(ticket)
        if answer is not None:
            if answer.part_RH is None:
                raise ClusterError(f"the server answered with status {answer.header.status}")
            connection.release(ticket)
            return answer.header.service_us
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            connection.abandon(ticket, overdue=True)
            raise ClusterError(f"no answer in {_ANSWER_S:.0f} s")
        connection.wait(ticket, seen, left_s)


@dataclass(frozen=True, eq=False)
class _FixedView:
    """A cluster view that never changes."""

    current: ClusterView

    def view(self) -> ClusterView:
        """Return it."""
        return self.current

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Sleep for `timeout_s`, because no change can come."""
        time.sleep(timeout_s)
