"""`eaas up`: run a cluster on this machine until Ctrl-C, or start one on Ray."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eaas import transports
from eaas.checkpoint.source import local_directory
from eaas.counted import counted
from eaas.errors import ClusterError, ConfigError, EaasError
from eaas.log import print_line
from eaas.open_files import prepare_open_files
from eaas_cli.commands.client import status_table
from eaas_cli.commands.greeting import greet, key_file, passes_text
from eaas_cli.commands.options import Load, OptionalModel, with_settings
from eaas_cli.commands.servers import balancer_address
from eaas_cli.commands.up_on_ray import up_on_ray
from eaas_cli.endpoint import fetch_status, live_members
from eaas_cli.local.loading import (
    LoadingLines,
    LoadingPoller,
    loading_shown,
    loading_text,
    print_lines,
)
from eaas_cli.local.running_clusters import recorded
from eaas_cli.option_values import log_directory

if TYPE_CHECKING:
    from eaas.config import ClusterConfig
    from eaas_cli.local import LocalCluster
    from eaas_cli.local.interrupt import Interrupt
    from eaas_cli.local.scaling import Scaler
    from eaas_cli.local.supervision import Supervisor

__all__ = ["live_balancer", "started_by_hand", "up"]

_REFRESH_S = 1.0
# Interval of the loop while servers join or leave.
_SCALING_S = 0.1
# Deadline of a start. The loading of experts has its own deadline.
_START_S = 120.0
_VLLM_START_S = 300.0
_NO_LOGS = "not kept; --log-dir DIR (make up LOG_DIR=DIR) keeps them"
# Open files that the launcher needs: logs, sockets and pidfds of the children.
_FILES = 128
_FILES_PER_SERVER = 16


@with_settings(
    {
        "transport": (
            f"Transport to each server: auto (shm where possible), {', '.join(transports.BUILT_IN)}.",
            "auto",
        ),
        "host": ("Address of the endpoint.", "127.0.0.1"),
        "port": ("Port of the endpoint; 0: a free one.", "8000"),
        "kernel": (
            "Expert kernel: auto, native, reference or triton.",
            "auto: the fastest here",
        ),
        "quantization": ("Weights in memory: none, int8 or int4.", "none"),
    },
    frontend="host port served_model_name api_key_file",
    attention_client="transport",
    expert_server="kernel quantization",
)
def up(
    load: Load,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR|ORG/NAME",
            help="The same as --model.",
            parser=local_directory,
            show_default=False,
        ),
    ] = None,
    model: OptionalModel = None,
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(
            "--on",
            help="This machine, or the nodes of a Ray cluster (RAY_ADDRESS, or this machine's).",
        ),
    ] = "local",
    servers: Annotated[
        int | None, typer.Option(min=1, help="Expert servers.", show_default="3")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="cuda:0,cuda:1,...|all",
            help="GPUs that compute the experts, one server on each.",
            show_default="the CPU",
        ),
    ] = None,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    clients: Annotated[
        int, typer.Option(min=1, help="Attention clients, among which requests are divided.")
    ] = 1,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="Engine that runs attention.")
    ] = "transformers",
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory to keep the processes' logs in.",
            parser=log_directory,
            metavar="DIR",
            show_default="not kept",
        ),
    ] = None,
) -> None:
    """Run a cluster: monitor, balancer, expert servers, attention clients, frontend.

    On this machine Ctrl-C ends it. On Ray the command returns once the cluster serves; `eaas down` ends it.
    """
    from eaas_cli.local.interrupt import Interrupt, Interrupted

    checkpoint = _only(model, directory)
    if engine == "vllm" and clients > 1:
        raise ConfigError(f"--clients {clients}: vLLM is the only client; leave the option out")
    # Imports and all that follows are inside, because a signal must end a half-started cluster in order.
    with Interrupt() as interrupt, contextlib.ExitStack() as stack:
        from eaas_cli.local.devices import parse_devices, server_count

        if on == "ray" and devices is not None:
            raise ConfigError(
                "--devices: on Ray set expert_server.device: cuda, and Ray gives each server a GPU"
            )
        gpus = parse_devices(devices) if devices is not None else ()
        servers = server_count(servers, gpus)
        prepare_open_files("eaas up", _FILES + _FILES_PER_SERVER * servers)
        fork_server = None
        if on == "local":
            from eaas_cli.local.fork_server import start_fork_server

            # Its imports, the longest part of a start, go on beside the checks below.
            fork_server = start_fork_server(with_client=engine == "transformers")
            stack.callback(fork_server.end)
        from eaas_cli.local import LocalCluster

        settings = load()
        _check_names(settings)
        try:
            if on == "ray":
                if log_dir is not None:
                    raise ConfigError(
                        "--log-dir: on Ray the logs are in Ray's log directory of each node"
                    )
                up_on_ray(
                    checkpoint, servers, redundancy, clients, engine, settings, load.file, interrupt
                )
                return
            cluster = LocalCluster(
                checkpoint,
                servers=servers,
                redundancy=redundancy,
                clients=clients,
                config=settings,
                config_file=load.file,
                log_dir=log_dir,
                engine=engine,
                operator_page=True,
                fork_server=fork_server,
                devices=gpus,
            )
            start_s = _VLLM_START_S if engine == "vllm" else _START_S
            _run(cluster, engine, interrupt, settings.balancer.apply_timeout_s + start_s)
        except Interrupted as end:
            raise typer.Exit(end.code) from None


def _only(model: Path | None, directory: Path | None) -> Path:
    """Return the checkpoint that --model or the argument names. Raises ConfigError: none, or two."""
    given = {path for path in (model, directory) if path is not None}
    if len(given) == 1:
        return given.pop()
    if given:
        raise ConfigError(f"{directory} and --model {model} are two checkpoints: give one")
    raise ConfigError("no checkpoint: give its directory, as in `eaas up DIR` or --model DIR")


def _check_names(settings: ClusterConfig) -> None:
    """Raise ConfigError for a policy, strategy or template that the roles would refuse once they run."""
    from attention_client.scheduler import strategy
    from balancer.planner.layout import Settings

    Settings.of(settings.balancer)
    strategy(settings.attention_client.scheduler.strategy)
    if settings.frontend.response_template:
        # It imports transformers, which takes seconds.
        from frontend.families.family import Family

        Family.named(settings.frontend.response_template)


def _run(cluster: LocalCluster, engine: str, interrupt: Interrupt, start_s: float) -> None:
    """Start the cluster and watch it until a signal, then end it.

    Raises Interrupted: the signal came before the cluster served.
    """
    from eaas_cli.local.interrupt import Interrupted

    started, settings = time.monotonic(), cluster.config
    tls_dir = settings.security.tls_dir
    try:
        print_line(
            f"starting {counted(cluster.servers, 'expert server')} and {_engines(cluster, engine)} "
            f"for {cluster.model} ({cluster.memory}) ..."
        )
        with loading_shown(cluster) as show:
            cluster.start(start_s, interrupt, show)
        print_line(f"SERVING after {time.monotonic() - started:.1f} s")
        name = settings.frontend.model_names(cluster.model)[0]
        with recorded(cluster.endpoint, str(Path(tls_dir).resolve()) if tls_dir else "", name):
            greet(
                cluster,
                {child.name: child.kernel for child in cluster.children.values()},
                passes_text(engine, settings),
                str(cluster.log_dir or _NO_LOGS),
                "kill -9 the PID of an expert server or an attention client while it answers. "
                "Ctrl-C ends the cluster.",
            )
            _watch(cluster, interrupt)
    except Interrupted:
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            print_line("stopping ...")
        # It has an endpoint once it serves.
        if not cluster.endpoint:
            raise
    finally:
        cluster.stop()


def _engines(cluster: LocalCluster, engine: str) -> str:
    return "vLLM" if engine == "vllm" else counted(cluster.clients, "attention client")


def _watch(cluster: LocalCluster, interrupt: Interrupt) -> None:
    """Scale, supervise and show the status until a signal: a live table on a terminal, else event lines."""
    from eaas_cli.local.scaling import Scaler, ScaleWatch
    from eaas_cli.local.supervision import Supervisor

    def balancer() -> str | None:
        return live_balancer(cluster)

    scaler = Scaler(cluster, lambda: started_by_hand(cluster), balancer)
    supervisor = Supervisor(cluster)
    watch = ScaleWatch(balancer, scaler.want, cluster.tls)
    poller = LoadingPoller(cluster)
    try:
        if sys.stdout.isatty():
            _watch_live(cluster, interrupt, supervisor, scaler, poller)
        lines = LoadingLines()
        while True:
            print_lines(_step(supervisor, scaler))
            print_lines(lines.take(poller.poll(), time.monotonic()))
            interrupt.wait(_SCALING_S if scaler.busy else _REFRESH_S)
    finally:
        poller.close()
        watch.close()


def started_by_hand(cluster: LocalCluster) -> set[str]:
    """Ids of live expert servers that are not this launcher's: scaling counts them, but stops none.

    Raises ClusterError: the endpoint does not answer.
    """
    document = fetch_status(cluster.endpoint, key_file(cluster.config))
    servers = live_members(document, "expert-server")
    return {server["id"] for server in servers if server["pid"] not in cluster.births}


def live_balancer(cluster: LocalCluster) -> str | None:
    """Find the live balancer's address from the endpoint, because a person may have restarted it.

    None: there is none, or the endpoint does not answer; then draining waits.
    """
    try:
        document = fetch_status(cluster.endpoint, key_file(cluster.config))
        return balancer_address(cluster.endpoint, document)
    except ClusterError:
        return None


def _step(supervisor: Supervisor, scaler: Scaler) -> list[str]:
    """Run one step of scaling and one of supervision, without waiting; return the lines to print."""
    lines = []
    if supervisor.can_start:
        try:
            lines = scaler.step()
        except EaasError as error:
            lines = [f"scaling stopped: {error}"]
    # Supervision comes last, because the scaler reports the servers that it stopped.
    return lines + supervisor.step()


def _watch_live(
    cluster: LocalCluster,
    interrupt: Interrupt,
    supervisor: Supervisor,
    scaler: Scaler,
    poller: LoadingPoller,
) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            try:
                shown = status_table(fetch_status(cluster.endpoint, key_file(cluster.config)))
            except ClusterError as error:
                shown = Text(str(error))
            for line in _step(supervisor, scaler):
                # Lines are not wrapped, because a line may be a command to paste.
                live.console.print(line, soft_wrap=True, markup=False, highlight=False)
            loading = poller.poll()
            live.update(Group(shown, loading_text(loading)) if loading else shown, refresh=True)
            interrupt.wait(_SCALING_S if scaler.busy else _REFRESH_S)
