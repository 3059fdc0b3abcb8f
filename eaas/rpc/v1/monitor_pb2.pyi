from eaas.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("member", "protocol_version", "previous_incarnation", "ended_pids", "session")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDED_PIDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    member: _common_pb2.Member
    protocol_version: int
    previous_incarnation: int
    ended_pids: _containers.RepeatedScalarFieldContainer[int]
    session: int
    def __init__(self, member: _Optional[_Union[_common_pb2.Member, _Mapping]] = ..., protocol_version: _Optional[int] = ..., previous_incarnation: _Optional[int] = ..., ended_pids: _Optional[_Iterable[int]] = ..., session: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("incarnation", "lease_s", "heartbeat_s", "revision")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    lease_s: float
    heartbeat_s: float
    revision: int
    def __init__(self, incarnation: _Optional[int] = ..., lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., revision: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("id", "incarnation", "state", "progress", "in_flight", "experts", "epoch", "stalled_s", "busy_s", "loading_bytes", "loaded_bytes", "reach")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    LOADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    state: _common_pb2.MemberState
    progress: int
    in_flight: int
    experts: int
    epoch: int
    stalled_s: float
    busy_s: float
    loading_bytes: int
    loaded_bytes: int
    reach: _common_pb2.Reach
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.MemberState, str]] = ..., progress: _Optional[int] = ..., in_flight: _Optional[int] = ..., experts: _Optional[int] = ..., epoch: _Optional[int] = ..., stalled_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., loading_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., reach: _Optional[_Union[_common_pb2.Reach, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("from_revision", "life", "heartbeats_tell", "knows_left", "knows_models", "knows_frontends")
    FROM_REVISION_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEATS_TELL_FIELD_NUMBER: _ClassVar[int]
    KNOWS_LEFT_FIELD_NUMBER: _ClassVar[int]
    KNOWS_MODELS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    from_revision: int
    life: int
    heartbeats_tell: bool
    knows_left: bool
    knows_models: bool
    knows_frontends: bool
    def __init__(self, from_revision: _Optional[int] = ..., life: _Optional[int] = ..., heartbeats_tell: _Optional[bool] = ..., knows_left: _Optional[bool] = ..., knows_models: _Optional[bool] = ..., knows_frontends: _Optional[bool] = ...) -> None: ...

class MemberEvent(_message.Message):
    __slots__ = ("revision", "member", "reason", "forgotten", "left", "frontend")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    revision: int
    member: _common_pb2.Member
    reason: str
    forgotten: bool
    left: bool
    frontend: bool
    def __init__(self, revision: _Optional[int] = ..., member: _Optional[_Union[_common_pb2.Member, _Mapping]] = ..., reason: _Optional[str] = ..., forgotten: _Optional[bool] = ..., left: _Optional[bool] = ..., frontend: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("revision", "members", "life", "models")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    members: _containers.RepeatedCompositeFieldContainer[_common_pb2.Member]
    life: int
    models: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelShape]
    def __init__(self, revision: _Optional[int] = ..., members: _Optional[_Iterable[_Union[_common_pb2.Member, _Mapping]]] = ..., life: _Optional[int] = ..., models: _Optional[_Iterable[_Union[_common_pb2.ModelShape, _Mapping]]] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("snapshot", "event", "still_at_revision", "stopping")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    STILL_AT_REVISION_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    event: MemberEvent
    still_at_revision: int
    stopping: bool
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., event: _Optional[_Union[MemberEvent, _Mapping]] = ..., still_at_revision: _Optional[int] = ..., stopping: _Optional[bool] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("id", "incarnation", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    reason: str
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerOutcomes(_message.Message):
    __slots__ = ("server_id", "server_incarnation", "answered", "timed_out", "lost", "refused", "failed", "corrupt", "hedged_away", "failures_since_answer")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    HEDGED_AWAY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_SINCE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    server_incarnation: int
    answered: int
    timed_out: int
    lost: int
    refused: int
    failed: int
    corrupt: int
    hedged_away: int
    failures_since_answer: int
    def __init__(self, server_id: _Optional[str] = ..., server_incarnation: _Optional[int] = ..., answered: _Optional[int] = ..., timed_out: _Optional[int] = ..., lost: _Optional[int] = ..., refused: _Optional[int] = ..., failed: _Optional[int] = ..., corrupt: _Optional[int] = ..., hedged_away: _Optional[int] = ..., failures_since_answer: _Optional[int] = ...) -> None: ...

class ReportOutcomeRequest(_message.Message):
    __slots__ = ("client_id", "client_incarnation", "servers")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    client_incarnation: int
    servers: _containers.RepeatedCompositeFieldContainer[ServerOutcomes]
    def __init__(self, client_id: _Optional[str] = ..., client_incarnation: _Optional[int] = ..., servers: _Optional[_Iterable[_Union[ServerOutcomes, _Mapping]]] = ...) -> None: ...

class ReportOutcomeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeepRecordRequest(_message.Message):
    __slots__ = ("id", "incarnation", "version", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    version: int
    data: bytes
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeepRecordResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRecordRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetRecordResponse(_message.Message):
    __slots__ = ("data", "incarnation", "version")
    DATA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    incarnation: int
    version: int
    def __init__(self, data: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...
