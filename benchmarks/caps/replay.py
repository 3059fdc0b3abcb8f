"""`python -m benchmarks.caps replay`: a recorded queue, run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eaas_cli.commands.options import Json

__all__ = ["replay"]


def replay(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Recording of an attention client (attention_client.scheduler.record).",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Choose by this strategy.", show_default="the recorded one"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recorded queue through the live code and count the choices that stay the same."""
    from simulator.caps.replay import replay as run

    found = run(recording, strategy)
    document = {
        "strategy": found.settings.strategy,
        "requests": found.requests,
        "seconds": found.seconds,
        "choices": len(found.choices),
        "same_as_recorded": found.same,
        "passed_over": sum(choice.passed_over for choice in found.choices),
        "predicted_cost": found.predicted_s,
    }
    if as_json:
        typer.echo(json.dumps(document))
        return
    print(f"strategy {found.settings.strategy}: {found.requests} requests in {found.seconds:.1f} s")
    print(f"{len(found.choices)} choices, {found.same} the same as recorded")
    print(f"requests passed over: {document['passed_over']}")
    print(f"predicted cost of all groups, in token-expert pairs: {found.predicted_s:.6g}")
