"""`eaas generate` against an endpoint whose model samples by default, as most checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from eaas_cli.commands import app
from http_box import Box

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sampling_box() -> Iterator[Box]:
    with Box(generation={"do_sample": True, "temperature": 1.2, "top_k": 50}) as box:
        yield box


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_checkpoint_sets_the_default_sampling(sampling_box: Box, form: tuple[str, ...]) -> None:
    def generate(*options: str) -> str:
        words = ["generate", "Hello", "--max-tokens", "24", "--endpoint", sampling_box.url]
        done = CliRunner().invoke(app, [*words, *options, *form])
        assert done.exit_code == 0, done.output
        # Without the id, which differs.
        return done.stdout.partition('"choices"')[2] or done.stdout

    assert len({generate() for _ in range(2)}) == 2
    greedy = {generate("--temperature", "0") for _ in range(2)}
    assert len(greedy) == 1
    (text,) = greedy
    if not form:
        assert text.startswith(sampling_box.text("Hello", 4))
