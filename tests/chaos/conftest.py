"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chaos_world import ChaosWorld
from eaas_cli.chaos.cluster import free_port as find_free_port
from eaas_cli.chaos.network import Namespace, why_no_namespace
from eaas_cli.local.fork_server import ForkServer


@pytest.fixture
def chaos(
    checkpoint: Callable[..., Path], tmp_path: Path, fork_server: ForkServer
) -> Iterator[ChaosWorld]:
    """Clusters of faulty servers and their clients."""
    with ExitStack() as stack:
        yield ChaosWorld(stack, checkpoint(), tmp_path, fork_server)


@pytest.fixture
def free_port() -> int:
    """A free port below the kernel's ephemeral range, so that nothing else is given it meanwhile."""
    return find_free_port("127.0.0.1")


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    """A network namespace; the test is skipped if none can be made."""
    if why := why_no_namespace():
        pytest.skip(why)
    namespace = Namespace()
    yield namespace
    namespace.remove()
