"""How the processes of `eaas up` share the cores."""

from __future__ import annotations

import os
import threading

import pytest

from eaas.cores import bind_thread, refuse_other_core, server_core
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
