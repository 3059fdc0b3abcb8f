"""An expert server without monitor and checkpoint: `python -m benchmarks.harness.lone_server JSON`.

Arena, slot table, loop and gRPC service are those of `expert_server`. Its kernel is `auto`'s, with random
experts, or one that computes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch

from benchmarks.harness._floor import empty_layer
from benchmarks.harness.worker import Worker, commands_from
from eaas.config import load_config
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.net.grpc_server import Service, serve
from eaas.types import ModelShape
from eaas.wire import Arena
from eaas.wire.arena import SPIN_US
from eaas.wire.header import WireDtype, payload_layout, result_length
from eaas_cli.bench.experts.limits import Gauge
from eaas_cli.bench.experts.places import Cpu
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches, Source
from expert_server.experts.placements import PlacementHandler
from expert_server.experts.store import ExpertStore
from expert_server.kernels import ExpertKernel, KernelSpec
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.load_report.hotness import HotnessHandler
from expert_server.loop.loop import ServeLoop
from expert_server.service import SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.sharing import CheckpointSharer

__all__ = ["lone_server", "main", "model_shape"]

# These settings of the process are those of an expert server.
_SWITCH_S = 1e-4


def model_shape(shape: Shape, layers: int = 1) -> ModelShape:
    """Make the description of a model with so many equal MoE layers."""
    names = tuple(f"layer {layer}" for layer in range(layers))
    return ModelShape(
        "bench", shape.num_experts, shape.hidden, shape.top_k, names, "bfloat16", "benchmark"
    )


def lone_server(
    shape: Shape,
    *,
    tokens: int,
    slots: int,
    threads: int = 0,
    layers: int = 1,
) -> Callable[..., Worker]:
    """Make the function that starts a server.

    While a server with experts is idle, it executes commands: {"tokens": T, "seeds": [...]} calls the kernel
    in its own process and answers the times in nanoseconds; "read" reads memory with as many threads and
    answers bytes/s.

    Args:
        shape: Experts of a layer.
        tokens: T that a slot holds.
        threads: Of the kernel; loading its random experts takes up to a minute. 0: it computes nothing.
        layers: Layers that have these experts.
    """
    return partial(
        Worker,
        "server",
        "benchmarks.harness.lone_server",
        shape=dataclasses.asdict(shape),
        tokens=tokens,
        slots=slots,
        threads=threads,
        layers=layers,
    )


def main(arguments: str) -> None:
    """Serve the benchmark's client until SIGTERM; arguments as in `lone_server`."""
    bind_to_launcher()
    configure_logging("bench-server")
    wanted: dict[str, Any] = json.loads(arguments)
    commands = commands_from(wanted["control"])
    sys.setswitchinterval(_SWITCH_S)
    shape, threads = Shape(**wanted["shape"]), wanted["threads"]
    torch.set_num_threads(threads or 1)
    kernel: ExpertKernel
    if threads:
        kernel = _loaded_kernel(shape, threads, wanted["layers"])
        announce(kernel=f"{kernel.name} ({kernel.isa})" if kernel.isa else kernel.name)
        batches = Batches(shape, torch.bfloat16, wanted["tokens"])
        threading.Thread(
            target=_run_commands, args=(commands, kernel, batches, threads), daemon=True
        ).start()
    else:
        kernel = _EmptyKernel(shape.hidden)
    _serve(wanted, model_shape(shape, wanted["layers"]), kernel)


def _serve(wanted: dict[str, Any], shape: ModelShape, kernel: ExpertKernel) -> None:
    tokens, hidden = wanted["tokens"], shape.hidden_size
    arena = Arena.create_shared(
        wanted["slots"],
        payload_layout(tokens, hidden, shape.top_k, WireDtype.FLOAT32).total,
        result_length(tokens, hidden),
        time.monotonic_ns(),
    )
    table = SlotTable(arena)
    settings = load_config().expert_server
    window_s = settings.batch_window_us * 1e-6
    loop = ServeLoop(arena, table, kernel, shape, SPIN_US, settings.batching, window_s)
    # Nothing is ever loaded, because there is no balancer.
    no_store = cast("ExpertStore", None)
    placements = PlacementHandler(no_store, shape, lambda _epoch: None, lambda _epoch: None)
    sharer, hotness = CheckpointSharer(None, 1), HotnessHandler(shape, loop, no_store)
    service = ExpertService(arena, table, shape, placements, sharer, hotness, loop.stop)
    server = serve([Service(SERVICE, add_expert_service, service)], "127.0.0.1", 0)
    signal.signal(signal.SIGTERM, lambda _number, _frame: loop.stop())
    announce(ready=server.address)
    try:
        loop.run()
    finally:
        table.revoke_all()
        service.close()
        server.stop(0)
        arena.close()


class _EmptyKernel(ExpertKernel):
    """A kernel whose only layer computes nothing, in compiled code as that of a real one."""

    name = "empty"

    def __init__(self, hidden: int) -> None:
        super().__init__((), KernelSpec(torch.bfloat16))
        self.direct = [empty_layer(hidden)]

    def pack(self, weights: Any, form: Any, pause: Any) -> Any:
        """Refuse: there are no experts."""
        raise TypeError("an empty kernel has no experts")

    def compute(self, x_TH: Any, ids_TK: Any, scores_TK: Any, layer: int) -> torch.Tensor:
        """Answer requests that are batched."""
        return torch.zeros(x_TH.shape)


def _loaded_kernel(shape: Shape, threads: int, layers: int) -> ExpertKernel:
    """Load random experts, the same in each layer, into the kernel that `auto` picks."""
    source = Source(shape, torch.bfloat16)
    sizes = ExpertSizes(shape.hidden, shape.intermediate, shape.num_experts, shape.top_k)
    spec = KernelSpec(torch.bfloat16, threads=threads)
    kernel = choose_kernel([source.form] * layers, spec, sizes).kernel
    for layer in range(layers):
        for expert, weights in enumerate(source.experts()):
            kernel.load(layer, expert, weights)
    return kernel


def _run_commands(
    commands: Iterator[tuple[Any, Callable[[object], None]]],
    kernel: ExpertKernel,
    batches: Batches,
    threads: int,
) -> None:
    """Execute the launcher's commands while the loop is idle: read memory, or time the kernel here."""
    limit: Gauge | None = None
    place = Cpu(threads)
    with torch.inference_mode():
        for command, reply in commands:
            if command == "read":
                limit = limit or Gauge.of_reads(place)
                reply(limit.measure())
                continue
            took = []
            for seed in command["seeds"]:
                batch = batches.get(command["tokens"], seed)
                place.settle()
                started = time.perf_counter_ns()
                kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)
                took.append(time.perf_counter_ns() - started)
            reply(took)


if __name__ == "__main__":
    main(sys.argv[1])
