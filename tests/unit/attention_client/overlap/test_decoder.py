"""Overlapped micro-batches equal the whole batch, on local models whose experts pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from attention_client.engines.transformers.overlap.decoder import DoubleBatch
from attention_client.layer_call.turns import micro_batch_tokens, pause
from decoding import greedy
from eaas.checkpoint import Checkpoint
from small_engines import answer, engine_of, tokens_of

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
BATCH, WIDTH, NEW = 5, 21, 12


class Rig:
    """A model without overlap, and the same model with it."""

    def __init__(self, path: Path, mode: str = "on", **config: object) -> None:
        self.whole = self._load(path, config)
        self.model = self._load(path, config)
        self.turns: list[slice | None] = []
        self.error: Exception | None = None
        for name in Checkpoint.open(path).shape.layer_names:
            self.model.get_submodule(name).register_forward_pre_hook(self._experts)
        self.forwards = Counter("forwards", "", ["batch"], registry=CollectorRegistry())
        DoubleBatch(self.model, mode, self.forwards)

    def _load(self, path: Path, config: dict[str, object]) -> PreTrainedModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager", **config)
        return model.eval()

    def _experts(self, *_: Any) -> None:
        self.turns.append(micro_batch_tokens())
        pause()
        if self.error is not None and micro_batch_tokens() == self.turns[0]:
            raise self.error

    def count(self, batch: str) -> float:
        return self.forwards.labels(batch)._value.get()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: small products do not gain from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def rig(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Rig:
    # The prompts are longer than the window of the models that have one.
    config = {"sliding_window": 8} if request.param == "gpt_oss" else {}
    return Rig(checkpoint(request.param), **config)


def ragged(batch: int = BATCH, width: int = WIDTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids_BT = torch.randint(20, 250, (batch, width), generator=generator)
    mask_BT = torch.ones_like(ids_BT)
    for row in range(batch):
        mask_BT[row, : (5 * row) % width] = 0
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


def generate(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    fixed = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | options
    return model.generate(**ragged(), **fixed)


@torch.no_grad()
def test_logits_and_caches(rig: Rig) -> None:
    inputs = ragged()
    caches = [DynamicCache(config=rig.whole.config) for _ in range(2)]
    before = rig.count("overlap")
    for _ in range(3):  # A prompt, then two decode steps.
        out, expected = (
            model(**inputs, past_key_values=cache, use_cache=True)
            for model, cache in zip((rig.model, rig.whole), caches, strict=True)
        )
        assert out.past_key_values is caches[0]
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)
        next_B1 = expected.logits[:, -1:].argmax(-1)
        mask_BT = torch.cat([inputs["attention_mask"], torch.ones_like(next_B1)], 1)
        inputs = {"input_ids": next_B1, "attention_mask": mask_BT}
    assert rig.count("overlap") == before + 3
    assert [layer.get_seq_length() for layer in caches[0].layers] == [WIDTH + 2] * len(caches[1])
    for layer, expected in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_generate(rig: Rig, options: dict[str, int]) -> None:
    before = rig.count("overlap")
    assert torch.equal(generate(rig.model, **options), generate(rig.whole, **options))
    assert rig.count("overlap") >= before + NEW - 1


def test_turns_alternate(rig: Rig) -> None:
    rig.turns.clear()
    with torch.no_grad():
        rig.model(**ragged(), use_cache=False)
    first, second = slice(0, 2 * WIDTH), slice(2 * WIDTH, BATCH * WIDTH)
    assert rig.turns == [first, second] * (len(rig.turns) // 2)


def test_continuous_batching(checkpoint: Callable[..., Path]) -> None:
    """Chunked prefill, decoding, and both at once."""
    for arch in ("qwen3_moe", "gpt_oss"):
        rig = Rig(checkpoint(arch), **({"sliding_window": 8} if arch == "gpt_oss" else {}))
        prompts = [list(range(20 + i, 20 + i + 3 + 11 * i)) for i in range(6)]
        expected = [greedy(rig.whole, prompt, NEW) for prompt in prompts]
        assert asyncio.run(engine_answers(rig.model, prompts)) == expected
        assert rig.count("overlap") >= NEW - 1, arch


async def engine_answers(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    engine = engine_of(model, num_blocks=24, page_size=8, max_batch_tokens=48)
    engine.start()
    try:
        answers = (answer(engine, prompt, NEW) for prompt in prompts)
        return [tokens_of(found) for found in await asyncio.gather(*answers)]
    finally:
        engine.stop(10.0)


def test_a_failure_of_one_micro_batch_reaches_the_caller(rig: Rig) -> None:
    rig.turns.clear()
    rig.error = OSError("no replica")
    causal = getattr(rig.model.get_decoder().config, "is_causal", None)
    try:
        with pytest.raises(OSError, match="no replica"):
            generate(rig.model)
    finally:
        rig.error = None
    assert getattr(rig.model.get_decoder().config, "is_causal", None) == causal
    assert torch.equal(generate(rig.model), generate(rig.whole)), "and the next call is as ever"


@pytest.fixture(scope="module")
def qwen(checkpoint: Callable[..., Path]) -> Rig:
    return Rig(checkpoint("qwen3_moe"))


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False, "output_hidden_states": True},
        {"use_cache": False, "output_router_logits": True},
        {"use_cache": True},  # The decoder makes the cache.
    ],
    ids=lambda options: " ".join(options),
)
@torch.no_grad()
def test_unsupported_outputs_run_whole(qwen: Rig, options: dict[str, Any]) -> None:
    before = qwen.count("whole"), qwen.count("overlap")
    out, expected = qwen.model(**ragged(), **options), qwen.whole(**ragged(), **options)
    assert torch.equal(out[0], expected[0])
    assert len(out) == len(expected)
    assert (qwen.count("whole"), qwen.count("overlap")) == (before[0] + 1, before[1])


@torch.no_grad()
def test_other_caches_and_single_sequences_run_whole(qwen: Rig) -> None:
    before = qwen.count("whole"), qwen.count("overlap")
    cache = StaticCache(config=qwen.model.config, max_cache_len=32)
    qwen.model(**ragged(), past_key_values=cache, use_cache=True)
    qwen.model(**ragged(1), use_cache=False)
    with torch.enable_grad():
        qwen.model(**ragged(), use_cache=False)
    assert (qwen.count("whole"), qwen.count("overlap")) == (before[0] + 3, before[1])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_length_dependent_rope_runs_whole(checkpoint: Callable[..., Path], kind: str) -> None:
    ones = [1.0] * 8
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": ones, "long_factor": ones, "original_max_position_embeddings": 8}
    rig = Rig(checkpoint("qwen3_moe"), rope_parameters=rope)
    with torch.no_grad():
        rig.model(**ragged(), use_cache=False)
    assert (rig.count("whole"), rig.count("overlap")) == (1, 0)


@pytest.mark.parametrize(("mode", "overlapped"), [("off", range(1)), ("auto", range(3, NEW - 2))])
def test_off_never_overlaps_and_auto_tries_both(
    checkpoint: Callable[..., Path], mode: str, overlapped: range
) -> None:
    rig = Rig(checkpoint("qwen3_moe"), mode=mode)
    assert torch.equal(generate(rig.model), generate(rig.whole))
    assert rig.count("overlap") in overlapped
    assert rig.count("whole") + rig.count("overlap") == NEW
