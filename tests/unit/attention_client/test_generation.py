"""Tokens of `generate` equal transformers' own with local experts, whatever the batch and the search."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria

from attention_client.engines.transformers.model import load_model
from attention_client.engines.transformers.remote_experts import remote_experts
from eaas.checkpoint import Checkpoint
from eaas.errors import GradientError

# What a token gets that is not wanted; a result that reads it differs.
GARBAGE = 10.0


class LocalExperts:
    """A cluster whose experts are those of a model in this process."""

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        self.experts = [model.get_submodule(name) for name in checkpoint.shape.layer_names]
        self.calls = 0
        self.metrics = SimpleNamespace()

    def layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> torch.Tensor:
        self.calls += 1
        with torch.no_grad():
            out_TH: torch.Tensor = self.experts[layer](x_TH, ids_TK, scores_TK)
        if wanted_T is not None:
            out_TH[~wanted_T] = GARBAGE
        return out_TH


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path]
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Transformers' own model, and one whose experts are remote."""
    torch.set_num_threads(1)
    path = checkpoint(request.param)
    own = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").eval()
    opened = Checkpoint.open(path)
    return own, load_model(opened, LocalExperts(opened, deepcopy(own)))  # type: ignore[arg-type]


LENGTH = 12
IDS_BT = torch.randint(20, 250, (4, LENGTH), generator=torch.Generator().manual_seed(5))


def padded(side: str) -> dict[str, torch.Tensor]:
    """Rows of 12, 9, 5 and 1 tokens."""
    mask_BT = torch.ones_like(IDS_BT)
    for row, padding in enumerate((0, 3, 7, 11)):
        if side == "left":
            mask_BT[row, :padding] = 0
        elif side == "right":
            mask_BT[row, LENGTH - padding :] = 0
        else:
            mask_BT[row, 1 : 1 + padding] = 0
    return {"input_ids": IDS_BT * mask_BT, "attention_mask": mask_BT}


class _Lengths(StoppingCriteria):
    """Row r ends after r + 2 tokens, without an end token."""

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.arange(len(ids)) + 2 <= ids.shape[1] - LENGTH


def mean_of_all_positions(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A search of one step that reads the logits of every position."""
    logits = model(input_ids=ids, attention_mask=kwargs["attention_mask"]).logits
    return torch.cat([ids, logits.mean(dim=1).argmax(dim=-1, keepdim=True)], dim=1)


ENDS = [3, 7, 40, 41, 42, 43, 44, 45, *range(100, 160)]
BATCHES: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "rows end": {"eos_token_id": ENDS},
    "no end token": {"eos_token_id": None, "stopping_criteria": [_Lengths()]},
    "end tokens and lengths": {"eos_token_id": ENDS, "stopping_criteria": [_Lengths()]},
    "sampled": {"do_sample": True, "num_return_sequences": 2, "eos_token_id": ENDS},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": ENDS},
    "static cache": {"cache_implementation": "static", "eos_token_id": ENDS},
    "no cache": {"use_cache": False, "eos_token_id": ENDS},
    "guided": {"guidance_scale": 1.5, "eos_token_id": ENDS},
    "own search": {"custom_generate": mean_of_all_positions},
    "chunks": {"prefill_chunk_size": 5},
}


def same(pair: tuple[PreTrainedModel, PreTrainedModel], **arguments: Any) -> Any:
    outputs = []
    for model in pair:
        torch.manual_seed(0)
        outputs.append(
            model.generate(
                **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | arguments
            )
        )
    own, found = outputs
    tokens = [out if isinstance(out, torch.Tensor) else out.sequences for out in (own, found)]
    assert torch.equal(*tokens)
    return own, found


@pytest.mark.parametrize(
    ("side", "options"),
    [
        *(("left", options) for options in BATCHES),
        *(("right", options) for options in ("rows end", "beams", "own search", "chunks")),
        *(("middle", options) for options in ("nothing more", "no cache", "own search")),
    ],
)
def test_batches(pair: tuple[PreTrainedModel, PreTrainedModel], side: str, options: str) -> None:
    same(pair, **padded(side), **BATCHES[options])


@torch.no_grad()
def test_another_thread_wants_every_token(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """While one thread generates from padded prompts, a pass of another has every position."""
    model, inputs, found = pair[1], padded("left"), []
    expected = model(**inputs).logits

    def in_another_thread() -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    def between(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(in_another_thread).result())

    with model.register_forward_pre_hook(between):
        same(pair, **inputs, eos_token_id=ENDS)
    assert found
    assert all(torch.equal(each, expected) for each in found)


def test_embeddings_in_place_of_tokens(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    given = padded("left")
    embeds = pair[0].get_input_embeddings()(given.pop("input_ids")).detach()
    same(pair, inputs_embeds=embeds, **given, eos_token_id=ENDS)


@pytest.mark.parametrize("ends", [None, ENDS])
def test_assisted_decoding(
    pair: tuple[PreTrainedModel, PreTrainedModel], ends: list[int] | None
) -> None:
    for row in range(2):
        ids_1T = IDS_BT[row : row + 1].repeat(1, 2)
        same(pair, input_ids=ids_1T, prompt_lookup_num_tokens=3, eos_token_id=ends)
        assistant = pair[1] if row == 0 else pair[0]
        same(pair, input_ids=ids_1T, assistant_model=deepcopy(pair[0]), eos_token_id=ends)
        same((pair[0], pair[1]), input_ids=ids_1T, assistant_model=assistant, eos_token_id=ends)


@pytest.mark.parametrize("side", ["left", "right"])
def test_outputs_that_are_read(pair: tuple[PreTrainedModel, PreTrainedModel], side: str) -> None:
    own, found = same(
        pair,
        **padded(side),
        eos_token_id=ENDS,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
    )
    for name in ("logits", "hidden_states"):
        for expected, got in zip(getattr(own, name), getattr(found, name), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_refused_before_the_experts(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    model = pair[1]
    cluster = remote_experts(model).cluster
    embeds = model.get_input_embeddings()(IDS_BT).detach()
    expected = model(inputs_embeds=embeds).logits
    before = cluster.calls

    def refused(said: str, run: Callable[[], object]) -> None:
        with pytest.raises(GradientError, match=said):
            run()
        assert cluster.calls == before

    wanted = embeds.clone().requires_grad_()
    refused("argument inputs_embeds", lambda: model(inputs_embeds=wanted))
    refused("input of an expert layer", lambda: model.model(inputs_embeds=wanted))
    refused(
        "argument inputs_embeds",
        lambda: torch.func.grad(lambda x: model(inputs_embeds=x).logits.sum())(embeds),
    )
    query = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    try:
        refused(r"parameter model.layers.0.self_attn.q_proj.weight", lambda: model(IDS_BT))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.train()
        refused(r"parameter model.layers.0.self_attn.q_proj.weight", lambda: model(IDS_BT))
        with torch.no_grad():
            assert torch.equal(model.eval()(inputs_embeds=wanted).logits, expected)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        query.requires_grad_(False)
    # The head comes after the experts.
    head = model.lm_head.weight.requires_grad_()
    try:
        model(inputs_embeds=embeds).logits.sum().backward()
        assert head.grad is not None
    finally:
        head.requires_grad_(False).grad = None
    assert torch.equal(model(inputs_embeds=embeds).logits, expected)
