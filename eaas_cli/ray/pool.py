"""The named actors of a cluster on Ray: creates them, polls them, ends them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from eaas.errors import EaasError
from eaas.log import get_logger
from eaas_cli.ray.connection import NAMESPACE
from eaas_cli.ray.role import Report

__all__ = ["GRACE_S", "Actor", "ActorPool"]

_log = get_logger(__name__)
GRACE_S = 3.0
"""Seconds from the signal that ends a role's process to SIGKILL."""
# For a call to an actor that runs.
_CALL_S = 10.0


class Actor:
    """A role's actor, with its state at the last poll. That of an expert server is its process for `Scaler`.

    Attributes:
        handle: Ray's handle of it; None once it was ended.
        call: Its running call: one at a time, because a call waits until Ray has placed the actor.
        report: Its last report; None if it has not reported since Ray created it or started it again.
        lost: Ray does not start it again: it was killed, or its only node is gone.
    """

    def __init__(self, name: str, pool: ActorPool) -> None:
        self.name = name
        self._pool = pool
        self.begin(None)

    def begin(self, handle: Any) -> None:
        """Take the handle of an actor that has just been created, or found."""
        self.handle = handle
        self.call: Any = None
        self.report: Report | None = None
        self.lost = False

    @property
    def pid(self) -> int:
        """Process id on its node; 0 while it does not run."""
        return self.report.pid if self.report is not None else 0

    @property
    def address(self) -> str | None:
        """host:port once it serves."""
        return self.report.address if self.report is not None else None

    @property
    def running(self) -> bool:
        """Whether it has not left."""
        left = self.report is not None and self.report.left
        return self._pool.actors.get(self.name) is self and not left

    def read(self) -> None:
        """Raise EaasError if its process failed."""
        if self.report is not None and self.report.failure is not None:
            self.end()
            raise EaasError(self.report.failure)

    def last_words(self) -> str:
        """Return the last line of the log of its process, or why it cannot be read."""
        try:
            return str(ray.get(self.handle.last_words.remote(), timeout=_CALL_S))
        except RayError as error:
            return str(error).splitlines()[0]

    def end(self) -> None:
        """End it without draining."""
        self._pool.stop([self.name])


class ActorPool:
    """Named, detached actors in the project's namespace. Not thread-safe.

    Attributes:
        actors: By name. An actor that is created again stays the same object.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}

    def adopt(self) -> None:
        """Add the actors that others created."""
        for row in ray.util.list_named_actors(all_namespaces=True):
            name = row["name"]
            if row["namespace"] == NAMESPACE and name not in self.actors:
                try:
                    self._begin(name, ray.get_actor(name, NAMESPACE))
                except ValueError as error:
                    # It died since.
                    _log.debug("%s", error)

    def create(self, name: str, actor: type, argument: object, options: Mapping[str, Any]) -> None:
        """Create an actor that Ray starts again whenever it is lost; does not wait for it.

        Another one of that name is ended.
        """
        self._end(name)
        handle = (
            ray.remote(actor)
            .options(
                name=name,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                **options,
            )
            .remote(argument)
        )
        self._begin(name, handle)

    def poll(self, timeout_s: float) -> None:
        """Ask all actors for their reports, within the time; those that do not answer keep their last one."""
        for actor in self.actors.values():
            if actor.call is None and not actor.lost:
                actor.call = actor.handle.report.remote()
        by_call = {a.call: a for a in self.actors.values() if a.call is not None}
        if not by_call:
            return
        ended, _ = ray.wait(list(by_call), num_returns=len(by_call), timeout=timeout_s)
        for call in ended:
            actor = by_call[call]
            actor.call = None
            try:
                actor.report, actor.lost = ray.get(call, timeout=_CALL_S), False
            except RayError as error:
                actor.report, actor.lost = None, self._is_lost(actor.name, error)

    def stop(self, names: Iterable[str], grace_s: float = GRACE_S) -> None:
        """End the processes of these actors, all at once, and then the actors. Idempotent."""
        ending = [self.actors[name] for name in names if name in self.actors]
        calls = {a.name: a.handle.stop.remote(grace_s) for a in ending if a.report is not None}
        deadline = time.monotonic() + grace_s + _CALL_S
        for name, call in calls.items():
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except (RayError, GetTimeoutError) as error:
                # Killing the actor below kills its process, too.
                _log.warning("%s did not end in time: %s", name, str(error).splitlines()[0])
        for actor in ending:
            self.kill(actor.name)

    def kill(self, name: str) -> None:
        """End an actor, and its process, for good. Idempotent."""
        self._end(name)
        self.actors.pop(name, None)

    def _begin(self, name: str, handle: Any) -> None:
        self.actors.setdefault(name, Actor(name, self)).begin(handle)

    def _end(self, name: str) -> None:
        actor = self.actors.get(name)
        if actor is not None and actor.handle is not None:
            ray.kill(actor.handle, no_restart=True)
            actor.handle = None

    def _is_lost(self, name: str, error: RayError) -> bool:
        try:
            ray.get_actor(name, NAMESPACE)
        except ValueError:
            _log.warning("%s is lost: %s", name, str(error).splitlines()[0])
            return True
        return False
