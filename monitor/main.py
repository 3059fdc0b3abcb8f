"""The monitor process: starts the store, the election, the gRPC server and the failure detector."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaas.config import MonitorConfig
from eaas.errors import ConfigError, EaasError, StoreError
from eaas.log import get_logger
from eaas.net.grpc_aio_server import serve_aio
from eaas.net.probes import ProbeServer
from eaas.net.tls import Identity
from eaas.shutdown import Shutdown
from eaas.types import Member, MemberState, Role
from monitor.leader_proxy import SERVICE, LeaderProxy
from monitor.service import MonitorService
from monitor.store import Store
from monitor.store.embedded import EmbeddedStore

if TYPE_CHECKING:
    from monitor.store.candidate import Candidate

__all__ = ["Monitor", "run", "spare_long_lived"]

_log = get_logger(__name__)

# Each member has two open calls (heartbeat, watch).
_MAX_CALLS = 40_000
# Limit of a request. A client's report on ten thousand servers fits, and so does a record of 512 KiB.
_MESSAGE_BYTES = 4 << 20
# Streams per connection, enough for a program that simulates many members.
_STREAMS = 4096
_LINGER_S = 1.0
_GRACE_S = 0.2
# The loop ticks several times a second; after this long without a tick the process is not alive.
_STUCK_LEASES = 5
# The generation of the garbage collector that objects leave for the oldest one.
_MIDDLE = 1


class Monitor:
    """A monitor that serves from its creation until `stop`. With ZooKeeper it may stand by.

    Args:
        config: The monitor's settings.
        on_failure: Called when the monitor cannot continue: its store failed, or it has a bug.
        tls: This process's certificate; None: plain text.
        secret: Token that calls must carry; None: none.
        on_tick: Called in the loop at each tick of the failure detector, several times a second.

    Raises:
        PortInUseError: Another process uses the port.
        ConfigError: The host is not one of this machine, the lease is too short for heartbeat_s, or kazoo is
            not installed.
        StoreError: The stored state cannot be read, or another monitor uses it.
        ClusterError: ZooKeeper cannot be reached.
    """

    def __init__(
        self,
        config: MonitorConfig,
        on_failure: Callable[[str], None] = _log.error,
        tls: Identity | None = None,
        secret: str | None = None,
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        if config.heartbeat_s >= config.lease_s / 2:
            raise ConfigError(
                f"monitor.heartbeat_s {config.heartbeat_s:g} must be below half of monitor.lease_s "
                f"{config.lease_s:g}: one late heartbeat must not make a member suspect"
            )
        self._config = config
        self._on_failure = on_failure
        self._on_tick = on_tick
        embedded = config.store == "embedded"
        self._store = EmbeddedStore(Path(config.data_dir)) if embedded and config.data_dir else None
        self._leader_proxy = LeaderProxy()
        self._candidate: Candidate | None = None
        try:
            self._server = serve_aio(
                SERVICE,
                self._leader_proxy.add_to,
                config.host,
                config.port,
                _MAX_CALLS,
                _MESSAGE_BYTES,
                _STREAMS,
                tls and tls.server_credentials(),
                secret,
            )
        except EaasError:
            self._close_store()
            raise
        self.address = self._server.address
        if embedded:
            self._lead(self._store, on_failure)
        else:
            try:
                self._candidate = self._stand_for_election()
            except EaasError:
                self._server.stop(0)
                raise
        # Run in the loop that receives the heartbeats, so that blocking the loop counts as a pause of the
        # monitor.
        self._ticked_at = time.monotonic()
        self._ticker = asyncio.run_coroutine_threadsafe(self._tick(), self._server.loop)
        self._probes: ProbeServer | None = None
        if config.health_port:
            try:
                self._probes = ProbeServer(
                    config.host, config.health_port, lambda: self._server.serving, self._is_alive
                )
            except EaasError:
                self.stop()
                raise

    @property
    def leads(self) -> bool:
        """Whether this monitor serves its members; another one may, if they share a store."""
        return self._leader_proxy.service is not None

    def _stand_for_election(self) -> Candidate:
        try:
            from monitor.store.candidate import Candidate
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "kazoo":
                raise
            raise ConfigError(
                "monitor.store zookeeper needs kazoo: pip install 'expert-as-a-service[zookeeper]'"
            ) from error
        config = self._config
        return Candidate(
            config.zookeeper_hosts,
            config.zookeeper_root,
            config.zookeeper_session_s,
            self.address,
            lead=self._lead,
            follow=self._follow,
            fail=self._on_failure,
        )

    def _lead(self, store: Store | None, on_lost: Callable[[str], None]) -> None:
        service = MonitorService(
            self._config.lease_s,
            self._config.heartbeat_s,
            self._server.loop,
            store=store,
            on_lost=on_lost,
        )
        service.register_self(
            Member(
                id="monitor",
                role=Role.MONITOR,
                pid=os.getpid(),
                host=socket.gethostname(),
                address=self.address,
                state=MemberState.SERVING,
            )
        )
        self._leader_proxy.lead(service)
        self._server.set_serving(True)

    def _follow(self, leader: str | None) -> None:
        self._server.set_serving(False)
        self._leader_proxy.follow(leader)

    async def _tick(self) -> None:
        try:
            while True:
                self._ticked_at = time.monotonic()
                service = self._leader_proxy.service
                self._on_tick()
                await asyncio.sleep(service.tick() if service else self._config.lease_s / 8)
        except Exception as error:  # noqa: BLE001 (logged, and the end: leases would never end)
            _log.exception("the monitor's tick failed: no lease would end")
            self._on_failure(f"the monitor failed: {error!r}")

    def _is_alive(self) -> bool:
        return time.monotonic() - self._ticked_at < _STUCK_LEASES * self._config.lease_s

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()

    def stop(self) -> None:
        """End this monitor; with `stop_members_on_exit`, first tell all members to end (waits up to 1 s)."""
        if self._config.stop_members_on_exit and (service := self._leader_proxy.service):
            service.announce_stop(_LINGER_S)
        self._ticker.cancel()
        if self._probes is not None:
            self._probes.close()
        if self._candidate is not None:
            self._candidate.close()
        self._follow(None)
        self._server.stop(_GRACE_S)
        self._close_store()


def spare_long_lived() -> None:
    """Let no later collection of this process look at an object again that has survived two. Called at start.

    The streams of ten thousand members are a million objects, which a full collection scans for half a
    second. Reference counts still free them. gRPC's streams leave cycles only at their start, which the first
    collections find.
    """
    # Later versions of Python collect old objects in small steps.
    if sys.version_info < (3, 14):
        gc.callbacks.append(_on_collection)


def _collect_young() -> None:
    """Collect the objects that are not spared yet; at each tick, so that few of them gather.

    Python starts a collection by the number of new objects less the freed ones, old ones included. While
    members come and go, 100,000 new objects gather, and the next collection takes a tenth of a second.
    """
    gc.collect(_MIDDLE)


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _MIDDLE:
        gc.freeze()


def run(
    config: MonitorConfig,
    ready: Callable[[str], None],
    tls: Identity | None = None,
    secret: str | None = None,
) -> None:
    """Run the monitor until SIGTERM or SIGINT (in the main thread).

    A signal before it serves ends the process at once.

    Args:
        config: The monitor's settings.
        ready: Called with host:port once the monitor serves or stands by.
        tls: This process's certificate; None: plain text.
        secret: Token that calls must carry; None: none.

    Raises:
        EaasError: See `Monitor`.
        StoreError: The store or one of the monitor's threads failed; the message names the cause.
    """
    # Each member is one connection, and the usual limit of open files is a thousand.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    spare_long_lived()
    failures: list[str] = []
    shutdown = Shutdown()

    def on_failure(what: str) -> None:
        failures.append(what)
        shutdown.request("the monitor cannot continue")

    monitor = Monitor(config, on_failure, tls, secret, _collect_young)
    with shutdown:
        try:
            ready(monitor.address)
            _log.info("monitor ends: %s", shutdown.wait())
        finally:
            monitor.stop()
    if failures:
        raise StoreError(failures[0])
