"""The client's side of everything that is measured: a connection, exchanges and layer calls.

Connection, transport and layer call are those of `attention_client`; only the monitor is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import grpc
import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import CollectorRegistry

from attention_client.connection import Connection
from attention_client.layer_call import ClusterView, LayerCall
from attention_client.metrics import ClientMetrics
from attention_client.transports import opener
from eaas.bench.dispatch.sizes import model_shape
from eaas.config import load_config
from eaas.errors import ClusterError
from eaas.grpc_client import channel as open_channel
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Placement
from eaas.wire.slot import VERSION

__all__ = ["Caller", "Request", "random_request"]

_CONNECT_S = 10.0
# Whoever needs longer is stuck. Of an attempt, too: none is to be sent again unseen.
_ANSWER_S = 30.0
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, eq=False)
class Request:
    """What a layer call gets.

    Attributes:
        x_TH: bfloat16.
        ids_TK: int64, distinct experts of each token.
        scores_TK: float32.
        wanted_TK: All true.
    """

    x_TH: torch.Tensor
    ids_TK: npt.NDArray[np.int64]
    scores_TK: npt.NDArray[np.float32]
    wanted_TK: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, x_TH: torch.Tensor, ids_TK: npt.NDArray[np.int64], scores_TK: npt.NDArray[np.float32]
    ) -> Request:
        """A request for all of its pairs."""
        return cls(x_TH, ids_TK, scores_TK, np.ones(ids_TK.shape, dtype=np.bool_))


def random_request(tokens: int, hidden: int, num_experts: int, top_k: int) -> Request:
    """Tokens whose experts are drawn uniformly."""
    rng = np.random.default_rng(tokens)
    ids_TK = rng.random((tokens, num_experts)).argsort(axis=1)[:, :top_k]
    scores_TK = rng.random((tokens, top_k), dtype=np.float32)
    x_TH = torch.from_numpy(rng.standard_normal((tokens, hidden), dtype=np.float32)).bfloat16()
    return Request.of(x_TH, ids_TK, scores_TK)


class Caller:
    """A client with one server, which holds every expert; a context manager.

    Args:
        address: host:port of the server.
        transport: Of the slots' bytes.
        hidden, num_experts, top_k: As the server has them.
        name: Of the client; a server takes back what one of that name held before.
        slots: To ask for.

    Raises:
        ClusterError: The server refuses the connection, in its own words.
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
        self._calls = 0
        self._connection: Connection | None = None
        channel = open_channel(address)
        try:
            granted = expert_pb2_grpc.ExpertServiceStub(channel).Connect(
                pb.ConnectRequest(
                    client_id=name,
                    client_incarnation=1,
                    protocol_version=VERSION,
                    transport=transport,
                    slots=slots,
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
        spin_us = load_config().attention_client.spin_us
        self._connection = Connection(
            "server", 1, link, hidden, spin_us, lambda _lost: None, channel.close, self._metrics
        )
        self.connection = self._connection
        holds_LSE = np.ones((1, 1, num_experts), dtype=np.bool_)
        placement = Placement(1, ("server",), holds_LSE, holds_LSE.astype(np.float32))
        self._view = ClusterView(placement, (self.connection,))
        self._stopwatch = _Stopwatch(self.connection)
        self._watched = ClusterView(placement, (cast("Connection", self._stopwatch),))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def _lose(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.lose(reason)

    def room(self, top_k: int) -> int:
        """Tokens that a slot takes."""
        return self.connection.max_tokens(top_k, torch.bfloat16)

    def exchange(self, request: Request, ids_TK: npt.NDArray[np.int32]) -> torch.Tensor:
        """Write, wait, read: what `LayerCall` does with one part.

        Args:
            request: All of it goes into one slot.
            ids_TK: Its experts as the wire has them.

        Raises:
            ClusterError: The server refused it, or did not answer.
            ConnectionLostError: It is gone.
        """
        connection = self.connection
        ticket = connection.submit(0, 1, request.x_TH, ids_TK, request.scores_TK, _ANSWER_S)
        deadline = time.monotonic() + _ANSWER_S
        while True:
            seen = connection.seq()
            result = connection.poll(ticket)
            if result is not None:
                if result.part_RH is None:
                    raise ClusterError(f"the server answered with status {result.header.status}")
                return result.part_RH
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                connection.abandon(ticket)
                raise ClusterError(f"no answer in {_ANSWER_S:.0f} s")
            connection.wait(ticket, seen, left_s)

    def layer_call(self, request: Request) -> torch.Tensor:
        """Dispatch, exchange, combine: float32 (T, H)."""
        return self._call(self._view, request)

    def outside_ns(self, request: Request) -> int:
        """Nanoseconds of a layer call that are not spent in the connection."""
        self._stopwatch.inside_ns = 0
        started = time.perf_counter_ns()
        self._call(self._watched, request)
        return time.perf_counter_ns() - started - self._stopwatch.inside_ns

    def _call(self, view: ClusterView, request: Request) -> torch.Tensor:
        self._calls += 1
        return LayerCall(
            replicas=_Fixed(view),
            layer=0,
            x_TH=request.x_TH,
            ids_TK=request.ids_TK,
            scores_TK=request.scores_TK,
            wanted_TK=request.wanted_TK,
            timeout_s=_ANSWER_S,
            attempt_timeout_s=_ANSWER_S,
            phase=(self._calls * _GOLDEN) % 1.0,
            metrics=self._metrics,
        ).run()


@dataclass(frozen=True, eq=False)
class _Fixed:
    """A cluster in which nothing changes."""

    current: ClusterView

    def view(self) -> ClusterView:
        return self.current

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        time.sleep(timeout_s)


class _Stopwatch:
    """Stands in for an object and adds up the time that is spent in its methods.

    Attributes:
        inside_ns: Nanoseconds so far.
    """

    def __init__(self, watched: object) -> None:
        self.inside_ns = 0
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._watched, name)
        if not callable(found):
            return found
        # Kept: the next time it is found without coming here. A method of this object's own class would be
        # found first, hence only where the object is asked.
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
