"""An actor keeps its role's process running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eaas.errors import EaasError
from eaas_cli.ray.role import RoleProcess, RoleSpec, fill_in
from hand_clock import HandClock


class Process:
    returncode: int | None = None


class Child:
    started: list[Child]

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        log_dir: Path,
        module: str,
        ended_pids: tuple[int, ...],
    ) -> None:
        self.name, self.arguments, self.ended_pids = name, arguments, ended_pids
        self.pid = 100 + len(Child.started)
        self.address: str | None = None
        self.kernel: str | None = None
        self.failure: str | None = None
        self.process = Process()
        Child.started.append(self)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def read(self) -> None:
        if self.failure is not None:
            raise EaasError(self.failure)

    def last_words(self) -> str:
        return "words"

    def reap(self, timeout_s: float) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_children() -> None:
    Child.started = []


def spec(*words: str, may_leave: bool = False, host: str = "") -> RoleSpec:
    return RoleSpec("m", words, {}, "text: 1", 2, host, may_leave)


def role(clock: HandClock, tmp_path: Path, *words: str, may_leave: bool = False) -> RoleProcess:
    start: Any = Child
    return RoleProcess(spec(*words, may_leave=may_leave), "n", "10.0.0.9", tmp_path, start, clock)


def test_it_starts_again_after_an_end_with_pauses(tmp_path: Path) -> None:
    clock = HandClock()
    process = role(clock, tmp_path, "monitor", "--host", "{host}", "--port", "0")
    starts = []
    for _ in range(4):
        process.step()
        starts.append(clock.now)
        Child.started[-1].process.returncode = -9
        process.step()
        while len(Child.started) == len(starts):
            clock.now += 0.25
            process.step()
    assert starts == [0.0, 0.25, 0.75, 1.75]
    report = process.report()
    assert report.failures == 4
    assert report.failure == "eaas-m was ended by SIGKILL; its last words: words"
    assert Child.started[-1].ended_pids == (100, 101, 102, 103)


def test_it_keeps_its_port_over_a_restart_and_its_failures_are_forgotten(tmp_path: Path) -> None:
    clock = HandClock()
    process = role(clock, tmp_path, "monitor", "--host", "{host}", "--port", "0")
    process.step()
    first = Child.started[0]
    assert first.arguments[1:] == ("monitor", "--host", "10.0.0.9", "--port", "0")
    first.address = "10.0.0.9:7000"
    process.step()
    assert process.report().address == "10.0.0.9:7000"
    clock.now += 11.0
    first.process.returncode = 1
    process.step()
    assert process.report().address is None
    process.step()
    assert Child.started[1].arguments[-2:] == ("--port", "7000")
    Child.started[1].address = "10.0.0.9:7000"
    process.step()
    assert process.report().failure is None


@pytest.mark.parametrize("may_leave", [True, False])
def test_only_a_server_that_served_may_leave(tmp_path: Path, may_leave: bool) -> None:
    clock = HandClock()
    process = role(clock, tmp_path, "expert-server", may_leave=may_leave)
    process.step()
    Child.started[0].process.returncode = 0
    process.step()
    assert not process.report().left
    clock.now += 1.0
    process.step()
    Child.started[1].address = "h:1"
    process.step()
    Child.started[1].process.returncode = 0
    process.step()
    clock.now += 60.0
    process.step()
    assert process.report().left == may_leave
    assert len(Child.started) == (2 if may_leave else 3)
    # Nothing is left behind.
    assert bool(list(tmp_path.iterdir())) != may_leave


def test_a_failure_that_the_process_announces_is_reported(tmp_path: Path) -> None:
    process = role(HandClock(), tmp_path, "expert-server")
    process.step()
    Child.started[0].failure = "no such model"
    process.step()
    assert process.report().failure == "no such model"


def test_the_placeholders_are_filled_in_on_the_node(tmp_path: Path) -> None:
    words = ("expert-server", "--model", str(tmp_path), "--host", "{host}", "--config", "{config}")
    filled = (*words[:4], "10.0.0.9", "--config", "c.yaml")
    assert fill_in(spec(*words), "10.0.0.9", "c.yaml", "d") == filled
    assert "127.0.0.1" in fill_in(spec(*words, host="127.0.0.1"), "10.0.0.9", "c", "d")
    (threads,) = fill_in(spec("{threads}"), "10.0.0.9", "c", "d")
    assert int(threads) >= 1
    # A server on a node without the checkpoint gets its weights from others.
    absent = ("--model", "/no/such/model")
    assert fill_in(spec("expert-server", *absent, "--id", "m"), "h", "c", "d") == (
        *("expert-server", "--id", "m"),
    )
    client = ("attention-client", *absent)
    assert fill_in(spec(*client), "h", "c", "d") == client
