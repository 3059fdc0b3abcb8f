"""Each alert rule, by promtool: series that must fire it, and similar series that must not."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from prometheus_box import missing

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy/prometheus/alerts.yaml"
RULES = {rule["alert"]: rule for rule in yaml.safe_load(FILE.read_text())["groups"][0]["rules"]}

needs_promtool = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ENDPOINT = 'job="eaas",instance="here:8000"'
ENGINE = 'job="eaas-attention-client",instance="there:7005"'
UP = {f"up{{{ENDPOINT}}}": "1x400"}
ENGINE_UP = {f"up{{{ENGINE}}}": "1x400"}
ENGINE_JOB = {"job": "eaas-attention-client"}
COMPILES = {f"eaas_passes_compiled{{{ENDPOINT}}}": "0x100"}


@dataclass(frozen=True)
class Case:
    """Series with a value every 5 s, and the time at which the alert is evaluated."""

    alert: str
    series: dict[str, str]
    at: str
    fires: bool
    labels: dict[str, str] | None = None


def down(of: str) -> dict[str, str]:
    return {f"up{{{of}}}": "1x10 0x100"}


def uncovered(values: str) -> dict[str, str]:
    return {f"eaas_uncovered_experts{{{ENDPOINT}}}": values}


def servers(b: str) -> dict[str, str]:
    return {
        f'eaas_expert_server_up{{server="{server}",{ENDPOINT}}}': values
        for server, values in (("a", "1x400"), ("b", b))
    }


def age(values: str) -> dict[str, str]:
    return {f"eaas_view_age_seconds{{{ENDPOINT}}}": values}


def hedges(per_1000: int) -> dict[str, str]:
    return {
        f"eaas_server_requests_total{{{ENDPOINT}}}": "0+1000x400",
        f'eaas_hedges_total{{outcome="won",{ENDPOINT}}}': f"0+{per_1000 - 1}x400",
        f'eaas_hedges_total{{outcome="lost",{ENDPOINT}}}': "0+1x400",
    }


def par(first: float, second: float, tokens: str = "0+50x400") -> dict[str, str]:
    balancer = 'job="eaas-balancer",instance="there:7003"'
    return {
        f'eaas_balancer_par{{layer="0",{balancer}}}': f"{first}x400",
        f'eaas_balancer_par{{layer="1",{balancer}}}': f"{second}x400",
        f"eaas_generation_tokens_total{{{ENDPOINT}}}": tokens,
    }


def nodes(fewest: str, of: str) -> dict[str, str]:
    return {f"eaas_min_nodes{{{ENDPOINT}}}": fewest, f"eaas_nodes{{{ENDPOINT}}}": of}


def failed(values: str) -> dict[str, str]:
    return {f"eaas_layer_calls_failed_total{{{ENDPOINT}}}": values}


def moved(reason: str, values: str) -> dict[str, str]:
    return {f'eaas_frontend_migrations_total{{reason="{reason}",{ENDPOINT}}}': values}


def pauses(within_5_s: str, all_of_them: str) -> dict[str, str]:
    return {
        f'eaas_frontend_pause_seconds_bucket{{le="5.0",{ENDPOINT}}}': within_5_s,
        f"eaas_frontend_pause_seconds_count{{{ENDPOINT}}}": all_of_them,
    }


CASES = [
    Case("EaasExpertUncovered", uncovered("0 0 4x100"), "20s", True),
    Case("EaasExpertUncovered", uncovered("0 0 4x100"), "10s", False),  # Not for 5 s yet.
    Case("EaasExpertUncovered", uncovered("0 0 4x10 0x90"), "2m", False),
    Case("EaasExpertUncovered", uncovered("0x100"), "5m", False),
    Case("EaasExpertsOnOneNode", nodes("2x10 1x200", "3x300"), "7m", True),
    Case("EaasExpertsOnOneNode", nodes("2x10 1x200", "3x300"), "4m", False),  # Not for 5 min yet.
    Case("EaasExpertsOnOneNode", nodes("1x300", "1x300"), "10m", False),  # There is no other node.
    Case("EaasExpertsOnOneNode", nodes("2x300", "2x300"), "10m", False),
    Case("EaasLayerCallsFailing", failed("0x20 1x300"), "2m", True),
    Case("EaasLayerCallsFailing", failed("0x20 1x300"), "8m", False),  # Five minutes later.
    Case("EaasLayerCallsFailing", failed("3x300"), "5m", False),
    Case("EaasEndpointDown", down(ENDPOINT), "2m", True, {"job": "eaas", "instance": "here:8000"}),
    Case("EaasEndpointDown", {'up{job="eaas-balancer"}': "1x100"}, "2m", True, {"job": "eaas"}),
    Case("EaasEndpointDown", down(ENDPOINT), "1m", False),
    Case("EaasEndpointDown", UP | {'up{job="other"}': "0x400"}, "5m", False),
    Case("EaasEngineDown", down(ENGINE), "2m", True, {**ENGINE_JOB, "instance": "there:7005"}),
    Case("EaasEngineDown", UP | COMPILES, "2m", True, ENGINE_JOB),
    Case("EaasEngineDown", UP, "2m", False),  # vLLM serves.
    Case("EaasEngineDown", down(ENGINE), "1m", False),
    Case("EaasRequestsMove", moved("lost", "0+1x400"), "20m", True),
    Case("EaasRequestsMove", moved("lost", "0x60 3x300"), "20m", False),  # Once.
    Case("EaasRequestsMove", moved("draining", "0+1x400"), "20m", False),
    Case("EaasRequestsPause", pauses("0+1x100", "0+1x50 52+1x50"), "6m", True),
    Case("EaasRequestsPause", pauses("0+1x400", "0+1x400"), "20m", False),
    Case("EaasServerDead", servers("1x10 0x100"), "65s", True, {"server": "b"}),
    Case("EaasServerDead", servers("1x10 0x10 1x100"), "3m", False),
    Case("EaasServerDead", servers("1x10 0x10 _x100"), "10m", False),  # Replaced by others.
    Case("EaasViewStale", age("0x10 0+5x100"), "2m", True),
    Case("EaasViewStale", age("0x10 0+5x100"), "70s", False),
    Case("EaasViewStale", age("15x400"), "10m", False),
    Case("EaasHedgesHigh", hedges(31), "11m", True),
    Case("EaasHedgesHigh", hedges(29), "11m", False),
    Case("EaasParHigh", par(1.2, 2.0), "20m", True),
    Case("EaasParHigh", par(1.2, 2.0), "9m", False),
    Case("EaasParHigh", par(1.0, 2.0), "20m", False),
    Case("EaasParHigh", par(1.2, 2.0, "7x400"), "20m", False),  # Idle.
]


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)


def judge(rules: Path, cases: list[Case]) -> subprocess.CompletedProcess[str]:
    """Run promtool over the rules and cases; it names the cases that fail."""
    tests = []
    for case in cases:
        up = {} if case.alert.endswith("Down") else UP | ENGINE_UP
        labels = {"severity": RULES[case.alert]["labels"]["severity"], **(case.labels or {})}
        expected = [{"exp_labels": labels}] if case.fires else []
        series = [{"series": name, "values": v} for name, v in (case.series | up).items()]
        look = {"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected}
        tests.append({"interval": "5s", "input_series": series, "alert_rule_test": [look]})
    file = rules.parent / "test.yaml"
    document = {"rule_files": [str(rules)], "evaluation_interval": "5s", "tests": tests}
    file.write_text(yaml.safe_dump(document))
    return promtool("test", "rules", file)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The rules without annotations."""
    document = yaml.safe_load(FILE.read_text())
    for rule in document["groups"][0]["rules"]:
        del rule["annotations"]
    path = tmp_path / "alerts.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@needs_promtool
def test_promtool_accepts_the_files() -> None:
    for what, name in (("rules", "alerts.yaml"), ("config", "prometheus.yml")):
        done = promtool("check", what, FILE.parent / name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{len(RULES)} rules found" in done.stdout


@needs_promtool
def test_each_rule_fires_when_it_must_and_only_then(bare: Path) -> None:
    done = judge(bare, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_rule_has_both_kinds_of_cases() -> None:
    assert {(c.alert, c.fires) for c in CASES} == {(a, f) for a in RULES for f in (True, False)}


def test_each_rule_says_what_to_do() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert re.findall(r"^\| `(Eaas\w+)` \|", page, re.MULTILINE) == list(RULES)
    for rule in RULES.values():
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
