"""`eaas up`: run a cluster on this machine until Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eaas.config.environment import KEY_VARIABLE
from eaas.counted import counted
from eaas.errors import ClusterError, EaasError
from eaas.log import print_line
from eaas.open_files import prepare_open_files
from eaas_cli.commands.client import page_address, status_table
from eaas_cli.commands.options import ApiKeyFile, ConfigFile, Insecure, Model, ServedModelName, Tls
from eaas_cli.commands.servers import balancer_address
from eaas_cli.endpoint import fetch_status, live_members
from eaas_cli.local.process import program
from eaas_cli.local.running_clusters import recorded

if TYPE_CHECKING:
    from rich.text import Text

    from eaas.cluster_snapshot.loading import Loading
    from eaas_cli.local import LocalCluster
    from eaas_cli.local.interrupt import Interrupt
    from eaas_cli.local.loading import LoadingPoller
    from eaas_cli.local.scaling import Scaler
    from eaas_cli.local.supervision import Supervisor

__all__ = ["register"]

_REFRESH_S = 1.0
# Interval of the loop while servers join or leave.
_SCALING_S = 0.1
# Deadline of a start. The loading of experts has its own deadline.
_START_S = 120.0
_VLLM_START_S = 300.0
# Open files that the launcher needs: logs, sockets and pidfds of the children.
_FILES = 128
_FILES_PER_SERVER = 16


def register(app: typer.Typer) -> None:
    """Add `up` to the `eaas` program."""
    app.command("up")(up)


def up(
    model: Model,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="Engine that runs attention.")
    ] = "transformers",
    transport: Annotated[
        str | None,
        typer.Option(
            help="Transport to each server: auto (shm where possible), shm, grpc or nixl.",
            show_default="auto",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the endpoint.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the endpoint; 0: a free one.", show_default="8000")
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Expert kernel: auto, native or reference.",
            show_default="auto: the fastest here",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Weights in memory: none, int8 or int4.", show_default="none"),
    ] = None,
    served_model_name: ServedModelName = None,
    api_key_file: ApiKeyFile = None,
    tls: Tls = None,
    insecure: Insecure = False,
    config: ConfigFile = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(help="Directory to keep the processes' logs in.", show_default="not kept"),
    ] = None,
) -> None:
    """Run a cluster on this machine: monitor, balancer, expert servers, attention client, endpoint.

    Ctrl-C ends it.
    """
    from eaas.config import load_config
    from eaas_cli.local import LocalCluster
    from eaas_cli.local.interrupt import Interrupt, Interrupted

    prepare_open_files("eaas up", _FILES + _FILES_PER_SERVER * servers)
    with Interrupt() as interrupt:
        settings = load_config(
            config,
            security={"tls_dir": tls and str(tls), "insecure": insecure or None},
            attention_client={
                "transport": transport,
                "host": host,
                "port": port,
                "api_key_file": api_key_file,
                "served_model_name": served_model_name,
            },
            expert_server={"kernel": kernel, "quantization": quantization},
        )
        cluster = LocalCluster(
            model,
            servers=servers,
            redundancy=redundancy,
            config=settings,
            config_file=config,
            log_dir=log_dir,
            engine=engine,
            operator_page=True,
        )
        started, tls_dir = time.monotonic(), settings.security.tls_dir
        try:
            print_line(
                f"starting {counted(servers, 'expert server')} and an attention client "
                f"for {cluster.model} ({cluster.memory}) ..."
            )
            start_s = _VLLM_START_S if engine == "vllm" else _START_S
            with _loading_shown(cluster) as show:
                cluster.start(settings.balancer.apply_timeout_s + start_s, interrupt, show)
            print_line(f"SERVING after {time.monotonic() - started:.1f} s")
            with recorded(cluster.endpoint, str(Path(tls_dir).resolve()) if tls_dir else ""):
                _greet(cluster)
                _watch(cluster, interrupt)
        except Interrupted:
            # The terminal may be closed.
            with contextlib.suppress(OSError):
                print_line("stopping ...")
        finally:
            cluster.stop()


@contextlib.contextmanager
def _loading_shown(cluster: LocalCluster) -> Iterator[Callable[[], None]]:
    """While the cluster starts, show how far its servers are with loading, at each call of the result."""
    from eaas_cli.local.loading import LoadingLines, LoadingPoller

    with contextlib.closing(LoadingPoller(cluster)) as poller:
        if not sys.stdout.isatty():
            lines = LoadingLines()
            yield lambda: _print(lines.take(poller.poll(), time.monotonic()))
            return
        from rich.live import Live

        with Live(auto_refresh=False, transient=True) as live:
            yield lambda: live.update(_loads(poller.poll()), refresh=True)


def _loads(loading: Mapping[str, Loading]) -> Text:
    from rich.text import Text

    from eaas_cli.local.loading import loading_lines

    return Text("\n".join(loading_lines(loading)), "cyan", no_wrap=True, overflow="ellipsis")


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _greet(cluster: LocalCluster) -> None:
    body = json.dumps(
        {
            "model": cluster.config.attention_client.model_names(cluster.model)[0],
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 32,
        }
    )
    file = _key_file(cluster)
    status = [*program(), "status", "--endpoint", cluster.endpoint]
    key = f'"${KEY_VARIABLE}"' if KEY_VARIABLE in os.environ else None
    if file is not None:
        status += ["--api-key-file", str(file.resolve())]
        key = f'"$(grep -m 1 "^[^#]" {shlex.quote(str(file.resolve()))})"'
    # Print a reference to the key's file, so that neither the screen nor a command line shows the key.
    shown = f" -H @<(printf 'Authorization: Bearer %s' {key})" if key else ""
    curl = f"curl -s{shown}"
    print_line(f"""
kernel:   {_kernels(cluster)}
endpoint: {cluster.endpoint}/v1
{_page(cluster)}status:   {shlex.join(status)}
logs:     {cluster.log_dir or "not kept; --log-dir DIR (make up LOG_DIR=DIR) keeps them"}

{curl} {cluster.endpoint}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}

Try it: kill -9 an expert server's PID while it answers. Ctrl-C ends the cluster.
""")


def _page(cluster: LocalCluster) -> str:
    if not cluster.config.attention_client.dashboard:
        return ""
    return f"page:     {page_address(cluster.endpoint)}\n"


def _key_file(cluster: LocalCluster) -> Path | None:
    file = cluster.config.attention_client.api_key_file
    return Path(file) if file else None


def _kernels(cluster: LocalCluster) -> str:
    """Text on the kernel that the expert servers announced, by server if they differ; printed once."""
    servers: dict[str, list[str]] = {}
    for child in cluster.children.values():
        if child.kernel is not None:
            servers.setdefault(child.kernel, []).append(child.name)
    if len(servers) == 1:
        return next(iter(servers))
    return "; ".join(f"{', '.join(names)}: {kernel}" for kernel, names in servers.items())


def _watch(cluster: LocalCluster, interrupt: Interrupt) -> None:
    """Scale, supervise and show the status until a signal: a live table on a terminal, else event lines."""
    from eaas_cli.local.loading import LoadingLines, LoadingPoller
    from eaas_cli.local.scaling import Scaler, ScaleWatch
    from eaas_cli.local.supervision import Supervisor

    def balancer() -> str | None:
        return _balancer_address(cluster)

    scaler = Scaler(cluster, lambda: _started_by_hand(cluster), balancer)
    supervisor = Supervisor(cluster)
    watch = ScaleWatch(balancer, scaler.want, cluster.tls)
    poller = LoadingPoller(cluster)
    try:
        if sys.stdout.isatty():
            _watch_live(cluster, interrupt, supervisor, scaler, poller)
        lines = LoadingLines()
        while True:
            _print(_step(supervisor, scaler))
            _print(lines.take(poller.poll(), time.monotonic()))
            interrupt.wait(_SCALING_S if scaler.busy else _REFRESH_S)
    finally:
        poller.close()
        watch.close()


def _started_by_hand(cluster: LocalCluster) -> set[str]:
    """Ids of live expert servers that are not this launcher's: scaling counts them, but stops none.

    Raises ClusterError: the endpoint does not answer.
    """
    document = fetch_status(cluster.endpoint, _key_file(cluster))
    servers = live_members(document, "expert-server")
    return {server["id"] for server in servers if not cluster.has_started(server["pid"])}


def _balancer_address(cluster: LocalCluster) -> str | None:
    """Find the live balancer's address from the endpoint, because a person may have restarted it.

    None: there is none, or the endpoint does not answer; then draining waits.
    """
    try:
        return balancer_address(fetch_status(cluster.endpoint, _key_file(cluster)))
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
                shown = status_table(fetch_status(cluster.endpoint, _key_file(cluster)))
            except ClusterError as error:
                shown = Text(str(error))
            for line in _step(supervisor, scaler):
                # Lines are not wrapped, because a line may be a command to paste.
                live.console.print(line, soft_wrap=True, markup=False, highlight=False)
            loading = poller.poll()
            live.update(Group(shown, _loads(loading)) if loading else shown, refresh=True)
            interrupt.wait(_SCALING_S if scaler.busy else _REFRESH_S)
