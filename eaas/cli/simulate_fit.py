"""`eaas simulate fit`: the times of expert servers, for `eaas simulate policy --step-us`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json

__all__ = ["register"]


def register(simulate: typer.Typer) -> None:
    """Add the command."""
    simulate.command("fit")(fit)


def fit(
    bench: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `eaas bench experts --json` printed.")
    ],
    as_json: Json = False,
) -> None:
    """What a step costs an expert server: in all, for each active expert, for each pair it computes."""
    from simulator.caps.report import print_fits
    from simulator.caps.server_fit import read_fits

    document = [
        {
            **name,
            **{
                f"{part}_us": float(f"{1e6 * getattr(found, f'{part}_s'):.4g}")
                for part in ("fixed", "load", "pair")
            },
            "worst_error_pct": round(100 * found.worst_error, 1),
        }
        for name, found in read_fits(bench)
    ]
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_fits(document)
