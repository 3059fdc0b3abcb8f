"""Measure the perplexity of a model by the format of its weights, against bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.checkpoint.source import local_directory
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line

_DEMO = Path(__file__).parents[2] / "examples/demo"


def main(
    model: Annotated[
        Path, typer.Option("--model", help="bf16 checkpoint.", parser=local_directory)
    ] = _DEMO,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="File to read. Repeatable.", show_default="the demo's held-out text"),
    ] = None,
    formats: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Formats.", show_default="all")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Windows per text, at most.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a model by the format of its weights, against bf16."""
    end_on_sigterm()
    from benchmarks.quality.formats import FORMATS
    from benchmarks.quality.report import print_report
    from benchmarks.quality.run import bench_quality
    from benchmarks.quality.texts import held_out_texts, read_text
    from eaas_cli.option_values import known, words

    document = bench_quality(
        model,
        {path.name: read_text(path) for path in text} if text else held_out_texts(),
        formats=known("--formats", words(formats) if formats else [*FORMATS], tuple(FORMATS)),
        windows=windows,
        length=length,
        say=say,
    )
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
