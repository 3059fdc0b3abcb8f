"""`eaas demo-model`: write a small random checkpoint to try the system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add `demo-model` to the `eaas` program."""
    app.command("demo-model")(demo_model)


def demo_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to.")],
    arch: Annotated[
        str,
        typer.Option(
            help="Architecture: qwen3_moe, qwen2_moe, mixtral, olmoe, deepseek_v3 or gpt_oss."
        ),
    ] = "qwen3_moe",
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    experts: Annotated[int, typer.Option(help="Experts per MoE layer.")] = 16,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 4,
    seed: Annotated[int, typer.Option(help="The same seed makes the same bytes.")] = 0,
    dtype: Annotated[str, typer.Option(help="Weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write a small checkpoint with random weights and a tokenizer, without a download."""
    from eaas_cli.demo_model import write_demo_model

    write_demo_model(
        directory,
        arch=arch,
        layers=layers,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        seed=seed,
        dtype=dtype,
    )
    typer.echo(f"wrote {directory}")
