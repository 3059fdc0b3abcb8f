"""One command per role. `eaas up` runs them on this machine; operators run them on other machines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from eaas.checkpoint.lean_import import import_transformers, without_torch
from eaas.checkpoint.source import is_local, local_directory
from eaas.errors import ConfigError
from eaas.garbage_collection import collector_off
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging, print_line
from eaas.open_files import prepare_open_files
from eaas_cli.commands.options import MODEL_HELP, Join, Load, Model, OptionalModel, with_settings

__all__ = [
    "Id",
    "attention_client",
    "balancer",
    "begin",
    "check_early",
    "expert_server",
    "frontend",
    "leave",
    "member_id",
    "monitor",
    "ready",
]

Id = Annotated[
    str | None,
    typer.Option(
        "--id", help="Unique id in the cluster; keep it over restarts.", show_default=False
    ),
]
# A process that has not ended this many seconds after a signal kills itself.
_EXIT_DEADLINE_S = 5.0


def begin(role: str, offline: bool = True) -> None:
    """Prepare this process for a role: signals, log, limit of open files; by default no Hugging Face Hub."""
    if os.getpid() == 1:
        # The first process of a container gets only signals for which it has a handler.
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    bind_to_launcher()
    configure_logging(role)
    prepare_open_files(f"eaas {role}")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def check_early(model: Path, tokenizer: bool) -> None:
    """Check a role's checkpoint before the imports, which take seconds.

    A process that a fork server started has them already, and the role checks what it opens: there the
    headers of a large model need not be read twice.

    Raises CheckpointError: its files cannot be served.
    """
    if "torch" not in sys.modules:
        from eaas.checkpoint import precheck

        precheck(model, tokenizer=tokenizer)


def ready(address: str) -> None:
    """Tell the log and the launcher that this role serves at an address."""
    print_line(f"ready at {address}", sys.stderr)
    announce(ready=address)


def _serving(address: str, kernel: str) -> None:
    print_line(f"kernel: {kernel}", sys.stderr)
    announce(kernel=kernel)
    ready(address)


def _on_signals(drain: Callable[[], object], drain_s: float, stop: Callable[[], object]) -> None:
    """Drain on SIGTERM or SIGINT, for at most `drain_s`; stop on the second signal.

    A process that does not end kills itself. Both run in threads: the main thread may hold a lock of theirs.
    """

    def begin(action: Callable[[], object], within_s: float) -> None:
        threading.Thread(target=action, daemon=True).start()
        timer = threading.Timer(within_s + _EXIT_DEADLINE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()

    def handle(handler: Callable[[int, object], None]) -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def first(_number: int, _frame: object) -> None:
        handle(lambda _number, _frame: begin(stop, 0.0))
        begin(drain, drain_s)

    handle(first)


def leave() -> NoReturn:
    """End this role's process, which has closed everything. The normal exit would spend a second in torch.

    Every role needs this, because even a monitor that the fork server started has imported torch.
    """
    logging.shutdown()
    for file in sys.stdout, sys.stderr:
        # The disk may be full. The rest of the output is lost.
        with contextlib.suppress(OSError):
            file.flush()
    os._exit(0)


@with_settings(expert_server="host port threads core device kernel quantization slots slot_tokens")
def expert_server(
    load: Load,
    join: Join,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR|ORG/NAME|URL",
            help=f"{MODEL_HELP[:-1]}, or its URL (s3://, gs://, https://, ...), of which this server reads "
            "its experts only.",
            show_default="weights from the other servers",
        ),
    ] = None,
    id: Id = None,
) -> None:
    """Run an expert server: it joins the cluster, loads the experts placed on it, and serves."""
    from eaas.net.grpc_server import check_port
    from eaas.net.listen_policy import guarded_port

    begin("expert-server", offline=not (model or "").lower().startswith("hf://"))
    if model is not None and is_local(model):
        check_early(local_directory(model), tokenizer=False)
    server_id = member_id(id, "expert-server")
    cluster = load()
    loaded = cluster.expert_server
    own = guarded_port(cluster.security, "expert-server", loaded.host)
    check_port(loaded.host, loaded.port)
    with collector_off():
        import_transformers()
        from eaas.telemetry import start_tracing
        from expert_server import ExpertServer

    tracing = start_tracing(cluster.telemetry, "expert-server", server_id)
    server = ExpertServer(model, server_id, join, loaded, _serving, own, tracing)

    _on_signals(server.drain, loaded.drain_timeout_s, server.stop)
    server.run()
    if tracing is not None:
        tracing.close()
    leave()


@with_settings(attention_client="engine_host engine_port metrics_port transport threads")
def attention_client(load: Load, model: Model, join: Join, id: Id = None) -> None:
    """Run an attention client: the model without its experts, as an engine for frontends."""
    from eaas.net.grpc_server import check_port
    from eaas.net.listen_policy import guarded_port

    begin("attention-client")
    check_early(model, tokenizer=True)
    client_id = member_id(id, "attention-client")
    cluster = load()
    loaded = cluster.attention_client
    own = guarded_port(cluster.security, "attention-client", loaded.engine_host)
    check_port(loaded.engine_host, loaded.engine_port)
    stopping, leaving = threading.Event(), threading.Event()

    def serves(address: str) -> None:
        # Before this point a signal ends the process at once, because there are no requests to finish.
        _on_signals(leaving.set, loaded.drain_timeout_s, stopping.set)
        ready(address)

    with collector_off():
        import_transformers()
        from attention_client.main import run
        from eaas.telemetry import start_tracing

    tracing = start_tracing(cluster.telemetry, "attention-client", client_id)
    run(model, client_id, join, loaded, stopping, leaving, serves, own, tracing)
    leave()


@with_settings(frontend="host port api_key_file operator_page served_model_name")
def frontend(
    load: Load,
    join: Join,
    model: OptionalModel = None,
    id: Id = None,
    page_only: Annotated[
        bool,
        typer.Option(
            "--page-only", help="Serve the dashboard alone: vLLM has the API (`eaas vllm`)."
        ),
    ] = False,
) -> None:
    """Run a frontend: an OpenAI-compatible endpoint in front of the cluster's attention clients."""
    from eaas.net.grpc_server import check_port
    from eaas.net.listen_policy import guarded_keys, identity

    begin("frontend")
    if model is not None and not page_only:
        check_early(model, tokenizer=True)
    frontend_id = member_id(id, "frontend")
    cluster = load()
    loaded = cluster.frontend
    if model is None and not (page_only and loaded.served_model_name):
        raise ConfigError("give --model, or --page-only with --served-model-name")
    own = identity(cluster.security, "frontend")
    keys = guarded_keys(cluster.security, loaded.host, loaded.api_key_file)
    check_port(loaded.host, loaded.port)
    stopping, leaving = threading.Event(), threading.Event()

    _on_signals(leaving.set, loaded.drain_timeout_s, stopping.set)
    with collector_off():
        without_torch()
        from frontend.process import FrontendProcess

        if page_only:
            from frontend.page import run_page
        else:
            from eaas.telemetry import start_tracing
            from frontend.families.family import Family
            from frontend.main import run

    process = FrontendProcess(frontend_id, join, loaded, stopping, leaving, ready, own, keys)
    if page_only:
        run_page(process, model)
    elif model is not None:
        if loaded.response_template:
            Family.named(loaded.response_template)
        run(process, model, start_tracing(cluster.telemetry, "frontend", frontend_id))
    leave()


@with_settings(monitor="host port stop_members_on_exit store data_dir zookeeper_hosts")
def monitor(load: Load) -> None:
    """Run the monitor: cluster membership and failure detection."""
    from eaas.net.listen_policy import guarded_port, monitor_secret

    begin("monitor")
    cluster = load()
    loaded = cluster.monitor
    own = guarded_port(cluster.security, "monitor", loaded.host)
    secret = monitor_secret(cluster.security, loaded)
    from monitor import run

    run(loaded, ready, own, secret)
    leave()


@with_settings(balancer="expected_servers redundancy host port")
def balancer(load: Load, join: Join) -> None:
    """Run the balancer: placement of the experts."""
    from eaas.net.listen_policy import guarded_port

    begin("balancer")
    cluster = load()
    loaded = cluster.balancer
    own = guarded_port(cluster.security, "balancer", loaded.host)
    from balancer.main import run

    run(loaded, join, ready, own, cluster.autoscaler.latency_target_ms)
    leave()


def member_id(given: str | None, role: str) -> str:
    """Choose a member's id: the given one, or host and pid. Raises ConfigError for a forbidden one."""
    from eaas.member_ids import check_id

    member_id = f"{role}-{socket.gethostname()}-{os.getpid()}" if given is None else given
    check_id(member_id, "--id")
    return member_id
