"""Ranges of all numbers and formats of all texts in protobuf messages.

`eaas.net.message_validation` applies this table. Ranges are wide: they exclude values that no process can
mean, and values that a counter, a float, a file name or a clock cannot hold. Handlers check the rest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from eaas.member_ids import ID, ID_RULE, LONGEST_ID

__all__ = ["MOST_EPOCH", "RANGES", "TRUSTED_EPOCH", "Items", "Number", "Range", "Text"]

MOST_EPOCH = 2**53 - 1
"""The largest epoch, incarnation or size: JSON and float64 represent integers exactly up to here."""
TRUSTED_EPOCH = MOST_EPOCH - 2**32
"""The largest epoch that a balancer continues from: 2^32 more remain, whatever a member claims."""


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`; a repeated field has at most `items` of them."""

    least: float
    most: float
    items: int = 1


@dataclass(frozen=True)
class Text:
    """A text of at most `longest` characters.

    Attributes:
        longest: Limit of characters.
        form: Pattern of the whole text; None allows any text.
        rule: Description of the pattern, for errors.
        items: Limit of entries in a repeated field.
    """

    longest: int
    form: re.Pattern[str] | None = None
    rule: str = ""
    items: int = 1


@dataclass(frozen=True)
class Items:
    """At most `most` messages or map entries, with ranges of the map's keys and values."""

    most: int
    key: Text | None = None
    value: Number | None = None


Range = Number | Text | Items

_LINE = re.compile(r"[^\x00-\x1f\x7f]*")
_ADDRESS = re.compile(r"((\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[A-Za-z0-9._-]+):[0-9]{1,5})?", re.ASCII)
_PLAIN_NAME = re.compile(r"(?!\.\.?\Z)[^\x00-\x1f\x7f/\\]+")


def _line(longest: int, items: int = 1) -> Text:
    return Text(longest, _LINE, "no control characters", items)


_ID = Text(LONGEST_ID, ID, ID_RULE)
_ID_OR_NONE = Text(LONGEST_ID, re.compile(f"({ID.pattern})?"), f"{ID_RULE}; or empty")
_NAME = _line(255)
_ADDRESS_TEXT = Text(300, _ADDRESS, "HOST:PORT, or empty")
_FILE = Text(255, _PLAIN_NAME, "a file name without a directory")
_PROSE = Text(1 << 20)
_KNOB_NAME = _line(64)

# Integers that JSON and SQLite hold; and 64 bits for random names and positions.
_WHOLE = Number(0, MOST_EPOCH)
_BITS32, _BITS64 = Number(0, 2**32 - 1), Number(0, 2**64 - 1)
_SIGNED = Number(0, 2**63 - 1)
_EPOCH = _INCARNATION = _WHOLE
_PID = Number(0, 2**31 - 1)
_COUNT = Number(0, 2**31 - 1)
_SPAN = Number(0.0, 1e9)
_RATIO = Number(0.0, 1e9)
_ANY_SIZE = Number(-1e12, 1e12)
_LAYER, _EXPERT = Number(0, 2**12 - 1), Number(0, 2**16 - 1)
_LAYERS, _EXPERTS = Items(2**12), Number(0, 2**16 - 1, 2**16)
_SERVERS = Items(2**14)

_PLACE: dict[str, Range] = {"layer": _LAYER, "expert": _EXPERT, "server_id": _ID}
_EDIT: dict[str, Range] = {"request_id": _NAME, **_PLACE}
_LIFE: dict[str, Range] = {"id": _ID, "incarnation": _INCARNATION}

RANGES: dict[str, dict[str, Range]] = {
    # common.proto
    "ModelShape": {
        "model_type": _NAME,
        "num_experts": Number(1, 2**16),
        "hidden_size": Number(1, 2**20),
        "top_k": Number(1, 2**16),
        "layer_names": _line(255, items=2**12),
        "dtype": _NAME,
        "digest": _NAME,
    },
    "Member": {
        "id": _ID,
        "pid": _PID,
        "host": _NAME,
        "address": _ADDRESS_TEXT,
        "incarnation": _INCARNATION,
        "experts": _COUNT,
        "in_flight": _COUNT,
        "progress": _SIGNED,
        "speed": Number(0.0, 1e6),
        "memory_bytes": _WHOLE,
        "expert_bytes": _WHOLE,
        "node": _NAME,
        "transports": _line(64, items=16),
        "silence_s": _SPAN,
        "epoch": _EPOCH,
        "busy_s": _SPAN,
    },
    "Reach": {"servers": _SERVERS},
    "ServerReach": {
        "server_id": _ID,
        "server_incarnation": _INCARNATION,
        "reason": _NAME,
    },
    "Holding": {
        "experts": _EXPERTS,
        "shares": Number(0.0, 1.001, 2**16),
        "digests": Number(0, 2**64 - 1, 2**16),
    },
    "ServerPlacement": {"server_id": _ID, "layers": _LAYERS},
    "Placement": {
        "epoch": _EPOCH,
        "num_layers": Number(0, 2**12),
        "num_experts": Number(0, 2**16),
        "servers": _SERVERS,
    },
    "LayerTokens": {"tokens": Number(0, MOST_EPOCH, 2**16)},
    # monitor.proto
    "RegisterRequest": {
        "protocol_version": _COUNT,
        "previous_incarnation": _INCARNATION,
        "ended_pids": Number(0, 2**31 - 1, 256),
    },
    "RegisterResponse": {
        "incarnation": _INCARNATION,
        "lease_s": Number(0.001, 86_400.0),
        "heartbeat_s": Number(0.001, 86_400.0),
        "revision": _SIGNED,
    },
    "HeartbeatRequest": {
        **_LIFE,
        "progress": _SIGNED,
        "in_flight": _COUNT,
        "experts": _COUNT,
        "epoch": _EPOCH,
        "stalled_s": _SPAN,
        "busy_s": _SPAN,
    },
    "HeartbeatResponse": {"revision": _SIGNED},
    "WatchRequest": {"from_revision": _SIGNED, "life": _SIGNED},
    "MemberEvent": {"revision": _SIGNED, "reason": _PROSE},
    "Snapshot": {"revision": _SIGNED, "life": _SIGNED, "members": Items(2**16)},
    "WatchResponse": {"still_at_revision": _SIGNED},
    "GetPlacementResponse": {"dead_grace_s": _SPAN},
    "DeregisterRequest": {**_LIFE, "reason": _line(4096)},
    "ServerOutcomes": {
        "server_id": _ID,
        "server_incarnation": _INCARNATION,
        "answered": _WHOLE,
        "timed_out": _WHOLE,
        "lost": _WHOLE,
        "refused": _WHOLE,
        "failed": _WHOLE,
        "corrupt": _WHOLE,
        "hedged_away": _WHOLE,
        "failures_since_answer": _WHOLE,
    },
    "ReportOutcomeRequest": {
        "client_id": _ID,
        "client_incarnation": _INCARNATION,
        "servers": _SERVERS,
    },
    "KeepRecordRequest": {**_LIFE, "version": _WHOLE},
    "GetRecordRequest": {"id": _ID},
    "GetRecordResponse": {"incarnation": _INCARNATION, "version": _WHOLE},
    # expert.proto
    "ConnectRequest": {
        "client_id": _ID,
        "client_incarnation": _INCARNATION,
        "protocol_version": _COUNT,
        "transport": _NAME,
        "slots": Number(1, 4096),
        "hidden_size": Number(1, 2**20),
        "model_digest": _NAME,
    },
    "ConnectResponse": {
        "connection_id": _NAME,
        "generation": _BITS32,
        "server_incarnation": _BITS64,
        "first_slot": Number(0, 4095),
        "slots": Number(1, 4096),
        "reply_bell": Number(0, 2**20),
        "slot_count": Number(1, 4096),
        "payload_capacity": _WHOLE,
        "result_capacity": _WHOLE,
        "arena_pid": _PID,
        "arena_fd": Number(0, 2**31 - 1),
        "arena_bytes": _WHOLE,
        "epoch": _EPOCH,
    },
    "DisconnectRequest": {"connection_id": _NAME},
    "ExchangeRequest": {"connection_id": _NAME, "slot": Number(0, 4095)},
    "ExchangeResponse": {"slot": Number(0, 4095)},
    "JoinRequest": {"connection_id": _NAME, "nixl": _NAME},
    "SlotMemory": {
        "requests_at": _BITS64,
        "results_at": _BITS64,
        "stride": _WHOLE,
    },
    "PreparePlacementRequest": {
        "epoch": _EPOCH,
        "layers": _LAYERS,
        "layer_order": Number(0, 2**12 - 1, 2**12),
    },
    "PreparePlacementResponse": {
        "epoch": _EPOCH,
        "experts": _COUNT,
        "bytes_loaded": _WHOLE,
        "layers": _LAYERS,
    },
    "RetirePlacementRequest": {"epoch": _EPOCH, "layers": _LAYERS},
    "RetirePlacementResponse": {"experts": _COUNT},
    "ListExpertsResponse": {"epoch": _EPOCH, "layers": _LAYERS},
    "ReadHotnessRequest": {"boot_id": _BITS64, "sequence": _WHOLE},
    "ReadHotnessResponse": {
        "boot_id": _BITS64,
        "sequence": _WHOLE,
        "layers": _LAYERS,
        "busy_s": _SPAN,
        "batches": _WHOLE,
        "visits": _WHOLE,
        "expert_bytes": _WHOLE,
        "received_bytes": _WHOLE,
        "sent_bytes": _WHOLE,
    },
    "DescribeCheckpointResponse": {"shards": Items(2**16), "model_digest": _NAME},
    "ShardFile": {"name": _FILE, "bytes": _WHOLE},
    "ReadShardRequest": {"shard": _FILE, "begin": _WHOLE, "end": _WHOLE, "resume_at": _WHOLE},
    "ReadShardResponse": {"offset": _WHOLE},
    # balancer.proto
    "WatchPlacementRequest": {"known_epoch": _EPOCH},
    "WatchPlacementResponse": {"epoch": _EPOCH},
    "PlanRequest": {
        "policy": _NAME,
        "knobs": Items(64, _KNOB_NAME, _ANY_SIZE),
        "more_servers": Number(0, 1024),
        "without_servers": Text(LONGEST_ID, ID, ID_RULE, items=2**14),
        "loads": _LAYERS,
        "speeds": Items(2**14, _ID, Number(0.0, 1e6)),
        "redundancy": Number(1, 2**14),
        "num_redundant_experts": Number(0, 100_000),
    },
    "PlanResponse": {
        "plan_id": _NAME,
        "epoch": _EPOCH,
        "policy": _NAME,
        "reason": _PROSE,
        "par_now": _RATIO,
        "par_then": _RATIO,
        "bound": _RATIO,
        "gap": _RATIO,
        "layers": _LAYERS,
        "transit": _COUNT,
        "bytes": _WHOLE,
        "moves": Items(2**28),
        "gain": _RATIO,
        "payback_s": Number(0.0, math.inf),
    },
    "LayerPlan": {"par_now": _RATIO, "par_then": _RATIO, "bound": _RATIO},
    "Move": _PLACE,
    "ApplyRequest": {"request_id": _NAME, "plan_id": _NAME},
    "ApplyResponse": {"epoch": _EPOCH, "stages": _COUNT},
    "RebalanceRequest": {"request_id": _NAME, "policy": _NAME},
    "SetPolicyRequest": {
        "request_id": _NAME,
        "policy": _NAME,
        "knobs": Items(64, _KNOB_NAME, _ANY_SIZE),
    },
    "SetPolicyResponse": {"policy": _NAME},
    "PinExpertRequest": _EDIT,
    "UnpinExpertRequest": _EDIT,
    "AddReplicaRequest": {**_EDIT, "server_id": _ID_OR_NONE},
    "AddReplicaResponse": {"server_id": _ID},
    "RemoveReplicaRequest": _EDIT,
    "GetHotnessResponse": {
        "steps": _COUNT,
        "step_s": _SPAN,
        "layers": _LAYERS,
        "servers": _SERVERS,
        "par": Number(0.0, 1e9, 2**12),
    },
    "ServerHotness": {
        "server_id": _ID,
        "tokens": Number(0, MOST_EPOCH, 2**12),
        "speed": Number(0.0, 1e9),
    },
    "HistoryRequest": {"limit": _COUNT},
    "HistoryResponse": {"entries": Items(2**16)},
    "HistoryEntry": {
        "number": _WHOLE,
        "unix_ms": Number(-MOST_EPOCH, MOST_EPOCH),
        "trigger": _NAME,
        "policy": _NAME,
        "reason": _PROSE,
        "par_now": _RATIO,
        "par_then": _RATIO,
        "bound": _RATIO,
        "transit": _COUNT,
        "bytes": _WHOLE,
        "epoch_before": _EPOCH,
        "epoch": _EPOCH,
        "plan_s": _SPAN,
        "prepare_s": _SPAN,
        "retire_s": _SPAN,
        "given_up": _PROSE,
        "knobs": Items(64, _KNOB_NAME, _ANY_SIZE),
    },
    "DrainServerRequest": {"server_id": _ID},
    "ScaleRequest": {"servers": _COUNT},
    "ScaleResponse": {"wish": _WHOLE},
    "GetScaleResponse": {"fewest": _COUNT, "most": _COUNT, "wish": _WHOLE, "refusal": _PROSE},
    "WatchScaleRequest": {"known_wish": _WHOLE},
    "WatchScaleResponse": {"servers": _COUNT, "wish": _WHOLE},
    "RefuseScaleRequest": {"wish": _WHOLE, "reason": Text(4096)},
    "BalancerRecord": {
        "policy": _NAME,
        "knobs": Items(64, _KNOB_NAME, _ANY_SIZE),
        "pins": Items(2**28),
        "history": Items(2**16),
        "answered": Items(2**16),
    },
    "Pin": _PLACE,
    "AnsweredRequest": {"request_id": _NAME},
}
"""Ranges by message and field. A field of messages has an entry if their number is limited."""
