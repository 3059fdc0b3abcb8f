"""Low-priority threads, without effect on others."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from expert_server.weights.background import compute_alone, step_back


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("begin", [step_back, compute_alone])
def test_only_the_thread_itself_has_low_priority(begin: Callable[[], None]) -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=begin) as thread:
        assert thread.submit(niceness).result() == min(19, before + 10)
        with ThreadPoolExecutor(1, initializer=begin) as nested:
            assert nested.submit(niceness).result() <= 19
    assert niceness() == before
    with ThreadPoolExecutor(1) as another:
        assert another.submit(niceness).result() == before


def test_torch_computes_with_one_thread_there_and_with_all_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1, initializer=compute_alone) as thread:
            assert thread.submit(torch.get_num_threads).result() == 1
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
