"""Names that no member can have, and a monitor that refuses them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from eaas.config import MonitorConfig
from eaas.errors import ClusterError
from eaas.member_ids import ID
from eaas_cli.chaos.faults import hostile_name, is_refused
from monitor.main import Monitor


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    running = Monitor(MonitorConfig())
    yield running
    running.stop()


def test_every_hostile_name_is_refused(monitor: Monitor) -> None:
    dice = random.Random(3)
    for name in {hostile_name(dice) for _ in range(100)}:
        assert not ID.fullmatch(name), name
        assert is_refused(monitor.address, name)
    with pytest.raises(ClusterError, match="registered a server as 'harmless'"):
        is_refused(monitor.address, "harmless")
    monitor.stop()
    assert not is_refused(monitor.address, "", within_s=0.2)
