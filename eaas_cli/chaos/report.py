"""The report of a chaos run: JSON document, history file and table."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaas.errors import ConfigError
from eaas_cli.bench.stream import Answer
from eaas_cli.chaos.check import excused
from eaas_cli.chaos.history import Census, History, Settings
from eaas_cli.console import print_table

__all__ = ["document_of", "print_report", "repeat_command", "write_history"]


def document_of(
    settings: Settings, skipped: Mapping[str, str], history: History, violations: Sequence[str]
) -> dict[str, Any]:
    """Build the document of `eaas chaos run --json` at the end of a run; `print_report` shows it.

    A request without an answer at the end counts as asked alone. The recovery of a fault is the time from its
    end until the cluster was whole again; None: it was not.
    """
    asked, answers = history.asked, [a.answer for a in history.asked if a.answer is not None]
    return {
        **{name: value for name, value in vars(settings).items() if name != "kinds"},
        "faults": list(settings.kinds),
        "skipped": dict(skipped),
        "requests": {
            "asked": len(asked),
            "right": sum(
                a.answer is not None
                and not a.answer.error
                and a.answer.text == history.answers[a.prompt]
                for a in asked
            ),
            "errors": sum(bool(answer.error) for answer in answers),
            "errors_without_a_replica": sum(
                bool(a.answer and a.answer.error) and excused(a, history) for a in asked
            ),
            "worst_stall_ms": round(1e3 * max((a.stall_s for a in answers), default=0.0), 1),
        },
        "incidents": [
            {
                "kind": i.kind,
                "target": i.target,
                "lasted_s": round(i.mended_s - i.began_s, 2),
                "recovery_s": None if math.isinf(i.whole_s) else round(i.whole_s - i.mended_s, 2),
                "worst_stall_ms": round(1e3 * _stall(history, i.began_s, i.whole_s), 1),
            }
            for i in history.incidents
        ],
        "resources": {
            name: {
                "resident_mib": [_mib(history.before, name), _mib(history.after, name)],
                "descriptors": [
                    history.before[name].descriptors,
                    history.after[name].descriptors,
                ],
                "segments": [history.before[name].segments, history.after[name].segments],
            }
            for name in sorted(history.before.keys() & history.after.keys())
        },
        "violations": list(violations),
        "repeat": repeat_command(settings),
    }


def repeat_command(settings: Settings) -> str:
    """Build the shell command that repeats the run: the same seed, so the same faults and prompts."""
    return shlex.join(
        [
            *("eaas", "chaos", "run", "--seed", str(settings.seed)),
            *("--minutes", f"{settings.seconds / 60:g}", "--faults", ",".join(settings.kinds)),
            *("--servers", str(settings.servers), "--redundancy", str(settings.redundancy)),
            *("--transport", settings.transport, "--rate", f"{settings.rate:g}"),
            *("--max-tokens", str(settings.max_tokens)),
            *(("--model", settings.model) if settings.model else ()),
        ]
    )


def write_history(history: History, path: Path) -> None:
    """Write a JSON line per request and per fault; times in seconds since the first request.

    Raises ConfigError: the file cannot be written.
    """
    begin = history.asked[0].due_s if history.asked else 0.0
    lines: list[dict[str, Any]] = [
        {"prompt": a.prompt, "due_s": round(a.due_s - begin, 4)}
        | (_answer_line(a.answer, begin) if a.answer else {"error": "no end"})
        for a in history.asked
    ]
    lines += [
        vars(i)
        | {
            name: None if math.isinf(at := getattr(i, name)) else round(at - begin, 4)
            for name in ("began_s", "mended_s", "whole_s")
        }
        for i in history.incidents
    ]
    try:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"--history {path}: {error.strerror}; give another file") from error


def _answer_line(answer: Answer, begin: float) -> dict[str, Any]:
    return {
        "sent_s": round(answer.sent_s - begin, 4),
        "ended_s": round(answer.ended_s - begin, 4),
        "tokens": answer.tokens,
        "stall_s": round(answer.stall_s, 4),
        "text": answer.text,
        "error": answer.error,
        "error_type": answer.error_type,
    }


def _stall(history: History, begin: float, end: float) -> float:
    """Longest pause, in seconds, within any answer's stream that overlaps the interval."""
    worst = 0.0
    for asked in history.asked:
        stamps = asked.answer.stamps_s if asked.answer else ()
        for before, after in itertools.pairwise(stamps):
            if begin <= after and before <= end:
                worst = max(worst, after - before)
    return worst


def _mib(census: Mapping[str, Census], name: str) -> float:
    return round(census[name].resident_bytes / 2**20, 1)


def print_report(document: Mapping[str, Any]) -> None:
    """Print a table of the faults by kind, the requests, the memory, and the violations."""
    rows = []
    for kind in dict.fromkeys(i["kind"] for i in document["incidents"]):
        of = [i for i in document["incidents"] if i["kind"] == kind]
        took = [i["recovery_s"] for i in of if i["recovery_s"] is not None] or [math.nan]
        stall_ms = max(i["worst_stall_ms"] for i in of)
        recovery = f"{sum(took) / len(took):.2f}", f"{max(took):.2f}"
        rows.append((kind, str(len(of)), *recovery, f"{stall_ms:.0f}"))
    print_table(("fault", "count", "recovery s", "worst recovery s", "worst stall ms"), rows)
    requests = document["requests"]
    print(
        f"{requests['asked']} requests, {requests['right']} right, {requests['errors']} errors "
        f"({requests['errors_without_a_replica']} of them while an expert may have had no replica), "
        f"worst stall {requests['worst_stall_ms']:.0f} ms"
    )
    held = {name: one["resident_mib"] for name, one in document["resources"].items()}
    print(
        "resident memory before and after, MiB: "
        + ", ".join(f"{name} {before}, {after}" for name, (before, after) in held.items())
    )
    for violation in document["violations"]:
        print(f"VIOLATION: {violation}")
