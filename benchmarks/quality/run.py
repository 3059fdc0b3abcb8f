"""The run: each format in turn, served by a cluster and computed by transformers."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import attention_client
from benchmarks.quality.formats import BASELINE, FORMATS, Format
from benchmarks.quality.losses import Losses, perplexity, ratio
from benchmarks.quality.quantized_checkpoint import quantized_copy
from benchmarks.quality.texts import cut
from eaas.checkpoint import quiet_transformers
from eaas.config import load_config
from eaas.hub_cache import model_name
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import describe_machine
from eaas_cli.bench.worker import with_fork_server
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CONTROL_MODULES, SERVER_MODULES, ForkServer

__all__ = ["bench_quality"]

# Times are not measured: a busy machine, or the reference kernel, may take long.
_PATIENCE = {"layer_timeout_s": 120.0, "attempt_timeout_s": 60.0, "hedge_share": 0.0}
# Ratios differ from 1 by thousandths.
_DIGITS = 5


def bench_quality(
    model: Path,
    texts: dict[str, str],
    *,
    formats: Sequence[str],
    windows: int,
    length: int,
    say: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Measure the perplexity of a bf16 checkpoint in each format; return the document (see the package).

    Args:
        model: Checkpoint.
        texts: Name -> text.
        formats: Names in FORMATS; bf16 is measured, too.
        windows: Windows per text, at most.
        length: Tokens per window.
        say: Prints a line of progress.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Raises:
        ConfigError: A text is shorter than a window.
        EaasError: A process did not start, or a request failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def encode(text: str) -> Any:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    ids = cut(texts, encode, windows, length)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    baseline: tuple[Losses, Losses] | None = None
    with with_fork_server(CONTROL_MODULES + SERVER_MODULES, fork_server) as forks:
        for name in dict.fromkeys((BASELINE, *formats)):
            say(name)
            with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
                copy = Path(scratch) / "model"
                try:
                    plain = quantized_copy(model, copy, FORMATS[name].scheme, torch.bfloat16)
                except ValueError as error:
                    left_out[name] = str(error)
                    continue
                served, kernel = _served(copy, FORMATS[name], ids, forks)
                exact = _losses(_transformers(plain), ids)
            baseline = baseline or (served, exact)
            rows.append(_row(name, kernel, served, exact, baseline))
    return {
        "machine": describe_machine(),
        "model": model_name(model),
        "texts": {name: len(ids_WT) for name, ids_WT in ids.items()},
        "length": length,
        "formats": rows,
        "left_out": left_out,
    }


def _served(
    copy: Path, format: Format, ids: Mapping[str, torch.Tensor], forks: ForkServer
) -> tuple[Losses, str]:
    """Serve a copy with one expert server; return the losses and the server's kernel."""
    config = load_config(
        expert_server={"quantization": format.quantization}, attention_client=_PATIENCE
    )
    with LocalCluster(
        copy, servers=1, redundancy=1, attention_client=False, config=config, fork_server=forks
    ) as cluster:
        (server,) = cluster.running_servers()
        model = attention_client.load(copy, cluster.monitor_address, config=config.attention_client)
        losses = _losses(model, ids)
        # The model is in reference cycles, and must leave before the cluster ends.
        del model
        gc.collect()
        return losses, server.kernel or ""


def _transformers(plain: Path) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(
            plain, local_files_only=True, dtype=torch.float32, experts_implementation="eager"
        ).eval()


@torch.inference_mode()
def _losses(model: Any, ids: Mapping[str, torch.Tensor]) -> Losses:
    return {
        name: [_loss(model(ids_T[None], use_cache=False).logits[0], ids_T) for ids_T in ids_WT]
        for name, ids_WT in ids.items()
    }


def _loss(logits_TV: torch.Tensor, ids_T: torch.Tensor) -> float:
    """Return the mean loss of a window's tokens but the first."""
    return float(functional.cross_entropy(logits_TV[:-1].double(), ids_T[1:]))


def _row(
    name: str, kernel: str, served: Losses, exact: Losses, baseline: tuple[Losses, Losses]
) -> dict[str, Any]:
    return {
        "format": name,
        "kernel": kernel,
        "served": _column(served, baseline[0]),
        "dequantised": _column(exact, baseline[1]),
        **_ratio(served, exact),
    }


def _column(losses: Losses, baseline: Losses) -> dict[str, Any]:
    return {
        "perplexity": round(perplexity(losses), _DIGITS),
        **_ratio(losses, baseline),
        "losses": {
            name: round(sum(windows) / len(windows), _DIGITS) for name, windows in losses.items()
        },
    }


def _ratio(losses: Losses, baseline: Losses) -> dict[str, float]:
    found, error = ratio(losses, baseline)
    return {"ratio": round(found, _DIGITS), "error": figure(error)}
