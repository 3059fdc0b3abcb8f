"""The control plane with certificates that are rotated meanwhile, from an operator's call to the servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from balancer.autoscaler.live import LiveAutoscaler
from balancer.main import Balancer
from control_plane import DRAINING, Plane, eventually
from eaas.config import AutoscalerConfig, BalancerConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.control_plane.placement_watch import PlacementWatch
from eaas.errors import ClusterError
from eaas.net.tls import Identity
from eaas.types import Placement
from eaas_cli.certificates import issue_again
from tls_world import certificates

pytestmark = pytest.mark.integration


def test_from_an_operators_call_to_the_servers(tmp_path: Path, plane: Plane) -> None:
    directory = certificates(tmp_path / "tls")
    monitor = plane.monitor(tls=Identity(directory, "monitor"))
    config = BalancerConfig(expected_servers=2, redundancy=1, step_s=0.1)
    own = Identity(directory, "balancer")
    balancer = Balancer(config, monitor.address, on_stopping=lambda: None, tls=own)
    plane.stack.callback(balancer.stop)
    servers = {}
    for name in ("s1", "s2"):
        tls = Identity(directory, "expert-server")
        servers[name] = plane.server(monitor.address, name, tls=tls)
    placements: list[Placement] = []
    watch = PlacementWatch(
        lambda: balancer.address, placements.append, Identity(directory, "attention-client")
    )
    plane.stack.callback(watch.close)
    eventually(lambda: placements)
    # From here on every new connection shows another certificate.
    issue_again(directory, days=1)
    operator = Identity(directory, "operator")
    with BalancerClient(balancer.address, operator) as client:
        client.pin(0, 1, "s2")
        eventually(lambda: 1 in servers["s2"].held[0])

        def has_seen_load() -> bool:
            for server in servers.values():
                server.tokens_LE += 100
            return bool(client.hotness().steps)

        eventually(has_seen_load)
    with BalancerClient(balancer.address, Identity(directory, "expert-server")) as client:
        assert client.placement() is not None
        with pytest.raises(ClusterError, match="is for operator, not for expert-server"):
            client.unpin(0, 1, "s2")
    with (
        BalancerClient(balancer.address, Identity(directory, "attention-client")) as client,
        pytest.raises(ClusterError, match="not for attention-client"),
    ):
        client.drain("s1")
    assert servers["s1"].state is not DRAINING
    with BalancerClient(balancer.address, operator) as client:
        with pytest.raises(ClusterError, match="nobody starts servers"):
            client.scale(3)
        client.drain("s1")
    eventually(lambda: servers["s1"].state is DRAINING)
    eventually(lambda: not servers["s1"].experts)
    autoscaler = LiveAutoscaler(AutoscalerConfig(), monitor.address, dry_run=True, tls=operator)
    plane.stack.callback(autoscaler.close)
    assert autoscaler.look()
    assert balancer.failure is None
