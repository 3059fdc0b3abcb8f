from __future__ import annotations

import contextvars

import greenlet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.layer_call.turns import Task, in_turns, micro_batch_tokens, pause


def task(log: list[str], name: str, pauses: int, tokens: slice = slice(0, 1)) -> Task:
    def run() -> str:
        for step in range(pauses):
            log.append(f"{name}{step}")
            pause()
        log.append(f"{name} ends")
        return name

    return Task(run, tokens)


def test_tasks_alternate_at_each_pause() -> None:
    log: list[str] = []
    assert in_turns([task(log, "a", 2), task(log, "b", 2)]) == ["a", "b"]
    assert log == ["a0", "b0", "a1", "b1", "a ends", "b ends"]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_all_tasks_end_for_any_number_of_pauses(pauses: list[int]) -> None:
    log: list[str] = []
    names = [str(i) for i in range(len(pauses))]
    tasks = [task(log, name, n) for name, n in zip(names, pauses, strict=True)]
    assert in_turns(tasks) == names
    assert len(log) == sum(pauses) + len(pauses)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failing_task_ends_the_other(fails_at: int) -> None:
    log: list[str] = []

    def patient() -> None:
        try:
            while True:
                pause()
        except greenlet.GreenletExit:
            log.append("given up")
            raise
        finally:
            log.append("cleaned up")

    def broken() -> None:
        for _ in range(fails_at):
            pause()
        raise OSError("no replica")

    with pytest.raises(OSError, match="no replica"):
        in_turns([Task(patient, slice(0, 1)), Task(broken, slice(1, 2))])
    assert log == ["given up", "cleaned up"]


def test_a_failing_first_task_keeps_the_second_from_starting() -> None:
    def broken() -> None:
        raise OSError("no replica")

    def never() -> None:
        raise AssertionError("it ran")

    with pytest.raises(OSError, match="no replica"):
        in_turns([Task(broken, slice(0, 1)), Task(never, slice(1, 2))])


def test_each_task_has_its_own_tokens_and_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[tuple[slice | None, int]] = []

    def run(number: int) -> None:
        assert variable.get() == 7
        variable.set(number)
        pause()
        seen.append((micro_batch_tokens(), variable.get()))

    variable.set(7)
    in_turns([Task(lambda: run(1), slice(0, 3)), Task(lambda: run(2), slice(3, 4))])
    assert seen == [(slice(0, 3), 1), (slice(3, 4), 2)]
    assert variable.get() == 7
