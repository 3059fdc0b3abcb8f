"""`eaas vllm`: vLLM as an attention client of a cluster, until a signal."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eaas.checkpoint.source import local_directory
from eaas.errors import ClusterError
from eaas_cli.commands.options import MODEL_HELP, Join, Load, with_settings
from eaas_cli.commands.roles import Id, begin, check_early, leave, member_id, ready

if TYPE_CHECKING:
    from attention_client.vllm_server.process import VllmProcess
    from eaas.config import ClusterConfig
    from eaas.control_plane.observer import ClusterObserver
    from eaas.net.tls import Identity
    from eaas.types import ModelShape
    from eaas_cli.local.interrupt import Interrupt

__all__ = ["vllm"]

_POLL_S = 0.25
_ASK_S = 1.0
_MONITOR_S = 10.0
# For vLLM's orderly end: running requests have a second of it.
_END_S = 6.0


@with_settings(
    frontend="host port api_key_file served_model_name",
    attention_client="transport",
)
def vllm(
    load: Load,
    model: Annotated[
        Path,
        typer.Argument(
            help=MODEL_HELP,
            parser=local_directory,
            metavar="MODEL",
            show_default=False,
        ),
    ],
    join: Join,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="vLLM's own options, after --.", metavar="[-- OPTION...]"),
    ] = None,
    id: Id = None,
) -> None:
    """Run vLLM as an attention client: vLLM's OpenAI server, with the experts on the cluster's servers."""
    # Before the imports, which take seconds.
    begin("vllm")
    check_early(model, tokenizer=True)
    from attention_client.engines.vllm import contract
    from attention_client.vllm_server import command
    from eaas.net.grpc_server import host_to_tell, join_host_port
    from eaas.net.listen_policy import guarded_keys, identity
    from eaas_cli.local.arguments import check_endpoint_port
    from eaas_cli.local.interrupt import Interrupt

    # It logs each request, and the readiness is asked for four times a second.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    given = options or []
    command.refuse_options(given)
    contract.refuse_unsupported()
    client_id = member_id(id, "vllm")
    cluster = load()
    loaded = cluster.frontend
    own = identity(cluster.security, "attention-client")
    guarded_keys(cluster.security, loaded.host, loaded.api_key_file)
    # vLLM does not tell a port that it chose itself.
    at = check_endpoint_port(loaded.host, loaded.port)
    address = join_host_port(host_to_tell(loaded.host), at)
    with Interrupt() as interrupt:
        observer, is_quantized = _precheck(model, join, own)
        given = command.not_quantized(given) if is_quantized else given
        process = _start(model.resolve(), join, client_id, cluster, address, at, given)
        try:
            _run(process, observer, loaded.host, address, interrupt)
        finally:
            process.end(_END_S)
            observer.deregister(address)
            observer.close()
    leave()


def _precheck(model: Path, join: str, tls: Identity | None) -> tuple[ClusterObserver, bool]:
    """Check the checkpoint and the cluster, before vLLM starts.

    Returns:
        The open connection to the cluster; whether the checkpoint is quantised.

    Raises:
        CheckpointError: The checkpoint cannot be served.
        ClusterError: No monitor answers, or the servers have another checkpoint.
    """
    from eaas.checkpoint import Checkpoint
    from eaas.control_plane.observer import ClusterObserver
    from eaas.membership.monitors import Monitors, ask_members
    from eaas.membership.same_checkpoint import refuse_other_checkpoint

    checkpoint = Checkpoint.open(model)
    shape: ModelShape = checkpoint.shape
    monitors = Monitors(join, tls)
    try:
        members = ask_members(monitors, _MONITOR_S)
    finally:
        monitors.close()
    refuse_other_checkpoint(members, shape, join)
    return ClusterObserver(join, tls), checkpoint.is_quantized


def _start(
    model: Path,
    join: str,
    client_id: str,
    cluster: ClusterConfig,
    address: str,
    port: int,
    options: list[str],
) -> VllmProcess:
    import torch

    from attention_client.engines.vllm.settings import EngineSettings
    from attention_client.vllm_server import command
    from attention_client.vllm_server.process import VllmProcess
    from attention_client.vllm_server.settings import EndpointSettings

    client, served = cluster.attention_client, cluster.frontend
    tls_dir = cluster.security.tls_dir
    tls_dir = str(Path(tls_dir).resolve()) if tls_dir else ""
    engine = EngineSettings(
        monitor=join, id=client_id, endpoint=address, tls_dir=tls_dir, client=client
    )
    endpoint = EndpointSettings(
        monitor=join,
        host=served.host,
        port=port,
        api_key_file=str(Path(served.api_key_file).resolve()) if served.api_key_file else "",
        allowed_hosts=tuple(served.allowed_hosts),
        tls_dir=tls_dir,
    )
    on_cpu = torch.version.cuda is None and torch.version.hip is None
    words = command.words(model, engine, served.model_names(model), served.host, port, options)
    environment = command.environment(
        os.environ, endpoint, options, patience_s=client.patience_s, on_cpu=on_cpu
    )
    return VllmProcess(words, environment)


def _run(
    process: VllmProcess,
    observer: ClusterObserver,
    host: str,
    address: str,
    interrupt: Interrupt,
) -> None:
    """Watch vLLM until a signal; announce once that it serves. Raises ClusterError if vLLM ends."""
    from eaas_cli.local.interrupt import Interrupted

    announced = False
    try:
        while True:
            interrupt.wait(_POLL_S)
            code = process.poll()
            if code is not None:
                raise ClusterError(f"vLLM ended with code {code}: {process.why()}")
            if not announced and _is_healthy(host, address) and observer.serves(address, _ASK_S):
                announced = True
                ready(f"http://{address}")
    except Interrupted:
        return


def _is_healthy(host: str, address: str) -> bool:
    import httpx

    port = address.rpartition(":")[2]
    own = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host.strip("[]"))
    url = f"http://{own}:{port}" if own else f"http://{address}"
    try:
        return httpx.get(f"{url}/health", timeout=_ASK_S, trust_env=False).is_success
    except httpx.HTTPError:
        return False
