"""The engine as a service: frontends connect, and it generates the tokens of their requests.

One connection for each frontend (`eaas.net.frames`), all in one thread. What a step of the engine has for a
frontend is one message. A connection that ends, or is silent for longer than the lease, ends its requests.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import count

from google.protobuf.message import DecodeError

from eaas.generation import messages
from eaas.generation.errors import ApiError, EngineStoppedError
from eaas.generation.grammar import Grammar
from eaas.generation.matchers import Matchers
from eaas.generation.messages import IDLE_REPORT_S, MOST_BYTES, PROTOCOL_VERSION, SILENCE_S
from eaas.generation.work import Delivery, Engine
from eaas.log import get_logger
from eaas.net.frames import FrameConnection, accept
from eaas.net.tls import Identity
from eaas.rpc.v1 import engine_pb2 as pb
from eaas.types import Role

__all__ = ["EngineService"]

_log = get_logger(__name__)

# How often frontends are told that the engine lives, while it has requests.
_REPORT_S = 0.1
# What costs something is looked up once a second.
_LOAD_S = 0.9
# As of HTTP clients: a frontend that does not read for so long is disconnected.
_MOST_BLOCKED_S = 30.0
_END_S = 5.0
_GRAMMAR_THREADS = 2


class EngineService:
    """Serves an engine to frontends, in a thread of its own.

    Args:
        engine: The engine. The service starts and stops it.
        client_digest: Digest of the checkpoint's config and tokenizer.
        kind: Digest of the model, and the version: what an engine must have in common with this one to go on
            with its answers.
        matchers: Makes what compiles the grammars of requests.
        listener: A listening socket, which the service closes.
        tls: Identity of this process; None: plain text.
        secret: What frontends must present; None: nothing.
        missing: Returns what keeps the engine from serving; empty: nothing.
        failovers: Returns the parts of layer calls sent to another replica, by reason.
    """

    def __init__(
        self,
        engine: Engine,
        client_digest: str,
        kind: tuple[str, ...],
        matchers: Callable[[Executor], Matchers],
        listener: socket.socket,
        tls: Identity | None = None,
        secret: str | None = None,
        missing: Callable[[], str] = str,
        failovers: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.engine = engine
        self._client_digest, self._kind, self._secret = client_digest, kind, secret
        self._missing, self._failovers = missing, failovers
        self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammars")
        self._matchers = matchers(self._threads)
        self._listener, self._tls = listener, tls
        self._sessions = set[_Session]()
        self._is_draining = False
        # The load as it is sent, and until when it is current.
        self._load, self._load_until = b"", -math.inf
        self._loop = asyncio.new_event_loop()
        self._next_report: asyncio.TimerHandle
        self._thread = threading.Thread(target=self._run, name="engine-service", daemon=True)

    def start(self) -> None:
        """Start the engine, and accept frontends."""
        self.engine.start()
        self._thread.start()

    def drain(self) -> None:
        """Refuse further requests, and let frontends move those that they have here if they can."""
        self._loop.call_soon_threadsafe(self._drain)

    def is_busy(self) -> bool:
        """Whether frontends have requests here."""
        return any(session.requests for session in tuple(self._sessions))

    def stop(self) -> None:
        """Give up all requests, which other engines may go on with; end the engine. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)
            self._thread.join(_END_S)
        self.engine.stop(_END_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- the service's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        accepting = self._loop.create_task(accept(self._listener, self._connection, self._tls))
        self._loop.call_soon(self._report)
        try:
            self._loop.run_forever()
        finally:
            accepting.cancel()
            self._loop.run_until_complete(asyncio.gather(accepting, return_exceptions=True))
            self._listener.close()
            self._loop.close()

    def _connection(self) -> FrameConnection:
        return _Session(self).connection

    def _report(self) -> None:
        """Tell the frontends that the engine lives; end connections that are silent or not read."""
        now = self._loop.time()
        if now >= self._load_until:
            self._load, self._load_until = self._look().SerializeToString(), now + _LOAD_S
        for session in tuple(self._sessions):
            session.check(now)
            session.connection.send(self._load)
        pause = _REPORT_S if self.is_busy() else IDLE_REPORT_S
        self._next_report = self._loop.call_later(pause, self._report)

    def _look(self) -> pb.FromEngine:
        engine = self.engine
        return pb.FromEngine(
            load=pb.Load(
                running=engine.running(),
                waiting=engine.waiting(),
                cache_usage=engine.cache_usage(),
                compiled=engine.is_compiled(),
                missing=self._missing(),
                failovers=self._failovers(),
            )
        )

    def _drain(self) -> None:
        self._is_draining = True
        for session in self._sessions:
            session.send(pb.FromEngine(drain=pb.Drain()))

    def _end(self) -> None:
        for session in tuple(self._sessions):
            session.connection.close("the engine ends")
        # What was sent goes on its way first.
        self._loop.call_later(_REPORT_S, self._loop.stop)

    # -- for sessions ---------------------------------------------------------------------------------

    def join(self, session: _Session, hello: pb.Hello) -> None:
        """Accept a frontend, or refuse it and end its connection."""
        refusal = self._refusal(session.connection.role, hello)
        session.send(
            pb.FromEngine(
                info=pb.EngineInfo(
                    protocol_version=PROTOCOL_VERSION,
                    client_digest=self._client_digest,
                    kind=self._kind,
                    capacity=self.engine.capacity or 0,
                    refusal=refusal,
                )
            )
        )
        if refusal:
            _log.warning("frontend %s was refused: %s", hello.frontend, refusal)
            session.connection.close(refusal)
            return
        self._sessions.add(session)
        if self._is_draining:
            session.send(pb.FromEngine(drain=pb.Drain()))

    def leave(self, session: _Session) -> None:
        """Forget a frontend whose connection has ended."""
        self._sessions.discard(session)

    def accepts(self) -> bool:
        """Whether new requests are taken."""
        return not self._is_draining

    def busy_again(self) -> None:
        """Tell the frontends more often that the engine lives, from now on."""
        if self._next_report.when() > self._loop.time() + _REPORT_S:
            self._next_report.cancel()
            self._next_report = self._loop.call_later(_REPORT_S, self._report)

    async def compiled(self, message: pb.Grammar) -> Grammar:
        """Compile a request's grammar in a thread. Raises ApiError: its frontend has another vocabulary."""
        try:
            matcher = await self._loop.run_in_executor(
                self._threads, self._matchers.of, message.text
            )
        except ValueError as error:
            raise ApiError.invalid(message.field, f"'{message.field}': {error}.") from error
        return Grammar(message.text, matcher, tuple(message.end_tokens), message.field)

    def _refusal(self, role: str | None, hello: pb.Hello) -> str:
        if role is not None and role != Role.FRONTEND.value:
            return f"engines are for frontends, not for {role or 'a certificate without a role'}"
        if self._secret is not None and not hmac.compare_digest(hello.secret, self._secret):
            return "the cluster's secret is missing or wrong"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"the engine speaks version {PROTOCOL_VERSION}, not {hello.protocol_version}"
        return ""


class _Session:
    """A frontend's connection, and its requests.

    Attributes:
        requests: The engine's ids of the attempts that have not ended.
    """

    _numbers = count()

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._name = str(next(self._numbers))
        self._has_joined = False
        self._frontend = ""
        self.requests: dict[int, str] = {}
        self._tasks = set[asyncio.Task[None]]()
        # What the engine's step has for this frontend.
        self._step: list[tuple[int, Delivery]] = []
        self.connection = FrameConnection(MOST_BYTES, lambda _: None, self._take, self._ended)

    def send(self, message: pb.FromEngine) -> None:
        """Send a message."""
        self.connection.send(message.SerializeToString())

    def check(self, now: float) -> None:
        """End the connection if its frontend is silent, or does not read."""
        connection = self.connection
        if now - connection.heard_at > SILENCE_S:
            connection.abort(f"nothing was heard for {SILENCE_S:g} s")
        elif connection.blocked_at is not None and now - connection.blocked_at > _MOST_BLOCKED_S:
            connection.abort(f"it did not read for {_MOST_BLOCKED_S:g} s")

    def _take(self, data: bytes) -> None:
        try:
            message = pb.FromFrontend.FromString(data)
        except DecodeError:
            self.connection.abort("a message that cannot be read")
            return
        kind = message.WhichOneof("kind")
        if kind == "hello" and not self._has_joined:
            self._has_joined, self._frontend = True, message.hello.frontend
            self._service.join(self, message.hello)
        elif not self._has_joined:
            self.connection.abort("the first message is no greeting")
        elif kind == "submit":
            self._submit(message.submit)
        elif kind == "cancel":
            name = self.requests.pop(message.cancel, None)
            if name is not None:
                self._service.engine.cancel(name)

    def _submit(self, message: pb.Submit) -> None:
        attempt = message.attempt
        if not self.requests:
            self._service.busy_again()
        self.requests[attempt] = f"{self._name}-{attempt}"
        if not self._service.accepts():
            self._fail(attempt, EngineStoppedError("The engine takes no more requests."))
        elif message.sampling.HasField("grammar"):
            task = self._loop.create_task(self._submit_guided(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._start(message, None)

    async def _submit_guided(self, message: pb.Submit) -> None:
        try:
            grammar = await self._service.compiled(message.sampling.grammar)
        except ApiError as error:
            self._fail(message.attempt, error)
            return
        self._start(message, grammar)

    def _start(self, message: pb.Submit, grammar: Grammar | None) -> None:
        attempt = message.attempt
        name = self.requests.get(attempt)
        if name is None:  # cancelled meanwhile
            return
        try:
            self._service.engine.submit(
                messages.work(message, name, grammar), lambda each: self._deliver(attempt, each)
            )
        except (ApiError, EngineStoppedError) as error:
            self._fail(attempt, error)

    def _fail(self, attempt: int, error: Exception) -> None:
        self._deliver(attempt, Delivery([], finished=True, error=error))

    def _deliver(self, attempt: int, delivery: Delivery) -> None:
        if attempt not in self.requests:
            return
        if delivery.finished:
            del self.requests[attempt]
        if not self._step:
            # All deliveries of a step come in one turn of the loop.
            self._loop.call_soon(self._flush)
        self._step.append((attempt, delivery))

    def _flush(self) -> None:
        step, self._step = self._step, []
        self.send(pb.FromEngine(deliveries=messages.deliveries(step)))

    def _ended(self, reason: str) -> None:
        self._service.leave(self)
        if self._has_joined:
            _log.info("the connection to frontend %s ended: %s", self._frontend, reason)
        for name in self.requests.values():
            self._service.engine.cancel(name)
        self.requests.clear()
