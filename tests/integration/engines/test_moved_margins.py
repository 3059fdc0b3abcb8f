"""Answers whose engine died against undisturbed ones: where they differ, two tokens were nearly equal.

MOVES is the number of deaths. Prefill and decode round differently, so an answer may go on with the other one
of two nearly equal tokens. The demo model computes in float32 here; in bfloat16, in which it is stored,
log-probabilities differ by a few hundredths, and one answer of ten goes on otherwise.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eaas_cli.local.fork_server import ForkServer
from model_engines import ModelEngines
from moved_answers import MovedAnswers, Sequence

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(3600)]

MOVES = int(os.environ.get("MOVES", "50"))
DEMO = Path(__file__).parents[3] / "examples" / "demo"
# Log-probabilities of two tokens that rounding may exchange, in float32.
BOUND = 1e-3
DEATHS_OF_AN_ANSWER = 5
TEXT = "Once upon a time there was the river and a small boat that went to see its old friend"


@pytest.fixture
def moved(tmp_path: Path, fork_server: ForkServer) -> Iterator[MovedAnswers]:
    model = tmp_path / "demo"
    shutil.copytree(DEMO, model)
    shard = model / "model.safetensors"
    weights = {name: tensor.float() for name, tensor in load_file(shard).items()}
    save_file(weights, shard, {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    with ModelEngines(fork_server) as engines, MovedAnswers(model, engines) as moved:
        yield moved


def body(dice: random.Random) -> dict[str, Any]:
    words = " ".join(dice.choices(TEXT.split(), k=dice.randint(3, 40)))
    drawn = {"temperature": 1, "seed": dice.randrange(1000)} if dice.random() < 0.5 else {}
    asked = {"prompt": words, "max_tokens": 64, "ignore_eos": True, "logprobs": 2}
    return {"temperature": 0} | asked | drawn


def margin(undisturbed: Sequence, at: int, other: int) -> float:
    """By how much an answer's token was more probable than the other one, in log-probability."""
    scores = [each.scores for each in undisturbed.deliveries if each.scores is not None][at]
    assert scores is not None
    tops = dict(zip(scores.top_TK[0].tolist(), scores.top_logprob_TK[0].tolist(), strict=True))
    return float(scores.logprob_T[0]) - tops.get(other, float("-inf"))


def test_answers_differ_only_at_nearly_equal_tokens(moved: MovedAnswers) -> None:
    dice = random.Random(1)
    differ, margins = 0, []
    for number in range(MOVES):
        if number % DEATHS_OF_AN_ANSWER == 0:
            asked = body(dice)
            moved.serve(-1)
            _, (undisturbed,) = moved.ask("/v1/completions", asked)
        at = dice.randrange(len(undisturbed.tokens))
        _, (sequence,) = moved.ask_dying("/v1/completions", asked, at)
        pairs = enumerate(zip(undisturbed.tokens, sequence.tokens, strict=True))
        first = next(((n, b) for n, (a, b) in pairs if a != b), None)
        if first is not None:
            differ += 1
            by = margin(undisturbed, *first)
            is_drawn = asked["temperature"] > 0
            print(f"moved at {at}, differs at {first[0]} by {by:.2g}", "(drawn)" * is_drawn)
            if not is_drawn:
                margins.append(abs(by))
        print(f"{number + 1} moves, {differ} answers differ", flush=True)
    assert all(each < BOUND for each in margins)
    assert differ <= 0.01 * MOVES + 1
