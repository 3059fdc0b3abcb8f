"""A vLLM worker's metrics: served on a Unix socket by the worker, read by the process with the endpoint.

The socket is in this user's private directory (`eaas.user_files`) and bears the worker's pid. Members of the
cluster tell their pids, so that the endpoint finds the workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import socketserver
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import MetricsHandler
from prometheus_client.parser import text_string_to_metric_families

from eaas import user_files
from eaas.log import get_logger
from eaas.net.server_records import started_at

__all__ = ["merge", "prune", "read_page", "serve_page"]

_log = get_logger(__name__)
_NAME = re.compile(r"vllm-worker-(\d+)\.sock")


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a reader that left."""


def serve_page(registry: CollectorRegistry) -> None:
    """Serve the Prometheus page of this process from a daemon thread, until the process ends.

    Without a private directory there is no page, and a log line says so.
    """
    place = user_files.place()
    if place is None:
        _log.warning("no private directory for a socket: /metrics shows nothing of this worker")
        return
    prune()
    path = _path(place, os.getpid())
    path.unlink(missing_ok=True)
    try:
        with _short(path) as short:
            server = _Server(short, MetricsHandler.factory(registry))
    except OSError as error:
        _log.warning("/metrics shows nothing of this worker: %s: %s", path, error)
        return
    path.chmod(0o600)
    threading.Thread(target=server.serve_forever, name="metrics-page", daemon=True).start()
    multiprocessing.util.Finalize(None, path.unlink, kwargs={"missing_ok": True}, exitpriority=90)


def read_page(pid: int, timeout_s: float) -> str:
    """Read a worker's page; empty if the process has none."""
    for place in user_files.candidates():
        path = _path(place, pid)
        try:
            # As for all of the user's files: nobody else may have made the directory.
            status = place.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not path.is_socket():
                continue
            with (
                _short(path) as short,
                httpx.Client(
                    transport=httpx.HTTPTransport(uds=short, trust_env=False), timeout=timeout_s
                ) as http,
            ):
                return http.get("http://worker/metrics").raise_for_status().text
        except (OSError, httpx.HTTPError) as error:
            _log.debug("%s does not answer: %s", path, error)
    return ""


def merge(pages: Iterable[tuple[str, str]]) -> str:
    """Join the pages of several workers, in which the same metrics appear: a label names the worker.

    Args:
        pages: Member id and page of each worker. The page of a single worker is unchanged.
    """
    found = [(member, page) for member, page in pages if page]
    if len(found) < 2:
        return found[0][1] if found else ""
    merged: dict[str, Metric] = {}
    for member, page in found:
        for family in text_string_to_metric_families(page):
            metric = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, "client": member}, sample.value)

    class Merged(CollectorRegistry):
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    return generate_latest(Merged()).decode()


def prune() -> None:
    """Remove the sockets of workers that have ended."""
    for place in user_files.candidates():
        with contextlib.suppress(OSError):
            for path in place.iterdir():
                found = _NAME.fullmatch(path.name)
                if found is not None and not started_at(int(found[1])):
                    path.unlink(missing_ok=True)


def _path(place: Path, pid: int) -> Path:
    return place / f"vllm-worker-{pid}.sock"


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield another name of the path, because the address of a socket has at most 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
