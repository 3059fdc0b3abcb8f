"""aiperf 0.13: its command line and its output files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaas.errors import EaasError
from eaas.hub_cache import model_name

__all__ = ["Asked", "Record", "Run", "command", "read_run"]

# aiperf's output files below --artifact-dir.
_RECORDS, _SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"
# Metrics that the row takes from aiperf's summary, and their statistics.
_FIGURES = {
    "output_token_throughput": ("avg",),
    "time_to_first_token": ("p50", "p99"),
    "inter_token_latency": ("p50", "p99"),
}


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


@dataclass(frozen=True)
class Record:
    """One request, measured by aiperf.

    Attributes:
        prompt: Tokens of the prompt, by aiperf's tokenizer.
        output: Tokens of the answer, by aiperf's tokenizer, or by the endpoint with `Asked.server_counts`.
        usage_prompt: Tokens of the prompt, by the endpoint.
        usage_output: Tokens of the answer, by the endpoint.
    """

    prompt: int
    output: int
    usage_prompt: int
    usage_output: int


@dataclass(frozen=True)
class Run:
    """The results of an aiperf run.

    Attributes:
        records: Answered requests.
        failed: Errors of the other requests.
        figures: {metric: {statistic: value}}; tokens/s and milliseconds.
    """

    records: list[Record]
    failed: list[str]
    figures: dict[str, dict[str, float]]


def command(aiperf: Path, endpoint: str, model: Path, asked: Asked, out: Path) -> list[str]:
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


def read_run(out: Path) -> Run:
    """Read aiperf's output directory. Raises EaasError if it has another format than that of 0.13."""
    try:
        lines = (out / _RECORDS).read_text().splitlines()
        summary = json.loads((out / _SUMMARY).read_text())
        entries = [json.loads(line) for line in lines]
        good = [entry["metrics"] for entry in entries if not entry.get("error")]
        return Run(
            records=[_record(metrics) for metrics in good],
            failed=_reasons(entries),
            figures={
                metric: {name: float(summary[metric][name]) for name in names}
                for metric, names in _FIGURES.items()
                if good
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EaasError(
            f"{out}: not the output of aiperf 0.13 ({type(error).__name__}: {error}); "
            "install it with `make .venv-bench/.installed`"
        ) from error


def _record(metrics: dict[str, Any]) -> Record:
    return Record(
        *(
            int(metrics[name]["value"])
            for name in (
                "input_sequence_length",
                "output_sequence_length",
                "usage_prompt_tokens",
                "usage_completion_tokens",
            )
        )
    )


def _reasons(entries: Sequence[dict[str, Any]]) -> list[str]:
    errors = [entry["error"] for entry in entries if entry.get("error")]
    return [f"{error.get('code')} {error.get('type')}: {error['message']}" for error in errors]
