"""One monitor among several: it stands for election in ZooKeeper, and leads when its turn comes.

    connect --> stand in line --> first in line --> take the lead --> serve
       ^             |                                   |              |
       +-- a pause <-+-----------------------------------+--------------+   any trouble ends the session

A turn is one ZooKeeper session. With the session its place in the line goes: a monitor that lost it, for
however short a time, stands at the line's end, and leads on only where there is no other.
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
from eaas.grpc_client import Backoff
from eaas.log import get_logger
from monitor.store.kept import StoreLostError
from monitor.store.zookeeper import TROUBLE, ZooKeeperStore

__all__ = ["Candidate"]

_log = get_logger(__name__)

_CONNECT_S = 10.0
# Of a session.
_LOOK_SHARE = 1 / 6
# An end that is asked for while it connects is noticed after this long.
_NOTICE_S = 0.1


class Candidate:
    """Stands for election from its making until `close`, on a thread of its own.

    Args:
        hosts: ZooKeeper's, "host:port,host:port".
        root: Path of the cluster.
        session_s: Silence that ends a session.
        address: Where this monitor serves.
        lead: Called when the lead is this monitor's, with the store and what to call (from any thread) when
            that is lost. Must not block.
        follow: Called with the leader's address (None while there is none known) when it is another's, and
            at once when it is no longer this monitor's.
        fail: Called once, when this monitor can never lead.

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
        # Set whenever there is something to look at: the line moved, the session is lost, the end.
        self._stir = threading.Event()
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
        """Gives up the place in the line, and the lead. Idempotent."""
        self._over.set()
        self._stir.set()
        self._thread.join()

    def _connect(self) -> KazooClient:
        self._lost = ""
        client = KazooClient(
            self._hosts,
            timeout=self._session_s,
            connection_retry={"max_tries": -1, "delay": 0.1, "max_delay": 1.0},
        )
        connected = client.start_async()
        deadline = time.monotonic() + _CONNECT_S
        while not connected.wait(_NOTICE_S):
            if self._over.is_set() or time.monotonic() >= deadline:
                _end(client)
                raise KazooTimeoutError(f"no answer within {_CONNECT_S:g} s")
        client.add_listener(self._on_state)
        if client.state != KazooState.CONNECTED:
            self._lose("ZooKeeper's session is lost")
        return client

    def _on_state(self, state: str) -> None:
        # Suspended: whether the session lives cannot be known, so it does not.
        if state != KazooState.CONNECTED:
            self._lose("ZooKeeper's session is lost")

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._stir.set()

    def _run(self, client: KazooClient | None) -> None:
        backoff = Backoff()
        while not self._over.is_set():
            try:
                client = client or self._connect()
                self._turn(client, backoff)
            except (*TROUBLE, StoreLostError) as error:
                _log.warning("this monitor stands for election anew: %s", error)
            except StoreError as error:
                self._fail(str(error))
                return
            finally:
                self._follow(None)
                if client is not None:
                    client.remove_listener(self._on_state)
                    _end(client)
                    client = None
            self._over.wait(backoff.next_s())

    def _turn(self, client: KazooClient, backoff: Backoff) -> None:
        """One session, until it is lost or this monitor ends."""
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
        """Whether this monitor is the first in line; tells its owner who is."""
        names = client.get_children_async(self._election, self._on_line).get(
            timeout=self._session_s
        )
        if mine not in names:
            raise StoreLostError("its place in the line is gone")
        first = min(names, key=lambda name: name[-10:])
        if first == mine:
            return True
        try:
            data, _ = client.get_async(f"{self._election}/{first}").get(timeout=self._session_s)
        except NoNodeError:
            self._stir.set()  # It went meanwhile: the line has moved.
        else:
            self._follow(data.decode())
        return False

    def _on_line(self, _event: object) -> None:
        self._stir.set()

    def _interrupted(self) -> bool:
        """Sleeps until there is something to look at, for a while at most; True: the turn is over."""
        self._stir.wait(_LOOK_SHARE * self._session_s)
        self._stir.clear()
        if self._lost:
            raise StoreLostError(self._lost)
        return self._over.is_set()


def _end(client: KazooClient) -> None:
    try:
        client.stop()
        client.close()
    except TROUBLE as error:
        _log.warning("a session of ZooKeeper was not closed: %s", error)
