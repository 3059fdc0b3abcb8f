"""`eaas simulate replay`: a recorded live queue, once more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json

__all__ = ["register"]


def register(simulate: typer.Typer) -> None:
    """Add the command."""
    simulate.command("replay")(replay)


def replay(
    recording: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="What an attention client wrote (scheduler.record of its settings).",
        ),
    ],
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Let this one choose.", show_default="that of the recording"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The history of a live queue, through the same code: what is chosen, and whether it is the same."""
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
    print(f"{found.requests} requests in {found.seconds:.1f} s, by {found.settings.strategy}:")
    print(f"{len(found.choices)} choices, {found.same} of them as recorded")
    print(f"requests passed over: {document['passed_over']}")
    print(f"predicted cost of all groups, in pairs: {found.predicted_s:.6g}")
