"""`eaas up --devices`: one server on each GPU, and one clear error for what contradicts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eaas.config import load_config
from eaas.errors import ClusterError, ConfigError
from eaas_cli.commands import app
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster, devices
from eaas_cli.local.devices import count_gpus, parse_devices, server_count


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "x"
    write_demo_model(path, "qwen3_moe", layers=1, hidden=64, experts=2, top_k=1, vocab=262)
    return path


def test_gpus_are_named_or_counted() -> None:
    assert parse_devices("cuda:0") == ("cuda:0",)
    assert parse_devices("cuda:3, cuda:1") == ("cuda:3", "cuda:1")
    assert parse_devices("all", lambda: 2) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    "text", ["", "cuda", "cuda:", "cpu", "cuda:0,", "0,1", "cuda:01", "cuda:-1"]
)
def test_what_is_no_gpu_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no GPU: give cuda:0,cuda:1 or all"):
        parse_devices(text)


def test_a_gpu_has_one_server_and_all_needs_one() -> None:
    with pytest.raises(ConfigError, match="name cuda:1 once"):
        parse_devices("cuda:1,cuda:0,cuda:1")
    with pytest.raises(ConfigError, match="--devices all: torch sees no GPU"):
        parse_devices("all", lambda: 0)


def test_the_number_of_servers_follows() -> None:
    assert server_count(None, ()) == 3
    assert server_count(5, ()) == 5
    assert server_count(None, ("cuda:0", "cuda:1")) == 2
    assert server_count(1, ("cuda:0",)) == 1
    with pytest.raises(ConfigError, match="--servers 3: --devices names 2 GPUs"):
        server_count(3, ("cuda:0", "cuda:1"))


def test_torch_counts_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(text: str) -> None:
        done = subprocess.CompletedProcess([], 0, text, "")
        monkeypatch.setattr(devices.subprocess, "run", lambda *_args, **_options: done)

    answer("4\n")
    assert count_gpus() == 4
    answer("")
    with pytest.raises(ConfigError, match="name them: --devices cuda:0,cuda:1"):
        count_gpus()


def test_each_server_gets_its_gpu_and_there_are_no_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Child:
        def __init__(self, name: str, arguments: tuple[str, ...], *_: object, **__: object) -> None:
            self.name, self.arguments, self.pid, self.running = name, arguments, 1, True
            started.append(self)

    monkeypatch.setattr("eaas_cli.local.cluster.ChildProcess", Child)
    cluster = LocalCluster(model, servers=2, clients=0, devices=("cuda:1", "cuda:0"))
    for _ in range(2):
        cluster.add_server()
    given = [child.arguments[child.arguments.index("--device") + 1] for child in started]
    assert given == ["cuda:1", "cuda:0"]
    with pytest.raises(ClusterError, match=r"expert-server-2 has no GPU: .* than cuda:1,cuda:0"):
        cluster.add_server()


def test_one_gpu_is_not_shared_by_all_servers(model: Path) -> None:
    config = load_config(expert_server={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"device cuda: all servers .* --devices all"):
        LocalCluster(model, config=config)
    cluster = LocalCluster(model, servers=1, redundancy=1, config=config, clients=0)
    assert cluster.servers == 1


@pytest.mark.parametrize("device", ["cuda:00", "cuda:01", "cuda:1000"])
def test_a_setting_takes_the_numbers_of_the_option(device: str) -> None:
    with pytest.raises(ConfigError, match=r"expert_server.device"):
        load_config(expert_server={"device": device})


def test_on_ray_a_gpu_has_no_number(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("expert_server:\n  device: cuda:1\n")
    words = ["up", "--on", "ray", "--model", str(model), "--config", str(path)]
    done = CliRunner().invoke(app, words)
    assert "device cuda:1: Ray chooses each server's GPU: give cuda" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "cuda:0,cuda:1", "--servers", "3"], "leave --servers out"),
        (
            ["--devices", "cuda:0"],
            "there are 1: give --redundancy 1, or more --devices",
        ),
        # Before GPUs are counted, which takes seconds.
        (["--devices", "all", "--on", "ray"], "on Ray set expert_server.device: cuda"),
        (["--devices", "gpu"], "'gpu' is no GPU"),
        (["--devices", "cuda:0", "--on", "ray"], "on Ray set expert_server.device: cuda"),
    ],
)
def test_a_wrong_option_ends_the_command_before_it_starts(
    model: Path, words: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["up", "--model", str(model), *words])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
