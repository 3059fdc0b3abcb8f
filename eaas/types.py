"""Value types shared by the services, and their conversion to and from protobuf messages."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from eaas.placement import Placement
from eaas.rpc.v1 import common_pb2 as pb

__all__ = ["Member", "MemberState", "ModelShape", "Placement", "Role", "ServerReach"]


class Role(enum.Enum):
    """Role of a process in the cluster; the value is its displayed name."""

    EXPERT_SERVER = "expert-server"
    ATTENTION_CLIENT = "attention-client"
    MONITOR = "monitor"
    BALANCER = "balancer"
    FRONTEND = "frontend"

    @property
    def number(self) -> pb.Role:
        """The role's protobuf enum value."""
        return cast("pb.Role", _ROLE_NUMBERS[self])

    @classmethod
    def from_number(cls, number: int) -> Role:
        """Convert a received enum value to a role. Raises ValueError if it is unknown."""
        role = _ROLES.get(number)
        if role is None:
            raise ValueError(f"unknown role {number}")
        return role


class MemberState(enum.Enum):
    """Lifecycle state of a member. A SUSPECT one is still used; a DEAD or LEFT one counts as ended."""

    JOINING = "JOINING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    LEFT = "LEFT"

    @property
    def is_gone(self) -> bool:
        """Whether the member is DEAD or LEFT: its process has ended or is presumed to have ended."""
        return self in (MemberState.DEAD, MemberState.LEFT)

    @property
    def number(self) -> pb.MemberState:
        """The state's protobuf enum value."""
        return cast("pb.MemberState", _STATE_NUMBERS[self])

    @classmethod
    def from_number(cls, number: int) -> MemberState:
        """Convert a received enum value to a state. Raises ValueError if it is unknown."""
        state = _STATES.get(number)
        if state is None:
            raise ValueError(f"unknown member state {number}")
        return state


# Tables, because a monitor converts them in every heartbeat and for each member of a snapshot.
_ROLE_NUMBERS = {role: pb.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLES = {int(number): role for role, number in _ROLE_NUMBERS.items()}
_STATE_NUMBERS = {
    state: pb.MemberState.Value(f"MEMBER_STATE_{state.name}") for state in MemberState
}
_STATES = {int(number): state for state, number in _STATE_NUMBERS.items()}


@dataclass(frozen=True)
class ModelShape:
    """Model properties that all processes of a cluster must agree on.

    Attributes:
        model_type: transformers' model_type.
        num_experts: Logical experts per MoE layer (E).
        hidden_size: Hidden size (H).
        top_k: Experts per token (K).
        layer_names: Name of the experts module of each MoE layer, in order (length L).
        dtype: Torch dtype of the weights, without the "torch." prefix.
        digest: Identifies the model; processes of one cluster have equal digests.
    """

    model_type: str
    num_experts: int
    hidden_size: int
    top_k: int
    layer_names: tuple[str, ...]
    dtype: str
    digest: str

    def __str__(self) -> str:
        """Name the model in messages; fine-tunes of one model differ in the digest."""
        return (
            f"{self.model_type}, {self.num_layers} layers of {self.num_experts} experts, "
            f"digest {self.digest[:12]}"
        )

    @property
    def num_layers(self) -> int:
        """Number of MoE layers (L), which are the layers with routed experts."""
        return len(self.layer_names)

    def to_proto(self) -> pb.ModelShape:
        """Convert the shape to its protobuf message."""
        return pb.ModelShape(**vars(self))

    @classmethod
    def from_proto(cls, message: pb.ModelShape) -> ModelShape:
        """Convert a protobuf message to a shape. Raises ValueError if it has more experts than any model."""
        # Balancers allocate arrays of this size for each server.
        if len(message.layer_names) * message.num_experts > _MOST_EXPERTS:
            raise ValueError(
                f"a model of {len(message.layer_names)} layers of {message.num_experts} experts: "
                f"{_MOST_EXPERTS} experts at most"
            )
        return cls(
            message.model_type,
            message.num_experts,
            message.hidden_size,
            message.top_k,
            tuple(message.layer_names),
            message.dtype,
            message.digest,
        )


@dataclass(frozen=True)
class ServerReach:
    """Whether an attention client is connected to one incarnation of a server (see `common.proto`)."""

    server_id: str
    server_incarnation: int
    reason: str = ""
    lost: bool = False

    @staticmethod
    def to_proto(servers: Iterable[ServerReach]) -> pb.Reach:
        """Convert the reach to its protobuf message."""
        return pb.Reach(servers=[pb.ServerReach(**vars(s)) for s in servers])

    @classmethod
    def from_proto(cls, message: pb.Reach) -> tuple[ServerReach, ...]:
        """Convert a received message (in a client's heartbeat, or of a member) to a reach."""
        return tuple(
            cls(s.server_id, s.server_incarnation, s.reason, s.lost) for s in message.servers
        )


@dataclass(frozen=True)
class Member:
    """One incarnation of a process, as the monitor stores and sends it (fields: `common.proto`, Member)."""

    id: str
    role: Role
    pid: int
    host: str
    address: str
    state: MemberState
    incarnation: int = 0
    experts: int = 0
    in_flight: int = 0
    model: ModelShape | None = None
    progress: int = 0
    speed: float = 1.0
    memory_bytes: int = 0
    expert_bytes: int = 0
    node: str = ""
    transports: tuple[str, ...] = ()
    silence_s: float = 0.0
    epoch: int = 0
    busy_s: float = 0.0
    loading_bytes: int = 0
    loaded_bytes: int = 0
    reach: tuple[ServerReach, ...] | None = None
    engine_address: str = ""

    @property
    def process(self) -> tuple[str, int, str, int, str]:
        """Identity of this incarnation; an attention client connects to a server anew when it changes.

        The incarnation's number alone is not unique after the monitor loses its state.
        """
        return (self.id, self.incarnation, self.host, self.pid, self.address)

    def to_proto(self, **changes: Any) -> pb.Member:
        """Convert the member to its protobuf message, with `changes` (its fields) in place of some values."""
        converted = {
            "role": self.role.number,
            "state": self.state.number,
            "model": _message_of(self.model) if self.model else None,
            "reach": None if self.reach is None else ServerReach.to_proto(self.reach),
        }
        return pb.Member(**(vars(self) | converted | changes))

    @classmethod
    def from_proto(cls, message: pb.Member, models: Sequence[ModelShape] = ()) -> Member:
        """Convert a protobuf message to a member.

        Args:
            message: The member.
            models: Those of its snapshot, to which `model_number` refers.

        Raises:
            ValueError: An unknown role, state or model number.
        """
        return cls(
            **{name: getattr(message, name) for name in _AS_SENT},
            role=Role.from_number(message.role),
            state=MemberState.from_number(message.state),
            model=_model_of(message, models),
            # An unset speed means average speed.
            speed=message.speed or 1.0,
            transports=tuple(message.transports),
            reach=ServerReach.from_proto(message.reach) if message.HasField("reach") else None,
        )


_CONVERTED = ("role", "state", "model", "speed", "transports", "reach")
_AS_SENT = tuple(f.name for f in fields(Member) if f.name not in _CONVERTED)


def _model_of(message: pb.Member, models: Sequence[ModelShape]) -> ModelShape | None:
    if message.model_number > len(models):
        raise ValueError(f"{message.id}: model {message.model_number} of {len(models)}")
    if message.model_number:
        return models[message.model_number - 1]
    return _shape_of(message.model.SerializeToString()) if message.HasField("model") else None


# All members of a cluster serve one model, so that thousands of members can share one object.
@functools.lru_cache(maxsize=8)
def _shape_of(serialized: bytes) -> ModelShape:
    return ModelShape.from_proto(pb.ModelShape.FromString(serialized))


@functools.lru_cache(maxsize=8)
def _message_of(shape: ModelShape) -> pb.ModelShape:
    return shape.to_proto()


# Limit per model; far more than any model has.
_MOST_EXPERTS = 1 << 20
