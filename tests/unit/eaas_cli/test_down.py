"""`eaas down` ends the cluster where it runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from eaas import user_files
from eaas.errors import ClusterError, ConfigError
from eaas.net.server_records import started_at
from eaas_cli.commands import down
from eaas_cli.local.running_clusters import Up
from eaas_cli.ray import connection
from service_box import free_port


@pytest.fixture
def launchers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two launchers that serve, at ports 1 and 2."""
    code = "import signal, time; signal.signal(15, lambda *_: exit(0)); print(1, flush=True); time.sleep(60)"
    words = [sys.executable, "-c", code]
    found = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    for port, launcher in enumerate(found, 1):
        assert launcher.stdout is not None
        launcher.stdout.read(1)
        pid = launcher.pid
        up = Up(f"http://127.0.0.1:{port}", "", pid, started_at(pid), float(port), "m")
        user_files.write(f"up-{port}", asdict(up))
    yield found
    for launcher in found:
        launcher.kill()
        launcher.communicate()


def test_of_several_clusters_the_named_one_gets_sigterm_and_is_waited_for(
    launchers: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"2 clusters of yours run: .*:1 .m., .*:2 .m."):
        down.down()
    with pytest.raises(ClusterError, match=r"no `eaas up` of yours serves at 127.0.0.1:3"):
        down.down(endpoint="127.0.0.1:3")
    with pytest.raises(ConfigError, match="leave out --on ray"):
        down.down("ray", "127.0.0.1:1")
    down.down(endpoint="127.0.0.1:1")
    assert (launchers[0].wait(0), launchers[1].poll()) == (0, None)
    assert capsys.readouterr().err.endswith("cluster: http://127.0.0.1:1 (m)\n")
    down.down()
    assert launchers[1].wait(0) == 0
    with pytest.raises(ClusterError, match="no `eaas up` of yours"):
        down.down()


def test_on_ray_it_asks_the_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(down, "down_on_ray", lambda: asked.append("ray"))
    down.down("ray")
    assert asked == ["ray"]


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"expert-as-a-service\[ray\]"), connection.connected():
        pass


def test_an_address_without_a_ray_cluster_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray", reason="needs the extra `ray`")
    silent = f"127.0.0.1:{free_port()}"
    for address, error, why in (
        ("ray://h:10001", ConfigError, "ray job submit"),
        (silent, ClusterError, f"no Ray cluster at {silent}"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(error, match=why), connection.connected():
            pass
