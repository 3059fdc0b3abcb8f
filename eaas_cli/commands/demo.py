"""`eaas demo-model`: write a checkpoint with random weights to try the system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo_model"]


def demo_model(
    context: typer.Context,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to.")],
    like: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Shapes and storage format of a published model instead of a small one: gpt-oss-20b, "
            "gpt-oss-120b, Qwen3-30B-A3B, Qwen3-30B-A3B-FP8, Mixtral-8x7B, DeepSeek-V3, Kimi-K2 or "
            "Kimi-K2-Thinking. Only --layers (all, unless given) and --seed go with it.",
        ),
    ] = None,
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
    """Write a checkpoint with random weights and a tokenizer, without a download.

    It is a small one of a few megabytes, or as large as the published model that --like names.
    """
    if like is not None:
        given = _given(context)
        _write_like(directory, like, layers if "layers" in given else None, seed, given)
        return
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


def _write_like(directory: Path, name: str, layers: int | None, seed: int, given: set[str]) -> None:
    from eaas.errors import ConfigError
    from eaas_cli.console import progress_bar
    from eaas_cli.demo_model import write_model_like

    if wrong := sorted(given & {"arch", "hidden", "experts", "top_k", "dtype"}):
        options = ", ".join("--" + option.replace("_", "-") for option in wrong)
        raise ConfigError(f"--like sets the sizes: leave out {options}")
    with progress_bar() as bar:
        task = bar.add_task(f"writing {directory.name}", total=None)
        write_model_like(
            directory,
            name,
            layers=layers,
            seed=seed,
            progress=lambda wrote, total: bar.update(task, advance=wrote, total=total),
        )
    typer.echo(f"wrote {directory}")


def _given(context: typer.Context) -> set[str]:
    """Return the names of the options that stand on the command line."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
