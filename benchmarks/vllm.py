"""Measure answers of clusters, by vLLM or the embedded engine, against vLLM with local experts.

All engines run, and take turns in each round, so that a slow minute of the machine meets all of them. Prompts
are random tokens, the same for all engines and new in each round. A row of the document has the medians of an
engine's tokens/s and of the time to the first token, and of their ratios to plain vLLM's; without vLLM, which
cannot serve every checkpoint on CPUs, to llama.cpp's.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.entrants import ROOT, cluster, llama_server, plain_vllm
from eaas.checkpoint.source import local_directory
from eaas.errors import ConfigError
from eaas.hub_cache import model_name
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.bench.load import Workload, compare
from eaas_cli.commands.options import Json
from eaas_cli.console import print_rows
from eaas_cli.errors import exit_with_one_line
from eaas_cli.option_values import known, numbers

_PLAIN = "vllm, local experts"
_LLAMA = "llama.cpp"
_MARGIN_TOKENS = 16
# vLLM's processes poll for a second after their last token, and would take the next engine's cores.
_PAUSE_S = 1.5


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
    llama: Annotated[
        Path | None,
        typer.Option(
            "--llama-server", metavar="FILE", help="llama.cpp's server, one more entrant."
        ),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The checkpoint for llama.cpp.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure answers of clusters, by vLLM or the embedded engine, against vLLM with local experts."""
    end_on_sigterm()
    if (llama is None) != (gguf is None):
        raise ConfigError("--llama-server and --gguf go together: give both or neither")
    chosen = known("--engines", engines.split(","), ("vllm", "transformers"))
    counts, lengths = numbers("--streams", streams), numbers("--prompts", prompts)
    python = None if vllm_python == "none" else Path(vllm_python)
    if python is None and (llama is None or "vllm" in chosen):
        raise ConfigError(
            "without vLLM: give --llama-server and --gguf, and --engines transformers"
        )
    if python is not None and not python.is_file():
        raise ConfigError(f"--vllm-python {python}: not there; run `make setup-vllm`")
    for path in (llama, gguf):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: not there; --llama-server and --gguf name files")
    model = model.resolve()
    most = max(lengths) + max_tokens + _MARGIN_TOKENS
    entrants: dict[str, AbstractContextManager[str]] = {}
    if python is not None:
        entrants[_PLAIN] = plain_vllm(python, model)
    for engine in chosen:
        runs = python if engine == "vllm" and python is not None else Path(sys.executable)
        for count in numbers("--servers", servers):
            name = f"{engine}, {count} expert server{'s' if count > 1 else ''}"
            entrants[name] = cluster(runs, model, count, engine)
    if llama is not None and gguf is not None:
        entrants[_LLAMA] = llama_server(llama, gguf, max(counts), most)
    rows = _compare(entrants, counts, lengths, max_tokens, rounds)
    document = {
        "model": model_name(model),
        "max_tokens": max_tokens,
        "rounds": rounds,
        "reference": _LLAMA if python is None else _PLAIN,
        "rows": rows,
    }
    show(document, as_json, _report)


def _compare(
    entrants: dict[str, AbstractContextManager[str]],
    streams: Sequence[int],
    prompts: Sequence[int],
    answer: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Start all entrants, then measure each load, whose requests all run at the same time."""
    rows: list[dict[str, Any]] = []
    first = 0
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for name, entrant in entrants.items():
            say(f"starting: {name}")
            urls[name] = stack.enter_context(entrant)
        reference = _PLAIN if _PLAIN in urls else _LLAMA
        for prompt, count in itertools.product(prompts, streams):
            say(f"{count} streams, prompts of {prompt}")
            load = Workload(count, count, prompt, answer, first)
            first += (rounds + 1) * count
            found = compare(urls, load, rounds, reference, say, pause_s=_PAUSE_S)
            rows += [{"streams": count, "prompt": prompt} | row for row in found]
    return rows


def _report(document: dict[str, Any]) -> None:
    title = (
        f"{document['model']}: answers of {document['max_tokens']} tokens, medians of "
        f"{document['rounds']} rounds; ratios to {document['reference']}"
    )
    print_rows(document["rows"], title=title)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
