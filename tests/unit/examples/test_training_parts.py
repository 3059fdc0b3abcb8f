"""Training: fast forms equal transformers' own, and a saved run resumes without a difference."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demo_training.corpus import Corpus
from demo_training.model import Sizes, build_model, losses
from demo_training.optimizer import Optimizer
from demo_training.sources import DOMAINS
from demo_training.training import Progress, Settings, train

VOCAB = 300
CPU = torch.device("cpu")
SMALL = Sizes(layers=2, hidden=64, experts=8, top_k=2, width=32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(1)
    return build_model(VOCAB, 64, 0, CPU, SMALL)


@pytest.fixture
def corpus() -> Corpus:
    """Each domain counts through the vocabulary with its own step, which is easy to learn."""
    ids = {d: (np.arange(3000) * (i + 1) % VOCAB).astype(np.uint16) for i, d in enumerate(DOMAINS)}
    return Corpus(train=ids, held_out=ids, bytes_read=dict.fromkeys(DOMAINS, 0))


def settings(**changes: Any) -> Settings:
    """Settings with so much time that the learning rate depends on the step alone."""
    usual = {"minutes": 1e9, "workers": 1, "tokens": 64, "length": 16, "long_length": 16}
    return Settings(**(usual | changes))


def until(step: int) -> Any:
    """A report callback that stops the training after a step, as Ctrl-C does."""

    def report(progress: Progress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return report


def test_loss_and_gradients_are_those_of_transformers(model: Any) -> None:
    from transformers import Qwen3MoeForCausalLM

    model = model.float()
    eager = Qwen3MoeForCausalLM._from_config(
        copy.deepcopy(model.config),
        dtype=torch.float32,
        experts_implementation="eager",
        attn_implementation="eager",
    )
    assert model.config._experts_implementation != eager.config._experts_implementation
    assert model.config._attn_implementation != eager.config._attn_implementation
    eager.load_state_dict(model.state_dict())
    # No expert's share of 3 x 40 tokens fills whole blocks.
    ids_BT = torch.randint(0, VOCAB, (3, 41))
    loss, unevenness = losses(model, ids_BT)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = eager(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert 1 <= unevenness.item() < 2
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), eager.named_parameters(), strict=True
    ):
        error = (mine.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < 1e-4, name


def test_it_learns(model: Any, corpus: Corpus, tmp_path: Path) -> None:
    seen: list[float] = []
    end = until(40)

    def report(progress: Progress) -> None:
        seen.append(progress.loss)
        end(progress)

    result = train(model, corpus, settings(tokens=256), tmp_path, report)
    assert (result.step, result.tokens) == (40, 40 * 256)
    # What is reported is the mean over all steps so far.
    last = 40 * seen[39] - 39 * seen[38]
    assert last < seen[0] - 0.3


def test_a_stopped_training_resumes_without_a_difference(corpus: Corpus, tmp_path: Path) -> None:
    def trained(directory: Path, *stops: int) -> dict[str, torch.Tensor]:
        for stop in stops:
            torch.manual_seed(1)
            model = build_model(VOCAB, 64, 0, CPU, SMALL)
            assert train(model, corpus, settings(), directory, until(stop)).step == stop
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}

    whole, parts = trained(tmp_path / "whole", 5), trained(tmp_path / "parts", 2, 5)
    first = trained(tmp_path / "first", 2)
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    moved = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(first[moved], whole[moved])
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 1


def test_two_processes_learn_like_one(corpus: Corpus, tmp_path: Path) -> None:
    """One part, or two uneven ones, give the same mean gradients over sequences."""

    def moved(workers: int) -> tuple[dict[str, torch.Tensor], Progress]:
        torch.manual_seed(1)
        model = build_model(VOCAB, 64, 0, CPU, SMALL).float()
        chosen = settings(workers=workers, tokens=128, evenness=0.0)
        progress = train(model, corpus, chosen, tmp_path / str(workers), until(1))
        return dict(model.named_parameters()), progress

    one, progress_of_one = moved(1)
    two, progress_of_two = moved(2)
    assert progress_of_one.loss == pytest.approx(progress_of_two.loss, abs=1e-4)
    for name, weight in one.items():
        assert (weight - two[name]).abs().max() < 1e-4, name


def test_a_pause_does_not_count_as_work(
    model: Any, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 2 s, and one during which the machine slept for an hour."""
    from demo_training import training

    now = [0.0]

    def monotonic() -> float:
        now[0] += 2.0
        return now[0]

    def report(progress: Progress) -> None:
        if progress.step == 5:
            now[0] += 3600.0

    monkeypatch.setattr(training.time, "monotonic", monotonic)
    result = train(model, corpus, settings(minutes=20 / 60, save_every_s=1e9), tmp_path, report)
    assert (result.step, result.worked_s) == (10, 20.0)


def test_muon_moves_a_matrix_in_all_its_directions(model: Any) -> None:
    optimizer = Optimizer(model)
    name = "model.layers.0.mlp.experts.down_proj"
    before = optimizer.state[f"master.{name}"].clone()
    gradients = {n: torch.zeros_like(w, dtype=torch.float32) for n, w in model.named_parameters()}
    # One direction is 60 times as steep as the others.
    gradients[name] = torch.randn(before.shape) + 10 * torch.ones(before.shape)
    optimizer.step(gradients, 1, 1e-3)
    update = optimizer.state[f"master.{name}"] - before * (1 - 1e-3 * 0.1)
    sizes = torch.linalg.svdvals(update[0])
    # Of 32 singular values, 26 and more are alike, whatever the gradient's were.
    assert sizes[0] / sizes[25] < 10
    other = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(
        optimizer.state[f"master.{other}"].to(torch.bfloat16),
        dict(model.named_parameters())[other].detach(),
    )
