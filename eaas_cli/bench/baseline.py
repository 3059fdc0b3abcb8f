"""The single process that `eaas bench serve` compares a cluster with: same endpoint and engine, no servers.

`python -m eaas_cli.bench.baseline MODEL transformers|kernels THREADS`: the experts are transformers' own, or
run on an expert server's kernels in this process. The command checks these arguments before.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from prometheus_client import CollectorRegistry

from attention_client.cluster import Cluster
from attention_client.telemetry.metrics import ClientMetrics
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.shutdown import Shutdown

if TYPE_CHECKING:
    from attention_client.generation.sizes import EngineSizes
    from attention_client.layer_call.expert_attribution import ExpertAttribution
    from eaas.config import SchedulerConfig
    from eaas.generation.work import Engine

__all__ = ["LocalExperts", "load_baseline", "local_engine", "main"]

# transformers' fastest experts implementation on a CPU.
_IMPLEMENTATION = "grouped_mm"


class LocalExperts:
    """Stand-in for the client's `Cluster` that computes layer calls here, with all experts in one kernel."""

    def __init__(self, model_path: Path, threads: int) -> None:
        from eaas.checkpoint import Checkpoint
        from expert_server.experts.store import ExpertStore
        from expert_server.kernels.choose import ExpertSizes, choose_kernel
        from expert_server.kernels.spec import spec_of
        from expert_server.weights.reader import ExpertReader

        self.checkpoint = Checkpoint.open(model_path)
        # A compiled pass needs metrics to count itself in, as in a cluster.
        self.metrics = ClientMetrics(CollectorRegistry())
        shape = self.checkpoint.shape
        reader = ExpertReader(self.checkpoint)
        sizes = ExpertSizes.of(self.checkpoint.expert_modules()[shape.layer_names[0]], shape.top_k)
        self._kernel = choose_kernel(reader.forms, spec_of(reader, threads), sizes).kernel
        ExpertStore(reader, self._kernel).load(
            {layer: range(shape.num_experts) for layer in range(shape.num_layers)}
        )

    @property
    def description(self) -> str:
        """Name, dtype and instruction set of the kernel, for the log line."""
        isa = f", {self._kernel.isa}" if self._kernel.isa else ""
        return f"{self._kernel.name} ({str(self._kernel.spec.dtype).removeprefix('torch.')}{isa})"

    def layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute one layer call of the experts in this process; arguments as in `Cluster.layer_call`."""
        if wanted_T is not None:
            ids_TK = ids_TK.where(wanted_T[:, None], -1)
        out_TH = self._kernel(x_TH, ids_TK, scores_TK.float(), layer)
        # Copy the output, because the kernel reuses it for the next layer.
        return out_TH.to(x_TH.dtype, copy=True)


def load_baseline(model_path: Path, experts: str, threads: int) -> tuple[Any, str]:
    """Load a model with experts of this process; return it and the description of their implementation.

    `experts`: "transformers", or "kernels" (an expert server's).
    """
    from transformers import AutoModelForCausalLM

    from attention_client.engines.transformers.model import load_model, serving_dtype
    from eaas.checkpoint import Checkpoint

    if experts == "kernels":
        local = LocalExperts(model_path, threads)
        dtype = serving_dtype(local.checkpoint)
        return load_model(local.checkpoint, cast("Cluster", local), dtype=dtype), local.description
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        local_files_only=True,
        dtype=serving_dtype(Checkpoint.open(model_path)),
        experts_implementation=_IMPLEMENTATION,
    )
    return model.eval(), _IMPLEMENTATION


def local_engine(
    model: Any,
    sizes: EngineSizes,
    registry: CollectorRegistry,
    scheduling: SchedulerConfig | None = None,
    attribution: ExpertAttribution | None = None,
) -> Engine:
    """Build the engine of a model for a frontend in the same process.

    Args:
        model: A transformers causal language model.
        sizes: Sizes of the engine.
        registry: Gets the engine's metrics.
        scheduling: How waiting requests are chosen to run together; None: by the default strategy.
        attribution: Records which servers compute a token's experts; None: never.
    """
    from attention_client.generation.engine_choice import build_engine
    from attention_client.generation.live_admission import LiveAdmission
    from attention_client.generation.scheduler_metrics import SchedulerMetrics
    from attention_client.layer_call.expert_attribution import ExpertAttribution
    from eaas.config import SchedulerConfig

    admission = LiveAdmission(scheduling or SchedulerConfig(), model, SchedulerMetrics(registry))
    return build_engine(model, sizes, admission, attribution or ExpertAttribution())


def main(model_path: str, experts: str, threads: str) -> None:
    """Serve a model's HTTP endpoint from this one process until SIGTERM."""
    bind_to_launcher()
    configure_logging("baseline")
    from attention_client.generation.sizes import EngineSizes
    from eaas.config import AttentionClientConfig
    from eaas.net.listen import bind
    from frontend.access import Access
    from frontend.app import build_app
    from frontend.defaults import ModelFiles
    from frontend.limits import ServeLimits
    from frontend.network.server import HttpServer

    torch.set_num_threads(int(threads))
    config = AttentionClientConfig()
    path = Path(model_path)
    model, description = load_baseline(path, experts, int(threads))
    listener = bind("127.0.0.1", 0)
    sizes = EngineSizes(
        num_blocks=config.cache_blocks or None,
        max_batch_tokens=config.max_batch_tokens,
    )
    limits = ServeLimits()
    registry = CollectorRegistry()
    app = build_app(
        local_engine(model, sizes, registry),
        ModelFiles.load(path),
        names=[path.name],
        status=dict,
        healthy=lambda: (True, ""),
        limits=limits,
        access=Access(),
        registry=registry,
    )
    server = HttpServer(app, listener, limits)
    server.start()
    with Shutdown() as shutdown:
        announce(kernel=description, ready=f"http://127.0.0.1:{listener.getsockname()[1]}")
        shutdown.wait()
    server.stop(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:4])
