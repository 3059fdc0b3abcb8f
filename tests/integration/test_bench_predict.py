"""What a router dry-run is said to know of a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eaas.bench import predict as bench
from eaas.bench.predict import bench_predict, domain_prompts
from eaas.cli import app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_where_attention_adds_nothing_the_first_layer_is_known(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = bench.load_model

    def without_attention(*args: Any) -> Any:
        model = load_model(*args)
        for name, parameter in model.named_parameters():
            if ".o_proj." in name:
                parameter.data.zero_()
        return model

    monkeypatch.setattr(bench, "load_model", without_attention)
    seen = []
    document = bench_predict(
        checkpoint("olmoe"),
        lambda vocabulary: domain_prompts(vocabulary, 6, 40),
        8,
        1,
        lambda: seen.append(1),
    )
    assert len(seen) == 6
    assert [row["layer"] for row in document["layers"]] == [0, 1, 2]
    first, *deeper = document["layers"]
    assert first["prompt"] == first["prompt_own"] == 1.0
    assert first["answer"] == first["seen"] < 1
    assert all(
        -1 <= value <= 1 for row in deeper for value in row.values() if value != row["layer"]
    )
    assert all(spent > 0 for spent in document["us_per_token"].values())
    assert document["prompt_tokens"] == 240


def test_prompts_of_ones_own(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The river begins\n\nOnce upon a time there was\n")
    words = ["--model", str(checkpoint()), "--max-tokens", "3", "--threads", "1", "--json"]
    done = CliRunner().invoke(app, ["bench", "predict", "--prompts", str(prompts), *words])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["prompts"] == 2
    done = CliRunner().invoke(app, ["bench", "predict", "--prompts", "gone.txt", *words])
    assert "gone.txt" in str(done.exception)


def test_domains_have_tokens_of_their_own() -> None:
    prompts = domain_prompts(5000, 16, 60)
    assert {len(prompt) for prompt in prompts} == {60}
    assert max(map(max, prompts)) < 5000
    for number in range(8):
        like, unlike = set(prompts[number + 8]), set(prompts[(number + 1) % 8])
        mine = set(prompts[number])
        assert len(mine & like) > 3 * len(mine & unlike)
