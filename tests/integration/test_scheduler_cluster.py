"""The scheduler in a cluster of real processes: settings, metrics, and a recording that replays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.caps import app
from decoding import answers
from eaas_cli.chaos.cluster import free_port
from eaas_cli.local import LocalCluster
from simulator.caps.replay import replay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS = [[20 + (5 * n) % 37] * (6 + n % 5) + list(range(60, 75 + n % 3)) for n in range(20)]


def test_a_strategy_in_a_cluster(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    record = tmp_path / "queue.jsonl"
    scheduler = {"strategy": "greedy_variance", "record": str(record)}
    scheduler |= {"batch_size": 2, "window_size": 6}
    path = tmp_path / "cluster.yaml"
    client = {"scheduler": scheduler, "metrics_port": free_port("127.0.0.1")}
    path.write_text(yaml.safe_dump({"attention_client": client}))
    cluster = start_cluster(checkpoint(), servers=2, config_file=path)
    alone = [text for prompt in PROMPTS for text in answers(cluster.endpoint, [prompt], 10)]
    assert answers(cluster.endpoint, PROMPTS, 10) == alone
    metrics = httpx.get(f"http://127.0.0.1:{client['metrics_port']}/metrics").text
    assert 'eaas_scheduler_strategy{strategy="greedy_variance"} 1.0' in metrics
    cluster.stop()
    found = replay(record)
    assert found.requests == 2 * len(PROMPTS)
    assert found.same == len(found.choices)
    assert max(choice.window for choice in found.choices) == 6
    done = CliRunner().invoke(app, ["replay", str(record), "--json"])
    assert json.loads(done.stdout)["same_as_recorded"] == len(found.choices)
