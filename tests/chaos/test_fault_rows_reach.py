"""Row 40 of the fault contract: servers that clients cannot reach."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chaos_world import ChaosWorld, Client
from completions import Load
from eaas_cli.chaos.child import VARIABLE
from eaas_cli.endpoint import fetch_status
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, stop_all
from waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

STRANGER = "stranger"
# How long answers are checked after a good server was killed.
ASKED_S = 3.0
GRACE_S = 3.0


@pytest.fixture
def for_all(checkpoint: Callable[..., Path]) -> Iterator[Path]:
    """A checkpoint that every user of the machine may read."""
    directory = Path(tempfile.mkdtemp(prefix="eaas-reach-"))
    directory.chmod(0o755)
    model = directory / "model"
    shutil.copytree(checkpoint(), model)
    for file in model.iterdir():
        file.chmod(0o644)
    yield model
    shutil.rmtree(directory)


@pytest.fixture(
    params=["another user", pytest.param("another container", marks=pytest.mark.nightly)]
)
def stranger(
    request: pytest.FixtureRequest,
    for_all: Path,
    tmp_path: Path,
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], ChildProcess]]:
    """Start an expert server whose shared memory this user's processes cannot attach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if request.param == "another user":
        module = "other_user"
        # By default no other user's processes may join.
        monkeypatch.setenv("EAAS_SECURITY__INSECURE", "true")
    else:
        module = "eaas_cli.chaos.child"
    with ExitStack() as stack:

        def start(monitor_address: str) -> ChildProcess:
            role = ("expert-server", "--id", STRANGER, "--model", str(for_all))
            more = ("--join", monitor_address, "--kernel", "reference", "--threads", "1")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, json.dumps({"processes": True}))
                child = ChildProcess(
                    STRANGER, (*role, *more), tmp_path, module=module, fork_server=fork_server
                )
            stack.callback(stop_all, [child])
            return child

        yield start


def test_row_40_a_server_that_the_client_cannot_attach_gets_no_experts(
    for_all: Path,
    stranger: Callable[[str], ChildProcess],
    start_cluster: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 40: shm, a server of another user or container joins, then a good server is killed: every answer is
    right.
    """
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__TRANSPORT", "shm")
    cluster = start_cluster(for_all, servers=3, redundancy=2)
    stranger(cluster.monitor_address)

    def row() -> dict[str, Any]:
        members = {m["id"]: m for m in fetch_status(cluster.endpoint)["members"]}
        found: dict[str, Any] = members.get(STRANGER, {})
        return found

    reasons = eventually(lambda: row().get("unreachable"))
    (why,) = reasons.values()
    assert "shm" in why
    assert "--transport auto" in why
    log = tmp_path / "logs-0" / "balancer.log"
    said = eventually(lambda: [line for line in log.read_text().splitlines() if STRANGER in line])
    (client,) = reasons
    assert len(said) == 1
    assert client in said[0]
    assert why in said[0]
    with Load(cluster.endpoint, 1, 8).running():
        cluster.children["expert-server-1"].signal(signal.SIGKILL)
        time.sleep(ASKED_S)
        eventually(lambda: fetch_status(cluster.endpoint)["coverage"]["min_replicas"] >= 1)
        assert row()["experts"] == 0
        assert row()["state"] == "JOINING"


def test_row_40_a_client_that_is_cut_off_gets_replicas_and_the_other_keeps_its_own(
    chaos: ChaosWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 40: two clients, one is cut from a server: both get every answer, nothing moves for the one that is
    well; a short cut moves nothing; when the server is reached again the replicas go.
    """
    monkeypatch.setenv("EAAS_BALANCER__DEAD_GRACE_S", str(GRACE_S))
    # A busy machine must not make a client DEAD.
    monkeypatch.setenv("EAAS_MONITOR__LEASE_S", "4")
    cluster = chaos.start(servers=3, redundancy=2)
    well = chaos.join(cluster, 3, transport="grpc")
    address = str(cluster.children["expert-server-2"].address)
    with chaos.through_proxies() as proxies:
        cut = chaos.join(cluster, 3, transport="grpc")
        before, first = well.cluster.placement, well.cluster.view().connections[2]
        with chaos.calling(well, cut):
            # A short cut: the connection ends and another is opened, perhaps before anybody looks.
            lost = cut.cluster.view().connections[2]
            proxies[address].heal()
            eventually(lambda: cut.cluster.view().connections[2] is not lost)
            eventually(lambda: "expert-server-2" in connected(cut))
            time.sleep(GRACE_S + 1)
            assert well.cluster.placement.epoch == before.epoch

            proxies[address].close()
            eventually(lambda: "expert-server-2" not in connected(cut))
            after = eventually(lambda: newer(well, before) and newer(cut, before))
            assert after.servers == before.servers
            assert (after.holds_LSE >= before.holds_LSE).all()
            ours = [s for s, name in enumerate(after.servers) if name != "expert-server-2"]
            assert (after.holds_LSE[:, ours].sum(axis=1) >= 2).all()
            # The client's next attempt goes through a new proxy.
            del proxies[address]
            eventually(lambda: "expert-server-2" in connected(cut))
            eventually(lambda: np.array_equal(well.cluster.placement.holds_LSE, before.holds_LSE))

            last = well.cluster.placement
            proxies[address].close()
            eventually(lambda: newer(well, last) and newer(cut, last))
            cluster.children["expert-server-0"].signal(signal.SIGKILL)
            time.sleep(1)
        # The healthy client never lost its connection to the server.
        assert well.cluster.view().connections[2] is first


def connected(client: Client) -> set[str]:
    view = client.cluster.view()
    return {s for s, usable in zip(view.placement.servers, view.usable_S(), strict=True) if usable}


def newer(client: Client, before: Any) -> Any:
    now = client.cluster.placement
    return now if now.epoch > before.epoch else None
