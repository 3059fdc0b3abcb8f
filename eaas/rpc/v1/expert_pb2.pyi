from eaas.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("client_id", "client_incarnation", "protocol_version", "transport", "slots", "hidden_size", "model_digest", "slot_tokens")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SLOT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    client_incarnation: int
    protocol_version: int
    transport: str
    slots: int
    hidden_size: int
    model_digest: str
    slot_tokens: int
    def __init__(self, client_id: _Optional[str] = ..., client_incarnation: _Optional[int] = ..., protocol_version: _Optional[int] = ..., transport: _Optional[str] = ..., slots: _Optional[int] = ..., hidden_size: _Optional[int] = ..., model_digest: _Optional[str] = ..., slot_tokens: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("connection_id", "generation", "server_incarnation", "first_slot", "slots", "reply_doorbell", "slot_count", "payload_capacity", "result_capacity", "arena_pid", "arena_fd", "arena_bytes", "epoch", "machine", "hello")
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    REPLY_DOORBELL_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    RESULT_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ARENA_PID_FIELD_NUMBER: _ClassVar[int]
    ARENA_FD_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    connection_id: str
    generation: int
    server_incarnation: int
    first_slot: int
    slots: int
    reply_doorbell: int
    slot_count: int
    payload_capacity: int
    result_capacity: int
    arena_pid: int
    arena_fd: int
    arena_bytes: int
    epoch: int
    machine: str
    hello: bytes
    def __init__(self, connection_id: _Optional[str] = ..., generation: _Optional[int] = ..., server_incarnation: _Optional[int] = ..., first_slot: _Optional[int] = ..., slots: _Optional[int] = ..., reply_doorbell: _Optional[int] = ..., slot_count: _Optional[int] = ..., payload_capacity: _Optional[int] = ..., result_capacity: _Optional[int] = ..., arena_pid: _Optional[int] = ..., arena_fd: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., machine: _Optional[str] = ..., hello: _Optional[bytes] = ...) -> None: ...

class DisconnectRequest(_message.Message):
    __slots__ = ("connection_id",)
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    connection_id: str
    def __init__(self, connection_id: _Optional[str] = ...) -> None: ...

class DisconnectResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("connection_id", "slot", "data")
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    connection_id: str
    slot: int
    data: bytes
    def __init__(self, connection_id: _Optional[str] = ..., slot: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("slot", "data")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    slot: int
    data: bytes
    def __init__(self, slot: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("connection_id", "nixl", "handle", "memory")
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    connection_id: str
    nixl: str
    handle: bytes
    memory: SlotMemory
    def __init__(self, connection_id: _Optional[str] = ..., nixl: _Optional[str] = ..., handle: _Optional[bytes] = ..., memory: _Optional[_Union[SlotMemory, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("handle", "memory")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    memory: SlotMemory
    def __init__(self, handle: _Optional[bytes] = ..., memory: _Optional[_Union[SlotMemory, _Mapping]] = ...) -> None: ...

class SlotMemory(_message.Message):
    __slots__ = ("description", "requests_at", "results_at", "stride")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_AT_FIELD_NUMBER: _ClassVar[int]
    RESULTS_AT_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    description: bytes
    requests_at: int
    results_at: int
    stride: int
    def __init__(self, description: _Optional[bytes] = ..., requests_at: _Optional[int] = ..., results_at: _Optional[int] = ..., stride: _Optional[int] = ...) -> None: ...

class PreparePlacementRequest(_message.Message):
    __slots__ = ("epoch", "layers", "layer_order")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_ORDER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    layer_order: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ..., layer_order: _Optional[_Iterable[int]] = ...) -> None: ...

class PreparePlacementResponse(_message.Message):
    __slots__ = ("epoch", "experts", "bytes_loaded", "layers", "awaits_digests")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    experts: int
    bytes_loaded: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    awaits_digests: bool
    def __init__(self, epoch: _Optional[int] = ..., experts: _Optional[int] = ..., bytes_loaded: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ..., awaits_digests: _Optional[bool] = ...) -> None: ...

class RetirePlacementRequest(_message.Message):
    __slots__ = ("epoch", "layers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    def __init__(self, epoch: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ...) -> None: ...

class RetirePlacementResponse(_message.Message):
    __slots__ = ("experts",)
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    experts: int
    def __init__(self, experts: _Optional[int] = ...) -> None: ...

class HoldSparesRequest(_message.Message):
    __slots__ = ("epoch", "layers", "load_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    load_s: float
    def __init__(self, epoch: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ..., load_s: _Optional[float] = ...) -> None: ...

class HoldSparesResponse(_message.Message):
    __slots__ = ("layers", "loaded")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    loaded: int
    def __init__(self, layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ..., loaded: _Optional[int] = ...) -> None: ...

class ListExpertsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListExpertsResponse(_message.Message):
    __slots__ = ("epoch", "layers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Holding]
    def __init__(self, epoch: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Holding, _Mapping]]] = ...) -> None: ...

class ReadHotnessRequest(_message.Message):
    __slots__ = ("boot_id", "sequence")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    sequence: int
    def __init__(self, boot_id: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class ReadHotnessResponse(_message.Message):
    __slots__ = ("boot_id", "sequence", "layers", "busy_s", "batches", "visits", "expert_bytes", "received_bytes", "sent_bytes")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    sequence: int
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerTokens]
    busy_s: float
    batches: int
    visits: int
    expert_bytes: int
    received_bytes: int
    sent_bytes: int
    def __init__(self, boot_id: _Optional[int] = ..., sequence: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.LayerTokens, _Mapping]]] = ..., busy_s: _Optional[float] = ..., batches: _Optional[int] = ..., visits: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeCheckpointResponse(_message.Message):
    __slots__ = ("config", "index", "shards", "model_digest")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    config: bytes
    index: bytes
    shards: _containers.RepeatedCompositeFieldContainer[ShardFile]
    model_digest: str
    def __init__(self, config: _Optional[bytes] = ..., index: _Optional[bytes] = ..., shards: _Optional[_Iterable[_Union[ShardFile, _Mapping]]] = ..., model_digest: _Optional[str] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("name", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class ReadShardRequest(_message.Message):
    __slots__ = ("shard", "begin", "end", "resume_at")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RESUME_AT_FIELD_NUMBER: _ClassVar[int]
    shard: str
    begin: int
    end: int
    resume_at: int
    def __init__(self, shard: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., resume_at: _Optional[int] = ...) -> None: ...

class ReadShardResponse(_message.Message):
    __slots__ = ("offset", "data", "digest")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    digest: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., digest: _Optional[bytes] = ...) -> None: ...
