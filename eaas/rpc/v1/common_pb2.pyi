from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_EXPERT_SERVER: _ClassVar[Role]
    ROLE_ATTENTION_CLIENT: _ClassVar[Role]
    ROLE_MONITOR: _ClassVar[Role]
    ROLE_BALANCER: _ClassVar[Role]
    ROLE_FRONTEND: _ClassVar[Role]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_JOINING: _ClassVar[MemberState]
    MEMBER_STATE_SERVING: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_SUSPECT: _ClassVar[MemberState]
    MEMBER_STATE_DEAD: _ClassVar[MemberState]
    MEMBER_STATE_LEFT: _ClassVar[MemberState]
ROLE_UNSPECIFIED: Role
ROLE_EXPERT_SERVER: Role
ROLE_ATTENTION_CLIENT: Role
ROLE_MONITOR: Role
ROLE_BALANCER: Role
ROLE_FRONTEND: Role
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_JOINING: MemberState
MEMBER_STATE_SERVING: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_SUSPECT: MemberState
MEMBER_STATE_DEAD: MemberState
MEMBER_STATE_LEFT: MemberState

class ModelShape(_message.Message):
    __slots__ = ("model_type", "num_experts", "hidden_size", "top_k", "layer_names", "dtype", "digest")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    num_experts: int
    hidden_size: int
    top_k: int
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    digest: str
    def __init__(self, model_type: _Optional[str] = ..., num_experts: _Optional[int] = ..., hidden_size: _Optional[int] = ..., top_k: _Optional[int] = ..., layer_names: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "role", "pid", "host", "address", "state", "incarnation", "experts", "in_flight", "model", "progress", "speed", "memory_bytes", "expert_bytes", "node", "transports", "silence_s", "epoch", "busy_s", "reach", "loading_bytes", "loaded_bytes", "model_number", "engine_address")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    LOADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    role: Role
    pid: int
    host: str
    address: str
    state: MemberState
    incarnation: int
    experts: int
    in_flight: int
    model: ModelShape
    progress: int
    speed: float
    memory_bytes: int
    expert_bytes: int
    node: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    silence_s: float
    epoch: int
    busy_s: float
    reach: Reach
    loading_bytes: int
    loaded_bytes: int
    model_number: int
    engine_address: str
    def __init__(self, id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[MemberState, str]] = ..., incarnation: _Optional[int] = ..., experts: _Optional[int] = ..., in_flight: _Optional[int] = ..., model: _Optional[_Union[ModelShape, _Mapping]] = ..., progress: _Optional[int] = ..., speed: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., node: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., silence_s: _Optional[float] = ..., epoch: _Optional[int] = ..., busy_s: _Optional[float] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., loading_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., model_number: _Optional[int] = ..., engine_address: _Optional[str] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: _containers.RepeatedCompositeFieldContainer[ServerReach]
    def __init__(self, servers: _Optional[_Iterable[_Union[ServerReach, _Mapping]]] = ...) -> None: ...

class ServerReach(_message.Message):
    __slots__ = ("server_id", "server_incarnation", "reason", "lost")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    server_incarnation: int
    reason: str
    lost: bool
    def __init__(self, server_id: _Optional[str] = ..., server_incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., lost: _Optional[bool] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("experts", "shares", "digests")
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    experts: _containers.RepeatedScalarFieldContainer[int]
    shares: _containers.RepeatedScalarFieldContainer[float]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, experts: _Optional[_Iterable[int]] = ..., shares: _Optional[_Iterable[float]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ServerPlacement(_message.Message):
    __slots__ = ("server_id", "layers")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    layers: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, server_id: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("epoch", "num_layers", "num_experts", "servers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_layers: int
    num_experts: int
    servers: _containers.RepeatedCompositeFieldContainer[ServerPlacement]
    def __init__(self, epoch: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ServerPlacement, _Mapping]]] = ...) -> None: ...

class SpareReplicas(_message.Message):
    __slots__ = ("epoch", "servers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    servers: _containers.RepeatedCompositeFieldContainer[ServerPlacement]
    def __init__(self, epoch: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ServerPlacement, _Mapping]]] = ...) -> None: ...

class LayerTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...
