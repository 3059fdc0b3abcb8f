"""A frontend's requests outlive engines: real processes and connections, whose engines say what is known."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from eaas.generation.errors import ApiError
from eaas.generation.grammar import Grammar
from eaas.generation.sampling import Sampling
from eaas.generation.work import Delivery, Work
from eaas.net.tls import Identity
from engine_process import POISON, EngineProcess
from engine_sim import answer_to, work_of
from frontend.engines.links import Engines
from tls_world import certificates

pytestmark = pytest.mark.timeout(60)


class User:
    """Submits a request, and keeps what it gets."""

    def __init__(self, engines: Engines, work: Work) -> None:
        self.work = work
        self.said: list[int] = []
        self.error: Exception | None = None
        self.longest_pause_s = 0.0
        self._changed = asyncio.Condition()
        self._ended = False
        self._last = asyncio.get_running_loop().time()
        engines.submit(work, self._take)

    def _take(self, delivery: Delivery) -> None:
        assert not self._ended
        now = asyncio.get_running_loop().time()
        self.longest_pause_s = max(self.longest_pause_s, now - self._last)
        self._last = now
        self.said += delivery.tokens
        self.error, self._ended = delivery.error, delivery.finished

    async def has(self, count: int) -> None:
        while len(self.said) < count and not self._ended:
            await asyncio.sleep(0.002)

    async def whole(self) -> None:
        while not self._ended:
            await asyncio.sleep(0.002)
        assert self.error is None
        assert self.said == answer_to(self.work)


def run(
    test: Callable[[Engines], Coroutine[Any, Any, None]],
    *processes: EngineProcess,
    tls: Identity | None = None,
) -> Engines:
    """Run a test on an event loop, as the HTTP server does."""

    async def main() -> Engines:
        moves: list[str] = []
        engines = Engines("frontend-0", "files", tls, moves.append)
        engines.start()
        engines.follow({f"engine@{n}": each.address for n, each in enumerate(processes)})
        try:
            while processes and not engines.health()[0]:
                await asyncio.sleep(0.01)
            await test(engines)
        finally:
            await asyncio.to_thread(engines.stop, 5.0)
        return engines

    return asyncio.run(main())


@pytest.fixture
def two() -> Iterator[list[EngineProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EngineProcess()) for _ in range(2)]


FAULTS: dict[str, Callable[[EngineProcess], None]] = {
    "killed": lambda process: process.signal(signal.SIGKILL),
    "stopped": lambda process: process.signal(signal.SIGSTOP),
    "drained": lambda process: process.tell("drain"),
    "ended": lambda process: process.tell("stop"),
}


# Each fault and each number of tokens; all pairs of them are nightly.
USUAL = {("killed", 0), ("killed", 31), ("stopped", 1), ("drained", 63), ("ended", 2)}


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        pytest.param(*pair, marks=[pytest.mark.nightly] * (pair not in USUAL))
        for pair in product(FAULTS, (0, 1, 2, 31, 63))
    ],
)
def test_a_fault_of_an_engine(two: list[EngineProcess], fault: str, count: int) -> None:
    """Each of two engines has some of the requests, and those of one go on with the other."""

    async def test(engines: Engines) -> None:
        users = [User(engines, work_of(f"{n}", [n + 20], 64, ends=False)) for n in range(8)]
        await users[0].has(count)
        FAULTS[fault](two[0])
        await asyncio.gather(*(user.whole() for user in users))
        assert max(user.longest_pause_s for user in users) < 5.0

    run(test, *two)


def test_a_request_waits_for_the_first_engine() -> None:
    """A frontend without engines is not ready, but it is not broken: a restart would not help."""
    with ExitStack() as stack:

        async def test(engines: Engines) -> None:
            assert engines.failure() is None
            assert engines.health() == (False, "no engine is connected")
            user = User(engines, work_of("early", [20], 64, ends=False))
            process = await asyncio.to_thread(lambda: stack.enter_context(EngineProcess()))
            engines.follow({"engine@0": process.address})
            await user.whole()
            assert engines.health() == (True, "")

        run(test)


def test_a_monitor_that_knows_no_engines_takes_over() -> None:
    """A monitor of an earlier release names no engine's address: those known so far serve on."""
    with EngineProcess() as process:

        async def test(engines: Engines) -> None:
            engines.follow({"engine@0": "", "client@1": ""})
            await User(engines, work_of("a", [20], 64, ends=False)).whole()

        run(test, process)


def test_one_engine_that_starts_again() -> None:
    with EngineProcess() as first, ExitStack() as stack:

        async def test(engines: Engines) -> None:
            users = [User(engines, work_of(f"{n}", [n + 20], 100, ends=False)) for n in range(8)]
            await users[0].has(20)
            first.signal(signal.SIGKILL)
            second = await asyncio.to_thread(lambda: stack.enter_context(EngineProcess()))
            engines.follow({"engine@2": second.address})
            await asyncio.gather(*(user.whole() for user in users))

        run(test, first)


def test_a_stopped_engine_that_continues_is_used_again(two: list[EngineProcess]) -> None:
    async def test(engines: Engines) -> None:
        for other in (1, 0):
            two[other].signal(signal.SIGSTOP)
            await User(engines, work_of(f"{other}", [7], 200, ends=False)).whole()
            two[other].signal(signal.SIGCONT)
            await asyncio.sleep(0.5)

    run(test, *two)


def test_a_request_that_kills_engines_is_given_up() -> None:
    with ExitStack() as stack:
        three = [stack.enter_context(EngineProcess()) for _ in range(3)]

        async def test(engines: Engines) -> None:
            good = [User(engines, work_of(f"{n}", [n + 20], 200, ends=False)) for n in range(4)]
            await good[0].has(10)
            bad = User(engines, work_of("bad", [POISON], 10))
            await asyncio.gather(*(user.whole() for user in good))
            while bad.error is None:
                await asyncio.sleep(0.01)
            assert isinstance(bad.error, ApiError)
            assert bad.error.code == "engines_died"

        run(test, *three)
        alive = [each for each in three if each.process.poll() is None]
        assert len(alive) == 1


def test_a_cancelled_request_leaves_its_engine() -> None:
    with EngineProcess() as process:

        async def test(engines: Engines) -> None:
            user = User(engines, work_of("request", [5], 900, ends=False))
            await user.has(5)
            engines.cancel("request")
            said = len(user.said)
            while engines.running():
                await asyncio.sleep(0.02)
            assert len(user.said) == said

        run(test, process)


def test_an_error_of_the_engine_reaches_the_user() -> None:
    with EngineProcess() as process:

        async def test(engines: Engines) -> None:
            grammar = Grammar("wrong", None, (0,), "response_format")  # type: ignore[arg-type]
            work = Work("request", [5], 1, 10, (0,), Sampling(grammar=grammar))
            user = User(engines, work)
            await user.has(1)
            assert isinstance(user.error, ApiError)
            assert (user.error.status, user.error.param) == (400, "response_format")

        run(test, process)


def test_a_frontend_without_the_secret_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with EngineProcess(secret="42") as process:

        async def test(engines: Engines) -> None:
            engines.follow({"engine": process.address})
            while "secret is missing or wrong" not in caplog.text:
                await asyncio.sleep(0.02)
            assert not engines.health()[0]

        run(test)


@pytest.mark.parametrize("role", ["frontend", "expert-server"])
def test_certificates_decide(role: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates(tmp_path)
    with EngineProcess(tls=tmp_path) as process:

        async def test(engines: Engines) -> None:
            engines.follow({"engine": process.address})
            if role == "frontend":
                while not engines.health()[0]:
                    await asyncio.sleep(0.02)
                await User(engines, work_of("request", [5], 50)).whole()
            else:
                while "not for expert-server" not in caplog.text:
                    await asyncio.sleep(0.02)
                assert not engines.health()[0]

        run(test, tls=Identity(tmp_path, role))
