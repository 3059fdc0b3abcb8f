"""A frontend over engines of real models that die, and what its answers must then be.

- What was sent stays: the answer is byte for byte that of an undisturbed engine that says the same tokens.
- What follows is what another engine of the model says, alone, to the prompt and the tokens before the move.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from eaas.checkpoint.client_digest import client_digest
from eaas.generation import messages
from eaas.generation.messages import MOST_BYTES, PROTOCOL_VERSION
from eaas.generation.work import Delivery, Work
from eaas.net.frames import FrameConnection, connect
from eaas.net.listen import bind
from eaas.rpc.v1 import engine_pb2 as pb
from eaas.types import Role
from frontend.access import Access
from frontend.app import build_app
from frontend.defaults import ModelFiles
from frontend.engines.links import Engines
from frontend.limits import ServeLimits
from frontend.network.server import HttpServer
from model_engines import ModelEngine, ModelEngines
from waiting import eventually

__all__ = ["MovedAnswers", "Sequence", "usage_of", "whole"]

# Fields that differ between two equal answers.
_OWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number"}
_TRIES = 5
_CONNECT_S = 20.0
_ALIVE_S = 1.0
# Fields whose text comes in parts.
_TEXTS = {"delta", "content", "text", "arguments", "partial_json", "thinking", "reasoning"}


@dataclass
class Sequence:
    """A sequence that the frontend submitted.

    Attributes:
        deliveries: What it got.
        engines: The engine of each token.
    """

    work: Work
    deliveries: list[Delivery] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.deliveries for token in each.tokens]

    @property
    def moved_at(self) -> list[int]:
        """Tokens that it had when another engine went on with it."""
        pairs = enumerate(pairwise(self.engines), 1)
        return [count for count, (before, after) in pairs if before != after]

    @property
    def has_ended(self) -> bool:
        return bool(self.deliveries) and self.deliveries[-1].finished


class _Connected(Engines):
    """Engines that record which of them are connected, and which one sent the current message."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.names: set[str] = set()
        self.speaker = ""

    def opened(self, link: Any, info: Any) -> None:
        super().opened(link, info)
        self.names.add(link.name)

    def took(self, link: Any, message: Any) -> None:
        self.speaker = link.name
        super().took(link, message)


class _Tap:
    """The frontend's engines, which notes what they say; or an engine that says it again."""

    def __init__(self, model: Path) -> None:
        self.moves: list[str] = []
        self.engines = _Connected("frontend-0", client_digest(model), None, self.moves.append)
        self.sequences: list[Sequence] = []
        self.told_again: list[Sequence] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engines, name)

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        if self.told_again:
            self._tell_again(work, deliver)
            return
        sequence = Sequence(work)
        self.sequences.append(sequence)

        def note(delivery: Delivery) -> None:
            assert not sequence.has_ended
            sequence.deliveries.append(delivery)
            sequence.engines += [self.engines.speaker] * len(delivery.tokens)
            deliver(delivery)

        self.engines.submit(work, note)

    def _tell_again(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        before = self.told_again.pop(0)
        assert _plain(work) == _plain(before.work)
        loop = asyncio.get_running_loop()
        for delivery in before.deliveries:
            loop.call_soon(deliver, delivery)


def _plain(work: Work) -> Work:
    return replace(work, id="", sampling=replace(work.sampling, grammar=None, seed=0))


class MovedAnswers:
    """An HTTP endpoint whose engines die. A context manager.

    Args:
        model: The checkpoint.
        engines: Starts engines.
    """

    def __init__(self, model: Path, engines: ModelEngines) -> None:
        self._model, self._engines = model, engines
        self.files = ModelFiles.load(model)
        self._tap = _Tap(model)
        limits = ServeLimits()
        app = build_app(
            self._tap,  # type: ignore[arg-type]
            self.files,
            names=["tiny"],
            status=dict,
            healthy=lambda: (True, ""),
            limits=limits,
            access=Access(),
        )
        self._server = HttpServer(app, bind("127.0.0.1", 0), limits)
        self._server.start()
        self._http = httpx.Client(base_url=f"http://{self._server.address}", timeout=60)
        self._addresses: dict[str, str] = {}
        self._numbers = 0

    def __enter__(self) -> MovedAnswers:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._server.stop(5.0)
        self._engines.end_all()

    @property
    def moves(self) -> list[str]:
        """Reasons of the moves since the last `serve`."""
        return self._tap.moves

    def serve(self, *tokens: int) -> list[ModelEngine]:
        """Replace all engines: the first gets a request before the others do.

        Args:
            tokens: For each the token of an answer at which it dies; -1: it lives.
        """
        self._tap.engines.follow({})
        self._engines.end_all()
        self._addresses.clear()
        found = [self.join(each) for each in tokens]
        self._tap.sequences.clear()
        self._tap.moves.clear()
        return found

    def join(
        self,
        tokens: int = -1,
        model: Path | None = None,
        through: Callable[[str], str] = lambda address: address,
    ) -> ModelEngine:
        """Start another engine, and wait until it is connected.

        Args:
            tokens: See `serve`.
            model: Another checkpoint.
            through: Returns the address at which the frontend finds it.
        """
        engine = self._engines.start(model or self._model, tokens)
        self._numbers += 1
        name = f"engine@{self._numbers}"
        self._addresses[name] = through(engine.address)
        self._tap.engines.follow(self._addresses)
        eventually(lambda: name in self._tap.engines.names, what="a connection")
        return engine

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        at: int = -1,
        call: Callable[[], object] = lambda: None,
    ) -> tuple[Any, list[Sequence]]:
        """Return an answer (see `whole`) and the sequences that were generated for it.

        Args:
            at: Event of a stream at which `call` is called.
        """
        begin = len(self._tap.sequences)
        answer = self._post(path, body, at, call)
        return answer, self._tap.sequences[begin:]

    def ask_dying(
        self, path: str, body: Mapping[str, Any], *at: int, exact: bool = True
    ) -> tuple[Any, list[Sequence]]:
        """Return an answer whose engines died at these tokens, one after another; check all that must hold.

        On a busy machine an engine may be silent for so long that its requests leave it before it dies. Then
        the request is sent again.
        """
        for _ in range(_TRIES):
            self.serve(*at, -1)
            answer, sequences = self.ask(path, body)
            assert answer == self.ask_again(path, body, sequences), f"at {at}"
            self.check_moved(sequences, exact)
            if self.moves == ["lost"] * len(at):
                return answer, sequences
        raise AssertionError(f"{_TRIES} times an engine was silent")

    def ask_again(self, path: str, body: Mapping[str, Any], sequences: Iterable[Sequence]) -> Any:
        """Return the answer of an engine that says the same tokens as before, undisturbed."""
        self._tap.told_again = list(sequences)
        answer = self._post(path, body)
        assert not self._tap.told_again
        return answer

    def check_moved(self, sequences: Iterable[Sequence], exact: bool = True) -> None:
        """Each sequence that moved goes on as another engine, alone, does from there.

        Args:
            exact: Compare log-probabilities, too, bit for bit: nothing else ran on the engine.
        """
        for sequence in sequences:
            assert len(sequence.tokens) <= sequence.work.max_tokens
            ends = [*sequence.moved_at, len(sequence.tokens)]
            for at, end in pairwise(ends) if len(ends) > 1 else ((0, ends[0]),):
                alone = asyncio.run(self._alone(_rest(sequence, at)))
                # A stop string may have ended the answer before its engine did.
                assert alone.tokens[: end - at] == sequence.tokens[at:end]
                if exact and sequence.work.sampling.logprobs is not None:
                    assert _logprobs(alone)[: end - at] == _logprobs(sequence)[at:end]

    async def _alone(self, work: Work) -> Sequence:
        """What an engine says to a work, without the code that moves requests."""
        engine = self._engines.start(self._model)
        sequence, ended, closed = Sequence(work), asyncio.Event(), asyncio.Event()

        def greet(connection: FrameConnection) -> None:
            hello = pb.Hello(protocol_version=PROTOCOL_VERSION, frontend="alone")
            for message in (
                pb.FromFrontend(hello=hello),
                pb.FromFrontend(submit=messages.submit(1, work)),
            ):
                connection.send(message.SerializeToString())

        def take(data: bytes) -> None:
            for _, delivery in messages.delivered(pb.FromEngine.FromString(data).deliveries):
                sequence.deliveries.append(delivery)
            if sequence.has_ended:
                ended.set()

        def lost() -> None:
            ended.set()
            closed.set()

        connection = FrameConnection(MOST_BYTES, greet, take, lambda _: lost())
        await connect(
            engine.address,
            lambda: connection,
            Role.ATTENTION_CLIENT.value,
            None,
            _CONNECT_S,
        )
        alive = pb.FromFrontend(alive=pb.Alive()).SerializeToString()
        while not ended.is_set():
            connection.send(alive)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _ALIVE_S)
        connection.abort("it has all")
        await closed.wait()
        engine.signal(signal.SIGKILL)
        assert sequence.has_ended, "the connection to the engine ended"
        assert sequence.deliveries[-1].error is None
        return sequence

    def refused(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return the status and the error of a request that fails."""
        response = self._http.post(path, json=body)
        return response.status_code, response.json()["error"]

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        at: int = -1,
        call: Callable[[], object] = lambda: None,
    ) -> Any:
        events = []
        with self._http.stream("POST", path, json=body) as response:
            for line in response.iter_lines():
                text = line.removeprefix("data: ")
                if text.startswith("{"):
                    events.append(json.loads(text))
                    if len(events) == at:
                        call()
        assert response.status_code == 200, events
        return whole(events)


def _rest(sequence: Sequence, at: int) -> Work:
    """What is left to say after the first tokens of an answer."""
    work = sequence.work
    sampling = replace(work.sampling, prompt_logprobs=work.sampling.prompt_logprobs and not at)
    return replace(work, tokens=[*work.tokens, *sequence.tokens[:at]], sampling=sampling)


def _logprobs(sequence: Sequence) -> list[float]:
    scores = (each.scores for each in sequence.deliveries if each.scores is not None)
    return [float(value) for each in scores for value in each.logprob_T]


def whole(events: Iterable[Any]) -> dict[tuple[Any, ...], Any]:
    """Join what an answer's events say, however it is cut into events: texts and lists by their places."""
    found: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)

    def walk(value: Any, place: tuple[Any, ...]) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if key not in _OWN:
                    walk(part, (*place, key))
        elif isinstance(value, list):
            for number, part in enumerate(value):
                is_one = isinstance(part, dict) and "logprob" not in part
                if is_one:
                    walk(part, (*place, part.get("index", number)))
                else:
                    found[place].append(json.dumps(part))
        else:
            found[place].append(value)

    for event in events:
        walk(event, (event.get("type"), event.get("output_index"), event.get("index")))
    return {place: _joined(place, values) for place, values in found.items()}


def _joined(place: tuple[Any, ...], values: list[Any]) -> Any:
    if place[-1] in _TEXTS and all(isinstance(each, str) for each in values):
        return "".join(values)
    if all(isinstance(each, str) and each[:1] in '[{"0123456789-n' for each in values):
        return values
    return set(map(repr, values))


def usage_of(answer: Mapping[tuple[Any, ...], Any]) -> int:
    """Return the number of tokens that an answer counts."""
    names = ("completion_tokens", "output_tokens")
    counts = (values for place, values in answer.items() if place[-1] in names)
    return max(int(value) for values in counts for value in values)
