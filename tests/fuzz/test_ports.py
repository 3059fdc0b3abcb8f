"""Giant and malformed messages to every method of every port; the processes go on serving.

A call ends in time with an answer or a status that blames the caller. UNKNOWN would be a bug of the server;
tracebacks could fill its log.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eaas.net.grpc_client import channel
from eaas.net.server_records import started_at
from eaas.rpc.v1 import balancer_pb2, expert_pb2, monitor_pb2
from eaas.types import Role
from eaas_cli.chaos.history import census
from eaas_cli.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Code = grpc.StatusCode
CALL_S, STREAM_S = 5.0, 0.15
FACTOR = int(os.environ.get("FUZZ_FACTOR", "1"))
# Growth of an attacked process: gRPC's buffers and Python's heap keep some memory.
MOST_GROWTH = 96 << 20
# CANCELLED and DEADLINE_EXCEEDED: streams that wait for more input or stay open.
BLAMES_THE_CALLER = {
    *(Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND),
    *(Code.ALREADY_EXISTS, Code.RESOURCE_EXHAUSTED, Code.OUT_OF_RANGE, Code.CANCELLED),
    *(Code.DEADLINE_EXCEEDED, Code.DATA_LOSS),
    # gRPC's own statuses for bytes that are no message, and for a missing transport.
    *(Code.INTERNAL, Code.UNIMPLEMENTED),
}
PORTS: dict[str, tuple[str, Any]] = {
    "monitor": (Role.MONITOR.value, monitor_pb2.DESCRIPTOR.services_by_name["MonitorService"]),
    "balancer": (Role.BALANCER.value, balancer_pb2.DESCRIPTOR.services_by_name["BalancerService"]),
    "expert-server-0": (
        Role.EXPERT_SERVER.value,
        expert_pb2.DESCRIPTOR.services_by_name["ExpertService"],
    ),
}
# Calls that would end the attacked process, as they should.
_SPARED = {"Drain", "DrainServer", "Scale"}


def varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def field(number: int, wire_type: int, data: bytes) -> bytes:
    length = varint(len(data)) if wire_type == 2 else b""
    return varint(number << 3 | wire_type) + length + data


def nested(descriptor: Descriptor, depth: int) -> bytes:
    """Nested messages, deeper than protobuf allows; unknown groups if the type has no message field."""
    data = b""
    inner = next((f for f in descriptor.fields if f.message_type is not None), None)
    for _ in range(depth):
        data = field(inner.number if inner else 1000, 2, data)
    return data + b"\x0b" * depth


def extremes(descriptor: Descriptor, number: int) -> bytes:
    """A message whose number fields all have one extreme value."""
    data = b""
    for f in descriptor.fields:
        if f.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            data += field(f.number, 1, b"\xff" * 8)
        elif f.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            data += field(f.number, 5, b"\xff" * 4)
        elif f.message_type is None and f.cpp_type != FieldDescriptor.CPPTYPE_STRING:
            data += field(f.number, 0, varint(number))
        elif f.message_type is not None and not f.message_type.GetOptions().map_entry:
            data += field(f.number, 2, extremes(f.message_type, number)) if number else b""
    return data


def attacks(descriptor: Descriptor, dice: random.Random) -> Iterator[bytes]:
    yield b""
    for size in (1, 7, 300, 5000):
        yield dice.randbytes(size)
    yield nested(descriptor, 120)
    yield nested(descriptor, 5000)
    for number in (2**64 - 1, 2**63, 2**53, 2**32 - 1, 0):
        yield extremes(descriptor, number)
    yield b"\xff" * 100
    for f in descriptor.fields:
        yield field(f.number, 2, b"\xff\xfe\x00" * 50)
        # One field of a hundred thousand bytes, then a hundred thousand entries.
        yield field(f.number, 2, b"\x01" * 100_000)
        yield field(f.number, 2, b"") * 100_000
        # It claims two gigabytes and ends.
        yield varint(f.number << 3 | 2) + varint(2**31 - 1)
        yield field(f.number, 2, b"a\0../\x1b[2J" * 3000)


@pytest.fixture(scope="module")
def cluster(
    checkpoint: Callable[..., Path], fork_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    logs = tmp_path_factory.mktemp("logs")
    with LocalCluster(
        checkpoint(),
        servers=1,
        redundancy=1,
        clients=0,
        fork_server=fork_server,
        log_dir=logs,
    ) as running:
        yield running


def status_of(line: grpc.Channel, service: str, method: Any, data: bytes) -> grpc.StatusCode:
    """The status of one call with these bytes."""
    path = f"/{service}/{method.name}"
    kind = "_".join(
        "stream" if streams else "unary"
        for streams in (method.client_streaming, method.server_streaming)
    )
    call = getattr(line, kind)(path, lambda m: m, lambda m: m)
    request = iter([data, data]) if method.client_streaming else data
    try:
        answer = call(request, timeout=STREAM_S if method.server_streaming else CALL_S)
        if method.server_streaming:
            try:
                next(iter(answer), None)
            finally:
                answer.cancel()
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


@pytest.mark.parametrize("name", PORTS)
def test_every_method_of_a_port(cluster: LocalCluster, name: str) -> None:
    role, service = PORTS[name]
    child = cluster.children[name]
    births = {child.pid: started_at(child.pid)}
    dice = random.Random(name)
    wrong: list[str] = []
    with channel(str(child.address), role) as line:
        attacked = [m for m in service.methods if m.name not in _SPARED]
        # Above the limit of a message. Twice: the first one may leave something behind.
        for _ in range(2):
            code = status_of(line, service.full_name, attacked[0], b"\0" * (65 << 20))
            assert code is Code.RESOURCE_EXHAUSTED
        before = census({name: child.pid}, births)[name].resident_bytes
        for method in FACTOR * attacked:
            for data in attacks(method.input_type, dice):
                code = status_of(line, service.full_name, method, data)
                if code not in BLAMES_THE_CALLER:
                    wrong.append(f"{method.name}: {code.name} for {data[:40]!r}")
        assert wrong == []
        health = health_pb2_grpc.HealthStub(line)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert child.running
    after = census({name: child.pid}, births)[name].resident_bytes
    print(f"{name}: {before >> 20} -> {after >> 20} MiB")
    assert after - before < MOST_GROWTH
    assert cluster.log_dir is not None
    log = (cluster.log_dir / f"{name}.log").read_text(errors="replace")
    assert "Traceback" not in log
    assert len(log) < 2_000_000
