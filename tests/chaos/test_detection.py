"""Detection time of a killed member by its silence alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from control_plane import Observer, monitor_process
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(300)]
SERVING, DEAD = MemberState.SERVING, MemberState.DEAD
W_S = 2.0
# Delay of the news on a busy machine.
NEWS_S = 1.0

MEMBER = """
import sys, time
from eaas.membership.session import MemberSession, Report
from eaas.types import Member, MemberState, Role
name = sys.argv[2]
member = Member(name, Role.EXPERT_SERVER, 1, name, "", MemberState.SERVING)
session = MemberSession(sys.argv[1], member, report=lambda: Report(MemberState.SERVING))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_member_is_dead_to_everybody_within_w(cleanup: ExitStack) -> None:
    """Default settings, heartbeats alone. `-s` prints the times."""
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
    # Fewer than half of the members: the monitor must not doubt itself.
    for name in ("m0", "m3", "m5"):
        time.sleep(dice.uniform(0.0, 0.9))
        watcher.wait(lambda v, name=name: v.members[name].state is SERVING)
        members[name].kill()
        killed_at = time.monotonic()
        view = watcher.wait(lambda v, name=name: v.members[name].state is DEAD)
        seconds.append(view.heard_at - killed_at)
    print(f"DEAD after {', '.join(f'{s:.3f}' for s in seconds)} s")
    # A member is declared dead after a lease of silence, and its last heartbeat may be 0.9 s old, or older if
    # the machine delayed its sender.
    assert min(seconds) > 0.5
    assert max(seconds) < W_S + NEWS_S
    alive = {name: view.members[name].state for name in members if name not in ("m0", "m3", "m5")}
    assert set(alive.values()) == {SERVING}
