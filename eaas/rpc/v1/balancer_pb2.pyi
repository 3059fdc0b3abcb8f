from eaas.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_NOTHING: _ClassVar[Verdict]
    VERDICT_SHARES: _ClassVar[Verdict]
    VERDICT_MOVES: _ClassVar[Verdict]
VERDICT_UNSPECIFIED: Verdict
VERDICT_NOTHING: Verdict
VERDICT_SHARES: Verdict
VERDICT_MOVES: Verdict

class GetPlacementRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlacementResponse(_message.Message):
    __slots__ = ("placement", "dead_grace_s")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DEAD_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    dead_grace_s: float
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., dead_grace_s: _Optional[float] = ...) -> None: ...

class WatchPlacementRequest(_message.Message):
    __slots__ = ("known_epoch",)
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    known_epoch: int
    def __init__(self, known_epoch: _Optional[int] = ...) -> None: ...

class WatchPlacementResponse(_message.Message):
    __slots__ = ("placement", "epoch", "spares")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    placement: _common_pb2.Placement
    epoch: int
    spares: _common_pb2.SpareReplicas
    def __init__(self, placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., epoch: _Optional[int] = ..., spares: _Optional[_Union[_common_pb2.SpareReplicas, _Mapping]] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("policy", "knobs", "more_servers", "without_servers", "loads", "speeds", "redundancy", "num_redundant_experts")
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SpeedsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    MORE_SERVERS_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SERVERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    REDUNDANCY_FIELD_NUMBER: _ClassVar[int]
    NUM_REDUNDANT_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    knobs: _containers.ScalarMap[str, float]
    more_servers: int
    without_servers: _containers.RepeatedScalarFieldContainer[str]
    loads: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerTokens]
    speeds: _containers.ScalarMap[str, float]
    redundancy: int
    num_redundant_experts: int
    def __init__(self, policy: _Optional[str] = ..., knobs: _Optional[_Mapping[str, float]] = ..., more_servers: _Optional[int] = ..., without_servers: _Optional[_Iterable[str]] = ..., loads: _Optional[_Iterable[_Union[_common_pb2.LayerTokens, _Mapping]]] = ..., speeds: _Optional[_Mapping[str, float]] = ..., redundancy: _Optional[int] = ..., num_redundant_experts: _Optional[int] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan_id", "epoch", "policy", "verdict", "reason", "par_now", "par_then", "bound", "gap", "layers", "transit", "bytes", "moves", "gain", "payback_s", "placement", "applicable", "experts_on_one_node", "survives_node_loss")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAR_NOW_FIELD_NUMBER: _ClassVar[int]
    PAR_THEN_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TRANSIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    PAYBACK_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    APPLICABLE_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_ON_ONE_NODE_FIELD_NUMBER: _ClassVar[int]
    SURVIVES_NODE_LOSS_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    epoch: int
    policy: str
    verdict: Verdict
    reason: str
    par_now: float
    par_then: float
    bound: float
    gap: float
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlan]
    transit: int
    bytes: int
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    gain: float
    payback_s: float
    placement: _common_pb2.Placement
    applicable: bool
    experts_on_one_node: int
    survives_node_loss: bool
    def __init__(self, plan_id: _Optional[str] = ..., epoch: _Optional[int] = ..., policy: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[str] = ..., par_now: _Optional[float] = ..., par_then: _Optional[float] = ..., bound: _Optional[float] = ..., gap: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[LayerPlan, _Mapping]]] = ..., transit: _Optional[int] = ..., bytes: _Optional[int] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., gain: _Optional[float] = ..., payback_s: _Optional[float] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., applicable: _Optional[bool] = ..., experts_on_one_node: _Optional[int] = ..., survives_node_loss: _Optional[bool] = ...) -> None: ...

class LayerPlan(_message.Message):
    __slots__ = ("par_now", "par_then", "bound")
    PAR_NOW_FIELD_NUMBER: _ClassVar[int]
    PAR_THEN_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    par_now: float
    par_then: float
    bound: float
    def __init__(self, par_now: _Optional[float] = ..., par_then: _Optional[float] = ..., bound: _Optional[float] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("layer", "expert", "server_id", "unload")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    server_id: str
    unload: bool
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ..., unload: _Optional[bool] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("request_id", "plan_id", "placement")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    plan_id: str
    placement: _common_pb2.Placement
    def __init__(self, request_id: _Optional[str] = ..., plan_id: _Optional[str] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("epoch", "stages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stages: int
    def __init__(self, epoch: _Optional[int] = ..., stages: _Optional[int] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("request_id", "policy", "force")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    force: bool
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("plan", "applied")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    plan: PlanResponse
    applied: bool
    def __init__(self, plan: _Optional[_Union[PlanResponse, _Mapping]] = ..., applied: _Optional[bool] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("request_id", "policy", "knobs")
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    knobs: _containers.ScalarMap[str, float]
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., knobs: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class PinExpertRequest(_message.Message):
    __slots__ = ("request_id", "layer", "expert", "server_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    expert: int
    server_id: str
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class PinExpertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnpinExpertRequest(_message.Message):
    __slots__ = ("request_id", "layer", "expert", "server_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    expert: int
    server_id: str
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class UnpinExpertResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddReplicaRequest(_message.Message):
    __slots__ = ("request_id", "layer", "expert", "server_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    expert: int
    server_id: str
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class AddReplicaResponse(_message.Message):
    __slots__ = ("server_id",)
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    def __init__(self, server_id: _Optional[str] = ...) -> None: ...

class RemoveReplicaRequest(_message.Message):
    __slots__ = ("request_id", "layer", "expert", "server_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    expert: int
    server_id: str
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class RemoveReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHotnessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetHotnessResponse(_message.Message):
    __slots__ = ("steps", "step_s", "layers", "servers", "par")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    PAR_FIELD_NUMBER: _ClassVar[int]
    steps: int
    step_s: float
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerTokens]
    servers: _containers.RepeatedCompositeFieldContainer[ServerHotness]
    par: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[int] = ..., step_s: _Optional[float] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.LayerTokens, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerHotness, _Mapping]]] = ..., par: _Optional[_Iterable[float]] = ...) -> None: ...

class ServerHotness(_message.Message):
    __slots__ = ("server_id", "tokens", "speed")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    speed: float
    def __init__(self, server_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., speed: _Optional[float] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class HistoryResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("number", "unix_ms", "trigger", "policy", "verdict", "reason", "par_now", "par_then", "bound", "transit", "bytes", "epoch_before", "epoch", "plan_s", "prepare_s", "retire_s", "given_up", "knobs")
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAR_NOW_FIELD_NUMBER: _ClassVar[int]
    PAR_THEN_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    TRANSIT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_BEFORE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    RETIRE_S_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_ms: int
    trigger: str
    policy: str
    verdict: Verdict
    reason: str
    par_now: float
    par_then: float
    bound: float
    transit: int
    bytes: int
    epoch_before: int
    epoch: int
    plan_s: float
    prepare_s: float
    retire_s: float
    given_up: str
    knobs: _containers.ScalarMap[str, float]
    def __init__(self, number: _Optional[int] = ..., unix_ms: _Optional[int] = ..., trigger: _Optional[str] = ..., policy: _Optional[str] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[str] = ..., par_now: _Optional[float] = ..., par_then: _Optional[float] = ..., bound: _Optional[float] = ..., transit: _Optional[int] = ..., bytes: _Optional[int] = ..., epoch_before: _Optional[int] = ..., epoch: _Optional[int] = ..., plan_s: _Optional[float] = ..., prepare_s: _Optional[float] = ..., retire_s: _Optional[float] = ..., given_up: _Optional[str] = ..., knobs: _Optional[_Mapping[str, float]] = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("server_id",)
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    def __init__(self, server_id: _Optional[str] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("servers",)
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    servers: int
    def __init__(self, servers: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("wish",)
    WISH_FIELD_NUMBER: _ClassVar[int]
    wish: int
    def __init__(self, wish: _Optional[int] = ...) -> None: ...

class GetScaleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetScaleResponse(_message.Message):
    __slots__ = ("fewest", "most", "wish", "refusal")
    FEWEST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    fewest: int
    most: int
    wish: int
    refusal: str
    def __init__(self, fewest: _Optional[int] = ..., most: _Optional[int] = ..., wish: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class WatchScaleRequest(_message.Message):
    __slots__ = ("known_wish",)
    KNOWN_WISH_FIELD_NUMBER: _ClassVar[int]
    known_wish: int
    def __init__(self, known_wish: _Optional[int] = ...) -> None: ...

class WatchScaleResponse(_message.Message):
    __slots__ = ("servers", "wish")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    servers: int
    wish: int
    def __init__(self, servers: _Optional[int] = ..., wish: _Optional[int] = ...) -> None: ...

class RefuseScaleRequest(_message.Message):
    __slots__ = ("wish", "reason")
    WISH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    wish: int
    reason: str
    def __init__(self, wish: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RefuseScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BalancerRecord(_message.Message):
    __slots__ = ("wanted", "policy", "knobs", "pins", "history", "answered")
    class KnobsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WANTED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    wanted: _common_pb2.Placement
    policy: str
    knobs: _containers.ScalarMap[str, float]
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    history: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    answered: _containers.RepeatedCompositeFieldContainer[AnsweredRequest]
    def __init__(self, wanted: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., policy: _Optional[str] = ..., knobs: _Optional[_Mapping[str, float]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ..., answered: _Optional[_Iterable[_Union[AnsweredRequest, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("layer", "expert", "server_id")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    layer: int
    expert: int
    server_id: str
    def __init__(self, layer: _Optional[int] = ..., expert: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class AnsweredRequest(_message.Message):
    __slots__ = ("request_id", "digest", "answer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    digest: bytes
    answer: bytes
    def __init__(self, request_id: _Optional[str] = ..., digest: _Optional[bytes] = ..., answer: _Optional[bytes] = ...) -> None: ...
