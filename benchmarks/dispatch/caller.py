"""The client's side of all measurements: connection and layer call of `attention_client`, no monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc
import numpy as np
import numpy.typing as npt
import torch

# Imported at the start, because a later import would swallow the exception of a SIGTERM.
from numpy.random import default_rng
from prometheus_client import CollectorRegistry

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget
from attention_client.connections.messages import LayerInput
from attention_client.connections.transports import opener, requested
from attention_client.dispatch import dispatch_policy
from attention_client.dispatch.parts import Part
from attention_client.layer_call.call import ClusterView, Dispatcher, LayerCall
from attention_client.layer_call.calls import LayerCalls
from attention_client.telemetry.metrics import ClientMetrics
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.sizes import model_shape
from eaas.config import load_config
from eaas.errors import ClusterError, ConnectionLostError
from eaas.net.grpc_client import channel as open_channel
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Placement
from eaas.wire.arena import SPIN_US
from eaas.wire.slot import VERSION, WireDtype

__all__ = ["Caller", "Request", "joint_calls", "random_request"]

_CONNECT_S = 10.0
_SERVER = "server"
# Deadline of a call and of its attempt. They are equal, so nothing is sent twice.
_ANSWER_S = 30.0


@dataclass(frozen=True, eq=False)
class Request:
    """The input of a layer call or of an exchange.

    Attributes:
        x_TH: bfloat16.
        ids_TK: int64, distinct experts of each token.
        scores_TK: float32.
        wanted_TK: All true.
        inputs, part: The whole request as one part, for an exchange.
        out_TH: float32, the result of an exchange.
    """

    x_TH: torch.Tensor
    ids_TK: npt.NDArray[np.int64]
    scores_TK: npt.NDArray[np.float32]
    wanted_TK: npt.NDArray[np.bool_]
    inputs: LayerInput
    part: Part
    out_TH: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        x_TH: torch.Tensor,
        ids_TK: npt.NDArray[np.int64],
        scores_TK: npt.NDArray[np.float32],
        layer: int = 0,
    ) -> Request:
        """Make a request that wants the results of all its token-expert pairs."""
        tokens = len(ids_TK)
        part = Part(0, np.arange(tokens), ids_TK.astype(np.int32), float(ids_TK.size))
        return cls(
            x_TH,
            np.ascontiguousarray(ids_TK),
            scores_TK,
            np.ones(ids_TK.shape, dtype=np.bool_),
            LayerInput.of(layer, x_TH, scores_TK),
            part,
            np.empty((tokens, x_TH.shape[1]), dtype=np.float32),
        )


def random_request(tokens: int, hidden: int, num_experts: int, top_k: int) -> Request:
    """Make a request with random tokens and uniformly drawn experts."""
    rng = default_rng(tokens)
    ids_TK = rng.random((tokens, num_experts)).argsort(axis=1)[:, :top_k]
    scores_TK = rng.random((tokens, top_k), dtype=np.float32)
    x_TH = torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32)).bfloat16()
    return Request.of(x_TH, ids_TK, scores_TK)


class Caller:
    """A client connected to one server, which holds every expert; a context manager.

    Args:
        hidden, num_experts, top_k: Sizes of the server.
        name: Client id; a server frees the slots of a former client of that id.

    Raises:
        ClusterError: The server refuses the connection (its message).
    """

    def __init__(
        self,
        address: str,
        transport: str,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        name: str,
        slots: int,
    ) -> None:
        shape = model_shape(hidden, num_experts, top_k)
        self._metrics = ClientMetrics(CollectorRegistry())
        self._connection: Connection | None = None
        channel = open_channel(address)
        try:
            granted = expert_pb2_grpc.ExpertServiceStub(channel).Connect(
                pb.ConnectRequest(
                    client_id=name,
                    client_incarnation=1,
                    protocol_version=VERSION,
                    transport=requested(transport),
                    slots=slots,
                    slot_tokens=load_config().expert_server.slot_tokens,
                    hidden_size=hidden,
                    model_digest=shape.digest,
                ),
                timeout=_CONNECT_S,
            )
            link = opener(transport)(granted, channel, self._lose)
        except BaseException as error:
            channel.close()
            if isinstance(error, grpc.Call):
                raise ClusterError(f"{transport}: no connection: {error.details()}") from error
            raise
        settings = load_config().attention_client
        self._connection = Connection(
            _SERVER,
            1,
            link,
            hidden,
            SPIN_US,
            settings.checksum,
            lambda _lost: None,
            channel.close,
            self._metrics,
        )
        self.connection = self._connection
        holds_LSE = np.ones((1, 1, num_experts), dtype=np.bool_)
        placement = Placement(1, (_SERVER,), holds_LSE, holds_LSE.astype(np.float32))
        self._stopwatch = _Stopwatch(self.connection)
        watched = cast("Connection", self._stopwatch)
        self._plain = self._dispatcher(
            ClusterView(placement, (self.connection,)), settings.dispatch
        )
        self._watched = self._dispatcher(ClusterView(placement, (watched,)), settings.dispatch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def _lose(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.lose(reason)

    def capacity(self, top_k: int) -> int:
        """Number of tokens that one of the server's slots holds."""
        return self.connection.max_tokens(top_k, WireDtype.BFLOAT16)

    def exchange(self, request: Request) -> int:
        """Send a request through a slot and read the result, as `LayerCall` does with one part.

        Returns:
            The server's time for it, as its answer says, in microseconds.

        Raises:
            ClusterError: The server refused the request or did not answer.
            ConnectionLostError: The connection is lost, or the server revoked the slot.
        """
        connection = self.connection
        ticket = connection.submit(request.inputs, 1, request.part, _ANSWER_S)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            seen = connection.seq()
            answer = connection.poll(ticket)
            if answer is not None:
                if answer.part_RH is None:
                    raise ClusterError(f"the server answered with status {answer.header.status}")
                request.out_TH[...] = answer.part_RH
                if not connection.release(ticket):
                    raise ConnectionLostError("the server took the slot back")
                return answer.header.service_us
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                connection.abandon(ticket, overdue=True)
                raise ClusterError(f"no answer in {_ANSWER_S:.0f} s")
            connection.wait(ticket, seen, left_s)

    def layer_call(self, request: Request) -> torch.Tensor:
        """Run a whole layer call: dispatch, exchange, combine. Returns float32 (T, H)."""
        return _call(self._plain, request)

    def layer_call_of(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer call for tensors in host memory, as an engine does. Returns (T, H), dtype as x_TH."""
        scores = scores_TK.numpy()
        inputs = LayerInput.of(0, x_TH, scores)
        wanted_TK = np.ones(scores.shape, dtype=np.bool_)
        return LayerCall(self._plain, inputs, ids_TK.numpy(), wanted_TK).run().to(x_TH.dtype)

    def outside_ns(self, request: Request) -> int:
        """Run a layer call; return its nanoseconds outside the connection (dispatch and combine)."""
        self._stopwatch.inside_ns = 0
        started = time.perf_counter_ns()
        _call(self._watched, request)
        return time.perf_counter_ns() - started - self._stopwatch.inside_ns

    def _dispatcher(self, view: ClusterView, policy: str) -> Dispatcher:
        return Dispatcher(
            _FixedView(view),
            dispatch_policy(policy),
            _ANSWER_S,
            _ANSWER_S,
            HedgeBudget(0.0),
            self._metrics,
        )


def joint_calls(callers: Sequence[Caller], plan: Plan) -> LayerCalls:
    """Make the layer calls of a client of several servers, each of which holds its share of the experts."""
    names = tuple(f"server-{number}" for number in range(len(callers)))
    holds_LSE = np.zeros((1, len(callers), plan.num_experts), dtype=np.bool_)
    for number in range(len(callers)):
        holds_LSE[0, number, number :: len(callers)] = True
    placement = Placement(1, names, holds_LSE, holds_LSE.astype(np.float32))
    view = ClusterView(placement, tuple(caller.connection for caller in callers))
    dispatcher = Dispatcher(
        _FixedView(view),
        dispatch_policy(load_config().attention_client.dispatch),
        _ANSWER_S,
        _ANSWER_S,
        HedgeBudget(0.0),
        ClientMetrics(CollectorRegistry()),
    )
    return LayerCalls(dispatcher, checksum=False)


def _call(dispatcher: Dispatcher, request: Request) -> torch.Tensor:
    inputs = LayerInput.of(0, request.x_TH, request.scores_TK)
    return LayerCall(dispatcher, inputs, request.ids_TK, request.wanted_TK).run()


@dataclass(frozen=True, eq=False)
class _FixedView:
    """A `Replicas` (`attention_client.layer_call.call`) whose cluster never changes."""

    current: ClusterView

    def view(self) -> ClusterView:
        """Return the fixed cluster view."""
        return self.current

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Sleep for `timeout_s`, because no change can come."""
        time.sleep(timeout_s)


class _Stopwatch:
    """A proxy that adds up the time spent in an object's methods.

    Attributes:
        inside_ns: Nanoseconds spent in the methods so far.
    """

    def __init__(self, watched: object) -> None:
        self.inside_ns = 0
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watched, name)
        if not callable(found):
            return found
        # Cache it on the instance, so that the next access does not come here.
        timed = self._timed(found)
        self.__dict__[name] = timed
        return timed

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return method(*arguments, **named)
            finally:
                self.inside_ns += time.perf_counter_ns() - started

        return call
