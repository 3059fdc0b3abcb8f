"""How a device would poll slots (poll.h): every order of the steps, and threads on memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
SOURCE = ROOT / "tests/helpers/poll_exchanges.cpp"
FREE, WRITTEN, DONE, OFFLINE = range(4)
# Generations of the slot, and requests of each owner.
GENERATIONS, REQUESTS = 3, 2

# -- every order ---------------------------------------------------------------------------------------


class Broken(Exception):
    """A step that must not be possible."""


@dataclass(frozen=True)
class State:
    """One slot, the device, and the slot's owner, whose part the host takes over when it is lost.

    Steps of the owner: "write" (the request's bytes), "ask" (FREE to WRITTEN), "wait" (reads DONE, then
    frees). Of the host: "clear", "offline", "look" (at busy; OFFLINE), "own", "free". Of the device: those of
    poll.h.
    """

    flag: int = OFFLINE
    busy: bool = False
    generation: int = 0
    request: tuple[int, int] = (0, 0)
    result: tuple[int, int] = (0, 0)
    device: str = "D1"
    found: int = 0
    owner: str = "look"
    now: int = 1
    number: int = 0


def device_steps(s: State, flaw: str) -> Iterator[State]:
    """D1: see WRITTEN. D2a, D2b: busy, then the generation. D3: the flag again. D4a: compute. D4b: end."""
    match s.device:
        case "D1":
            if s.flag == WRITTEN:
                yield replace(s, device="D2b" if flaw == "generation before busy" else "D2a")
        case "D2a":
            after = "D3" if flaw == "generation before busy" else "D2b"
            yield replace(s, busy=True, device=after)
        case "D2b":
            after = "D2a" if flaw == "generation before busy" else "D3"
            yield replace(s, found=s.generation, device=after)
        case "D3":
            is_request = s.found and (s.flag == WRITTEN or flaw == "flag read once")
            yield replace(s, device="D4a" if is_request else "D5")
        case "D4a":
            if s.request[0] != s.found:
                raise Broken("the device reads another owner's request")
            is_early = flaw == "busy ends before the answer"
            yield replace(s, result=s.request, busy=not is_early, device="D4b")
        case "D4b":
            yield replace(s, device="D4c" if s.flag == WRITTEN else "D5")
        case "D4c":
            yield replace(s, flag=DONE, device="D5")
        case "D5":
            yield replace(s, busy=False, device="D1")


def owner_steps(s: State, flaw: str) -> Iterator[State]:
    """One step of the owner or the host; an owner can be lost before each of its steps."""
    if s.owner in ("write", "ask", "wait") and s.now < GENERATIONS:
        yield replace(s, owner="clear")
    match s.owner:
        case "clear":
            yield replace(s, generation=0, owner="offline")
        case "offline":
            yield replace(s, flag=OFFLINE, now=s.now + 1, number=0, owner="look")
        case "look":
            if not s.busy or flaw == "granted while busy":
                yield replace(s, flag=OFFLINE, owner="own")
        case "own":
            yield replace(s, generation=s.now, owner="free")
        case "free":
            yield replace(s, flag=FREE, owner="write")
        case "write":
            if s.device == "D4a":
                raise Broken("a request is written while the device computes in the slot")
            yield replace(s, request=(s.now, s.number), owner="ask")
        case "ask":
            if s.flag != FREE:
                raise Broken("the slot is not free for its owner")
            yield replace(s, flag=WRITTEN, owner="wait")
        case "wait":
            if s.flag == OFFLINE:
                raise Broken("the slot is not its owner's")
            if s.flag == DONE:
                if s.result != (s.now, s.number):
                    raise Broken("the answer is another request's")
                more = s.number + 1 < REQUESTS
                yield replace(s, flag=FREE, number=s.number + 1, owner="write" if more else "over")


def explore(flaw: str = "") -> dict[State, list[State]]:
    """All states that any order of steps reaches, with their successors. Raises Broken."""
    graph: dict[State, list[State]] = {}
    ahead = [State()]
    while ahead:
        state = ahead.pop()
        if state not in graph:
            graph[state] = [*device_steps(state, flaw), *owner_steps(state, flaw)]
            ahead += graph[state]
    return graph


def test_every_order_of_loss_and_revocation() -> None:
    graph = explore()
    over = {state for state in graph if state.owner == "over" and not state.busy}
    assert {state.now for state in over} == set(range(1, GENERATIONS + 1))
    # From every state the last owner's answers can still come: nothing is stuck.
    ends, size = set(over), 0
    while size != len(ends):
        size = len(ends)
        ends |= {state for state, following in graph.items() if not ends.isdisjoint(following)}
    assert ends == graph.keys()


@pytest.mark.parametrize(
    "flaw",
    [
        "generation before busy",
        "flag read once",
        "busy ends before the answer",
        "granted while busy",
    ],
)
def test_each_step_is_needed(flaw: str) -> None:
    with pytest.raises(Broken):
        explore(flaw)


# -- on memory -----------------------------------------------------------------------------------------


def build(folder: Path, *options: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    program = folder / "poll"
    command = [compiler, "-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror"]
    command += ["-fsanitize=thread", "-pthread", f"-I{ROOT}", str(SOURCE), "-o", str(program)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)
    if "libtsan" in done.stderr:
        pytest.skip("this g++ has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize(
    ("exchanges", "seconds"),
    [(300_000, 5), pytest.param(10_000_000, 900, marks=pytest.mark.nightly)],
)
def test_exchanges_without_a_race(tmp_path: Path, exchanges: int, seconds: int) -> None:
    program = build(tmp_path)
    done = subprocess.run(
        [program, str(exchanges), str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    answers, losses, dropped, wrong = map(int, done.stdout.split())
    # On a busy machine it ends early.
    assert answers > losses > dropped
    assert answers + losses <= exchanges
    assert wrong == 0


def test_a_race_is_noticed(tmp_path: Path) -> None:
    program = build(tmp_path, "-DGRANT_WHILE_BUSY")
    done = subprocess.run([program, "300000", "5"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "data race" in done.stderr
