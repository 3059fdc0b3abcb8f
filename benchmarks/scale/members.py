"""Simulated members and watchers of a monitor, thousands of them: `python -m benchmarks.scale.members JSON`.

On the wire a simulated member acts like `MemberSession`: Register, a Heartbeat stream with a message per
interval (sent once the last was answered), and a Watch stream, all on a connection of its own. It describes
itself as a server or a client of a model with 48 layers.

Commands of the process, one line of JSON each, answered when done:

    join                                seconds
    watch    [count, revision, life]    null; so many members watch from now on
    fetch    count                      null; so many watchers connect, take a snapshot, and begin anew
    figures                             what has happened since the last time
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import grpc

from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel_options
from eaas.net.grpc_secret import proof
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Member, MemberState, ModelShape, Role

__all__ = ["SimulatedMembers", "main"]

# Model that members send when they register; a realistic one, of 48 layers.
_SHAPE = ModelShape(
    model_type="qwen3_moe",
    num_experts=128,
    hidden_size=2048,
    top_k=8,
    layer_names=tuple(f"model.layers.{layer}.mlp.experts" for layer in range(48)),
    dtype="bfloat16",
    digest="0" * 64,
)
# Largest number of concurrent registrations.
_JOINING = 32


class SimulatedMembers:
    """Members that send a heartbeat every `interval_s`, and watchers that fetch snapshots, in one loop."""

    def __init__(self, address: str, numbers: Sequence[int], interval_s: float) -> None:
        self._address = address
        self._proof = proof(address)
        self._interval_s = interval_s
        self._channels = {number: self._channel() for number in numbers}
        # asyncio itself keeps no running task.
        self._streams: list[asyncio.Task[None]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._delays_us: list[int] = []
        self._count: Counter[str] = Counter()

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address, channel_options(None, None))

    async def __aenter__(self) -> SimulatedMembers:
        """Open all members' connections."""
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels.values()))
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def join(self) -> float:
        """Register all members at the monitor; their heartbeats follow. Return the seconds that it took."""
        began, joining = time.monotonic(), asyncio.Semaphore(_JOINING)
        await asyncio.gather(*(self._join(number, joining) for number in self._channels))
        return time.monotonic() - began

    async def _join(self, number: int, joining: asyncio.Semaphore) -> None:
        member = _member(number)
        stub = monitor_pb2_grpc.MonitorServiceStub(self._channels[number])
        request = pb.RegisterRequest(member=member.to_proto(), protocol_version=PROTOCOL_VERSION)
        async with joining:
            registered = await stub.Register(request, metadata=self._proof)
        heartbeat = pb.HeartbeatRequest(
            id=member.id,
            incarnation=registered.incarnation,
            state=member.state.number,
            progress=1_000_000,
            experts=member.experts,
            epoch=member.epoch,
        )
        self._begin(self._beat(stub.Heartbeat(metadata=self._proof), heartbeat))

    async def _beat(self, call: Any, heartbeat: pb.HeartbeatRequest) -> None:
        """Send a heartbeat every interval, or at once when the answer to the last one comes later."""
        due_at = time.monotonic()
        while True:
            await asyncio.sleep(due_at - time.monotonic())
            sent_at = time.monotonic()
            self._count["sent"] += 1
            await call.write(heartbeat)
            if await call.read() is grpc.aio.EOF:
                return
            now = time.monotonic()
            self._delays_us.append(round(1e6 * (now - sent_at)))
            due_at += self._interval_s
            if due_at < now:
                self._count["late"] += 1 + int((now - due_at) / self._interval_s)
                due_at = now

    def _begin(self, stream: Coroutine[Any, Any, None]) -> None:
        async def until_it_ends() -> None:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                await stream
            self._count["ended"] += 1

        self._streams.append(asyncio.create_task(until_it_ends()))

    def watch(self, count: int, revision: int, life: int) -> None:
        """Make the first `count` members watch the membership from a revision."""
        request = pb.WatchRequest(from_revision=revision, life=life, heartbeats_tell=True)
        for channel in islice(self._channels.values(), count):
            self._begin(self._watch(channel, request))

    async def _watch(self, channel: grpc.aio.Channel, request: pb.WatchRequest) -> None:
        async for _ in self._messages(channel, request):
            self._count["watched"] += 1

    def _messages(
        self, channel: grpc.aio.Channel, request: pb.WatchRequest
    ) -> AsyncIterator[bytes]:
        """Begin a Watch stream; its messages are not parsed: that would cost more than the monitor's work."""
        watch = channel.unary_stream("/eaas.rpc.v1.MonitorService/Watch")
        messages: AsyncIterator[bytes] = watch(
            request.SerializeToString(), metadata=self._proof
        ).__aiter__()
        return messages

    def fetch(self, count: int) -> None:
        """Set the number of watchers that fetch snapshots."""
        for reader in self._readers:
            reader.cancel()
        self._readers = [asyncio.create_task(self._fetch()) for _ in range(count)]

    async def _fetch(self) -> None:
        request = pb.WatchRequest(
            knows_left=True, knows_models=True, knows_frontends=True, heartbeats_tell=True
        )
        while True:
            async with self._channel() as channel:
                # The monitor may refuse; the next connection tries again.
                with suppress(grpc.RpcError):
                    self._count["snapshot_bytes"] += len(
                        await anext(self._messages(channel, request))
                    )
                    self._count["snapshots"] += 1

    def take_figures(self) -> dict[str, Any]:
        """Return the counters since the last call, and reset them.

        Heartbeats: `sent`, `late` (turns before the last answer) and `delays_us` of the answers. `ended`:
        streams that the monitor ended. `watched`: messages of Watch streams. `snapshots`, `snapshot_bytes`:
        those that the watchers of `fetch` took.
        """
        names = ("sent", "late", "ended", "watched", "snapshots", "snapshot_bytes")
        found = {name: self._count[name] for name in names} | {"delays_us": self._delays_us}
        self._count.clear()
        self._delays_us = []
        return found


def _member(number: int) -> Member:
    """Describe a member; every second number is an expert server."""
    server = number % 2 == 0
    return Member(
        id=f"{'server' if server else 'client'}-{number}",
        role=Role.EXPERT_SERVER if server else Role.ATTENTION_CLIENT,
        pid=1 + number,
        host="simulated",
        address=f"192.0.2.1:{10_000 + number}",
        state=MemberState.SERVING,
        model=_SHAPE,
        transports=("shm", "grpc") if server else (),
    )


async def _serve(wanted: dict[str, Any]) -> None:
    commands, answers = await asyncio.open_unix_connection("\0" + wanted["control"])
    numbers = range(*wanted["numbers"])
    async with SimulatedMembers(wanted["address"], numbers, wanted["interval_s"]) as members:
        announce(ready=wanted["address"])
        while line := await commands.readline():
            name, *words = json.loads(line)
            answer: Any = None
            if name == "join":
                answer = await members.join()
            elif name == "watch":
                members.watch(*words)
            elif name == "fetch":
                members.fetch(*words)
            else:
                answer = members.take_figures()
            answers.write(json.dumps(answer).encode() + b"\n")


def main(arguments: str) -> None:
    """Simulate members until the launcher closes `control`."""
    bind_to_launcher()
    configure_logging("bench-members")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(_serve(json.loads(arguments)))


if __name__ == "__main__":
    main(sys.argv[1])
