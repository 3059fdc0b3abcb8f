"""One command per role. `eaas up` runs them on this machine; operators run them on other machines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from eaas.checkpoint.lean_import import import_transformers
from eaas.checkpoint.source import is_local, local_directory
from eaas.garbage_collection import collector_off
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging, print_line
from eaas.open_files import prepare_open_files
from eaas_cli.commands.options import (
    MODEL_HELP,
    ApiKeyFile,
    ConfigFile,
    Insecure,
    Join,
    Model,
    ServedModelName,
    Tls,
)

__all__ = [
    "ClientTransport",
    "Host",
    "Id",
    "OperatorPage",
    "Port",
    "begin",
    "check_early",
    "leave",
    "member_id",
    "ready",
    "register",
    "security_of",
]

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int | None, typer.Option("--port", help="Port to listen on; 0: a free one.")]
Id = Annotated[
    str | None,
    typer.Option(
        "--id", help="Unique id in the cluster; keep it over restarts.", show_default=False
    ),
]
ClientTransport = Annotated[
    str | None,
    typer.Option("--transport", help="Transport to each server: auto, shm, grpc or nixl."),
]
OperatorPage = Annotated[
    bool | None,
    typer.Option(
        "--operator-page", help="Show buttons on the dashboard that kill and start servers."
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Intra-op threads; 0: by the number of cores.")
]
# A process that has not ended this many seconds after a signal kills itself.
_EXIT_DEADLINE_S = 5.0


def register(app: typer.Typer) -> None:
    """Add the four roles' commands to the `eaas` program."""
    app.command("expert-server")(expert_server)
    app.command("attention-client")(attention_client)
    app.command("monitor")(monitor)
    app.command("balancer")(balancer)


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


def security_of(tls: Path | None, insecure: bool) -> dict[str, Any]:
    """Build section `security` of a role's settings from its options; None leaves the file's value."""
    return {"tls_dir": tls and str(tls), "insecure": insecure or None}


def ready(address: str) -> None:
    """Tell the log and the launcher that this role serves at an address."""
    print_line(f"ready at {address}", sys.stderr)
    announce(ready=address)


def _serving(address: str, kernel: str) -> None:
    print_line(f"kernel: {kernel}", sys.stderr)
    announce(kernel=kernel)
    ready(address)


def _exit_after(after_s: float = 0.0) -> None:
    timer = threading.Timer(after_s + _EXIT_DEADLINE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


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


def expert_server(
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
    host: Host = None,
    port: Port = None,
    threads: Threads = None,
    core: Annotated[
        int | None,
        typer.Option(help="Core that the serving loop is bound to.", show_default="any"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that holds the experts and computes: cpu, cuda or cuda:N.",
            show_default="cpu",
        ),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Expert kernel: auto, native, reference or triton.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Weights in memory: none, int8 or int4.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Slots of the arena, for all clients together.")
    ] = None,
    slot_tokens: Annotated[int | None, typer.Option(help="Tokens that one slot holds.")] = None,
    tls: Tls = None,
    insecure: Insecure = False,
    config: ConfigFile = None,
) -> None:
    """Run an expert server: it joins the cluster, loads the experts placed on it, and serves."""
    from eaas.config import load_config
    from eaas.net.grpc_server import check_port
    from eaas.net.listen_policy import guarded_port

    begin("expert-server", offline=not (model or "").lower().startswith("hf://"))
    if model is not None and is_local(model):
        check_early(local_directory(model), tokenizer=False)
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "threads": threads,
        "core": core,
        "device": device,
        "kernel": kernel,
        "quantization": quantization,
        "slots": slots,
        "slot_tokens": slot_tokens,
    }
    server_id = member_id(id, "expert-server")
    cluster = load_config(config, security=security_of(tls, insecure), expert_server=settings)
    loaded = cluster.expert_server
    own = guarded_port(cluster.security, "expert-server", loaded.host)
    check_port(loaded.host, loaded.port)
    with collector_off():
        import_transformers()
        from eaas.telemetry import start_tracing
        from expert_server import ExpertServer

    tracing = start_tracing(cluster.telemetry, "expert-server", server_id)
    server = ExpertServer(model, server_id, join, loaded, _serving, own, tracing)

    def leave_now(_number: int, _frame: object) -> None:
        server.stop()
        _exit_after()

    def drain(_number: int, _frame: object) -> None:
        # A second signal ends the server without draining.
        signal.signal(signal.SIGTERM, leave_now)
        signal.signal(signal.SIGINT, leave_now)
        # Use a thread, because the main thread may hold a lock that draining needs.
        threading.Thread(target=server.drain, daemon=True).start()
        _exit_after(loaded.drain_timeout_s)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)
    server.run()
    if tracing is not None:
        tracing.close()
    leave()


def attention_client(
    model: Model,
    join: Join,
    id: Id = None,
    host: Host = None,
    port: Port = None,
    transport: ClientTransport = None,
    threads: Threads = None,
    api_key_file: ApiKeyFile = None,
    operator_page: OperatorPage = None,
    served_model_name: ServedModelName = None,
    tls: Tls = None,
    insecure: Insecure = False,
    config: ConfigFile = None,
) -> None:
    """Run an attention client: the model without its experts, behind an OpenAI-compatible endpoint."""
    from eaas.config import load_config
    from eaas.net.grpc_server import check_port
    from eaas.net.listen_policy import guarded_keys, identity

    begin("attention-client")
    check_early(model, tokenizer=True)
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "transport": transport,
        "threads": threads,
        "api_key_file": api_key_file,
        "operator_page": operator_page,
        "served_model_name": served_model_name,
    }
    client_id = member_id(id, "attention-client")
    cluster = load_config(config, security=security_of(tls, insecure), attention_client=settings)
    loaded = cluster.attention_client
    if loaded.response_template:
        from attention_client.serving.families.family import Family

        Family.named(loaded.response_template)
    own = identity(cluster.security, "attention-client")
    keys = guarded_keys(cluster.security, loaded.host, loaded.api_key_file)
    check_port(loaded.host, loaded.port)
    stopping, leaving = threading.Event(), threading.Event()

    # Both set events in a thread, because the main thread may hold an event's lock.
    def leave_now(_number: int, _frame: object) -> None:
        threading.Thread(target=stopping.set, daemon=True).start()
        _exit_after()

    def drain(_number: int, _frame: object) -> None:
        # A second signal ends the process without waiting for running requests.
        signal.signal(signal.SIGTERM, leave_now)
        signal.signal(signal.SIGINT, leave_now)
        threading.Thread(target=leaving.set, daemon=True).start()
        _exit_after(loaded.drain_timeout_s)

    def serves(address: str) -> None:
        # Before this point a signal ends the process at once, because there are no requests to finish.
        signal.signal(signal.SIGTERM, drain)
        signal.signal(signal.SIGINT, drain)
        ready(address)

    with collector_off():
        import_transformers()
        from attention_client.main import run
        from eaas.telemetry import start_tracing

    tracing = start_tracing(cluster.telemetry, "attention-client", client_id)
    run(model, client_id, join, loaded, stopping, leaving, serves, own, keys, tracing)
    leave()


def monitor(
    host: Host = None,
    port: Port = None,
    stop_members_on_exit: Annotated[
        bool | None,
        typer.Option("--stop-members-on-exit", help="Stop every member when the monitor ends."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="embedded: a file in --data-dir; zookeeper: several monitors, one of them the leader."
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for state that survives a restart."),
    ] = None,
    zookeeper_hosts: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="Addresses of the ZooKeeper servers."),
    ] = None,
    tls: Tls = None,
    insecure: Insecure = False,
    config: ConfigFile = None,
) -> None:
    """Run the monitor: cluster membership and failure detection."""
    from eaas.config import load_config
    from eaas.net.listen_policy import guarded_port, monitor_secret

    begin("monitor")
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "stop_members_on_exit": stop_members_on_exit,
        "store": store,
        "data_dir": data_dir,
        "zookeeper_hosts": zookeeper_hosts,
    }
    cluster = load_config(config, security=security_of(tls, insecure), monitor=settings)
    loaded = cluster.monitor
    own = guarded_port(cluster.security, "monitor", loaded.host)
    secret = monitor_secret(cluster.security, loaded)
    from monitor import run

    run(loaded, ready, own, secret)
    leave()


def balancer(
    join: Join,
    servers: Annotated[
        int | None, typer.Option(help="Expert servers to wait for before the first placement.")
    ] = None,
    redundancy: Annotated[int | None, typer.Option(help="Servers that hold each expert.")] = None,
    host: Host = None,
    port: Port = None,
    tls: Tls = None,
    insecure: Insecure = False,
    config: ConfigFile = None,
) -> None:
    """Run the balancer: placement of the experts."""
    from eaas.config import load_config
    from eaas.net.listen_policy import guarded_port

    begin("balancer")
    settings: dict[str, Any] = {
        "host": host,
        "port": port,
        "expected_servers": servers,
        "redundancy": redundancy,
    }
    cluster = load_config(config, security=security_of(tls, insecure), balancer=settings)
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
