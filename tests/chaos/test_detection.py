"""How soon a server that was killed is known to be dead: by its silence, and by whoever waits for it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane import Observer, monitor_process
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVING, DEAD = MemberState.SERVING, MemberState.DEAD
W_S = 2.0
# Of a busy machine.
NEWS_S = 1.0
ATTEMPT_S = 0.15

MEMBER = """
import sys, time
from eaas.session import MemberSession, Report
from eaas.types import Member, MemberState, Role
name = sys.argv[2]
member = Member(name, Role.EXPERT_SERVER, 1, name, "", MemberState.SERVING)
session = MemberSession(sys.argv[1], member, report=lambda: Report(MemberState.SERVING))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_killed_member_is_dead_to_everybody_within_w(cleanup: ExitStack) -> None:
    """With the default settings and nothing but heartbeats. `-s` shows how long it took."""
    _, address = monitor_process(cleanup)
    watcher = Observer(address)
    cleanup.callback(watcher.session.close)
    members = {}
    for i in range(7):
        command = [sys.executable, "-c", MEMBER, address, f"m{i}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        cleanup.enter_context(process)
        cleanup.callback(process.kill)
        members[f"m{i}"] = process
    for process in members.values():
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
    dice = random.Random(6)
    seconds = []
    # Never most of them at a time.
    for name in ("m0", "m3", "m5"):
        time.sleep(dice.uniform(0.0, 0.9))
        watcher.wait(lambda v, name=name: v.members[name].state is SERVING)
        members[name].kill()
        killed_at = time.monotonic()
        view = watcher.wait(lambda v, name=name: v.members[name].state is DEAD)
        seconds.append(view.heard_at - killed_at)
    print(f"DEAD after {', '.join(f'{s:.3f}' for s in seconds)} s")
    # Nobody is declared dead for less than a lease of silence, and a heartbeat is at most 0.9 s old.
    assert min(seconds) > 0.9
    assert max(seconds) < W_S + NEWS_S
    alive = {name: view.members[name].state for name in members if name not in ("m0", "m3", "m5")}
    assert set(alive.values()) == {SERVING}


def test_a_host_that_vanishes_costs_a_call_one_attempt(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
    through_proxies: Callable[..., Any],
) -> None:
    """SIGKILL, and nothing is heard of the host: no broken stream, no pidfd. The client's own time is what
    it goes by, long before the monitor knows.
    """
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2)
    with through_proxies() as proxies:
        client = join(cluster, 2, transport="grpc", dispatch="round_robin", hedge_share=0.0)
    told = story(cluster)
    expected_TH = client.layer()
    victim = "expert-server-0"
    proxies[cluster.children[victim].address].cut(up=True, down=True)
    os.kill(cluster.children[victim].pid, signal.SIGKILL)
    killed_at = time.monotonic()
    failed_over_at = None
    dead_at = None
    while dead_at is None:
        called_at = time.monotonic()
        assert torch.allclose(client.layer(), expected_TH, rtol=1e-4, atol=1e-5)
        # An attempt's time is 0.15 s; the layer's budget is 10 s.
        assert time.monotonic() - called_at < ATTEMPT_S + NEWS_S
        if failed_over_at is None and client.count("eaas_failovers_total", reason="timeout"):
            failed_over_at = time.monotonic()
        dead_at = told.when(victim, 1, DEAD)
    assert failed_over_at is not None
    print(
        f"elsewhere after {failed_over_at - killed_at:.3f} s, DEAD after {dead_at - killed_at:.3f} s"
    )
    assert failed_over_at - killed_at < ATTEMPT_S + NEWS_S
    # A DEAD server that owes an overdue answer is let go of.
    client.until(lambda: client.cluster.view().usable_S().sum() == 1)
    assert torch.allclose(client.layer(), expected_TH, rtol=1e-4, atol=1e-5)
