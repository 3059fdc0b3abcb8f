"""Value types shared by the services, and their conversion to and from protobuf messages."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from eaas.rpc.v1 import common_pb2 as pb

__all__ = ["Member", "MemberState", "ModelShape", "Placement", "Role", "ServerReach"]


class Role(enum.Enum):
    """Role of a process in the cluster; the value is its displayed name."""

    EXPERT_SERVER = "expert-server"
    ATTENTION_CLIENT = "attention-client"
    MONITOR = "monitor"
    BALANCER = "balancer"

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

    @property
    def life(self) -> tuple[str, int, str, int, str]:
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


# Limit: ten thousand servers with a model of 61 layers of 256 experts.
_MOST_CELLS = 1 << 28
# Limit per model; far more than any model has.
_MOST_EXPERTS = 1 << 20
# Tolerance for rounding, because float32 shares sum to 1 only approximately.
_MOST_SHARE = 1.001


@dataclass(frozen=True, eq=False)
class Placement:
    """Placement of experts: which server holds which replicas, and each replica's share of the tokens.

    Attributes:
        epoch: Version; 0 means no placement yet.
        servers: Server ids, in the order of the arrays' axis S.
        holds_LSE: bool (L, S, E).
        shares_LSE: float32 (L, S, E); sums to 1 over S for each expert, 0 where not held.
    """

    epoch: int
    servers: tuple[str, ...]
    holds_LSE: npt.NDArray[np.bool_]
    shares_LSE: npt.NDArray[np.float32] = field(repr=False)

    def __post_init__(self) -> None:
        if self.holds_LSE.ndim != 3 or self.holds_LSE.shape != self.shares_LSE.shape:
            raise ValueError(
                f"holds_LSE {self.holds_LSE.shape}, shares_LSE {self.shares_LSE.shape}"
            )
        if self.holds_LSE.shape[1] != len(self.servers):
            raise ValueError(f"{len(self.servers)} servers, holds_LSE {self.holds_LSE.shape}")

    def holdings_of(self, server_id: str) -> list[pb.Holding]:
        """Return a server's replicas and shares by layer, all empty if it has none; for the roll-out."""
        num_layers = self.holds_LSE.shape[0]
        if server_id not in self.servers:
            return [pb.Holding() for _ in range(num_layers)]
        s = self.servers.index(server_id)
        layers = []
        for layer in range(num_layers):
            experts_R = np.flatnonzero(self.holds_LSE[layer, s])
            shares_R = self.shares_LSE[layer, s, experts_R]
            layers.append(pb.Holding(experts=experts_R.tolist(), shares=shares_R.tolist()))
        return layers

    def to_proto(self) -> pb.Placement:
        """Convert the placement to its message, for the balancer's messages or a call to it."""
        num_layers, _, num_experts = self.holds_LSE.shape
        servers = [
            pb.ServerPlacement(server_id=server_id, layers=self.holdings_of(server_id))
            for server_id in self.servers
        ]
        return pb.Placement(
            epoch=self.epoch, num_layers=num_layers, num_experts=num_experts, servers=servers
        )

    @classmethod
    def from_proto(cls, message: pb.Placement) -> Placement:
        """Convert a received message to a placement. Raises ValueError if it is inconsistent."""
        # Checked before allocating, because a small message could ask for all memory.
        cells = message.num_layers * max(1, len(message.servers)) * message.num_experts
        if cells > _MOST_CELLS:
            raise ValueError(
                f"a placement of {message.num_layers} layers, {len(message.servers)} servers and "
                f"{message.num_experts} experts: {_MOST_CELLS} of them at most"
            )
        shape = (message.num_layers, len(message.servers), message.num_experts)
        holds_LSE = np.zeros(shape, dtype=np.bool_)
        shares_LSE = np.zeros(shape, dtype=np.float32)
        for s, server in enumerate(message.servers):
            if len(server.layers) != message.num_layers:
                raise ValueError(
                    f"{server.server_id}: {len(server.layers)} layers in the placement"
                )
            for layer, holding in enumerate(server.layers):
                experts_R = np.asarray(holding.experts, dtype=np.int64)
                if (
                    len(experts_R) != len(holding.shares)
                    or (experts_R >= message.num_experts).any()
                ):
                    raise ValueError(f"{server.server_id}: wrong experts in layer {layer}")
                holds_LSE[layer, s, experts_R] = True
                shares_LSE[layer, s, experts_R] = holding.shares
        # Also False for NaN.
        if not ((shares_LSE >= 0) & (shares_LSE <= _MOST_SHARE)).all():
            raise ValueError("a share of the placement is not between 0 and 1")
        return cls(
            message.epoch, tuple(s.server_id for s in message.servers), holds_LSE, shares_LSE
        )
