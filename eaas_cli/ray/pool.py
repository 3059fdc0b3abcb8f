"""The named actors of a cluster on Ray: creates them, polls them, ends them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from eaas.log import get_logger
from eaas_cli.ray.connection import NAMESPACE
from eaas_cli.ray.role import Report

__all__ = ["ActorPool", "ActorView"]

_log = get_logger(__name__)
# For a call to an actor that runs.
_CALL_S = 10.0


@dataclass(frozen=True)
class ActorView:
    """State of one actor at the last poll.

    Attributes:
        report: Its last report; None if it has not reported since Ray created it or started it again.
        lost: Ray does not start it again: it was killed, or its only node is gone.
    """

    report: Report | None = None
    lost: bool = False


class ActorPool:
    """Named, detached actors in the project's namespace. Not thread-safe.

    Attributes:
        views: State of each actor by name.
    """

    def __init__(self) -> None:
        self.views: dict[str, ActorView] = {}
        self._handles: dict[str, Any] = {}
        # A call to an actor that Ray has not placed yet waits, so each actor has one at a time.
        self._calls: dict[str, Any] = {}

    def adopt(self) -> None:
        """Add the actors that others created."""
        for row in ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == NAMESPACE and row["name"] not in self._handles:
                try:
                    self._add(row["name"], ray.get_actor(row["name"], NAMESPACE))
                except ValueError as error:
                    # It died since.
                    _log.debug("%s", error)

    def create(
        self, name: str, actor: type, argument: object, options: Mapping[str, Any]
    ) -> ActorView:
        """Create an actor that Ray starts again whenever it is lost; does not wait for it."""
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
        self._add(name, handle)
        return self.views[name]

    def poll(self, timeout_s: float) -> None:
        """Ask all actors for their reports, within the time; those that do not answer keep their last one."""
        for name, handle in self._handles.items():
            if name not in self._calls and not self.views[name].lost:
                self._calls[name] = handle.report.remote()
        by_call = {call: name for name, call in self._calls.items()}
        if not by_call:
            return
        ended, _ = ray.wait(list(by_call), num_returns=len(by_call), timeout=timeout_s)
        for call in ended:
            name = by_call[call]
            del self._calls[name]
            try:
                self.views[name] = ActorView(ray.get(call, timeout=_CALL_S))
            except RayError as error:
                self.views[name] = ActorView(lost=self._is_lost(name, error))

    def last_words(self, name: str) -> str:
        """Return the last line of the log of an actor's process, or why it cannot be read."""
        try:
            return str(ray.get(self._handles[name].last_words.remote(), timeout=_CALL_S))
        except RayError as error:
            return str(error).splitlines()[0]

    def stop(self, names: Iterable[str], grace_s: float) -> None:
        """End the processes of these actors, all at once, and then the actors. Idempotent."""
        stopping = {
            name: self._handles[name].stop.remote(grace_s)
            for name in names
            if name in self._handles and self.views[name].report is not None
        }
        deadline = time.monotonic() + grace_s + _CALL_S
        for name, call in stopping.items():
            try:
                ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except (RayError, GetTimeoutError) as error:
                # Killing the actor below kills its process, too.
                _log.warning("%s did not end in time: %s", name, str(error).splitlines()[0])
        for name in list(names):
            self.kill(name)

    def kill(self, name: str) -> None:
        """End an actor, and its process, for good. Idempotent."""
        handle = self._handles.pop(name, None)
        self._calls.pop(name, None)
        self.views.pop(name, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def _add(self, name: str, handle: Any) -> None:
        self._handles[name] = handle
        self.views[name] = ActorView()

    def _is_lost(self, name: str, error: RayError) -> bool:
        try:
            ray.get_actor(name, NAMESPACE)
        except ValueError:
            _log.warning("%s is lost: %s", name, str(error).splitlines()[0])
            return True
        return False
