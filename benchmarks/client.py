"""Drive the endpoint with NVIDIA's aiperf 0.13: every request must succeed, and token counts must agree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from eaas.checkpoint.source import local_directory
from eaas.config import load_config
from eaas.errors import ConfigError, EaasError
from eaas.hub_cache import model_name
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.bench.machine import describe_machine
from eaas_cli.commands.options import Json, Transport
from eaas_cli.console import print_rows
from eaas_cli.errors import exit_with_one_line
from eaas_cli.local import LocalCluster

__all__ = ["Asked", "command_line", "disagreements", "read_row"]

_RUN_S = 600.0
_LINES = 15
# This stop string occurs early in every answer, so only min_tokens keeps an answer from ending there.
_STOP = "e"
# aiperf's output files below --artifact-dir.
_RECORDS, _SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"
# Metrics that the row takes from aiperf's summary, and their statistics.
_FIGURES = {
    "output_token_throughput": ("avg",),
    "time_to_first_token": ("p50", "p99"),
    "inter_token_latency": ("p50", "p99"),
}
_COUNTS = (
    "input_sequence_length",
    "output_sequence_length",
    "usage_prompt_tokens",
    "usage_completion_tokens",
)


def main(
    model: Annotated[
        Path,
        typer.Option(
            "--model", help="Checkpoint to serve, with its tokenizer.", parser=local_directory
        ),
    ],
    aiperf: Annotated[
        Path, typer.Option(metavar="FILE", help="Program; `make bench-client` installs it.")
    ] = Path(".venv-bench/bin/aiperf"),
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Running endpoint.", show_default="start a cluster"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers of the cluster.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Transport = "shm",
    requests: Annotated[int, typer.Option(min=1, help="Requests per run.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Runs before the one with min_tokens.")] = 3,
    as_json: Json = False,
) -> None:
    """Drive the endpoint with aiperf: every request must succeed, and token counts must agree."""
    end_on_sigterm()
    if not aiperf.exists():
        raise ConfigError(f"{aiperf} does not exist: make it with `make .venv-bench/.installed`")
    first = Asked(requests, concurrency, prompt_tokens, max_tokens)
    turns = [replace(first, seed=first.seed + number) for number in range(rounds)]
    turns.append(replace(first, min_tokens=max_tokens // 2, stop=_STOP, server_counts=True))
    rows = []
    with ExitStack() as stack:
        url = endpoint
        if url is None:
            say("starting the cluster ...")
            settings = load_config(attention_client={"transport": transport}, frontend={"port": 0})
            cluster = LocalCluster(model, servers=servers, redundancy=redundancy, config=settings)
            url = stack.enter_context(cluster).endpoint
        for number, turn in enumerate(turns, 1):
            say(f"aiperf, run {number} of {len(turns)} ...")
            rows.append(_run(aiperf, url, model, turn))
    document = {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers if endpoint is None else None,
        "runs": rows,
        "wrong": [f"run {i}: {why}" for i, row in enumerate(rows, 1) for why in disagreements(row)],
    }
    show(document, as_json, _report)
    if document["wrong"]:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Asked:
    """The load that aiperf sends in a run.

    Attributes:
        prompt_tokens: Tokens of a prompt, by the checkpoint's tokenizer.
        max_tokens: Tokens of an answer; the end token is ignored.
        min_tokens: A stop string ends no shorter answer.
        stop: A stop string.
        server_counts: Use the endpoint's counts of every event instead of the tokenizer's.
    """

    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    min_tokens: int | None = None
    stop: str | None = None
    server_counts: bool = False
    seed: int = 1


def command_line(aiperf: Path, endpoint: str, model: Path, asked: Asked, out: Path) -> list[str]:
    """Build the command line of aiperf.

    `model`: directory of the checkpoint, which gives the model's name and the tokenizer.
    """
    extra: dict[str, Any] = {"ignore_eos": True}
    if asked.min_tokens is not None:
        extra["min_tokens"] = asked.min_tokens
    if asked.stop is not None:
        extra["stop"] = asked.stop
    words: list[object] = [aiperf, "profile", "--model", model_name(model), "--url", endpoint]
    words += ["--endpoint-type", "chat", "--streaming", "--tokenizer", model.resolve()]
    words += ["--request-count", asked.requests, "--concurrency", asked.concurrency]
    words += ["--isl", asked.prompt_tokens, "--isl-stddev", 0]
    words += ["--osl", asked.max_tokens, "--osl-stddev", 0]
    words += ["--random-seed", asked.seed, "--extra-inputs", json.dumps(extra)]
    if asked.server_counts:
        words += ["--use-server-token-count", "--per-chunk-usage"]
    words += ["--artifact-dir", out, "--ui", "none"]
    # aiperf only sends requests: it scrapes no metrics and draws no plots.
    words += ["--no-gpu-telemetry", "--no-server-metrics", "--no-auto-plot"]
    return [str(word) for word in words]


def read_row(asked: Asked, out: Path) -> dict[str, Any]:
    """Read aiperf's output directory; make the run's row of the document.

    Returns:
        asked, answered (requests), failed (errors of the others), figures {metric: {statistic: value}} in
        tokens/s and milliseconds; fewest_tokens, most_tokens of an answer, by the endpoint. `prompts_differ`
        and `outputs_differ` count requests whose length differs between aiperf and the endpoint,
        `outputs_off` is the largest difference in tokens.

    Raises:
        EaasError: The output has another format than that of 0.13.
    """
    try:
        entries = [json.loads(line) for line in (out / _RECORDS).read_text().splitlines()]
        summary = json.loads((out / _SUMMARY).read_text())
        errors = [entry["error"] for entry in entries if entry.get("error")]
        good = [entry["metrics"] for entry in entries if not entry.get("error")]
        counts_NR = [[int(metrics[name]["value"]) for metrics in good] for name in _COUNTS]
        prompt_R, output_R, usage_prompt_R, usage_output_R = np.array(counts_NR, dtype=np.int64)
        off_R = abs(output_R - usage_output_R)
        return {
            "asked": vars(asked),
            "answered": len(good),
            "failed": [f"{e.get('code')} {e.get('type')}: {e['message']}" for e in errors],
            "prompts_differ": int((prompt_R != usage_prompt_R).sum()),
            "outputs_differ": int((off_R > 0).sum()),
            "outputs_off": int(off_R.max(initial=0)),
            "fewest_tokens": min(usage_output_R.tolist(), default=0),
            "most_tokens": max(usage_output_R.tolist(), default=0),
            "figures": {
                metric: {name: float(summary[metric][name]) for name in names}
                for metric, names in _FIGURES.items()
                if good
            },
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EaasError(
            f"{out}: not the output of aiperf 0.13 ({type(error).__name__}: {error}); "
            "install it with `make .venv-bench/.installed`"
        ) from error


def disagreements(row: dict[str, Any]) -> list[str]:
    """List the failures and disagreements in a run's row; empty if there are none.

    The length of an answer must agree if aiperf uses the endpoint's counts. Its own tokenizer may split a
    text into other tokens than the model generated.
    """
    asked, wrong = row["asked"], []
    if row["failed"]:
        wrong.append(f"{len(row['failed'])} requests failed, the first with {row['failed'][0]}")
    if row["answered"] + len(row["failed"]) != asked["requests"]:
        wrong.append(f"{row['answered']} of {asked['requests']} requests are in the records")
    for of in ("prompts", "outputs") if asked["server_counts"] else ("prompts",):
        if row[f"{of}_differ"]:
            wrong.append(f"the lengths of {row[f'{of}_differ']} {of} differ from the endpoint's")
    if (
        asked["stop"] is None
        and not row["fewest_tokens"] == row["most_tokens"] == asked["max_tokens"]
    ):
        wrong.append(
            f"answers of {row['fewest_tokens']} to {row['most_tokens']} tokens, although ignore_eos "
            f"asks for {asked['max_tokens']}"
        )
    if asked["min_tokens"] is not None and row["fewest_tokens"] < asked["min_tokens"]:
        wrong.append(f"an answer of {row['fewest_tokens']} tokens, under min_tokens")
    return wrong


def _run(aiperf: Path, endpoint: str, model: Path, asked: Asked) -> dict[str, Any]:
    """Run aiperf once; return its row. Raises EaasError with the end of its log."""
    # Offline, aiperf mistakes a local directory for a name on the hub.
    environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    with tempfile.TemporaryDirectory(prefix="eaas-aiperf-") as directory:
        out, log = Path(directory) / "out", Path(directory) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command_line(aiperf.absolute(), endpoint, model, asked, out),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                process_group=0,
            )
            try:
                status = process.wait(_RUN_S)
            except subprocess.TimeoutExpired:
                raise EaasError(f"aiperf was not done within {_RUN_S:.0f} s") from None
            finally:
                if process.poll() is None:  # aiperf has child processes
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
            raise EaasError(f"aiperf ended with status {status}:\n{last}")
        return read_row(asked, out)


def _report(document: dict[str, Any]) -> None:
    columns = ("answered", "prompts_differ", "outputs_differ", "outputs_off", "fewest_tokens")
    print_rows(document["runs"], (*columns, "most_tokens", "figures"))
    print(
        "In the last run aiperf uses the endpoint's counts; in the others its tokenizer splits the text\n"
        "of an answer, sometimes differently."
    )
    for line in document["wrong"]:
        print(f"wrong: {line}")


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
