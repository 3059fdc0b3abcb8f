"""The connections to engines, and the `Engine` that they are together for the requests of a frontend.

All on the HTTP server's event loop: `EnginePool` decides, this sends and receives.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from google.protobuf.message import DecodeError

from eaas.generation import messages
from eaas.generation.errors import EngineStoppedError
from eaas.generation.messages import MOST_BYTES, PROTOCOL_VERSION, SILENCE_S
from eaas.generation.work import Delivery, Work, refuse_longer
from eaas.log import get_logger
from eaas.net.frames import FrameConnection, connect
from eaas.net.server_records import find
from eaas.net.tls import Identity
from eaas.rpc.v1 import engine_pb2 as pb
from eaas.types import Role
from frontend.engines.pool import Action, Cancel, Deliver, EngineInfo, EnginePool, Send

__all__ = ["Engines"]

_log = get_logger(__name__)

# How often time is looked at: while there are requests, and while there are none.
_TICK_S = 0.1
_IDLE_TICK_S = 1.0
_ALIVE_S = 1.0
_CONNECT_S = 5.0
# Pauses between attempts to connect.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Engines:
    """All engines of the cluster as one `Engine`, whose requests outlive each of them.

    Args:
        name: Member id of this frontend, for the engines' logs.
        client_digest: Digest of the checkpoint's config and tokenizer, which an engine must have, too.
        tls: Identity of this process; None: plain text.
        on_move: See `EnginePool`.
        on_pause: See `EnginePool`.
    """

    def __init__(
        self,
        name: str,
        client_digest: str,
        tls: Identity | None = None,
        on_move: Callable[[str], None] = lambda _: None,
        on_pause: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        self._name, self._client_digest, self._tls = name, client_digest, tls
        self._pool = EnginePool(on_move, on_pause)
        self._links: dict[str, _Link] = {}
        self._listeners: dict[str, Callable[[Delivery], None]] = {}
        self._loop: asyncio.AbstractEventLoop
        self._next_tick: asyncio.TimerHandle | None = None
        self._wanted: Mapping[str, str] = {}
        self._is_stopped = False

    # -- which engines there are ----------------------------------------------------------------------

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Connect to the engines that the monitor lists, and leave the others. For any thread.

        Args:
            addresses: host:port of each engine by its name: member id and incarnation. Empty: unchanged, as a
                monitor of an earlier release, which takes over in a rolling upgrade, names no addresses.
        """
        self._wanted = {
            name: known
            for name, address in addresses.items()
            if (known := address or self._wanted.get(name, ""))
        }
        if self._next_tick is not None:
            self._loop.call_soon_threadsafe(self._follow)

    # -- `Engine`, on the event loop ------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request, prompt plus answer, that an engine takes; None: no limit."""
        limits = [info.capacity for info in self._pool.engines]
        return None if None in limits else max(filter(None, limits), default=None)

    def start(self) -> None:
        """Connect to the engines. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._next_tick = self._loop.call_later(_IDLE_TICK_S, self._tick)
        self._follow()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Send a request to an engine, or let it wait for one; `deliver` then gets its tokens.

        Raises:
            EngineStoppedError: The frontend stops.
            ApiError: The request may get longer than the cache of each engine.
        """
        if self._is_stopped:
            raise EngineStoppedError("The server is stopping.")
        refuse_longer(work, self.capacity)
        self._listeners[work.id] = deliver
        self._tick_within(_TICK_S)
        self._do(self._pool.submit(work, self._loop.time()))

    def cancel(self, request_id: str) -> None:
        """End a request; nothing more is delivered. No effect on a finished one."""
        if self._listeners.pop(request_id, None) is not None:
            self._do(self._pool.cancel(request_id))

    def failure(self) -> str | None:
        """Return why no request can be taken; None: requests are taken."""
        # Without an engine, requests wait for one.
        return "it was shut down" if self._is_stopped else None

    def running(self) -> int:
        """Number of requests in the engines' running batches, of all frontends."""
        return sum(link.load.running for link in self._links.values())

    def waiting(self) -> int:
        """Number of requests that wait for a place in a batch, or for an engine."""
        waiting = sum(link.load.waiting for link in self._links.values())
        return waiting + self._pool.waiting

    def traced(self) -> Sequence[bytes]:
        """Nothing: the engines trace their layers."""
        return ()

    def cache_usage(self) -> float:
        """Fraction of the engines' key-value caches in use, 0 to 1: the fullest one's."""
        return max((link.load.cache_usage for link in self._links.values()), default=0.0)

    def is_compiled(self) -> bool:
        """Whether all engines run compiled passes."""
        loads = [link.load for link in self._links.values() if link.name]
        return bool(loads) and all(load.compiled for load in loads)

    def stop(self, timeout_s: float) -> None:
        """Fail all requests and leave the engines. For any thread; waits at most `timeout_s`."""
        self._is_stopped = True
        if self._next_tick is None or self._loop.is_closed():
            return
        stopped = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        if asyncio.events._get_running_loop() is not self._loop:
            stopped.result(timeout_s)

    # -- for the endpoint -----------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._pool)

    def health(self) -> tuple[bool, str]:
        """Whether an engine serves, and why not."""
        reason = "no engine is connected"
        if self._pool.is_ready():
            loads = [link.load for link in tuple(self._links.values()) if link.is_open]
            missing = [load.missing for load in loads]
            reason = "" if not all(missing) else next(iter(missing), reason)
        return not reason, reason

    def failovers(self) -> Mapping[str, int]:
        """Parts of layer calls that the engines sent to another replica, by reason."""
        total = Counter[str]()
        for link in tuple(self._links.values()):
            total.update(link.load.failovers)
        return total

    # -- links ----------------------------------------------------------------------------------------

    def opened(self, link: _Link, info: pb.EngineInfo) -> None:
        """Use an engine that has accepted this frontend, if it has the same checkpoint."""
        if info.client_digest != self._client_digest:
            _log.warning("engine %s has another checkpoint than this frontend", link.name)
            return
        _log.info("engine %s is connected", link.name)
        found = EngineInfo(link.name, tuple(info.kind), info.capacity or None)
        self._do(self._pool.join(found, self._loop.time()))

    def took(self, link: _Link, message: pb.FromEngine) -> None:
        """Take a message of an engine."""
        now, name = self._loop.time(), link.name
        self._do(self._pool.hear(name, now))
        kind = message.WhichOneof("kind")
        if kind == "deliveries":
            for attempt, delivery in messages.delivered(message.deliveries):
                self._do(self._pool.deliver(name, attempt, delivery, now))
        elif kind == "drain":
            self._do(self._pool.drain(name, now))

    def closed(self, link: _Link) -> None:
        """Move the requests of an engine whose connection has ended."""
        if self._links.get(link.name) is link:
            self._do(self._pool.lose(link.name, self._loop.time()))

    def _follow(self) -> None:
        for name in self._links.keys() - self._wanted.keys():
            self._links.pop(name).end()
            self._do(self._pool.lose(name, self._loop.time(), died=False))
        for name in self._wanted.keys() - self._links.keys():
            link = self._links[name] = _Link(self, name, self._wanted[name])
            link.start(self._name, self._tls)

    def _tick(self) -> None:
        now = self._loop.time()
        for link in self._links.values():
            link.check(now)
        self._do(self._pool.tick(now))
        pause = _TICK_S if self._pool else _IDLE_TICK_S
        self._next_tick = self._loop.call_later(pause, self._tick)

    def _tick_within(self, seconds: float) -> None:
        assert self._next_tick is not None
        if self._next_tick.when() > self._loop.time() + seconds:
            self._next_tick.cancel()
            self._next_tick = self._loop.call_later(seconds, self._tick)

    async def _stop(self) -> None:
        if self._next_tick is not None:
            self._next_tick.cancel()
        error = EngineStoppedError("The server is stopping.")
        for request, deliver in list(self._listeners.items()):
            self.cancel(request)
            deliver(Delivery([], finished=True, error=error))
        self._wanted = {}
        self._follow()

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                listener = self._listeners.get(action.work_id)
                if listener is not None:
                    if action.delivery.finished:
                        del self._listeners[action.work_id]
                    listener(action.delivery)
            elif isinstance(action, Send):
                submit = messages.submit(action.attempt, action.work)
                self._links[action.engine].send(pb.FromFrontend(submit=submit))
            else:
                assert isinstance(action, Cancel)
                self._links[action.engine].send(pb.FromFrontend(cancel=action.attempt))


class _Link:
    """The connection to one engine, made again when it ends, until the monitor lists the engine no more.

    Attributes:
        name: The engine's name.
        load: What it said last about itself.
        is_open: Whether it has accepted this frontend.
    """

    def __init__(self, engines: Engines, name: str, address: str) -> None:
        self._engines = engines
        self.name, self._address = name, address
        self.load = pb.Load()
        self._connection: FrameConnection | None = None
        self.is_open = False
        self._sent_at = 0.0
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, frontend: str, tls: Identity | None) -> None:
        """Connect, and connect again, from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run(frontend, tls))

    def end(self) -> None:
        """Leave the engine."""
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.close("the monitor does not list the engine any more")

    def send(self, message: pb.FromFrontend) -> None:
        """Send a message; no effect if the connection has ended."""
        if self._connection is not None:
            self._sent_at = asyncio.get_running_loop().time()
            self._connection.send(message.SerializeToString())

    def check(self, now: float) -> None:
        """Tell the engine that this frontend lives; end a connection that is silent."""
        connection = self._connection
        if connection is None:
            return
        if now - connection.heard_at > SILENCE_S:
            connection.abort(f"nothing was heard for {SILENCE_S:g} s")
        elif now - self._sent_at > _ALIVE_S:
            self.send(pb.FromFrontend(alive=pb.Alive()))

    async def _run(self, frontend: str, tls: Identity | None) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            self._ended.clear()
            try:
                await connect(
                    self._address,
                    lambda: FrameConnection(
                        MOST_BYTES,
                        lambda each: self._greet(each, frontend, tls),
                        self._take,
                        self._lost,
                    ),
                    Role.ATTENTION_CLIENT.value,
                    tls,
                    _CONNECT_S,
                )
                await self._ended.wait()
                pause = _FIRST_PAUSE_S
            except (OSError, TimeoutError) as error:
                _log.debug("engine %s at %s: %s", self.name, self._address, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _greet(self, connection: FrameConnection, frontend: str, tls: Identity | None) -> None:
        self._connection = connection
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, frontend=frontend)
        # As with gRPC: another process that listens there now must not learn the ended one's secret.
        record = find(self._address) if tls is None else None
        if record is not None:
            if not record.lives:
                connection.abort("the engine's process has ended")
                return
            hello.secret = record.secret
        self.send(pb.FromFrontend(hello=hello))

    def _take(self, data: bytes) -> None:
        assert self._connection is not None
        try:
            message = pb.FromEngine.FromString(data)
        except DecodeError:
            self._connection.abort("a message that cannot be read")
            return
        kind = message.WhichOneof("kind")
        if kind == "info" and not self.is_open:
            if message.info.refusal:
                _log.warning("engine %s refuses: %s", self.name, message.info.refusal)
                self._connection.close(message.info.refusal)
                return
            self.is_open = True
            self._engines.opened(self, message.info)
        elif not self.is_open:
            self._connection.abort("the first message is no greeting")
        elif kind == "load":
            self.load = message.load
            self._engines.took(self, message)
        else:
            self._engines.took(self, message)

    def _lost(self, reason: str) -> None:
        self._connection = None
        if self.is_open:
            self.is_open = False
            self.load = pb.Load()
            _log.warning("the connection to engine %s ended: %s", self.name, reason)
            self._engines.closed(self)
        self._ended.set()
