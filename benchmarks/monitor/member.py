"""One simulated member: the messages of `MemberSession`, without its threads."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.monitor import http2
from benchmarks.monitor.line import Call, Line
from eaas.membership.session import PROTOCOL_VERSION
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Role

__all__ = ["SimulatedMember", "describe"]

# Model shape that members send when they register; a realistic one, of 48 layers.
_SHAPE = ModelShape(
    model_type="qwen3_moe",
    num_experts=128,
    hidden_size=2048,
    top_k=8,
    layer_names=tuple(f"model.layers.{layer}.mlp.experts" for layer in range(48)),
    dtype="bfloat16",
    digest="0" * 64,
)


def describe(number: int) -> Member:
    """Make the description that a member registers with; every second number is an expert server."""
    server = number % 2 == 0
    return Member(
        id=f"{'server' if server else 'client'}-{number}",
        role=Role.EXPERT_SERVER if server else Role.ATTENTION_CLIENT,
        pid=1 + number,
        host="simulated",
        address=f"192.0.2.1:{10_000 + number}",
        state=MemberState.SERVING,
        model=_SHAPE,
        transports=("shm", "grpc") if server else (),
    )


class SimulatedMember:
    """One simulated member on a connection, which other members may share.

    Attributes:
        incarnation: Current incarnation; 0 before the first.
        sent_at: Monotonic seconds of the last heartbeat.
        waits: Whether that heartbeat is unanswered.
        overdue: Whether the next heartbeat became due before that answer.
        dead: Whether the member has ended.
    """

    __slots__ = (
        "_beat",
        "_beats",
        "_description",
        "_watch",
        "dead",
        "incarnation",
        "line",
        "overdue",
        "sent_at",
        "waits",
    )

    def __init__(self, number: int, line: Line) -> None:
        self._description = describe(number)
        self.line = line
        self.incarnation = 0
        self._beats = self._watch = 0
        self._beat = b""
        self.sent_at = 0.0
        self.waits = self.overdue = self.dead = False

    @property
    def id(self) -> str:
        """Member id that it registers with."""
        return self._description.id

    def register(
        self, registered: Callable[[SimulatedMember], None], ended: Callable[[], None]
    ) -> None:
        """Register at the monitor; a member that was registered before gets a new incarnation.

        Args:
            registered: Called with this member on success.
            ended: Called at the end of the call, with or without an answer.
        """

        def answered(data: bytes) -> None:
            self.incarnation = pb.RegisterResponse.FromString(data).incarnation
            heartbeat = pb.HeartbeatRequest(
                id=self.id,
                incarnation=self.incarnation,
                state=self._description.state.number,
                progress=1_000_000,
                experts=self._description.experts,
                epoch=self._description.epoch,
            )
            self._beat = http2.message(heartbeat.SerializeToString())
            registered(self)

        request = pb.RegisterRequest(
            member=self._description.to_proto(),
            protocol_version=PROTOCOL_VERSION,
            previous_incarnation=self.incarnation,
        )
        self.line.call("Register", request.SerializeToString(), Call(answered, ended))

    def beat(self, now: float, call: Call) -> None:
        """Send a heartbeat to the monitor; the first one opens the stream, with the callbacks `call`."""
        self.sent_at, self.waits, self.overdue = now, True, False
        if self._beats:
            self.line.send(self._beats, self._beat)
        else:
            self._beats = self.line.call(
                "Heartbeat", self._beat[http2.MESSAGE_HEAD_BYTES :], call, more=True
            )

    def watch(self, position: pb.WatchRequest, call: Call) -> None:
        """Open a Watch stream at the monitor, from this position."""
        self._watch = self.line.call("Watch", position.SerializeToString(), call)

    def say_goodbye(self, call: Call) -> None:
        """Deregister at the monitor, then end the streams."""
        request = pb.DeregisterRequest(id=self.id, incarnation=self.incarnation, reason="goodbye")
        self.line.call("Deregister", request.SerializeToString(), call)
        self.vanish()

    def vanish(self) -> None:
        """End silently: cancel the member's streams without deregistering."""
        self.dead = True
        for stream in (self._beats, self._watch):
            self.line.cancel(stream)
        self._beats = self._watch = 0
