"""Connection of a command to the Ray cluster of its machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from eaas.errors import ClusterError, ConfigError

__all__ = ["NAMESPACE", "connected", "refuse_missing_ray"]

NAMESPACE = "eaas"
"""Namespace of this project's actors in a Ray cluster."""

_ADDRESS_VARIABLE = "RAY_ADDRESS"
# `ray start` writes the address of this machine's cluster there, and may leave it behind.
_CURRENT = Path("/tmp/ray/ray_current_cluster")
_CONNECT_S = 5.0


def refuse_missing_ray() -> None:
    """Raise ConfigError if the extra `ray` is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--on ray needs Ray: pip install 'expert-as-a-service[ray]', on every node"
        )


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect to a running Ray cluster for the block: that of RAY_ADDRESS, else that of this machine.

    Raises:
        ConfigError: Ray is not installed, or RAY_ADDRESS names a Ray Client server.
        ClusterError: No Ray cluster answers.
    """
    refuse_missing_ray()
    address = os.environ.get(_ADDRESS_VARIABLE, "auto")
    if address.startswith("ray://"):
        raise ConfigError(
            f"{_ADDRESS_VARIABLE}={address}: this command must run on a node of the cluster: submit it "
            "with `ray job submit -- eaas up --on ray ...`"
        )
    import ray

    try:
        _refuse_silence(address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level="ERROR",
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address}: run `ray start --head` on this machine, `ray start --address "
            f"HOST:PORT` to join one, or set {_ADDRESS_VARIABLE} ({str(error).splitlines()[0]})"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Raise OSError or ValueError if nothing listens at the address: Ray would wait for minutes."""
    if address == "auto":
        if not _CURRENT.is_file():
            return
        address = _CURRENT.read_text().strip()
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
