"""Recording and replay of a queue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import strategy_names
from attention_client.scheduler.recording import QueueSettings, Recorder, read_recording
from eaas.errors import ConfigError
from simulator.caps.replay import replay

LOADS = 8


def live(path: Path, name: str, seed: int, steps: list[int]) -> list[list[int]]:
    """Record a queue; return its choices."""
    rng = np.random.default_rng(seed)
    settings_ = QueueSettings(name, LOADS, batch_size=3, window_size=7, seed=4)
    now = iter(range(10_000))
    with path.open("w") as file:
        queue = settings_.queue(Recorder(file, lambda: next(now) / 7))
        waiting: list[int] = []
        choices = []
        for step in [2, 4, *steps]:
            for _ in range(step):
                waiting.append(queue.add(rng.random(LOADS) * 3))
            if step == 0 and len(waiting) > 2:
                queue.remove(waiting.pop(1))
            if waiting:
                running_E = rng.random(LOADS) if step % 2 else None
                choices.append(queue.take(3, running_E))
                waiting = [ticket for ticket in waiting if ticket not in choices[-1]]
    return choices


@pytest.mark.parametrize("name", strategy_names())
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.integers(0, 6), max_size=30))
def test_a_replay_makes_the_same_choices(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int, steps: list[int]
) -> None:
    path = tmp_path_factory.mktemp("recording") / "queue.jsonl"
    choices = live(path, name, seed, steps)
    found = replay(path)
    assert found.recorded == choices
    assert [choice.tickets for choice in found.choices] == choices
    assert found.same == len(choices)
    other = replay(path, "fcfs")
    assert len(other.choices) == len(choices)
    tickets = [ticket for choice in other.choices for ticket in choice.tickets]
    assert tickets == sorted(tickets)


def test_a_different_choice_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "queue.jsonl"
    live(path, "greedy_variance", 1, [6] * 20)
    other = replay(path, "random")
    assert 0 < other.same < len(other.choices)
    assert other.requests == 126
    assert other.par > 1


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "queue.jsonl"
    live(path, "fcfs", 1, [3] * 5)
    whole = read_recording(path)[1]
    text = path.read_text()
    path.write_text(text[: text.rindex('"', 0, -2)])
    assert len(read_recording(path)[1]) == len(whole) - 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: ["{}", *lines[1:]], "line 1: 'record'"),
        (
            lambda lines: [lines[0].replace('"version": 2', '"version": 1')],
            "not a recording of this version",
        ),
        (lambda lines: [lines[0].replace('"seed": 4', '"seeds": 4')], "line 1.*seeds"),
        (lambda lines: [*lines[:3], "[1]", *lines[4:]], "line 4"),
        (lambda lines: [*lines[:3], "{", *lines[4:]], "line 4"),
        (lambda lines: [*lines, '{"at": 1, "add": 9, "load": [1.0]}'], "load has 1 numbers"),
        (lambda lines: [*lines, '{"add": 9}'], "'at'"),
    ],
)
def test_an_invalid_recording_is_named(tmp_path: Path, change, named: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "queue.jsonl"
    live(path, "fcfs", 1, [3] * 5)
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(ConfigError, match=named):
        read_recording(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"at": 1, "take": [1], "room": "all", "running": null}',
        '{"at": 1, "take": [1]}',
    ],
)
def test_an_impossible_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "queue.jsonl"
    live(path, "fcfs", 1, [3] * 5)
    path.write_text(path.read_text() + f'{{"at": 1, "add": 99, "load": {[1.0] * LOADS}}}\n{line}\n')
    lines = len(path.read_text().splitlines())
    with pytest.raises(ConfigError, match=rf"queue\.jsonl, line {lines}: "):
        replay(path)


def test_a_full_disk_ends_only_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "w") as file:
        settings_ = QueueSettings("fcfs", LOADS, batch_size=2, window_size=4)
        recorder = Recorder(file, lambda: 0.0)
        queue = settings_.queue(recorder)
        for _ in range(4):
            queue.add(np.ones(LOADS))
        assert queue.take(2) == [0, 1]
        assert queue.take(2) == [2, 3]
        assert len([r for r in caplog.records if "ends here" in r.message]) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_recording(tmp_path / "none.jsonl")
