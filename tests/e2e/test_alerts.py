"""The alert rules in a real Prometheus that scrapes a real cluster: they fire on kills, and resolve."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, stop_all
from prometheus_box import PrometheusBox, missing
from service_box import free_port
from waiting import eventually

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

FILES = Path(__file__).parents[2] / "deploy/prometheus"


def in_seconds(text: str) -> str:
    """The rules, with shorter durations and rate windows."""
    text = re.sub(r"^( +for:) \d+[sm]$", r"\1 1s", text, flags=re.MULTILINE)
    return re.sub(r"\[\d+m\]", "[10s]", text)


@pytest.fixture
def up(checkpoint: Callable[..., Path], start_up: Callable[..., Any], tmp_path: Path) -> Any:
    port = free_port()
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"balancer": {"metrics_port": port}}))
    running = start_up(checkpoint("qwen3_moe"), "--config", str(config))
    running.balancer_metrics = f"127.0.0.1:{port}"
    running.wait_serving()
    return running


@pytest.fixture
def prometheus(up: Any, tmp_path: Path) -> Iterator[PrometheusBox]:
    (tmp_path / "alerts.yaml").write_text(in_seconds((FILES / "alerts.yaml").read_text()))
    document = yaml.safe_load((FILES / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    addresses = {
        "eaas": up.endpoint.removeprefix("http://"),
        "eaas-balancer": up.balancer_metrics,
    }
    for job in document["scrape_configs"]:
        # In place of a lookup that only containers have.
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [addresses[job["job_name"]]]}]
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(document))
    box = PrometheusBox(tmp_path / "prometheus", config)
    yield box
    box.stop()


def generate(up: Any) -> None:
    body = {"prompt": "Once upon", "max_tokens": 30, "ignore_eos": True}
    response = httpx.post(f"{up.endpoint}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200


@pytest.fixture
def started(fork_server: ForkServer) -> Iterator[Callable[[Sequence[str]], None]]:
    """Start a role; the test ends it."""
    children: list[ChildProcess] = []

    def start(arguments: Sequence[str]) -> None:
        children.append(ChildProcess("again", arguments, None, fork_server=fork_server))

    yield start
    stop_all(children, at_once=True)


def kill(up: Any, name: str) -> list[str]:
    """Kill a process; return its arguments."""
    pid = up.member(name)["pid"]
    words = [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    assert words[1:3] == ["-m", "eaas_cli"]
    os.kill(pid, signal.SIGKILL)
    return words[3:]


def all_serve(up: Any) -> bool:
    servers = [m for m in up.status()["members"] if m["role"] == "expert-server"]
    return all(m["state"] == "SERVING" and Path(f"/proc/{m['pid']}").exists() for m in servers)


def test_alerts_fire_on_kills_and_resolve(
    up: Any, prometheus: PrometheusBox, started: Callable[[Sequence[str]], None]
) -> None:
    def scraped(query: str, wanted: float) -> bool:
        return prometheus.value(query) == wanted

    generate(up)
    eventually(lambda: scraped('count(up{job=~"eaas.*"} == 1)', 2))
    eventually(lambda: scraped("sum(eaas_expert_server_up)", 3))
    eventually(lambda: scraped("eaas_generation_tokens_total", 30))
    eventually(lambda: scraped("vllm:generation_tokens_total", 30))

    def par() -> float:
        generate(up)
        return prometheus.value("avg(eaas_balancer_par)") or 0.0

    eventually(lambda: par() >= 1.0)
    assert scraped("eaas_min_replicas", 2)
    # What fired before the first scrape is over. PAR is that of a tiny model, for few tokens.
    eventually(lambda: prometheus.firing().keys() <= {"EaasParHigh"})

    # One of three: everything is served on, with a replica fewer.
    first = kill(up, "expert-server-1")
    dead = eventually(lambda: prometheus.firing().get("EaasServerDead"))
    assert dead["server"] == "expert-server-1"
    assert dead["severity"] == "warning"
    eventually(lambda: scraped("eaas_min_replicas", 1))
    assert "EaasExpertUncovered" not in prometheus.firing()
    started(first)
    eventually(lambda: "EaasServerDead" not in prometheus.firing())

    # All three: of two, the third would load at once what only they held.
    eventually(lambda: scraped("eaas_min_replicas", 2) and all_serve(up))
    returns = [kill(up, f"expert-server-{i}") for i in range(3)]
    uncovered = eventually(lambda: prometheus.firing().get("EaasExpertUncovered"))
    assert uncovered["severity"] == "critical"
    for arguments in returns:
        started(arguments)
    resolved = {"EaasExpertUncovered", "EaasServerDead"}
    eventually(lambda: not resolved & prometheus.firing().keys())
    assert "EaasViewStale" not in prometheus.firing()

    os.kill(up.member("monitor")["pid"], signal.SIGKILL)
    eventually(lambda: "EaasViewStale" in prometheus.firing())

    # Last, the endpoint itself.
    client = up.status()["members"]
    (pid,) = [m["pid"] for m in client if m["role"] == "frontend"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: "EaasEndpointDown" in prometheus.firing())
