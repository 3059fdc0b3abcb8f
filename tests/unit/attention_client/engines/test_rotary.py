"""Rotary embeddings that depend on a request's length: each row as if its request were alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from attention_client.engines.transformers.paged.operators import reaching
from attention_client.engines.transformers.rotary import (
    depends_on_length,
    length_rotaries,
    of_prompts,
)
from attention_client.generation.sequential import SequentialEngine
from attention_client.layer_call.turns import Task, in_turns
from decoding import greedy
from eaas.generation.sampling import Sampling
from eaas.generation.work import Engine
from small_engines import answer, engine_of, tokens_of

POSITIONS = 16
X = torch.zeros(1, 1, 32)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 5.0, 11.0],
    "original_max_position_embeddings": POSITIONS,
}
SIZES = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": POSITIONS,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def qwen(rope: dict[str, Any]) -> Any:
    return Qwen3MoeRotaryEmbedding(Qwen3MoeConfig(**SIZES, rope_parameters=rope))


def gemma(rope: dict[str, Any]) -> Any:
    default = {"rope_type": "default", "rope_theta": 500.0}
    config = Gemma3TextConfig(
        **SIZES,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": default},
    )
    return Gemma3RotaryEmbedding(config)


def phimoe(rope: dict[str, Any]) -> Any:
    more = {"short_mscale": 1.1, "long_mscale": 1.3} if rope is LONGROPE else {}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return PhimoeRotaryEmbedding(PhimoeConfig(**sizes, rope_parameters=rope | more))


MODULES = [
    pytest.param(qwen, DYNAMIC, {}, id="dynamic"),
    pytest.param(qwen, LONGROPE, {}, id="longrope"),
    pytest.param(gemma, DYNAMIC, {"layer_type": "full_attention"}, id="dynamic by layer type"),
    pytest.param(gemma, LONGROPE, {"layer_type": "full_attention"}, id="longrope by layer type"),
    pytest.param(gemma, LONGROPE, {"layer_type": "sliding_attention"}, id="layers without"),
    pytest.param(phimoe, LONGROPE, {}, id="scales"),
]


def alone(make: Any, rope: Any, names: Any, prompt: int, position: int) -> list[torch.Tensor]:
    """What transformers computes for one token of a request, in its prompt or after it."""
    first, last = (0, prompt) if position < prompt else (position, position + 1)
    made = make(rope)(X, torch.arange(first, last)[None], **names)
    return [part[0, position - first] for part in made]


@pytest.mark.parametrize(("make", "rope", "names"), MODULES)
@settings(max_examples=20)
@given(rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 70)), min_size=1, max_size=12))
def test_rows_are_those_of_their_requests(
    make: Any, rope: Any, names: Any, rows: list[tuple[int, int]]
) -> None:
    module = make(rope)
    (rotary,) = length_rotaries(module)
    rotary(X, torch.arange(100)[None], **names)  # a long pass before, as transformers does it
    prompts_T, positions_T = torch.tensor(rows).T
    with of_prompts(prompts_T):
        made = module(X, positions_T[None].int(), **names)
    assert [part.shape for part in made] == [(1, len(rows), 8)] * 2
    for row, (prompt, position) in enumerate(rows):
        expected = alone(make, rope, names, prompt, position)
        assert all(torch.equal(a[0, row], b) for a, b in zip(made, expected, strict=True))


def test_a_micro_batch_has_its_own_rows() -> None:
    module, prompts_T = qwen(DYNAMIC), torch.tensor([40, 40, 3])
    (rotary,) = length_rotaries(module)
    positions_1T = torch.tensor([[0, 1, 2]])
    with of_prompts(prompts_T):
        whole = rotary(X, positions_1T)
        parts = (slice(0, 2), slice(2, 3))
        tasks = [Task(lambda part=part: rotary(X, positions_1T[:, part]), part) for part in parts]
        halves = in_turns(tasks)
    for both, *each in zip(whole, *halves, strict=True):
        assert torch.equal(torch.cat(each, 1), both)


def test_without_prompts_it_is_as_in_transformers() -> None:
    module = qwen(DYNAMIC)
    (rotary,) = length_rotaries(module)
    assert length_rotaries(module) == [rotary]
    for length in (60, 20, 8):  # of which the second keeps frequencies of the first
        positions_1T = torch.arange(length)[None]
        plain = qwen(DYNAMIC)
        plain(X, torch.arange(60)[None])
        for made, expected in zip(module(X, positions_1T), plain(X, positions_1T), strict=True):
            assert torch.equal(made, expected)
    rotary.forget()
    fresh = qwen(DYNAMIC)(X, torch.arange(20)[None])
    module(X, torch.arange(60)[None])
    rotary.forget()
    assert all(map(torch.equal, module(X, torch.arange(20)[None]), fresh))


class Inner(torch.nn.Module):
    """A pass that is only its rotary embedding."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(x, position_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_pass_has_the_rows_of_its_requests(dtype: torch.dtype) -> None:
    module = Inner(qwen(DYNAMIC))
    (rotary,) = length_rotaries(module)
    x, tokens = X.to(dtype), torch.export.Dim("tokens", min=1, max=100)
    example = (x, torch.arange(7)[None])
    exported = torch.export.export(
        module, example, dynamic_shapes=(None, {1: tokens}), strict=False
    )

    class Outside:
        def rotary(self, positions: torch.Tensor, place: int, layer_type: str) -> Any:
            return [rotary][place].in_float32(positions, layer_type)

    positions_1T = torch.tensor([[0, 1, 2, 30, 31]])
    with reaching(Outside()), of_prompts(torch.tensor([3, 3, 3, 20, 40])):  # type: ignore[arg-type]
        made = exported.module()(x, positions_1T)
        expected = module(x, positions_1T)
    assert [part.dtype for part in made] == [dtype] * 2
    assert all(map(torch.equal, made, expected))


def test_other_rope_types_stay() -> None:
    module = qwen({"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0})
    assert not depends_on_length(module)
    assert length_rotaries(module) == []


def tiny(config: Any) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def started(model: Any) -> Engine:
    engine = engine_of(model, num_blocks=40, page_size=16, max_batch_tokens=64)
    engine.start()
    return engine


EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def test_a_model_that_computes_its_cache_again_runs_alone() -> None:
    """Phi-MoE's `generate` computes all keys again at the token where its factors change."""
    rope = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = PhimoeConfig(**sizes, intermediate_size=16, num_local_experts=4, rope_parameters=rope)
    engine = started(tiny(config))
    assert isinstance(engine, SequentialEngine)
    for length in (40, 12, 3):
        prompt = list(range(length))
        assert tokens_of(asyncio.run(answer(engine, prompt))) == greedy(tiny(config), prompt, 8)


def test_one_request_at_a_time_forgets_the_one_before() -> None:
    """Its tokens, and the scores of its prompt, whose parts are shorter than it."""
    config = Qwen3NextConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=16, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"], rope_parameters=DYNAMIC,
        partial_rotary_factor=1.0,
    )  # fmt: skip
    engine = started(tiny(config))
    assert isinstance(engine, SequentialEngine)
    asyncio.run(answer(engine, [1] * 60))
    prompt = list(range(20))
    assert tokens_of(asyncio.run(answer(engine, prompt))) == greedy(tiny(config), prompt, 8)

    prompt = [(7 * i) % 100 for i in range(300)]
    sampling = Sampling(logprobs=0, prompt_logprobs=True)
    delivered = asyncio.run(answer(engine, prompt, sampling=sampling))
    (scores,) = (each.prompt_scores for each in delivered if each.prompt_scores is not None)
    with torch.no_grad():
        logits_TV = tiny(config)(torch.tensor([prompt])).logits[0, :-1]
    expected_T = logits_TV.log_softmax(-1).gather(1, torch.tensor([prompt[1:]]).T)[:, 0]
    assert scores is not None
    torch.testing.assert_close(torch.tensor(scores.logprob_T[1:]), expected_T, rtol=0, atol=1e-3)
