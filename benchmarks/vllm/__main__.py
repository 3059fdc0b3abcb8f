"""Measure answers of clusters, by vLLM or the embedded engine, against vLLM with local experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.vllm.engines import ROOT
from eaas.checkpoint.source import local_directory
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    model: Annotated[
        Path, typer.Option("--model", help="Checkpoint.", parser=local_directory)
    ] = ROOT / "examples/demo",
    servers: Annotated[
        str, typer.Option(metavar="N,...", help="Numbers of expert servers, one cluster for each.")
    ] = "1,3",
    streams: Annotated[str, typer.Option(metavar="N,...", help="Answers at a time.")] = "1,8,32",
    prompts: Annotated[str, typer.Option(metavar="N,...", help="Tokens per prompt.")] = "32",
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens per answer.")] = 150,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each measurement.")] = 7,
    vllm_python: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Python of the environment with vLLM (`make setup-vllm`). none: without vLLM, "
            "ratios to llama.cpp.",
        ),
    ] = str(ROOT / ".venv-vllm/bin/python"),
    engines: Annotated[
        str, typer.Option(metavar="NAME,...", help="Engines of the clusters: vllm, transformers.")
    ] = "vllm,transformers",
    llama_server: Annotated[
        Path | None, typer.Option(metavar="FILE", help="llama.cpp's server, one more entrant.")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The checkpoint for llama.cpp.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure answers of clusters, by vLLM or the embedded engine, against vLLM with local experts."""
    from benchmarks.vllm.report import print_report
    from benchmarks.vllm.run import bench_vllm
    from eaas.errors import ConfigError
    from eaas_cli.option_values import known, numbers

    if (llama_server is None) != (gguf is None):
        raise ConfigError("--llama-server and --gguf go together: give both or neither")
    end_on_sigterm()
    document = bench_vllm(
        model,
        servers=numbers("--servers", servers),
        streams=numbers("--streams", streams),
        max_tokens=max_tokens,
        rounds=rounds,
        vllm_python=None if vllm_python == "none" else Path(vllm_python),
        engines=known("--engines", engines.split(","), ("vllm", "transformers")),
        prompts=numbers("--prompts", prompts),
        llama=(llama_server, gguf) if llama_server and gguf else None,
        say=say,
    )
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
