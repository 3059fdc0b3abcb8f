"""Ranges of all numbers and formats of all texts in protobuf messages, as a table.

`eaas.net.message_validation` applies them. The ranges are wide. They exclude only values that no process can
mean, and values that a counter, a float, a file name or a clock cannot hold. Handlers check all other
conditions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from eaas.member_ids import ID, ID_RULE, LONGEST_ID

__all__ = ["MOST_EPOCH", "TRUSTED_EPOCH", "Items", "Number", "Range", "Text", "range_of"]

MOST_EPOCH = 2**53 - 1
"""The largest epoch, incarnation or size, because JSON and float64 hold integers exactly only up to it."""
TRUSTED_EPOCH = MOST_EPOCH - 2**32
"""The largest epoch that a balancer continues from, so that no member can use up the remaining 2^32."""


@dataclass(frozen=True)
class Number:
    """Range of a numeric field, from `least` to `most`; a repeated field has at most `items` numbers."""

    least: float
    most: float
    items: int = 1


@dataclass(frozen=True)
class Text:
    """Format of a text field of at most `longest` characters.

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
    """Limit of a field of messages or a map to `most` entries, with ranges of the map's keys and values."""

    most: int
    key: Text | None = None
    value: Number | None = None


Range = Number | Text | Items

# C0 and C1 control characters (terminals obey both), line separators, and marks that reorder text.
_CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069"
_LINE = re.compile(f"[^{_CONTROLS}]*")
_ADDRESS = re.compile(r"((\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[A-Za-z0-9._-]+):[0-9]{1,5})?", re.ASCII)
_PLAIN_NAME = re.compile(rf"(?!\.\.?\Z)[^{_CONTROLS}/\\]+")


def _line(longest: int, items: int = 1) -> Text:
    return Text(longest, _LINE, "no control characters", items)


_ID = Text(LONGEST_ID, ID, ID_RULE)
_ID_OR_NONE = Text(LONGEST_ID, re.compile(f"({ID.pattern})?"), f"{ID_RULE}; or empty")
_NAME = _line(255)
_FILE = Text(255, _PLAIN_NAME, "a file name without a directory")
_PROSE = Text(1 << 20)

# Integers that JSON and SQLite hold; and 64 bits for random names and positions.
_WHOLE = Number(0, MOST_EPOCH)
_BITS64 = Number(0, 2**64 - 1)
_SIGNED = Number(0, 2**63 - 1)
_COUNT = Number(0, 2**31 - 1)
_REAL = Number(0.0, 1e9)

_FIELDS: dict[str, Range] = {
    name: wanted
    for wanted, names in (
        (_ID, "id client_id server_id"),
        (Text(LONGEST_ID, ID, ID_RULE, items=2**14), "without_servers"),
        (Text(300, _ADDRESS, "HOST:PORT, or empty"), "address engine_address"),
        (_FILE, "shard"),
        (
            _NAME,
            "connection_id dtype host machine model_digest model_type nixl node plan_id policy",
        ),
        (_NAME, "reason request_id transport trigger"),
        (_line(255, items=2**12), "layer_names"),
        (_line(64, items=16), "transports"),
        (_PROSE, "given_up refusal"),
        (_WHOLE, "epoch epoch_before known_epoch"),
        (_WHOLE, "incarnation client_incarnation previous_incarnation server_incarnation"),
        (_WHOLE, "known_wish number sequence version wish"),
        (
            _WHOLE,
            "answered corrupt failed failures_since_answer hedged_away refused timed_out",
        ),
        (_WHOLE, "arena_bytes begin bytes bytes_loaded end expert_bytes memory_bytes offset"),
        (_WHOLE, "loaded_bytes loading_bytes"),
        (_WHOLE, "payload_capacity received_bytes result_capacity resume_at sent_bytes stride"),
        (_WHOLE, "batches visits"),
        (_BITS64, "boot_id requests_at results_at session"),
        (Number(0, 2**32 - 1), "generation"),
        (_SIGNED, "from_revision life progress revision still_at_revision"),
        (_COUNT, "arena_fd arena_pid pid protocol_version"),
        (
            _COUNT,
            "experts experts_on_one_node fewest in_flight limit loaded most stages steps transit",
        ),
        (Number(0, 2**31 - 1, 256), "ended_pids"),
        (_REAL, "busy_s dead_grace_s load_s plan_s prepare_s retire_s silence_s stalled_s step_s"),
        (_REAL, "bound gain gap par_now par_then speed"),
        (Number(0.0, math.inf), "payback_s"),
        (Number(0.0, 1e9, 2**12), "par"),
        (Number(0.001, 86_400.0), "heartbeat_s lease_s"),
        (Number(-MOST_EPOCH, MOST_EPOCH), "unix_ms"),
        (Number(0, 2**12 - 1), "layer"),
        (Number(0, 2**12 - 1, 2**12), "layer_order"),
        (Number(0, 2**16 - 1), "expert"),
        (Number(0, 2**16), "model_number"),
        (Number(0, 2**12), "num_layers"),
        (Number(0, 2**16), "num_experts"),
        (Number(1, 2**16), "top_k"),
        (Number(1, 2**20), "hidden_size"),
        (Number(0.0, 1.001, 2**16), "shares"),
        (Number(0, 2**64 - 1, 2**16), "digests"),
        (Number(0, MOST_EPOCH, 2**16), "tokens"),
        (Number(0, 4095), "first_slot slot"),
        (Number(1, 4096), "slot_count slots"),
        # 0: a client of an earlier version.
        (Number(0, 2**16), "slot_tokens"),
        (Number(0, 2**20), "reply_doorbell"),
        (Number(0, 1024), "more_servers"),
        (Number(1, 2**14), "redundancy"),
        (Number(0, 100_000), "num_redundant_experts"),
        (Items(2**12), "layers loads"),
        (Items(2**14), "servers"),
        (Items(2**16), "entries history members models shards"),
        (Items(2**28), "moves pins"),
        (Items(64, _line(64), Number(-1e12, 1e12)), "knobs"),
        (Items(2**14, _ID, Number(0.0, 1e6)), "speeds"),
    )
    for name in names.split()
}

_EXCEPTIONS: dict[tuple[str, str], Range] = {
    ("AddReplicaRequest", "server_id"): _ID_OR_NONE,
    ("BalancerRecord", "answered"): Items(2**16),
    ("ConnectResponse", "server_incarnation"): _BITS64,
    ("DeregisterRequest", "reason"): _line(4096),
    ("Holding", "experts"): Number(0, 2**16 - 1, 2**16),
    ("HistoryEntry", "reason"): _PROSE,
    ("Member", "speed"): Number(0.0, 1e6),
    ("MemberEvent", "reason"): _PROSE,
    ("ModelShape", "digest"): _NAME,
    ("ModelShape", "num_experts"): Number(1, 2**16),
    ("PlanResponse", "reason"): _PROSE,
    ("RefuseScaleRequest", "reason"): Text(4096),
    ("ScaleRequest", "servers"): _COUNT,
    ("ServerHotness", "tokens"): Number(0, MOST_EPOCH, 2**12),
    ("ServerOutcomes", "lost"): _WHOLE,
    ("ShardFile", "name"): _FILE,
    ("WatchScaleResponse", "servers"): _COUNT,
}


def range_of(message: str, field: str) -> Range | None:
    """Look up the range of a message field; None for booleans, bytes, enums and single messages.

    Fields of one name have one range, with a few exceptions. The range of a repeated field of messages limits
    the number of its entries.
    """
    return _EXCEPTIONS.get((message, field)) or _FIELDS.get(field)
