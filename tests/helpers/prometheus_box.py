"""A real Prometheus on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx

from service_box import ServiceBox, free_port

__all__ = ["PrometheusBox", "missing"]


def missing() -> str | None:
    """Why promtool and Prometheus cannot run here; None if they can."""
    if shutil.which("promtool") is None or shutil.which("prometheus") is None:
        return "needs Prometheus: apt-get install prometheus"
    return None


class PrometheusBox(ServiceBox):
    """A Prometheus server that runs until `stop`.

    Args:
        directory: A new directory for its data.
        config: Its prometheus.yml.
    """

    def __init__(self, directory: Path, config: Path) -> None:
        port = free_port()
        directory.mkdir()
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=10.0, trust_env=False
        )
        super().__init__(
            directory / "log",
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        )

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def firing(self) -> dict[str, dict[str, str]]:
        """Labels of the firing alerts, by name; the first if several have one name."""
        found: dict[str, dict[str, str]] = {}
        for alert in self._get("/api/v1/alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], alert["labels"])
        return found

    def value(self, query: str) -> float | None:
        """Value of the first series of an instant query, or None."""
        result = self._get("/api/v1/query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def _get(self, path: str, **parameters: str) -> Any:
        return self._http.get(path, params=parameters).raise_for_status().json()["data"]

    def stop(self) -> None:
        self._http.close()
        super().stop()
