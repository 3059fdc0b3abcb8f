"""Prometheus and Grafana are told of what exists: services, ports, data source, metrics. Neither is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry

from attention_client.metrics import ClientMetrics
from attention_client.serve.metrics import ServeMetrics
from attention_client.server_metrics import ServerMetrics
from eaas.types import Member, MemberState, Role

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/eaas.json").read_text())
SOURCE = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())


def sample_names() -> set[str]:
    """Of everything that /metrics can show."""
    registry = CollectorRegistry()
    ClientMetrics(registry)
    ServeMetrics(registry)
    server = Member("a", Role.EXPERT_SERVER, 1, "here", "here:1", MemberState.SERVING)
    registry.register(ServerMetrics(lambda _timeout_s: {"a": server}))
    names = set()
    for metric in registry.collect():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        names |= {metric.name + ending for ending in endings.get(metric.type, [""])}
    return names


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    asked = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
        for name in re.findall(r"eaas_\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked <= sample_names()


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    (source,) = SOURCE["datasources"]
    assert {(p["datasource"]["type"], p["datasource"]["uid"]) for p in panels} == {
        (source["type"], source["uid"])
    }
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_files_lie_where_they_are_looked_for() -> None:
    mounts = dict(
        volume.removesuffix(":ro").split(":")[::-1]
        for name in ("grafana", "prometheus")
        for volume in COMPOSE["services"][name]["volumes"]
    )
    for source in mounts.values():
        assert (DEPLOY / source).exists()
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/eaas.yaml").read_text())
    (provider,) = providers["providers"]
    environment = COMPOSE["services"]["grafana"]["environment"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DEPLOY / mounts[str(home.parent)] / home.name).exists()


def test_services_and_ports() -> None:
    services = COMPOSE["services"]
    (source,) = SOURCE["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    ((lookup,),) = [job["dns_sd_configs"] for job in scrape]
    (client,) = lookup["names"]
    assert services[client]["ports"][0].endswith(f":{lookup['port']}")
    # What is published is for this machine.
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["metrics"]
    # One service builds the image, for all of them.
    assert [name for name, service in services.items() if "build" in service] == ["demo-model"]
