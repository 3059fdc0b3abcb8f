"""Generation engines of models in this process, without a cluster."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from attention_client.generation.engine_choice import build_engine
from attention_client.generation.live_admission import LiveAdmission
from attention_client.generation.scheduler_metrics import SchedulerMetrics
from attention_client.generation.sizes import EngineSizes
from attention_client.layer_call.expert_attribution import ExpertAttribution
from eaas.config import SchedulerConfig
from eaas.generation.sampling import GREEDY, Sampling
from eaas.generation.work import Delivery, Engine, Work

__all__ = ["answer", "engine_of", "tokens_of"]


def engine_of(model: Any, num_blocks: int, page_size: int, max_batch_tokens: int) -> Engine:
    """The engine that serves a model."""
    admission = LiveAdmission(SchedulerConfig(), model, SchedulerMetrics(CollectorRegistry()))
    limits = EngineSizes(num_blocks, page_size, max_batch_tokens)
    return build_engine(model, limits, admission, ExpertAttribution())


async def answer(
    engine: Engine, prompt: list[int], tokens: int = 8, sampling: Sampling = GREEDY
) -> list[Delivery]:
    """What an engine delivers for a prompt."""
    queue: asyncio.Queue[Delivery] = asyncio.Queue()
    work = Work(str(len(prompt)), prompt, len(prompt), tokens, (), sampling)
    engine.submit(work, queue.put_nowait)
    found: list[Delivery] = []
    while not found or not found[-1].finished:
        found.append(await asyncio.wait_for(queue.get(), 60))
        assert found[-1].error is None, found[-1].error
    return found


def tokens_of(found: list[Delivery]) -> list[int]:
    """The tokens of an answer."""
    return [token for delivery in found for token in delivery.tokens]
