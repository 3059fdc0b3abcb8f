"""Leader election in ZooKeeper: one of several monitors leads, the others stand by.

    connect --> enqueue --> first in the queue --> take the lead --> serve
       ^             |                                   |              |
       +-- a pause <-+-----------------------------------+--------------+   any trouble ends the session

A ZooKeeper session holds one place in the queue. A monitor that loses its session, even briefly, loses its
place. It rejoins at the end of the queue, and leads again only when no other monitor is before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from eaas.errors import ClusterError, StoreError
from eaas.log import get_logger
from eaas.net.grpc_client import Backoff
from monitor.store.kept import StoreLostError
from monitor.store.zookeeper import TROUBLE, ZooKeeperStore

__all__ = ["Candidate"]

_log = get_logger(__name__)

_CONNECT_SESSIONS = 2.5
# Interval between two checks, as a share of the session timeout.
_CHECK_SHARE = 1 / 6
# Longest time until a request to end is noticed while connecting.
_NOTICE_S = 0.1


class Candidate:
    """Takes part in the monitors' election from its creation until `close`, on a separate thread.

    Args:
        hosts: ZooKeeper's servers, "host:port,host:port".
        root: Path of the cluster in ZooKeeper.
        session_s: Session timeout.
        address: host:port of this monitor, for the members.
        lead: Called when this monitor takes the lead, with the store and a function to call (from any thread)
            when the lead is lost. Must not block.
        follow: Called with the leader's address (None while unknown) when another monitor leads, and at once
            when this monitor loses the lead.
        fail: Called once, with the reason, when this monitor can no longer lead.

    Raises:
        ClusterError: ZooKeeper cannot be reached.
    """

    def __init__(
        self,
        hosts: str,
        root: str,
        session_s: float,
        address: str,
        *,
        lead: Callable[[ZooKeeperStore, Callable[[str], None]], None],
        follow: Callable[[str | None], None],
        fail: Callable[[str], None],
    ) -> None:
        self._hosts = hosts
        self._election = f"{root}/monitor/election"
        self._root = root
        self._session_s = session_s
        self._address = address
        self._lead, self._follow, self._fail = lead, follow, fail
        self._over = threading.Event()
        # Set when the queue moves, the session is lost, or the candidate ends.
        self._wake = threading.Event()
        self._lost = ""
        try:
            client = self._connect()
        except TROUBLE as error:
            raise ClusterError(
                f"cannot reach ZooKeeper at {hosts}: {error}; check monitor.zookeeper_hosts and that it runs"
            ) from error
        self._thread = threading.Thread(
            target=self._run, args=(client,), name="monitor-candidate", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Give up place in the queue and lead, because this monitor ends, and end the thread. Idempotent."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _connect(self) -> KazooClient:
        self._lost = ""
        client = KazooClient(
            self._hosts,
            timeout=self._session_s,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": 1.0},
        )
        connected = client.start_async()
        patience_s = _CONNECT_SESSIONS * self._session_s
        deadline = time.monotonic() + patience_s
        while not connected.wait(_NOTICE_S):
            if self._over.is_set() or time.monotonic() >= deadline:
                _end(client)
                raise KazooTimeoutError(f"no answer within {patience_s:g} s")
        client.add_listener(self._on_state)
        if client.state != KazooState.CONNECTED:
            self._lose("ZooKeeper's session is lost")
        return client

    def _on_state(self, state: str) -> None:
        # While suspended, the session may be lost, so it counts as lost.
        if state != KazooState.CONNECTED:
            self._lose("ZooKeeper's session is lost")

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._wake.set()

    def _run(self, client: KazooClient | None) -> None:
        try:
            self._campaign(client)
        except StoreError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 (logged, and reported: it would never lead again)
            _log.exception("this monitor leaves the election")
            self._fail(f"the election failed: {error!r}")

    def _campaign(self, client: KazooClient | None) -> None:
        backoff = Backoff()
        while not self._over.is_set():
            try:
                client = client or self._connect()
                self._run_session(client, backoff)
            except (*TROUBLE, StoreLostError) as error:
                _log.warning("this monitor rejoins the election: %s", error)
            finally:
                try:
                    self._follow(None)
                finally:
                    # Ending the session removes the place in the queue, even if other steps fail.
                    if client is not None:
                        client.remove_listener(self._on_state)
                        _end(client)
                        client = None
            self._over.wait(backoff.next_s())

    def _run_session(self, client: KazooClient, backoff: Backoff) -> None:
        """In one ZooKeeper session, wait for the lead and hold it, until the session or this monitor ends."""
        created = client.create_async(
            f"{self._election}/c-",
            self._address.encode(),
            ephemeral=True,
            sequence=True,
            makepath=True,
        )
        node: str = created.get(timeout=self._session_s).rpartition("/")[2]
        while not self._lead_is(client, node):
            if self._interrupted():
                return
        store = ZooKeeperStore(client, self._root, self._session_s)
        _log.info("this monitor leads (epoch %d)", store.epoch)
        backoff.reset()
        self._lead(store, self._lose)
        while not self._interrupted():
            store.confirm()

    def _lead_is(self, client: KazooClient, mine: str) -> bool:
        """Whether this monitor is first in the queue; if not, report the leader to `follow`."""
        names = client.get_children_async(self._election, self._on_queue_change).get(
            timeout=self._session_s
        )
        if mine not in names:
            raise StoreLostError("its place in the queue is gone")
        first = min(names, key=lambda name: name[-10:])
        if first == mine:
            return True
        try:
            data, _ = client.get_async(f"{self._election}/{first}").get(timeout=self._session_s)
        except NoNodeError:
            self._wake.set()  # The first one left since the queue was read.
        else:
            self._follow(data.decode())
        return False

    def _on_queue_change(self, _event: object) -> None:
        self._wake.set()

    def _interrupted(self) -> bool:
        """Sleep until there is something to check, or for a while; return True if this monitor ends."""
        self._wake.wait(_CHECK_SHARE * self._session_s)
        self._wake.clear()
        if self._lost:
            raise StoreLostError(self._lost)
        return self._over.is_set()


def _end(client: KazooClient) -> None:
    try:
        client.stop()
        client.close()
    except TROUBLE as error:
        _log.warning("a session of ZooKeeper was not closed: %s", error)
