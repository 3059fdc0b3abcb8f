"""The run: decode steps as one batch and as two alternating micro-batches, with distant servers.

Each latency has its own cluster (`expert_server.added_latency_us`). Three models join it, which differ in
`attention_client.overlap` only, and decode the same sequences round by round.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import attention_client
from eaas.config import AttentionClientConfig, load_config
from eaas.hub_cache import model_name
from eaas_cli.bench.machine import describe_machine
from eaas_cli.bench.worker import with_fork_server
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CONTROL_MODULES, SERVER_MODULES, ForkServer

__all__ = ["bench_overlap"]

WAYS = ("off", "on", "auto")
_SEED = 0


def bench_overlap(
    model: Path,
    *,
    servers: int,
    transport: str,
    latency_us: Sequence[int],
    sequences: Sequence[int],
    prompt_tokens: int,
    steps: int,
    rounds: int,
    say: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Measure decode steps with overlap off, on and `auto`, for each latency and batch size.

    Args:
        model: Checkpoint.
        servers: Expert servers; each expert is on one of them.
        transport: shm, grpc or nixl.
        latency_us: Added latency of each request, microseconds; one cluster each.
        sequences: Batch sizes.
        prompt_tokens: Prompt tokens of each sequence.
        steps: Decode steps per round.
        rounds: Measured rounds per setting, after one warm-up round.
        say: Prints a line of progress.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The JSON document. `step_ms`: medians over all steps. `ratio`: median over the rounds of the decode
        rate over that of "off". `overlapped`: share of overlapped forward passes of "auto".

    Raises:
        EaasError: A process did not start, or a request failed.
    """
    rows = []
    with (
        with_fork_server(CONTROL_MODULES + SERVER_MODULES, fork_server) as forks,
        tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch,
    ):
        for latency in latency_us:
            say(f"{latency} us away: starting the cluster ...")
            file = Path(scratch) / "cluster.yaml"
            file.write_text(yaml.safe_dump({"expert_server": {"added_latency_us": latency}}))
            with LocalCluster(
                model,
                servers=servers,
                redundancy=1,
                attention_client=False,
                config=load_config(file),
                config_file=file,
                fork_server=forks,
            ) as cluster:
                models = {
                    way: attention_client.load(
                        model,
                        cluster.monitor_address,
                        config=AttentionClientConfig(transport=transport, overlap=way),
                    )
                    for way in WAYS
                }
                for batch in sequences:
                    say(f"{latency} us away, {batch} sequences")
                    row = _compare(models, batch, prompt_tokens, steps, rounds)
                    rows.append({"added_latency_us": latency, "sequences": batch} | row)
                # Collect reference cycles, because the models must leave before the cluster ends.
                del models
                gc.collect()
    return {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers,
        "transport": transport,
        "threads": torch.get_num_threads(),
        "prompt_tokens": prompt_tokens,
        "steps": steps,
        "rounds": rounds,
        "rows": rows,
    }


def _compare(
    models: dict[str, PreTrainedModel], batch: int, prompt_tokens: int, steps: int, rounds: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(_SEED)
    prompts_BT = torch.randint(16, 250, (batch, prompt_tokens), generator=generator)
    taken: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    passes = {way: (0.0, 0.0) for way in WAYS}
    for number in range(rounds + 1):
        for way, model in models.items():
            before = _passes(model)
            seconds = _decode(model, prompts_BT, steps)
            if number:
                taken[way].append(seconds)
                passes[way] = _plus(passes[way], _passes(model), before)
    medians = {way: [statistics.median(s) for s in taken[way]] for way in WAYS}
    whole, overlapped = passes["auto"]
    return {
        "step_ms": {
            way: round(statistics.median(s for run in taken[way] for s in run) * 1e3, 3)
            for way in WAYS
        },
        "ratio": {
            way: round(
                statistics.median(o / w for o, w in zip(medians["off"], medians[way], strict=True)),
                3,
            )
            for way in ("on", "auto")
        },
        "overlapped": round(overlapped / (whole + overlapped), 3),
    }


class _Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion of transformers that records the time after each token and never stops."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _decode(model: PreTrainedModel, prompts_BT: torch.Tensor, steps: int) -> list[float]:
    """Decode `steps` tokens; return the seconds of each decode step, without the prompt."""
    watch = _Stopwatch()
    model.generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=steps + 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([watch]),
    )
    return [end - start for start, end in zip(watch.at, watch.at[1:], strict=False)]


def _passes(model: PreTrainedModel) -> tuple[float, float]:
    """Count a model's forward passes so far: (as one batch, overlapped)."""
    cluster = next(m._eaas_cluster for m in model.modules() if hasattr(m, "_eaas_cluster"))
    forwards = cluster.metrics.registry.get_sample_value
    name = "eaas_forward_passes_total"
    return (
        forwards(name, {"batch": "whole"}) or 0.0,
        forwards(name, {"batch": "overlap"}) or 0.0,
    )


def _plus(
    total: tuple[float, float], after: tuple[float, float], before: tuple[float, float]
) -> tuple[float, float]:
    return total[0] + after[0] - before[0], total[1] + after[1] - before[1]
