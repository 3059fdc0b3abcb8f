"""The files of Prometheus and Grafana name existing services, ports, data sources and metrics."""

import json
import re
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import yaml
from prometheus_client import CollectorRegistry, Metric

from attention_client.generation.scheduler_metrics import SchedulerMetrics
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.server_metrics import ServerMetrics
from balancer.live.hotness import Reading, Work
from balancer.live.state import LoadState
from balancer.live.tuning import Signals
from balancer.metrics import BalancerMetrics
from balancer.planner.layout import Settings
from eaas.config import BalancerConfig
from eaas.types import Member, MemberState, Placement, Role
from frontend.metrics import EngineMetrics, ServeMetrics

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/eaas.json").read_text())
SOURCE = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())


def families() -> list[Metric]:
    """Every metric that /metrics of frontends, attention clients and balancer can show."""
    registry = CollectorRegistry()
    ClientMetrics(registry).watch_coverage(int, int, int, int)
    ServeMetrics(registry).watch(MagicMock(capacity=None), "demo")
    EngineMetrics(registry)
    SchedulerMetrics(registry)
    server = Member("a", Role.EXPERT_SERVER, 1, "here", "here:1", MemberState.SERVING)
    registry.register(ServerMetrics(lambda _timeout_s: {"a": server}, dict, tuple))
    return [*registry.collect(), *balancer_families()]


def balancer_families() -> list[Metric]:
    """The balancer's metrics, with a load and live knobs."""
    load = LoadState(BalancerConfig())
    holds_LSE = np.ones((1, 1, 2), bool)
    placement = Placement(1, ("a",), holds_LSE, holds_LSE.astype(np.float32))
    member = Member("a", Role.EXPERT_SERVER, 1, "here", "here:1", MemberState.SERVING)
    for n in (1, 2):
        reading = Reading(1, n, np.full((1, 2), n), Work(float(n)))
        load.stepped({"a": reading}, {"a": member}, placement, 1000)
    metrics = BalancerMetrics(
        load,
        lambda: Settings(policy="eplb", tuned={"k": 0.5}),
        lambda: Signals(burstiness=0.1),
    )
    metrics.published(placement)
    return list(metrics.registry.collect())


def sample_names() -> set[str]:
    names = set()
    for metric in families():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {metric.name + ending for ending in endings.get(metric.type, [""])}
    return names


def named(expressions: list[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\beaas_\w+", text)}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    asked = named([t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]])
    assert len(asked) > 10
    assert asked <= sample_names()


def test_the_alerts_ask_for_metrics_that_exist() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"][0]["rules"]
    asked = named([rule["expr"] for rule in rules])
    assert len(asked) > 5
    assert asked <= sample_names()


def test_the_page_lists_every_metric_and_no_other() -> None:
    page = (DEPLOY.parent / "docs/metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {
        n for row in rows for n in re.findall(r"`((?:eaas_|vllm:)\w+)", row.rsplit("|", 2)[0])
    }
    listed.discard("eaas_scheduler_")
    there = {m.name + ("_total" if m.type == "counter" else "") for m in families()}
    assert listed == {name for name in there if not name.startswith("eaas_scheduler_")}


def test_the_files_are_mounted_where_they_are_read() -> None:
    mounts = dict(
        volume.removesuffix(":ro").split(":")[::-1]
        for name in ("grafana", "prometheus")
        for volume in COMPOSE["services"][name]["volumes"]
    )
    for source in mounts.values():
        assert (ROOT / source).exists()
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert [f"/etc/prometheus/{name}" in mounts for name in config["rule_files"]] == [True]
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/eaas.yaml").read_text())
    (provider,) = providers["providers"]
    environment = COMPOSE["services"]["grafana"]["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (ROOT / mounts[str(home.parent)] / home.name).exists()


def test_services_and_ports() -> None:
    services = COMPOSE["services"]
    (source,) = SOURCE["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    lookups = {job["job_name"]: job["dns_sd_configs"][0] for job in scrape}
    (client,) = lookups["eaas"]["names"]
    assert services[client]["ports"][0].endswith(f":{lookups['eaas']['port']}")
    for job, section in (
        ("eaas-attention-client", "ATTENTION_CLIENT"),
        ("eaas-balancer", "BALANCER"),
    ):
        (service,) = lookups[job]["names"]
        port = services[service]["environment"][f"EAAS_{section}__METRICS_PORT"]
        assert port == str(lookups[job]["port"])
    # What is published is for this machine.
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["metrics"]
    # One service builds the image, for all of them.
    assert [name for name, service in services.items() if "build" in service] == ["demo-model"]
