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
from eaas.errors import ConfigError
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint
from eaas_cli.local import running_clusters


@pytest.fixture(autouse=True)
def place(own_records: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EAAS_ENDPOINT", raising=False)
    return own_records


@pytest.fixture
def endpoint_of() -> Callable[..., str]:
    """The endpoint of a command line."""
    app = typer.Typer()

    @app.command()
    def show(endpoint: Endpoint = DEFAULT_ENDPOINT) -> None:
        typer.echo(endpoint)

    return lambda *arguments: CliRunner().invoke(app, arguments).stdout.strip()


def test_the_endpoint_is_the_given_one_or_that_of_the_only_cluster(
    endpoint_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endpoint_of() == DEFAULT_ENDPOINT
    with running_clusters.recorded("http://127.0.0.1:1234", "", "m"):
        assert endpoint_of() == "http://127.0.0.1:1234"
        assert endpoint_of("--endpoint", DEFAULT_ENDPOINT) == DEFAULT_ENDPOINT
        assert endpoint_of("--endpoint", "localhost:9") == "http://localhost:9"
        assert endpoint_of("--endpoint", "https://h/v1") == "https://h/v1"
        monkeypatch.setenv("EAAS_ENDPOINT", "127.0.0.1:77")
        assert endpoint_of() == "http://127.0.0.1:77"
        assert endpoint_of("--endpoint", "http://h:9") == "http://h:9"
        load_config()
        monkeypatch.setenv("EAAS_ENDPOINT", DEFAULT_ENDPOINT)
        assert endpoint_of() == DEFAULT_ENDPOINT
    monkeypatch.delenv("EAAS_ENDPOINT")
    assert endpoint_of() == DEFAULT_ENDPOINT


def write_up(name: str, endpoint: str, started: int, at: float) -> None:
    document = {"endpoint": endpoint, "tls_dir": "/t", "pid": os.getpid(), "model": "m"}
    user_files.write(name, document | {"started": started, "serving_at": at})


def test_several_clusters_are_named_and_none_is_chosen(place: Path) -> None:
    started = running_clusters.started_at(os.getpid())
    write_up("up-1", "http://127.0.0.1:1", started, 7.0)
    write_up("up-2", "http://127.0.0.1:2", started, 5.0)
    command = typer.Typer()

    @command.command()
    def show(endpoint: Endpoint = DEFAULT_ENDPOINT, join: str | None = None) -> None:
        typer.echo(endpoint)

    refused = CliRunner().invoke(command, [])
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception) == (
        "2 clusters of yours run: http://127.0.0.1:2 (m), http://127.0.0.1:1 (m): "
        "name one with --endpoint or EAAS_ENDPOINT"
    )
    for words in (["--endpoint", "http://127.0.0.1:2"], ["--join", "h:1"]):
        assert CliRunner().invoke(command, words).exit_code == 0


def test_running_clusters_count_and_dead_records_go(place: Path) -> None:
    started = running_clusters.started_at(os.getpid())
    write_up("up-1", "http://127.0.0.1:1", started, 5.0)
    write_up("up-2", "http://127.0.0.1:2", started, 7.0)
    write_up("up-3", "http://127.0.0.1:3", started - 1, 9.0)
    user_files.write("up-4", {"endpoint": "of another version"})
    endpoints = [up.endpoint for up in running_clusters.running()]
    assert endpoints == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert not (place / "up-3.json").exists()
    found = running_clusters.up_at("http://localhost:1/v1")
    assert found is not None
    assert found.tls_dir == "/t"
    assert running_clusters.up_at("http://127.0.0.1:3") is None


def test_a_cluster_serves_without_a_directory_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "file" / "eaas",))
    with running_clusters.recorded("http://127.0.0.1:1", "", "m"):
        assert running_clusters.chosen() is None


def test_a_cluster_on_ray_is_found_while_its_endpoint_listens(
    endpoint_of: Callable[..., str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        running_clusters.record_on_ray(endpoint, "/t", "m")
        assert endpoint_of() == endpoint
        up = running_clusters.chosen("ray")
        assert up is not None
        assert (up.on_ray, up.tls_dir) == (True, "/t")
        assert running_clusters.chosen("local") is None
    # The Ray cluster ended without `eaas down`.
    assert endpoint_of() == DEFAULT_ENDPOINT
    running_clusters.forget_on_ray()
    assert not list(user_files.read_all())
