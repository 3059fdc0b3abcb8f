"""A request's tokens do not depend on the requests beside it: those of `generate` alone.

Batches of 16 requests, of which the cache holds a few; prompts that share their beginnings; chunked prefill.
"""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from transformers import AutoConfig, AutoModelForCausalLM

from attention_client.engines.transformers.overlap.decoder import DoubleBatch
from attention_client.generation import engine_choice
from attention_client.generation.batching import BatchingEngine
from attention_client.generation.live_admission import LiveAdmission
from attention_client.generation.scheduler_metrics import SchedulerMetrics
from attention_client.generation.sizes import EngineSizes
from attention_client.layer_call.expert_attribution import ExpertAttribution
from attention_client.layer_call.turns import pause
from eaas.config import SchedulerConfig
from eaas.generation.sampling import GREEDY
from eaas.generation.work import Delivery, Engine, Work

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

BATCHES = 50 if settings.default.max_examples >= 1000 else 2
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
VOCABULARY, HEAD, TOKENS, LONGEST, POSITIONS = 260, 8, 12, 72, 32
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Much shorter than the requests.
    "max_position_embeddings": POSITIONS,
}
SPECIAL = {
    "qwen3_moe": {"head_dim": HEAD, "moe_intermediate_size": 16, "num_experts": 8},
    "qwen2_moe": {"moe_intermediate_size": 16, "num_experts": 8, "shared_expert_intermediate_size": 16},
    "mixtral": {"head_dim": HEAD, "num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": HEAD,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": HEAD, "num_local_experts": 8},
}  # fmt: skip
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 12},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    "mixtral": {"sliding_window": 12},
    "gpt_oss": {"sliding_window": 12},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.5},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [1.0, 2.0, 5.0, 11.0],
        "original_max_position_embeddings": POSITIONS,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": POSITIONS},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": POSITIONS,
    },
}


def tiny_model(arch: str, rope: str, seed: int, **more: Any) -> Any:
    """A model whose experts are in this process. Without `more`, it has no windows."""
    parameters = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope]
    none: dict[str, Any] = {}
    if arch == "gpt_oss":  # which makes a mask for a window in any case
        none = {"sliding_window": 12, "layer_types": ["full_attention"] * 2}
    config = AutoConfig.for_model(
        arch, **SIZES | SPECIAL[arch] | none | more, rope_parameters=parameters
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # otherwise all logits are nearly equal
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def drawn_prompts(seed: int, count: int = 16) -> list[list[int]]:
    """Prompts of mixed lengths. Many begin as another one does."""
    dice = random.Random(seed)
    stem = [dice.randrange(VOCABULARY) for _ in range(LONGEST)]
    prompts = []
    for _ in range(count):
        length, shared = dice.randint(1, LONGEST), dice.choice((0, dice.randint(0, LONGEST)))
        tail = [dice.randrange(VOCABULARY) for _ in range(LONGEST)]
        prompts.append((stem[:shared] + tail)[:length])
    return prompts


@torch.no_grad()
def alone(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The tokens of `generate` by a model that computed nothing before, and each one's lead in the logits."""
    ids_1T = torch.tensor([prompt])
    out = copy.deepcopy(model).generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits_1V.topk(2).values[0] for logits_1V in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(a - b) for a, b in best]


async def answer(engine: Engine, name: str, prompt: list[int], tokens: int) -> list[int]:
    queue: asyncio.Queue[Delivery] = asyncio.Queue()
    engine.submit(Work(name, prompt, len(prompt), tokens, (), GREEDY), queue.put_nowait)
    found: list[int] = []
    while True:
        delivery = await asyncio.wait_for(queue.get(), 120)
        if delivery.error is not None:
            raise delivery.error
        found += delivery.tokens
        if delivery.finished:
            return found


async def answers(
    engine: Engine, prompts: list[list[int]], lengths: list[int], at_once: bool
) -> list[list[int]]:
    works = [(f"{at_once}-{i}", *work) for i, work in enumerate(zip(prompts, lengths, strict=True))]
    if at_once:
        return list(await asyncio.gather(*(answer(engine, *work) for work in works)))
    return [await answer(engine, *work) for work in works]


def engine_of(model: Any, limits: EngineSizes) -> Engine:
    admission = LiveAdmission(SchedulerConfig(), model, SchedulerMetrics(CollectorRegistry()))
    return engine_choice.build_engine(model, limits, admission, ExpertAttribution())


def check(
    model: Any, prompts: list[list[int]], lengths: list[int], limits: EngineSizes, overlap: bool
) -> None:
    expected = [alone(model, *work) for work in zip(prompts, lengths, strict=True)]
    if overlap:
        model.model.layers[-1].mlp.register_forward_pre_hook(lambda *_: pause())
        forwards = Counter("forwards", "", ["batch"], registry=CollectorRegistry())
        DoubleBatch(model, "on", forwards)
    engine = engine_of(model, limits)
    assert isinstance(engine, BatchingEngine)
    engine.start()
    try:
        longest = max(map(len, prompts)) + max(lengths)
        if engine.capacity is not None and engine.capacity < longest:
            event("the cache is too small")
            return
        mixed = asyncio.run(answers(engine, prompts, lengths, at_once=True))
        single = asyncio.run(answers(engine, prompts[:4], lengths[:4], at_once=False))
    finally:
        engine.stop(10.0)
    for found in (mixed, single):
        for tokens, (right, leads) in zip(found, expected, strict=False):
            assert len(tokens) == len(right)
            differ = [i for i, (a, b) in enumerate(zip(tokens, right, strict=True)) if a != b]
            # Sums of another order may part two tokens that are as likely.
            assert not differ or leads[differ[0]] < 1e-3, (tokens, right, differ)


@st.composite
def cases(draw: st.DrawFn, rope: str) -> dict[str, Any]:
    arch = draw(st.sampled_from(ARCHITECTURES))
    model: dict[str, Any] = {"tie_word_embeddings": draw(st.booleans())}
    if arch in WINDOWS and draw(st.booleans()):
        model |= WINDOWS[arch] | ({"layer_types": None} if arch == "gpt_oss" else {})
    if arch == "deepseek_v3":
        model["rope_interleave"] = draw(st.booleans())
    seed = draw(st.integers(0, 2**16))
    page = draw(st.sampled_from((4, 8, 16)))
    return {
        "model": {"arch": arch, "rope": rope, "seed": seed} | model,
        "prompts": seed,
        "limits": {
            # Of at most 16 * 84 tokens.
            "num_blocks": draw(st.integers(100, 400)) // page,
            "page_size": page,
            "max_batch_tokens": draw(st.sampled_from((16, 48, 512))),
        },
        "overlap": draw(st.booleans()),
    }


def run(case: dict[str, Any]) -> None:
    prompts = drawn_prompts(case["prompts"])
    dice = random.Random(case["prompts"])
    lengths = [dice.randint(1, TOKENS) for _ in prompts]
    limits = EngineSizes(**case["limits"])
    check(tiny_model(**case["model"]), prompts, lengths, limits, case["overlap"])


@pytest.mark.parametrize("rope", ROPES)
@settings(max_examples=BATCHES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_batches(rope: str, data: st.DataObject) -> None:
    run(data.draw(cases(rope)))


@pytest.mark.parametrize(
    ("arch", "rope"),
    [
        ("qwen3_moe", "dynamic"),
        ("deepseek_v3", "longrope"),
        pytest.param("qwen3_moe", "longrope", marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "dynamic", marks=pytest.mark.nightly),
    ],
)
def test_evicted_requests(arch: str, rope: str, evicted: list[str]) -> None:
    """They return with a part of their answer; many prompts are shorter than the original context."""
    prompts = [[(7 * i + j) % VOCABULARY for j in range(4 + 2 * i)] for i in range(16)]
    limits = EngineSizes(num_blocks=12, page_size=8, max_batch_tokens=64)
    check(tiny_model(arch, rope, 3), prompts, [40] * 16, limits, overlap=False)
    assert evicted
