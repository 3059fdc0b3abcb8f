"""The scheduler in a cluster of real processes: settings, metrics, and a recording that replays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.caps import app
from eaas.errors import EaasError
from eaas_cli.local import LocalCluster
from simulator.caps.replay import replay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS = [[20 + (5 * n) % 37] * (6 + n % 5) + list(range(60, 75 + n % 3)) for n in range(20)]


def config_file(directory: Path, **scheduler: Any) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump({"attention_client": {"scheduler": scheduler}}))
    return path


async def ask(endpoint: str, prompts: list[list[int]]) -> list[str]:
    async def one(client: httpx.AsyncClient, prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        response = await client.post(f"{endpoint}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        return list(await asyncio.gather(*(one(client, prompt) for prompt in prompts)))


def test_a_strategy_in_a_cluster(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    record = tmp_path / "queue.jsonl"
    sizes = {"batch_size": 2, "window_size": 6}
    path = config_file(tmp_path, strategy="greedy_variance", record=str(record), **sizes)
    cluster = start_cluster(checkpoint(), servers=2, config_file=path)
    alone = [asyncio.run(ask(cluster.endpoint, [prompt]))[0] for prompt in PROMPTS]
    assert asyncio.run(ask(cluster.endpoint, PROMPTS)) == alone
    metrics = httpx.get(f"{cluster.endpoint}/metrics").text
    assert 'eaas_scheduler_strategy{strategy="greedy_variance"} 1.0' in metrics
    cluster.stop()
    found = replay(record)
    assert found.requests == 2 * len(PROMPTS)
    assert found.same == len(found.choices)
    assert max(choice.window for choice in found.choices) == 6
    done = CliRunner().invoke(app, ["replay", str(record), "--json"])
    assert json.loads(done.stdout)["same_as_recorded"] == len(found.choices)


def test_an_unknown_strategy_is_named(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    path = config_file(tmp_path, strategy="first_come")
    with pytest.raises(EaasError, match="'first_come' is unknown: choose one of fcfs"):
        start_cluster(checkpoint(), servers=1, redundancy=1, config_file=path)
