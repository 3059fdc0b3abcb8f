"""The scheduler between HTTP and the engine: a real server over a model with local experts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from attention_client.engines.transformers.model import load_model
from attention_client.generation.sizes import EngineSizes
from attention_client.scheduler.recording import read_recording
from decoding import answers
from eaas.config import SchedulerConfig
from eaas.net.listen import bind
from eaas_cli.bench.baseline import LocalExperts
from frontend.access import Access
from frontend.limits import ServeLimits
from frontend.network.server import HttpServer
from http_box import app_over
from installed_package import install
from simulator.caps.replay import replay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIZES = EngineSizes(num_blocks=64, page_size=8, max_batch_tokens=64)
NEW = 12
PROMPTS = [[20 + (7 * n) % 31] * (5 + n % 4) + list(range(40, 60 + n)) for n in range(14)]


@functools.cache
def experts_of(path: Path) -> LocalExperts:
    return LocalExperts(path, threads=1)


class Served:
    """A server with a scheduler; a context manager."""

    def __init__(self, path: Path, **config: Any) -> None:
        experts = experts_of(path)
        self.model = load_model(experts.checkpoint, experts)  # type: ignore[arg-type]
        self.registry = CollectorRegistry()
        app = app_over(
            self.model,
            AutoTokenizer.from_pretrained(path),
            names=["tiny"],
            status=dict,
            healthy=lambda: (True, ""),
            sizes=SIZES,
            limits=ServeLimits(),
            access=Access(),
            scheduling=SchedulerConfig(**config),
            registry=self.registry,
        )
        self.server = HttpServer(app, bind("127.0.0.1", 0), ServeLimits())
        self.server.start()
        self.url = f"http://{self.server.address}"

    def ask(self, prompts: list[list[int]], tokens: int = NEW) -> list[str]:
        """Send all prompts at once; return the texts in order."""
        return answers(self.url, prompts, tokens)

    def metrics(self) -> dict[str, float]:
        """All metrics by name and labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        words = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in words}

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(5.0)


SMALL: dict[str, Any] = {"batch_size": 2, "window_size": 6}


def test_strategies_give_the_tokens_of_fcfs(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("gpt_oss")
    with Served(path, **SMALL) as box:
        expected = box.ask(PROMPTS)
        assert box.metrics()['eaas_scheduler_strategy{strategy="fcfs"}'] == 1  # the default
        # It looks at no load, so none is predicted.
        assert box.metrics()["eaas_scheduler_prediction_seconds_count"] == 0
        assert box.metrics()['eaas_scheduler_choices_total{chosen="oldest"}'] > 3
        assert box.metrics().get('eaas_scheduler_choices_total{chosen="others"}', 0) == 0
    for name in ("greedy_variance", "differencing", "random"):
        record = tmp_path / f"{name}.jsonl"
        with Served(path, strategy=name, record=str(record), **SMALL) as box:
            assert box.ask(PROMPTS) == expected, name
        found = replay(record)
        assert len(found.choices) > 3
        assert found.same == len(found.choices), name
        assert found.requests == len(PROMPTS)
    assert len(set(expected)) > 3


def test_choices_are_counted(checkpoint: Callable[..., Path]) -> None:
    with Served(checkpoint(), strategy="greedy_variance", **SMALL) as box:
        box.ask(PROMPTS)
        found = box.metrics()
        assert found['eaas_scheduler_strategy{strategy="greedy_variance"}'] == 1
        choices = (
            found['eaas_scheduler_choices_total{chosen="others"}']
            + found['eaas_scheduler_choices_total{chosen="oldest"}']
        )
        assert found['eaas_scheduler_choices_total{chosen="others"}'] > 0
        assert found["eaas_scheduler_passed_over_requests_total"] > 0
        assert found["eaas_scheduler_window_requests_count"] == choices
        assert found["eaas_scheduler_decision_seconds_count"] > 0
        # The first requests found room in the batch and needed no prediction.
        predictions = found["eaas_scheduler_prediction_seconds_count"]
        assert 0 < predictions < len(PROMPTS)
        assert found["eaas_scheduler_prediction_correlation_count"] == predictions
        assert found['eaas_scheduler_predicted_tokens_total{source="dry_run"}'] > 0
        box.ask(PROMPTS)
        # Their prefixes are known now.
        assert box.metrics()['eaas_scheduler_predicted_tokens_total{source="prefix"}'] > 0


def test_steps_are_recorded(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Each prompt token is in one step, and each further token of an answer in a step of its own."""
    record = tmp_path / "queue.jsonl"
    with Served(checkpoint(), record=str(record), **SMALL) as box:
        box.ask(PROMPTS)
    events = read_recording(record)[1]
    assert any(event.get("probe", 0.0) > 0 for event in events)
    steps = [event for event in events if "step" in event]
    rows, prompts = zip(*(event["step"] for event in steps), strict=True)
    assert sum(prompts) == sum(map(len, PROMPTS))
    assert sum(rows) == len(PROMPTS) * (NEW - 1)
    assert max(rows) == 2
    assert all(event["seconds"] > 0 for event in steps)


def test_a_request_cancelled_while_waiting_is_removed(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    record = tmp_path / "queue.jsonl"
    with Served(checkpoint(), record=str(record), **SMALL) as box:

        async def impatient() -> None:
            body = {"prompt": [30] * 20, "max_tokens": 150, "ignore_eos": True}
            async with httpx.AsyncClient(timeout=30, limits=httpx.Limits()) as client:
                posts = [
                    asyncio.create_task(client.post(f"{box.url}/v1/completions", json=body))
                    for _ in range(12)
                ]
                while box.metrics()["eaas_num_requests_waiting"] < 5:
                    await asyncio.sleep(0.01)
                for post in posts:
                    post.cancel()
                await asyncio.gather(*posts, return_exceptions=True)

        asyncio.run(impatient())
        assert len(box.ask(PROMPTS)) == len(PROMPTS)
        assert box.metrics()["eaas_num_requests_waiting"] == 0
    assert any("remove" in event for event in read_recording(record)[1])
    assert replay(record).same == len(replay(record).choices)


BROKEN = """
from attention_client.scheduler import SelectionStrategy
class Broken(SelectionStrategy):
    name = "broken"
    def select(self, *_):
        raise ZeroDivisionError("on purpose")
"""


def test_a_strategy_that_fails_is_replaced(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests continue; the metrics show the replacement."""
    given = {"broken": "Broken"}
    install(tmp_path, monkeypatch, "eaas.strategies", "broken_strategy", given, BROKEN)
    with Served(checkpoint(), strategy="broken", **SMALL) as box:
        assert len(box.ask(PROMPTS)) == len(PROMPTS)
        found = box.metrics()
        assert found['eaas_scheduler_strategy{strategy="broken"}'] == 0
        assert found['eaas_scheduler_strategy{strategy="fcfs"}'] == 1
        assert box.ask(PROMPTS) == box.ask(PROMPTS)


def test_a_model_without_batching_is_served_by_age(checkpoint: Callable[..., Path]) -> None:
    with Served(checkpoint("deepseek_v3", "float16"), strategy="greedy_variance") as box:
        assert len(box.ask(PROMPTS[:2])) == 2
        found = box.metrics()
        assert found['eaas_scheduler_strategy{strategy="greedy_variance"}'] == 0
        assert found['eaas_scheduler_strategy{strategy="fcfs"}'] == 1


def test_requests_evicted_from_a_full_cache_return(
    checkpoint: Callable[..., Path], evicted: list[str]
) -> None:
    """More running requests than the cache holds: all get their tokens, and evicted ones keep their loads."""
    config = {"strategy": "greedy_variance", "batch_size": 8, "window_size": 10}
    with Served(checkpoint(), **config) as box:
        expected = [box.ask([prompt], 90)[0] for prompt in PROMPTS[:6]]
        assert not evicted
        assert box.ask(PROMPTS[:6], 90) == expected
        assert evicted
