"""Commands find the endpoint by themselves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eaas import user_files
from eaas.config import load_config
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint
from eaas_cli.local import running_clusters as last_up


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "eaas",))
    monkeypatch.delenv("EAAS_ENDPOINT", raising=False)
    return tmp_path / "eaas"


@pytest.fixture
def endpoint_of() -> Callable[..., str]:
    """The endpoint of a command line."""
    app = typer.Typer()

    @app.command()
    def show(endpoint: Endpoint = DEFAULT_ENDPOINT) -> None:
        typer.echo(endpoint)

    return lambda *arguments: CliRunner().invoke(app, arguments).stdout.strip()


def test_the_endpoint_is_the_given_one_or_that_of_the_last_up(
    endpoint_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endpoint_of() == DEFAULT_ENDPOINT
    with last_up.recorded("http://127.0.0.1:1234", ""):
        assert endpoint_of() == "http://127.0.0.1:1234"
        assert endpoint_of("--endpoint", DEFAULT_ENDPOINT) == DEFAULT_ENDPOINT
        monkeypatch.setenv("EAAS_ENDPOINT", "http://127.0.0.1:77")
        assert endpoint_of() == "http://127.0.0.1:77"
        assert endpoint_of("--endpoint", "http://h:9") == "http://h:9"
        load_config()
        monkeypatch.setenv("EAAS_ENDPOINT", DEFAULT_ENDPOINT)
        assert endpoint_of() == DEFAULT_ENDPOINT
    monkeypatch.delenv("EAAS_ENDPOINT")
    assert endpoint_of() == DEFAULT_ENDPOINT


def write_up(name: str, endpoint: str, started: int, at: float) -> None:
    document = {"endpoint": endpoint, "tls_dir": "/t", "pid": os.getpid()}
    user_files.write(name, document | {"started": started, "serving_at": at})


def test_the_latest_running_up_counts_and_dead_records_go(place: Path) -> None:
    started = last_up.started_at(os.getpid())
    write_up("up-1", "http://127.0.0.1:1", started, 5.0)
    write_up("up-2", "http://127.0.0.1:2", started, 7.0)
    write_up("up-3", "http://127.0.0.1:3", started - 1, 9.0)
    user_files.write("up-4", {"endpoint": "of another version"})
    latest = last_up.latest_up()
    assert latest is not None
    assert latest.endpoint == "http://127.0.0.1:2"
    assert not (place / "up-3.json").exists()
    found = last_up.up_at("http://localhost:1/v1")
    assert found is not None
    assert found.tls_dir == "/t"
    assert last_up.up_at("http://127.0.0.1:3") is None


def test_a_cluster_serves_without_a_directory_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "file" / "eaas",))
    with last_up.recorded("http://127.0.0.1:1", ""):
        assert last_up.latest_up() is None


def test_a_cluster_on_ray_is_found_while_its_endpoint_listens(
    endpoint_of: Callable[..., str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        last_up.record_on_ray(endpoint, "/t")
        assert endpoint_of() == endpoint
        up = last_up.latest_up("ray")
        assert up is not None
        assert (up.on_ray, up.tls_dir) == (True, "/t")
        assert last_up.latest_up("local") is None
    # The Ray cluster ended without `eaas down`.
    assert endpoint_of() == DEFAULT_ENDPOINT
    last_up.forget_on_ray()
    assert not list(user_files.read_all())
