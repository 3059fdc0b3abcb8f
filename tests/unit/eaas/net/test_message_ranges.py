"""Every number and text in the protocol has a range; violations are refused by name."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from eaas.net.message_ranges import Items, Number, Range, Text, range_of
from eaas.net.message_validation import check
from eaas.rpc.v1 import balancer_pb2, common_pb2, expert_pb2, monitor_pb2

FILES = (common_pb2, expert_pb2, monitor_pb2, balancer_pb2)
MESSAGES = {
    name: descriptor
    for file in FILES
    for name, descriptor in file.DESCRIPTOR.message_types_by_name.items()
}
_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_FLOAT,
    FieldDescriptor.CPPTYPE_DOUBLE,
}
_FLOATS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}


RANGES: dict[tuple[str, str], Range] = {
    (message, field): wanted
    for message, descriptor in MESSAGES.items()
    for field in descriptor.fields_by_name
    if (wanted := range_of(message, field)) is not None
}


def fields(kind: type) -> list[Any]:
    """(message, field, range) of each field with a range of a kind."""
    return [
        pytest.param(MESSAGES[message], name, wanted, id=f"{message}.{name}")
        for (message, name), wanted in RANGES.items()
        if isinstance(wanted, kind)
    ]


def wanted_kinds(field: FieldDescriptor) -> tuple[type | None, ...]:
    """Kinds of range for a field; for a map: of the field, its keys and its values."""
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        entries = (inner.fields_by_name[name] for name in ("key", "value"))
        return Items, *(wanted_kinds(entry)[0] for entry in entries)
    if inner is not None:
        # Without a range, the size of the whole message would be the only limit.
        return (Items if field.is_repeated else None,)
    if field.cpp_type in _NUMBERS:
        return (Number,)
    # Enums have the range that they state; booleans and bytes have none.
    return (Text if field.type == FieldDescriptor.TYPE_STRING else None,)


def test_every_field_has_a_range_of_its_kind() -> None:
    for message, descriptor in MESSAGES.items():
        for field in descriptor.fields:
            wanted = RANGES.get((message, field.name))
            found = [wanted]
            if len(wanted_kinds(field)) > 1 and isinstance(wanted, Items):
                found += [wanted.key, wanted.value]
            kinds = tuple(None if part is None else type(part) for part in found)
            assert kinds == wanted_kinds(field), f"{message}.{field.name}"


def limits_of(field: FieldDescriptor) -> tuple[float, float]:
    return {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
        FieldDescriptor.CPPTYPE_FLOAT: (-1e38, 1e38),
        FieldDescriptor.CPPTYPE_DOUBLE: (-1e308, 1e308),
    }[field.cpp_type]


def with_value(descriptor: Descriptor, name: str, value: Any) -> Any:
    message = GetMessageClass(descriptor)()
    for required, valid in _valid(descriptor).items():
        setattr(message, required, valid)
    if descriptor.fields_by_name[name].is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return message


def _valid(descriptor: Descriptor) -> dict[str, Any]:
    """Values for fields whose default is out of their range."""
    found: dict[str, Any] = {}
    for name, field in descriptor.fields_by_name.items():
        wanted = RANGES.get((descriptor.name, name))
        if field.is_repeated or field.has_presence:
            continue
        if isinstance(wanted, Number) and not wanted.least <= 0 <= wanted.most:
            found[name] = wanted.least
        elif isinstance(wanted, Text) and wanted.form and not wanted.form.fullmatch(""):
            found[name] = "a"
    return found


@pytest.mark.parametrize(("descriptor", "name", "wanted"), fields(Number))
def test_a_number_out_of_range_is_refused_by_name(
    descriptor: Descriptor, name: str, wanted: Number
) -> None:
    field = descriptor.fields_by_name[name]
    least, most = limits_of(field)
    is_float = field.cpp_type in _FLOATS
    bad: list[float] = [math.nan, -math.inf] if is_float else []
    if is_float and math.isfinite(wanted.most):
        bad += [math.inf, 1e38]
    step = max(1.0, abs(wanted.most)) if is_float else 1
    beyond = (least, most, wanted.most + step, wanted.least - step)
    bad += [v for v in beyond if least <= v <= most]
    for value in [v for v in bad if not wanted.least <= v <= wanted.most]:
        with pytest.raises(ValueError, match=rf"^{descriptor.name}\.{name} is .*: it can be "):
            check(with_value(descriptor, name, value))
    for value in (wanted.least, wanted.most):
        if math.isfinite(value) and not is_float:
            check(with_value(descriptor, name, value))


@pytest.mark.parametrize(("descriptor", "name", "wanted"), fields(Text))
def test_an_invalid_text_is_refused_by_name(
    descriptor: Descriptor, name: str, wanted: Text
) -> None:
    with pytest.raises(ValueError, match=rf"^{descriptor.name}\.{name} "):
        check(with_value(descriptor, name, "x" * (wanted.longest + 1)))
    if wanted.form is not None:
        # NUL; C1's control sequence, line and paragraph separators, and a mark that turns text round.
        for mark in "\0\x9b\u2028\u2029\u202e":
            with pytest.raises(ValueError, match=rf"^{descriptor.name}\.{name} is 'a.*b': it can"):
                check(with_value(descriptor, name, f"a{mark}b"))


HOSTILE = [
    *("", ".", "..", "-rf", "a b", "a/b", "../a", "a\n", "a\0", "ü", "a\\", "<script>", "x" * 256),
    "zz :href=location=/javascript:alert(1)/.source \\",
    "\u0661",  # A digit, of another script.
]


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_ids(name: str) -> None:
    for message in (
        monitor_pb2.RegisterRequest(member=common_pb2.Member(id=name)),
        monitor_pb2.HeartbeatRequest(id=name),
        expert_pb2.ConnectRequest(client_id=name, slots=1, hidden_size=1),
        balancer_pb2.PinExpertRequest(server_id=name),
        balancer_pb2.DrainServerRequest(server_id=name),
        balancer_pb2.ApplyRequest(
            placement=common_pb2.Placement(servers=[common_pb2.ServerPlacement(server_id=name)])
        ),
        balancer_pb2.PlanRequest(without_servers=[name]),
        balancer_pb2.PlanRequest(speeds={name: 1.0}),
    ):
        with pytest.raises(ValueError, match="it can"):
            check(message)


VALID = [
    *(
        monitor_pb2.HeartbeatRequest(id=name)
        for name in ("a", "expert-server-0", "A.b_c-9", "_", ".a", "x" * 255)
    ),
    *(
        common_pb2.Member(id="a", address=address)
        for address in ("", "h:1", "127.0.0.1:5", "[::1]:1", "[fe80::1%eth0]:22", "a-b.c_d:65535")
    ),
    # Unset optional fields.
    balancer_pb2.PlanRequest(),
]


@pytest.mark.parametrize("message", VALID, ids=str)
def test_what_is_valid(message: Any) -> None:
    check(message)


@pytest.mark.parametrize(
    "address", ["h", "h:", ":1", "unix:/run/docker.sock", "dns:///h:1", "h:1 ", "h:1\n", "h:123456"]
)
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(ValueError, match=r"Member\.address is .*HOST:PORT"):
        check(common_pb2.Member(id="a", address=address))


HOLDINGS = [common_pb2.Holding(), common_pb2.Holding(experts=[1, 70_000])]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        *(
            (expert_pb2.ReadShardRequest(shard=name), r"Request\.shard is .* without a directory")
            for name in ("a\0.safetensors", "../a", "a/b", "a\\b", "..", "")
        ),
        (balancer_pb2.PlanRequest(redundancy=0), "redundancy is 0"),
        (monitor_pb2.HeartbeatRequest(id="a", state=99), r"HeartbeatRequest\.state is 99"),  # type: ignore[arg-type]
        # The path of the field.
        (
            expert_pb2.PreparePlacementRequest(epoch=1, layers=HOLDINGS),
            r"layers\[1\]\.experts is 70000: it can be 0 to 65535$",
        ),
        (
            monitor_pb2.RegisterRequest(member=common_pb2.Member(id="a"), ended_pids=range(1, 300)),
            "ended_pids has 299 entries: it can have 256 at most",
        ),
        (
            balancer_pb2.SetPolicyRequest(knobs={f"k{i}": 0.0 for i in range(65)}),
            "knobs has 65 entries",
        ),
        (balancer_pb2.SetPolicyRequest(knobs={"k": math.nan}), "knobs value is nan"),
    ],
)
def test_what_is_refused_and_why(message: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check(message)


@pytest.mark.alone
def test_checks_are_fast() -> None:
    """Heartbeats arrive thousands of times per second, large placements rarely."""
    beat = monitor_pb2.HeartbeatRequest(id="expert-server-0", incarnation=3, state=2, epoch=7)
    assert best_s(lambda: [check(beat) for _ in range(1000)]) < 0.02
    holding = common_pb2.Holding(experts=range(0, 256, 100), shares=[0.5] * 3)
    server = common_pb2.ServerPlacement(server_id="s", layers=[holding] * 58)
    placement = common_pb2.Placement(
        epoch=1, num_layers=58, num_experts=256, servers=[server] * 320
    )
    assert best_s(lambda: check(placement)) < 0.5


def best_s(work: Any) -> float:
    found = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    print(f"{min(found):.4f} s")
    return min(found)
