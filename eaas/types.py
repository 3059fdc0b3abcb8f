"""Value types that several services share, and their way to and from the contract's messages."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from eaas.rpc.v1 import common_pb2 as pb

__all__ = ["Member", "MemberState", "ModelShape", "Placement", "Role", "ServerReach"]


class Role(enum.Enum):
    """What a process is; the value is the name that people see."""

    EXPERT_SERVER = "expert-server"
    ATTENTION_CLIENT = "attention-client"
    MONITOR = "monitor"
    BALANCER = "balancer"

    @property
    def number(self) -> pb.Role:
        """The contract's number of this role."""
        return cast("pb.Role", _ROLE_NUMBERS[self])

    @classmethod
    def from_number(cls, number: int) -> Role:
        """The role of a contract number. Raises ValueError for an unknown one."""
        role = _ROLES.get(number)
        if role is None:
            raise ValueError(f"unknown role {number}")
        return role


class MemberState(enum.Enum):
    """Where a member is in its life. SUSPECT is "maybe"; DEAD and LEFT are "gone"."""

    JOINING = "JOINING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"
    LEFT = "LEFT"

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or counts as ended."""
        return self in (MemberState.DEAD, MemberState.LEFT)

    @property
    def number(self) -> pb.MemberState:
        """The contract's number of this state."""
        return cast("pb.MemberState", _STATE_NUMBERS[self])

    @classmethod
    def from_number(cls, number: int) -> MemberState:
        """The state of a contract number. Raises ValueError for an unknown one."""
        state = _STATES.get(number)
        if state is None:
            raise ValueError(f"unknown member state {number}")
        return state


# Looked up once: a monitor does it with every heartbeat, and for each member of a snapshot.
_ROLE_NUMBERS = {role: pb.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLES = {int(number): role for role, number in _ROLE_NUMBERS.items()}
_STATE_NUMBERS = {
    state: pb.MemberState.Value(f"MEMBER_STATE_{state.name}") for state in MemberState
}
_STATES = {int(number): state for state, number in _STATE_NUMBERS.items()}


@dataclass(frozen=True)
class ModelShape:
    """The part of a model that the cluster must agree on.

    Attributes:
        model_type: transformers' model_type.
        num_experts: Logical experts per MoE layer (E).
        hidden_size: Hidden size (H).
        top_k: Experts per token (K).
        layer_names: Name of the experts module of each MoE layer, in order (L of them).
        dtype: Torch dtype of the weights, without the "torch." prefix.
        digest: Two processes with different digests do not serve the same model.
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
        """MoE layers (L)."""
        return len(self.layer_names)

    def to_proto(self) -> pb.ModelShape:
        """The contract's message."""
        return pb.ModelShape(
            model_type=self.model_type,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            top_k=self.top_k,
            layer_names=self.layer_names,
            dtype=self.dtype,
            digest=self.digest,
        )

    @classmethod
    def from_proto(cls, message: pb.ModelShape) -> ModelShape:
        """The value of a message. Raises ValueError where it claims more experts than any model has."""
        # Balancers lay arrays of this size out, once for each server.
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
    """Whether a client is connected to a life of a server (fields: `common.proto`, ServerReach)."""

    server_id: str
    server_incarnation: int
    reason: str = ""
    lost: bool = False

    @staticmethod
    def to_proto(servers: Iterable[ServerReach]) -> pb.Reach:
        """The contract's message."""
        return pb.Reach(
            servers=[
                pb.ServerReach(
                    server_id=s.server_id,
                    server_incarnation=s.server_incarnation,
                    reason=s.reason,
                    lost=s.lost,
                )
                for s in servers
            ]
        )

    @classmethod
    def from_proto(cls, message: pb.Reach) -> tuple[ServerReach, ...]:
        """The values of a message."""
        return tuple(
            cls(s.server_id, s.server_incarnation, s.reason, s.lost) for s in message.servers
        )


@dataclass(frozen=True)
class Member:
    """One life of one process, as the monitor knows it (fields: `common.proto`, Member)."""

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
    reach: tuple[ServerReach, ...] | None = None

    @property
    def life(self) -> tuple[str, int, str, int, str]:
        """Which process this is. A monitor that forgot everything counts incarnations from 1 again."""
        return (self.id, self.incarnation, self.host, self.pid, self.address)

    def to_proto(self) -> pb.Member:
        """The contract's message."""
        return pb.Member(
            id=self.id,
            role=self.role.number,
            pid=self.pid,
            host=self.host,
            address=self.address,
            state=self.state.number,
            incarnation=self.incarnation,
            experts=self.experts,
            in_flight=self.in_flight,
            model=_message_of(self.model) if self.model else None,
            progress=self.progress,
            speed=self.speed,
            memory_bytes=self.memory_bytes,
            expert_bytes=self.expert_bytes,
            node=self.node,
            transports=self.transports,
            silence_s=self.silence_s,
            epoch=self.epoch,
            busy_s=self.busy_s,
            reach=None if self.reach is None else ServerReach.to_proto(self.reach),
        )

    @classmethod
    def from_proto(cls, message: pb.Member) -> Member:
        """The value of a message. Raises ValueError for an unknown role or state."""
        return cls(
            id=message.id,
            role=Role.from_number(message.role),
            pid=message.pid,
            host=message.host,
            address=message.address,
            state=MemberState.from_number(message.state),
            incarnation=message.incarnation,
            experts=message.experts,
            in_flight=message.in_flight,
            model=_shape_of(message.model.SerializeToString())
            if message.HasField("model")
            else None,
            progress=message.progress,
            # Not stated: as fast as the others.
            speed=message.speed or 1.0,
            memory_bytes=message.memory_bytes,
            expert_bytes=message.expert_bytes,
            node=message.node,
            transports=tuple(message.transports),
            silence_s=message.silence_s,
            epoch=message.epoch,
            busy_s=message.busy_s,
            reach=ServerReach.from_proto(message.reach) if message.HasField("reach") else None,
        )


# Members of one cluster are of one model: thousands of them are not to hold, or to build, it for themselves.
@functools.lru_cache(maxsize=8)
def _shape_of(serialized: bytes) -> ModelShape:
    return ModelShape.from_proto(pb.ModelShape.FromString(serialized))


@functools.lru_cache(maxsize=8)
def _message_of(shape: ModelShape) -> pb.ModelShape:
    return shape.to_proto()


# Ten thousand servers, and a model of 61 layers of 256 experts.
_MOST_CELLS = 1 << 28
# Of one model: far more than any has.
_MOST_EXPERTS = 1 << 20
# A sum of float32 shares is 1 but for rounding.
_MOST_SHARE = 1.001


@dataclass(frozen=True, eq=False)
class Placement:
    """Which server holds which replicas, and how each expert's tokens are shared.

    Attributes:
        epoch: Version; 0 is "none yet".
        servers: Server ids; index S of the arrays.
        holds_LSE: bool (L, S, E).
        shares_LSE: float32 (L, S, E); over S sums to 1 for every expert, 0 where not held.
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

    def experts_of(self, server_id: str) -> tuple[tuple[int, ...], ...]:
        """The experts that a server holds in each layer (empty ones for a server not placed)."""
        if server_id not in self.servers:
            return tuple(() for _ in range(self.holds_LSE.shape[0]))
        holds_LE = self.holds_LSE[:, self.servers.index(server_id)]
        return tuple(tuple(np.flatnonzero(holds_E).tolist()) for holds_E in holds_LE)

    def holdings_of(self, server_id: str) -> list[pb.Holding]:
        """A server's part of the contract's message, layer by layer (empty for a server not placed)."""
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
        """The contract's message."""
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
        """The value of a message. Raises ValueError where an id, a length or a share is out of range."""
        # Before there is any memory for it: two numbers could ask for all that there is.
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
        # Also false for NaN.
        if not ((shares_LSE >= 0) & (shares_LSE <= _MOST_SHARE)).all():
            raise ValueError("a share of the placement is not between 0 and 1")
        return cls(
            message.epoch, tuple(s.server_id for s in message.servers), holds_LSE, shares_LSE
        )
