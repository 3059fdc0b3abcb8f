"""An expert server without monitor and checkpoint: `python -m benchmarks.dispatch.server_process JSON`.

Arena, slot table, loop and gRPC service are those of `expert_server`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from benchmarks.dispatch._floor import sleeping_layer
from benchmarks.dispatch.sizes import model_shape
from eaas.config import load_config
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.net.grpc_server import Service, serve
from eaas.wire import Arena
from eaas.wire.arena import SPIN_US
from eaas.wire.header import WireDtype, payload_layout, result_length
from eaas_cli.bench.experts.cpu import Cpu, settle
from eaas_cli.bench.experts.limits import ReadLimit
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.experts.source import Batches, Source
from eaas_cli.bench.worker import commands_from
from expert_server.experts.placements import PlacementHandler
from expert_server.experts.store import ExpertStore
from expert_server.kernels import ExpertKernel, KernelSpec
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.load_report.hotness import HotnessHandler
from expert_server.loop.loop import ServeLoop
from expert_server.service import SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.sharing import CheckpointSharer

__all__ = ["main"]

# These settings of the process are those of an expert server.
_SWITCH_S = 1e-4


def main(arguments: str) -> None:
    """Serve the benchmark's client until SIGTERM; arguments as in `server.py`."""
    bind_to_launcher()
    configure_logging("bench-server")
    wanted: dict[str, Any] = json.loads(arguments)
    commands = commands_from(wanted["control"])
    sys.setswitchinterval(_SWITCH_S)
    kernel: ExpertKernel
    if wanted["layer"] is None:
        torch.set_num_threads(1)
        # The kernel must take all slots at once, because the loop batches all waiting requests.
        most, hidden = wanted["slots"] * wanted["slot_tokens"], wanted["hidden"]
        kernel = (
            _SleepingKernel(hidden, wanted["sleep_us"])
            if wanted["sleep_us"]
            else _null_kernel(most, hidden)
        )
    else:
        torch.set_num_threads(wanted["layer"]["threads"])
        shape, threads = Shape(**wanted["layer"]["shape"]), wanted["layer"]["threads"]
        kernel = _loaded_kernel(shape, threads, wanted["layers"])
        announce(kernel=f"{kernel.name} ({kernel.isa})" if kernel.isa else kernel.name)
        batches = Batches(shape, torch.bfloat16, wanted["slot_tokens"])
        threading.Thread(
            target=_run_commands, args=(commands, kernel, batches, threads), daemon=True
        ).start()
    _serve(wanted, kernel)


def _serve(wanted: dict[str, Any], kernel: ExpertKernel) -> None:
    tokens, hidden, top_k = wanted["slot_tokens"], wanted["hidden"], wanted["top_k"]
    shape = model_shape(hidden, wanted["num_experts"], top_k, wanted["layers"])
    arena = Arena.create_shared(
        wanted["slots"],
        payload_layout(tokens, hidden, top_k, WireDtype.FLOAT32).total,
        result_length(tokens, hidden),
        time.monotonic_ns(),
    )
    table = SlotTable(arena)
    settings = load_config().expert_server
    loop = ServeLoop(
        arena,
        table,
        kernel,
        shape,
        SPIN_US,
        settings.batching,
        settings.batch_window_us * 1e-6,
    )
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


def _null_kernel(most_tokens: int, hidden: int) -> ExpertKernel:
    """Make a function that stands in for a kernel and computes nothing."""
    ready_TH = torch.ones(most_tokens, hidden)

    def compute(
        x_TH: torch.Tensor, _ids_TK: torch.Tensor, _scores_TK: torch.Tensor, _layer: int
    ) -> torch.Tensor:
        return ready_TH[: x_TH.shape[0]]

    return cast("ExpertKernel", compute)


class _SleepingKernel(ExpertKernel):
    """A kernel whose only layer sleeps instead of computing, in compiled code as that of a real one."""

    name = "sleeping"

    def __init__(self, hidden: int, us: int) -> None:
        super().__init__((), KernelSpec(torch.bfloat16))
        self.direct = [sleeping_layer(hidden, us)]

    def pack(self, weights: Any, form: Any, pause: Any) -> Any:
        """Refuse: there are no experts."""
        raise TypeError("a sleeping kernel has no experts")

    def compute(self, x_TH: Any, ids_TK: Any, scores_TK: Any, layer: int) -> torch.Tensor:
        """Refuse: requests are plain."""
        raise TypeError("a sleeping kernel takes plain requests alone")


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
    limit: ReadLimit | None = None
    with torch.inference_mode():
        for command, reply in commands:
            if command == "read":
                limit = limit or ReadLimit(Cpu(threads))
                reply(limit.measure())
                continue
            took = []
            for seed in command["seeds"]:
                batch = batches.get(command["tokens"], seed)
                settle()
                started = time.perf_counter_ns()
                kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)
                took.append(time.perf_counter_ns() - started)
            reply(took)


if __name__ == "__main__":
    main(sys.argv[1])
