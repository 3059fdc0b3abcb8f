"""Row 30 of the fault contract: releases of different versions in one cluster. Each test quotes its row.

The "next release" is this one with one more protocol version: only the negotiation can be tested in advance.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chaos_world import ChaosWorld
from eaas import versions
from eaas.types import MemberState
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess
from refusals import refusal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
NOW = versions.CONTROL_PLANE.newest
NEXT = versions.Versions(NOW, NOW + 1)
UNKNOWN = versions.Versions(NOW + 6, NOW + 6)


def speaking(monkeypatch: pytest.MonkeyPatch, spoken: versions.Versions) -> None:
    """Processes started from now on, and clients in this process, speak these versions."""
    monkeypatch.setenv("SPOKEN_VERSIONS", f"{spoken.oldest}-{spoken.newest}")
    for contract in ("CONTROL_PLANE", "SLOTS"):
        monkeypatch.setattr(versions, contract, spoken)


def test_row_30_releases_with_other_versions_in_a_rolling_upgrade(
    chaos: ChaosWorld, monkeypatch: pytest.MonkeyPatch, free_port: int, tmp_path: Path
) -> None:
    """Row 30: rolling upgrade N / N+1: negotiated, 0 failed calls. One process after another."""
    monitor = {"port": free_port, "data_dir": str(tmp_path / "monitor")}
    cluster = chaos.start(settings={"monitor": monitor})
    old = chaos.join(cluster, dispatch="weights")

    def upgrade(name: str, how: signal.Signals) -> None:
        child = cluster.children[name]
        os.kill(child.pid, how)
        assert child.reap(60)
        cluster.restart(name)

    def serves(name: str) -> None:
        batches = chaos.throttle(name).batches[1]
        old.until(lambda: chaos.throttle(name).batches[1] > batches + 5)

    with chaos.calling(old) as calls:
        with monkeypatch.context() as patch:
            patch.setenv("SPOKEN_VERSIONS", f"{NEXT.oldest}-{NEXT.newest}")
            # First a server of the next release with this release's monitor and client.
            upgrade(SERVERS[0], signal.SIGTERM)
            serves(SERVERS[0])
            upgrade("monitor", signal.SIGKILL)
            upgrade(SERVERS[1], signal.SIGTERM)
            serves(SERVERS[1])
            upgrade("balancer", signal.SIGKILL)
            upgrade(SERVERS[2], signal.SIGTERM)
            serves(SERVERS[2])
        old.wait(3)
        # A client of the next release next to the old one.
        with monkeypatch.context() as patch:
            speaking(patch, NEXT)
            new = chaos.join(cluster)
        with chaos.calling(new):
            calls.wait_more(20)
    members = {m.id: m for m in old.cluster.session.ask_members(5.0).values()}
    assert all(members[name].state is MemberState.SERVING for name in SERVERS)
    assert [members[name].incarnation for name in SERVERS] == [2, 2, 2]


def test_row_30_an_unknown_major_version_is_refused_at_the_handshake(
    chaos: ChaosWorld, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Row 30: unknown major version: refused at the handshake."""
    cluster = chaos.start(servers=2, redundancy=2)
    client = chaos.join(cluster, 2)
    server = cluster.children[SERVERS[0]]
    arguments = ["late-server" if word == SERVERS[0] else word for word in server.arguments]
    with chaos.calling(client):
        with monkeypatch.context() as patch:
            patch.setenv("SPOKEN_VERSIONS", f"{UNKNOWN.oldest}-{UNKNOWN.newest}")
            late = ChildProcess(
                "late-server", arguments, tmp_path, module="faulty_server", fork_server=fork_server
            )
        why = f"in version {UNKNOWN.newest} of the control plane, this monitor speaks version {NOW}"
        assert why in refusal(late)
        # A client with another slot version: it becomes a member but is granted no slots.
        with monkeypatch.context() as patch:
            patch.setattr(versions, "SLOTS", UNKNOWN)
            refused = chaos.join(cluster, 0).cluster
            why = f"in version {UNKNOWN.newest} of the slots, this server speaks version {NOW}"
            client.until(lambda: why in refused.missing())
            refused.close()
