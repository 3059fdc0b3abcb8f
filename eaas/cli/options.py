"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ConfigFile", "Endpoint", "Join", "Json", "Model"]

Model = Annotated[
    Path,
    typer.Option("--model", help="Directory of a Hugging Face MoE checkpoint.", show_default=False),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="cluster.yaml: settings of every role.", show_default=False),
]
Join = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="HOST:PORT[,...]",
        help="The cluster's monitor; all of them where there are several.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str, typer.Option("--endpoint", metavar="URL", help="HTTP endpoint of the cluster.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
