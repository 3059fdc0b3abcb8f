"""`eaas up`: scaling, then kills in the control plane. The tests share a cluster, in order."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def two(shell_model: Path, start_up: Callable[..., Any]) -> Iterator[Any]:
    running = start_up(shell_model, "--servers", "2")
    running.wait_serving()
    yield running
    running.end()


def test_scale_and_drain(
    two: Any, shell_model: Path, eager_text: str, fork_server: ForkServer
) -> None:
    """Up, down and by name, while long answers stream."""
    up, endpoint = two, two.endpoint

    def run(*command: str) -> str:
        done = up.home.run(*command, "--endpoint", endpoint, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"cluster: {endpoint} ({shell_model.name})\n"
        return done.stdout

    def servers() -> set[str]:
        members = up.status()["members"]
        return {
            m["id"]
            for m in members
            if m["role"] == "expert-server" and m["state"] not in ("DEAD", "LEFT")
        }

    texts, over = [], threading.Event()

    def ask() -> None:
        while not over.wait(0.3):
            texts.append(up.stream())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        run("scale", "4")
        assert servers() == {f"expert-server-{i}" for i in range(4)}
        # DRAINING may be over between two polls.
        assert run("scale", "3").endswith("expert-server-3: LEFT\n")
        assert servers() == {f"expert-server-{i}" for i in range(3)}
        run("drain", "expert-server-0")
        assert servers() == {"expert-server-1", "expert-server-2"}
        # The launcher counts servers that others started, under any name.
        monitor = next(m for m in up.status()["members"] if m["role"] == "monitor")["address"]
        words = ("expert-server", "--id", "by-hand", "--join", monitor)
        arguments = (*words, "--model", str(shell_model))
        by_hand = ChildProcess("by-hand", arguments, None, fork_server=fork_server)
        try:
            wait_ready([by_hand], 60)
            run("scale", "4")
            assert servers() == {"by-hand", *(f"expert-server-{i}" for i in range(3))}
            run("drain", "by-hand")
            assert by_hand.reap(20)
        finally:
            by_hand.signal(signal.SIGKILL)
            by_hand.reap(10)
        assert servers() == {f"expert-server-{i}" for i in range(3)}
    finally:
        over.set()
        thread.join()
    assert set(texts) == {eager_text}
    assert up.status()["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 1}
    refused = up.home.run("drain", "nobody", "--endpoint", endpoint)
    assert refused.returncode == 2
    cluster, error = refused.stderr.splitlines()
    assert cluster.startswith(f"cluster: {endpoint} ")
    assert "'nobody' is no live expert server" in error


def test_a_killed_fork_server_is_restarted(two: Any, eager_text: str) -> None:
    """Its children survive, and the next test needs a fork."""
    up = two
    before = {m["id"]: m["pid"] for m in up.status()["members"] if m["state"] == "SERVING"}
    (pid,) = [pid for pid, line in up.home.processes().items() if "fork_server_process" in line]
    assert up.stream(5, lambda: os.kill(pid, signal.SIGKILL)) == eager_text
    up.wait_output(rf"fork-server \(pid {pid}\) was ended by SIGKILL; (the processes .* continue)")
    up.wait_output("fork-server .* (serves again)")
    members = up.status()["members"]
    assert before == {m["id"]: m["pid"] for m in members if m["state"] == "SERVING"}


def test_a_killed_frontend_is_restarted(two: Any, eager_text: str) -> None:
    """It has the same address and id as before."""
    up = two
    before = up.member("frontend")
    with pytest.raises(httpx.HTTPError):
        up.stream(5, lambda: os.kill(before["pid"], signal.SIGKILL))
    up.wait_output(rf"frontend \(pid {before['pid']}\) was ended by SIGKILL; (.* lost);")
    pid = int(up.wait_output(r"frontend \(pid (\d+)\) serves again"))
    now = up.member("frontend")
    assert now == before | {"pid": pid, "incarnation": before["incarnation"] + 1, "in_flight": 0}
    assert up.stream() == eager_text


def test_a_killed_attention_client_is_restarted_and_its_stream_goes_on(
    two: Any, eager_text: str
) -> None:
    up = two
    before = up.member("attention-client-0")
    assert up.stream(5, lambda: os.kill(before["pid"], signal.SIGKILL)) == eager_text
    up.wait_output(rf"attention-client-0 \(pid {before['pid']}\) was ended by SIGKILL; (.* go on)")
    pid = int(up.wait_output(r"attention-client-0 \(pid (\d+)\) serves again"))
    now = up.member("attention-client-0")
    assert (now["pid"], now["incarnation"]) == (pid, before["incarnation"] + 1)


def settled(up: Any) -> set[str]:
    """The ids of the members that serve, or none while a member may change its state, or will return."""
    members = up.status()["members"]
    if any(member["state"] not in ("SERVING", "LEFT") for member in members):
        return set()
    return {member["id"] for member in members if member["state"] == "SERVING"}


@pytest.mark.parametrize("name", ["monitor", "balancer"])
def test_the_printed_line_restarts_the_control_plane(two: Any, eager_text: str, name: str) -> None:
    """All members register again, and the process belongs to the cluster."""
    up = two
    # On a busy machine a member may be SUSPECT or DEAD for a moment, or have just begun again.
    serving = up.until(lambda: settled(up))
    before = up.member(name)
    os.kill(before["pid"], signal.SIGKILL)
    line = up.wait_output(rf"{name} \(pid {before['pid']}\) ended; start it again with:\n  (.+)\n")
    returned = up.paste(line)
    threading.Thread(target=returned.wait, daemon=True).start()

    def back() -> bool:
        assert returned.returncode is None, f"it ended with code {returned.returncode}"
        # One document: just after a monitor's end, the frontend still shows its last members.
        pids = {m["id"]: m["pid"] for m in up.status()["members"] if m["state"] == "SERVING"}
        return pids.keys() == serving and pids[name] == returned.pid

    up.until(back)
    if name == "monitor":
        assert up.member(name)["address"] == before["address"]
    up.wait_output(
        rf"{name} \(pid {returned.pid}\) was started by hand; (it ends with this cluster)"
    )
    assert up.stream() == eager_text


def test_serving_continues_without_a_monitor(two: Any) -> None:
    up, endpoint = two, two.endpoint

    def view_age_s() -> float:
        metrics = httpx.get(f"{endpoint}/metrics").text
        return float(re.findall(r"^eaas_view_age_seconds (\S+)$", metrics, re.MULTILINE)[0])

    os.kill(up.member("monitor")["pid"], signal.SIGKILL)
    before_s = view_age_s()
    assert before_s < 3
    text = up.stream()
    up.until(lambda: view_age_s() > before_s + 3)
    assert up.stream() == text
    # The cluster still ends with its terminal, with the balancer that was started by hand.
    up.signal(signal.SIGHUP)
    up.process.wait(10)
    up.home.assert_nothing_left()
