"""How the processes of `eaas up` share the cores."""

from __future__ import annotations

import os
import threading

import pytest

from eaas.cores import bind_thread, refuse_other_core, server_core, threads_on_any_core
from eaas.errors import ConfigError


def test_servers_beside_vllm_alternate_between_two_cores() -> None:
    assert [server_core("vllm", [2, 5], i) for i in range(4)] == [2, 5, 2, 5]


@pytest.mark.parametrize(
    ("engine", "cores"), [("transformers", [0, 1]), ("vllm", [0]), ("vllm", [0, 1, 2])]
)
def test_others_are_free(engine: str, cores: list[int]) -> None:
    assert server_core(engine, cores, 0) is None


def test_only_the_calling_thread_is_bound() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    bound: list[set[int]] = []

    def bind() -> None:
        bind_thread(core)
        bound.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert bound == [{core}]
    assert os.sched_getaffinity(0) == before


def test_an_unknown_core_is_refused() -> None:
    refuse_other_core(-1)
    refuse_other_core(min(os.sched_getaffinity(0)))
    with pytest.raises(ConfigError, match="core: 4095"):
        refuse_other_core(4095)


def test_threads_of_a_bound_process_may_use_all_cores() -> None:
    """Those that start in the block, and only those."""
    every = os.sched_getaffinity(os.getppid())
    seen: list[set[int]] = []

    def note() -> None:
        seen.append(os.sched_getaffinity(0))

    def bound() -> None:
        bind_thread(min(every))
        with threads_on_any_core():
            inside = threading.Thread(target=note)
            inside.start()
            inside.join()
        outside = threading.Thread(target=note)
        outside.start()
        outside.join()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == [every | {min(every)}, {min(every)}]
