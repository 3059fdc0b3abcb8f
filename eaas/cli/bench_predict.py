"""`eaas bench predict`: what a router dry-run knows of a request."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.cli.options import Json
from eaas.cli.progress import progress

__all__ = ["register"]


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("predict")(predict)


def predict(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one to a line.",
            show_default="drawn from 8 domains with tokens of their own",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Prompts that are drawn.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of this process.", show_default="one for each core")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predicted against true expert loads: correlation, by layer, and time."""
    from eaas.bench.predict import bench_predict, domain_prompts
    from eaas.cores import usable_cores
    from eaas.errors import ConfigError

    lines: list[str] = []
    if prompts is not None:
        try:
            lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts {prompts}: {error}") from error
        if len(lines) < 2:
            raise ConfigError(f"--prompts {prompts}: {len(lines)} prompts; give two at least")
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model)
        path = model

        def given(vocabulary: int) -> Sequence[Sequence[int]]:
            if not lines:
                return domain_prompts(vocabulary, requests, prompt_tokens)
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            return [tokenizer(line)["input_ids"] for line in lines]

        with progress("predicting", len(lines) or requests) as done:
            document = bench_predict(path, given, max_tokens, threads or usable_cores(), done)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    columns = ("prompt", "prompt_own", "answer", "answer_own", "seen", "seen_own")
    for column in ("layer", *(column.replace("_", ", ") for column in columns)):
        table.add_column(column, justify="right")
    for row in document["layers"]:
        table.add_row(str(row["layer"]), *(f"{row[column]:.2f}" for column in columns))
    Console().print(table)
    print(
        "correlation with true loads. prompt, answer: of a dry-run with those of prompt and answer;\n"
        "seen: of the prompt's true ones with the answer's; own: less the mean request's"
    )
    spent = document["us_per_token"]
    print(
        f"us per prompt token: dry-run of all layers {spent['dry_run']}, known prefix "
        f"{spent['known_prefix']}, prefill {spent['prefill']}"
    )
