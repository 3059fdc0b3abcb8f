"""Checks an aiperf run: every request succeeded, and aiperf's token counts equal the endpoint's."""

from __future__ import annotations

from typing import Any

from benchmarks.client.aiperf import Asked, Run

__all__ = ["disagreements", "row"]


def row(asked: Asked, run: Run) -> dict[str, Any]:
    """Make the document's row for an aiperf run: counts of requests, then aiperf's figures.

    `prompts_differ` and `outputs_differ` count requests whose length differs between aiperf and the endpoint;
    `outputs_off` is the largest difference in tokens.
    """
    records = run.records
    return {
        "asked": vars(asked),
        "answered": len(records),
        "failed": run.failed,
        "prompts_differ": sum(r.prompt != r.usage_prompt for r in records),
        "outputs_differ": sum(r.output != r.usage_output for r in records),
        "outputs_off": max((abs(r.output - r.usage_output) for r in records), default=0),
        "fewest_tokens": min((r.usage_output for r in records), default=0),
        "most_tokens": max((r.usage_output for r in records), default=0),
        "figures": run.figures,
    }


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
