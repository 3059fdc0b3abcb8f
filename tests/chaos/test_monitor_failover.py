"""Two monitors: the leader is killed under load, or ZooKeeper is unreachable for a while."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos_world import ChaosWorld
from eaas.types import MemberState
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready
from zookeeper_box import ZooKeeperBox, missing

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SESSION_S = 2.0
# A standby notices, takes the lead, and members return: generous, for a busy machine.
MARGIN_S = 20.0
MONITORS = ("monitor", "monitor-2")


class TwoMonitors(LocalCluster):
    """A cluster whose members know two monitors."""

    def _spawn(self, name: str, *arguments: str) -> ChildProcess:
        child = super()._spawn(name, *arguments)
        if name == MONITORS[0]:
            wait_ready([child], 60)
            wait_ready([super()._spawn(MONITORS[1], "monitor")], 60)
        return child

    @property
    def monitor_address(self) -> str:
        children = [self.children[name] for name in MONITORS if name in self.children]
        return ",".join(child.address or "" for child in children)

    @monitor_address.setter
    def monitor_address(self, _first: str) -> None:
        """Ignored: the address names both monitors."""


@pytest.fixture
def zookeeper(tmp_path: Path) -> Iterator[ZooKeeperBox]:
    box = ZooKeeperBox(tmp_path / "zookeeper")
    yield box
    box.stop()


@pytest.fixture
def cluster(
    checkpoint: Callable[..., Path],
    zookeeper: ZooKeeperBox,
    fork_server: ForkServer,
    tmp_path: Path,
) -> Iterator[TwoMonitors]:
    settings = tmp_path / "cluster.yaml"
    settings.write_text(
        f"monitor: {{store: zookeeper, zookeeper_hosts: '{zookeeper.hosts}', "
        f"zookeeper_session_s: {SESSION_S}}}\n"
    )
    cluster = TwoMonitors(
        checkpoint(),
        servers=2,
        clients=0,
        config_file=settings,
        log_dir=tmp_path / "logs",
        fork_server=fork_server,
    )
    with cluster:
        yield cluster


def test_the_leading_monitor_is_killed_under_load(cluster: TwoMonitors, chaos: ChaosWorld) -> None:
    client, second = chaos.join(cluster, servers=2), chaos.join(cluster, servers=2)
    session = client.cluster.session
    servers = ("expert-server-0", "expert-server-1")

    def incarnations() -> dict[str, int]:
        return {n: m.incarnation for n, m in session.view.members.items() if n != "monitor"}

    def leader() -> str:
        address = session.view.members["monitor"].address
        return next(n for n in MONITORS if cluster.children[n].address == address)

    before, history = incarnations(), session._fold.position.life
    assert set(before) >= {*servers, "balancer"}
    killed = leader()
    (other,) = set(MONITORS) - {killed}
    with chaos.calling(client, second) as calls:
        calls.wait_more(20)
        began = time.monotonic()
        cluster.children[killed].signal(signal.SIGKILL)
        client.until(lambda: leader() == other and session.view.age_s(time.monotonic()) < 1.0)
        took = time.monotonic() - began
        # Until every member has reported to the new leader.
        client.until(
            lambda: all(
                m.silence_s < 1.5 and m.state is MemberState.SERVING
                for name, m in (session.ask_members(5.0) or {}).items()
                if name in (*servers, "balancer")
            )
        )
        calls.wait_more(20)
    print(
        f"takeover in {took:.2f} s (session {SESSION_S:g} s); {len(calls.seconds)} calls, none failed, "
        f"the longest {max(calls.seconds):.3f} s"
    )
    assert took < SESSION_S + MARGIN_S
    assert incarnations() == before
    assert session._fold.position.life == history

    # The new leader detects a death and grants a new incarnation.
    cluster.children[servers[0]].signal(signal.SIGKILL)
    client.until(lambda: session.view.members[servers[0]].state is MemberState.DEAD)
    cluster.restart(servers[0])
    client.until(lambda: session.view.members[servers[0]].state is MemberState.SERVING)
    assert session.view.members[servers[0]].incarnation == before[servers[0]] + 1
    # The former leader, started again, stands by.
    cluster.restart(killed)
    client.layer()


@pytest.mark.nightly
def test_zookeeper_is_away_for_a_while(
    cluster: TwoMonitors, zookeeper: ZooKeeperBox, chaos: ChaosWorld
) -> None:
    client = chaos.join(cluster, servers=2)
    session = client.cluster.session
    before = {n: m.incarnation for n, m in session.view.members.items() if n != "monitor"}
    with chaos.calling(client) as calls:
        zookeeper.pause()
        client.until(lambda: session.view.age_s(time.monotonic()) > 3 * SESSION_S)
        zookeeper.resume()
        client.until(lambda: session.view.age_s(time.monotonic()) < 1.0)
        calls.wait_more(20)
    members = session.ask_members(5.0) or {}
    assert {n: members[n].incarnation for n in before} == before
    # The client itself, which has no model, never leaves JOINING.
    doubted = (MemberState.SUSPECT, MemberState.DEAD)
    assert not [name for name in before if members[name].state in doubted]
