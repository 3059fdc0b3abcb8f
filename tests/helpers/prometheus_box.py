"""A real Prometheus on this machine."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

__all__ = ["PrometheusBox", "missing"]

_START_S = 60.0


def missing() -> str | None:
    """Why promtool and Prometheus cannot run here; None if they can."""
    if shutil.which("promtool") is None or shutil.which("prometheus") is None:
        return "needs Prometheus: apt-get install prometheus"
    return None


class PrometheusBox:
    """A Prometheus server that runs until `stop`.

    Args:
        directory: A new directory for its data.
        config: Its prometheus.yml.
    """

    def __init__(self, directory: Path, config: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        directory.mkdir()
        self._log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False
        )
        try:
            self._wait(directory / "log")
        except BaseException:
            self.stop()
            raise

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if self._http.get("/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)

    def firing(self) -> dict[str, dict[str, str]]:
        """Labels of the firing alerts, by name; the first if several have one name."""
        found: dict[str, dict[str, str]] = {}
        for alert in self._get("/api/v1/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], alert["labels"])
        return found

    def value(self, query: str) -> float | None:
        """Value of the first series of an instant query, or None."""
        response = self._http.get("/api/v1/query", params={"query": query})
        result = response.raise_for_status().json()["data"]["result"]
        return float(result[0]["value"][1]) if result else None

    def _get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()["data"]

    def stop(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()
        self._log.close()
