"""In a thread of `eaas chaos run`: polls the cluster's status, so that fault injection never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from eaas.errors import ClusterError
from eaas_cli.endpoint import fetch_status

__all__ = ["Watch"]

_POLL_S = 0.2
_JOIN_S = 10.0


class Watch:
    """Polls the status document of a chaos run's cluster, from its own thread.

    Args:
        wanted: Returns name and pid of the expert servers and attention clients that should serve.

    Attributes:
        missing: Text on what the last poll found missing, for the report.
    """

    def __init__(
        self, endpoint: str, redundancy: int, wanted: Callable[[], dict[str, int]]
    ) -> None:
        self._endpoint = endpoint
        self._redundancy = redundancy
        self._wanted = wanted
        self._whole_at = -1.0
        self.missing = "nobody answered"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def whole_since(self, moment: float) -> bool:
        """Whether a poll after that moment found the cluster whole.

        Whole: the last process of every server and client, a monitor and a balancer serve, and every expert
        has all its replicas. The next fault of a lane waits for this.
        """
        return self._whole_at >= moment

    def close(self) -> None:
        """End the polling thread; `whole_since` then learns nothing new. Idempotent."""
        self._over.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            asked_at, wanted = time.monotonic(), self._wanted()
            try:
                document = fetch_status(self._endpoint)
            except ClusterError as error:
                self.missing = str(error)
                continue
            serving = {
                m["id"]: m["pid"]
                for m in document["members"]
                if m["role"] in ("expert-server", "attention-client") and m["state"] == "SERVING"
            }
            others = {
                m["role"]
                for m in document["members"]
                if m["role"] in ("monitor", "balancer") and m["state"] == "SERVING"
            }
            replicas = document["coverage"]["min_replicas"]
            if serving == wanted and len(others) == 2 and replicas >= self._redundancy:
                self._whole_at = asked_at
            self.missing = (
                f"not whole again: {len(serving)} of {len(wanted)} servers and clients serve, "
                f"{' and '.join(sorted(others)) or 'neither monitor nor balancer'} too; "
                f"at least {replicas} replicas"
            )
